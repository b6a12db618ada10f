"""The configuration of a training: its settings, and how they are read and written as TOML.

There is one class per table of the file; the settings are checked on construction. `read_config`
reads a file over the defaults of its task (`PRESETS`), and `config_text` writes one.
"""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast, final

import msgspec

from dpftrl._internal.checks import as_float, positive_number, whole_number
from dpftrl._internal.storage import read_file
from dpftrl.adaptive_clipping import ClipNorm, check_clip_norm
from dpftrl.errors import InvalidInput
from dpftrl.federated import Optimizer, Sgd
from dpftrl.federated.start_model import check_label
from dpftrl.simulation._setting_names import set_option, setting_kinds, similar_settings


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of the configuration file."""

    def _check_whole(self, *names: str, at_least: int = 1) -> None:
        for name in names:
            if (value := getattr(self, name)) is not None:
                whole_number(name, value, at_least)

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if (value := getattr(self, name)) is not None:
                positive_number(name, value)


@final
class Data(Section, frozen=True):
    """Table [data]: which text to use, and how much of it.

    Attributes:
        path: File to read, for tasks that need one.
        vocabulary: File of public words, one per line. By default, the task's own public
            vocabulary.
        vocabulary_size: Number of words in the task's own vocabulary.
        sentence_length: Words per sentence.
        sentences_per_user: Largest number of sentences per user; the first ones are kept.
        heldout_share: Share of the users that are used for evaluation only.
        most_users: Largest number of users to train on.
    """

    path: str | None = None
    vocabulary: str | None = None
    vocabulary_size: int | None = None
    sentence_length: int | None = None
    sentences_per_user: int = 256
    heldout_share: float = 0.1
    most_users: int | None = None

    def __post_init__(self) -> None:
        self._check_whole("vocabulary_size", "sentence_length", "sentences_per_user", "most_users")
        if not 0 < as_float(self.heldout_share) < 1:
            raise InvalidInput(
                f"heldout_share must be above 0 and below 1, got {self.heldout_share!r}: the model "
                "is evaluated on held-out users"
            )


@final
class Network(Section, frozen=True):
    """Table [model]: the model and where it starts from.

    Attributes:
        name: `lstm` or `window`.
        sizes: Sizes of the layers. A size that is not given has the model's default.
        start: A .safetensors model to start from. By default, the model is freshly initialized or
            pre-trained on public text. If `dpftrl export` wrote the file, the private runs that
            trained the model are composed with this one.
        other_people: Earlier runs of the start model, by run id or population label, whose people
            are others than those of this run. They are not composed. This is your statement:
            nobody can check it, and the privacy statement says so.
        pretraining_steps: Steps of non-private training on public text, before the first round: the
            task's public text, or text made from public frequencies of English words and pairs.
        pretraining_rate: Learning rate of the pre-training.
        pretraining_cooldown: Whether that learning rate falls to zero over the second half.
    """

    name: Literal["lstm", "window"] = "window"
    sizes: dict[str, int] = {}
    start: str | None = None
    other_people: tuple[str, ...] = ()
    pretraining_steps: int = 0
    pretraining_rate: float = 1e-3
    pretraining_cooldown: bool = False

    def __post_init__(self) -> None:
        self._check_whole("pretraining_steps", at_least=0)
        self._check_positive("pretraining_rate")
        if self.other_people and self.start is None:
            raise InvalidInput(
                f"other_people names {self.other_people[0]!r:.60} as an earlier run, but there is "
                "no start model: give model.start as well, or leave other_people out"
            )


@final
class Local(Section, frozen=True):
    """Table [client]: local training of a client, which is plain SGD on its own sentences.

    Attributes:
        epochs: Passes over the client's sentences.
        batch_size: Sentences per batch.
        learning_rate: Learning rate of SGD.
        most_batches: Largest number of batches per client and round.
    """

    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 1.0
    most_batches: int | None = None

    def __post_init__(self) -> None:
        self._check_whole("epochs", "batch_size", "most_batches")
        self._check_positive("learning_rate")


@final
class Privacy(Section, frozen=True):
    """Table [privacy]: the guarantee, the noise, and who can take part.

    Attributes:
        rounds: Number of training rounds.
        report_goal: Number of reports that close a round.
        over_selection: Clients contacted per report needed.
        availability: Share of the clients that can be contacted at all. It only affects the default
            of `min_sep`.
        mechanism: `blt`, which is optimized for this run; or a name that `dpftrl mechanisms` lists;
            or a .json file.
        buffers: Buffers of the optimized BLT. By default 4, or the number of rounds if smaller.
        min_sep: Rounds from one contact of a client to its next. By default, as many as the number
            of clients allows.
        max_participations: Largest number of contacts per client.
        epsilon: Target epsilon of this run alone, which the noise is calibrated to.
        noise_multiplier: Noise multiplier, instead of `epsilon`.
        delta: Delta of the guarantee.
        budget: The run stops before epsilon exceeds this value. Earlier runs that are composed with
            this one count. A run with a target epsilon and no earlier runs stays within it anyway.
    """

    rounds: int = 60
    report_goal: int = 100
    over_selection: float = 1.15
    availability: float = 0.8
    mechanism: str = "blt"
    buffers: int | None = None
    min_sep: int | None = None
    max_participations: int | None = None
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-4
    budget: float | None = None

    def __post_init__(self) -> None:
        self._check_whole("rounds", "report_goal", "buffers", "min_sep", "max_participations")
        self._check_positive("epsilon", "noise_multiplier", "budget")


@final
class Simulation(Section, frozen=True):
    """Table [simulation]: how the simulated clients behave.

    Attributes:
        drop_out: Share of the contacted clients that never report.
        straggler_share: Share of the other clients that report late.
        least_available: Share of clients that are available by day.
        most_available: Share of clients that are available by night.
        rounds_per_hour: Rounds per hour of the simulated clock.
        timer_hours: Hours from one contact of a client to its next, instead of `min_sep` rounds.
    """

    drop_out: float = 0.05
    straggler_share: float = 0.1
    least_available: float = 0.5
    most_available: float = 0.9
    rounds_per_hour: float = 5.0
    timer_hours: float | None = None

    def __post_init__(self) -> None:
        for name in ("drop_out", "straggler_share", "least_available", "most_available"):
            if not 0 <= as_float(getattr(self, name)) <= 1:
                raise InvalidInput(f"{name} must be from 0 to 1, got {getattr(self, name)!r}")
        if not self.least_available <= self.most_available:
            raise InvalidInput(
                "least_available must not be above most_available, got "
                f"{self.least_available!r} and {self.most_available!r}"
            )
        if not (self.most_available > 0 and self.drop_out < 1):
            raise InvalidInput(
                "no client would ever report: most_available must be above 0 and drop_out below 1, "
                f"got {self.most_available!r} and {self.drop_out!r}"
            )
        self._check_positive("rounds_per_hour", "timer_hours")
        positive_number("the hours per round, 1 / rounds_per_hour,", 1 / self.rounds_per_hour)


@final
class Config(Section, frozen=True):
    """The complete configuration of a training.

    Attributes:
        task: chitchat, poetry, stackoverflow or jsonl.
        population: Label for the people of this run. It is published with the model.
        seed: Seed of everything except the noise.
        clip_norm: Largest L2 norm of a client's update; larger updates are scaled down. Either a
            number, or "adaptive", or a table with the options of `AdaptiveClipping`.
        evaluate_every: Rounds between two evaluations on held-out users.
        evaluate_sentences: Largest number of held-out sentences per evaluation.
        snapshot_every: Rounds between two saved noise states.
        data: Which text to use.
        model: The model and where it starts from.
        client: Local training of a client.
        server: Optimizer of the server.
        privacy: The guarantee and the noise.
        simulation: How the simulated clients behave.
    """

    task: str = "chitchat"
    population: str | None = None
    seed: int = 0
    clip_norm: ClipNorm = 0.5
    evaluate_every: int = 5
    evaluate_sentences: int = 4_000
    snapshot_every: int = 20
    data: Data = Data()
    model: Network = Network()
    client: Local = Local()
    server: Optimizer = Sgd(learning_rate=1.0, momentum=0.9)
    privacy: Privacy = Privacy(epsilon=8.0)
    simulation: Simulation = Simulation()

    def __post_init__(self) -> None:
        if self.population is not None:
            check_label(self.population)
        self._check_whole("seed", at_least=0)
        if not self.seed < 2**64:
            raise InvalidInput(f"seed must fit into 64 bits, got {self.seed}")
        check_clip_norm(self.clip_norm)
        self._check_whole("evaluate_every", "evaluate_sentences", "snapshot_every")


# For messages about a name that is no setting.
SHOW_ALL: Final = "`dpftrl train --show-config` lists all settings"

# TOML has no null: a setting without a value is written as a comment with an example.
EXAMPLES: Final = {
    "population": '"es-ES keyboards"  # a label for the people; published with the model',
    "data.path": '"people.jsonl"  # the file to read; required by jsonl and stackoverflow',
    "data.vocabulary": '"words.txt"  # public words, one per line, instead of vocabulary_size',
    "data.vocabulary_size": "1000  # number of words in the task's own vocabulary",
    "data.sentence_length": "20  # words per sentence; the default depends on the task",
    "data.most_users": "1000  # largest number of users to train on",
    "model.start": '"model.safetensors"  # a model to start from, for example an exported one',
    "client.most_batches": "10  # largest number of batches per client and round",
    "server.schedule": '"cooldown:last-quarter:0.05"  # schedule of the learning rate',
    "privacy.buffers": "4  # buffers of a BLT; default: 4, or the number of rounds if smaller",
    "privacy.min_sep": "10  # rounds between two contacts; default: what the population allows",
    "privacy.max_participations": "5  # largest number of contacts per client",
    "privacy.epsilon": "8.0  # instead of noise_multiplier",
    "privacy.noise_multiplier": "2.0  # instead of epsilon",
    "privacy.budget": "8.0  # stop before epsilon exceeds this",
    "simulation.timer_hours": "24.0  # hours between two contacts, instead of min_sep rounds",
}


def config_text(config: Config) -> str:
    """Return the configuration as TOML, which `read_config` reads back as an equal one."""
    top, tables = _toml_lines("", msgspec.to_builtins(config))
    return "\n".join([*top, *tables]) + "\n"


def _toml_lines(prefix: str, table: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the lines of a table's own values, and the lines of the tables inside it."""
    lines, tables = list[str](), list[str]()
    for name, value in table.items():
        if isinstance(value, dict):
            values, nested = _toml_lines(f"{prefix}{name}.", cast("Mapping[str, Any]", value))
            tables += ["", f"[{prefix}{name}]", *values, *nested]
        elif value is None:
            lines.append(f"# {name} = {EXAMPLES[prefix + name]}")
        else:
            lines.append(f"{name} = {msgspec.json.encode(value).decode()}")
    return lines, tables


# Small models: the norm of the noise grows with the square root of the number of parameters, so
# thousands of clients can train thousands of parameters, not millions.
SMALL_WINDOW = Network(
    name="window",
    sizes={"embedding": 16, "hidden": 16},
    pretraining_steps=1_000,
    pretraining_rate=5e-3,
    pretraining_cooldown=True,
)
# The noise of the last rounds stays in the model: small steps at the end let less of it in.
COOLING = Sgd(learning_rate=0.5, momentum=0.9, schedule="cooldown:last-half:0.05")
# Defaults of every task. For StackOverflow they are the paper's.
PRESETS: Final[dict[str, Config]] = {
    "chitchat": Config(
        task="chitchat",
        data=Data(vocabulary_size=1_000),
        model=SMALL_WINDOW,
        server=COOLING,
        privacy=Privacy(rounds=120, report_goal=200, epsilon=8.0),
    ),
    # Words of a special field are rarer than those of chats: 4,000 words cover 55% of the words of
    # Debian's package descriptions, and 1,000 words cover 33%.
    "jsonl": Config(
        task="jsonl",
        data=Data(vocabulary_size=4_000),
        model=SMALL_WINDOW,
        client=Local(learning_rate=2.0),
        server=Sgd(learning_rate=0.6, momentum=0.9, schedule=COOLING.schedule),
        privacy=Privacy(rounds=160, report_goal=200, epsilon=8.0),
    ),
    "poetry": Config(
        task="poetry",
        clip_norm=0.3,
        evaluate_every=20,
        data=Data(vocabulary_size=1_000),
        # There is much public text, which trains a larger model than the clients alone could.
        model=Network(
            name="window",
            sizes={"embedding": 32, "words": 7, "hidden": 64},
            pretraining_steps=4_000,
            pretraining_rate=5e-3,
            pretraining_cooldown=True,
        ),
        server=Sgd(learning_rate=0.25, momentum=0.9, schedule="cooldown:last-half:0.05"),
        privacy=Privacy(rounds=300, availability=0.95, epsilon=8.0, delta=1e-5),
    ),
    "stackoverflow": Config(
        task="stackoverflow",
        clip_norm=0.3,
        data=Data(vocabulary_size=10_000, sentence_length=20, sentences_per_user=256),
        model=Network(name="lstm", sizes={"embedding": 96, "hidden": 670, "projection": 96}),
        client=Local(batch_size=16, learning_rate=0.5),
        server=Sgd(learning_rate=1.0, momentum=0.95, schedule="cooldown:last-quarter:0.05"),
        privacy=Privacy(
            rounds=2052,
            report_goal=1000,
            over_selection=1.0,
            availability=1.0,
            min_sep=342,
            epsilon=8.0,
            delta=1e-6,
        ),
    ),
}


def read_config(path: Path | None, changes: Iterable[str] = ()) -> Config:
    """Return the configuration of a training.

    Args:
        path: TOML file, which overrides the defaults of its task; None for the defaults alone.
        changes: Single settings in TOML, such as `seed=1`, which override the file.

    Raises:
        InvalidInput: A file or a change is not TOML, or a setting is unknown or makes no sense.
    """
    given = {} if path is None else _toml(_text(path), str(path))
    for change in changes:
        given = _merged(given, _parsed_change(change))
    task = given.get("task", "chitchat")
    if not isinstance(task, str) or task not in PRESETS:
        raise InvalidInput(f"tasks are {', '.join(PRESETS)}; got {task!r:.60}")
    settings = _merged(msgspec.to_builtins(PRESETS[task]), given)
    return _convert(_without_overridden_presets(settings, given), path)


def read_run_config(path: Path) -> Config:
    """Return the configuration of a run from the file in its folder.

    The file holds every setting that has a value. What it does not hold has none, whatever the
    defaults of the task are by now: a run is resumed with the settings that it was created with.

    Raises:
        InvalidInput: The file is not TOML, or a setting is unknown or makes no sense.
    """
    return _convert(_toml(_text(path), str(path)), path)


def _convert(settings: dict[str, Any], path: Path | None) -> Config:
    """Return the settings as a configuration; `path` is their file, for messages."""
    _check_finite("", settings)
    try:
        return msgspec.convert(settings, Config)
    except msgspec.ValidationError as error:
        reason = str(error).replace("- at `$.", "- at `")
        if match := re.fullmatch(r"Object contains unknown field `(.*?)`(?: - at `(.*)`)?", reason):
            name = f"{match[2]}.{match[1]}" if match[2] else match[1]
            place = "" if path is None else f"{path}: "
            raise InvalidInput(f"{place}{_unknown_setting(name, settings)}") from None
        if choices := _choices(reason):
            reason += f"; choose one of {', '.join(choices)}"
        raise InvalidInput(f"{path or 'the settings'}: {reason}") from None


def _unknown_setting(name: str, settings: Mapping[str, Any]) -> str:
    """Return a message about a name that is no setting; `settings` contains a value of it."""
    if name in setting_kinds(Config):  # a setting of another optimizer
        table, _, _ = name.rpartition(".")
        kind = _table(settings, table).get("name", "sgd")
        return (
            f"{name} is no setting of {kind}; leave it out, or choose another {table}.name; "
            f"{SHOW_ALL}"
        )
    value: Any = dict(settings)
    for part in name.split("."):
        value = cast("dict[str, Any]", value).get(part) if isinstance(value, dict) else None
    while isinstance(value, dict) and value:  # a table of an unknown name: name its first setting
        part, value = next(iter(cast("dict[str, Any]", value).items()))
        name = f"{name}.{part}"
    similar = " or ".join(similar_settings(name, Config))
    meant = f"did you mean {similar}? " if similar else ""
    return f"there is no setting {name:.80}; {meant}{SHOW_ALL}"


def _choices(reason: str) -> list[str]:
    """The values that a setting may have, if the message says that it has another one."""
    match = re.search(r"^Invalid (?:enum )?value .* - at `([^`]+)`", reason)
    if match is None:
        return []
    kind: Any = msgspec.inspect.type_info(Config)
    for name in match[1].split("."):
        kinds = [*getattr(kind, "types", (kind,))]
        tags = [one.tag for one in kinds if getattr(one, "tag_field", None) == name]
        if tags:
            return [str(tag) for tag in tags]
        fields = {
            field.encode_name: field.type for one in kinds for field in getattr(one, "fields", ())
        }
        kind = fields.get(name)
    kinds = [*getattr(kind, "types", (kind,))]
    return [str(value) for one in kinds for value in getattr(one, "values", ())]


def check_beside_plan(changes: Iterable[str]) -> None:
    """Refuse changes to settings that a plan fixes: all of [privacy] except the budget."""
    for change in changes:
        given = _table(_parsed_change(change), "privacy")
        if decided := sorted(given.keys() - {"budget"}):
            raise InvalidInput(
                f"--set privacy.{decided[0]}: the plan decides that already; leave the option out, "
                "or make another plan"
            )


def _text(path: Path) -> str:
    """Return the text of a UTF-8 file."""
    try:
        return read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{path} is not text in UTF-8 (at byte {error.start:,}); save it in that encoding"
        ) from None


def _check_finite(prefix: str, table: Mapping[str, Any]) -> None:
    """Refuse NaN and infinity: no setting may have them, and JSON files cannot store them."""
    for name, value in table.items():
        if isinstance(value, dict):
            _check_finite(f"{prefix}{name}.", cast("Mapping[str, Any]", value))
        elif isinstance(value, float) and not math.isfinite(value):
            raise InvalidInput(f"{prefix}{name} must be a finite number, got {value}")


def _toml(text: str, source: str) -> dict[str, Any]:
    """Parse TOML; `source` names it in error messages."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Somebody who has data of their own tries this first.
        is_data = source.endswith((".jsonl", ".jsonl.gz", ".csv", ".txt"))
        task, path = set_option("task", "jsonl", Config), set_option("data.path", source, Config)
        hint = f"; to train on data of your own: {task} {path}" if is_data else ""
        raise InvalidInput(f"{source} is not TOML: {error}; text needs quotes{hint}") from None


def _parsed_change(change: str) -> dict[str, Any]:
    """Parse one setting in TOML, such as `seed=1`; a common mistake is named."""
    try:
        return tomllib.loads(change)
    except tomllib.TOMLDecodeError as error:
        key, sign, value = (part.strip() for part in change.partition("="))
        kinds = setting_kinds(Config).get(key)
        if not sign or not value:
            advice = "write KEY=VALUE, such as --set privacy.rounds=100"
        elif kinds is None and re.fullmatch(r"(?!model\.sizes\.)[\w.-]+", key):
            raise InvalidInput(_unknown_setting(key, _nested(key, value))) from None
        elif kinds is None or any(character in value for character in "\"'[]{}"):
            advice = "text needs quotes"
        elif kinds & {"text", "list"}:
            advice = f"text needs quotes: {set_option(key, value, Config)}"
        elif "number" in kinds:
            raise InvalidInput(f"{key} needs a number, got {value!r:.60}") from None
        else:
            raise InvalidInput(f"{key} needs true or false, got {value!r:.60}") from None
        raise InvalidInput(f"--set {change} is not TOML: {error}; {advice}") from None


def _nested(key: str, value: str) -> dict[str, Any]:
    """Return tables with one setting, as TOML would."""
    nested: Any = value
    for part in reversed(key.split(".")):
        nested = {part: nested}
    return nested


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Return `old` with the values of `new` over it; nested tables are merged too."""
    merged = dict(old)
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(merged.get(name), dict):
            value = _merged(merged[name], cast("Mapping[str, Any]", value))
        merged[name] = value
    return merged


def _without_overridden_presets(
    settings: dict[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Drop preset values that contradict the given ones.

    A given noise multiplier replaces the preset's epsilon. A given optimizer other than SGD
    replaces all of the preset's [server] table.
    """
    privacy, server = _table(given, "privacy"), _table(given, "server")
    if "noise_multiplier" in privacy and "epsilon" not in privacy:
        settings = {**settings, "privacy": {**settings["privacy"], "epsilon": None}}
    if server.get("name", "sgd") != "sgd":
        settings = {**settings, "server": server}
    return settings


def _table(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the table of this name; an empty one if there is none."""
    table = given.get(name)
    return cast("dict[str, Any]", table) if isinstance(table, dict) else {}
