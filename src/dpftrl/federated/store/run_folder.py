"""The folder of a run: the path of each of its files, and its checkpoints.

A checkpoint is one file with the model and the state of the server optimizer after a round.

Everything in `private/`, and a ledger, must stay on the server. Whoever has the key, the journal
or the noise state can remove the noise from released models.
"""

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, final

import msgspec

from dpftrl._internal.arrays import Float32Vector
from dpftrl._internal.storage import check_own_folder, read_file, replace_file
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.federated.optimizers import State
from dpftrl.noise import NoiseKey

# Names of the arrays in a checkpoint.
MODEL: Final = "model"
OPTIMIZER: Final = "optimizer."
MOST_CHECKPOINT_BYTES: Final = 2**40
HEADER: Final = "round,client,status\n"  # the first line of a ledger
# Drafts that a killed process may leave: a dot, one of our names, and a random number or, in
# version 0.1, the process id.
DRAFT = re.compile(
    r"\.(run\.json|plan.*|guarantee.*|ledger\.csv|noise\..*|journal\.jsonl|snapshot\.bin|[0-9]+\.safetensors"
    r"|config\.toml|metrics\.jsonl|statement\..*|curves\.png|canaries\..*)\.([0-9]+|[0-9a-f]{16})"
)


@final
@dataclass(frozen=True)
class RunFolder:
    """Paths of the files of a run, below `root`."""

    root: Path

    @cached_property
    def private(self) -> Path:
        """The folder of the files that only the server may read."""
        return self.root / "private"

    @cached_property
    def settings(self) -> Path:
        """The run's identity and settings (`run.json`)."""
        return self.root / "run.json"

    @cached_property
    def plan(self) -> Path:
        """The plan (`plan.json`)."""
        return self.root / "plan.json"

    @cached_property
    def guarantee(self) -> Path:
        """The guarantee of everything released so far (`guarantee.json`)."""
        return self.root / "guarantee.json"

    @cached_property
    def ledger(self) -> Path:
        """The ledger that runs with a journal of version 1 keep (`ledger.csv`)."""
        return self.root / "ledger.csv"

    @cached_property
    def journal(self) -> Path:
        """The journal: every decision, one per line."""
        return self.private / "journal.jsonl"

    @cached_property
    def key(self) -> Path:
        """The noise key."""
        return self.private / "noise.key"

    @cached_property
    def lock(self) -> Path:
        """The lock file, held by the server that works on the run."""
        return self.private / "lock"

    @cached_property
    def noise(self) -> Path:
        """The noise buffers, saved every `snapshot_every` rounds."""
        return self.private / "noise.safetensors"

    @cached_property
    def snapshot(self) -> Path:
        """The state of the run after one of its rounds, which makes resuming fast."""
        return self.private / "snapshot.bin"

    @cached_property
    def log(self) -> Path:
        """The private log of refused and unusable reports; never to be published."""
        return self.private / "log.jsonl"

    def checkpoint(self, rounds: int) -> Path:
        """The checkpoint after this number of rounds."""
        return self.private / "checkpoints" / f"{rounds:08d}.safetensors"

    @property
    def exists(self) -> bool:
        """Whether this folder holds a run."""
        return self.journal.exists()

    def refuse_if_begun(self) -> None:
        """Refuse a folder that already holds a run."""
        if self.exists:
            raise InvalidInput(
                f"a run has begun in {self.root}; resume it, or choose another folder"
            )
        has_ledger = self.ledger.exists() and self.ledger.stat().st_size > len(HEADER)
        if has_ledger or max(self._checkpoints(), default=0) > 0:
            raise UnsafeState(
                f"{self.root} has rounds of a run in it, but {self.journal} is gone; use another "
                "folder"
            )

    def make(self) -> None:
        """Create the folder; only the owner can read its private part."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            check_own_folder(self.root, may_be_link=True)
            for folder in (self.private, self.private / "checkpoints"):
                folder.mkdir(exist_ok=True, mode=0o700)
                check_own_folder(folder)
                folder.chmod(0o700)
        except OSError as error:
            raise InvalidInput(f"{self.root} cannot be made: {error.strerror}") from None

    def check_owner(self) -> None:
        """Refuse folders that are links, or of another user, or that everybody may write to."""
        check_own_folder(self.root, may_be_link=True)
        for folder in (self.private, self.private / "checkpoints"):
            check_own_folder(folder)

    def check_checkpoints(self, rounds: int) -> None:
        """Refuse a journal of `rounds` rounds if there are checkpoints of later rounds."""
        latest = max(self._checkpoints(), default=0)
        if latest > rounds + 1:
            raise UnsafeState(
                f"{self.root} has a model after {latest} rounds, and a journal of {rounds}: the "
                "journal was rolled back"
            )

    def tidy(self, rounds: int) -> None:
        """Remove temporary files of killed processes, and checkpoints that are no longer needed."""
        old = [path for number, path in self._checkpoints().items() if number < rounds - 1]
        drafts = (
            path
            for folder in (self.root, self.private, self.private / "checkpoints")
            for path in folder.glob(".*.*")
            if DRAFT.fullmatch(path.name)
        )
        for path in (*old, *drafts):
            with contextlib.suppress(OSError):  # a failed clean-up must not stop the round
                path.unlink()

    def _checkpoints(self) -> dict[int, Path]:
        found = (self.private / "checkpoints").glob("*.safetensors")
        return {int(path.stem): path for path in found if path.stem.isdecimal()}

    def note(self, entry: dict[str, Any]) -> None:
        """Append an entry to the private log."""
        with contextlib.suppress(OSError):  # a failed log entry must not stop the round
            flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            # Without O_NONBLOCK, a named pipe in its place would make the server wait for ever.
            with os.fdopen(os.open(self.log, flags | os.O_NONBLOCK, 0o600), "ab") as file:
                if os.fstat(file.fileno()).st_uid == os.geteuid():  # nobody else reads along
                    file.write(msgspec.json.encode(entry) + b"\n")

    def write_key(self, key: NoiseKey) -> None:
        """Write the noise key, readable by the owner only."""
        replace_file(self.key, memoryview(key.secret_bytes()), private=True)

    def read_key(self) -> NoiseKey:
        """Read the noise key."""
        if not self.key.exists():
            raise UnsafeState(f"{self.key} is missing: without its noise key a run cannot go on")
        return NoiseKey(memoryview(read_file(self.key, own=True)))


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
        replace_file(path, content, private=True)
        return hashlib.sha256(content).hexdigest()

    @classmethod
    def load(cls, path: Path, sha256: str) -> "Checkpoint":
        """Read a checkpoint; refuse a file with another SHA-256."""
        from safetensors.numpy import load

        content = read_file(path, MOST_CHECKPOINT_BYTES, own=True)
        if hashlib.sha256(content).hexdigest() != sha256:
            raise UnsafeState(f"{path} was changed since it was committed: its digest differs")
        arrays = load(content)
        if MODEL not in arrays:
            raise InvalidInput(f"{path} holds no model")
        state = {
            name.removeprefix(OPTIMIZER): vector for name, vector in arrays.items() if name != MODEL
        }
        return cls(arrays[MODEL], state)
