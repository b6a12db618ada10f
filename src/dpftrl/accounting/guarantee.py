"""Privacy guarantees: their numbers, the hypotheses they rest on, and calibration to a target."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, Self, final

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.deprecation import renamed_argument, warn
from dpftrl.accounting.gaussian import (
    RADIUS_BITS,
    ULP,
    delta_of,
    epsilon_as_drawn,
    epsilon_of,
    ideal_delta,
    mu_before_rounding,
    mu_of,
    mu_with_rounding,
    sampler_delta,
)
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.mechanisms._sensitivity import ROUNDING, Sensitivity
from dpftrl.participation import FixedEpochs, Participation

Basis = Literal["assumed", "enforced", "observed"]
BufferType = Literal["float64", "float32"]

# The first relative increase of a calibrated noise multiplier that rounding left too small: a few
# units in the last place. Each further increase is twice as large, because the noise multiplier
# hardly changes mu when nearly all of mu comes from rounding in the noise buffers.
FIRST_STEP: Final = 2.0**-50
# Steps of an iteration for the largest mu, before the slower search by bisection.
FEW_STEPS: Final = 6
# The relative change of mu at which this iteration ends. It is above the rounding of mu.
SETTLED: Final = 1e-13


@final
@dataclass(frozen=True)
class Hypothesis:
    """One condition that the guarantee needs.

    Attributes:
        name: A short name.
        text: The condition, in a sentence.
        basis: Why it is believed: it is assumed, enforced by the server, or observed in a log.
    """

    name: str
    text: str
    basis: Basis = "assumed"


CLIPPING = Hypothesis(
    "clipping",
    "Every update is clipped to the clip norm, in L2, before it is summed.",
)
ADAPTIVE_CLIPPING = Hypothesis(
    CLIPPING.name,
    "Every update is clipped to the clip norm of its round, in L2, and divided by it. Together "
    "with the bit that says whether it was clipped, it has norm at most 1 before it is summed. The "
    "clip norm of a round depends on earlier releases only.",
)
ZERO_OUT = Hypothesis(
    "zero-out",
    "Which clients take part, and when a round closes, does not depend on any client's data; an "
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
    """One noise stream, from its first row to its last, and the participation it allows.

    Attributes:
        mechanism: The mechanism that correlates the noise.
        participation: The rounds in which one client may take part.
        noise_multiplier: Standard deviation of the independent Gaussians Z, in units of the clip
            norm, with the mechanism as it is given (the paper's noise multiplier).
        sensitivity: How far one client can move the strategy's output, at clip norm 1.
        buffers: The number type of the noise buffers. Rounding to float64 is covered by mu;
            rounding to float32, which version 0.1 used, is not.
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
        """Create a run and compute its sensitivity.

        Raises:
            InvalidInput: The noise would grow so large that float64 no longer resolves Z in it.
        """
        scale = positive_number("the noise multiplier", noise_multiplier)
        mechanism.check_noise(participation.rounds)
        return cls(mechanism, participation, scale, mechanism.sensitivity(participation), buffers)

    def with_participation(self, participation: Participation) -> "Run":
        """The same noise stream with another participation.

        Its noise is not checked again if there are no more rounds than before.
        """
        if participation.rounds > self.participation.rounds:
            self.mechanism.check_noise(participation.rounds)
        sensitivity = self.mechanism.sensitivity(participation)
        return replace(self, participation=participation, sensitivity=sensitivity)

    @cached_property
    def mu(self) -> float:
        """How far one client can move C X, in standard deviations of Z, including rounding."""
        return self.mu_of(self.sensitivity.value)

    @property
    def sigma(self) -> float:
        """The old name of `noise_multiplier`."""
        warn("Run.sigma", "Run.noise_multiplier")
        return self.noise_multiplier

    @property
    def ideal_mu(self) -> float:
        """Sensitivity / noise multiplier: the mu of a stream whose buffers are never rounded."""
        return self.sensitivity.value / self.noise_multiplier

    @property
    def rounding(self) -> float:
        """The part of mu that covers rounding in the noise buffers."""
        return self.mu - self.ideal_mu

    def mu_of(self, norm: float) -> float:
        """The mu of a client that moves the strategy's output by this norm, at clip norm 1."""
        if self.buffers == "float32" or norm == 0:
            return norm / self.noise_multiplier
        return mu_with_rounding(
            norm / self.noise_multiplier, self.mechanism, self.participation.rounds
        )

    @property
    def hypothesis(self) -> Hypothesis:
        """The hypothesis about participation."""
        p = self.participation
        often = f"at most {p.max_participations:,} of {p.rounds:,} rounds"
        gap = "exactly" if isinstance(p, FixedEpochs) else "at least"
        several = p.max_participations > 1
        apart = f", each {gap} {p.min_sep:,} after the one before" if several else ""
        return Hypothesis("participation", f"Each client takes part in {often}{apart}.")


@final
@dataclass(frozen=True)
class Guarantee:
    """A differential privacy guarantee for everything that one or several runs release.

    Attributes:
        runs: The noise streams that the guarantee covers.
        mu_of_one: The Gaussian differential privacy parameter of all runs together, for one client.
        delta: The delta at which epsilon is stated. It includes `sampler_delta`.
        hypotheses: The conditions that the guarantee needs.
        devices: The number of clients, all devices of one person, that are protected as one unit.
        common_cap: The largest number of rounds of one client over all runs together; None if no
            such limit was used.
        adjacency: The neighboring relation: one client's updates are replaced by zeros.
        epsilon: The smallest epsilon at `delta`.
        sampler_delta: The part of delta that is due to the finite range of the sampler, at any
            epsilon.

    Guarantees:
        The releases are mu-Gaussian DP (Dong, Roth and Su 2022) and rho-zCDP (Bun and Steinke 2016)
        under zero-out adjacency, hence (epsilon, total_delta)-DP, if the hypotheses hold.
        The releases are post-processing of C X + Z, adaptively chosen rows included (Denisov et al.
        2022, Theorem 2.1). Rounding in float64 noise buffers is part of mu (`mu_with_rounding`). No
        numerical error makes epsilon smaller than its true value.
    """

    runs: tuple[Run, ...]
    mu_of_one: float
    delta: float
    hypotheses: tuple[Hypothesis, ...]
    devices: int = 1
    common_cap: int | None = None
    adjacency: Literal["zero-out"] = field(default="zero-out", init=False)
    epsilon: float = field(init=False)
    sampler_delta: float = field(init=False, repr=False)
    _ideal_delta: float = field(init=False, repr=False)  # what is left for ideal Gaussians

    def __post_init__(self) -> None:
        object.__setattr__(self, "delta", float(self.delta))
        drawn = epsilon_as_drawn(self.delta, self.mu, ROUNDING, with_sampler=not self._is_v1)
        if not math.isfinite(drawn.epsilon):
            raise InvalidInput(f"so little noise gives no guarantee: mu is {self.mu:g}")
        object.__setattr__(self, "epsilon", drawn.epsilon)
        object.__setattr__(self, "sampler_delta", drawn.sampler_delta)
        object.__setattr__(self, "_ideal_delta", drawn.ideal_delta)

    @property
    def mu(self) -> float:
        """The parameter of Gaussian DP. It is proportional to the number of devices."""
        return self.mu_of_one * self.devices

    @property
    def rho(self) -> float:
        """The parameter of zCDP."""
        return self.mu * (self.mu / 2)

    @property
    def total_delta(self) -> float:
        """The delta of the guarantee: `delta`, except with almost no noise or for old runs.

        If `sampler_delta` is more than half of `delta`, the total is larger than `delta`. Runs of
        version 0.1 stated epsilon without the sampler, so there `sampler_delta` is added.
        """
        total = self._ideal_delta + self.sampler_delta
        if total <= self.delta * (1 + ULP) and not self._is_v1:
            return self.delta
        return min(1.0, total)

    @property
    def _is_v1(self) -> bool:
        """Whether any run was made by version 0.1, which kept its buffers in float32."""
        return any(run.buffers == "float32" for run in self.runs)

    @property
    def kind(self) -> Literal["exact", "upper bound"]:
        """Whether some client's pattern attains the numbers, or they are only upper bounds."""
        is_single = len(self.runs) == 1 and self.devices == 1 and self.common_cap is None
        is_exact = is_single and self.runs[0].sensitivity.kind == "exact"
        return "exact" if is_exact else "upper bound"

    @property
    def unit(self) -> str:
        """The privacy unit: whose data is protected."""
        if self.devices == 1:
            return "client"
        return f"{self.devices} clients (devices) of one person"

    def at(self, delta: float) -> "Guarantee":
        """The same guarantee, stated at another delta."""
        return replace(self, delta=delta)

    def for_devices(self, devices: int) -> "Guarantee":
        """The guarantee for a person with several devices, as an upper bound (group privacy).

        Args:
            devices: Number of devices of one person. Each can move C X as far as one client can.
        """
        return replace(
            self, devices=_check_devices(self.devices * whole_number("devices", devices))
        )

    def resting_on(self, *known: Hypothesis) -> "Guarantee":
        """The same guarantee, with these hypotheses in place of those with the same names."""
        return replace(self, hypotheses=_with_known(known, self.hypotheses))


@renamed_argument("sigma", "noise_multiplier")
def account(
    mechanism: Mechanism, participation: Participation, noise_multiplier: float, delta: float
) -> Guarantee:
    """Compute the guarantee of one run.

    Args:
        mechanism: The mechanism that correlates the noise.
        participation: The rounds in which one client may take part.
        noise_multiplier: Standard deviation of the independent Gaussians Z over the clip norm.
        delta: The delta at which to state epsilon.

    >>> from dpftrl import MinSep, mechanism
    >>> clients = MinSep.from_rounds_between(2000, rounds_between=1181, max_participations=2)
    >>> guarantee = account(mechanism("blt-b1000"), clients, noise_multiplier=16.1, delta=1e-10)
    >>> f"{guarantee.rho:.5f} {guarantee.epsilon:.4f}"
    '0.01394 0.9789'
    """
    return guarantee_of([Run.of(mechanism, participation, noise_multiplier)], delta)


def guarantee_of(runs: Iterable[Run], delta: float, known: Sequence[Hypothesis] = ()) -> Guarantee:
    """Compute the guarantee of runs in which the same clients may take part.

    Args:
        runs: One or more runs.
        delta: The delta at which to state epsilon.
        known: Hypotheses that replace the usual ones with the same names.

    Guarantees:
        Gaussian mechanisms compose by the sum of their mu^2, even if later ones are chosen by what
        the earlier ones released. This is an upper bound: one client may have the worst pattern in
        every run.
    """
    covered_runs = tuple(runs)
    if not covered_runs:
        raise InvalidInput("a guarantee covers at least one run, got none")
    total_mu = math.hypot(*(run.mu for run in covered_runs))
    hypotheses = (
        *dict.fromkeys(run.hypothesis for run in covered_runs),
        CLIPPING,
        ZERO_OUT,
        KEYSTREAM,
        SECRECY,
        *([ROUNDING_NOT_COVERED] if any(r.buffers == "float32" for r in covered_runs) else []),
    )
    return Guarantee(covered_runs, total_mu, delta, _with_known(known, hypotheses))


@renamed_argument("sigma", "noise_multiplier")
def delta_for(
    mechanism: Mechanism,
    participation: Participation,
    noise_multiplier: float,
    epsilon: float,
    devices: int = 1,
) -> float:
    """The smallest delta at which a run is (epsilon, delta)-DP.

    Args:
        mechanism: The mechanism that correlates the noise.
        participation: The rounds in which one client may take part.
        noise_multiplier: Standard deviation of the independent Gaussians Z over the clip norm.
        epsilon: The epsilon at which to state delta.
        devices: Devices of one person to protect as one unit.

    Guarantees:
        `account` at the returned delta states an epsilon of at most `epsilon`.
    """
    mu = _padded(Run.of(mechanism, participation, noise_multiplier).mu * _check_devices(devices))
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
    """The smallest noise multiplier with which a run is (epsilon, delta)-DP.

    Args:
        mechanism: The mechanism that correlates the noise.
        participation: The rounds in which one client may take part.
        epsilon: The target epsilon.
        delta: The target delta.
        devices: Devices of one person to protect as one unit.

    Raises:
        InvalidInput: No noise reaches the target, or rounding in the noise buffers would make up
            too much of mu.

    Guarantees:
        `account` at the returned noise multiplier gives an epsilon of at most `epsilon`.
    """
    epsilon = positive_number("epsilon", epsilon)
    return smallest_noise_multiplier(
        mechanism,
        participation,
        _largest_mu(epsilon, delta) / (1 + ROUNDING),
        devices,
        lambda mu: _is_within(mu, epsilon, delta),
    )


def calibrate_rho(
    mechanism: Mechanism, participation: Participation, rho: float, devices: int = 1
) -> float:
    """The smallest noise multiplier with which a run is rho-zCDP.

    Args:
        mechanism: The mechanism that correlates the noise.
        participation: The rounds in which one client may take part.
        rho: The target parameter of zCDP.
        devices: Devices of one person to protect as one unit.
    """
    rho = positive_number("rho", rho)
    largest_mu = math.sqrt(2) * math.sqrt(rho)  # 2 * rho itself could overflow
    return smallest_noise_multiplier(
        mechanism, participation, largest_mu, devices, lambda mu: mu * (mu / 2) <= rho
    )


def smallest_noise_multiplier(
    mechanism: Mechanism,
    participation: Participation,
    target_mu: float,
    devices: int,
    is_enough: Callable[[float], bool],
) -> float:
    """The smallest noise multiplier of a run whose mu meets a target.

    Args:
        mechanism: The mechanism that correlates the noise.
        participation: The rounds in which one client may take part.
        target_mu: The largest mu that meets the target, up to rounding.
        devices: Devices of one person to protect as one unit.
        is_enough: Whether a mu, of all devices of a person, meets the target.

    Raises:
        InvalidInput: Rounding in the noise buffers would make up too much of mu.

    Guarantees:
        `is_enough` is true for the mu of a run with the result, including rounding.
    """
    mechanism.check_noise(participation.rounds)
    sensitivity, group_size = mechanism.sensitivity(participation).value, _check_devices(devices)
    rounds = participation.rounds
    before_rounding = mu_before_rounding(target_mu / group_size, mechanism, rounds)
    noise_multiplier = sensitivity / before_rounding

    def group_mu() -> float:
        return mu_with_rounding(sensitivity / noise_multiplier, mechanism, rounds) * group_size

    step = FIRST_STEP
    while not is_enough(group_mu()):
        noise_multiplier, step = noise_multiplier * (1 + step), 2 * step
    return noise_multiplier


def _with_known(known: Sequence[Hypothesis], usual: Sequence[Hypothesis]) -> tuple[Hypothesis, ...]:
    """The known hypotheses, then the usual ones with other names."""
    names = {hypothesis.name for hypothesis in known}
    return (*known, *(other for other in usual if other.name not in names))


def _is_within(mu: float, epsilon: float, delta: float) -> bool:
    """Whether this mu gives (epsilon, delta)-DP, including the sampler's part of delta."""
    padded = _padded(mu)
    return (
        sampler_delta(padded) <= delta / 2
        and epsilon_of(ideal_delta(delta, padded), padded) <= epsilon
    )


def _largest_mu(epsilon: float, delta: float) -> float:
    """The largest mu that gives (epsilon, delta)-DP, up to a few units in the last place."""
    low, high = 0.0, mu_of(epsilon, delta)
    # The sampler's part of delta hardly depends on mu, so a few steps settle it.
    mu = high
    for _ in range(FEW_STEPS):
        before, mu = mu, mu_of(epsilon, ideal_delta(delta, mu), guess=mu)
        if abs(mu - before) <= SETTLED * mu and sampler_delta(mu) <= delta / 2:
            return mu
    while high - low > ULP * high:
        middle = (low + high) / 2
        if not low < middle < high:
            break
        low, high = (middle, high) if _is_within(middle, epsilon, delta) else (low, middle)
    if not low > 0:
        raise InvalidInput(
            f"no noise from {RADIUS_BITS} random bits guarantees a delta as small as {delta!r}; "
            f"use a --delta of at least {4 * 2.0**-RADIUS_BITS:.1g}"
        )
    return low


def _check_devices(count: int) -> int:
    """Return `count`; refuse it if it is below 1 or too large for a float."""
    positive_number("devices", whole_number("devices", count))
    return count


def _padded(value: float) -> float:
    """The value, increased by a bound on the rounding error of a computed sensitivity."""
    return value * (1 + ROUNDING)
