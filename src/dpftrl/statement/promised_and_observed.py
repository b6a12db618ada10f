"""What was promised beside what happened: which guarantee may be stated after a run.

The rule: a promise is stated only if nothing speaks against it. What the run's server accounted
comes before what was planned, and where a log shows that devices did not keep to the limits, the
log comes before both.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, final

from dpftrl.accounting import Guarantee, Hypothesis, Run, guarantee_of
from dpftrl.accounting.logs import Observed
from dpftrl.errors import InvalidInput
from dpftrl.participation import FixedEpochs, MinSep, Participation

REPEATED = Hypothesis(
    "repeated rows",
    "Rows of the log that repeat a device and a round were written twice; no update was summed "
    "twice.",
)

# Where the guarantee that is stated comes from.
Origin = Literal["plan", "guarantee", "run", "log"]


@final
@dataclass(frozen=True)
class Happened:
    """The guarantee to state, and what has to be said about it first.

    Attributes:
        guarantee: The one to state.
        origin: Where it comes from.
        ex_post: The guarantee of the participation that the log shows, where there is one.
        kept: Whether the log keeps to the limits; None if that is not known.
        warnings: What nobody may overlook.
    """

    guarantee: Guarantee
    origin: Origin
    ex_post: Guarantee | None = None
    kept: bool | None = None
    warnings: tuple[str, ...] = ()


def weigh(
    promised: Guarantee,
    origin: Literal["plan", "guarantee"],
    accounted: Guarantee | None,
    observed: Observed | None,
) -> Happened:
    """Decide which guarantee to state.

    Guarantees:
        The one chosen is that of a participation which the log, if there is one, keeps to; and its
        mu is never below that of what the server accounted (or, without that, of the promise).
    """
    base = promised if accounted is None else accounted
    found = Happened(base, origin if accounted is None else "run")
    if observed is not None and len(base.runs) > 1:
        found = replace(found, warnings=(_not_compared(base, observed),))
    elif observed is not None:
        found = _against_log(found, observed)
    more: list[str] = []
    if accounted is not None:
        more += _differences(promised, accounted)
        if observed is not None and found.kept and len(promised.runs) == 1:
            more += _breaks(limits_of(promised), observed, "planned")
    if observed is not None and observed.duplicate_rows:
        found = replace(found, guarantee=found.guarantee.resting_on(REPEATED))
        more.append(
            f"The log has {observed.duplicate_rows:,} row(s) too many: the same device counted "
            "more than once in a round. If these are updates that were summed twice, and not lines "
            "written twice, no guarantee in this statement holds."
        )
    return replace(found, warnings=(*found.warnings, *more))


def _against_log(stated: Happened, observed: Observed) -> Happened:
    base, limits = stated.guarantee, limits_of(stated.guarantee)
    broken = list(_breaks(limits, observed, "promised"))
    ex_post = _guarantee_of_log(base, observed.within(limits))
    if not broken:
        confirmed = tuple(
            replace(old, basis="observed")
            if old.name.startswith("participation") and old.basis == "assumed"
            else old
            for old in base.hypotheses
        )
        return replace(
            stated, guarantee=replace(base, hypotheses=confirmed), ex_post=ex_post, kept=True
        )
    formal, beside = ex_post, ""
    if ex_post.mu < base.mu:  # fewer rounds of one device, but closer together
        formal = _guarantee_of_log(base, _both(limits, observed))
        beside = " and, lest epsilon be smaller than promised, for as many rounds as promised"
    warning = (
        f"The participation limits were not kept. {' '.join(broken)}{_how_many(observed)} What was "
        "promised does not hold for everybody: the guarantee stated here allows for what the log "
        f"shows{beside}."
    )
    # A bound on more patterns may be tighter than another on fewer: never use that to say less.
    formal = replace(formal, mu_of_one=max(formal.mu_of_one, base.mu_of_one))
    return Happened(formal, "log", ex_post, kept=False, warnings=(warning,))


def limits_of(guarantee: Guarantee) -> Participation:
    """What a guarantee of one run allows a device."""
    allowed = guarantee.runs[0].participation
    cap = guarantee.common_cap or allowed.max_participations
    return replace(allowed, max_participations=min(cap, allowed.max_participations))


def _both(promised: Participation, observed: Observed) -> MinSep:
    """The least that allows for the promise and for the log."""
    seen = observed.within(promised)
    most = max(promised.max_participations, seen.max_participations)
    return MinSep(seen.rounds, min(promised.min_sep, seen.min_sep), most)


def _guarantee_of_log(base: Guarantee, participation: Participation) -> Guarantee:
    """The same noise under another participation, resting on the log for that alone."""
    run = base.runs[0]
    seen_run = Run.of(run.mechanism, participation, run.noise_multiplier, run.buffers)
    found = guarantee_of([seen_run], base.delta)
    limit = found.runs[0].hypothesis
    kept = (old for old in base.hypotheses if not old.name.startswith("participation"))
    seen = Hypothesis(limit.name, limit.text, "observed")
    return found.resting_on(seen, *kept).for_devices(base.devices)


def _breaks(limits: Participation, observed: Observed, what: str) -> Iterator[str]:
    """A sentence for each limit that the log does not keep to."""
    if observed.max_participations > limits.max_participations:
        yield (
            f"One device took part in {observed.max_participations:,} rounds, where "
            f"{limits.max_participations:,} were {what}."
        )
    if observed.max_participations > 1 and observed.min_sep < limits.min_sep:
        yield (
            f"One device came back after {observed.min_sep:,} round(s), where at least "
            f"{limits.min_sep:,} were {what}."
        )
    elif isinstance(limits, FixedEpochs) and not observed.comes_back_after(limits.min_sep):
        yield f"Devices did not come back after exactly {limits.min_sep:,} rounds, as {what}."
    if observed.rounds > limits.rounds:
        yield f"The log has {observed.rounds:,} rounds, where {limits.rounds:,} were {what}."


def _how_many(observed: Observed) -> str:
    count = observed.broken_counted_clients
    return f" This concerns {count:,} of {observed.clients:,} devices." if count else ""


def _differences(promised: Guarantee, accounted: Guarantee) -> Iterator[str]:
    """A sentence for each way in which the run was not the one that was promised."""
    planned, done = promised.runs, accounted.runs
    if len(planned) != len(done):
        yield f"The run's guarantee covers {len(done)} run(s), the promise {len(planned)}."
    elif [(r.mechanism, r.noise_multiplier) for r in planned] != [
        (r.mechanism, r.noise_multiplier) for r in done
    ]:
        yield "The run did not use the mechanism and the noise multiplier that were promised."
    if accounted.mu / accounted.devices > promised.mu / promised.devices * (1 + 1e-9):
        yield (
            "The run spent more than was promised: what its server accounted is stated here, and "
            "not the promise."
        )


def _not_compared(base: Guarantee, observed: Observed) -> str:
    """The log of several runs in one says too little; but it may say that something is wrong."""
    allowed = base.common_cap or sum(run.participation.max_participations for run in base.runs)
    if observed.max_participations > allowed:
        raise InvalidInput(
            f"one device took part in {observed.max_participations:,} rounds, the {len(base.runs)} "
            f"runs allow {allowed:,}; account each run by its own log, compose them, and state that"
        )
    return (
        f"The guarantee covers {len(base.runs)} runs and the log does not say which rounds belong "
        "to which: it was not held against the limits of each run."
    )
