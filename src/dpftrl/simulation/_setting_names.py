"""Names and types of all settings of a configuration, for messages about mistakes.

A setting is named as in `--set`, such as `privacy.epsilon`.
"""

import difflib
import shlex
from collections.abc import Iterator
from typing import Any, Final, Literal

import msgspec

Kind = Literal["text", "number", "true or false", "list", "table"]

_KINDS: Final[dict[type, Kind]] = {
    msgspec.inspect.StrType: "text",
    msgspec.inspect.LiteralType: "text",
    msgspec.inspect.IntType: "number",
    msgspec.inspect.FloatType: "number",
    msgspec.inspect.BoolType: "true or false",
    msgspec.inspect.VarTupleType: "list",
    msgspec.inspect.DictType: "table",
    msgspec.inspect.StructType: "table",
}
# A name that differs more is another word, not a typing error.
LEAST_SIMILARITY: Final = 0.75
MOST_SUGGESTIONS: Final = 3


def setting_kinds(config: type) -> dict[str, set[Kind]]:
    """Return the kinds of value that each setting of a configuration class takes, by its name."""
    kinds: dict[str, set[Kind]] = {}
    for name, kind in _settings("", msgspec.inspect.type_info(config)):
        kinds.setdefault(name, set()).add(kind)
    return kinds


def _settings(name: str, field_type: Any) -> Iterator[tuple[str, Kind]]:
    """Yield the name and the kind of a setting and of the settings inside it."""
    for one in getattr(field_type, "types", (field_type,)):
        if name and type(one) in _KINDS:
            yield name, _KINDS[type(one)]
        prefix = f"{name}." if name else ""
        if (tag := getattr(one, "tag_field", None)) is not None:
            yield f"{prefix}{tag}", "text"
        for field in getattr(one, "fields", ()):
            yield from _settings(f"{prefix}{field.encode_name}", field.type)


def similar_settings(name: str, config: type) -> list[str]:
    """Return settings that a wrong name may stand for, the likeliest first.

    >>> from dpftrl.simulation.config import Config
    >>> similar_settings("privacy.epsilom", Config), similar_settings("epsilon", Config)
    (['privacy.epsilon'], ['privacy.epsilon'])
    """
    kinds = setting_kinds(config)
    # A table that can also be a plain value, such as `clip_norm`, is used rarely: it comes last.
    names = sorted(kinds, key=lambda one: len(kinds.get(one.rpartition(".")[0], ())))
    last = name.rpartition(".")[2]
    if same := [one for one in names if one.rpartition(".")[2] == last and one != name]:
        return same[:MOST_SUGGESTIONS]
    if close := difflib.get_close_matches(name, names, n=1, cutoff=LEAST_SIMILARITY):
        return close
    last_parts = [one.rpartition(".")[2] for one in names]
    close = difflib.get_close_matches(last, last_parts, n=1, cutoff=LEAST_SIMILARITY)
    return [one for one in names if one.rpartition(".")[2] in close][:MOST_SUGGESTIONS]


def set_option(name: str, value: str, config: type) -> str:
    """Return the option that sets a setting, as one writes it in a shell.

    >>> from dpftrl.simulation.config import Config
    >>> print(set_option("data.path", "my file.jsonl", Config))
    --set 'data.path="my file.jsonl"'
    """
    kinds = setting_kinds(config).get(name, {"text"})
    quoted = msgspec.json.encode(value).decode()
    if kinds == {"list"}:
        value = f"[{quoted}]"
    elif "text" in kinds and not ("number" in kinds and _is_number(value)):
        value = quoted
    return f"--set {shlex.quote(f'{name}={value}')}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
