"""Optimizes BLTs, in milliseconds at any number of rounds.

A BLT is described by its chain of rates, r_1 < s_1 < r_2 < s_2 < ... < r_d < s_d, where 1 - r are
the decays of C and 1 - s those of C^-1. In the code, `slow` are the rates r and `fast` the rates s.
The search runs over free numbers: one number without constraints per rate. `chain` maps free
numbers to a valid chain, and `free_numbers` is the inverse of `chain`.
"""

import math
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from dpftrl._internal.arrays import FloatArray
from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import BLT
from dpftrl.optimize._solvers import (
    BatchFunction,
    Minimum,
    Objective,
    Optimized,
    check_objective,
    minimize,
)
from dpftrl.optimize._toeplitz_error import workload_loss
from dpftrl.optimize.blt_objective import BltObjective, BltWorkloadObjective, output_scales
from dpftrl.participation import Participation
from dpftrl.workload import PREFIX_SUM, Workload


def chain(free: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The rates r and s of a batch of BLTs, from free numbers ordered as r_1, s_1, ..., r_d, s_d.

    Each free number but the last gives the ratio of a rate to the next larger one, through the
    logistic function. The last free number places s_d between r_d and the largest value for which
    the sum of omega is at most 1.

    Args:
        free: One row of 2 d free numbers per BLT.
    """
    _, slow, lower_fast = _below_top(free)
    share = _logistic(free[:, -1:])
    most = 1 + slow.sum(axis=1, keepdims=True) - lower_fast.sum(axis=1, keepdims=True)
    top = slow[:, -1:] * (1 - share) + most * share
    return slow, np.concatenate([lower_fast, top], axis=1)


def pull_back(free: FloatArray, by_slow: FloatArray, by_fast: FloatArray) -> FloatArray:
    """The gradient by the free numbers, from the gradients by r and s."""
    below, slow, lower_fast = _below_top(free)
    share = _logistic(free[:, -1:])
    most = 1 + slow.sum(axis=1, keepdims=True) - lower_fast.sum(axis=1, keepdims=True)
    by_top = by_fast[:, -1:]
    by_rate = np.empty_like(below)
    by_rate[:, ::2] = by_slow + share * by_top
    by_rate[:, 1::2] = by_fast[:, :-1] - share * by_top
    by_rate[:, -1:] += (1 - share) * by_top
    gradient = np.empty_like(free)
    reach = np.cumsum(by_rate * below, axis=1)  # a ratio scales all smaller rates
    gradient[:, :-1] = reach * _logistic(-free[:, :-1])
    gradient[:, -1:] = by_top * (most - slow[:, -1:]) * share * (1 - share)
    return gradient


def free_numbers(slow: FloatArray, fast: FloatArray) -> FloatArray:
    """The free numbers of chains: the inverse of `chain`."""
    rates = np.empty((len(slow), 2 * slow.shape[1] - 1))
    rates[:, ::2], rates[:, 1::2] = slow, fast[:, :-1]
    above = np.concatenate([rates[:, 1:], np.ones((len(slow), 1))], axis=1)
    most = 1 + slow.sum(axis=1, keepdims=True) - fast[:, :-1].sum(axis=1, keepdims=True)
    share = (fast[:, -1:] - slow[:, -1:]) / (most - slow[:, -1:])
    return _logit(np.concatenate([rates / above, share], axis=1))


def _below_top(free: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return all rates but s_d in increasing order, then the rates r, then the rates s but s_d."""
    log_fraction = -np.logaddexp(0.0, -free[:, :-1])
    rates = np.exp(np.cumsum(log_fraction[:, ::-1], axis=1)[:, ::-1])
    return rates, rates[:, ::2], rates[:, 1::2]


def _logistic(x: FloatArray) -> FloatArray:
    return np.exp(-np.logaddexp(0.0, -x))


# Up to this many buffers, fixed starts usually find the best BLT.
DIRECT = 4
# A search has converged if no derivative of the log loss is larger than this.
CONVERGED = 1e-4
# A search ends when a step improves the log loss by less than this; the best end is then polished.
TOLERANCE = 1e-8
POLISHED = 1e-10
# The number of starts with the smallest losses that the search continues from, times the number of
# free numbers: with few buffers, steps cost less and there are more poor local optima.
SELECTED = 112
# One pair per stage of the search: the number of Newton steps from each point, and the number of
# the best end points that the next stage continues from. After the last stage, these points get up
# to FINE more steps.
STAGES = ((2, 5), (3, 2))
FINE = 20
# The best point gets up to FINEST more steps if it has not converged.
FINEST = 200
# A free number that stands for infinity: the logistic function of it is 1 - 2e-9.
FAR = 20.0
# Starts spread over the free numbers, times the number of buffers. They are in addition to chains
# that are known to be good starts.
SPREAD = 16
MOST_BUFFERS = 32  # far beyond where another buffer helps
AUTO_BUFFERS = 8  # largest number of buffers that `auto` tries
AUTO_WITHIN = 1e-3  # `auto` accepts a log loss this much above the best


# A function of the rates r and s of one BLT per row. It returns the log loss of each BLT, and the
# derivatives of the log losses by r and by s.
ChainFunction = Callable[[FloatArray, FloatArray], tuple[FloatArray, FloatArray, FloatArray]]


class Chain(NamedTuple):
    """A BLT as its chain of rates.

    Attributes:
        slow: The rates r of C.
        fast: The rates s of C^-1.
        value: The log loss.
        gradient_norm: The largest derivative of the log loss by a free number.
    """

    slow: FloatArray
    fast: FloatArray
    value: float
    gradient_norm: float


def optimize_blt(
    participation: Participation,
    buffers: int | Literal["auto"] = "auto",
    objective: Objective = "max",
    workload: Workload = PREFIX_SUM,
) -> Optimized[BLT]:
    """Find the BLT with the smallest loss.

    The same input gives the same output, bit for bit.

    Args:
        participation: The participation to optimize for.
        buffers: The largest number of buffers. `auto` takes the smallest number whose loss is
            within 0.1% of the loss with more buffers. The result may have fewer buffers than asked
            for, because buffers with the same decay are merged.
        objective: `max` for MaxLoss, `rms` for RmsLoss.
        workload: How the server turns updates into the model. Other workloads than the prefix sum
            take seconds instead of milliseconds, and longer for more rounds. For these, the only
            start is the best BLT for the prefix sum.

    >>> from dpftrl.participation import MinSep
    >>> optimized = optimize_blt(MinSep(rounds=2052, min_sep=342), buffers=2)
    >>> print(f"{optimized.error_report.max_loss:.4f}")
    10.8063
    """
    start = time.perf_counter()
    check_objective(objective)
    best = (
        _auto(participation, objective)
        if buffers == "auto"
        else search(participation, objective, check_buffers(buffers, participation))
    )
    if workload.is_prefix_sum:
        best = _polished(best, BltObjective(participation, objective))
    else:
        best = _adapted(best, BltWorkloadObjective(participation, objective, workload))
    mechanism = finished(best.slow, best.fast)
    return Optimized(
        mechanism,
        participation,
        objective,
        workload_loss(mechanism, participation, workload),
        best.gradient_norm,
        time.perf_counter() - start,
    )


def _adapted(best: Chain, objective: BltWorkloadObjective) -> Chain:
    """The best chain for a workload, searched from the best chain for the prefix sum."""
    end = minimize(free_function(objective), _free(best), FINEST, TOLERANCE)
    slow, fast = chain(end.points)
    return Chain(slow[0], fast[0], float(end.values[0]), float(np.abs(end.gradients).max()))


def _polished(best: Chain, objective: BltObjective) -> Chain:
    """The best chain again, after more steps, if these make it better."""
    end = minimize(free_function(objective), _free(best), FINEST, POLISHED)
    return min(best, _best_of(end), key=lambda chain: (chain.value, chain.gradient_norm))


def _free(blt: Chain) -> FloatArray:
    """The free numbers of a chain; they are clipped, since they are infinite for equal rates."""
    with np.errstate(all="ignore"):
        return free_numbers(blt.slow[None], blt.fast[None]).clip(-36, 36)  # 2^-52 = exp(-36)


def check_buffers(buffers: int, participation: Participation) -> int:
    """Return the number of buffers, or raise `InvalidInput` if it is not possible."""
    buffers = whole_number("buffers", buffers)
    if buffers > min(participation.rounds, MOST_BUFFERS):
        raise InvalidInput(
            f"buffers must be at most the rounds and at most {MOST_BUFFERS}, "
            f"got {buffers} for {participation.rounds} rounds"
        )
    return buffers


def _auto(participation: Participation, objective: Objective) -> Chain:
    """The best chain with the fewest buffers that is nearly as good as one with more buffers.

    Buffers are added until two more of them improve the log loss by less than a tenth of the
    tolerance.
    """
    most = min(AUTO_BUFFERS, participation.rounds)
    chains: list[Chain] = []
    for buffers in range(1, most + 1):
        chains.append(search(participation, objective, buffers, chains[-1] if chains else None))
        if len(chains) > 2 and chains[-3].value - chains[-1].value < AUTO_WITHIN / 10:
            break
    return next(best for best in chains if best.value <= chains[-1].value + AUTO_WITHIN)


def search(
    participation: Participation,
    objective: Objective,
    buffers: int,
    smaller: Chain | None = None,
) -> Chain:
    """The best chain with at most `buffers` buffers.

    Up to DIRECT buffers, fixed starts usually find the best chain. If their result is doubtful, and
    for more buffers, further starts add a pair of rates to the best chain with one buffer less, and
    the result is never worse than that chain. Where fixed starts are enough, it can be worse by
    some millionths in flat, extreme settings; which ones depends on the rounding of the processor.

    Args:
        participation: The participation to optimize for.
        objective: The loss to minimize.
        buffers: The largest number of buffers.
        smaller: The best chain with one buffer less, if that chain is already known.
    """
    function = free_function(BltObjective(participation, objective))
    points = starts(participation, buffers)
    ends: list[Chain] = []
    if buffers <= DIRECT and smaller is None:
        ends.append(_best_of(_with_top_at_one(function, minimize_in_stages(function, points))))
        if buffers == 1 or not _doubtful(ends[0], participation.rounds):
            return ends[0]
        points = points[:0]
    smaller = smaller or search(participation, objective, buffers - 1)
    if len(smaller.slow) == buffers - 1:
        points = np.concatenate([points, _with_one_more(smaller)])
    if len(points):
        ends.append(_best_of(_with_top_at_one(function, minimize_in_stages(function, points))))
    return min([smaller, *ends], key=lambda end: end.value)


def _with_top_at_one(function: BatchFunction, end: Minimum) -> Minimum:
    """Finish a search that has not converged, first with the rate r_d at 1.

    Often r_d tends to 1, where its free number is infinite and the loss is flat: a search takes
    hundreds of steps on the way there. With the free number at `FAR`, the others take a few.
    """
    if np.abs(end.gradients).max() <= CONVERGED:
        return end
    best = end.points[[int(end.values.argmin())]]
    if best.shape[1] > 2 and best[0, -2] > 0:
        there = best.copy()
        there[0, -2] = FAR
        finished_there = minimize(function, there, FINEST, TOLERANCE)
        if finished_there.values[0] <= end.values.min():
            return finished_there
    return minimize(function, best, FINEST, TOLERANCE)


def _best_of(end: Minimum) -> Chain:
    """The chain with the smallest log loss among the end points of a search."""
    best = int(end.values.argmin())
    slow, fast = chain(end.points[[best]])
    gradient = float(np.abs(end.gradients[best]).max())
    return Chain(slow[0], fast[0], float(end.values[best]), gradient)


def _doubtful(end: Chain, rounds: int) -> bool:
    """Whether a better chain may exist.

    Returns True if two neighboring rates are practically equal, which makes a buffer useless, or
    if the search has not converged.
    """
    rates = np.stack([end.slow, end.fast], axis=1).ravel()
    equal = (np.diff(rates) < 1e-4 * rates[1:]) | (rates[1:] * rounds < 1e-5)
    return bool(equal.any()) or end.gradient_norm > CONVERGED


def minimize_in_stages(function: BatchFunction, points: FloatArray) -> Minimum:
    """Take a few steps from the best starts, and more steps from the best of their ends."""
    selected = SELECTED // points.shape[1]
    if len(points) > selected:
        points = points[np.argsort(function(points)[0], kind="stable")[:selected]]
    for steps, kept in STAGES:
        points = _most_promising(minimize(function, points, steps, TOLERANCE), kept)
    return minimize(function, points, FINE, TOLERANCE)


def free_function(objective: ChainFunction) -> BatchFunction:
    """Turn a function of the rates into a function of the free numbers."""

    def function(free: FloatArray) -> tuple[FloatArray, FloatArray]:
        with np.errstate(all="ignore"):  # equal rates give no finite loss
            slow, fast = chain(free)
            values, by_slow, by_fast = objective(slow, fast)
            gradients = pull_back(free, by_slow, by_fast)
        invalid = ~(np.isfinite(values) & np.isfinite(gradients).all(axis=1))
        values[invalid], gradients[invalid] = np.inf, 0.0
        return values, gradients

    return function


def starts(participation: Participation, buffers: int) -> FloatArray:
    """Starts for the search, as free numbers.

    The first starts are `_typical` chains, the next are chains whose rates are spread evenly on a
    logarithmic scale, and the last are points that are spread evenly over the free numbers.
    """
    rounds, gap = participation.rounds, min(participation.min_sep, participation.rounds)
    ends = [(1e-3, 0.5), (0.1, 0.3), (1.0, 0.8), (4.0, 0.9), (0.3 * rounds / gap, 0.5)]
    rates = [_spaced(low / (8 + rounds), high, 2 * buffers) for low, high in ends]
    if buffers > 1:
        top = [0.85, 1.0]
        for low in (0.1, 4.0):
            lower = _spaced(low / (8 + rounds), 0.55, 2 * buffers - 2)
            rates.append(np.append(lower, top))
        rest = _spaced(6 / (8 + rounds), 0.9, 2 * buffers - 2)
        rates.append(np.append([1e-6 / rounds, 0.03 / rounds], rest))
    spread = free_numbers(np.array(rates)[:, ::2], np.array(rates)[:, 1::2])
    typical = _typical(participation, buffers)
    return np.concatenate([typical, spread, _evenly(max(1, SPREAD // buffers), 2 * buffers)])


def _spaced(low: float, high: float, count: int) -> FloatArray:
    """`count` numbers that are spread evenly on a logarithmic scale."""
    return low * (high / low) ** (np.arange(count) / max(1, count - 1))


def _typical(participation: Participation, buffers: int) -> FloatArray:
    """Free numbers of chains like those that are best for most participations.

    Their smallest rate r_1 is a small multiple of participations / rounds. In the first kind, the
    rates are spread evenly on a logarithmic scale up to r_d. In the second kind, r_d is 1, and the
    rates are closer to each other at the top. Both kinds also occur with one buffer less, and a
    pair of rates near 0 below. The last kind is best for a small min-sep and few participations:
    its first pair of rates is near 1 / rounds, r_d is 1, and s_d is close to its largest value.
    """
    rows: list[FloatArray] = []
    per_round = (participation.max_participations + 1) / (participation.rounds + 8)
    near_zero = [-FAR, -3.5]  # a pair of rates
    for times, top, share in ((1.0, 0.35, 0.42), (3.0, 0.5, 0.3)):
        low = min(times * per_round, top / 2)
        for size, below in ((buffers, []), (buffers - 1, near_zero)):
            if size > 0:
                fractions = _spaced(low, top, 2 * size - 1)
                fractions[:-1] /= fractions[1:]
                rows.append(np.array([*below, *_logit(fractions), _logit(share)]))
            if size > 1:
                ratios = np.linspace(-0.8, 1.2, 2 * size - 3)
                lowest_fast = _logistic(ratios).prod()
                first = _logit(min(0.9, low / lowest_fast))
                rows.append(np.array([*below, first, *ratios, FAR, -2.3]))
    if buffers > 1:
        between = np.linspace(-0.8, 1.2, 2 * buffers - 4)
        rows.append(np.array([0.0, -np.log(participation.rounds + 1), *between, FAR, 3.0]))
    return np.array(rows)


def _logit(fraction: Any) -> Any:
    """The inverse of the logistic function."""
    return np.log(fraction / (1 - fraction))


def _evenly(count: int, size: int) -> FloatArray:
    """Points of a low-discrepancy sequence (an additive recurrence) between -6 and 6."""
    root = 2.0
    for _ in range(50):  # the root of x^(size+1) = x + 1
        root = (1 + root) ** (1 / (size + 1))
    strides = root ** -np.arange(1.0, size + 1)
    return 12 * ((0.5 + np.arange(1, count + 1)[:, None] * strides) % 1) - 6


def _with_one_more(best: Chain) -> FloatArray:
    """Starts with one more buffer: a pair of rates is added in each gap of the chain."""
    chains: list[tuple[FloatArray, FloatArray]] = []
    slow, fast = best.slow, best.fast
    lower = np.append(slow[0] * 1e-2, fast[:-1])
    for place, (low, high) in enumerate(zip(lower, slow, strict=True)):
        inner = low * (high / low) ** np.array([1 / 3, 2 / 3])
        chains.append((np.insert(slow, place, inner[0]), np.insert(fast, place, inner[1])))
    top = min(fast[-1], 0.999)
    for place, (low, high) in enumerate(zip(slow, np.append(fast[:-1], top), strict=True)):
        inner = low * (high / low) ** np.array([1 / 3, 2 / 3])
        chains.append((np.insert(slow, place + 1, inner[1]), np.insert(fast, place, inner[0])))
    with np.errstate(all="ignore"):
        free = free_numbers(np.array([a for a, _ in chains]), np.array([b for _, b in chains]))
    return free[np.isfinite(free).all(axis=1)]


def _most_promising(ends: Minimum, count: int) -> FloatArray:
    """Up to `count` points with the smallest values; of points with equal values, only one."""
    order = np.argsort(ends.values, kind="stable")
    values = ends.values[order]
    distinct = np.append(True, np.diff(values) > 1e-9) & np.isfinite(values)
    return ends.points[order[distinct][:count]]


def finished(slow: FloatArray, fast: FloatArray) -> BLT:
    """The BLT with these rates; equal buffers are merged, and buffers with scale 0 are dropped."""
    with np.errstate(all="ignore"):
        omega = output_scales(slow[None], fast[None])[0]
    theta: list[float] = []
    scales: list[float] = []
    for decay, scale in zip((1 - slow).tolist(), omega.tolist(), strict=True):
        if theta and theta[-1] - decay <= 1e-12:
            scales[-1] += scale
        elif scale > 1e-15:
            theta.append(decay)
            scales.append(scale)
    if not theta:  # the best mechanism is independent noise
        theta, scales = [0.0], [0.0]
    while math.fsum(scales) > 1:  # due to rounding; above 1 the sensitivity is not exact
        scales = [scale * (1 - 2**-52) for scale in scales]
    return BLT(theta, scales)
