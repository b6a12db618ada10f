"""Reading and writing the configuration of a training: a TOML file over the task's defaults."""

import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from dpftrl._internal.storage import read_file
from dpftrl.errors import InvalidInput
from dpftrl.federated import Sgd
from dpftrl.simulation.sections import Config, Data, Local, Network, Privacy

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
SMALL = Data(vocabulary_size=1_000)
SMALL_WINDOW = Network(name="window", sizes={"embedding": 16, "hidden": 16})
# Defaults per task. For StackOverflow they are the paper's.
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
    """Return the configuration of a training.

    Args:
        path: TOML file, which overrides the defaults of its task; None for the defaults alone.
        changes: Single settings in TOML, such as `seed=1`, which override the file.

    Raises:
        InvalidInput: A file or a change is not TOML, or a setting is unknown or makes no sense.
    """
    given = {} if path is None else _toml(_text(path), str(path))
    for change in changes:
        given = _merged(given, _toml(change, f"--set {change}"))
    task = given.get("task", "chitchat")
    if not isinstance(task, str) or task not in PRESETS:
        raise InvalidInput(f"tasks are {', '.join(PRESETS)}; got {task!r:.60}")
    settings = _merged(msgspec.to_builtins(PRESETS[task]), given)
    settings = _without_overridden_presets(settings, given)
    _check_finite("", settings)
    try:
        return msgspec.convert(settings, Config)
    except msgspec.ValidationError as error:
        reason = str(error).replace("- at `$.", "- at `")
        raise InvalidInput(f"{path or 'the settings'}: {reason}") from None


def check_beside_plan(changes: Iterable[str]) -> None:
    """Refuse changes to settings that a plan fixes: all of [privacy] except the budget."""
    for change in changes:
        given = _table(_toml(change, f"--set {change}"), "privacy")
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
        raise InvalidInput(f"{source} is not TOML: {error}; text needs quotes") from None


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
