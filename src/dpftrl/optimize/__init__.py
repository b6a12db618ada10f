"""Optimizers: each finds the mechanism of one family with the smallest loss."""

from dpftrl.optimize._solvers import Objective, Optimized, check_objective, loss_value
from dpftrl.optimize._toeplitz_error import workload_loss
from dpftrl.optimize.band_inverse import optimize_band_inverse
from dpftrl.optimize.band_toeplitz import best_toeplitz_ratio, optimize_band_toeplitz
from dpftrl.optimize.bandmf import optimize_bandmf
from dpftrl.optimize.blt import optimize_blt
from dpftrl.optimize.generalized_blt import optimize_general_blt
from dpftrl.optimize.robust_blt import Regret, RobustBlt, optimize_robust_blt
from dpftrl.optimize.sampled import (
    OptimizedForSampling,
    optimize_for_balls_in_bins,
    optimize_for_cyclic_poisson,
)

__all__ = [
    "Objective",
    "Optimized",
    "OptimizedForSampling",
    "Regret",
    "RobustBlt",
    "best_toeplitz_ratio",
    "check_objective",
    "loss_value",
    "optimize_band_inverse",
    "optimize_band_toeplitz",
    "optimize_bandmf",
    "optimize_blt",
    "optimize_for_balls_in_bins",
    "optimize_for_cyclic_poisson",
    "optimize_general_blt",
    "optimize_robust_blt",
    "workload_loss",
]
