"""The guarantee as a run goes on, when nobody knows yet in which round it will end."""

import math
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.deprecation import renamed_argument
from dpftrl.accounting.finite_precision import ideal_delta, mu_with_rounding
from dpftrl.accounting.gaussian import ULP, epsilon_of
from dpftrl.mechanisms import BLT, Mechanism
from dpftrl.mechanisms._sensitivity import ROUNDING
from dpftrl.participation import UNCAPPED, MinSep


class Spent(NamedTuple):
    """What the first so many rounds have released, in terms of privacy."""

    rounds: int
    mu: float

    @property
    def rho(self) -> float:
        """The parameter of zCDP."""
        return self.mu * (self.mu / 2)

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon at this delta, as `Guarantee.epsilon` is."""
        mu = self.mu * (1 + ROUNDING)
        return epsilon_of(ideal_delta(delta, mu), mu)


@renamed_argument("sigma", "noise_multiplier")
def spending(
    mechanism: Mechanism, min_sep: int, noise_multiplier: float, max_participations: int = UNCAPPED
) -> Iterator[Spent]:
    """The guarantee after 1, 2, 3, ... rounds, without end (or to the mechanism's last round).

    Each is what `account` gives for a run of that many rounds. The release after t rounds depends
    on the first t rows of C X + Z alone, so it does not matter how many are meant to follow.

    >>> from dpftrl import mechanism
    >>> rounds = spending(mechanism("blt-b400"), min_sep=2, noise_multiplier=10.0)
    >>> [round(next(rounds).epsilon(1e-6), 3) for _ in range(3)]
    [0.397, 0.447, 0.734]
    """
    scale = positive_number("the noise multiplier", noise_multiplier)
    gap = whole_number("min_sep", min_sep)
    cap = whole_number("max_participations", max_participations)
    sensitivities = _sensitivities(mechanism, gap, cap)
    return (
        Spent(rounds, mu_with_rounding(value / scale, mechanism, rounds))
        for rounds, value in enumerate(sensitivities, 1)
    )


def _sensitivities(mechanism: Mechanism, min_sep: int, cap: int) -> Iterator[float]:
    if isinstance(mechanism, BLT) and math.fsum(mechanism.omega) <= 1:
        yield from _blt_sensitivities(mechanism, min_sep, cap)
        return
    for rounds in count(1) if mechanism.rounds is None else range(1, mechanism.rounds + 1):
        yield mechanism.sensitivity(MinSep(rounds, min_sep, cap)).value


def _blt_sensitivities(blt: BLT, min_sep: int, cap: int) -> Iterator[float]:
    """Row after row of the columns 0, b, 2b, ..., which stay the worst whenever the run ends.

    The buffers hold the sum of theta^(t - 1 - jb) over the participations jb so far; one pass of
    plain floats, because numpy's smallest step costs more than the whole of it.
    """
    theta, omega = blt.theta, blt.omega
    buffers = [0.0] * len(theta)
    total, lost = 0.0, 0.0
    for t in count():
        present = 1.0 if t % min_sep == 0 and t // min_sep < cap else 0.0
        row = present
        for j, scale in enumerate(omega):
            row += scale * buffers[j]
            buffers[j] = theta[j] * buffers[j] + present
        # Kahan's sum: millions of small squares must not get lost against the total.
        term = row * row - lost
        following = total + term
        lost = (following - total) - term
        total = following
        yield math.sqrt(total) * (1 + 4 * ULP * min(t + 4, 1e12))
