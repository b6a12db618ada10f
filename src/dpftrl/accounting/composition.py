"""Guarantees of more or less than one whole run.

`compose` gives the guarantee of several runs on the same clients, such as restarts. `spending`
gives the guarantee after each round of a run whose last round is not known in advance.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.deprecation import renamed_argument
from dpftrl.accounting.gaussian import epsilon_of, ideal_delta, mu_with_rounding
from dpftrl.accounting.guarantee import Guarantee, Hypothesis, Run, guarantee_of
from dpftrl.errors import InvalidInput, TooLarge
from dpftrl.mechanisms import Mechanism
from dpftrl.mechanisms._sensitivity import ROUNDING
from dpftrl.participation import UNCAPPED

# Limit on the work of `_worst_split`: (cap + 1)^2 times the number of runs.
MOST_SPLITS = 2_000_000


def dp_event(guarantee: Guarantee) -> Any:
    """The releases as a `dp_accounting.DpEvent`: one Gaussian mechanism per run.

    If the guarantee uses a common cap over all runs, the event is one Gaussian mechanism for all
    of them.

    The releases of a run are post-processing of a single Gaussian mechanism with the noise
    multiplier 1 / mu, so this is the whole event, for any number of rounds. Use it with the
    neighboring relation REPLACE_SPECIAL, which is zero-out (the others give the same numbers for
    Gaussians).

    Raises:
        InvalidInput: The package dp-accounting is not installed.
    """
    try:
        import dp_accounting
    except ImportError:
        raise InvalidInput(
            "dp_event needs the package dp-accounting: pip install 'dpftrl[dp-accounting]'"
        ) from None

    untyped: Any = dp_accounting  # the package has no type annotations
    if len(guarantee.runs) == 1 or guarantee.common_cap is not None:
        return untyped.GaussianDpEvent(1 / guarantee.mu)
    mus = [run.mu * guarantee.devices for run in guarantee.runs]
    return untyped.ComposedDpEvent([untyped.GaussianDpEvent(1 / mu) for mu in mus])


def compose(
    guarantees: Iterable[Guarantee], delta: float, max_participations: int | None = None
) -> Guarantee:
    """Compute one guarantee for everything that several runs released.

    A restart is a new run: its mechanism starts again at row 0 with fresh noise. A switch to
    another mechanism is a new run too.

    Args:
        guarantees: The guarantees of the runs. Their own deltas are not used.
        delta: The delta at which to state epsilon.
        max_participations: The largest number of rounds of one client over *all* runs together,
            if the server enforced such a cap.

    Raises:
        InvalidInput: A guarantee is for several devices of one person. Compose guarantees for one
            client, then call `for_devices`.
        TooLarge: There are too many ways to share the common cap between the runs.

    Guarantees:
        The result is an upper bound, in whatever order and at whatever time the runs happened.
        Without a common cap the mu^2 add up. With a common cap, every way to share it between the
        runs is tried. A client's pattern within a run obeys that run's own participation and its
        share of the cap, so each run is bounded by its sensitivity at its share. The result is the
        worst case.
    """
    composed = list(guarantees)
    if any(guarantee.devices != 1 for guarantee in composed):
        raise InvalidInput("compose the guarantees for one client, then call for_devices")
    runs = [run for guarantee in composed for run in guarantee.runs]
    total = guarantee_of(runs, delta)
    total = replace(total, hypotheses=_all_hypotheses(composed, total.hypotheses))
    if max_participations is None:
        return total
    cap = whole_number("max_participations", max_participations)
    mu = min(total.mu_of_one, math.sqrt(_worst_split(runs, cap)))
    text = f"Over all {len(runs)} runs together, each client takes part in at most {cap:,} rounds."
    common = Hypothesis("participation over all runs", text)
    others = tuple(other for other in total.hypotheses if other.name != common.name)
    return replace(total, mu_of_one=mu, common_cap=cap, hypotheses=(common, *others))


def _all_hypotheses(
    guarantees: Sequence[Guarantee], usual: Sequence[Hypothesis]
) -> tuple[Hypothesis, ...]:
    """The distinct hypotheses of all guarantees, in the order of `usual`; unknown names last."""
    order = [hypothesis.name for hypothesis in usual]
    distinct = dict.fromkeys(
        hypothesis for guarantee in guarantees for hypothesis in guarantee.hypotheses
    )

    def position(hypothesis: Hypothesis) -> int:
        return order.index(hypothesis.name) if hypothesis.name in order else len(order)

    return tuple(sorted(distinct, key=position))


def _worst_split(runs: Sequence[Run], cap: int) -> float:
    """The largest sum of mu^2 over all ways to share the cap between the runs."""
    cap = min(cap, sum(run.participation.max_participations for run in runs))
    if (cap + 1) ** 2 * len(runs) > MOST_SPLITS:
        raise TooLarge(f"a common cap of {cap:,} over {len(runs)} runs is too large to search")
    best = [0.0] * (cap + 1)  # best[j]: with j participations in the runs so far
    for run in runs:
        squares = [0.0, *(_capped_mu(run, share) ** 2 for share in range(1, cap + 1))]
        best = [
            max(best[used - share] + squares[share] for share in range(used + 1))
            for used in range(cap + 1)
        ]
    return max(best)


def _capped_mu(run: Run, share: int) -> float:
    """The mu of a run in which a client takes part at most `share` times."""
    if share >= run.participation.max_participations:
        return run.mu
    fewer = replace(run.participation, max_participations=share)
    return run.mu_of(run.mechanism.sensitivity(fewer).value)


class Spent(NamedTuple):
    """The privacy spent by the first rounds of a run.

    Attributes:
        rounds: The number of rounds.
        mu: The parameter of Gaussian DP of everything that they released.
    """

    rounds: int
    mu: float

    @property
    def rho(self) -> float:
        """The parameter of zCDP."""
        return self.mu * (self.mu / 2)

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at this delta; the same number as `Guarantee.epsilon`."""
        mu = self.mu * (1 + ROUNDING)
        return epsilon_of(ideal_delta(delta, mu), mu)


@renamed_argument("sigma", "noise_multiplier")
def spending(
    mechanism: Mechanism, min_sep: int, noise_multiplier: float, max_participations: int = UNCAPPED
) -> Iterator[Spent]:
    """Yield the guarantee after 1, 2, 3, ... rounds, up to the mechanism's last round, if any.

    Each guarantee is that of `account` for a run of that many rounds. The releases of the first t
    rounds depend on the first t rows of C X + Z alone, so the number of rounds after them does not
    matter.

    Args:
        mechanism: The mechanism that correlates the noise.
        min_sep: The smallest difference between two rounds of one client.
        noise_multiplier: Standard deviation of the independent Gaussians Z over the clip norm.
        max_participations: The largest number of rounds of one client.

    >>> from dpftrl import mechanism
    >>> rounds = spending(mechanism("blt-b400"), min_sep=2, noise_multiplier=10.0)
    >>> [round(next(rounds).epsilon(1e-6), 3) for _ in range(3)]
    [0.397, 0.447, 0.734]
    """
    scale = positive_number("the noise multiplier", noise_multiplier)
    gap = whole_number("min_sep", min_sep)
    cap = whole_number("max_participations", max_participations)
    sensitivities = mechanism.sensitivity_by_round(gap, cap)
    return (
        Spent(rounds, mu_with_rounding(sensitivity / scale, mechanism, rounds))
        for rounds, sensitivity in enumerate(sensitivities, 1)
    )
