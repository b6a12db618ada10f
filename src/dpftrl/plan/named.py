"""Mechanisms by name, with `blt` optimized for the planned participation."""

from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism, load_mechanism
from dpftrl.mechanisms.registry import mechanism as registered_mechanism
from dpftrl.optimize import optimize_blt
from dpftrl.participation import Participation

# Buffers of an optimized BLT, if nobody says otherwise; with fewer rounds, one per round.
DEFAULT_BUFFERS = 4
OPTIMIZED_BLT = "blt"


def mechanism(
    name: str, participation: Participation | None = None, *, buffers: int | None = None
) -> Mechanism:
    """The mechanism of this name, or of a .json file.

    `blt` is the BLT with the least RMS error for the participation. Other names may leave a choice
    open that the participation settles: `tree-full`, `smooth-tree` and `banded:P` are built for its
    rounds, and bands that are not given are as many as its min-sep. It must be the participation
    that was planned: one that was observed in a log is refused, since it would describe a mechanism
    that was not run.

    Args:
        name: As `dpftrl mechanisms` lists them, such as `blt`, `blt-b400` or `band-sqrt:342`.
        participation: The planned participation, where the name needs one.
        buffers: Buffers of an optimized BLT; by default 4.

    >>> from dpftrl import MinSep
    >>> mechanism("band-sqrt:342")
    SquareRoot(bands=342)
    >>> mechanism("blt", MinSep(rounds=2052, min_sep=342), buffers=2).memory(2052)
    2
    >>> mechanism("trea")
    Traceback (most recent call last):
    dpftrl.errors.UnknownMechanism: there is no mechanism 'trea'; did you mean tree or tree-vanilla?
    """
    if name == OPTIMIZED_BLT:
        return _optimized_blt(participation, buffers)
    if buffers is not None:
        raise InvalidInput(f"buffers go with the name blt, got {name!r}")
    if name.endswith(".json"):
        return load_mechanism(name)
    return registered_mechanism(name, participation)


def _optimized_blt(participation: Participation | None, buffers: int | None) -> Mechanism:
    if participation is None or participation.observed:
        raise InvalidInput(
            "blt is optimized for the planned participation: state the rounds and the min-sep of "
            "the plan, or name a preset of the paper, such as blt-b400"
        )
    chosen = min(DEFAULT_BUFFERS, participation.rounds) if buffers is None else buffers
    return optimize_blt(participation, chosen, objective="rms").mechanism
