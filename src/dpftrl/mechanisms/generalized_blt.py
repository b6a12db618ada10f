"""Generalized BLTs: output scales of any sign, and complex decays in conjugate pairs."""

import cmath
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, final

import numpy as np

from dpftrl._internal.checks import finite_numbers
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms._sensitivity import (
    Sensitivity,
    column_sum,
    non_increasing_majorant,
    toeplitz_sensitivity,
)
from dpftrl.mechanisms.base import ROUNDING_MARGIN, Matrix, Rows, StreamState, Vector
from dpftrl.mechanisms.toeplitz import ToeplitzMechanism
from dpftrl.participation import Participation

# Relative rounding error that a computed coefficient of C can have.
ROUNDING = 1e-13
# A decay of the inverse may exceed 1 by this much, because eigenvalues are computed with rounding.
SLACK = 1e-9
# Largest sum of the output scales in absolute value. Larger scales would cancel each other, and the
# noise would lose more than 4 of its 16 digits.
MOST_SCALE = 1e4


@final
@dataclass(frozen=True)
class GeneralBLT(ToeplitzMechanism):
    """A BLT with real or complex decays: c_0 = 1 and c_i = sum_j omega_j theta_j^(i-1).

    A complex decay stands for itself and its conjugate. It contributes 2 Re(omega theta^(i-1)) to
    c_i, a decaying oscillation, and takes two real buffers that rotate into each other. Scales may
    have any sign, so that the coefficients need not be non-increasing. The sensitivity is that of
    the smallest non-increasing majorant: an upper bound, and exact if the coefficients are
    non-negative and non-increasing.

    Attributes:
        theta: Decays of absolute value at most 1. A pair is given by the decay with the positive
            imaginary part.
        omega: Output scales; a real decay has a real scale.

    >>> GeneralBLT([0.5j], [0.25]).coefficients(5)
    array([ 1.   ,  0.5  ,  0.   , -0.125,  0.   ])
    """

    family = "gblt"

    theta: tuple[complex, ...]
    omega: tuple[complex, ...]

    def __init__(self, theta: Sequence[complex], omega: Sequence[complex]):
        decays, scales = _complex_numbers("theta", theta), _complex_numbers("omega", omega)
        if len(decays) != len(scales):
            raise InvalidInput(
                f"theta and omega need one number per decay, got {len(decays)} and {len(scales)}"
            )
        for decay, scale in zip(decays, scales, strict=True):
            if not abs(decay) <= 1:
                raise InvalidInput(f"theta must be at most 1 in absolute value, got {decay}")
            if decay.imag < 0 or (decay.imag == 0 and scale.imag != 0):
                raise InvalidInput(
                    "give a pair by its decay with the positive imaginary part, and a real decay "
                    f"with a real scale, got theta {decay} with omega {scale}"
                )
        object.__setattr__(self, "theta", decays)
        object.__setattr__(self, "omega", scales)
        if not np.abs(self._outlet).sum() <= MOST_SCALE:
            raise InvalidInput(
                f"the output scales add up to {np.abs(self._outlet).sum():.6g} in absolute value; "
                f"above {MOST_SCALE:g} they cancel, and rounding would show in the noise"
            )
        feedback = self._system - np.outer(self._inlet, self._outlet)
        largest_decay = np.abs(np.linalg.eigvals(feedback)).max()
        if not largest_decay <= 1 + SLACK:
            raise InvalidInput(
                f"the inverse has a decay of absolute value {largest_decay:.6g}: "
                "the noise would grow without bound"
            )

    @property
    def buffers(self) -> int:
        """Number of buffers, one for each real decay and two for each pair."""
        return sum(1 if decay.imag == 0 else 2 for decay in self.theta)

    @cached_property
    def _system(self) -> Matrix:
        """Matrix by which one round multiplies the buffers: decays, and rotations for pairs."""
        system = np.zeros((self.buffers, self.buffers))
        place = 0
        for decay in self.theta:
            system[place, place] = decay.real
            if decay.imag:
                system[place + 1, place + 1] = decay.real
                system[place, place + 1], system[place + 1, place] = -decay.imag, decay.imag
                place += 1
            place += 1
        return system

    @cached_property
    def _inlet(self) -> Vector:
        """Weight with which the noise enters each buffer: 1 for the first buffer of each decay."""
        return np.concatenate([[1.0] if decay.imag == 0 else [1.0, 0.0] for decay in self.theta])

    @cached_property
    def _outlet(self) -> Vector:
        """Weight with which each buffer is subtracted from the next row of Z."""
        parts = [
            [scale.real] if decay.imag == 0 else [2 * scale.real, -2 * scale.imag]
            for decay, scale in zip(self.theta, self.omega, strict=True)
        ]
        return np.concatenate(parts)

    def coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of C: the impulse response of the linear system."""
        return np.append(1.0, self._outlet @ _orbit(self._system, self._inlet, rounds - 1))

    def inverse_coefficients(self, rounds: int) -> Vector:
        """The first `rounds` coefficients of C^-1, computed round by round as the stream does it.

        Powers of the feedback matrix would be faster, but lose digits where large scales cancel.
        """
        inverse = np.ones(rounds)
        buffers = self._inlet
        for t in range(1, rounds):
            inverse[t] = -self._outlet @ buffers
            buffers = self._system @ buffers + inverse[t] * self._inlet
        return inverse

    def sensitivity(self, participation: Participation) -> Sensitivity:
        """Bound by the smallest non-increasing majorant of `|c|`; see `toeplitz_sensitivity`.

        Guarantees:
            Rounding in the computed coefficients makes the result larger, never smaller: a bound on
            what it can change is added.
        """
        c = self.coefficients(self.check_curve(participation.rounds))
        computed = toeplitz_sensitivity(c, participation, rounding=ROUNDING)
        lost = np.linalg.norm(column_sum(self._coefficient_errors(len(c)), participation))
        return computed.times(1 + float(lost) / computed.value)

    def _coefficient_errors(self, rounds: int) -> Vector:
        """Bounds on the rounding errors of `coefficients`, which do not increase.

        The power theta^i is a product of at most 2 i roundings, as doubling computes it: squaring
        doubles the relative error of a power and adds one rounding, and a product adds those of its
        factors. A pair has four times as much, and the sum over buffers one rounding per buffer.
        """
        exponents = np.arange(float(rounds - 1))
        sizes = np.abs(np.array(self.theta))
        scales = [
            abs(w.real) if q.imag == 0 else 2 * (abs(w.real) + abs(w.imag))
            for q, w in zip(self.theta, self.omega, strict=True)
        ]
        terms = scales @ np.power.outer(sizes, exponents)
        errors = 2.0**-53 * (8 * exponents + 2 * self.buffers + 8) * terms
        return non_increasing_majorant(np.append(0.0, errors))

    def rounding_gain(self, rounds: int) -> float:
        """Bound from the impulse responses of the buffers and of the noise.

        A buffer is a sum of `buffers` + 1 products, each rounded. So is the noise, whose rounding
        error enters the buffers too. An error in the buffers rotates and decays as the buffers do,
        and enters the noise through the output scales.

        Guarantees:
            Where the result leaves a guarantee at all (`MOST_SHARE` of `dpftrl.accounting`), it is
            at least the gain in exact arithmetic times `ROUNDING_MARGIN` times 1 - 1e-6;
            docs/adr/0022 has the proof. Responses are therefore computed round by round, as the
            noise stream does it. Powers of the feedback matrix, by doubling, lose digits without
            such a bound where large scales cancel.
        """
        if self.check_curve(rounds) == 1:
            return 0.0
        from dpftrl.mechanisms._buffer_responses import sum_of_responses

        feedback = self._system - np.outer(self._inlet, self._outlet)
        content = sum_of_responses(feedback, self._inlet, rounds)
        products = self.buffers + 1
        of_noise = 1 + np.abs(self._outlet) @ content
        errors = products * (np.abs(feedback) @ content + np.abs(self._inlet) * (1 + of_noise))
        kept = np.abs(_orbit(self._system.T, self._outlet, rounds - 1)).sum(axis=1)
        return math.sqrt(rounds) * float(kept @ errors) * ROUNDING_MARGIN

    def memory(self, rounds: int) -> int:
        """One vector per buffer."""
        return self.buffers if self.check_rounds(rounds) > 1 else 0

    def _step(self, state: StreamState, rows: Rows) -> tuple[Vector, StreamState]:
        """The step of a BLT, except that the two buffers of a pair rotate into each other."""
        buffers = state.buffers
        if state.round == 0:
            buffers = np.zeros((self.buffers, buffers.shape[1]))
        noise = rows(state.next_row) - self._outlet @ buffers
        buffers = self._system @ buffers + np.outer(self._inlet, noise)
        return noise, StreamState(state.round + 1, state.next_row + 1, buffers)

    def parameters(self) -> dict[str, Any]:
        """Decays and scales, each as a list of its real and imaginary part."""
        return {
            "theta": [[decay.real, decay.imag] for decay in self.theta],
            "omega": [[scale.real, scale.imag] for scale in self.omega],
        }

    @classmethod
    def from_parameters(cls, parameters: dict[str, Any]) -> Self:
        """Build the mechanism from lists of real and imaginary parts."""
        return cls(**{name: _from_parts(name, value) for name, value in parameters.items()})


def _from_parts(name: str, parts: Sequence[Sequence[float]]) -> list[complex]:
    numbers = [finite_numbers(name, part, at_least=2) for part in parts]
    if any(len(number) > 2 for number in numbers):
        raise InvalidInput(f"{name} must be pairs of a real and an imaginary part")
    return [complex(*number) for number in numbers]


def _complex_numbers(name: str, values: Sequence[complex]) -> tuple[complex, ...]:
    try:
        numbers = tuple(complex(value) for value in values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidInput(f"{name} must be a sequence of numbers ({error})") from None
    if not numbers or not all(cmath.isfinite(number) for number in numbers):
        raise InvalidInput(f"{name} must be at least one finite number, got {numbers!r:.80}")
    return numbers


def _orbit(system: Matrix, start: Vector, length: int) -> Matrix:
    """Matrix with the columns start, system @ start, system^2 @ start, ..., by doubling."""
    orbit, jump = start[:, None], system
    while orbit.shape[1] < length:
        orbit = np.concatenate([orbit, jump @ orbit], axis=1)
        jump = jump @ jump
    return orbit[:, :length]
