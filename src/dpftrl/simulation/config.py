"""What a training is told: a TOML file over the defaults of its task."""

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

# TOML has no way to say "nothing": what is not given is shown as an example in a comment.
EXAMPLES: Final = {
    "population": '"es-ES keyboards"  # what you call the people; published with the model',
    "data.path": '"people.jsonl"  # the file to read; jsonl and stackoverflow need one',
    "data.vocabulary": '"words.txt"  # public words, one a line, instead of vocabulary_size',
    "data.vocabulary_size": "1000  # words of the task's own vocabulary",
    "data.sentence_length": "20  # words of a sentence; else what suits the task",
    "data.most_users": "1000  # users to train on at most",
    "model.start": '"model.safetensors"  # a model to start from, such as an exported one',
    "client.most_batches": "10  # of a client in a round",
    "server.schedule": '"cooldown:last-quarter:0.05"  # of the learning rate',
    "privacy.buffers": "4  # of a BLT; else 4, or as many as there are rounds",
    "privacy.min_sep": "10  # rounds a client waits; else as many as the clients allow",
    "privacy.max_participations": "5  # of one client",
    "privacy.epsilon": "8.0  # instead of noise_multiplier",
    "privacy.noise_multiplier": "2.0  # instead of epsilon",
    "privacy.budget": "8.0  # stop before epsilon passes this",
    "simulation.timer_hours": "24.0  # a client waits so long, instead of min_sep rounds",
}


def config_text(config: Config) -> str:
    """What `read_config` reads back as the same config."""
    top, tables = _split("", msgspec.to_builtins(config))
    return "\n".join([*top, *tables]) + "\n"


def _split(prefix: str, table: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    lines, tables = list[str](), list[str]()
    for name, value in table.items():
        if isinstance(value, dict):
            inner, more = _split(f"{prefix}{name}.", cast("Mapping[str, Any]", value))
            tables += ["", f"[{prefix}{name}]", *inner, *more]
        elif value is None:
            lines.append(f"# {name} = {EXAMPLES[prefix + name]}")
        else:
            lines.append(f"{name} = {msgspec.json.encode(value).decode()}")
    return lines, tables


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
    given = {} if path is None else _toml(_text(path), str(path))
    for change in changes:
        given = _merged(given, _toml(change, f"--set {change}"))
    task = given.get("task", "chitchat")
    if not isinstance(task, str) or task not in PRESETS:
        raise InvalidInput(f"tasks are {', '.join(PRESETS)}; got {task!r:.60}")
    whole = _merged(msgspec.to_builtins(PRESETS[task]), given)
    whole = _one_way_to_say_noise(whole, given)
    _check_finite("", whole)
    try:
        return msgspec.convert(whole, Config)
    except msgspec.ValidationError as error:
        why = str(error).replace("- at `$.", "- at `")
        raise InvalidInput(f"{path or 'the settings'}: {why}") from None


def check_beside_plan(changes: Iterable[str]) -> None:
    """Refuse changes to what a plan has decided: all of [privacy] but the budget."""
    for change in changes:
        given = _table(_toml(change, f"--set {change}"), "privacy")
        if decided := sorted(given.keys() - {"budget"}):
            raise InvalidInput(
                f"--set privacy.{decided[0]}: the plan decides that already; leave it away, or "
                "make another plan"
            )


def _text(path: Path) -> str:
    try:
        return read_file(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"{path} is not text in UTF-8 (at byte {error.start:,}); save it in that encoding"
        ) from None


def _check_finite(prefix: str, table: Mapping[str, Any]) -> None:
    """No setting may be NaN or infinite, and no file of ours could say so."""
    for name, value in table.items():
        if isinstance(value, dict):
            _check_finite(f"{prefix}{name}.", cast("Mapping[str, Any]", value))
        elif isinstance(value, float) and not math.isfinite(value):
            raise InvalidInput(f"{prefix}{name} must be a finite number, got {value}")


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
