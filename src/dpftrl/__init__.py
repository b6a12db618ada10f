"""Private learning people can actually run: DP-FTRL with correlated noise.

>>> import dpftrl
>>> everyone = dpftrl.MinSep(rounds=2052, min_sep=342)
>>> loss = dpftrl.mechanism("blt-b400").error_report(everyone)
>>> print(f"{loss.max_loss:.2f} {loss.rms_loss:.2f} {loss.sensitivity.kind}")
10.75 9.69 exact
"""

from dpftrl import errors
from dpftrl.accounting import Guarantee, account, calibrate, compose
from dpftrl.errors import DpftrlError
from dpftrl.mechanisms import (
    BLT,
    Banded,
    BandedInverse,
    BinaryTree,
    ErrorReport,
    FullTree,
    GeneralBLT,
    Independent,
    Mechanism,
    SmoothTree,
    SquareRoot,
    StreamState,
    Toeplitz,
    ToeplitzMechanism,
    load_mechanism,
    mechanism,
    save_mechanism,
)
from dpftrl.mechanisms._sensitivity import Sensitivity
from dpftrl.participation import FixedEpochs, MinSep, Participation
from dpftrl.workload import Workload

__version__ = "0.1.0"

__all__ = [
    "BLT",
    "Banded",
    "BandedInverse",
    "BinaryTree",
    "DpftrlError",
    "ErrorReport",
    "FixedEpochs",
    "FullTree",
    "GeneralBLT",
    "Guarantee",
    "Independent",
    "Mechanism",
    "MinSep",
    "Participation",
    "Sensitivity",
    "SmoothTree",
    "SquareRoot",
    "StreamState",
    "Toeplitz",
    "ToeplitzMechanism",
    "Workload",
    "account",
    "calibrate",
    "compose",
    "errors",
    "load_mechanism",
    "mechanism",
    "save_mechanism",
]
