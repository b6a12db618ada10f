"""Federated training simulated in one process: a task, simulated clients, and the server."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpftrl.simulation.config import read_config
    from dpftrl.simulation.metrics import Point, read_points
    from dpftrl.simulation.python_clients import PythonClients
    from dpftrl.simulation.sections import Config
    from dpftrl.simulation.training import (
        Progress,
        Training,
        load_training_task,
        starting_arrays,
        starting_model,
    )

__all__ = [
    "Config",
    "Point",
    "Progress",
    "PythonClients",
    "Training",
    "load_training_task",
    "read_config",
    "read_points",
    "starting_arrays",
    "starting_model",
]

_HOMES = {
    "Config": "sections",
    "Point": "metrics",
    "Progress": "training",
    "PythonClients": "python_clients",
    "Training": "training",
    "load_training_task": "training",
    "read_config": "config",
    "read_points": "metrics",
    "starting_arrays": "training",
    "starting_model": "training",
}


def __getattr__(name: str) -> Any:
    # Imported on first use, so that a config can be read without loading JAX.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
