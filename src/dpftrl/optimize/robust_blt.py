"""Optimizes a BLT for ranges of rounds and min-sep.

The regret of a BLT at a point of the ranges is its loss divided by that of the specialist: the best
BLT for exactly that point. The robust BLT minimizes the largest regret.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np

from dpftrl._internal.arrays import FloatArray
from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import BLT
from dpftrl.optimize._solvers import (
    BatchFunction,
    Objective,
    check_objective,
    loss_value,
    minimize,
    scipy_optimize,
)
from dpftrl.optimize.blt import (
    Chain,
    chain,
    check_buffers,
    finished,
    free_function,
    free_numbers,
    minimize_in_stages,
    search,
    starts,
)
from dpftrl.optimize.blt_objective import BltObjective
from dpftrl.participation import UNCAPPED, MinSep

# The search first minimizes smooth approximations of the largest regret with these sharpnesses.
# Then sequential quadratic programming finds the minimum of the largest regret itself, which is at
# a kink.
SHARPNESS = (30.0, 300.0)
# Points whose log regret is this close to the largest count as active constraints at the optimum.
ACTIVE = 1e-5
# Points per side of the grid that the search starts with, and of the finer grid for the check.
COARSE_GRID, FINE_GRID = 3, 7


@final
@dataclass(frozen=True)
class Regret:
    """The loss of a BLT at one point of the ranges, compared with the specialist for that point.

    Attributes:
        participation: The point.
        loss: The loss of the BLT.
        specialist: The loss of the best BLT for exactly this point.
    """

    participation: MinSep
    loss: float
    specialist: float

    @property
    def ratio(self) -> float:
        """The loss divided by the specialist's loss: 1 at best."""
        return self.loss / self.specialist


@final
@dataclass(frozen=True)
class RobustBlt:
    """A BLT with a small regret over ranges of rounds and min-sep.

    Attributes:
        mechanism: The BLT.
        objective: The loss that the regret compares.
        regrets: The regret at each point of a grid over the ranges.
        gradient_norm: The largest entry of the smallest convex combination of the gradients at the
            worst points. It is near zero at a local optimum, where no step improves all of them.
        seconds: Duration of the optimization.
    """

    mechanism: BLT
    objective: Objective
    regrets: tuple[Regret, ...]
    gradient_norm: float
    seconds: float

    @property
    def worst(self) -> Regret:
        """The point with the largest regret."""
        return max(self.regrets, key=lambda regret: regret.ratio)


def optimize_robust_blt(
    rounds: tuple[int, int],
    min_sep: tuple[int, int],
    max_participations: int = UNCAPPED,
    buffers: int | Literal["auto"] = "auto",
    objective: Objective = "max",
    grid: int = FINE_GRID,
) -> RobustBlt:
    """Find the BLT that minimizes the largest regret over ranges of rounds and min-sep.

    The search starts with a coarse grid. It adds the point of a finer grid with the largest regret
    until no such point has a larger regret. Between the points of the finer grid the regret may be
    a little larger.

    Args:
        rounds: The smallest and the largest number of rounds.
        min_sep: The smallest and the largest min-sep.
        max_participations: Largest number of participations of one client, for any number of
            rounds.
        buffers: Number of buffers of this BLT and of the specialists; `auto` means 4.
        objective: `max` for MaxLoss, `rms` for RmsLoss.
        grid: Points per side of the finer grid; 3 is quick.
    """
    started = time.perf_counter()
    check_objective(objective)
    box = _checked_box(rounds, min_sep)
    size = 4 if buffers == "auto" else buffers
    fine = _grid(*box, max_participations, whole_number("grid", grid, at_least=COARSE_GRID))
    size = check_buffers(min(size, box[0][0]) if buffers == "auto" else size, fine[0])
    specialists: dict[MinSep, Chain] = {}

    def specialist(point: MinSep) -> Chain:
        if point not in specialists:
            specialists[point] = search(point, objective, size)
        return specialists[point]

    points = _grid(*box, max_participations, COARSE_GRID)
    free = np.concatenate(
        [
            starts(points[len(points) // 2], size),
            *(_as_start(specialist(p), size) for p in points),
        ]
    )
    while True:
        free, imbalance = _least_worst(points, [specialist(p) for p in points], objective, free)
        slow, fast = chain(free)
        blt = finished(slow[0], fast[0])
        regrets = [_regret(blt, point, specialist(point), objective) for point in fine]
        worst = max(regrets, key=lambda regret: regret.ratio)
        covered = max(_regret(blt, p, specialist(p), objective).ratio for p in points)
        if worst.ratio <= covered * (1 + 1e-4) or worst.participation in points:
            seconds = time.perf_counter() - started
            return RobustBlt(blt, objective, tuple(regrets), imbalance, seconds)
        points.append(worst.participation)


def _checked_box(
    rounds: tuple[int, int], min_sep: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Both ranges, after checking that each is a range of positive whole numbers."""
    for name, (low, high) in (("rounds", rounds), ("min_sep", min_sep)):
        whole_number(name, low)
        if whole_number(name, high) < low:
            raise InvalidInput(
                f"the range of {name} must go from the smaller to the larger, got {low}..{high}"
            )
    return rounds, min_sep


def _grid(rounds: tuple[int, int], min_sep: tuple[int, int], cap: int, steps: int) -> list[MinSep]:
    """A grid of points that are spread evenly on a logarithmic scale, ends included."""
    axes = [
        sorted({round(value) for value in np.geomspace(*ends, steps).tolist()})
        for ends in (rounds, min_sep)
    ]
    return list(dict.fromkeys(MinSep(n, min(b, n), cap) for n in axes[0] for b in axes[1]))


def _as_start(specialist: Chain, size: int) -> FloatArray:
    """The free numbers of a specialist as one row; no row if it has fewer buffers than `size`."""
    if len(specialist.slow) != size:
        return np.zeros((0, 2 * size))
    with np.errstate(all="ignore"):
        free = free_numbers(specialist.slow[None], specialist.fast[None])
    return free[np.isfinite(free).all(axis=1)]


def _least_worst(
    points: Sequence[MinSep], specialists: Sequence[Chain], objective: Objective, free: FloatArray
) -> tuple[FloatArray, float]:
    """The free numbers that minimize the largest log regret, and their `_imbalance`."""
    regret = _RegretAt(
        [BltObjective(point, objective) for point in points],
        np.array([specialist.value for specialist in specialists])[:, None],
    )
    for sharpness in SHARPNESS:
        function = regret.soft_worst(sharpness)
        end = minimize_in_stages(function, free) if len(free) > 1 else minimize(function, free)
        free = end.points[[int(end.values.argmin())]]
    free = _settle(regret, free[0])[None]
    values, gradients = regret.each(free[0])
    active = values > values.max() - ACTIVE
    return free, _imbalance(gradients[active])


@dataclass(frozen=True)
class _RegretAt:
    """Log regrets at several points, as functions of the free numbers.

    Attributes:
        objectives: The log loss at each point.
        best: The log loss of the specialist at each point, as a column.
    """

    objectives: Sequence[BltObjective]
    best: FloatArray

    def each(self, free: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The log regret at each point and its gradient, for one BLT."""

        def stacked(
            slow: FloatArray, fast: FloatArray
        ) -> tuple[FloatArray, FloatArray, FloatArray]:
            parts = [objective(slow[:1], fast[:1]) for objective in self.objectives]
            values, by_slow, by_fast = (np.concatenate(part) for part in zip(*parts, strict=True))
            return values, by_slow, by_fast

        rows = np.repeat(free[None], len(self.objectives), axis=0)
        values, gradients = free_function(stacked)(rows)
        return values - self.best[:, 0], gradients

    def soft_worst(self, sharpness: float) -> BatchFunction:
        """A smooth maximum of the log regrets, log(sum(exp(sharpness * regret))) / sharpness."""

        def worst(slow: FloatArray, fast: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
            each = [objective(slow, fast) for objective in self.objectives]
            values, by_slow, by_fast = (np.array(part) for part in zip(*each, strict=True))
            regret = sharpness * (values - self.best)
            top = regret.max(axis=0)
            weight = np.exp(regret - top)
            total = weight.sum(axis=0)
            share = (weight / total)[:, :, None]
            soft = (top + np.log(total)) / sharpness
            return soft, (share * by_slow).sum(axis=0), (share * by_fast).sum(axis=0)

        return free_function(worst)


def _settle(regret: _RegretAt, free: FloatArray) -> FloatArray:
    """Minimize the largest regret itself: the smallest level that no regret exceeds."""
    evaluated: list[tuple[FloatArray, tuple[FloatArray, FloatArray]]] = []

    def each(free: FloatArray) -> tuple[FloatArray, FloatArray]:
        """The regrets; the last point is remembered, since SLSQP asks twice for most points."""
        if not evaluated or not np.array_equal(evaluated[0][0], free):
            evaluated[:] = [(free.copy(), regret.each(free))]
        return evaluated[0][1]

    def level(x: FloatArray) -> float:
        return float(x[-1])

    def level_slope(x: FloatArray) -> FloatArray:
        return np.eye(1, len(x), len(x) - 1)[0]

    def slack(x: FloatArray) -> FloatArray:
        return x[-1] - each(x[:-1])[0]

    def slack_slope(x: FloatArray) -> FloatArray:
        gradients = each(x[:-1])[1]
        return np.concatenate([-gradients, np.ones((len(gradients), 1))], axis=1)

    start = np.append(free, regret.each(free)[0].max())
    result = scipy_optimize().minimize(
        level,
        start,
        jac=level_slope,
        method="SLSQP",
        constraints={"type": "ineq", "fun": slack, "jac": slack_slope},
        options={"maxiter": 300, "ftol": 1e-13},
    )
    settled: FloatArray = result.x[:-1]
    better = regret.each(settled)[0].max() < start[-1]
    return settled if better else free


def _imbalance(gradients: FloatArray) -> float:
    """The largest entry of the smallest weighted mean of the gradients; 0 if they cancel out."""
    weight = 1e6  # weight of the equation that the shares of the mean add up to 1
    system = np.concatenate([gradients.T, np.full((1, len(gradients)), weight)])
    shares: FloatArray
    shares, _ = scipy_optimize().nnls(system, np.append(np.zeros(gradients.shape[1]), weight))
    return float(np.abs(shares @ gradients).max())


def _regret(blt: BLT, point: MinSep, specialist: Chain, objective: Objective) -> Regret:
    """The regret of a BLT at one point."""
    loss = loss_value(blt.error_report(point), objective)
    return Regret(point, loss, float(np.exp(specialist.value)))
