"""How far a BLT is from the best that any Toeplitz mechanism can do, for few rounds."""

from dpftrl.mechanisms import BLT
from dpftrl.optimize.band_toeplitz import optimize_band_toeplitz
from dpftrl.optimize.result import Optimised
from dpftrl.workload import PREFIX_SUM, Workload

MOST_ROUNDS = 256


def best_toeplitz_ratio(found: Optimised[BLT], workload: Workload = PREFIX_SUM) -> float | None:
    """The BLT's loss over that of the best Toeplitz mechanism found; None above 256 rounds.

    A BLT is a Toeplitz mechanism whose coefficients do not rise, so that the ratio says what having
    few parameters costs.
    """
    participation = found.participation
    if participation.rounds > MOST_ROUNDS:
        return None
    best = optimize_band_toeplitz(
        participation, participation.rounds, found.objective, workload=workload
    )
    return found.value / best.value
