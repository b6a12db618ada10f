"""Federated training simulated in one process: a task, simulated clients, and the server."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpftrl._internal.deprecation import warn

if TYPE_CHECKING:
    from dpftrl.simulation.config import Config, read_config
    from dpftrl.simulation.metrics import Point, read_points
    from dpftrl.simulation.population import PythonClients
    from dpftrl.simulation.training import (
        Training,
        TrainingProgress,
        load_training_task,
        starting_arrays,
        starting_model,
    )

__all__ = [
    "Config",
    "Point",
    "PythonClients",
    "Training",
    "TrainingProgress",
    "load_training_task",
    "read_config",
    "read_points",
    "starting_arrays",
    "starting_model",
]

_HOMES = {
    "Config": "config",
    "Point": "metrics",
    "PythonClients": "population",
    "Training": "training",
    "TrainingProgress": "training",
    "load_training_task": "training",
    "read_config": "config",
    "read_points": "metrics",
    "starting_arrays": "training",
    "starting_model": "training",
}


def __getattr__(name: str) -> Any:
    if name == "Progress":
        name = "TrainingProgress"
        warn("dpftrl.simulation.Progress", f"dpftrl.simulation.{name}")
    # Imported on first use, so that a config can be read without loading JAX.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
