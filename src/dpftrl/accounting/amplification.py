"""Guarantees of training on secret random batches: amplification by sampling.

`account_sampled` and `calibrate_sampled` cover the three samplings of `dpftrl.participation`:

* Poisson and cyclic Poisson, for strategies with at most as many bands as groups: the run is
  dominated by ceil(steps / groups) compositions of a Poisson-subsampled Gaussian (Choquette-Choo et
  al. 2023, arXiv 2306.08153), which dp_accounting composes with upper bounds.
* Balls-in-bins, for strategies without negative entries: certified Monte Carlo, see
  `balls_in_bins`.

Guarantees:
    No error of numbers makes epsilon too small. Rounding in the noise buffers and the finite range
    of the normals are part of epsilon and delta (`_Precision`).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, Literal, NamedTuple, final

import numpy as np

from dpftrl._internal.arrays import Vector
from dpftrl._internal.checks import fraction, positive_number
from dpftrl.accounting.balls_in_bins import (
    DEFAULT_FAILURE,
    IMPOSSIBLE,
    Question,
    falling_root,
    gram_matrix,
    is_certified,
    smallest_certified,
)
from dpftrl.accounting.gaussian import (
    check_rounding,
    epsilon_of,
    mu_of,
    mu_with_rounding,
    sampler_delta,
)
from dpftrl.accounting.guarantee import KEYSTREAM, SECRECY, Hypothesis
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import Adjacency, BallsInBins, CyclicPoisson, Poisson, Sampling

# Width of a cell of the privacy loss distributions, for epsilon 1 and one composition, and limits.
# Wider cells make epsilon larger, by about 1e-5 of it at this width; they are never unsafe.
CELL: Final = 3e-3
SMALLEST_CELL: Final = 1e-5
LARGEST_CELL: Final = 2e-3
# Relative error that norms of columns may have; their rounding errors are far smaller.
NORM_ERROR: Final = 1e-9
# Relative accuracy of searches with privacy loss distributions.
ACCURACY: Final = 1e-6
# What rounding in Fourier transforms may hide of delta: a constant, and a part per composition. For
# 100,000 compositions of a Gaussian, dp_accounting 0.6 was too small by 2e-12.
TRANSFORM_ERROR: Final = 1e-12
TRANSFORM_ERROR_EACH: Final = 1e-15
# An epsilon that is stated instead of a smaller one.
TINY_EPSILON: Final = 1e-9
# The largest epsilon that is worth stating.
LARGEST_EPSILON: Final = 500.0
# A Gaussian is farther than this many standard deviations from its mean with probability 6e-316.
REMOTE: Final = 38.0
REMOTE_PROBABILITY: Final = 1e-315

CLIPPED_EXAMPLES = Hypothesis(
    "clipping",
    "The contribution of every example to a sum is clipped to the clip norm, in L2.",
)
PLANNED_SIZE = Hypothesis(
    "batch size",
    "Nothing that is released depends on the actual sizes of batches; sums are divided by the "
    "planned batch size.",
)
CERTIFICATE = Hypothesis(
    "certificate",
    "The certificate from random samples, on which epsilon rests, is right; `failure` bounds the "
    "probability that it is not.",
)
FIXED_STEPS = Hypothesis(
    "steps",
    "The number of steps was not chosen by looking at the run; otherwise the guarantee of the "
    "planned number of steps holds.",
)


@final
@dataclass(frozen=True)
class SampledGuarantee:
    """A differential privacy guarantee for one example of a data set that is sampled in secret.

    Attributes:
        mechanism: The mechanism that correlates the noise.
        sampling: How the batches are drawn.
        noise_multiplier: Standard deviation of Z divided by the clip norm.
        epsilon: The epsilon, an upper bound.
        delta: The delta at which epsilon is stated.
        failure: The probability that the certificate behind epsilon is wrong; 0 if epsilon does not
            rest on Monte Carlo. It is not part of delta. A guarantee that was chosen among several
            certified ones fails with the sum of their probabilities (`with_failure_of`).
        sensitivity: The largest norm of C u over the patterns u of one example, at clip norm 1,
            for one participation under Poisson sampling.
        hypotheses: The conditions that the guarantee needs.
    """

    mechanism: Mechanism
    sampling: Sampling
    noise_multiplier: float
    epsilon: float
    delta: float
    failure: float
    sensitivity: float
    hypotheses: tuple[Hypothesis, ...]

    @property
    def adjacency(self) -> Adjacency:
        """The neighboring relation, that of the sampling."""
        return self.sampling.adjacency

    @property
    def confidence(self) -> float:
        """1 - `failure`: how sure it is that epsilon is large enough."""
        return 1 - self.failure

    @property
    def kind(self) -> Literal["upper bound"]:
        """Epsilon is an upper bound: of a numerical composition, or certified by samples."""
        return "upper bound"

    @property
    def unit(self) -> str:
        """The privacy unit: whose data is protected."""
        return "example"

    @property
    def effective_noise_multiplier(self) -> float:
        """The noise multiplier divided by the sensitivity, as accountants of DP-SGD mean it."""
        return self.noise_multiplier / self.sensitivity

    @property
    def rms_noise(self) -> float:
        """Root mean square, over the steps, of the noise on prefix sums, in clip norms.

        It is the noise multiplier times the root mean square of the row norms of A C^-1. Between
        guarantees with equal epsilon, delta and batches, the smallest is the best.
        """
        return self.noise_multiplier * self.mechanism.rms_error(self.sampling.steps)

    def with_failure_of(self, *others: "SampledGuarantee") -> "SampledGuarantee":
        """This guarantee, chosen after it was compared with others: their failures add up."""
        total = min(1.0, self.failure + sum(other.failure for other in others))
        hypotheses = self.hypotheses
        if total and CERTIFICATE not in hypotheses:
            hypotheses = (*hypotheses, CERTIFICATE)
        return replace(self, failure=total, hypotheses=hypotheses)

    def after(self, steps: int) -> "SampledGuarantee":
        """The guarantee of a run that stopped early, with the noise that was planned.

        It never exceeds the planned epsilon, because what was released is a part of what was
        planned.

        Raises:
            InvalidInput: There are more steps than planned, which this guarantee does not cover.
        """
        planned = self.sampling.steps
        if steps > planned:
            raise InvalidInput(
                f"the guarantee covers {planned:,} steps, and a run must not go past them, "
                f"got {steps:,}; plan a new run for more steps"
            )
        if steps == planned:
            return self
        shorter = account_sampled(
            self.mechanism,
            self.sampling.after(steps),
            self.noise_multiplier,
            self.delta,
            failure=min(0.5, self.failure) or DEFAULT_FAILURE,
        )
        total = min(1.0, self.failure + shorter.failure)
        epsilon = min(self.epsilon, shorter.epsilon)
        hypotheses = (*shorter.hypotheses, FIXED_STEPS)
        return replace(shorter, epsilon=epsilon, failure=total, hypotheses=hypotheses)


def account_sampled(
    mechanism: Mechanism,
    sampling: Sampling,
    noise_multiplier: float,
    delta: float,
    *,
    failure: float = DEFAULT_FAILURE,
) -> SampledGuarantee:
    """Compute the guarantee of a run on secret random batches.

    Args:
        mechanism: The mechanism that correlates the noise.
        sampling: How the batches are drawn.
        noise_multiplier: Standard deviation of Z divided by the clip norm.
        delta: The delta at which to state epsilon.
        failure: For balls-in-bins, the largest probability that the certificate is wrong. Each call
            draws new samples.

    >>> from dpftrl.mechanisms import Independent
    >>> sampling = Poisson(dataset_size=50_000, batch_size=500, steps=1_000)
    >>> guarantee = account_sampled(Independent(), sampling, noise_multiplier=1.0, delta=1e-6)
    >>> f"{guarantee.epsilon:.2f}"
    '2.12'
    """
    scale = positive_number("noise_multiplier", noise_multiplier)
    delta, failure = fraction("delta", delta), fraction("failure", failure)
    model = _model_of(mechanism, sampling)
    precision = model.precision(scale)

    def question(epsilon: float) -> Question:
        return Question(scale, *precision.ideal(epsilon, delta))

    mu = model.largest_norm / scale * (1 + NORM_ERROR)
    ideal = epsilon_of(delta / 2, mu)
    unsampled = max(ideal, TINY_EPSILON) + 2 * precision.epsilon
    cap = precision.largest_epsilon(delta)
    if not cap > 0:
        raise _cut_too_often(sampling, delta)
    # Without sampling, epsilon is `unsampled` if at least half of delta is left.
    if unsampled > min(cap, LARGEST_EPSILON):
        unsampled = math.inf
    elif precision.ideal(unsampled, delta)[1] < delta / 2:
        raise _too_little_noise(scale, delta)
    largest = min(unsampled, cap, LARGEST_EPSILON)
    if ideal <= TINY_EPSILON and unsampled == largest:  # there is nothing to search for
        return model.guarantee(scale, unsampled, delta, failure)
    epsilon = max(TINY_EPSILON, model.smallest(question, largest, failure))
    if epsilon >= largest and unsampled == math.inf:
        raise (
            _cut_too_often(sampling, delta)
            if cap < LARGEST_EPSILON
            else _too_little_noise(scale, delta)
        )
    return model.guarantee(scale, epsilon, delta, failure)


def calibrate_sampled(
    mechanism: Mechanism,
    sampling: Sampling,
    epsilon: float,
    delta: float,
    *,
    failure: float = DEFAULT_FAILURE,
) -> SampledGuarantee:
    """Find the smallest noise multiplier for an epsilon, with its guarantee.

    The result has the noise multiplier and the guarantee in one: for balls-in-bins, the certificate
    holds for this noise multiplier only.

    Args:
        mechanism: The mechanism that correlates the noise.
        sampling: How the batches are drawn.
        epsilon: The target epsilon.
        delta: The target delta.
        failure: For balls-in-bins, the largest probability that the certificate is wrong, over all
            noise multipliers that are tried. Each call draws new samples.
    """
    epsilon = positive_number("epsilon", epsilon)
    delta, failure = fraction("delta", delta), fraction("failure", failure)
    model = _model_of(mechanism, sampling)

    def question(scale: float) -> Question:
        return Question(scale, *model.precision(scale).ideal(epsilon, delta))

    # Without sampling this much noise is enough, even for half of delta and nearly all of epsilon.
    largest = model.largest_norm / mu_of(0.99 * epsilon, delta / 2) * (1 + NORM_ERROR)
    precision = model.precision(largest)
    if precision.largest_epsilon(delta) < epsilon:
        raise _cut_too_often(sampling, delta)
    ideal = precision.ideal(epsilon, delta)
    if not (ideal[0] >= 0.99 * epsilon and ideal[1] >= delta / 2):
        raise InvalidInput(
            f"epsilon {epsilon:g} and delta {delta:g} leave no room for rounding and for the "
            "finite range of the noise; use larger ones"
        )
    scale = model.smallest(question, largest, failure)
    rounding, mu = model.precision(scale).epsilon / (2 * REMOTE), model.largest_norm / scale
    check_rounding(rounding, mu, mechanism, sampling.steps)
    return model.guarantee(scale, epsilon, delta, failure)


def check_sampled(
    mechanism: Mechanism,
    sampling: Sampling,
    noise_multiplier: float,
    epsilon: float,
    delta: float,
    *,
    failure: float = DEFAULT_FAILURE,
) -> SampledGuarantee:
    """Check a claimed guarantee anew, for example one from a file.

    Args:
        mechanism: The mechanism that correlates the noise.
        sampling: How the batches are drawn.
        noise_multiplier: Standard deviation of Z divided by the clip norm.
        epsilon: The claimed epsilon.
        delta: The claimed delta.
        failure: For balls-in-bins, the largest probability that a false claim passes.

    Raises:
        InvalidInput: The claim is not confirmed.
    """
    scale, epsilon = positive_number("noise_multiplier", noise_multiplier), float(epsilon)
    positive_number("epsilon", epsilon)
    delta, failure = fraction("delta", delta), fraction("failure", failure)
    model = _model_of(mechanism, sampling)
    question = Question(scale, *model.precision(scale).ideal(epsilon, delta))
    if not (question.delta > 0 and model.confirms(question, failure)):
        raise InvalidInput(
            f"epsilon {epsilon:g} at delta {delta:g} is not confirmed for the noise multiplier "
            f"{scale:g}: it may be too small"
        )
    return model.guarantee(scale, epsilon, delta, failure)


def believe_sampled(
    mechanism: Mechanism,
    sampling: Sampling,
    noise_multiplier: float,
    epsilon: float,
    delta: float,
    *,
    failure: float,
) -> SampledGuarantee:
    """A guarantee that was computed before, without computing it again.

    The arguments are those of `check_sampled`, and must come from a file that is sealed.
    """
    model = _model_of(mechanism, sampling)
    return model.guarantee(noise_multiplier, epsilon, delta, failure)


class _Precision(NamedTuple):
    """What the noise as it is drawn and stored costs, beside ideal Gaussians.

    Given the batches of an example, rounding in the noise buffers moves the noise by a vector that
    depends on earlier releases, and whose norm is at most r standard deviations: this is r-Gaussian
    DP in either direction, for every mixture over batches too. So an ideal (e, d) becomes
    (e + 2 s, exp(s) d + (1 + exp(e + s)) t) with s = 38 r and t = P(|Z| > 38).

    Where the supports of Q and of all Gaussians of P overlap, normals of a finite range have
    densities in the same proportion as ideal ones. Elsewhere they may reveal everything: that is
    `outside`. A Gaussian of P falls outside the support of Q, and Q outside that of one of b
    Gaussians, with a probability of at most `sampler_delta`.

    Attributes:
        epsilon: Added to epsilon: 2 s.
        outside: The probability that a normal falls where another one of the mixture cannot.
        overflow: The probability that a batch is cut. It counts for both neighbors.
    """

    epsilon: float
    outside: float
    overflow: float

    def largest_epsilon(self, delta: float) -> float:
        """The largest epsilon at which cut batches cost at most half of delta."""
        if not self.overflow:
            return math.inf
        return math.log(max(1.0, delta / (2 * self.overflow) * (1 - 1e-9) - 1))

    def ideal(self, epsilon: float, delta: float) -> tuple[float, float]:
        """The epsilon and delta that are left for ideal Gaussians and batches that are not cut.

        Delta is 0 if nothing is left.
        """
        growth = math.exp(epsilon) if epsilon < 700 else math.inf
        spent = self.outside + (1 + growth) * (self.overflow + REMOTE_PROBABILITY)
        left = (delta - spent) * math.exp(-self.epsilon)
        if left <= 0 or self.epsilon >= epsilon:
            return epsilon, 0.0
        return epsilon - self.epsilon, left


@final
class _CyclicPoissonModel:
    """The accountant of Poisson and cyclic Poisson sampling.

    Two participations of an example are at least `groups` steps apart, so that their columns of C
    do not overlap: each block of `groups` steps is a Gaussian mechanism on a Poisson sample.
    """

    def __init__(self, mechanism: Mechanism, sampling: Poisson | CyclicPoisson):
        groups = sampling.groups if isinstance(sampling, CyclicPoisson) else 1
        columns = _columns(mechanism, sampling.steps)
        if columns.bands > groups:
            raise InvalidInput(
                f"{sampling.name} sampling with {groups:,} group(s) covers strategies with at most "
                f"as many bands, and {mechanism.name} has {columns.bands:,}; use more groups, or "
                "balls-in-bins sampling"
            )
        self._mechanism, self._sampling = mechanism, sampling
        self._norm = columns.largest_norm
        self._blocks = -(-sampling.steps // groups)
        self._probability = sampling.probability
        self.largest_norm = self._norm * math.sqrt(self._blocks)

    def precision(self, scale: float) -> _Precision:
        outside = 2 * self._blocks * sampler_delta(self._norm / scale)
        outside += TRANSFORM_ERROR + TRANSFORM_ERROR_EACH * self._blocks
        return _precision(self._mechanism, self._sampling, self.largest_norm / scale, outside)

    def smallest(
        self, question: "Callable[[float], Question]", largest: float, failure: float
    ) -> float:
        """The smallest noise multiplier or epsilon that meets its question."""
        del failure  # nothing is sampled

        def search(cell: float, accuracy: float, guess: float | None) -> float:
            def log_excess(log_value: float) -> float:
                scale, epsilon, delta = question(math.exp(log_value))
                if not delta > 0:
                    return IMPOSSIBLE
                effective = scale / (self._norm * (1 + NORM_ERROR))
                composed = _poisson_composition(effective, self._probability, self._blocks, cell)
                return math.log(max(composed(epsilon), 1e-300)) - math.log(delta)

            return falling_root(log_excess, math.log(largest), accuracy, guess)

        # With wide cells, since this is far away; then with cells for the epsilon that was found.
        rough = search(LARGEST_CELL, 4e-3, None)
        cell = _cell(question(math.exp(rough)).epsilon, self._blocks)
        root = search(cell, ACCURACY, rough)
        # exp(log(largest)) can be smaller than `largest`, which means that nothing was found.
        return largest if root >= math.log(largest) else min(largest, math.exp(root))

    def confirms(self, question: Question, failure: float) -> bool:
        """Whether the answer to the question is yes, up to the accuracy of calibration."""
        del failure
        scale, epsilon, delta = question
        effective = scale / (self._norm * (1 + NORM_ERROR))
        cell = _cell(epsilon, self._blocks)
        return any(
            _poisson_composition(effective, self._probability, self._blocks, width)(epsilon)
            <= delta
            for width in (2 * cell, cell, cell / 2)
        )

    def guarantee(
        self, scale: float, epsilon: float, delta: float, failure: float
    ) -> SampledGuarantee:
        del failure
        return _guarantee(self._mechanism, self._sampling, scale, epsilon, delta, 0.0, self._norm)


@final
class _BallsInBinsModel:
    """The accountant of balls-in-bins sampling."""

    def __init__(self, mechanism: Mechanism, sampling: BallsInBins):
        self._mechanism, self._sampling = mechanism, sampling
        self._gram = gram_matrix(mechanism, sampling.steps, sampling.bins) * (1 + NORM_ERROR) ** 2
        self.largest_norm = math.sqrt(float(np.diag(self._gram).max()))

    def precision(self, scale: float) -> _Precision:
        mu = self.largest_norm / scale
        outside = self._sampling.bins * sampler_delta(mu)
        return _precision(self._mechanism, self._sampling, mu, outside)

    def smallest(
        self, question: "Callable[[float], Question]", largest: float, failure: float
    ) -> float:
        """A small noise multiplier or epsilon that is certified to meet its question."""
        return smallest_certified(self._gram, question, largest, failure=failure)

    def confirms(self, question: Question, failure: float) -> bool:
        """Whether the answer to the question is certified to be yes."""
        return is_certified(self._gram, question, failure=failure)

    def guarantee(
        self, scale: float, epsilon: float, delta: float, failure: float
    ) -> SampledGuarantee:
        norm = self.largest_norm
        return _guarantee(self._mechanism, self._sampling, scale, epsilon, delta, failure, norm)


def _too_little_noise(scale: float, delta: float) -> InvalidInput:
    return InvalidInput(
        f"with the noise multiplier {scale:g}, no useful epsilon can be stated at delta {delta:g}; "
        "use more noise or a larger delta"
    )


def _cut_too_often(sampling: Sampling, delta: float) -> InvalidInput:
    return InvalidInput(
        f"batches are cut to {sampling.max_batch_size:,} examples too often for delta {delta:g}: "
        f"that happens with probability {sampling.overflow_probability:.2g}; use a larger "
        "max_batch_size"
    )


def _model_of(mechanism: Mechanism, sampling: Sampling) -> _CyclicPoissonModel | _BallsInBinsModel:
    """The accountant of a sampling."""
    mechanism.check_noise(sampling.steps)
    if isinstance(sampling, BallsInBins):
        return _BallsInBinsModel(mechanism, sampling)
    if isinstance(sampling, Poisson | CyclicPoisson):
        return _CyclicPoissonModel(mechanism, sampling)
    raise InvalidInput(f"there is no accountant for {sampling}")


def _precision(mechanism: Mechanism, sampling: Sampling, mu: float, outside: float) -> _Precision:
    """The cost of finite precision, where C u is at most `mu` standard deviations long."""
    rounding = mu_with_rounding(mu, mechanism, sampling.steps) - mu
    return _Precision(2 * REMOTE * rounding, outside, sampling.overflow_probability)


def _guarantee(
    mechanism: Mechanism,
    sampling: Sampling,
    scale: float,
    epsilon: float,
    delta: float,
    failure: float,
    norm: float,
) -> SampledGuarantee:
    secret_batches = Hypothesis(
        "sampling",
        f"The batches are drawn by {sampling.name} sampling with a secret key, and stay secret.",
    )
    hypotheses = [secret_batches, CLIPPED_EXAMPLES, PLANNED_SIZE, KEYSTREAM, SECRECY]
    if failure:
        hypotheses.append(CERTIFICATE)
    return SampledGuarantee(
        mechanism, sampling, scale, epsilon, delta, failure, norm, tuple(hypotheses)
    )


class _Columns(NamedTuple):
    """What cyclic Poisson sampling needs to know about C.

    Attributes:
        bands: The largest number of rows from the diagonal to the last nonzero entry of a column.
        largest_norm: The largest norm of a column.
    """

    bands: int
    largest_norm: float


def bands_of(mechanism: Mechanism, steps: int) -> int:
    """The number of bands of C: how many groups cyclic Poisson sampling needs."""
    return _columns(mechanism, steps).bands


def _columns(mechanism: Mechanism, steps: int) -> _Columns:
    if (column := mechanism.first_column(steps)) is not None:
        return _Columns(_last_nonzero(column) + 1, float(np.linalg.norm(column)))
    strategy = mechanism.strategy(steps)
    if len(strategy) != steps:
        raise InvalidInput(
            f"{mechanism.name} has no bands, which Poisson sampling needs; use balls-in-bins"
        )
    bands = max(_last_nonzero(strategy[i:, i]) + 1 for i in range(steps))
    return _Columns(bands, float(np.sqrt(np.sum(strategy**2, axis=0).max())))


def _last_nonzero(entries: Vector) -> int:
    return int(np.flatnonzero(entries)[-1])


def _cell(epsilon: float, times: int) -> float:
    """The width of a cell that is accurate enough: the error grows as times * cell^2.

    It is a power of 2, so that similar epsilons are computed with equal cells.
    """
    wanted = min(LARGEST_CELL, max(SMALLEST_CELL, CELL * math.sqrt(epsilon / times)))
    return 2.0 ** math.floor(math.log2(wanted))


@lru_cache(maxsize=32)
def _poisson_composition(
    noise_multiplier: float, probability: float, times: int, cell: float
) -> Callable[[float], float]:
    """Delta as a function of epsilon, for compositions of a Poisson-subsampled Gaussian.

    The result is an upper bound: cells of the privacy loss distribution are rounded up ("connect
    the dots"), and what is cut off at the ends counts in full.
    """
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError:
        raise InvalidInput(
            "Poisson sampling needs the package dp-accounting: pip install 'dpftrl[dp-accounting]'"
        ) from None

    one: Any = privacy_loss_distribution.from_gaussian_mechanism(
        noise_multiplier, sampling_prob=probability, value_discretization_interval=cell
    )
    composed = one.self_compose(times)

    def delta(epsilon: float) -> float:
        return float(composed.get_delta_for_epsilon(epsilon))

    return delta
