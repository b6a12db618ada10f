"""What a run promises: the numbers, and everything that they rest on."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, Self, final

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.deprecation import renamed_argument, warn
from dpftrl.accounting.finite_precision import (
    RADIUS_BITS,
    ideal_delta,
    mu_before_rounding,
    mu_with_rounding,
    sampler_delta,
)
from dpftrl.accounting.gaussian import ULP, delta_of, epsilon_of, mu_of
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.mechanisms._sensitivity import ROUNDING, Sensitivity
from dpftrl.participation import FixedEpochs, Participation

Basis = Literal["assumed", "enforced", "observed"]
BufferType = Literal["float64", "float32"]

# How much a calibrated sigma is raised first, where rounding left it too small. Every further step
# is twice as large: if mu is nearly all rounding of buffers, sigma hardly changes it.
FIRST_STEP: Final = 2.0**-50


@final
@dataclass(frozen=True)
class Hypothesis:
    """One thing that must be so for the guarantee to hold, and why we think that it is."""

    name: str
    text: str
    basis: Basis = "assumed"


CLIPPING = Hypothesis(
    "clipping",
    "Every update is clipped to the clip norm, in L2, before it is summed.",
)
ZERO_OUT = Hypothesis(
    "zero-out",
    "Which devices take part, and when a round closes, does not depend on any device's data; an "
    "update that is missing or unfit counts as zero.",
)
KEYSTREAM = Hypothesis(
    "keystream",
    "The noise comes from a keyed pseudo-random keystream that nobody without its key can tell "
    "from random bits: the guarantee is computational.",
)
SECRECY = Hypothesis(
    "secrecy",
    "The noise key and the noise state stay secret, and no row of noise covers two different sums.",
)
ROUNDING_NOT_COVERED = Hypothesis(
    "rounding",
    "The noise buffers were kept in float32, as version 0.1 did. How their rounding shifts the "
    "noise is not covered by epsilon.",
)


@final
@dataclass(frozen=True)
class Run:
    """One stream of noise from its first row on, and who may take part while it lasts.

    Attributes:
        mechanism: What correlates the noise.
        participation: Which rounds one device may take part in.
        noise_multiplier: Standard deviation of the independent Gaussians Z, in units of the clip
            norm, with the mechanism as it is given (the paper's noise multiplier).
        sensitivity: How far one device can move the strategy's output, at clip norm 1.
        buffers: What the noise buffers are kept in. Rounding to float64 is covered by mu; rounding
            to float32, as version 0.1 did, is not.
    """

    mechanism: Mechanism
    participation: Participation
    noise_multiplier: float
    sensitivity: Sensitivity
    buffers: BufferType = "float64"

    @classmethod
    def of(
        cls,
        mechanism: Mechanism,
        participation: Participation,
        noise_multiplier: float,
        buffers: BufferType = "float64",
    ) -> Self:
        """Compute the sensitivity."""
        scale = positive_number("the noise multiplier", noise_multiplier)
        mechanism.check_rounds(participation.rounds)
        return cls(mechanism, participation, scale, mechanism.sensitivity(participation), buffers)

    @cached_property
    def mu(self) -> float:
        """How many standard deviations one device can move the output, rounding included."""
        return self.mu_of(self.sensitivity.value)

    @property
    def sigma(self) -> float:
        """The old name of `noise_multiplier`."""
        warn("Run.sigma", "Run.noise_multiplier")
        return self.noise_multiplier

    @property
    def ideal_mu(self) -> float:
        """Sensitivity over sigma: mu if no buffer were ever rounded."""
        return self.sensitivity.value / self.noise_multiplier

    @property
    def rounding(self) -> float:
        """The part of mu that covers rounding in the noise buffers."""
        return self.mu - self.ideal_mu

    def mu_of(self, norm: float) -> float:
        """The mu of a device that moves the strategy's output by this norm, at clip norm 1."""
        if self.buffers == "float32" or norm == 0:
            return norm / self.noise_multiplier
        return mu_with_rounding(
            norm / self.noise_multiplier, self.mechanism, self.participation.rounds
        )

    @property
    def hypothesis(self) -> Hypothesis:
        """What is said of participation."""
        p = self.participation
        often = f"at most {p.max_participations:,} of {p.rounds:,} rounds"
        gap = "exactly" if isinstance(p, FixedEpochs) else "at least"
        several = p.max_participations > 1
        apart = f", each {gap} {p.min_sep:,} after the one before" if several else ""
        return Hypothesis("participation", f"Each device takes part in {often}{apart}.")


@final
@dataclass(frozen=True)
class Guarantee:
    """A differential privacy guarantee for everything that one or several runs release.

    Attributes:
        runs: The streams of noise that it covers.
        mu_of_one: Their Gaussian differential privacy parameter, together, for one device.
        delta: The delta at which epsilon is stated, with what the sampler takes of it.
        hypotheses: What it rests on.
        devices: How many devices are protected as one.
        common_cap: Most rounds of one device over all the runs together, where that was used.

    Guarantees:
        The releases are mu-Gaussian DP (Dong, Roth and Su 2022) and rho-zCDP (Bun and Steinke 2016)
        under zero-out adjacency, hence (epsilon, total_delta)-DP, if the hypotheses hold:
        they are post-processing of C X + Z, adaptively chosen rows included (Denisov et al. 2022,
        Theorem 2.1). Rounding in float64 noise buffers is part of mu (`mu_with_rounding`). No
        numerical error makes epsilon smaller than it is.
    """

    runs: tuple[Run, ...]
    mu_of_one: float
    delta: float
    hypotheses: tuple[Hypothesis, ...]
    devices: int = 1
    common_cap: int | None = None
    adjacency: Literal["zero-out"] = field(default="zero-out", init=False)
    epsilon: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", float(self.delta))
        object.__setattr__(self, "epsilon", epsilon_of(self._ideal_delta, _padded(self.mu)))
        if not math.isfinite(self.epsilon):
            raise InvalidInput(f"so little noise guarantees nothing: mu is {self.mu:g}")

    @property
    def mu(self) -> float:
        """The Gaussian differential privacy parameter; g devices move the output g times as far."""
        return self.mu_of_one * self.devices

    @property
    def rho(self) -> float:
        """The parameter of zCDP."""
        return self.mu * (self.mu / 2)

    @property
    def sampler_delta(self) -> float:
        """The part of delta that the finite range of the sampler takes, at any epsilon."""
        return sampler_delta(self.mu)

    @property
    def total_delta(self) -> float:
        """The delta of the guarantee: `delta`, unless there is next to no noise.

        Where the sampler alone takes more than half of `delta`, the total is larger. Runs of
        version 0.1 stated epsilon without the sampler, whose part comes on top there.
        """
        whole = self._ideal_delta + self.sampler_delta
        if whole <= self.delta * (1 + ULP) and not self._is_v1:
            return self.delta
        return min(1.0, whole)

    @property
    def _ideal_delta(self) -> float:
        return self.delta if self._is_v1 else ideal_delta(self.delta, _padded(self.mu))

    @property
    def _is_v1(self) -> bool:
        return any(run.buffers == "float32" for run in self.runs)

    @property
    def kind(self) -> Literal["exact", "upper bound"]:
        """Whether the numbers are attained by some participant, or only bound them all."""
        alone = len(self.runs) == 1 and self.devices == 1 and self.common_cap is None
        exact = alone and self.runs[0].sensitivity.kind == "exact"
        return "exact" if exact else "upper bound"

    @property
    def unit(self) -> str:
        """Whose data is protected as one."""
        return "device" if self.devices == 1 else f"{self.devices} devices of one person"

    def at(self, delta: float) -> "Guarantee":
        """The same guarantee, stated at another delta."""
        return replace(self, delta=delta)

    def for_devices(self, devices: int) -> "Guarantee":
        """A bound for a person with so many devices: each may move the output by as much again."""
        return replace(self, devices=_devices(self.devices * whole_number("devices", devices)))

    def resting_on(self, *known: Hypothesis) -> "Guarantee":
        """The same guarantee, where more is known of some hypotheses: they replace the old ones."""
        names = {hypothesis.name for hypothesis in known}
        kept = tuple(old for old in self.hypotheses if old.name not in names)
        return replace(self, hypotheses=(*known, *kept))


@renamed_argument("sigma", "noise_multiplier")
def account(
    mechanism: Mechanism, participation: Participation, noise_multiplier: float, delta: float
) -> Guarantee:
    """The guarantee of one run.

    >>> from dpftrl import MinSep, mechanism
    >>> clients = MinSep.from_rounds_between(2000, rounds_between=1181, max_participations=2)
    >>> promise = account(mechanism("blt-b1000"), clients, noise_multiplier=16.1, delta=1e-10)
    >>> f"{promise.rho:.5f} {promise.epsilon:.4f}"
    '0.01394 0.9789'
    """
    return guarantee_of([Run.of(mechanism, participation, noise_multiplier)], delta)


def guarantee_of(runs: Iterable[Run], delta: float) -> Guarantee:
    """The guarantee of runs that the same devices may take part in.

    Args:
        runs: One or more.
        delta: Where to state epsilon.

    Guarantees:
        Gaussian mechanisms compose by the sum of their mu^2, even if later ones are chosen by what
        the earlier ones released. One device may be at its worst in every run: an upper bound.
    """
    covered = tuple(runs)
    if not covered:
        raise InvalidInput("a guarantee covers at least one run, got none")
    together = math.hypot(*(run.mu for run in covered))
    rests_on = (
        *dict.fromkeys(r.hypothesis for r in covered),
        CLIPPING,
        ZERO_OUT,
        KEYSTREAM,
        SECRECY,
        *([ROUNDING_NOT_COVERED] if any(r.buffers == "float32" for r in covered) else []),
    )
    return Guarantee(covered, together, delta, rests_on)


@renamed_argument("sigma", "noise_multiplier")
def delta_for(
    mechanism: Mechanism,
    participation: Participation,
    noise_multiplier: float,
    epsilon: float,
    devices: int = 1,
) -> float:
    """The smallest delta at which the run is (epsilon, delta)-DP, for so many devices.

    Guarantees:
        `account` at the delta returned states an epsilon of at most `epsilon`.
    """
    mu = _padded(Run.of(mechanism, participation, noise_multiplier).mu * _devices(devices))
    delta, step = delta_of(epsilon, mu) + sampler_delta(mu), ULP
    while delta < 1 and epsilon_of(ideal_delta(delta, mu), mu) > epsilon:
        delta, step = delta * (1 + step), 2 * step
    return min(1.0, delta)


def calibrate(
    mechanism: Mechanism,
    participation: Participation,
    epsilon: float,
    delta: float,
    devices: int = 1,
) -> float:
    """The smallest sigma whose guarantee, for so many devices, does not pass (epsilon, delta).

    Guarantees:
        `account` at the sigma returned gives an epsilon of at most `epsilon`.
    """
    epsilon = positive_number("epsilon", epsilon)
    mechanism.check_rounds(participation.rounds)
    value, times = mechanism.sensitivity(participation).value, _devices(devices)
    rounds = participation.rounds
    most = _largest_mu(epsilon, delta) / times
    noise_multiplier = _padded(value) / mu_before_rounding(most, mechanism, rounds)
    step = FIRST_STEP
    while not _keeps(
        mu_with_rounding(value / noise_multiplier, mechanism, rounds) * times, epsilon, delta
    ):
        noise_multiplier, step = noise_multiplier * (1 + step), 2 * step
    return noise_multiplier


def calibrate_rho(
    mechanism: Mechanism, participation: Participation, rho: float, devices: int = 1
) -> float:
    """The smallest sigma whose zCDP parameter, for so many devices, does not pass `rho`."""
    rho = positive_number("rho", rho)
    mechanism.check_rounds(participation.rounds)
    value, times = mechanism.sensitivity(participation).value, _devices(devices)
    rounds = participation.rounds
    most = math.sqrt(2) * math.sqrt(rho) / times  # 2 * rho may be no float any more
    noise_multiplier = value / mu_before_rounding(most, mechanism, rounds)
    step = FIRST_STEP
    while (mu := mu_with_rounding(value / noise_multiplier, mechanism, rounds) * times) * (
        mu / 2
    ) > rho:
        noise_multiplier, step = noise_multiplier * (1 + step), 2 * step
    return noise_multiplier


def _keeps(mu: float, epsilon: float, delta: float) -> bool:
    """Whether this mu is within (epsilon, delta), the sampler's part of delta included."""
    padded = _padded(mu)
    return (
        sampler_delta(padded) <= delta / 2
        and epsilon_of(ideal_delta(delta, padded), padded) <= epsilon
    )


def _largest_mu(epsilon: float, delta: float) -> float:
    """The largest mu that keeps to (epsilon, delta), to a few digits of the last place."""
    low, high = 0.0, mu_of(epsilon, delta)
    if _keeps(high / (1 + 2 * ROUNDING), epsilon, delta):
        return high
    while high - low > ULP * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if _keeps(middle, epsilon, delta) else (low, middle)
    if not low > 0:
        raise InvalidInput(
            f"no noise of {RADIUS_BITS} random bits guarantees a delta as small as {delta!r}; give "
            f"a --delta of at least {4 * 2.0**-RADIUS_BITS:.1g}"
        )
    return low


def _devices(count: int) -> int:
    """Refuse what is no number of devices, or more than any float."""
    positive_number("devices", whole_number("devices", count))
    return count


def _padded(value: float) -> float:
    """A little more, for the rounding in a computed sensitivity."""
    return value * (1 + ROUNDING)
