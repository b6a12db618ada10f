"""Comparison of the promised with the observed guarantee: which one may be stated after a run.

The promised guarantee is stated only if nothing contradicts it. The guarantee that the run's server
accounted replaces the planned one. If a log shows that clients exceeded the participation limits,
the guarantee of the log replaces both.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, final

from dpftrl.accounting import Guarantee, Hypothesis, guarantee_of
from dpftrl.accounting.logs import Observed
from dpftrl.errors import InvalidInput
from dpftrl.participation import FixedEpochs, MinSep, Participation

REPEATED = Hypothesis(
    "repeated rows",
    "Rows of the log that repeat a client and a round were written twice; no update was summed "
    "twice.",
)

# Two values of mu with a smaller relative difference count as equal: they were computed in
# different ways.
AGREEMENT = 1e-9

# The source of the guarantee that is stated.
Origin = Literal["plan", "guarantee", "run", "log"]


@final
@dataclass(frozen=True)
class StatedGuarantee:
    """The guarantee to state, and the result of comparing it with the log.

    Attributes:
        guarantee: The guarantee to state.
        origin: The source of that guarantee.
        ex_post: The guarantee for the participation in the log, or None if there is no log, or it
            cannot be compared.
        kept_limits: Whether the participation in the log keeps to the limits; None if that is not
            known.
        kept_promise: False if the run spent more than was promised, or its log does not keep to
            the limits that were promised.
        warnings: Sentences that the statement must begin with.
    """

    guarantee: Guarantee
    origin: Origin
    ex_post: Guarantee | None = None
    kept_limits: bool | None = None
    kept_promise: bool = True
    warnings: tuple[str, ...] = ()


def choose_guarantee(
    promised: Guarantee,
    origin: Literal["plan", "guarantee"],
    accounted: Guarantee | None,
    observed: Observed | None,
) -> StatedGuarantee:
    """Choose the guarantee to state.

    Args:
        promised: The planned guarantee.
        origin: The kind of file that `promised` comes from.
        accounted: The guarantee that the run's server accounted, if there was a run.
        observed: The summary of the run's log, if there is one.

    Raises:
        InvalidInput: The guarantee covers several runs, and the log contradicts all of them.

    Guarantees:
        If there is a log, its participation is covered by the chosen guarantee. The mu of the
        chosen guarantee is never below that of `accounted` or, if that is None, of `promised`.
    """
    base = promised if accounted is None else accounted
    stated = StatedGuarantee(base, origin if accounted is None else "run")
    if observed is not None and len(base.runs) > 1:
        stated = replace(stated, warnings=(_not_compared(base, observed),))
    elif observed is not None:
        stated = _compare_with_log(stated, observed)
    more_warnings: list[str] = []
    kept_promise = stated.kept_limits is not False
    if accounted is not None:
        more_warnings += _differences(promised, accounted)
        kept_promise = kept_promise and not _spent_more(promised, accounted)
        if observed is not None and stated.kept_limits and len(promised.runs) == 1:
            broken = list(_broken_limits(limits_of(promised), observed, "planned"))
            more_warnings += broken
            kept_promise = kept_promise and not broken
    if observed is not None and observed.duplicate_rows:
        stated = replace(stated, guarantee=stated.guarantee.resting_on(REPEATED))
        more_warnings.append(
            f"The log has {observed.duplicate_rows:,} row(s) too many: a client is counted "
            "more than once in a round. If an update was summed twice, and not only its row "
            "written twice, no guarantee in this statement holds."
        )
    warnings = (*stated.warnings, *more_warnings)
    return replace(stated, kept_promise=kept_promise, warnings=warnings)


def _compare_with_log(stated: StatedGuarantee, observed: Observed) -> StatedGuarantee:
    """Confirm the participation of a guarantee by the log, or use the participation of the log."""
    base, limits = stated.guarantee, limits_of(stated.guarantee)
    broken = list(_broken_limits(limits, observed, "promised"))
    ex_post = _guarantee_of_log(base, observed.within(limits))
    if not broken:
        confirmed = tuple(
            replace(hypothesis, basis="observed")
            if hypothesis.name.startswith("participation") and hypothesis.basis == "assumed"
            else hypothesis
            for hypothesis in base.hypotheses
        )
        return replace(
            stated, guarantee=replace(base, hypotheses=confirmed), ex_post=ex_post, kept_limits=True
        )
    guarantee, addition = ex_post, ""
    if ex_post.mu < base.mu:  # a client took part in fewer rounds, but they are closer together
        guarantee = _guarantee_of_log(base, _wider_limits(limits, observed))
        addition = (
            " and, so that epsilon is not smaller than promised, for as many rounds as were "
            "promised"
        )
    warning = (
        f"The participation limits were not kept. {' '.join(broken)}{_affected_clients(observed)} "
        "The promised guarantee does not hold for every client: the guarantee stated here allows "
        f"for what the log shows{addition}."
    )
    # A bound over more patterns can be tighter, and so smaller, than a bound over fewer patterns.
    # This must not lower the stated mu.
    guarantee = replace(guarantee, mu_of_one=max(guarantee.mu_of_one, base.mu_of_one))
    return StatedGuarantee(guarantee, "log", ex_post, kept_limits=False, warnings=(warning,))


def limits_of(guarantee: Guarantee) -> Participation:
    """Return the participation that a guarantee for one run allows a client."""
    allowed = guarantee.runs[0].participation
    cap = guarantee.common_cap or allowed.max_participations
    return replace(allowed, max_participations=min(cap, allowed.max_participations))


def _wider_limits(promised: Participation, observed: Observed) -> MinSep:
    """Return the tightest limits that allow both the promised and the observed participation."""
    in_log = observed.within(promised)
    most = max(promised.max_participations, in_log.max_participations)
    return MinSep(in_log.rounds, min(promised.min_sep, in_log.min_sep), most)


def _guarantee_of_log(base: Guarantee, participation: Participation) -> Guarantee:
    """Return the guarantee of the same noise for the participation that the log shows.

    The hypothesis about participation is observed; all others are those of `base`.
    """
    run_in_log = base.runs[0].with_participation(participation)
    guarantee = guarantee_of([run_in_log], base.delta)
    participation_limit = guarantee.runs[0].hypothesis
    others = (
        hypothesis
        for hypothesis in base.hypotheses
        if not hypothesis.name.startswith("participation")
    )
    observed = Hypothesis(participation_limit.name, participation_limit.text, "observed")
    return guarantee.resting_on(observed, *others).for_devices(base.devices)


def _broken_limits(
    limits: Participation, observed: Observed, promised_or_planned: str
) -> Iterator[str]:
    """Yield one sentence for each limit that the log does not keep to."""
    if observed.max_participations > limits.max_participations:
        yield (
            f"One client took part in {observed.max_participations:,} rounds, where "
            f"{limits.max_participations:,} were {promised_or_planned}."
        )
    if observed.max_participations > 1 and observed.min_sep < limits.min_sep:
        yield (
            f"One client came back after {observed.min_sep:,} round(s), where at least "
            f"{limits.min_sep:,} were {promised_or_planned}."
        )
    elif isinstance(limits, FixedEpochs) and not observed.comes_back_after(limits.min_sep):
        yield (
            f"Clients did not come back after exactly {limits.min_sep:,} rounds, as "
            f"{promised_or_planned}."
        )
    if observed.rounds > limits.rounds:
        yield (
            f"The log has {observed.rounds:,} rounds, where {limits.rounds:,} were "
            f"{promised_or_planned}."
        )


def _affected_clients(observed: Observed) -> str:
    count = observed.broken_counted_clients
    return f" This concerns {count:,} of {observed.clients:,} clients." if count else ""


def _differences(promised: Guarantee, accounted: Guarantee) -> Iterator[str]:
    """Yield one sentence for each difference between the promised and the accounted guarantee."""
    planned, performed = promised.runs, accounted.runs
    if len(planned) != len(performed):
        yield (
            f"The run's guarantee covers {len(performed)} run(s), the promised guarantee "
            f"{len(planned)}."
        )
    elif [(r.mechanism, r.noise_multiplier) for r in planned] != [
        (r.mechanism, r.noise_multiplier) for r in performed
    ]:
        yield "The run did not use the mechanism and the noise multiplier that were promised."
    if _spent_more(promised, accounted):
        yield (
            "The run spent more than was promised: this statement gives what its server accounted, "
            "not what was promised."
        )


def _spent_more(promised: Guarantee, accounted: Guarantee) -> bool:
    """Return whether the run spent more per client than was promised."""
    return accounted.mu / accounted.devices > promised.mu / promised.devices * (1 + AGREEMENT)


def _not_compared(base: Guarantee, observed: Observed) -> str:
    """Return a warning that the log of several runs cannot be compared with each run's limits.

    Raises:
        InvalidInput: A client took part more often than all runs together allow.
    """
    allowed = base.common_cap or sum(run.participation.max_participations for run in base.runs)
    if observed.max_participations > allowed:
        raise InvalidInput(
            f"one client took part in {observed.max_participations:,} rounds, the {len(base.runs)} "
            f"runs allow {allowed:,}; account each run by its own log, compose them, and state that"
        )
    return (
        f"The guarantee covers {len(base.runs)} runs, and the log does not say which rounds belong "
        "to which run: it was not compared with the limits of each run."
    )
