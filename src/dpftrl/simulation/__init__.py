"""Federated training simulated in one process: a task, simulated clients, and the server."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dpftrl._internal.deprecation import warn

if TYPE_CHECKING:
    from dpftrl.simulation.config import Config, read_config
    from dpftrl.simulation.loop import TrainingProgress
    from dpftrl.simulation.metrics import Point, read_points
    from dpftrl.simulation.own_model import SimulationResult, simulate
    from dpftrl.simulation.population import PythonClients
    from dpftrl.simulation.training import (
        Training,
        load_training_task,
        starting_arrays,
        starting_model,
    )

__all__ = [
    "Config",
    "Point",
    "PythonClients",
    "SimulationResult",
    "Training",
    "TrainingProgress",
    "load_training_task",
    "read_config",
    "read_points",
    "simulate",
    "starting_arrays",
    "starting_model",
]

_HOMES = {
    "Config": "config",
    "Point": "metrics",
    "PythonClients": "population",
    "SimulationResult": "own_model",
    "Training": "training",
    "TrainingProgress": "loop",
    "load_training_task": "training",
    "read_config": "config",
    "read_points": "metrics",
    "simulate": "own_model",
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
