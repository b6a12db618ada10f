"""Finding the best mechanism for a participation."""

from dpftrl.optimize.blt import optimize_blt
from dpftrl.optimize.result import Optimised

__all__ = ["Optimised", "optimize_blt"]
