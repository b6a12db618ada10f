"""Builds mechanisms from their names; `blt` is optimized for the planned participation."""

from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism, load_mechanism
from dpftrl.mechanisms.registry import mechanism as registered_mechanism
from dpftrl.optimize import optimize_blt
from dpftrl.participation import Participation

# Default number of buffers of an optimized BLT; a run with fewer rounds gets one buffer per round.
DEFAULT_BUFFERS = 4
OPTIMIZED_BLT = "blt"


def mechanism(
    name: str, participation: Participation | None = None, *, buffers: int | None = None
) -> Mechanism:
    """Build the mechanism of this name, or load it from a .json file.

    `blt` is the BLT with the smallest RmsLoss for the participation. Some other names need the
    participation too: `tree-full`, `smooth-tree` and `banded:P` are built for its rounds, and a
    name without a number of bands gets as many bands as its min-sep. The participation must be the
    planned one. A participation that was observed in a log is refused, since it would describe a
    mechanism that was not run.

    Args:
        name: A name that `dpftrl mechanisms` lists, such as `blt`, `blt-b400` or `band-sqrt:342`,
            or the path of a .json file.
        participation: The planned participation, where the name needs one.
        buffers: Number of buffers of an optimized BLT; by default 4.

    Raises:
        UnknownMechanism: No mechanism has this name.
        InvalidInput: The name needs a planned participation, or `buffers` does not apply to it.

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
        raise InvalidInput(f"buffers can only be set for the name blt, got {name!r}")
    if name.endswith(".json"):
        return load_mechanism(name)
    return registered_mechanism(name, participation)


def _optimized_blt(participation: Participation | None, buffers: int | None) -> Mechanism:
    if participation is None or participation.observed:
        raise InvalidInput(
            "blt is optimized for the planned participation: give the rounds and the min-sep of "
            "the plan, or the name of a preset of the paper, such as blt-b400"
        )
    chosen = min(DEFAULT_BUFFERS, participation.rounds) if buffers is None else buffers
    return optimize_blt(participation, chosen, objective="rms").mechanism
