"""White-box audits of mechanisms: the best possible attack on the real noise stream.

The attacker knows everything but the noise: the mechanism, the noise multiplier, and the updates of
the target in the rounds where it takes part. It sees all that a run releases, and tells a run with
the target from one without by the likelihood ratio, which no other test can beat (Neyman and
Pearson 1933). Nobody attacks a real run like that. The audit checks that noise, mechanism and
accounting fit together: a lower bound above the claimed epsilon proves that one of them is wrong.

The noise comes from the same `NoiseStream` as in training, with fresh keys. Every coordinate of a
stream is one trial: the update of a client of its own, of norm 1.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, final

import numpy as np

from dpftrl._internal.arrays import Vector
from dpftrl._internal.checks import fraction, positive_number, whole_number
from dpftrl._internal.progress import Progress, ignore_progress
from dpftrl.accounting import Guarantee, account, epsilon_of
from dpftrl.auditing.lower_bounds import (
    DEFAULT_FAILURE,
    PARTS,
    Counts,
    ExpectedBounds,
    best_thresholds,
    gaussian_exceedance,
    least_trials,
    ratio,
)
from dpftrl.auditing.worst_updates import information, worst_updates
from dpftrl.clipping import Grid
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.participation import Participation, Pattern

CLIP_NORM: Final = 1.0
# By default there are as many trials as should show this share of what the release shows at all,
FULL_SHARE: Final = 0.94
# but at least and at most so many, and at most so many random numbers in the trials of one kind.
FEWEST_TRIALS: Final = 2**16
MOST_TRIALS: Final = 2**23
MOST_NUMBERS: Final = 2**28
# Numbers of one stream over all rounds, so that its buffers fit into memory: 64 MB.
NUMBERS_OF_STREAM: Final = 2**23
LARGEST_STREAM: Final = 2**17
# The sensitivity counts as attained if the release shows it up to this share.
NEARLY: Final = 1 - 1e-6
# Thresholds that are tried, and how many standard deviations they reach beyond both means.
CANDIDATES: Final = 2000
REACH: Final = 6.0


class AddsNoise(Protocol):
    """The part of a `NoiseStream` that an audit uses."""

    def add_to(self, total: Any, grid: Grid | None = None, *, updates: int | None = None) -> None:
        """Add the noise of the next round to a sum, in place."""
        ...


# Makes a stream of so many coordinates with a key. Tests pass streams that are wrong.
MakeStream = Callable[[int, NoiseKey], AddsNoise]


@final
@dataclass(frozen=True)
class StreamPlan:
    """What a noise stream needs to know; it implements `NoisePlan`."""

    mechanism: Mechanism
    noise_multiplier: float
    participation: Participation
    buffers: Literal["float32", "float64"] = "float64"


@final
@dataclass(frozen=True)
class MechanismAudit:
    """What an attack on the noise stream of a mechanism has shown, beside the claim.

    Attributes:
        claim: The guarantee that is audited.
        lower_bound: Epsilon is at least this, with the stated confidence.
        mu_lower_bound: Mu is at least this, with the same confidence.
        confidence: The probability that both lower bounds hold.
        counts: How often the attacks were right and wrong.
        pattern: The rounds in which the target takes part.
        attained_mu: The mu that the release has for this target in ideal arithmetic.
    """

    claim: Guarantee
    lower_bound: float
    mu_lower_bound: float
    confidence: float
    counts: Counts
    pattern: Pattern
    attained_mu: float

    @property
    def exceeds_claim(self) -> bool:
        """Whether the attack has disproved the claim."""
        return not (self.lower_bound <= self.claim.epsilon and self.mu_lower_bound <= self.claim.mu)

    @property
    def ratio(self) -> float:
        """The lower bound over the claimed epsilon."""
        return ratio(self.lower_bound, self.claim.epsilon)

    @property
    def is_attained(self) -> bool:
        """Whether the target moves the release as much as the claim allows, up to rounding."""
        return self.attained_mu >= NEARLY * self.claim.mu

    def as_json(self) -> dict[str, Any]:
        """The audit as a JSON object."""
        run = self.claim.runs[0]
        return {
            "mechanism": run.mechanism.name,
            "rounds": run.participation.rounds,
            "min_sep": run.participation.min_sep,
            "max_participations": run.participation.max_participations,
            "noise_multiplier": run.noise_multiplier,
            "delta": self.claim.delta,
            "epsilon": self.claim.epsilon,
            "lower_bound": self.lower_bound,
            "ratio": self.ratio,
            "mu": self.claim.mu,
            "mu_lower_bound": self.mu_lower_bound,
            "confidence": self.confidence,
            "exceeds_claim": self.exceeds_claim,
            "attained": self.is_attained,
            "attained_mu": self.attained_mu,
            "pattern": self.pattern,
            **self.counts._asdict(),
        }


def audit_mechanism(
    mechanism: Mechanism,
    participation: Participation,
    noise_multiplier: float,
    delta: float,
    *,
    trials: int | None = None,
    failure: float = DEFAULT_FAILURE,
    make_stream: MakeStream | None = None,
    on_progress: Progress = ignore_progress,
) -> MechanismAudit:
    """Attack the noise stream of a mechanism, and compare what that shows with the claim.

    Args:
        mechanism: The mechanism that correlates the noise.
        participation: The rounds in which one client may take part.
        noise_multiplier: Standard deviation of Z divided by the clip norm.
        delta: The delta at which epsilon is claimed and bounded. Choose a large one, such as 0.01:
            no feasible number of trials says anything about rates near 1e-10.
        trials: Number of trials with the target, and as many without. By default as many as should
            show 94% of what the release shows, from 65,536 up to 8,388,608.
        failure: The probability that the lower bounds are wrong.
        make_stream: Makes the noise stream that is attacked; by default the one of training.
        on_progress: Is told how far the audit has come.

    Guarantees:
        If the claim is true, `exceeds_claim` has a probability of at most `failure`. The thresholds
        are computed from the claim alone, before any trial.
    """
    failure = fraction("failure", failure)
    claim = account(
        mechanism, participation, positive_number("noise_multiplier", noise_multiplier), delta
    )
    rounds = mechanism.check_dense(participation.rounds)
    on_progress(None, "searching for the worst participation")
    shown = information(mechanism, rounds)
    worst = worst_updates(mechanism, participation, shown)
    mu = worst.norm / noise_multiplier

    def expected(count: int) -> ExpectedBounds:
        return _expected(mu, count, delta, failure)

    if trials is None:
        most = max(FEWEST_TRIALS, min(MOST_TRIALS, MOST_NUMBERS // rounds))
        wanted = FULL_SHARE * epsilon_of(delta, mu)
        trials = least_trials(expected, wanted, FEWEST_TRIALS, most)
    trials = whole_number("trials", trials)
    thresholds = expected(trials).thresholds
    plan = StreamPlan(mechanism, noise_multiplier, participation)
    counts = Counts(0)
    weights = shown @ worst.updates / noise_multiplier**2
    for size in stream_sizes(trials, rounds):
        with_target, without = (
            _ratios(make_stream or real_stream(plan), plan, updates, weights, mu, size)
            for updates in (worst.updates, 0 * worst.updates)
        )
        counts = counts.plus(with_target, without, thresholds)
        on_progress(counts.trials / trials, f"{counts.trials:,} of {trials:,} trials")
    part = failure / PARTS
    return MechanismAudit(
        claim,
        counts.epsilon_at_least(delta, 4 * part),
        counts.mu_at_least(2 * part),
        1 - failure,
        counts,
        worst.pattern,
        mu,
    )


def real_stream(plan: StreamPlan) -> MakeStream:
    """Make the streams that training uses, with buffers whatever their size."""

    def make(size: int, key: NoiseKey) -> NoiseStream:
        return NoiseStream(plan, size, key=key, clip_norm=CLIP_NORM, mode="buffered")

    return make


def stream_sizes(trials: int, rounds: int) -> Iterator[int]:
    """Sizes of streams that hold all trials together."""
    size = max(1, min(LARGEST_STREAM, NUMBERS_OF_STREAM // rounds))
    for start in range(0, trials, size):
        yield min(size, trials - start)


def noisy_rounds(
    make_stream: MakeStream, plan: StreamPlan, sums: Callable[[int], Vector], size: int
) -> Iterator[Vector]:
    """Run a stream with a fresh key over sums, and yield what each round releases.

    Args:
        make_stream: Makes the stream.
        plan: The plan of the stream.
        sums: The sum of a round; its entries are 0 or updates of norm 1 of different clients.
        size: Number of coordinates.
    """
    grid = Grid.for_noise(plan.noise_multiplier, CLIP_NORM)
    if not CLIP_NORM / grid.step == round(CLIP_NORM / grid.step):
        raise InvalidInput(
            f"the noise multiplier {plan.noise_multiplier:g} is so large that an update is less "
            "than a step of the sum; audit a smaller one"
        )
    stream = make_stream(size, NoiseKey.generate())
    for number in range(plan.participation.rounds):
        steps = np.rint(sums(number) * (CLIP_NORM / grid.step)).astype(np.int64)
        stream.add_to(steps, grid, updates=size)
        yield grid.values(steps)


def _ratios(
    make_stream: MakeStream,
    plan: StreamPlan,
    updates: Vector,
    weights: Vector,
    mu: float,
    size: int,
) -> Vector:
    """The log-likelihood ratios of `size` trials with these updates."""
    total = np.full(size, -(mu**2) / 2)
    rounds = noisy_rounds(make_stream, plan, lambda t: np.full(size, updates[t]), size)
    for weight, released in zip(weights, rounds, strict=True):
        total += weight * released
    return total


def _expected(mu: float, trials: int, delta: float, failure: float) -> ExpectedBounds:
    """The best thresholds for Gaussians that are mu apart: the ratio is N(±mu^2/2, mu^2)."""
    reach = mu**2 / 2 + REACH * mu
    return best_thresholds(
        np.linspace(-reach, reach, CANDIDATES),
        gaussian_exceedance(mu**2 / 2, mu),
        gaussian_exceedance(-(mu**2) / 2, mu),
        trials,
        delta,
        failure / PARTS,
    )
