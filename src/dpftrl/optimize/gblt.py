"""The best generalised BLT found, from fixed starts."""

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import GeneralBLT
from dpftrl.optimize.blt import Chain, check_buffers, finished, search
from dpftrl.optimize.gblt_objective import GbltObjective, free_from, rates
from dpftrl.optimize.result import Objective, Optimised, check_objective, loss_value
from dpftrl.optimize.scipy_door import scipy_optimize
from dpftrl.participation import Participation

Array = NDArray[np.float64]

# A pair of waves starts with a period of min_sep rounds, or a fraction of it; the pole falls off
# faster than the zero. Both are given relative to the wave's frequency.
POLES = (0.5 + 0.85j, 0.15 + 1.0j)
ZEROS = (0.27 + 0.98j, 0.05 + 1.0j)
SLOWEST = 1e-9
MOST_ROUNDS = 200_000
ROUGH, RESTARTS, POLISHED = 60, 8, 6


def optimize_gblt(
    participation: Participation, buffers: int = 4, objective: Objective = "max"
) -> Optimised[GeneralBLT]:
    """A generalised BLT with small loss: never more than that of the best BLT found.

    Args:
        participation: What to optimise for.
        buffers: How many real buffers; a pair of decays takes two.
        objective: `max` for MaxLoss, `rms` for RmsLoss.

    The loss has kinks, where the majorant of the sensitivity changes, and several local optima:
    quasi-Newton steps from fixed starts (BLTs with waves of the period of min_sep added), begun
    anew where a kink stops them. The same input gives the same output, bit for bit.
    """
    began = time.perf_counter()
    check_objective(objective)
    buffers = check_buffers(buffers, participation)
    if participation.rounds > MOST_ROUNDS:
        raise InvalidInput(
            f"gblt is optimised for at most {MOST_ROUNDS:,} rounds, got {participation.rounds:,}; "
            "it can run for more than it was optimised for"
        )
    function = GbltObjective(participation, objective)
    starts = (s for s in _starts(participation, objective, buffers) if function(s)[0] < np.inf)
    reached = sorted((_descend(function, start, ROUGH) for start in starts), key=function.value)
    found = [_candidate(_polish(function, point), function) for point in reached[:POLISHED]]
    best = min(
        [_from_blt(search(participation, objective, buffers)), *found],
        key=lambda pair: loss_value(pair[0].loss(participation), objective),
    )
    return Optimised(
        best[0],
        participation,
        objective,
        best[0].loss(participation),
        best[1],
        time.perf_counter() - began,
    )


def _from_blt(chain: Chain) -> tuple[GeneralBLT, float]:
    blt = finished(chain.slow, chain.fast)
    return GeneralBLT(blt.theta, blt.omega), chain.gradient_norm


def _candidate(free: Array, function: GbltObjective) -> tuple[GeneralBLT, float]:
    return _finished(free), float(np.abs(function(free)[1]).max())


def _starts(participation: Participation, objective: Objective, buffers: int) -> Iterator[Array]:
    """BLTs, alone and with one or two pairs of waves."""
    for waves in range(buffers // 2 + 1):
        real = buffers - 2 * waves
        chain = search(participation, objective, real) if real else None
        if chain is not None and len(chain.slow) != real:
            continue
        for pole, zero in zip(POLES, ZEROS, strict=True) if waves else [(0j, 0j)]:
            yield _with_waves(participation, chain, waves, pole, zero)


def _with_waves(
    participation: Participation, chain: Chain | None, waves: int, pole: complex, zero: complex
) -> Array:
    poles: list[float] = []
    zeros: list[float] = []
    for harmonic in range(1, waves + 1):
        frequency = 2 * np.pi * harmonic / max(participation.min_sep, 8 * harmonic)
        for free, rate in ((poles, frequency * pole), (zeros, frequency * zero)):
            free += [float(np.log(abs(rate))), -(float(np.angle(rate)) ** 2)]
    if chain is not None:
        poles += free_from(np.maximum(chain.slow, SLOWEST)).tolist()
        zeros += free_from(chain.fast).tolist()
    return np.array(poles + zeros)


def _descend(function: GbltObjective, start: Array, steps: int) -> Array:
    found = scipy_optimize().minimize(
        function, start, jac=True, method="BFGS", options={"maxiter": steps, "gtol": 1e-9}
    )
    end: Array = found.x
    return end if function(end)[0] < function(start)[0] else start


def _polish(function: GbltObjective, point: Array) -> Array:
    """Begin anew while that helps: a kink spoils the curvature that was learnt before it."""
    for _ in range(RESTARTS):
        further = _descend(function, point, 400)
        if function(further)[0] > function(point)[0] - 1e-7:
            return further
        point = further
    return point


def _finished(free: Array) -> GeneralBLT:
    """The mechanism of the free numbers."""
    half = len(free) // 2
    r, s = rates(free[:half]).values, rates(free[half:]).values
    among = r[None, :] - r[:, None] + np.eye(half)
    omega = ((s[None, :] - r[:, None]) / among).prod(axis=1)
    theta: list[complex] = []
    scales: list[complex] = []
    for decay, scale in zip((1 - r).tolist(), omega.tolist(), strict=True):
        if decay.imag >= 0:
            theta.append(decay)
            scales.append(scale if decay.imag else complex(scale.real))
    return GeneralBLT(theta, scales)
