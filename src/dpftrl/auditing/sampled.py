"""White-box audits of training on secret random batches.

The attacker knows everything but the noise and the batches. The release with the target is then a
mixture of Gaussians, one for every way to draw its batches, and the attack uses the exact
likelihood ratio of the mixture. Batches come from the same `Sampler` as in training, and noise from
the same `NoiseStream`, with fresh keys. Every example of the data set is one trial, in a coordinate
of its own.

All three samplings are one. The steps of an example are made of *blocks* that come together: single
steps under Poisson and cyclic Poisson sampling, all steps of a bin under balls-in-bins sampling.
The blocks are split into parts. An example has one part, drawn at random, and takes part in each
block of it with probability q, independently. Blocks of the same part are orthogonal, because
cyclic Poisson sampling covers only strategies with at most as many bands as groups. So with y_a the
inner product of the release and of what block a shows, and g_a its square,

    likelihood ratio = mean over parts of
                       product over its blocks a of 1 - q + q exp((y_a - g_a / 2) / s^2).

Guarantees:
    Under Poisson and balls-in-bins sampling, the examples of one run are independent trials. Under
    cyclic Poisson sampling the sizes of groups are fixed, so that counts vary less than those of
    independent trials (Hoeffding 1956), for which the bounds of Clopper and Pearson hold.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl._internal.checks import fraction, positive_number, whole_number
from dpftrl._internal.progress import Progress, ignore_progress
from dpftrl.accounting.amplification import SampledGuarantee, account_sampled
from dpftrl.auditing.lower_bounds import (
    DEFAULT_FAILURE,
    Counts,
    Thresholds,
    best_thresholds,
    exceedance_of,
    log_mean_exp,
    ratio,
)
from dpftrl.auditing.mechanism import (
    MOST_NUMBERS,
    MakeStream,
    StreamPlan,
    noisy_rounds,
    real_stream,
)
from dpftrl.auditing.worst_updates import information
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.noise import NoiseKey
from dpftrl.participation import BallsInBins, CyclicPoisson, MinSep, Poisson, Sampling
from dpftrl.sampler import Sampler

# By default there are so many trials, if that takes seconds.
DEFAULT_TRIALS: Final = 2**19
# One in so many trials is a further one, by which thresholds are chosen, from so many candidates.
ONE_IN: Final = 4
CANDIDATES: Final = 2000
# The most trials in one stream, and the most numbers of releases that are kept.
LARGEST_STREAM: Final = 2**16
NUMBERS_KEPT: Final = 2**23
# Rates: two of each direction.
RATES: Final = 4


class DrawsBatches(Protocol):
    """The part of a `Sampler` that an audit uses."""

    def batch(self, step: int) -> NDArray[np.int64]:
        """The examples in the batch of a step."""
        ...


# Makes a sampler with a key. Tests pass samplers that are wrong.
MakeSampler = Callable[[Sampling, NoiseKey], DrawsBatches]


@final
class Blocks(NamedTuple):
    """How the steps of one example are drawn; see the top of this file.

    Attributes:
        steps: One column per block: 1 in its steps.
        part: The part of each block.
        weights: The probability of each part.
        probability: The probability of a block whose part was drawn.
    """

    steps: Matrix
    part: NDArray[np.int64]
    weights: Vector
    probability: float

    @classmethod
    def of(cls, sampling: Sampling) -> "Blocks":
        """The blocks of a sampling."""
        steps = sampling.steps
        match sampling:
            case Poisson():
                parts, probability = 1, sampling.probability
            case CyclicPoisson():
                parts, probability = sampling.groups, sampling.probability
            case BallsInBins():
                turns = np.arange(steps) % sampling.bins
                blocks = (turns[:, None] == np.arange(sampling.bins)).astype(float)
                weights = np.full(sampling.bins, 1 / sampling.bins)
                return cls(blocks, np.arange(sampling.bins), weights, 1.0)
            case _:
                raise InvalidInput(f"{type(sampling).__name__} sampling cannot be audited")
        # A group is larger by one example where the groups do not divide the data set.
        sizes = -(-(sampling.dataset_size - np.arange(parts)) // parts)
        return cls(np.eye(steps), np.arange(steps) % parts, sizes / sizes.sum(), probability)


@final
class Mixture:
    """The release with the target, as a mixture of Gaussians, and its likelihood ratio."""

    def __init__(self, mechanism: Mechanism, sampling: Sampling, noise_multiplier: float):
        self._blocks = Blocks.of(sampling)
        shown = information(mechanism, sampling.steps) / noise_multiplier**2
        # One row per block: multiplied with a release, it gives y_a / s^2.
        self.weights: Matrix = self._blocks.steps.T @ shown
        self._gram = self.weights @ self._blocks.steps

    def log_ratio(self, products: Matrix) -> Vector:
        """The log-likelihood ratio of releases, from their products with `weights`."""
        exponents = products - np.diag(self._gram)[:, None] / 2
        q = self._blocks.probability
        terms = exponents if q == 1 else np.logaddexp(np.log1p(-q), np.log(q) + exponents)
        weights = self._blocks.weights
        logs = np.zeros((len(weights), products.shape[1]))
        np.add.at(logs, self._blocks.part, terms)
        return log_mean_exp(logs, weights)


@final
@dataclass(frozen=True)
class SampledAudit:
    """What an attack on training with secret random batches has shown, beside the claim.

    Attributes:
        claim: The guarantee that is audited.
        lower_bound: Epsilon is at least this, with the stated confidence.
        confidence: The probability that the lower bound holds.
        counts: How often the attacks were right and wrong.
    """

    claim: SampledGuarantee
    lower_bound: float
    confidence: float
    counts: Counts

    @property
    def exceeds_claim(self) -> bool:
        """Whether the attack has disproved the claim."""
        return not self.lower_bound <= self.claim.epsilon

    @property
    def ratio(self) -> float:
        """The lower bound over the claimed epsilon."""
        return ratio(self.lower_bound, self.claim.epsilon)

    def as_json(self) -> dict[str, Any]:
        """The audit as a JSON object."""
        counts = self.counts._asdict()
        del counts["middle_with"], counts["middle_without"]
        return {
            "mechanism": self.claim.mechanism.name,
            **self.claim.sampling.as_json(),
            "noise_multiplier": self.claim.noise_multiplier,
            "delta": self.claim.delta,
            "epsilon": self.claim.epsilon,
            "lower_bound": self.lower_bound,
            "ratio": self.ratio,
            "confidence": self.confidence,
            "exceeds_claim": self.exceeds_claim,
            **counts,
        }


def audit_sampled(
    mechanism: Mechanism,
    sampling: Sampling,
    noise_multiplier: float,
    delta: float,
    *,
    trials: int | None = None,
    failure: float = DEFAULT_FAILURE,
    make_stream: MakeStream | None = None,
    make_sampler: MakeSampler = Sampler,
    on_progress: Progress = ignore_progress,
) -> SampledAudit:
    """Attack training on secret random batches, and compare what that shows with the claim.

    Args:
        mechanism: The mechanism that correlates the noise.
        sampling: How batches are drawn.
        noise_multiplier: Standard deviation of Z divided by the clip norm.
        delta: The delta at which epsilon is claimed and bounded; see `audit_mechanism`.
        trials: Number of trials with the target, and as many without; by default 524,288, or fewer
            if there are more than 512 steps.
        failure: The probability that the lower bound is wrong.
        make_stream: Makes the noise stream that is attacked; by default the one of training.
        make_sampler: Makes the sampler that is attacked; by default the one of training.
        on_progress: Is told how far the audit has come.

    Guarantees:
        If the claim is true, `exceeds_claim` has a probability of at most `failure`. The thresholds
        are chosen by further trials, a quarter as many, which are not counted.
    """
    failure = fraction("failure", failure)
    positive_number("noise_multiplier", noise_multiplier)
    if sampling.max_batch_size is not None:
        raise InvalidInput(
            "an audit takes no max_batch_size: examples that are cut from the same batch are not "
            "independent trials"
        )
    on_progress(None, "accounting")
    claim = account_sampled(mechanism, sampling, noise_multiplier, delta)
    steps = mechanism.check_dense(sampling.steps)
    on_progress(None, "trials that choose the thresholds")
    mixture = Mixture(mechanism, sampling, noise_multiplier)
    if trials is None:
        trials = max(1, min(DEFAULT_TRIALS, MOST_NUMBERS // steps))
    trials = whole_number("trials", trials)
    plan = StreamPlan(mechanism, noise_multiplier, MinSep(steps, 1))
    pilot, counts = -(-trials // ONE_IN), Counts(0)
    make = make_stream or real_stream(plan)

    def ratios(size: int) -> tuple[Vector, Vector]:
        examples = sampling.dataset_size
        runs = [make_sampler(sampling, NoiseKey.generate()) for _ in range(0, size, examples)]
        with_target, without = (
            _ratios(make, plan, mixture, _Sums(samplers, examples, size)) for samplers in (runs, [])
        )
        return with_target, without

    chosen_by = [ratios(size) for size in _sizes(pilot)]
    thresholds = _thresholds(chosen_by, delta, failure)
    for size in _sizes(trials):
        counts = counts.plus(*ratios(size), thresholds)
        on_progress(counts.trials / trials, f"{counts.trials:,} of {trials:,} trials")
    return SampledAudit(claim, counts.epsilon_at_least(delta, failure), 1 - failure, counts)


def _sizes(trials: int) -> Iterator[int]:
    """Sizes of streams that hold all trials together."""
    for start in range(0, trials, LARGEST_STREAM):
        yield min(LARGEST_STREAM, trials - start)


def _thresholds(
    trials: Sequence[tuple[Vector, Vector]], delta: float, failure: float
) -> Thresholds:
    """The thresholds that would have been best for these trials, with the target and without."""
    with_target, without = (np.concatenate(some) for some in zip(*trials, strict=True))
    both = np.concatenate([with_target, without])
    candidates = np.quantile(both, np.linspace(0, 1, CANDIDATES))
    expected = best_thresholds(
        candidates,
        exceedance_of(with_target),
        exceedance_of(without),
        len(with_target),
        delta,
        failure / RATES,
    )
    return expected.thresholds


@final
class _Sums:
    """The sums of several runs, side by side: 1 for each example that is in the batch of its run.

    Attributes:
        size: Number of examples of all runs together.
    """

    def __init__(self, samplers: Sequence[DrawsBatches], dataset_size: int, size: int):
        self._samplers, self._dataset_size, self.size = samplers, dataset_size, size

    def __call__(self, step: int) -> Vector:
        total = np.zeros(self.size)
        for run, sampler in enumerate(self._samplers):
            batch = sampler.batch(step) + run * self._dataset_size
            total[batch[batch < self.size]] = 1.0
        return total


def _ratios(make_stream: MakeStream, plan: StreamPlan, mixture: Mixture, sums: _Sums) -> Vector:
    """The log-likelihood ratios of the examples of several runs."""
    size = sums.size
    products = np.zeros((len(mixture.weights), size))
    kept = max(1, NUMBERS_KEPT // size)
    step = 0
    for some in _chunks(noisy_rounds(make_stream, plan, sums, size), kept):
        products += mixture.weights[:, step : step + len(some)] @ some
        step += len(some)
    return mixture.log_ratio(products)


def _chunks(rounds: Iterator[Vector], most: int) -> Iterator[Matrix]:
    """The rounds as matrices of at most so many rows."""
    rows = list[Vector]()
    for row in rounds:
        rows.append(row)
        if len(rows) == most:
            yield np.array(rows)
            rows = []
    if rows:
        yield np.array(rows)
