"""Lower bounds on epsilon and mu, from how often an attack was right and how often it was wrong.

An attack sees a release and says whether a target took part. If the release is
(epsilon, delta)-DP, every attack obeys

    true alarms <= exp(epsilon) * false alarms + delta,

and the same with the two worlds exchanged. So the rates of an attack give a lower bound on epsilon.
The rates themselves are not known, only counts in independent trials. The bounds of Clopper and
Pearson (1934) hold for every number of trials, with a stated confidence.

Guarantees:
    If the trials are independent and the thresholds were chosen without them, a lower bound
    exceeds the true value with a probability of at most its `failure`.
"""

import math
from collections.abc import Callable
from typing import Final, NamedTuple, final

import numpy as np
from scipy.special import betaincinv, ndtr, ndtri

from dpftrl._internal.arrays import Vector

# The probability that an audit of correct code exceeds the claim, unless the caller states another.
DEFAULT_FAILURE: Final = 1e-5
# How many parts of `failure` an audit has: two rates of each direction, and two for mu.
PARTS: Final = 6


def at_most(successes: Vector, trials: int, failure: float) -> Vector:
    """Upper bounds on success probabilities, after Clopper and Pearson.

    >>> at_most(np.array([0.0, 10.0]), trials=10, failure=0.05).round(4)
    array([0.2589, 1.    ])
    """
    counts = np.minimum(successes, trials - 1.0)
    bound = betaincinv(counts + 1.0, trials - counts, 1.0 - failure)
    return np.where(successes >= trials, 1.0, bound)


def at_least(successes: Vector, trials: int, failure: float) -> Vector:
    """Lower bounds on success probabilities, after Clopper and Pearson."""
    return 1.0 - at_most(trials - successes, trials, failure)


def epsilon_at_least(
    alarms_with: Vector, alarms_without: Vector, trials: int, delta: float, failure: float
) -> Vector:
    """Lower bounds on epsilon from the alarms of attacks.

    Args:
        alarms_with: Number of alarms in the trials with the target, for each attack.
        alarms_without: Number of alarms in the trials without the target.
        trials: Number of trials of either kind.
        delta: The delta at which epsilon is bounded.
        failure: The probability that one of the two rates is outside its bound is at most twice
            this number.
    """
    surplus = at_least(alarms_with, trials, failure) - delta
    false_alarms = at_most(alarms_without, trials, failure)
    with np.errstate(divide="ignore", invalid="ignore"):
        bound = np.log(surplus / false_alarms)
    return np.where(surplus > false_alarms, bound, 0.0)


def mu_at_least(alarms_with: Vector, alarms_without: Vector, trials: int, failure: float) -> Vector:
    """Lower bounds on the mu of Gaussian DP; the arguments are those of `epsilon_at_least`."""
    false_alarms = at_most(alarms_without, trials, failure)
    misses = at_most(trials - alarms_with, trials, failure)
    return np.maximum(0.0, -ndtri(false_alarms) - ndtri(misses))


@final
class Thresholds(NamedTuple):
    """Where an attack on the log-likelihood ratio raises its alarm.

    They must not depend on the trials that they are used on.

    Attributes:
        present: Above it, the attack says that the target took part.
        absent: At or below it, another attack says that the target did not take part.
        middle: Above it, the attack that bounds mu says that the target took part.
    """

    present: float
    absent: float
    middle: float


@final
class Counts(NamedTuple):
    """How often attacks raised an alarm, in trials with and in as many without the target.

    Attributes:
        trials: Number of trials of either kind.
        present_with: Alarms "present" in the trials with the target: right ones.
        present_without: Alarms "present" in the trials without the target: false ones.
        absent_without: Alarms "absent" in the trials without the target: right ones.
        absent_with: Alarms "absent" in the trials with the target: false ones.
        middle_with: Alarms of the attack that bounds mu, with the target.
        middle_without: Alarms of the attack that bounds mu, without the target.
    """

    trials: int
    present_with: int = 0
    present_without: int = 0
    absent_without: int = 0
    absent_with: int = 0
    middle_with: int = 0
    middle_without: int = 0

    def plus(self, with_target: Vector, without: Vector, thresholds: Thresholds) -> "Counts":
        """These counts and those of further trials, given by their log-likelihood ratios."""
        present, absent, middle = thresholds
        added = (
            len(with_target),
            np.count_nonzero(with_target > present),
            np.count_nonzero(without > present),
            np.count_nonzero(without <= absent),
            np.count_nonzero(with_target <= absent),
            np.count_nonzero(with_target > middle),
            np.count_nonzero(without > middle),
        )
        return Counts(*(int(old + new) for old, new in zip(self, added, strict=True)))

    def epsilon_at_least(self, delta: float, failure: float) -> float:
        """The larger of the lower bounds on epsilon of both directions; wrong with `failure`."""
        right = np.array([self.present_with, self.absent_without], dtype=float)
        wrong = np.array([self.present_without, self.absent_with], dtype=float)
        bounds = epsilon_at_least(right, wrong, self.trials, delta, failure / 4)
        return float(bounds.max())

    def mu_at_least(self, failure: float) -> float:
        """The lower bound on mu; it is wrong with probability `failure`."""
        right, wrong = np.array([float(self.middle_with)]), np.array([float(self.middle_without)])
        return float(mu_at_least(right, wrong, self.trials, failure / 2)[0])


# The share of log-likelihood ratios above each threshold.
Exceedance = Callable[[Vector], Vector]


@final
class ExpectedBounds(NamedTuple):
    """The best thresholds for a number of trials, and the lower bound that they should show."""

    thresholds: Thresholds
    epsilon: float


def best_thresholds(
    candidates: Vector,
    with_target: Exceedance,
    without: Exceedance,
    trials: int,
    delta: float,
    failure: float,
) -> ExpectedBounds:
    """Choose the thresholds whose lower bounds are expected to be largest.

    They are computed from a model of the release, before any trial.

    Args:
        candidates: The thresholds to choose from.
        with_target: Share of log-likelihood ratios above a threshold, with the target.
        without: The same without the target.
        trials: Number of trials of either kind.
        delta: The delta at which epsilon is bounded.
        failure: The failure of one rate.
    """
    alarms, false_alarms = with_target(candidates) * trials, without(candidates) * trials
    present = epsilon_at_least(alarms, false_alarms, trials, delta, failure)
    absent = epsilon_at_least(trials - false_alarms, trials - alarms, trials, delta, failure)
    middle = mu_at_least(alarms, false_alarms, trials, failure)
    chosen = Thresholds(
        *(float(candidates[int(one.argmax())]) for one in (present, absent, middle))
    )
    return ExpectedBounds(chosen, float(max(present.max(), absent.max())))


def least_trials(
    expected: Callable[[int], ExpectedBounds], wanted: float, smallest: int, largest: int
) -> int:
    """The smallest number of trials at which the expected lower bound is `wanted`.

    Args:
        expected: The expected bounds of a number of trials.
        wanted: The lower bound to reach.
        smallest: The smallest number of trials.
        largest: The result if `wanted` is out of reach.
    """
    trials = smallest
    while trials < largest and not expected(trials).epsilon >= wanted:
        trials *= 2
    return min(trials, largest)


def exceedance_of(samples: Vector) -> Exceedance:
    """The share of samples above each threshold."""
    ordered = np.sort(samples)
    return lambda thresholds: 1.0 - np.searchsorted(ordered, thresholds, "right") / len(ordered)


def gaussian_exceedance(mean: float, deviation: float) -> Exceedance:
    """The probability that a Gaussian is above each threshold."""
    return lambda thresholds: ndtr((mean - thresholds) / deviation)


def log_mean_exp(logs: Vector, weights: Vector) -> Vector:
    """The logarithm of the weighted mean of exp(logs) over the first axis; weights sum to 1."""
    largest = logs.max(axis=0)
    return largest + np.log(np.tensordot(weights, np.exp(logs - largest), axes=1))


def ratio(bound: float, claim: float) -> float:
    """The bound over the claim: how much of a claim an audit has shown."""
    return bound / claim if claim > 0 else math.inf
