"""What the guesses of an attacker about one run prove: a test of a whole trade-off curve.

A run contains `canaries`, each with probability 1/2, decided by independent fair coins. After the
run, an attacker guesses some of the coins from what was released. Many correct guesses are evidence
against the claimed guarantee, even though there was only one run (Steinke, Nasr and Jagielski
2023). The test is that of Mahloujifar, Melis and Chaudhuri (2024): it uses the whole trade-off
curve f, and not one (epsilon, delta), which at 1,000 canaries could never show more than epsilon
5.8 at 95% confidence.

Let F(x) = 1 - f(x): an event that has probability x without a canary has at most F(x) with it. F is
increasing and concave. Let p_n be the probability that exactly n of `guesses` guesses are correct,
out of m canaries. Given the coins of all others, one coin is guessed by a test of one canary. So
the probability that the others have n - 1 correct guesses and this one is correct is at most F of
the probability that they have as many and this one is wrong. The mean over all canaries, and over
all n >= i, is, as F is concave,

    r_i <= F(h_(i-1)),  r_i = sum over n >= i of n p_n / m,
                        h_i = sum over n >= i of (guesses - n) p_n / m.

If P(at least c correct) is t, the p_n that need the least total probability have all of t at c, and
then, from c - 1 down to 0, only as much as makes h_(i-1) = F^-1(r_i): probability that is moved to
a smaller n raises h, lowers r, and so only helps. If even these need more than 1, then t was too
large.

Guarantees:
    `is_rejected` is True for a true claim with a probability of at most `failure`, whatever the
    attacker does, if its number of guesses is fixed in advance.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple, final

import numpy as np
from scipy.special import ndtr, ndtri

from dpftrl._internal.arrays import Vector
from dpftrl._internal.checks import fraction, whole_number
from dpftrl.errors import InvalidInput

# Values of mu that are tried at once, and how often their range is narrowed.
MUS: Final = 64
NARROWINGS: Final = 4
# No search goes beyond this mu: its epsilon at any delta is of no use.
LARGEST_MU: Final = 60.0

# F^-1 of a trade-off curve: from the probability with a canary to the least without it.
Inverse = Callable[[Vector], Vector]


@final
class Guesses(NamedTuple):
    """How an attacker did.

    Attributes:
        canaries: Number of canaries.
        guesses: Number of canaries whose coin it guessed.
        correct: Number of correct guesses.
    """

    canaries: int
    guesses: int
    correct: int

    def check(self) -> "Guesses":
        """These guesses, or an error if the numbers do not fit together."""
        whole_number("canaries", self.canaries)
        whole_number("guesses", self.guesses)
        whole_number("correct", self.correct, at_least=0)
        if not self.correct <= self.guesses <= self.canaries:
            raise InvalidInput(
                f"{self.correct:,} correct of {self.guesses:,} guesses about {self.canaries:,} "
                "canaries do not fit together"
            )
        return self


def gaussian_inverse(mu: Vector | float) -> Inverse:
    """F^-1 of mu-Gaussian DP."""
    return lambda y: ndtr(ndtri(y) - mu)


def epsilon_delta_inverse(epsilon: float, delta: float) -> Inverse:
    """F^-1 of (epsilon, delta)-DP, whose F(x) is min(exp(epsilon) x + delta, the mirrored line)."""
    growth = math.exp(epsilon)

    def inverse(y: Vector) -> Vector:
        # The second line is 1 - (1 - delta - x) / growth.
        return np.maximum(0.0, np.maximum((y - delta) / growth, 1 - delta - growth * (1 - y)))

    return inverse


def needed_probability(guesses: Guesses, inverse: Inverse, tail: Vector) -> Vector:
    """The least total probability that goes with at least `correct` correct guesses.

    Args:
        guesses: Canaries, guesses and correct guesses.
        inverse: F^-1 of the claimed trade-off curve.
        tail: Probabilities of at least `correct` correct guesses.

    Returns:
        The least sum of all p_n; above 1 if the claim does not allow `tail`.
    """
    canaries, made, correct = guesses.check()
    r, h = tail * (correct / canaries), tail * ((made - correct) / canaries)
    for i in range(correct, 0, -1):
        wanted = np.maximum(h, inverse(np.minimum(r, 1.0)))
        r, h = r + (i - 1) / (made - i + 1) * (wanted - h), wanted
        if np.all(r + h > 1):
            break
    return (r + h) * (canaries / made)


def is_rejected(guesses: Guesses, inverse: Inverse, failure: float) -> bool:
    """Whether so many correct guesses disprove a claimed trade-off curve.

    Args:
        guesses: Canaries, guesses and correct guesses.
        inverse: F^-1 of the claimed trade-off curve.
        failure: The largest probability that a true claim is rejected.
    """
    tail = np.array([fraction("failure", failure)])
    return bool(needed_probability(guesses, inverse, tail)[0] > 1)


def p_value(guesses: Guesses, inverse: Inverse) -> float:
    """The largest probability that a true claim gives so many correct guesses."""
    low, high = -700.0, 0.0  # logarithms
    if needed_probability(guesses, inverse, np.array([1.0]))[0] <= 1:
        return 1.0
    for _ in range(3):
        logs = np.linspace(low, high, MUS)
        allowed = needed_probability(guesses, inverse, np.exp(logs)) <= 1
        last = int(np.count_nonzero(np.logical_and.accumulate(allowed)))
        low, high = logs[max(0, last - 1)], logs[min(last, MUS - 1)]
    return math.exp(high)


def mu_lower_bound(guesses: Guesses, failure: float) -> float:
    """The largest mu whose Gaussian trade-off curve is rejected; 0 if none is.

    >>> round(mu_lower_bound(Guesses(1000, 1000, 1000), failure=0.05), 1)
    2.4
    """
    tail = fraction("failure", failure)
    low, high = 0.0, LARGEST_MU
    if not is_rejected(guesses, gaussian_inverse(0.0), failure):
        return 0.0
    for _ in range(NARROWINGS):
        mus = np.linspace(low, high, MUS)
        needed = needed_probability(guesses, gaussian_inverse(mus), np.full(MUS, tail))
        rejected = int(np.count_nonzero(np.logical_and.accumulate(needed > 1)))
        low, high = mus[max(0, rejected - 1)], mus[min(rejected, MUS - 1)]
    return float(low)


def classical_epsilon_lower_bound(guesses: Guesses, failure: float) -> float:
    """The lower bound on epsilon, at delta 0, of Steinke, Nasr and Jagielski (2023).

    Under epsilon-DP the number of correct guesses is at most a binomial one, with the probability
    exp(epsilon) / (1 + exp(epsilon)) of each.

    >>> round(classical_epsilon_lower_bound(Guesses(1000, 1000, 1000), failure=0.05), 2)
    5.81
    """
    from scipy.special import betaincinv

    _, made, correct = guesses.check()
    if correct == 0:
        return 0.0
    # The smallest probability at which `correct` or more have the probability `failure`.
    rate = float(betaincinv(correct, made - correct + 1, fraction("failure", failure)))
    return max(0.0, math.log(rate / (1 - rate)))
