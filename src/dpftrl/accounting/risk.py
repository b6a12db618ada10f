"""What a guarantee means for one person: how well the best possible attack does.

The attacker sees every release, knows all other data, and tests whether the data of one unit (a
client, a person, an example) was used. A test has a false-positive rate (FPR: how often it says
"used" about data that was not used) and a true-positive rate (TPR: how often it says "used" about
data that was used). The trade-off curve of a guarantee gives the largest TPR at each FPR:

* Releases that are mu-Gaussian DP have TPR = Phi(mu + Phi^-1(FPR)), and some test attains it (Dong,
  Roth and Su 2022). What the finite range of the sampler may reveal is added.
* Of a guarantee that is known as one pair (epsilon, delta), such as that of sampled batches, TPR is
  at most exp(epsilon) FPR + delta and at most 1 - exp(-epsilon) (1 - delta - FPR) (Kairouz, Oh and
  Viswanath 2015). This is an upper bound; the true risk is often far smaller.

Guarantees:
    No figure is below its true value: each has a bound on its rounding error added.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from dpftrl._internal.checks import fraction, positive_number
from dpftrl._internal.formatting import percent, percent_up, rounded_up
from dpftrl._internal.tables import TextTable
from dpftrl.accounting.amplification import SampledGuarantee
from dpftrl.accounting.gaussian import delta_of, mu_of, sampler_delta
from dpftrl.accounting.guarantee import Guarantee, smallest_noise_multiplier
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.mechanisms._sensitivity import ROUNDING
from dpftrl.participation import Participation

# The false-positive rates and the prior probabilities for which figures are stated.
FPRS: Final = (0.001, 0.01, 0.1)
PRIORS: Final = (0.5, 0.01)
# The errors of Phi, of its inverse and of exp are below 1e-14, relative to the result and to the
# argument. This is added to both.
MARGIN: Final = 1e-12

Kind = Literal["exact", "upper bound"]


@final
@dataclass(frozen=True)
class Risk:
    """How well the best test of one unit's data does.

    Attributes:
        tpr_at_fpr: The largest true-positive rate at each false-positive rate.
        max_advantage: The largest difference of TPR and FPR, over all tests.
        kind: Whether some test attains the figures, or they are upper bounds.
    """

    tpr_at_fpr: Mapping[float, float]
    max_advantage: float
    kind: Kind

    def posterior(self, prior: float, fpr: float) -> float:
        """What a prior probability that data was used becomes after a positive test.

        Args:
            prior: The probability before the test.
            fpr: The false-positive rate of the test, one of `tpr_at_fpr`.
        """
        hit = fraction("prior", prior) * self.tpr_at_fpr[fpr]
        return min(1.0, hit / (hit + (1 - prior) * fpr) * (1 + MARGIN))

    def as_json(self) -> dict[str, Any]:
        """The figures as fields of a JSON object; rates and priors are keys, such as "0.01"."""
        return {
            "tpr_at_fpr": {f"{fpr:g}": tpr for fpr, tpr in self.tpr_at_fpr.items()},
            "max_advantage": self.max_advantage,
            "posterior": {
                f"{prior:g}": {f"{fpr:g}": self.posterior(prior, fpr) for fpr in self.tpr_at_fpr}
                for prior in PRIORS
            },
            "risk_kind": self.kind,
        }

    def sentence(self, secret: str) -> str:
        """The risk at the smallest false-positive rate, in one plain sentence.

        Args:
            secret: What the attack is about, such as "the data of a client".

        >>> print(gaussian_risk(1.0).sentence("the data of a client"))
        An attack with a false-alarm rate of 0.1% detects that the data of a client was used with \
a probability of at most 1.9%, and its alarm raises a belief of 50% to at most 94.9%.
        """
        fpr, prior = min(self.tpr_at_fpr), PRIORS[0]
        return (
            f"An attack with a false-alarm rate of {percent(fpr)} detects that {secret} was used "
            f"with a probability of at most {percent_up(self.tpr_at_fpr[fpr])}, and its alarm "
            f"raises a belief of {percent(prior)} to at most "
            f"{percent_up(self.posterior(prior, fpr))}."
        )

    def table(self, unit: str) -> TextTable:
        """The risk as a table; every figure is rounded up.

        Args:
            unit: Whose data the attack is about, such as "client" or "3 devices".
        """
        kind = "some attack attains these rates"
        if self.kind == "upper bound":
            kind = "upper bounds: the true rates may be far smaller"
        whose = unit if unit[0].isdigit() else f"one {unit}"
        beliefs = (f"belief after an alarm, {percent(prior)} before" for prior in PRIORS)
        rows = (
            (
                percent(fpr),
                percent_up(tpr),
                *(percent_up(self.posterior(prior, fpr)) for prior in PRIORS),
            )
            for fpr, tpr in self.tpr_at_fpr.items()
        )
        return TextTable(
            "the best possible attack",
            ("false alarms (FPR)", "detects use (TPR)", *beliefs),
            tuple(rows),
            f"whether the data of {whose} was used; largest advantage (TPR - FPR): "
            f"{rounded_up(self.max_advantage)}\n{kind}",
            name_columns=0,
        )


def risk_of(guarantee: Guarantee | SampledGuarantee) -> Risk:
    """The risk of a guarantee: exact for Gaussian DP, an upper bound for sampled batches.

    Compositions, several devices per person and rounding in the noise buffers are part of the
    guarantee's mu, and so of the risk.

    >>> from dpftrl import MinSep, account, mechanism
    >>> clients = MinSep(rounds=2000, min_sep=400)
    >>> risk = risk_of(account(mechanism("blt-b400"), clients, noise_multiplier=7.0, delta=1e-10))
    >>> {fpr: f"{tpr:.3f}" for fpr, tpr in risk.tpr_at_fpr.items()}
    {0.001: '0.007', 0.01: '0.048', 0.1: '0.266'}
    """
    if isinstance(guarantee, SampledGuarantee):
        return point_risk(guarantee.epsilon, guarantee.delta)
    return gaussian_risk(guarantee.mu * (1 + ROUNDING), guarantee.kind)


def gaussian_risk(mu: float, kind: Kind = "exact") -> Risk:
    """The risk of releases that are mu-Gaussian DP, with noise as the sampler draws it."""
    outside = sampler_delta(mu)
    tprs = {fpr: _gaussian_tpr(mu, fpr, outside) for fpr in FPRS}
    return Risk(tprs, min(1.0, delta_of(0.0, mu) + outside), kind)


def point_risk(epsilon: float, delta: float) -> Risk:
    """The risk of releases of which only one epsilon and delta are known: an upper bound."""
    tprs = {fpr: point_tpr(epsilon, delta, fpr) for fpr in FPRS}
    # The two lines of `point_tpr` cross where TPR + FPR = 1.
    advantage = math.tanh(epsilon / 2) + 2 * delta / (1 + math.exp(min(epsilon, 700.0)))
    return Risk(tprs, min(1.0, advantage * (1 + MARGIN)), "upper bound")


def unsampled_risk(epsilon: float, delta: float) -> Risk:
    """The risk of one Gaussian mechanism whose guarantee was stated as epsilon and delta.

    The largest mu with this guarantee gives the risk, so that it is an upper bound.
    """
    return gaussian_risk(mu_of(epsilon, delta) * (1 + ROUNDING), "upper bound")


def _gaussian_tpr(mu: float, fpr: float, outside: float) -> float:
    """The largest TPR of a test between N(0, 1) and N(mu, 1), plus `outside`, rounded up."""
    from scipy.special import ndtr, ndtri  # importing scipy is slow

    place = mu + float(ndtri(fpr))
    tpr = float(ndtr(place + MARGIN * (mu + abs(place) + 1))) * (1 + MARGIN)
    return min(1.0, tpr + outside)


def point_tpr(epsilon: float, delta: float, fpr: float) -> float:
    """The largest TPR that one epsilon and delta allow, rounded up."""
    near = math.exp(min(epsilon, 700.0)) * fpr + delta
    far = 1 - math.exp(-epsilon) * (1 - delta - fpr)
    return min(1.0, min(near, far) * (1 + MARGIN) + MARGIN * fpr)


def calibrate_risk(
    mechanism: Mechanism,
    participation: Participation,
    max_tpr: float,
    fpr: float,
    devices: int = 1,
) -> float:
    """The smallest noise multiplier at which no test has a larger true-positive rate.

    Args:
        mechanism: The mechanism that correlates the noise.
        participation: The rounds in which one client may take part.
        max_tpr: The largest true-positive rate allowed.
        fpr: The false-positive rate of the test.
        devices: Devices of one person to protect as one unit.

    Raises:
        InvalidInput: The true-positive rate is not above the false-positive rate, or the target
            needs more noise than the sampler or the noise buffers can give.

    Guarantees:
        At the returned noise multiplier, the largest TPR at `fpr` is at most `max_tpr`.
    """
    from scipy.special import ndtri

    check_rates(max_tpr, fpr)

    def is_enough(mu: float) -> bool:
        padded = mu * (1 + ROUNDING)
        return _gaussian_tpr(padded, fpr, sampler_delta(padded)) <= max_tpr

    target = float(ndtri(max_tpr)) - float(ndtri(fpr))
    outside = sampler_delta(target)
    if not outside < (max_tpr - fpr) / 2:
        raise InvalidInput(
            f"a true-positive rate of {max_tpr!r} at the false-positive rate {fpr!r} leaves no "
            "room for the finite range of the noise; raise the first or lower the second"
        )
    target = float(ndtri(max_tpr - outside)) - float(ndtri(fpr))
    return smallest_noise_multiplier(mechanism, participation, target, devices, is_enough)


def epsilon_for_risk(max_tpr: float, fpr: float, delta: float) -> float:
    """The largest epsilon that, with this delta, allows no larger TPR at this FPR.

    Use it to calibrate what is known by one epsilon and delta, such as sampled batches.
    """
    check_rates(max_tpr, fpr)
    delta = fraction("delta", delta)
    if not delta < max_tpr - fpr:
        raise InvalidInput(
            f"delta {delta!r} alone allows a true-positive rate above {max_tpr!r} at the "
            f"false-positive rate {fpr!r}; use a smaller delta"
        )
    near = math.log((max_tpr - delta) / fpr)
    far = math.log((1 - delta - fpr) / (1 - max_tpr))
    epsilon = positive_number("epsilon", max(near, far))
    step = MARGIN
    while point_tpr(epsilon, delta, fpr) > max_tpr:
        epsilon, step = epsilon * (1 - step), 2 * step
    return epsilon


def check_rates(max_tpr: float, fpr: float) -> None:
    """Refuse a true-positive rate that is not above the false-positive rate.

    Guessing without looking at any release has equal rates.
    """
    fraction("max_tpr", max_tpr)
    fraction("fpr", fpr)
    if not fpr < max_tpr:
        raise InvalidInput(
            f"max_tpr must be above the false-positive rate {percent(fpr)}, which blind guessing "
            f"reaches, got {percent(max_tpr)}"
        )
