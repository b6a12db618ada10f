"""The journal of a centralized run, and the checkpoints that it names."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, final

import msgspec

from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.verify.journal import (
    DIGEST,
    Clipping,
    Count,
    Created,
    Record,
    Sha256,
    read_lines,
)
from dpftrl.verify.run_files import (
    check_digest,
)

MOST_HEADER: Final = 100_000_000  # bytes of the header of a safetensors file, by its format


@final
class Step(Record, frozen=True, tag="step"):
    """The noise of a step was fixed, before the model changed."""

    step: Count
    digest: msgspec.Raw  # 16 bytes in hexadecimal; tracebacks would show the content of a string
    clipping: Clipping | None = None


@final
class Saved(Record, frozen=True, tag="saved"):
    """A checkpoint was written after this number of steps."""

    steps: Count
    checkpoint_sha256: Sha256
    epsilon: Annotated[float, msgspec.Meta(ge=0)]


STEP_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Created | Step | Saved)


@final
@dataclass(frozen=True, eq=False)
class StepJournal:
    """The content of the journal of a centralized run.

    Attributes:
        created: The first record.
        steps: The number of steps.
        saves: The records of checkpoints, in order.
        macs: The MAC of each complete line, in hexadecimal.
        torn: Whether the file ends with an incomplete line.
        clipped: The records of the steps that have a clip norm that moves.
    """

    created: Created
    steps: int
    saves: tuple[Saved, ...]
    macs: tuple[str, ...]
    torn: bool
    clipped: tuple[Step, ...] = ()

    @property
    def saved_steps(self) -> int:
        """The number of steps before the last recorded checkpoint."""
        return self.saves[-1].steps if self.saves else 0


def read_step_journal(path: Path, key: memoryview) -> StepJournal:
    """Read a journal and check every line.

    Args:
        path: The journal file.
        key: The noise key of the run.

    Raises:
        InvalidInput: The file cannot be read.
        UnsafeState: A line was changed, or a record cannot follow the records before it.
    """
    history = _History()
    lines = read_lines(path, key, STEP_DECODER, history.append)
    if history.created is None:
        raise UnsafeState("the journal has no complete line")
    saves, clipped, count = tuple(history.saves), tuple(history.clipped), len(history.digests)
    return StepJournal(history.created, count, saves, lines.macs, lines.torn, clipped)


@final
class _History:
    """The records read so far, and the rules for which record may come next."""

    def __init__(self) -> None:
        self.created: Created | None = None
        self.digests: set[bytes] = set()
        self.clipped: list[Step] = []
        self.saves: list[Saved] = []

    def append(self, record: Created | Step | Saved) -> None:
        """Add the next record.

        Raises:
            InvalidInput: The record cannot follow the records before it.
        """
        if isinstance(record, Created):
            if self.created is not None:
                raise InvalidInput("the run was already created; only the first line may create it")
            self.created = record
        elif self.created is None:
            raise InvalidInput("the first line does not create the run")
        elif isinstance(record, Step):
            self._add_step(record)
        else:
            self._add_saved(record)

    def _add_step(self, record: Step) -> None:
        if record.step != len(self.digests):
            raise InvalidInput(f"expected step {len(self.digests)}, got step {record.step}")
        if not DIGEST.fullmatch(bytes(record.digest)):
            raise InvalidInput("the digest of a step must be 32 hexadecimal digits")
        # A digest covers the sum of its step and the digest of the step before.
        if bytes(record.digest) in self.digests:
            raise InvalidInput("two steps have the same digest, so the same noise")
        self.digests.add(bytes(record.digest))
        if record.clipping is not None:
            self.clipped.append(record)

    def _add_saved(self, record: Saved) -> None:
        before = self.saves[-1].steps if self.saves else 0
        if not before < record.steps <= len(self.digests):
            raise InvalidInput(
                f"a checkpoint after {record.steps} steps, when there were {len(self.digests)}, "
                f"and the checkpoint before was after {before}"
            )
        self.saves.append(record)


def _shards_of(path: Path) -> dict[str, str]:
    """The shards that the main file of a checkpoint lists, and their SHA-256; empty for a whole."""
    try:
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), MOST_HEADER))
        content = msgspec.json.decode(header, type=_TensorsHeader)
        return msgspec.json.decode(content.metadata.get("shards", "{}"), type=dict[str, Sha256])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}  # its digest was right, so the run wrote it so


class _TensorsHeader(msgspec.Struct):
    """The part of the header of a safetensors file that is not about tensors."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict[str, str])


def check_checkpoints(folder: Path, journal: StepJournal) -> str:
    """Compare the digest of every kept checkpoint with the journal.

    Raises:
        UnsafeState: The last checkpoint is missing, or a checkpoint differs from the journal.
    """
    digests = {0: journal.created.checkpoint_sha256}
    digests |= {saved.steps: saved.checkpoint_sha256 for saved in journal.saves}
    paths = {path.stem: path for path in folder.glob("*.safetensors") if path.name[0] != "."}
    last = journal.saved_steps
    if f"{last:08d}" not in paths:
        raise UnsafeState(f"the checkpoint after {last} steps is missing")
    checked = 0
    for steps, sha256 in digests.items():
        if (path := paths.pop(f"{steps:08d}", None)) is not None:
            when = f"it was written after {steps} steps" if steps else "the run was created"
            check_digest(path, sha256, when)
            checked += 1
            for name, known in _shards_of(path).items():
                shard = paths.pop(name.removesuffix(".safetensors"), None)
                if shard is None:
                    raise UnsafeState(
                        f"{name} is missing: a shard of the model after {steps} steps"
                    )
                check_digest(shard, known, when)
    # A checkpoint is written before its journal line. A process that was killed in between leaves
    # one that no record names; resuming the run removes it.
    for name in list(paths):
        if name[:8].isdigit() and last < int(name[:8]) <= journal.steps:
            del paths[name]
    if paths:
        raise UnsafeState(f"{sorted(paths)[0]}.safetensors belongs to no step of the journal")
    return f"{checked} checkpoint(s), the last after {last:,} steps, unchanged since then"
