"""What a training is told: a TOML file over the defaults of its task."""

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, cast, final

import msgspec

from dpftrl.errors import InvalidInput
from dpftrl.federated import Optimizer, Sgd
from dpftrl.storage import read_file


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file."""


@final
class Data(Section, frozen=True):
    """Which text, and how much of it.

    Attributes:
        path: The file to read, for tasks that need one.
        vocabulary: A file of public words, one a line; else the task's own public vocabulary.
        vocabulary_size: Words of the task's own vocabulary.
        sentence_length: Words of a sentence.
        sentences_per_user: The first so many of each user.
        heldout_share: Share of the users that are only evaluated on.
        most_users: Users to train on at most.
    """

    path: str | None = None
    vocabulary: str | None = None
    vocabulary_size: int | None = None
    sentence_length: int | None = None
    sentences_per_user: int = 256
    heldout_share: float = 0.1
    most_users: int | None = None


@final
class Network(Section, frozen=True):
    """The model.

    Attributes:
        name: `lstm` or `window`.
        sizes: Of its layers; those not given take its defaults.
        start: An exported model to start from; else fresh, or pre-trained on public text.
        pretraining_steps: Steps of plain training on the task's public text, before anything else.
        pretraining_rate: Their learning rate.
    """

    name: Literal["lstm", "window"] = "window"
    sizes: dict[str, int] = {}
    start: str | None = None
    pretraining_steps: int = 0
    pretraining_rate: float = 1e-3


@final
class Local(Section, frozen=True):
    """What a client does: plain SGD on its own sentences."""

    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 1.0
    most_batches: int | None = None


@final
class Privacy(Section, frozen=True):
    """How private, and with what noise.

    Attributes:
        rounds: Rounds of training.
        report_goal: Reports that close a round.
        over_selection: Clients asked for each report wanted.
        availability: Share of the clients that can be asked at all; it only enters min-sep.
        mechanism: `blt` is optimised for the run; or a name that `dpftrl mechanisms` lists, or a
            .json file.
        buffers: Of an optimised BLT.
        min_sep: Rounds from one participation of a client to its next; else as many as the
            number of clients allows.
        max_participations: Of one client.
        epsilon: Calibrate the noise to this.
        noise_multiplier: Or take this noise.
        delta: Where epsilon is stated.
        budget: Stop before epsilon passes this; a calibrated run stays below by itself.
    """

    rounds: int = 60
    report_goal: int = 100
    over_selection: float = 1.15
    availability: float = 0.8
    mechanism: str = "blt"
    buffers: int = 4
    min_sep: int | None = None
    max_participations: int | None = None
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-4
    budget: float | None = None


@final
class Simulation(Section, frozen=True):
    """How the simulated clients behave.

    Attributes:
        drop_out: Share of the contacted that never report.
        straggler_share: Share of the others that report late.
        least_available: Share that can be asked by day.
        most_available: Share that can be asked by night.
        rounds_per_hour: How fast rounds follow each other on the simulated clock.
        timer_hours: Clients wait for so many hours instead of for min-sep rounds.
    """

    drop_out: float = 0.05
    straggler_share: float = 0.1
    least_available: float = 0.5
    most_available: float = 0.9
    rounds_per_hour: float = 5.0
    timer_hours: float | None = None


@final
class Config(Section, frozen=True):
    """A whole training.

    Attributes:
        task: chitchat, poetry, stackoverflow or jsonl.
        seed: Decides everything but the noise.
        clip_norm: L2 norm of an update.
        evaluate_every: Rounds between two looks at the held-out users.
        evaluate_sentences: How many of their sentences are looked at.
        snapshot_every: Rounds between two saved noise states.
    """

    task: str = "chitchat"
    seed: int = 0
    clip_norm: float = 0.5
    evaluate_every: int = 5
    evaluate_sentences: int = 4_000
    snapshot_every: int = 20
    data: Data = Data()
    model: Network = Network()
    client: Local = Local()
    server: Optimizer = Sgd(learning_rate=1.0, momentum=0.9)
    privacy: Privacy = Privacy(epsilon=8.0)
    simulation: Simulation = Simulation()


# Noise grows with the root of the parameters: thousands of people train thousands, not millions.
SMALL = Data(vocabulary_size=1_000)
SMALL_WINDOW = Network(name="window", sizes={"embedding": 16, "hidden": 16})
# Where a task's defaults differ from those above; the paper's own for StackOverflow.
PRESETS: Final[dict[str, Config]] = {
    "chitchat": Config(data=SMALL, model=SMALL_WINDOW),
    "jsonl": Config(task="jsonl", data=SMALL, model=SMALL_WINDOW),
    "poetry": Config(
        task="poetry",
        clip_norm=0.3,
        evaluate_every=20,
        data=SMALL,
        model=Network(
            name="window",
            sizes={"embedding": 16, "hidden": 16},
            pretraining_steps=2_000,
            pretraining_rate=5e-3,
        ),
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
    """A TOML file over the defaults of its task, and changes like `seed=1` over both."""
    given = {} if path is None else _toml(read_file(path).decode(errors="replace"), str(path))
    for change in changes:
        given = _merged(given, _toml(change, f"--set {change}"))
    task = given.get("task", "chitchat")
    if task not in PRESETS:
        raise InvalidInput(f"tasks are {', '.join(PRESETS)}; got {task!r:.60}")
    whole = _merged(msgspec.to_builtins(PRESETS[str(task)]), given)
    whole = _one_way_to_say_noise(whole, given)
    try:
        return msgspec.convert(whole, Config)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{path or 'the settings'}: {error}") from None


def config_text(config: Config) -> str:
    """The config as TOML, every value written out."""
    top, tables = _split("", msgspec.to_builtins(config))
    return "\n".join([*top, *tables]) + "\n"


def _split(prefix: str, table: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    lines, tables = list[str](), list[str]()
    for name, value in table.items():
        if isinstance(value, dict):
            inner, more = _split(f"{prefix}{name}.", cast("Mapping[str, Any]", value))
            tables += ["", f"[{prefix}{name}]", *inner, *more]
        elif value is not None:
            lines.append(f"{name} = {msgspec.json.encode(value).decode()}")
    return lines, tables


def _toml(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(f"{where} is not TOML: {error}; text needs quotes") from None


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(old)
    for name, value in new.items():
        if isinstance(value, dict) and isinstance(both.get(name), dict):
            value = _merged(both[name], cast("Mapping[str, Any]", value))
        both[name] = value
    return both


def _one_way_to_say_noise(whole: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """A noise multiplier that was given takes the place of a preset's epsilon; an optimiser all."""
    privacy, server = _table(given, "privacy"), _table(given, "server")
    if "noise_multiplier" in privacy and "epsilon" not in privacy:
        whole = {**whole, "privacy": {**whole["privacy"], "epsilon": None}}
    if server.get("name", "sgd") != "sgd":
        whole = {**whole, "server": server}
    return whole


def _table(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = given.get(name)
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}
