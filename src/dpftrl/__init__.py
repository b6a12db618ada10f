"""Train models on people's data with a proven privacy guarantee: DP-FTRL with correlated noise.

Everything that a user needs can be imported from here; each name is loaded when it is first used.

>>> import dpftrl
>>> plan = dpftrl.make_plan(population=60_000, report_goal=300, rounds=400, epsilon=8, delta=1e-6)
>>> print(plan.participation, f"epsilon {plan.guarantee.epsilon:.3f}")
400 rounds, min-sep 200, at most 2 participation(s) epsilon 8.000
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpftrl._internal import deprecation

if TYPE_CHECKING:
    from dpftrl import errors
    from dpftrl.accounting import (
        Guarantee,
        SampledGuarantee,
        account,
        account_sampled,
        calibrate,
        calibrate_rho,
        calibrate_sampled,
        compose,
        load_guarantee,
        save_guarantee,
    )
    from dpftrl.accounting.logs import Observed, observe, open_log
    from dpftrl.adaptive_clipping import AdaptiveClipping
    from dpftrl.clipping import ExactSum, Grid
    from dpftrl.errors import DpftrlError, InvalidInput
    from dpftrl.federated import (
        Adam,
        Released,
        Round,
        Server,
        Settings,
        Sgd,
        StartModel,
    )
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
        Sensitivity,
        SmoothTree,
        SquareRoot,
        StreamState,
        Toeplitz,
        ToeplitzMechanism,
        load_mechanism,
        save_mechanism,
    )
    from dpftrl.models import ReleasedModel, load_model
    from dpftrl.noise import NoiseKey, NoiseStream
    from dpftrl.optimize import (
        optimize_band_inverse,
        optimize_band_toeplitz,
        optimize_bandmf,
        optimize_blt,
        optimize_for_balls_in_bins,
        optimize_for_cyclic_poisson,
        optimize_general_blt,
        optimize_robust_blt,
    )
    from dpftrl.participation import (
        BallsInBins,
        CyclicPoisson,
        FixedEpochs,
        MinSep,
        Participation,
        Poisson,
        Sampling,
    )
    from dpftrl.plan import Dataset, Fleet, Plan, load_plan, make_plan, mechanism, save_plan
    from dpftrl.sampler import Sampler
    from dpftrl.simulation import SimulationResult, simulate
    from dpftrl.statement import Statement, make_statement, save_statement
    from dpftrl.status import Status, read_status
    from dpftrl.verify import verify_run
    from dpftrl.workload import Workload

__version__ = "0.2.0"

__all__ = [
    "BLT",
    "Adam",
    "AdaptiveClipping",
    "BallsInBins",
    "Banded",
    "BandedInverse",
    "BinaryTree",
    "CyclicPoisson",
    "Dataset",
    "DpftrlError",
    "ErrorReport",
    "ExactSum",
    "FixedEpochs",
    "Fleet",
    "FullTree",
    "GeneralBLT",
    "Grid",
    "Guarantee",
    "Independent",
    "InvalidInput",
    "Mechanism",
    "MinSep",
    "NoiseKey",
    "NoiseStream",
    "Observed",
    "Participation",
    "Plan",
    "Poisson",
    "Released",
    "ReleasedModel",
    "Round",
    "SampledGuarantee",
    "Sampler",
    "Sampling",
    "Sensitivity",
    "Server",
    "Settings",
    "Sgd",
    "SimulationResult",
    "SmoothTree",
    "SquareRoot",
    "StartModel",
    "Statement",
    "Status",
    "StreamState",
    "Toeplitz",
    "ToeplitzMechanism",
    "Workload",
    "account",
    "account_sampled",
    "calibrate",
    "calibrate_rho",
    "calibrate_sampled",
    "compose",
    "errors",
    "load_guarantee",
    "load_mechanism",
    "load_model",
    "load_plan",
    "make_plan",
    "make_statement",
    "mechanism",
    "observe",
    "open_log",
    "optimize_band_inverse",
    "optimize_band_toeplitz",
    "optimize_bandmf",
    "optimize_blt",
    "optimize_for_balls_in_bins",
    "optimize_for_cyclic_poisson",
    "optimize_general_blt",
    "optimize_robust_blt",
    "read_status",
    "save_guarantee",
    "save_mechanism",
    "save_plan",
    "save_statement",
    "simulate",
    "verify_run",
]

# Which module each name comes from.
_HOMES = {
    name: module
    for module, names in {
        "dpftrl.accounting": (
            "Guarantee SampledGuarantee account account_sampled calibrate calibrate_rho "
            "calibrate_sampled compose load_guarantee save_guarantee"
        ),
        "dpftrl.accounting.logs": "Observed observe open_log",
        "dpftrl.adaptive_clipping": "AdaptiveClipping",
        "dpftrl.clipping": "ExactSum Grid",
        "dpftrl.errors": "DpftrlError InvalidInput",
        "dpftrl.federated": "Adam Released Round Server Settings Sgd StartModel",
        "dpftrl.mechanisms": (
            "BLT Banded BandedInverse BinaryTree ErrorReport FullTree GeneralBLT Independent "
            "Mechanism Sensitivity SmoothTree SquareRoot StreamState Toeplitz ToeplitzMechanism "
            "load_mechanism save_mechanism"
        ),
        "dpftrl.models": "ReleasedModel load_model",
        "dpftrl.noise": "NoiseKey NoiseStream",
        "dpftrl.optimize": (
            "optimize_band_inverse optimize_band_toeplitz optimize_bandmf optimize_blt "
            "optimize_for_balls_in_bins optimize_for_cyclic_poisson optimize_general_blt "
            "optimize_robust_blt"
        ),
        "dpftrl.participation": (
            "BallsInBins CyclicPoisson FixedEpochs MinSep Participation Poisson Sampling"
        ),
        "dpftrl.sampler": "Sampler",
        "dpftrl.plan": "Dataset Fleet Plan load_plan make_plan mechanism save_plan",
        "dpftrl.simulation": "SimulationResult simulate",
        "dpftrl.statement": "Statement make_statement save_statement",
        "dpftrl.status": "Status read_status",
        "dpftrl.verify": "verify_run",
        "dpftrl.workload": "Workload",
    }.items()
    for name in names.split()
}

deprecation.install()


def __getattr__(name: str) -> Any:
    if name in deprecation.NAMES:
        new = deprecation.NAMES[name]
        deprecation.warn(f"dpftrl.{name}", f"dpftrl.{new}")
        return getattr(import_module(_HOMES[new]), new)
    if name == "errors":
        return import_module("dpftrl.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'dpftrl' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # next time without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
