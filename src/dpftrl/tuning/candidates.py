"""The settings that a tuning tries: those of the configuration, and random changes of them."""

from collections.abc import Iterator
from typing import Any, cast

import msgspec
import numpy as np

from dpftrl.errors import InvalidInput
from dpftrl.simulation.config import Config

# Factors that each setting is multiplied by. Accuracy changes slowly with all of them, so that
# factors of 2 are fine enough.
FACTORS: dict[str, tuple[float, ...]] = {
    "clip_norm": (0.25, 0.5, 1, 2, 4),
    "server.learning_rate": (0.25, 0.5, 1, 2, 4),
    "client.learning_rate": (0.25, 0.5, 1, 2),
    "privacy.report_goal": (0.5, 1, 2),
    "privacy.rounds": (0.5, 1, 2),
    "model.sizes": (0.5, 1, 2),
}
# A candidate takes at most this many times the work of the configuration: rounds times reports.
MOST_WORK = 2.0
# Sizes that are not widths of layers.
NOT_WIDTHS = ("words",)
# Contacts per round are at most this share of the clients: with more, nobody could rest.
MOST_CONTACTED = 0.5


def candidates(config: Config, population: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield changes of the configuration without end: first none, then random ones, each once.

    A change maps the name of a setting, such as `privacy.rounds`, to its value.
    """
    base = {name: setting(config, name) for name in FACTORS}
    tried = {msgspec.json.encode({})}
    yield {}
    draws = np.random.default_rng(seed)
    for _ in range(10_000):
        changes = dict[str, Any]()
        for name, factors in FACTORS.items():
            factor = float(draws.choice(factors))
            if factor != 1 and base[name] is not None:
                changes[name] = _scaled(base[name], factor)
        if not _fits(config, changes, population):
            continue
        key = msgspec.json.encode(changes)
        if key not in tried:
            tried.add(key)
            yield changes


def setting(config: Config, name: str) -> Any:
    """Return a setting by its name; None if it is not one that can be scaled."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    if name == "model.sizes":
        return {size: width for size, width in value.items() if size not in NOT_WIDTHS} or None
    return value if isinstance(value, int | float) else None


def with_changes(config: Config, changes: dict[str, Any]) -> Config:
    """Return the configuration with changes, by the names of settings."""
    settings: dict[str, Any] = msgspec.to_builtins(config)
    for name, value in changes.items():
        table, _, last = name.rpartition(".")
        place = cast("dict[str, Any]", settings[table]) if table else settings
        place[last] = {**place[last], **value} if isinstance(value, dict) else value
    try:
        return msgspec.convert(settings, Config)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"the settings do not fit together: {error}") from None


def _scaled(value: Any, factor: float) -> Any:
    if isinstance(value, dict):
        sizes = cast("dict[str, int]", value)
        return {size: _scaled(width, factor) for size, width in sizes.items()}
    if isinstance(value, int):
        return max(1, round(value * factor))
    return float(f"{value * factor:.4g}")


def _fits(config: Config, changes: dict[str, Any], population: int) -> bool:
    """Whether the clients suffice for a candidate, and it does not take too much work."""
    privacy = config.privacy
    rounds = changes.get("privacy.rounds", privacy.rounds)
    goal = changes.get("privacy.report_goal", privacy.report_goal)
    work = rounds * goal / (privacy.rounds * privacy.report_goal)
    contacted = goal * privacy.over_selection / population
    is_base = goal == privacy.report_goal
    return work <= MOST_WORK and (is_base or contacted <= MOST_CONTACTED * privacy.availability)
