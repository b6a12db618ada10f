"""The files of a centralized run, and the only code that changes them.

Each step is journalled before the model changes. Model, optimizer and noise are written together
every few steps; the steps in between are repeated when a run is resumed, and must give the digests
in the journal. Everything in `private/` must stay secret: whoever has the key, the journal, the
noise or the digests can remove the noise from released models.
"""

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, Literal, NoReturn, Self, final

import msgspec

from dpftrl._internal.storage import (
    check_own_folder,
    read_file,
    read_json,
    replace_file,
    sha256_of,
)
from dpftrl.adaptive_clipping import ClippedRound
from dpftrl.centralized.guarantee import guarantee_file
from dpftrl.centralized.settings import RunFile, Settings
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.journal import Chain, Journal, Lock, Record, Witness, digest_of, witness_folder
from dpftrl.mechanisms.registry import mechanism_content
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.noise.key import Secret
from dpftrl.plan import DatasetPlan, save_dataset_plan
from dpftrl.plan.dataset import load_dataset_plan

ShardKind = Literal["safetensors", "noise"]
MOST_CHECKPOINT_BYTES: Final = 2**40
# What to do about a file that was changed or removed.
RESTORE: Final = "restore it from a copy, or start in another folder"
# Drafts that a killed process may leave: a dot, one of our names, and a random number.
DRAFT: Final = re.compile(
    r"\.(run\.json|plan\.json|guarantee\.json|noise\..*|journal\.jsonl|[0-9]+\..*|statement\..*|canaries\..*)"
    r"\.[0-9a-f]{16}"
)


@final
class Created(Record, frozen=True, tag="created", omit_defaults=True):
    """The run was created. This is the first record of every journal.

    Attributes:
        run: The identity of the run: 16 random bytes, in hexadecimal.
        settings_sha256: SHA-256 of the file `run.json`.
        plan_sha256: SHA-256 of the file `plan.json`.
        key_fingerprint: The fingerprint of the noise key.
        checkpoint_sha256: SHA-256 of the checkpoint before the first step.
        files: SHA-256 of further files of the run, by name, such as `canaries.json`.
    """

    run: str
    settings_sha256: str
    plan_sha256: str
    key_fingerprint: str
    checkpoint_sha256: str
    files: dict[str, str] = msgspec.field(default_factory=dict)


@final
class Step(Record, frozen=True, tag="step", omit_defaults=True):
    """The noise of a step was fixed. The model changes after this record is on the disk.

    Attributes:
        step: The number of the step, which is also its row of noise.
        digest: Keyed digest of the sum of this step and of all earlier sums. With the noise key,
            the noise of the step can be recomputed from this digest.
        clipping: The clip norm and the noisy bits of the step, with adaptive clipping; else None.
    """

    step: int
    digest: msgspec.Raw  # a Raw value: a traceback would show the content of a string
    clipping: ClippedRound | None = None


@final
class Saved(Record, frozen=True, tag="saved"):
    """A checkpoint was written.

    Attributes:
        steps: Number of steps before it.
        checkpoint_sha256: SHA-256 of the checkpoint.
        epsilon: Epsilon of these steps, at the delta of the plan.
    """

    steps: int
    checkpoint_sha256: str
    epsilon: float


AnyRecord = Created | Step | Saved


@final
class RunState:
    """The state of a run, computed from the records of its journal.

    Attributes:
        created: The first record of the journal.
        digests: The keyed digest of each step. They are as secret as the noise.
        clippings: The clip norm and the noisy bits of each step, with adaptive clipping.
        saved: Number of steps before the newest checkpoint.
        checkpoint_sha256: SHA-256 of the newest checkpoint.
    """

    def __init__(self) -> None:
        self.created: Created | None = None
        self.digests: list[msgspec.Raw] = []
        self.clippings: list[ClippedRound | None] = []
        self.saved = 0
        self.checkpoint_sha256 = ""

    def __repr__(self) -> str:
        return f"RunState({len(self.digests)} steps, {self.saved} saved)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RunState cannot be pickled or copied: it holds secret digests")

    def follow(self, record: AnyRecord) -> None:
        """Apply one journal record to the state."""
        if not self._fits(record):
            raise UnsafeState(
                f"the journal makes no sense: after {len(self.digests)} steps comes "
                f"{type(record).__name__.lower()}"
            )
        if isinstance(record, Step):
            self.digests.append(record.digest)
            self.clippings.append(record.clipping)
            return
        self.checkpoint_sha256 = record.checkpoint_sha256
        if isinstance(record, Created):
            self.created = record
        else:
            self.saved = record.steps

    def _fits(self, record: AnyRecord) -> bool:
        if isinstance(record, Created):
            return self.created is None
        if isinstance(record, Step):
            return self.created is not None and record.step == len(self.digests)
        return self.created is not None and self.saved < record.steps <= len(self.digests)


@final
@dataclass(frozen=True)
class RunFolder:
    """Paths of the files of a run, below `root`."""

    root: Path

    @cached_property
    def private(self) -> Path:
        """The folder of the files that only the trainer may read."""
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
    def journal(self) -> Path:
        """The journal: one line per step or checkpoint."""
        return self.private / "journal.jsonl"

    @cached_property
    def key(self) -> Path:
        """The noise key."""
        return self.private / "noise.key"

    @cached_property
    def lock(self) -> Path:
        """The lock file, held by the process that trains."""
        return self.private / "lock"

    def checkpoint(self, steps: int) -> Path:
        """The model and the state of the optimizer after this number of steps."""
        return self.private / "checkpoints" / f"{steps:08d}.safetensors"

    def noise(self, steps: int) -> Path:
        """The noise buffers after this number of steps."""
        return self.private / "checkpoints" / f"{steps:08d}.noise"

    def shard(self, steps: int, rank: int, ranks: int, kind: ShardKind) -> Path:
        """What one rank keeps after this number of steps: of the model, or of the noise."""
        name = f"{steps:08d}.shard-{rank:05d}-of-{ranks:05d}.{kind}"
        return self.private / "checkpoints" / name

    def noise_shards(self, steps: int) -> Iterator[list[Path]]:
        """Files that together hold the noise after this number of steps, if they are all there."""
        if self.noise(steps).exists():
            yield [self.noise(steps)]
        found = (self.private / "checkpoints").glob(f"{steps:08d}.shard-00000-of-*.noise")
        for first in sorted(found):
            ranks = int(first.stem.rpartition("-")[2])
            yield [self.shard(steps, rank, ranks, "noise") for rank in range(ranks)]

    @property
    def exists(self) -> bool:
        """Whether this folder holds a run."""
        return self.journal.exists()

    def refuse_if_begun(self) -> None:
        """Refuse a folder that holds a run, or what is left of one."""
        if self.exists:
            raise InvalidInput(f"a run has begun in {self.root}; resume it")
        left = {path.name[:8] for path in (self.private / "checkpoints").glob("[0-9]*")}
        if self.guarantee.exists() or left - {self.checkpoint(0).name[:8]}:
            raise UnsafeState(
                f"{self.root} has released steps, but {self.journal} is gone; use another folder"
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

    def tidy(self, steps: int) -> None:
        """Remove temporary files of killed processes, and all checkpoints but that of `steps`."""
        checkpoints = self.private / "checkpoints"
        kept = f"{steps:08d}."
        old = [path for path in checkpoints.glob("[0-9]*") if not path.name.startswith(kept)]
        drafts = (
            path
            for folder in (self.root, self.private, checkpoints)
            for path in folder.glob(".*.*")
            if DRAFT.fullmatch(path.name)
        )
        for path in (*old, *drafts):
            with contextlib.suppress(OSError):  # a failed clean-up must not stop the training
                path.unlink()

    def read_key(self) -> NoiseKey:
        """Read the noise key."""
        if not self.key.exists():
            raise UnsafeState(
                f"{self.key} is missing: without its noise key a run cannot go on; {RESTORE}"
            )
        return NoiseKey(memoryview(read_file(self.key, own=True)))


@final
class RunStore:
    """A run that this process has opened: its files, and the state that was read from them.

    If writing fails, the object must not be used any more, and the run must be resumed.
    """

    def __init__(
        self,
        folder: RunFolder,
        file: RunFile,
        plan: DatasetPlan,
        key: NoiseKey,
        chain: Chain[AnyRecord],
        state: RunState,
        state_folder: Path | None,
        held: ExitStack,
    ):
        """Call `create` or `resume` instead."""
        self.folder, self.file, self.plan, self.key, self.state = folder, file, plan, key, state
        self.state_folder = state_folder
        self._chain, self._held = chain, held
        self._mechanism = mechanism_content(plan.mechanism, folder.guarantee)
        self._covered = 0  # number of steps that guarantee.json covers
        self._writer = ThreadPoolExecutor(1, "dpftrl journal")
        held.callback(self._writer.shutdown)

    def __repr__(self) -> str:
        return f"RunStore({self.folder.root}, {self.state})"

    @classmethod
    def create(
        cls,
        folder: RunFolder,
        plan: DatasetPlan,
        settings: Settings,
        checkpoint: bytes,
        state_folder: Path | None,
        insecure_test_key: int | None,
        files: Mapping[str, bytes] | None = None,
    ) -> Self:
        """Write the files of a new run; the first line of the journal is written last."""
        further = files or {}
        settings.check()
        is_test = insecure_test_key is not None
        key = NoiseKey.insecure_for_tests(insecure_test_key) if is_test else NoiseKey.generate()
        file = RunFile(run=os.urandom(16).hex(), settings=settings, test_key=is_test)
        folder.make()
        with ExitStack() as held:
            lock = Lock(folder.lock)
            held.callback(lock.close)
            folder.refuse_if_begun()
            chain = _chain(folder, file.run, key, lock, state_folder, held)
            replace_file(folder.key, memoryview(key.secret_bytes()), private=True)
            save_dataset_plan(plan, folder.plan)
            content = msgspec.json.format(msgspec.json.encode(file))
            replace_file(folder.settings, content, private=True)
            for name, content in further.items():
                replace_file(folder.root / name, content)
            replace_file(folder.checkpoint(0), checkpoint, private=True)
            store = cls(folder, file, plan, key, chain, RunState(), state_folder, held)
            chain.begin()
            store._append(
                Created(
                    run=file.run,
                    settings_sha256=sha256_of(folder.settings),
                    plan_sha256=sha256_of(folder.plan),
                    key_fingerprint=key.fingerprint(),
                    checkpoint_sha256=hashlib.sha256(checkpoint).hexdigest(),
                    files={
                        name: hashlib.sha256(further[name]).hexdigest() for name in sorted(further)
                    },
                )
            )
            store._held = held.pop_all()
            return store

    @classmethod
    def resume(cls, folder: RunFolder, state_folder: Path | None, trust_folder: bool) -> Self:
        """Check all files and read the journal."""
        with ExitStack() as held:
            folder.check_owner()
            lock = Lock(folder.lock)
            held.callback(lock.close)
            key = folder.read_key()
            check_created(folder, key)
            file = read_json(folder.settings, RunFile, "centralized run")
            # The plan is sealed by the journal, so its certificate need not be computed again.
            plan = load_dataset_plan(folder.plan, certify=False)
            state = RunState()
            chain = _chain(folder, file.run, key, lock, state_folder, held)
            for record in chain.read(folder.root, trust_folder):
                state.follow(record)
            chain.resume()
            folder.tidy(state.saved)
            store = cls(folder, file, plan, key, chain, state, state_folder, held)
            if state.digests:
                store.publish(store.covered(len(state.digests)))
            store._held = held.pop_all()
            return store

    def close(self) -> None:
        """Release the locks, so that another process can resume the run."""
        self._held.close()

    def start_recording_step(
        self, step: int, digest: Secret, clipping: ClippedRound | None = None
    ) -> "Future[None] | None":
        """Begin to journal a step, in a thread, or check that a repeated one is as before.

        Nothing of the step may be released, and no other method called, before the result is there.

        Args:
            step: The number of the step.
            digest: The digest of its sum.
            clipping: Its clip norm and noisy bits, with adaptive clipping.

        Returns:
            The result of writing, whose `result()` waits; None for a repeated step.

        Raises:
            UnsafeState: The step was done before, with another sum.
        """
        if step < len(self.state.digests):
            if digest_of(self.state.digests[step]) != digest:
                raise UnsafeState(
                    f"step {step:,} was done before, with other gradients. The data, the model, "
                    "the loss function or the settings of the library (number of threads, "
                    "precision) are not what they were; resume with those of the first time. "
                    "Nothing was changed"
                )
            return None
        return self._writer.submit(self._record_step, step, digest, clipping)

    def _record_step(self, step: int, digest: Secret, clipping: ClippedRound | None) -> None:
        if step >= self._covered:  # before the step is journalled: the file is never too small
            self.publish(self.covered(step + 1))
        self._append(Step(step, msgspec.Raw(digest.json_string()), clipping))

    def save(
        self, steps: int, checkpoint: bytes, noise: NoiseStream | None, epsilon: float
    ) -> None:
        """Write model, optimizer and noise after some steps; then they are durable together.

        Args:
            steps: The number of steps.
            checkpoint: The content of the checkpoint.
            noise: The noise stream; None if all ranks have saved their shards of it already.
            epsilon: Epsilon of these steps.
        """
        if steps <= self.state.saved:
            return
        replace_file(self.folder.checkpoint(steps), checkpoint, private=True)
        if noise is not None:
            noise.save(self.folder.noise(steps))
        self.publish(steps)
        self._append(Saved(steps, hashlib.sha256(checkpoint).hexdigest(), epsilon))
        self.folder.tidy(steps)

    def clipping(self, step: int) -> ClippedRound:
        """The clip norm and the noisy bits of a step, with adaptive clipping."""
        clipping = self.state.clippings[step]
        if clipping is None:
            raise UnsafeState("the journal has no clip norm for a step of adaptive clipping")
        return clipping

    def covered(self, steps: int) -> int:
        """The number of steps up to the checkpoint at or after `steps`."""
        every = self.file.settings.commit_every
        return min(-(-steps // every) * every, self.plan.dataset.steps)

    def publish(self, steps: int) -> None:
        """Write `guarantee.json`."""
        content = msgspec.json.encode(guarantee_file(self.plan, self.file, steps, self._mechanism))
        replace_file(self.folder.guarantee, msgspec.json.format(content, indent=2) + b"\n")
        self._covered = steps

    def checkpoint(self) -> bytes:
        """The content of the newest checkpoint.

        Raises:
            UnsafeState: The file is missing or was changed.
        """
        path = self.folder.checkpoint(self.state.saved)
        if not path.exists():
            raise UnsafeState(
                f"{path} is missing: the model after {self.state.saved} steps; {RESTORE}"
            )
        content = read_file(path, MOST_CHECKPOINT_BYTES, own=True)
        if hashlib.sha256(content).hexdigest() != self.state.checkpoint_sha256:
            raise UnsafeState(
                f"{path} was changed since it was written: its digest differs; {RESTORE}"
            )
        return content

    def noise_at_checkpoint(self, fresh: NoiseStream) -> NoiseStream:
        """The noise stream after the steps of the newest checkpoint.

        Args:
            fresh: A stream before the first step; used if the saved one is missing or damaged.
        """
        digests = [digest_of(digest) for digest in self.state.digests[: self.state.saved]]
        return noise_after(digests, self.folder, self.plan, self.key, fresh)

    def _append(self, record: AnyRecord) -> None:
        self.state.follow(record)
        self._chain.append(record)


def noise_after(
    digests: Sequence[Secret],
    folder: RunFolder,
    plan: DatasetPlan,
    key: NoiseKey,
    fresh: NoiseStream,
) -> NoiseStream:
    """The noise stream after some steps: from its files, or else recomputed from their digests.

    Args:
        digests: The digests of these steps.
        folder: The folder of the run.
        plan: The plan of the run.
        key: The noise key.
        fresh: A stream before the first step.
    """
    saved = len(digests)
    if not saved:
        return fresh
    for paths in folder.noise_shards(saved):
        with contextlib.suppress(InvalidInput):  # it can be recomputed
            stream = NoiseStream.load(paths, plan, key=key, at_least=saved, shard=fresh.shard)
            if stream.round == saved and stream.last_digest() == digests[-1]:
                return stream
    for digest in digests:
        fresh.replay(digest)
    return fresh


def _chain(
    folder: RunFolder,
    run: str,
    key: NoiseKey,
    lock: Lock,
    state_folder: Path | None,
    held: ExitStack,
) -> Chain[AnyRecord]:
    """A journal that has not been read yet, with its witness; `held` closes the witness."""
    witness = Witness(witness_folder(folder.root, state_folder), run)
    held.callback(witness.close)
    return Chain(Journal[AnyRecord](folder.journal, key, AnyRecord), witness, lock)


def check_created(folder: RunFolder, key: NoiseKey) -> None:
    """Check, before it is used, that no file sealed in the first journal record was changed.

    These files are `run.json`, `plan.json` and the further files of `TrainingRun.create`.
    """
    journal = Journal[AnyRecord](folder.journal, key, AnyRecord)
    created = next((record for record, _ in journal.read()), None)
    if not isinstance(created, Created):
        raise UnsafeState(f"{folder.journal} has no first line that belongs to this noise key")
    for path, known in (
        (folder.settings, created.settings_sha256),
        (folder.plan, created.plan_sha256),
        *((folder.root / name, sha256) for name, sha256 in created.files.items()),
    ):
        if not path.exists():
            raise UnsafeState(f"{path} is missing; {RESTORE}")
        if sha256_of(path) != known:
            raise UnsafeState(f"{path} is not what it was when the run began; {RESTORE}")
