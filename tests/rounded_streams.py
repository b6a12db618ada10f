"""One coordinate of a noise stream in exact arithmetic, with rounding only where it is asked for.

The stream does what `dpftrl.noise.kernels` does, operation by operation, on fractions. Rounding is
a parameter: none, so many bits, or a relative error of a chosen sign. `tests/noise` checks that it
gives the kernels' own bits when everything is rounded to float64.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from dpftrl import BLT, BinaryTree, GeneralBLT, Mechanism
from dpftrl.noise.round_noise import transition

Rounding = Callable[[Fraction], Fraction]


def exact(x: Fraction) -> Fraction:
    return x


def to_bits(bits: int) -> Rounding:
    """To the nearest number with so many bits, ties to even."""

    def rounded(x: Fraction) -> Fraction:
        if not x:
            return x
        exponent = math.frexp(x)[1]  # of the nearest float64, which may be one more than that of x
        if abs(x) < Fraction(2) ** (exponent - 1):
            exponent -= 1
        step = Fraction(2) ** (exponent - bits)
        return round(x / step) * step

    return rounded


def off_by(error: Fraction) -> Rounding:
    """Always off by this relative error, and never the other way."""
    return lambda x: x * (1 + error)


def float64(x: Fraction) -> Fraction:
    return Fraction(float(x))


def float32(x: Fraction) -> Fraction:
    """As the kernels store what they computed in float64."""
    return Fraction(float(np.float32(float(x))))


class Arithmetic(NamedTuple):
    """Where a stream rounds.

    Attributes:
        noise: After each fused multiply-add on the way to the noise.
        buffer: After each fused multiply-add on the way to a new buffer.
        stored: When a buffer is stored.
    """

    noise: Rounding = exact
    buffer: Rounding = exact
    stored: Rounding = exact


Products = Iterable[tuple[Fraction, Fraction]]


def chain(start: Fraction, products: Products, rounding: Rounding) -> Fraction:
    """Fused multiply-adds one after the other; one times a number onto nothing is that number."""
    total = start
    for weight, number in products:
        if weight:
            plain = not total and weight == 1
            total = number if plain else rounding(weight * number + total)
    return total


class Plain:
    """A stream in exact arithmetic but for the roundings given."""

    def __init__(self, mechanism: Mechanism, arithmetic: Arithmetic):
        self.mechanism, self.arithmetic = mechanism, arithmetic
        self.round, self.next_row = 0, 0
        self.buffers: list[Fraction] = []
        self._prepare()

    def _prepare(self) -> None:
        mechanism = self.mechanism
        if isinstance(mechanism, BLT):
            if self.round == 0:
                self.buffers = [Fraction(0)] * len(mechanism.theta)
            self.fresh = 1
            self.of_buffers, self.of_rows = [-Fraction(w) for w in mechanism.omega], [Fraction(1)]
            return
        self._step = transition(mechanism, self.round, self.next_row, len(self.buffers))
        self.fresh = self._step.fresh
        weights = [[Fraction(float(w)) for w in row] for row in self._step.weights]
        kept = len(self.buffers)
        self.of_buffers, self.of_rows = weights[0][:kept], weights[0][kept:]
        self._computed = weights[1:]

    def noise(self, rows: Sequence[Fraction]) -> Fraction:
        """The noise of the next round from its rows of Z."""
        of_rows = zip(self.of_rows, rows, strict=True)
        of_buffers = zip(self.of_buffers, self.buffers, strict=True)
        return chain(Fraction(0), [*of_rows, *of_buffers], self.arithmetic.noise)

    def last_row(self, rows: Sequence[Fraction], noise: Fraction) -> Fraction:
        """The last row that gives this noise, with the given rows before it; without rounding."""
        rest = chain(Fraction(0), zip(self.of_buffers, self.buffers, strict=True), exact)
        rest += chain(Fraction(0), zip(self.of_rows[:-1], rows, strict=True), exact)
        return (noise - rest) / self.of_rows[-1]

    def advance(self, rows: Sequence[Fraction], noise: Fraction) -> None:
        """Refill the buffers."""
        _, rounding, stored = self.arithmetic
        if isinstance(self.mechanism, BLT):
            decayed = zip(self.mechanism.theta, self.buffers, strict=True)
            self.buffers = [stored(rounding(Fraction(q) * held + noise)) for q, held in decayed]
        else:
            inputs, kept = self.buffers, len(self.buffers)
            made = [
                stored(
                    chain(
                        Fraction(0),
                        [*zip(row[kept:], rows, strict=True), *zip(row, inputs, strict=False)],
                        rounding,
                    )
                )
                for row in self._computed
            ]
            self.buffers = [inputs[i] if i >= 0 else made[-1 - i] for i in self._step.buffers]
        self.round, self.next_row = self.round + 1, self.next_row + self.fresh
        if self.mechanism.rounds is None or self.round < self.mechanism.rounds:
            self._prepare()


class Moved(NamedTuple):
    """How rounding moved the rows of Z that explain one release under two inputs.

    Attributes:
        shift: By how much more than C u, as an L2 norm over all rows.
        largest: The largest row of Z under either input.
    """

    shift: float
    largest: float


def rounding_shift(
    mechanism: Mechanism,
    rows: Callable[[int], Fraction],
    difference: Sequence[Fraction],
    arithmetic: tuple[Arithmetic, Arithmetic],
) -> Moved:
    """Explain one release by two adjacent inputs, and compare the rows of Z that do so.

    Args:
        mechanism: One that stores what it computes.
        rows: Z, under the first input.
        difference: The first input minus the second, by round.
        arithmetic: Where the stream rounds under each input; the noise itself is exact.
    """
    first, second = (Plain(mechanism, each) for each in arithmetic)
    ideal = ideal_shifts(mechanism, difference)
    squares, largest = Fraction(0), Fraction(0)
    for moved_by, shifts in zip(difference, ideal, strict=True):
        z = [rows(first.next_row + i) for i in range(first.fresh)]
        noise = first.noise(z)
        other = [number + shift for number, shift in zip(z[:-1], shifts, strict=False)]
        other.append(second.last_row(other, noise + moved_by))
        squares += (other[-1] - z[-1] - shifts[-1]) ** 2
        largest = max(largest, *map(abs, z), *map(abs, other))
        first.advance(z, noise)
        second.advance(other, noise + moved_by)
    return Moved(math.sqrt(squares), float(largest))


def ideal_shifts(mechanism: Mechanism, difference: Sequence[Fraction]) -> list[list[Fraction]]:
    """C u, as the definition of the mechanism has it: the rows of each round."""
    if isinstance(mechanism, BinaryTree):
        shifts = []
        for count in range(1, len(difference) + 1):
            levels = (count & -count).bit_length()
            blocks = [difference[count - (1 << level) : count] for level in range(levels)]
            shifts.append([sum(block, Fraction(0)) for block in blocks])
        return shifts
    if isinstance(mechanism, BLT):
        size = len(mechanism.theta)
        system, inlet, outlet = np.diag(mechanism.theta), np.ones(size), np.array(mechanism.omega)
    else:
        assert isinstance(mechanism, GeneralBLT)
        system, inlet, outlet = mechanism._system, mechanism._inlet, mechanism._outlet
    held, shifts = [Fraction(0)] * len(inlet), []
    for moved_by in difference:
        shifts.append([moved_by + dot(outlet, held)])
        held = [
            dot(row, held) + Fraction(b) * moved_by for row, b in zip(system, inlet, strict=True)
        ]
    return shifts


def dot(weights: Iterable[float], numbers: Sequence[Fraction]) -> Fraction:
    products = (Fraction(float(w)) * x for w, x in zip(weights, numbers, strict=True))
    return sum(products, Fraction(0))
