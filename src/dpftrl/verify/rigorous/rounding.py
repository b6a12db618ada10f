"""What rounding in the noise buffers adds to mu, as a ball: the theorem of `docs/guarantees.md`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from flint import arb, arb_mat, ctx

from dpftrl.errors import InvalidInput
from dpftrl.verify.rigorous.toeplitz import geometric_sum, spend

RADIUS_BITS: Final = 76  # random bits that the sampler uses for the radius of a pair of normals
MOST_DRAWS: Final = 2**40  # the largest number of normals in a run (coordinates times rounds)
# The theorem's margin for terms of second order. Published guarantees have twice this margin: the
# other half covers the rounding in their own computation of the gain.
MARGIN: Final = 1.0005
MOST_SHARE: Final = 0.5  # mu doubles there, and the theorem is not used beyond


def mu_with_rounding(mu: arb, family: str, parameters: Mapping[str, Any], rounds: int) -> arb:
    """Return the m that solves m = mu + 2 h (r + m) sqrt(N) G.

    Here h = 2^-53 is the rounding of float64, r the largest normal of the sampler, N the largest
    number of coordinates, and G the gain of the family.

    Args:
        mu: The mu without rounding.
        family: The family of the mechanism.
        parameters: Its parameters, as the file has them.
        rounds: The number of rounds.

    Raises:
        InvalidInput: Rounding leaves no guarantee.
    """
    gain = GAINS.get(family)
    if gain is None or rounds == 1:
        return mu
    share = arb(2) ** -52 * (arb(MOST_DRAWS) / rounds).sqrt() * gain(parameters, rounds)
    if share > MOST_SHARE:
        raise InvalidInput("rounding in the noise buffers leaves no guarantee")
    if not share <= MOST_SHARE:
        return arb.nan()  # the precision does not suffice
    largest_normal = (2 * (RADIUS_BITS + 1) * arb.const_log2()).sqrt()
    return (mu + share * largest_normal) / (1 - share)


def _blt_gain(parameters: Mapping[str, Any], rounds: int) -> arb:
    """Return the gain of a BLT, from the decays of its inverse.

    The rates 1 - theta are taken as float64 numbers; the theorem's margin is far larger than their
    rounding. Buffers with equal rates have the same content and count as one.
    """
    merged: dict[float, arb] = {}
    for decay, scale in zip(parameters["theta"], parameters["omega"], strict=True):
        if scale > 0:
            merged[1 - decay] = merged.get(1 - decay, arb(0)) + arb(scale)
    rates = [arb(rate) for rate in sorted(merged)]
    scales = [merged[rate] for rate in sorted(merged)]
    inverse_rates = _secular_roots(rates, scales)
    contents = [geometric_sum(abs(1 - rate), rounds) for rate in inverse_rates]
    gain = arb(0)
    for j, (rate, scale) in enumerate(zip(rates, scales, strict=True)):
        content = arb(0)
        for k, root in enumerate(inverse_rates):
            weight = contents[k]
            for i in range(len(rates)):
                weight *= root - rates[i] if i != j else 1
                weight /= root - inverse_rates[i] if i != k else 1
            content += abs(weight)
        gain += scale * geometric_sum(abs(1 - rate), rounds - 1) * content
    return arb(rounds).sqrt() * gain * MARGIN


def _secular_roots(rates: Sequence[arb], scales: Sequence[arb]) -> list[arb]:
    """Return the roots of 1 = sum_i scales[i] / (x - rates[i]), by sign changes.

    There is one between each two neighboring rates, and one above the last.
    """

    def is_above_root(x: arb) -> bool | None:
        value = arb(1)
        for rate, scale in zip(rates, scales, strict=True):
            value -= scale / (x - rate)
        return True if value > 0 else False if value < 0 else None

    roots = list[arb]()
    total = sum(scales, arb(0))
    for i, rate in enumerate(rates):
        low, high = rate, rates[i + 1] if i + 1 < len(rates) else (rate + total).upper()
        for _ in range(ctx.prec):
            middle = ((low + high) / 2).mid()
            above = is_above_root(middle)
            if above is None or not low < middle < high:
                break
            low, high = (low, middle) if above else (middle, high)
        roots.append(low.union(high))
    return roots


def _general_blt_gain(parameters: Mapping[str, Any], rounds: int) -> arb:
    """Return the gain of a generalized BLT, from the responses of its buffers."""
    system, inlet, outlet = _linear_system(parameters)
    size = len(inlet)
    spend(4 * rounds * size * size)
    feedback = system - _column(inlet) * _column(outlet).transpose()
    content = _absolute_sum(feedback, inlet, rounds)
    kept = _absolute_sum(system.transpose(), outlet, rounds - 1)
    of_noise = sum((abs(w) * held for w, held in zip(outlet, content, strict=True)), arb(1))
    gain = arb(0)
    for i in range(size):
        error = abs(inlet[i]) * (1 + of_noise)
        for j in range(size):
            error += abs(feedback[i, j]) * content[j]
        gain += kept[i] * (size + 1) * error
    return arb(rounds).sqrt() * gain * MARGIN


def _linear_system(parameters: Mapping[str, Any]) -> tuple[arb_mat, list[arb], list[arb]]:
    """Return the matrix that a round multiplies the buffers by, and their inputs and outputs."""
    inlet, outlet = list[arb](), list[arb]()
    blocks = list[tuple[float, float]]()
    for decay, scale in zip(parameters["theta"], parameters["omega"], strict=True):
        blocks.append((decay[0], decay[1]))
        inlet.append(arb(1))
        if decay[1] == 0:
            outlet.append(arb(scale[0]))
        else:
            inlet.append(arb(0))
            outlet += [2 * arb(scale[0]), -2 * arb(scale[1])]
    system, place = arb_mat(len(inlet), len(inlet)), 0
    for real, imaginary in blocks:
        system[place, place] = real
        if imaginary:
            system[place + 1, place + 1] = real
            system[place, place + 1], system[place + 1, place] = -imaginary, imaginary
            place += 1
        place += 1
    return system, inlet, outlet


def _column(entries: Sequence[arb]) -> arb_mat:
    return arb_mat(len(entries), 1, list(entries))


def _absolute_sum(matrix: arb_mat, start: Sequence[arb], terms: int) -> list[arb]:
    """Return the sum of |matrix^i start| for i below `terms`, entry by entry.

    The vectors are computed by doubling: radii of balls would grow exponentially from step to step.
    """
    size = len(start)
    vectors, jump = [list(start)], matrix
    while len(vectors) < terms:
        ahead = jump * arb_mat([[vector[i] for vector in vectors] for i in range(size)])
        vectors += [[ahead[i, j] for i in range(size)] for j in range(len(vectors))]
        jump = jump * jump
    return [sum((abs(vector[i]) for vector in vectors[:terms]), arb(0)) for i in range(size)]


def _tree_gain(parameters: Mapping[str, Any], rounds: int) -> arb:
    """Return the gain of a binary tree, from small blocks to large ones; 0 without refinement."""
    if not parameters["refine"]:
        return arb(0)
    sizes, errors, squares = [arb(1)], [arb(0)], arb(0)
    for level in range(1, rounds.bit_length()):
        own = arb(2) ** level / (arb(2) ** (level + 1) - 1)
        size = own + (1 - own) * 2 * sizes[-1]
        merged = sum(errors, arb(0))
        squares += arb(rounds) / 2**level * (merged / own) ** 2
        errors.append(merged + (2 * level + 1) * (2 * size + sum(sizes, arb(0))))
        sizes.append(size)
    return squares.sqrt() * MARGIN


# The families whose buffers are rounded when they are stored. All others store rows as they are.
GAINS: Final[Mapping[str, Callable[[Mapping[str, Any], int], arb]]] = {
    "blt": _blt_gain,
    "gblt": _general_blt_gain,
    "tree": _tree_gain,
}
