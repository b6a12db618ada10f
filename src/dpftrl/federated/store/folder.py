"""Where the files of a run are.

Everything in `private/`, and the ledger, stays on the server: who has the key, the journal or the
noise state can take the noise off the models again.
"""

import contextlib
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import msgspec

from dpftrl._internal.storage import read_file, replace_durably
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.federated.store.ledger import HEADER
from dpftrl.noise import NoiseKey

# What a process that was killed may leave: a file of ours, with a dot and the process.
DRAFT = re.compile(
    r"\.(run\.json|plan.*|guarantee\.json|noise\..*|journal\.jsonl|[0-9]+\.safetensors)\.[0-9]+"
)


@final
@dataclass(frozen=True)
class RunFolder:
    """The folder of a run."""

    root: Path

    @property
    def private(self) -> Path:
        """For the server's eyes only."""
        return self.root / "private"

    @property
    def settings(self) -> Path:
        """What the run was told."""
        return self.root / "run.json"

    @property
    def plan(self) -> Path:
        """What it promised."""
        return self.root / "plan.json"

    @property
    def guarantee(self) -> Path:
        """What it guarantees so far."""
        return self.root / "guarantee.json"

    @property
    def ledger(self) -> Path:
        """Who took part in which round."""
        return self.root / "ledger.csv"

    @property
    def journal(self) -> Path:
        """What was decided, line by line."""
        return self.private / "journal.jsonl"

    @property
    def key(self) -> Path:
        """The noise key."""
        return self.private / "noise.key"

    @property
    def lock(self) -> Path:
        """Held by the server at work."""
        return self.private / "lock"

    @property
    def noise(self) -> Path:
        """Noise buffers, saved from time to time."""
        return self.private / "noise.safetensors"

    @property
    def log(self) -> Path:
        """What went wrong with clients: never to be published."""
        return self.private / "log.jsonl"

    def checkpoint(self, rounds: int) -> Path:
        """Model and optimiser after so many rounds."""
        return self.private / "checkpoints" / f"{rounds:08d}.safetensors"

    @property
    def exists(self) -> bool:
        """Whether a run has begun here."""
        return self.journal.exists()

    def refuse_if_begun(self) -> None:
        """Nothing may write over a run."""
        if self.exists:
            raise InvalidInput(f"a run has begun in {self.root}; resume it, or choose another")
        if self.ledger.exists() and self.ledger.stat().st_size > len(HEADER):
            raise UnsafeState(
                f"{self.ledger} has clients in it, but {self.journal} is gone; use another folder"
            )

    def make(self) -> None:
        """Make the folder, for the owner's eyes only where that matters."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for folder in (self.private, self.private / "checkpoints"):
                folder.mkdir(exist_ok=True, mode=0o700)
                folder.chmod(0o700)
        except OSError as error:
            raise InvalidInput(f"{self.root} cannot be made: {error.strerror}") from None

    def check_checkpoints(self, rounds: int) -> None:
        """Refuse a journal of so many rounds if there are models of later ones."""
        latest = max(self._checkpoints(), default=0)
        if latest > rounds + 1:
            raise UnsafeState(
                f"{self.root} has a model after {latest} rounds, and a journal of {rounds}: the "
                "journal was rolled back"
            )

    def tidy(self, rounds: int) -> None:
        """Remove what a killed process left half written, and checkpoints nobody needs."""
        old = [path for number, path in self._checkpoints().items() if number < rounds - 1]
        drafts = (
            path
            for folder in (self.root, self.private, self.private / "checkpoints")
            for path in folder.glob(".*.*")
            if DRAFT.fullmatch(path.name)
        )
        for path in (*old, *drafts):
            with contextlib.suppress(OSError):  # tidiness is not worth a round
                path.unlink()

    def _checkpoints(self) -> dict[int, Path]:
        found = (self.private / "checkpoints").glob("*.safetensors")
        return {int(path.stem): path for path in found if path.stem.isdecimal()}

    def note(self, entry: dict[str, Any]) -> None:
        """Add a line to the private log."""
        with contextlib.suppress(OSError):  # a log is not worth a round
            flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
            with os.fdopen(os.open(self.log, flags, 0o600), "ab") as file:
                file.write(msgspec.json.encode(entry) + b"\n")

    def write_key(self, key: NoiseKey) -> None:
        """Keep the key, readable by the owner alone."""
        replace_durably(self.key, key.secret_bytes())

    def read_key(self) -> NoiseKey:
        """The key that was kept."""
        if not self.key.exists():
            raise UnsafeState(f"{self.key} is missing: without its noise key a run cannot go on")
        return NoiseKey(read_file(self.key))


def sha256_of(path: Path) -> str:
    """Of a file's content."""
    try:
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
