"""The server of federated training. It runs private rounds; the caller contacts the clients."""

from dpftrl._internal.arrays import Layout
from dpftrl.federated.aggregator import Aggregator
from dpftrl.federated.optimizers import Adam, Optimizer, Sgd
from dpftrl.federated.partial_sum import Assignment, PartialSum
from dpftrl.federated.pseudonyms import Population
from dpftrl.federated.round import Released, Round
from dpftrl.federated.server import Server
from dpftrl.federated.settings import Settings
from dpftrl.federated.start_model import EarlierRun, Start, StartModel
from dpftrl.federated.store.ledger import write_ledger
from dpftrl.federated.store.run_folder import RunFolder

__all__ = [
    "Adam",
    "Aggregator",
    "Assignment",
    "EarlierRun",
    "Layout",
    "Optimizer",
    "PartialSum",
    "Population",
    "Released",
    "Round",
    "RunFolder",
    "Server",
    "Settings",
    "Sgd",
    "Start",
    "StartModel",
    "write_ledger",
]
