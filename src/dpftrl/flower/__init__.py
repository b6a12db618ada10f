"""DP-FTRL on Flower: a strategy for the ServerApp, a mod for the ClientApp, a Grid without Ray.

All that privacy rests on is in `dpftrl.federated`; what is here carries messages.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

with warnings.catch_warnings():
    # Flower imports names that other packages are about to drop; that is not the user's to mend.
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        for _part in ("app", "clientapp", "serverapp.strategy", "superlink.grid"):
            import_module(f"flwr.{_part}")
    except ModuleNotFoundError as error:
        if error.name != "flwr":
            raise
        hint = "dpftrl.flower needs Flower: pip install 'dpftrl[flower]'"
        raise ModuleNotFoundError(hint, name="flwr") from None

if TYPE_CHECKING:
    from dpftrl.federated import Settings
    from dpftrl.flower.client import client_mod
    from dpftrl.flower.in_process import InProcessGrid
    from dpftrl.flower.run import Patience
    from dpftrl.flower.strategy import DpFtrl
    from dpftrl.plan import load_plan

__all__ = ["DpFtrl", "InProcessGrid", "Patience", "Settings", "client_mod", "load_plan"]

_HOMES = {
    "DpFtrl": f"{__name__}.strategy",
    "InProcessGrid": f"{__name__}.in_process",
    "Patience": f"{__name__}.run",
    "Settings": "dpftrl.federated",
    "client_mod": f"{__name__}.client",
    "load_plan": "dpftrl.plan",
}


def __getattr__(name: str) -> Any:
    # Late: a device that only trains need not load what the server's noise is made with.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
