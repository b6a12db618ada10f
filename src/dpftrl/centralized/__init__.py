"""Training on a data set in one place, without a framework: batches, noise, files and guarantee.

`dpftrl.torch` and `dpftrl.jax` add the gradients and the optimizer.
"""

from dpftrl.centralized.batches import Batch, Units
from dpftrl.centralized.run import TrainingRun
from dpftrl.centralized.settings import Settings

__all__ = ["Batch", "Settings", "TrainingRun", "Units"]
