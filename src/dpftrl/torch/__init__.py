"""Private training of PyTorch models, on one's own data set.

`make_private` owns batches, clipping, noise, checkpoints and guarantee. `dpftrl.torch.opacus` is
for users of Opacus.
"""

from dpftrl.centralized.owner import Metrics, PrivacyWarning
from dpftrl.torch.training import PrivateTraining, make_private

__all__ = ["Metrics", "PrivacyWarning", "PrivateTraining", "make_private"]
