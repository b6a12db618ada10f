"""Correlated noise mechanisms, with one family per file.

`base` defines the matrices A, B, C, D, X and Z. "The paper" is McMahan, Xu and Zhang (2024), A
Hassle-free Algorithm for Private Learning in Practice: Don't Use Tree Aggregation, Use BLTs.
"""

from dpftrl.mechanisms._sensitivity import Sensitivity
from dpftrl.mechanisms.banded import Banded
from dpftrl.mechanisms.banded_inverse import BandedInverse
from dpftrl.mechanisms.base import ErrorReport, Mechanism, StreamState
from dpftrl.mechanisms.blt import BLT
from dpftrl.mechanisms.generalized_blt import GeneralBLT
from dpftrl.mechanisms.independent import Independent
from dpftrl.mechanisms.registry import load_mechanism, mechanism, save_mechanism
from dpftrl.mechanisms.smooth_tree import SmoothTree
from dpftrl.mechanisms.square_root import SquareRoot
from dpftrl.mechanisms.toeplitz import Toeplitz, ToeplitzMechanism
from dpftrl.mechanisms.tree import BinaryTree, FullTree

__all__ = [
    "BLT",
    "Banded",
    "BandedInverse",
    "BinaryTree",
    "ErrorReport",
    "FullTree",
    "GeneralBLT",
    "Independent",
    "Mechanism",
    "Sensitivity",
    "SmoothTree",
    "SquareRoot",
    "StreamState",
    "Toeplitz",
    "ToeplitzMechanism",
    "load_mechanism",
    "mechanism",
    "save_mechanism",
]
