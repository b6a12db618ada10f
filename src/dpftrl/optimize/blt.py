"""The best BLT for a participation, in milliseconds at any number of rounds."""

import math
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from dpftrl._internal.arrays import FloatArray
from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import BLT
from dpftrl.optimize._solvers import BatchFunction, Minimum, minimize
from dpftrl.optimize._toeplitz_error import workload_loss
from dpftrl.optimize.blt_objective import BltObjective, BltWorkloadObjective, output_scales
from dpftrl.optimize.result import Objective, Optimized, check_objective
from dpftrl.participation import Participation
from dpftrl.workload import PREFIX_SUM, Workload


def chain(free: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Rates r and s, one row a BLT, from free numbers ordered as r_1, s_1, ..., r_d, s_d."""
    _, slow, lower_fast = _below_top(free)
    share = _logistic(free[:, -1:])
    most = 1 + slow.sum(axis=1, keepdims=True) - lower_fast.sum(axis=1, keepdims=True)
    top = slow[:, -1:] * (1 - share) + most * share
    return slow, np.concatenate([lower_fast, top], axis=1)


def pull_back(free: FloatArray, by_slow: FloatArray, by_fast: FloatArray) -> FloatArray:
    """The gradient by the free numbers, from those by r and s."""
    below, slow, lower_fast = _below_top(free)
    share = _logistic(free[:, -1:])
    most = 1 + slow.sum(axis=1, keepdims=True) - lower_fast.sum(axis=1, keepdims=True)
    by_top = by_fast[:, -1:]
    by_rate = np.empty_like(below)
    by_rate[:, ::2] = by_slow + share * by_top
    by_rate[:, 1::2] = by_fast[:, :-1] - share * by_top
    by_rate[:, -1:] += (1 - share) * by_top
    gradient = np.empty_like(free)
    reach = np.cumsum(by_rate * below, axis=1)  # a fraction scales every rate below it
    gradient[:, :-1] = reach * _logistic(-free[:, :-1])
    gradient[:, -1:] = by_top * (most - slow[:, -1:]) * share * (1 - share)
    return gradient


def free_numbers(slow: FloatArray, fast: FloatArray) -> FloatArray:
    """The free numbers of a chain (the inverse of `chain`), for starts."""
    rates = np.empty((len(slow), 2 * slow.shape[1] - 1))
    rates[:, ::2], rates[:, 1::2] = slow, fast[:, :-1]
    above = np.concatenate([rates[:, 1:], np.ones((len(slow), 1))], axis=1)
    most = 1 + slow.sum(axis=1, keepdims=True) - fast[:, :-1].sum(axis=1, keepdims=True)
    share = (fast[:, -1:] - slow[:, -1:]) / (most - slow[:, -1:])
    fractions = np.concatenate([rates / above, share], axis=1)
    return np.log(fractions / (1 - fractions))


def _below_top(free: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
    log_fraction = -np.logaddexp(0.0, -free[:, :-1])
    rates = np.exp(np.cumsum(log_fraction[:, ::-1], axis=1)[:, ::-1])
    return rates, rates[:, ::2], rates[:, 1::2]


def _logistic(x: FloatArray) -> FloatArray:
    return np.exp(-np.logaddexp(0.0, -x))


# Up to so many buffers, fixed starts find the best, as a rule.
DIRECT = 4
# The largest derivative of the log loss at which a search has come to rest.
AT_REST = 1e-6
# Newton steps for every start, for the better ones, for the best few; then the best to its end.
STAGES = ((3, 8), (6, 3), (6, 1))
FINE = 200
# Points spread over the free numbers, beside the chains that are known to be good starts: RmsLoss
# has more poor local optima.
SPREAD = {"max": 6, "rms": 8}
MOST_BUFFERS = 32
AUTO_BUFFERS = 8
AUTO_WITHIN = 1e-3


# Values, and derivatives by the rates of C and of C^-1, for one BLT a row.
ChainFunction = Callable[[FloatArray, FloatArray], tuple[FloatArray, FloatArray, FloatArray]]


class Chain(NamedTuple):
    """A BLT by its rates, with the log loss there."""

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
    """The BLT with the smallest loss.

    Args:
        participation: What to optimise for.
        buffers: How many buffers, at most; `auto` takes the fewest that are within 0.1% of what
            more would give. The best may need less: buffers that coincide are merged.
        objective: `max` for MaxLoss, `rms` for RmsLoss.
        workload: What the server does with the updates. Anything but the prefix sum takes seconds
            instead of milliseconds, growing with the rounds, and is searched for from the best for
            the prefix sum only.

    The same input gives the same output, bit for bit.

    >>> from dpftrl.participation import MinSep
    >>> found = optimize_blt(MinSep(rounds=2052, min_sep=342), buffers=2)
    >>> print(f"{found.error_report.max_loss:.4f}")
    10.8063
    """
    start = time.perf_counter()
    check_objective(objective)
    best = (
        _auto(participation, objective)
        if buffers == "auto"
        else search(participation, objective, check_buffers(buffers, participation))
    )
    if not workload.is_prefix_sum:
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
    """The best chain for a workload, from the best for the prefix sum."""
    end = minimize(free_function(objective), _free(best), FINE, 1e-10)
    slow, fast = chain(end.points)
    return Chain(slow[0], fast[0], float(end.values[0]), float(np.abs(end.gradients).max()))


def _free(found: Chain) -> FloatArray:
    """The free numbers of a chain, kept from infinity where its links meet."""
    with np.errstate(all="ignore"):
        return free_numbers(found.slow[None], found.fast[None]).clip(-36, 36)


def check_buffers(buffers: int, participation: Participation) -> int:
    """Refuse a number of buffers that makes no sense."""
    buffers = whole_number("buffers", buffers)
    if buffers > min(participation.rounds, MOST_BUFFERS):
        raise InvalidInput(
            f"buffers must be at most the rounds, and {MOST_BUFFERS}, got {buffers} "
            f"for {participation.rounds} rounds"
        )
    return buffers


def _auto(participation: Participation, objective: Objective) -> Chain:
    """The fewest buffers within a tolerance of the most that are worth trying."""
    most = min(AUTO_BUFFERS, participation.rounds)
    found: list[Chain] = []
    for buffers in range(1, most + 1):
        found.append(search(participation, objective, buffers, found[-1] if found else None))
        if len(found) > 2 and found[-3].value - found[-1].value < AUTO_WITHIN / 10:
            break
    return next(best for best in found if best.value <= found[-1].value + AUTO_WITHIN)


def search(
    participation: Participation,
    objective: Objective,
    buffers: int,
    smaller: Chain | None = None,
) -> Chain:
    """The best chain with so many buffers, and never worse than with one less.

    Up to DIRECT buffers fixed starts find the best, as a rule. Where the end leaves a doubt, and
    for more buffers, the best chain with one buffer less shows where there is room for another.
    """
    function = free_function(BltObjective(participation, objective))
    points = starts(participation, buffers, SPREAD[objective])
    reached: list[Chain] = []
    if buffers <= DIRECT and smaller is None:
        reached.append(_best_of(minimize_in_stages(function, points)))
        if buffers == 1 or not _doubtful(reached[0], participation.rounds):
            return reached[0]
        points = points[:0]
    smaller = smaller or search(participation, objective, buffers - 1)
    if len(smaller.slow) == buffers - 1:
        points = np.concatenate([points, _with_one_more(smaller)])
    if len(points):
        reached.append(_best_of(minimize_in_stages(function, points)))
    return min([smaller, *reached], key=lambda end: end.value)


def _best_of(end: Minimum) -> Chain:
    best = int(end.values.argmin())
    slow, fast = chain(end.points[[best]])
    gradient = float(np.abs(end.gradients[best]).max())
    return Chain(slow[0], fast[0], float(end.values[best]), gradient)


def _doubtful(found: Chain, rounds: int) -> bool:
    """Whether two neighbours have met, and so do nothing, or the search had not come to rest."""
    links = np.stack([found.slow, found.fast], axis=1).ravel()
    met = (np.diff(links) < 1e-4 * links[1:]) | (links[1:] * rounds < 1e-5)
    return bool(met.any()) or found.gradient_norm > AT_REST


def minimize_in_stages(function: BatchFunction, points: FloatArray) -> Minimum:
    """A few steps from every start, some more from the better ones, and the best to the end."""
    for steps, kept in STAGES:
        points = _most_promising(minimize(function, points, steps, 1e-10), kept)
    return minimize(function, points, FINE, 1e-10)


def free_function(objective: ChainFunction) -> BatchFunction:
    """A function of the free numbers, from one of the chain's rates."""

    def function(free: FloatArray) -> tuple[FloatArray, FloatArray]:
        with np.errstate(all="ignore"):  # a chain whose links meet has no finite loss
            slow, fast = chain(free)
            values, by_slow, by_fast = objective(slow, fast)
            gradients = pull_back(free, by_slow, by_fast)
        broken = ~(np.isfinite(values) & np.isfinite(gradients).all(axis=1))
        values[broken], gradients[broken] = np.inf, 0.0
        return values, gradients

    return function


def starts(participation: Participation, buffers: int, spread_out: int) -> FloatArray:
    """Chains spread evenly on a logarithmic scale, and points spread evenly over the free numbers.

    Optima for MaxLoss start near rate 0, those for RmsLoss at a few over the rounds, sometimes with
    one more pair near 0.
    """
    rounds, gap = participation.rounds, min(participation.min_sep, participation.rounds)
    ends = [(1e-3, 0.5), (0.1, 0.3), (1.0, 0.8), (4.0, 0.9), (0.3 * rounds / gap, 0.5)]
    rates = [np.geomspace(low / (8 + rounds), high, 2 * buffers) for low, high in ends]
    if buffers > 1:
        top = [0.85, 1.0]
        for low in (0.1, 4.0):
            lower = np.geomspace(low / (8 + rounds), 0.55, 2 * buffers - 2)
            rates.append(np.append(lower, top))
        rest = np.geomspace(6 / (8 + rounds), 0.9, 2 * buffers - 2)
        rates.append(np.append([1e-6 / rounds, 0.03 / rounds], rest))
    spread = free_numbers(np.array(rates)[:, ::2], np.array(rates)[:, 1::2])
    return np.concatenate([spread, _evenly(spread_out, 2 * buffers)])


def _evenly(count: int, size: int) -> FloatArray:
    """Points of a low-discrepancy sequence (an additive recurrence), between -6 and 6."""
    root = 2.0
    for _ in range(50):  # the root of x^(size+1) = x + 1
        root = (1 + root) ** (1 / (size + 1))
    strides = root ** -np.arange(1.0, size + 1)
    return 12 * ((0.5 + np.arange(1, count + 1)[:, None] * strides) % 1) - 6


def _with_one_more(best: Chain) -> FloatArray:
    """The chain with another pair of rates in each gap that has room for one."""
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


def _most_promising(reached: Minimum, count: int) -> FloatArray:
    """The best points, without those that reached the same place."""
    order = np.argsort(reached.values, kind="stable")
    values = reached.values[order]
    fresh = np.append(True, np.diff(values) > 1e-9) & np.isfinite(values)
    return reached.points[order[fresh][:count]]


def finished(slow: FloatArray, fast: FloatArray) -> BLT:
    """The mechanism of a chain, with buffers that coincide merged and idle ones left out."""
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
    if not theta:  # the best is independent noise
        theta, scales = [0.0], [0.0]
    while math.fsum(scales) > 1:  # by the last digit: the sensitivity is exact only up to 1
        scales = [scale * (1 - 2**-52) for scale in scales]
    return BLT(theta, scales)
