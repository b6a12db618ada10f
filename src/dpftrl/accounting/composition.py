"""Several runs on the same people: restarts, changed mechanisms, later models."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from dpftrl._internal.checks import whole_number
from dpftrl.accounting.guarantee import Guarantee, Hypothesis, Run, guarantee_of
from dpftrl.errors import InvalidInput, TooLarge


def dp_event(guarantee: Guarantee) -> Any:
    """What happened, as a `dp_accounting.DpEvent`: one Gaussian mechanism a run.

    Where a cap over all runs was used, it is one for all of them.

    The releases of a run are post-processing of a single Gaussian mechanism with the noise
    multiplier 1 / mu, so that is the whole event, however many rounds it had. Use it with the
    neighbouring relation REPLACE_SPECIAL, which is zero-out (the others give the same numbers for
    Gaussians).
    """
    try:
        import dp_accounting
    except ImportError:
        raise InvalidInput(
            "events need dp-accounting: pip install 'dpftrl[dp-accounting]'"
        ) from None

    event: Any = dp_accounting
    if len(guarantee.runs) == 1 or guarantee.common_cap is not None:
        return event.GaussianDpEvent(1 / guarantee.mu)
    each = [run.mu * guarantee.devices for run in guarantee.runs]
    return event.ComposedDpEvent([event.GaussianDpEvent(1 / mu) for mu in each])


MOST_SPLITS = 2_000_000


def compose(
    guarantees: Iterable[Guarantee], delta: float, max_participations: int | None = None
) -> Guarantee:
    """One guarantee for everything that all these runs released.

    A restart is a new run: its mechanism starts again at row 0 with fresh noise, and so does a
    switch to another mechanism.

    Args:
        guarantees: Of each run; the delta of each is put aside.
        delta: Where to state epsilon.
        max_participations: A cap on one device over *all* the runs, where one was enforced.

    Guarantees:
        An upper bound, whatever the rounds in which the runs met. Without a common cap the mu^2 add
        up. With one, each way of sharing it out between the runs is weighed by the sensitivity of
        each run at its share, and the worst one counts: a device's pattern within a run keeps to
        that run's own participation and to the share.
    """
    each = list(guarantees)
    if any(guarantee.devices != 1 for guarantee in each):
        raise InvalidInput("compose what holds for one device, then say for_devices")
    runs = [run for guarantee in each for run in guarantee.runs]
    together = guarantee_of(runs, delta)
    together = replace(together, hypotheses=_all_of(each, together.hypotheses))
    if max_participations is None:
        return together
    cap = whole_number("max_participations", max_participations)
    mu = min(together.mu_of_one, math.sqrt(_worst_split(runs, cap)))
    said = f"Over all {len(runs)} runs together, each device takes part in at most {cap:,} rounds."
    common = Hypothesis("participation over all runs", said)
    others = tuple(old for old in together.hypotheses if old.name != common.name)
    return replace(together, mu_of_one=mu, common_cap=cap, hypotheses=(common, *others))


def _all_of(each: Sequence[Guarantee], usual: Sequence[Hypothesis]) -> tuple[Hypothesis, ...]:
    """What any of them rests on, in the usual order."""
    order = [hypothesis.name for hypothesis in usual]
    said = dict.fromkeys(hypothesis for one in each for hypothesis in one.hypotheses)
    return tuple(sorted(said, key=lambda one: order.index(one.name) if one.name in order else 99))


def _worst_split(runs: Sequence[Run], cap: int) -> float:
    """The largest sum of mu^2 over all ways to share the cap out."""
    cap = min(cap, sum(run.participation.max_participations for run in runs))
    if (cap + 1) ** 2 * len(runs) > MOST_SPLITS:
        raise TooLarge(f"a common cap of {cap:,} over {len(runs)} runs is too large to weigh")
    best = [0.0] * (cap + 1)  # by participations used so far
    for run in runs:
        squares = [0.0, *(_capped(run, share) ** 2 for share in range(1, cap + 1))]
        best = [
            max(best[used - share] + squares[share] for share in range(used + 1))
            for used in range(cap + 1)
        ]
    return max(best)


def _capped(run: Run, share: int) -> float:
    if share >= run.participation.max_participations:
        return run.mu
    fewer = replace(run.participation, max_participations=share)
    return run.mu_of(run.mechanism.sensitivity(fewer).value)
