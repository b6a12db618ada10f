"""Enclosures of the numbers of a guarantee, at a precision that is raised until they are narrow."""

import importlib.util
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from dpftrl.errors import InvalidInput, TooLarge
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import Participation

if TYPE_CHECKING:
    from flint import arb

# Bits of the balls. Most mechanisms need the first; recursions with cancellation need more.
PRECISIONS: Final = (128, 512, 2048)
# A relative width of epsilon at which the precision is not raised further. Intervals of long
# floats, as for bands, do not become narrower with more bits.
NARROW: Final = 2e-13


class Enclosure(NamedTuple):
    """An interval that contains the true value for certain.

    Attributes:
        low: The true value is not smaller.
        high: The true value is not larger.
    """

    low: float
    high: float

    @property
    def relative_width(self) -> float:
        """The width over the upper end, or 0 if both ends are 0."""
        return (self.high - self.low) / self.high if self.high > 0 else 0.0

    def __str__(self) -> str:
        return f"[{self.low!r}, {self.high!r}]"


class NoiseStream(NamedTuple):
    """One noise stream that a guarantee covers.

    Attributes:
        mechanism: The mechanism that correlates the noise.
        participation: The rounds that one client may take part in.
        noise_multiplier: Standard deviation of Z over the clip norm.
        buffers: The number type of the noise buffers. With float32, as in version 0.1, a guarantee
            covers neither rounding nor the sampler.
    """

    mechanism: Mechanism
    participation: Participation
    noise_multiplier: float
    buffers: str = "float64"


class RigorousNumbers(NamedTuple):
    """Enclosures of the numbers of a guarantee.

    Attributes:
        sensitivities: The sensitivity of every noise stream, at clip norm 1.
        mu: The Gaussian DP parameter of all streams and devices together, rounding included.
        epsilon: The smallest epsilon at the stated delta.
        delta: The smallest delta at the stated epsilon, the sampler's part included.
    """

    sensitivities: tuple[Enclosure, ...]
    mu: Enclosure
    epsilon: Enclosure
    delta: Enclosure

    def as_json(self) -> dict[str, Any]:
        """Return the enclosures as pairs of numbers."""
        return {
            "sensitivity": [list(enclosure) for enclosure in self.sensitivities],
            "mu": list(self.mu),
            "epsilon": list(self.epsilon),
            "delta": list(self.delta),
        }


def is_installed() -> bool:
    """Whether python-flint, which does the interval arithmetic, is installed."""
    return importlib.util.find_spec("flint") is not None


def enclose(
    streams: Iterable[NoiseStream], delta: float, stated_epsilon: float, devices: int = 1
) -> RigorousNumbers:
    """Enclose the numbers of a guarantee for noise streams that share their clients.

    Args:
        streams: One or more noise streams, without sampling.
        delta: The delta of the guarantee.
        stated_epsilon: The epsilon of the guarantee, at which delta is enclosed.
        devices: The number of clients that are protected as one unit.

    Raises:
        InvalidInput: python-flint is not installed, or a number is impossible.
        TooLarge: This would take longer than a few seconds.
    """
    if not is_installed():
        raise InvalidInput("interval arithmetic needs python-flint: pip install 'dpftrl[audit]'")
    covered = tuple(streams)
    if not covered or not 0 < delta < 1 or not 0 <= stated_epsilon < math.inf:
        raise InvalidInput(
            "an enclosure needs at least one noise stream, a delta between 0 and 1 and a finite "
            f"epsilon, got {len(covered)}, {delta!r} and {stated_epsilon!r}"
        )
    from flint import ctx

    narrowest: RigorousNumbers | None = None
    for precision in PRECISIONS:
        with ctx.workprec(precision):
            numbers = _enclose(covered, delta, stated_epsilon, devices)
        if numbers is not None:
            narrowest = numbers
            if numbers.epsilon.relative_width <= NARROW:
                break
    if narrowest is None:
        raise TooLarge(f"interval arithmetic would need more than {PRECISIONS[-1]:,} bits")
    return narrowest


def _enclose(
    streams: Sequence[NoiseStream], delta: float, stated_epsilon: float, devices: int
) -> RigorousNumbers | None:
    """Enclose all numbers at the present precision; None if it does not suffice."""
    from flint import arb

    from dpftrl.verify.rigorous.epsilon import (
        delta_for_gaussians,
        gaussian_delta,
        sampler_delta,
        smallest_epsilon,
    )
    from dpftrl.verify.rigorous.rounding import mu_with_rounding

    sensitivities = [_sensitivity(stream.mechanism, stream.participation) for stream in streams]
    squares = arb(0)
    for stream, sensitivity in zip(streams, sensitivities, strict=True):
        mu = sensitivity / stream.noise_multiplier
        if stream.buffers != "float32":
            mechanism = stream.mechanism
            mu = mu_with_rounding(
                mu, mechanism.family, mechanism.parameters(), stream.participation.rounds
            )
        squares += mu * mu
    mu = squares.sqrt() * devices
    if not (mu.is_finite() and mu > 0):
        return None
    is_v1 = any(stream.buffers == "float32" for stream in streams)
    for_gaussians = arb(delta) if is_v1 else delta_for_gaussians(delta, mu)
    total = gaussian_delta(arb(stated_epsilon), mu) + sampler_delta(mu)
    try:
        epsilon = smallest_epsilon(for_gaussians, mu)
    except TooLarge:
        return None
    if not (epsilon.is_finite() and total.is_finite()):
        return None
    stated_delta = _outward(total)
    return RigorousNumbers(
        tuple(_outward(sensitivity) for sensitivity in sensitivities),
        _outward(mu),
        _outward(epsilon.nonnegative_part()),
        Enclosure(max(stated_delta.low, 0.0), min(stated_delta.high, 1.0)),
    )


def _sensitivity(mechanism: Mechanism, participation: Participation) -> "arb":
    """Return the sensitivity of a mechanism from the parameters that its file has."""
    from flint import arb

    from dpftrl.verify.rigorous import toeplitz as by_coefficients
    from dpftrl.verify.rigorous.bands import banded_sensitivity
    from dpftrl.verify.rigorous.trees import (
        binary_tree_levels,
        smooth_tree_levels,
        tree_sensitivity,
    )

    parameters, rounds = mechanism.parameters(), mechanism.check_rounds(participation.rounds)
    match mechanism.family:
        case "independent":
            return arb(participation.max_participations).sqrt()
        case "blt":
            return by_coefficients.blt_sensitivity(**parameters, participation=participation)
        case "banded":
            return banded_sensitivity(parameters["columns"], participation)
        case "tree":
            return tree_sensitivity(binary_tree_levels(rounds), participation)
        case "tree-full":
            # The tree for all rounds that it was built for bounds one that ends earlier.
            all_rounds = type(participation)(
                parameters["rounds"], participation.min_sep, participation.max_participations
            )
            return tree_sensitivity(binary_tree_levels(all_rounds.rounds), all_rounds)
        case "smooth-tree":
            return tree_sensitivity(smooth_tree_levels(parameters["height"], rounds), participation)
        case "sqrt":
            c = by_coefficients.square_root_coefficients(min(rounds, parameters["bands"] or rounds))
        case "toeplitz":
            c = [arb(coefficient) for coefficient in parameters["coefficients"]]
        case "banded-inverse":
            inverse = parameters["inverse_coefficients"]
            c = by_coefficients.reciprocal_coefficients(inverse, rounds)
        case "gblt":
            c = by_coefficients.general_blt_coefficients(**parameters, terms=rounds)
        case family:
            raise TooLarge(f"there is no interval arithmetic for the family {family}")
    return by_coefficients.toeplitz_sensitivity(c, participation)


def _outward(ball: "arb") -> Enclosure:
    """Round both ends of a ball outward to float64 numbers."""
    from flint import arb

    low, high = ball.lower(), ball.upper()
    down, up = float(low), float(high)
    while not arb(down) <= low:
        down = math.nextafter(down, -math.inf)
    while not arb(up) >= high:
        up = math.nextafter(up, math.inf)
    return Enclosure(down, up)
