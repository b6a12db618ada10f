"""`make_plan`, which computes a complete plan from a fleet and a privacy target.

`mechanism` builds the mechanism of a plan from its name; `blt` is optimized for the planned
participation.
"""

from dpftrl.accounting import account, calibrate
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism, load_mechanism
from dpftrl.mechanisms.registry import mechanism as registered_mechanism
from dpftrl.optimize import optimize_blt
from dpftrl.participation import UNCAPPED, MinSep, Participation
from dpftrl.plan.candidates import DEFAULT_BUFFERS
from dpftrl.plan.plan import Fleet, Plan

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
    return _named_mechanism(name, participation, buffers)


def _named_mechanism(
    name: str, participation: Participation | None, buffers: int | None
) -> Mechanism:
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


def make_plan(
    *,
    population: int,
    report_goal: int,
    rounds: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    mechanism: str | Mechanism = "blt",
    buffers: int | None = None,
    min_sep: int | None = None,
    max_participations: int | None = None,
    availability: float = 1.0,
    over_selection: float = 1.0,
    timer_days: float | None = None,
    rounds_per_day: float | None = None,
) -> Plan:
    """Choose the mechanism and the noise for a fleet of clients.

    Args:
        population: Number of clients that may take part.
        report_goal: Number of reports that complete a round.
        rounds: Number of rounds of training.
        delta: The delta of the guarantee.
        epsilon: The largest epsilon allowed; the noise is calibrated to it.
        noise_multiplier: The standard deviation of Z divided by the clip norm, instead of
            `epsilon`.
        mechanism: A mechanism, or a name that `dpftrl mechanisms` lists. `blt` is optimized for
            this participation.
        buffers: Number of buffers of an optimized BLT; by default 4.
        min_sep: Smallest difference between two rounds of one client. By default the min-sep of
            the fleet if clients participate in strict rotation. The server enforces it.
        max_participations: Largest number of rounds of one client, if the server enforces a cap.
        availability: The share of the population that can be contacted (idle, charging, ...).
        over_selection: Clients contacted per report needed.
        timer_days: Days that a client waits before it takes part again, if a timer enforces this.
        rounds_per_day: Rounds per day; required with `timer_days`.

    Returns:
        The plan with its guarantee.

    Raises:
        InvalidInput: The arguments contradict each other, or the fleet cannot fill a round.

    >>> plan = make_plan(
    ...     population=4_210_000, report_goal=6_500, rounds=2_000, epsilon=4, delta=1e-10
    ... )
    >>> print(plan.participation, f"{plan.guarantee.epsilon:.3f}")
    2,000 rounds, min-sep 647, at most 4 participation(s) 4.000
    """
    if (epsilon is None) == (noise_multiplier is None):
        raise InvalidInput("give exactly one of epsilon and noise_multiplier")
    fleet = Fleet(
        population,
        report_goal,
        availability=availability,
        over_selection=over_selection,
        timer_days=timer_days,
        rounds_per_day=rounds_per_day,
    )
    participation = MinSep(
        rounds,
        fleet.min_sep() if min_sep is None else min_sep,
        UNCAPPED if max_participations is None else max_participations,
    )
    chosen = mechanism
    if isinstance(chosen, str):
        chosen = _named_mechanism(chosen, participation, buffers)
    elif buffers is not None:
        raise InvalidInput(
            "buffers can only be set for the name blt, not for a mechanism that is already built"
        )
    if noise_multiplier is None:
        assert epsilon is not None
        noise_multiplier = calibrate(chosen, participation, epsilon, delta)
    return Plan(fleet, account(chosen, participation, noise_multiplier, delta))
