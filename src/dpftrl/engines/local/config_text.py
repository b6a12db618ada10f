"""A config as TOML: every value written out, and as comments what could be given as well."""

from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

from dpftrl.engines.local.sections import Config

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
