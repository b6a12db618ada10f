"""Checkpoints: model and server optimizer after a round, in one file."""

import hashlib
from pathlib import Path
from typing import Final, final

from dpftrl._internal.arrays import Float32Vector
from dpftrl._internal.storage import read_file, replace_durably
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.federated.optimizers import State

MODEL: Final = "model"
OPTIMIZER: Final = "optimizer."
MOST_BYTES: Final = 2**40


@final
class Checkpoint:
    """A model with the state of its server optimizer.

    Attributes:
        model: The model as one flat vector.
        optimizer: The vectors that the optimizer keeps, by name, each as long as the model.
    """

    def __init__(self, model: Float32Vector, optimizer: State):
        self.model = model
        self.optimizer = optimizer

    def __repr__(self) -> str:
        return f"Checkpoint({self.model.size:,} parameters)"

    def save(self, path: Path) -> str:
        """Write the checkpoint, readable by the owner only, and return the SHA-256 of the file."""
        from safetensors.numpy import save

        vectors = {OPTIMIZER + name: vector for name, vector in self.optimizer.items()}
        content = save({MODEL: self.model, **vectors})
        replace_durably(path, content)
        return hashlib.sha256(content).hexdigest()

    @classmethod
    def load(cls, path: Path, sha256: str) -> "Checkpoint":
        """Read a checkpoint; refuse a file with another SHA-256."""
        from safetensors.numpy import load

        content = read_file(path, MOST_BYTES)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise UnsafeState(f"{path} was changed since it was committed: its digest differs")
        found = load(content)
        if MODEL not in found:
            raise InvalidInput(f"{path} holds no model")
        state = {
            name.removeprefix(OPTIMIZER): vector for name, vector in found.items() if name != MODEL
        }
        return cls(found[MODEL], state)
