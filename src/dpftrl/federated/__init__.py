"""The round, with no engine in it: cohort, clipping, noise, optimiser, ledger, journal."""

from dpftrl.federated.attempt import Attempt, Released
from dpftrl.federated.folder import RunFolder
from dpftrl.federated.layout import Layout
from dpftrl.federated.optimizers import Adam, Optimizer, Sgd
from dpftrl.federated.server import Server
from dpftrl.federated.settings import Settings
from dpftrl.federated.start import EarlierRun, Start, StartModel

__all__ = [
    "Adam",
    "Attempt",
    "EarlierRun",
    "Layout",
    "Optimizer",
    "Released",
    "RunFolder",
    "Server",
    "Settings",
    "Sgd",
    "Start",
    "StartModel",
]
