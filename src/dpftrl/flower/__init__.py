"""DP-FTRL on Flower: a strategy for the ServerApp, a mod for the ClientApp, a Grid without Ray.

The server's privacy logic is in `dpftrl.federated`. This package carries its messages, and keeps
the contact timers of the devices.
"""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

with warnings.catch_warnings():
    # Flower uses deprecated names of other packages; dpftrl's users cannot fix that.
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        for _part in ("app", "clientapp", "serverapp.strategy"):
            import_module(f"flwr.{_part}")
    except ModuleNotFoundError as error:
        if error.name != "flwr":
            raise
        hint = "dpftrl.flower needs Flower: pip install 'dpftrl[flower]'"
        raise ModuleNotFoundError(hint, name="flwr") from None
    import_module(f"{__name__}._flwr_internals")  # refuses versions of Flower that are not known

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
    # Imported on first use: a device that only trains does not load the server's noise code.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
