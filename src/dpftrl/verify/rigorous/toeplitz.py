"""Sensitivity of Toeplitz strategies as balls: from their coefficients, and of BLTs in closed form.

If the coefficients of C are not negative and do not increase, the pattern 0, b, 2b, ... is the
worst (Kalinin and Lampert 2024, Theorem 2). Otherwise the smallest non-increasing sequence above
their absolute values gives an upper bound. If the columns of one client never overlap, the
sensitivity is exact without either condition.
"""

from collections.abc import Sequence
from typing import Final

from flint import acb, arb, arb_mat

from dpftrl.errors import TooLarge
from dpftrl.participation import Participation

# The largest number of operations on balls for one enclosure; so many take a few seconds.
MOST_OPERATIONS: Final = 3_000_000


def spend(operations: int) -> None:
    """Refuse a computation that takes longer than a few seconds.

    Raises:
        TooLarge: There are too many operations.
    """
    if operations > MOST_OPERATIONS:
        raise TooLarge(f"interval arithmetic would take about {operations:,} operations")


def square_root_coefficients(terms: int) -> list[arb]:
    """Return the first coefficients of (1 - x)^(-1/2)."""
    spend(terms)
    c = [arb(1)]
    for i in range(1, terms):
        c.append(c[-1] * (2 * i - 1) / (2 * i))
    return c


def reciprocal_coefficients(inverse: Sequence[float], terms: int) -> list[arb]:
    """Return the first coefficients of the power series 1 / sum_i inverse[i] x^i."""
    spend(terms * len(inverse))
    first, later = arb(inverse[0]), [arb(entry) for entry in inverse[1:]]
    c = [1 / first]
    for i in range(1, terms):
        total = arb(0)
        for entry, earlier in zip(later, reversed(c[max(0, i - len(later)) :]), strict=False):
            total += entry * earlier
        c.append(-total / first)
    return c


def general_blt_coefficients(
    theta: Sequence[Sequence[float]], omega: Sequence[Sequence[float]], terms: int
) -> list[arb]:
    """Return 1, and then sum_j omega_j theta_j^(i-1), where a complex decay counts twice.

    Args:
        theta: Real and imaginary part of each decay. A complex one stands for a conjugate pair.
        omega: Real and imaginary part of each output scale.
        terms: The number of coefficients.
    """
    spend(2 * terms * len(theta))
    decays = [acb(*decay) for decay in theta]
    powers = [
        acb(*scale) * (1 if decay[1] == 0 else 2) for decay, scale in zip(theta, omega, strict=True)
    ]
    c = [arb(1)]
    for _ in range(1, terms):
        c.append(sum((power.real for power in powers), arb(0)))
        powers = [power * decay for power, decay in zip(powers, decays, strict=True)]
    return c


def toeplitz_sensitivity(c: Sequence[arb], participation: Participation) -> arb:
    """Return the sensitivity of the Toeplitz strategy with these coefficients, or its bound.

    Args:
        c: Coefficients of C, the diagonal first; those after the end are zero.
        participation: The rounds that one client may take part in.
    """
    rounds, gap, most = _limits(participation)
    c = c[:rounds]
    if most > 1 and len(c) > gap:
        return _norm(_sum_of_columns(_majorant(c), rounds, gap, most))
    # The columns of one client do not overlap: their squares add up, each cut at the last round.
    lengths = [min(len(c), rounds - start) for start in range(0, most * gap, gap)]
    cut = {length: lengths.count(length) for length in lengths}
    total, squares = arb(0), arb(0)
    for i, coefficient in enumerate(c, start=1):
        squares += coefficient * coefficient
        total += squares * cut.get(i, 0)
    return total.sqrt()


def _limits(participation: Participation) -> tuple[int, int, int]:
    """Return rounds, min-sep and the largest number of participations."""
    gap = min(participation.min_sep, participation.rounds)
    return participation.rounds, gap, participation.max_participations


def _majorant(c: Sequence[arb]) -> list[arb]:
    """Return the smallest sequence that does not increase and is nowhere below |c|."""
    majorant, largest = list[arb](), arb(0)
    for coefficient in reversed(c):
        largest = largest.max(abs(coefficient))
        majorant.append(largest)
    return majorant[::-1]


def _sum_of_columns(c: Sequence[arb], rounds: int, gap: int, most: int) -> list[arb]:
    """Return the sum of the first `most` of the columns 0, gap, 2 gap, ... of C."""
    spend(2 * rounds)
    zero = arb(0)
    total = list[arb]()
    for t in range(rounds):
        entry = c[t] if t < len(c) else zero
        if t >= gap:
            entry += total[t - gap]
        if 0 <= t - most * gap < len(c):
            entry -= c[t - most * gap]
        total.append(entry)
    return total


def _norm(entries: Sequence[arb]) -> arb:
    return sum((entry * entry for entry in entries), arb(0)).sqrt()


def blt_sensitivity(
    theta: Sequence[float], omega: Sequence[float], participation: Participation
) -> arb:
    """Return the sensitivity of BLT(theta, omega) in closed form, for any number of rounds.

    The rounds s b, ..., (s + 1) b - 1 are segment s. In its round r > 0, the sum of the columns 0,
    b, 2b, ... is sum_j omega_j theta_j^(r-1) g_j(s), where g_j(s) = 1 + theta_j^b g_j(s-1). In its
    first round it is c_0 + sum_j omega_j theta_j^(b-1) g_j(s-1). The squares of a segment are thus
    a quadratic form in y_s = (1, g(s-1)), and y_(s+1) is a matrix times y_s. If the scales sum to
    more than 1, the value is that of the majorant, with their sum in place of c_0 = 1.
    """
    rounds, gap, most = _limits(participation)
    decays, scales = [arb(decay) for decay in theta], [arb(scale) for scale in omega]
    size = len(decays) + 1
    first_coefficient = sum(scales, arb(0)).max(arb(1))
    advance = arb_mat(size, size)
    advance[0, 0] = 1
    first_round = arb_mat(1, size)
    first_round[0, 0] = first_coefficient
    for j, (decay, scale) in enumerate(zip(decays, scales, strict=True), start=1):
        advance[j, 0], advance[j, j] = 1, decay**gap
        first_round[0, j] = scale * decay ** (gap - 1)

    def segment(length: int) -> arb_mat:
        """Return the quadratic form of a segment's squares, up to this length."""
        rest = arb_mat(size, size)
        for i in range(1, size):
            for j in range(1, size):
                product = decays[i - 1] * decays[j - 1]
                rest[i, j] = scales[i - 1] * scales[j - 1] * geometric_sum(product, length - 1)
        return first_round.transpose() * first_round + advance.transpose() * rest * advance

    def square(form: arb_mat, state: arb_mat) -> arb:
        return (state.transpose() * form * state)[0, 0]

    # `whole` sums the forms of `count` segments, seen from the state of the first one; `ahead` is
    # the matrix that leads over them. Both are doubled from the highest binary digit on.
    one = segment(gap)
    whole, ahead = arb_mat(size, size), _identity(size)
    for digit in f"{most - 1:b}":
        whole, ahead = whole + ahead.transpose() * whole * ahead, ahead * ahead
        if digit == "1":
            whole, ahead = one + advance.transpose() * whole * advance, ahead * advance
    start = arb_mat(size, 1)
    start[0, 0] = 1
    last = segment(rounds - (most - 1) * gap)
    return (square(whole, start) + square(last, ahead * start)).sqrt()


def _identity(size: int) -> arb_mat:
    identity = arb_mat(size, size)
    for i in range(size):
        identity[i, i] = 1
    return identity


def geometric_sum(ratio: arb, terms: int) -> arb:
    """Return the sum of ratio^i for i below `terms`, by doubling, without a division."""
    total, power = arb(0), arb(1)  # of the terms so far: their sum, and ratio to their number
    for digit in f"{terms:b}":
        total, power = total * (1 + power), power * power
        if digit == "1":
            total, power = total * ratio + 1, power * ratio
    return total
