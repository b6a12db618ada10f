"""The guarantee after each round of a run whose last round is not known in advance."""

from collections.abc import Iterator
from typing import NamedTuple

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.deprecation import renamed_argument
from dpftrl.accounting.gaussian import epsilon_of, ideal_delta, mu_with_rounding
from dpftrl.mechanisms import Mechanism
from dpftrl.mechanisms._sensitivity import ROUNDING
from dpftrl.participation import UNCAPPED


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
