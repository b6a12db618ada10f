"""A centralized run of several processes (ranks) that train one model together.

Rank 0 owns the journal and all files but the shards. Every rank draws the same batches from the
noise key, computes the clipped gradients of some micro-batches, and holds a shard of the sum and of
the noise. How ranks talk to each other is up to the framework; see `Group`.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.progress import Progress, ignore_progress
from dpftrl._internal.storage import read_file, read_json, replace_file
from dpftrl.centralized.batches import Units
from dpftrl.centralized.owner import PathLike, Target, check_same, planned, resumed, say
from dpftrl.centralized.run import Recorded, TrainingRun, check_units
from dpftrl.centralized.settings import RunFile, Settings
from dpftrl.centralized.store import (
    MOST_CHECKPOINT_BYTES,
    RESTORE,
    RunFolder,
    RunStore,
    check_created,
    noise_after,
)
from dpftrl.clipping import Grid, Steps
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.journal import digest_of
from dpftrl.noise import NoiseKey, NoiseStream, Shard
from dpftrl.noise.key import DIGEST_BYTES, Secret
from dpftrl.plan import DatasetPlan
from dpftrl.plan.dataset import load_dataset_plan

# The first byte of every message between ranks.
FINE: Final = b"+"
FAILED: Final = b"!"
# The key of the JSON text with the digests of all shards, in the metadata of a checkpoint.
SHARDS: Final = "shards"


class RankFailed(UnsafeState):
    """Another rank could not go on, so this one cannot either."""


class Group(Protocol):
    """The processes that train together.

    Attributes:
        rank: The number of this process, from 0.
        ranks: The number of processes.
    """

    rank: int
    ranks: int

    def all_gather(self, content: bytes) -> list[bytes]:
        """Give bytes to all ranks, and return those of all ranks in their order."""
        ...


@final
class Ranks:
    """The ranks of a run: they exchange messages, and fail together.

    A rank that fails tells the others in place of its next message, so that none of them waits for
    it. Every rank must send the same number of messages in the same order.
    """

    def __init__(self, group: Group):
        self._group = group
        self.rank, self.count = group.rank, group.ranks

    def __repr__(self) -> str:
        return f"Ranks({self.rank} of {self.count})"

    def all_gather(self, content: bytes = b"") -> list[bytes]:
        """Give bytes to all ranks, and return those of all ranks in their order.

        Raises:
            RankFailed: One of them has failed.
        """
        messages = self._group.all_gather(FINE + content)
        for rank, message in enumerate(messages):
            if message[:1] == FAILED:
                text = message[1:].decode(errors="replace")
                raise RankFailed(f"rank {rank} has stopped: {text}")
        return [message[1:] for message in messages]

    def from_first(self, content: bytes = b"") -> bytes:
        """The bytes that rank 0 gives."""
        return self.all_gather(content if self.rank == 0 else b"")[0]

    def fail(self, error: Exception) -> NoReturn:
        """Tell all ranks that this one cannot go on, and raise the error."""
        if not isinstance(error, RankFailed):  # then all of them know already
            self._group.all_gather(FAILED + f"{type(error).__name__}: {error}"[:400].encode())
        raise error

    def together(self, function: Callable[[], Any], gathered: bytes = b"") -> Any:
        """Call a function on all ranks. If it fails on one of them, all of them fail."""
        try:
            result = function()
        except Exception as error:
            self.fail(error)
        self.all_gather(gathered)
        return result


class Opened(NamedTuple):
    """What all ranks know of an opened run.

    Attributes:
        plan: The plan.
        file: The content of `run.json`.
        key: The noise key.
        digests: The digests of all steps in the journal.
        saved: Number of steps before the newest checkpoint.
        folder: The folder of the run; None if nothing is kept.
    """

    plan: DatasetPlan
    file: RunFile
    key: NoiseKey
    digests: tuple[Secret, ...]
    saved: int
    folder: RunFolder | None


@final
class ShardedRun(TrainingRun):
    """A training of several ranks: the batch of each step, the noise of a shard, and the files.

    Guarantees:
        As for `TrainingRun`. The noise of a step is the noise that a single process would add, to
        the last bit, and its key depends on the sums of all ranks. The digest is in the journal of
        rank 0 before any rank changes its model. A checkpoint counts once the shards of all ranks
        are on the disk. If one rank fails, all of them stop, and the run can be resumed by any
        number of ranks.

    Attributes:
        ranks: The processes that train together.
        held: The coordinates of the sum and the noise that this rank holds.
    """

    def __init__(
        self,
        opened: Opened,
        units: Units,
        store: RunStore | None,
        ranks: Ranks,
        held: Shard,
        model_is_sharded: bool,
    ):
        """Call `open_sharded_run` instead."""
        self.ranks, self.held, self._opened = ranks, held, opened
        self._model_is_sharded = model_is_sharded
        super().__init__(opened.plan, opened.file, units, opened.key, store)

    def _open_noise(self) -> NoiseStream:
        opened = self._opened
        grows = opened.plan.mechanism.memory_grows
        fresh = NoiseStream(
            opened.plan,
            self.settings.size,
            key=opened.key,
            clip_norm=self.grid.clip_norm,
            # Not `auto`: the mode must not depend on the number of ranks.
            mode="regenerating" if grows else "buffered",
            threads=1,
            shard=self.held,
        )
        if opened.folder is None:
            return fresh
        digests = opened.digests[: opened.saved]
        return noise_after(digests, opened.folder, opened.plan, opened.key, fresh)

    @property
    def noise_bytes(self) -> int:
        """Size of the noise buffers of this rank."""
        return self._noise.memory_bytes

    @property
    def repeating(self) -> int:
        """How many of the next steps were done before, and are repeated after a crash."""
        return max(0, len(self._opened.digests) - self.steps)

    def micro_batch_seed(self, step: int, number: int, purpose: Literal["data", "model"]) -> int:
        """A random seed for one micro-batch of a step, whichever rank computes it."""
        place = purpose.encode() + step.to_bytes(8, "big") + number.to_bytes(8, "big")
        return int.from_bytes(
            self._key.derive(b"micro-batch seed", place).secret_bytes()[:7], "big"
        )

    def step(
        self,
        total: Steps,
        units: int,
        apply: Callable[[NDArray[Any]], None],
        grid: Grid | None = None,
        dtype: type[np.floating[Any]] = np.float64,
    ) -> None:
        """Do one step on all ranks: add the noise, journal the step, and change the model.

        Args:
            total: The coordinates of the sum that this rank holds; the noise is added in place.
            units: Number of units in the whole sum.
            apply: Changes the model, given the noisy mean of the coordinates that this rank holds.
            grid: The grid of the sum; by default that of the run.
            dtype: The type of the noisy mean, float64 or float32.

        Raises:
            UnsafeState: The step is repeated after a crash, and its sum differs; or another rank
                has failed.
        """
        self.check_usable()
        with self._all_or_nothing():
            on = grid or self.grid

            def add_noise() -> None:
                recorded = Recorded(self.store, self.steps)
                try:
                    self._noise.add_to(
                        total, on, updates=units, on_digest=recorded.start, exchange=self._exchange
                    )
                finally:
                    recorded.wait()

            self.ranks.together(add_noise)  # the record of rank 0 is on the disk after this
            apply(on.values(total, self.plan.dataset.batch_size, np.empty(total.size, dtype)))
            self.steps += 1

    def _exchange(self, own: Secret) -> list[Secret]:
        messages = self.ranks.all_gather(own.secret_bytes())
        return [Secret(memoryview(message)) for message in messages]

    def save(self, checkpoint: Callable[[], bytes]) -> None:
        """Write a checkpoint now.

        Args:
            checkpoint: Returns what this rank writes of the model: its shard, if the model is
                sharded. Otherwise it is called on rank 0 only, for the whole model.
        """
        folder = self._opened.folder
        if folder is None or self.repeating:
            return  # the state on the disk is newer
        self.check_open()
        with self._all_or_nothing():
            path = folder.shard(self.steps, self.ranks.rank, self.ranks.count, "noise")
            self.ranks.together(lambda: self._noise.save(path))
            content = _write_model(
                self.ranks, folder, self.steps, checkpoint, self._model_is_sharded
            )

            def commit() -> None:
                if self.store is not None:
                    self.store.save(self.steps, content, None, self.epsilon)

            self.ranks.together(commit)

    def saved_checkpoint(self) -> bytes:
        """The content of the newest checkpoint: the whole model, or the digests of its shards."""
        if self._opened.folder is None:
            raise UnsafeState("a run without a folder has no checkpoint")
        if self.store is not None:
            return self.store.checkpoint()
        path = self._opened.folder.checkpoint(self._opened.saved)
        return read_file(path, MOST_CHECKPOINT_BYTES, own=True)

    def saved_shards(self, checkpoint: bytes) -> Iterator[bytes]:
        """The contents of the shards of a checkpoint, one after another; none if it is a whole.

        Raises:
            UnsafeState: A file is missing or was changed.
        """
        folder = self._opened.folder
        for name, known in digests_of_shards(checkpoint).items():
            assert folder is not None
            path = folder.private / "checkpoints" / name
            if not path.exists():
                raise UnsafeState(f"{path} is missing: a shard of the model; {RESTORE}")
            content = read_file(path, MOST_CHECKPOINT_BYTES, own=True)
            if hashlib.sha256(content).hexdigest() != known:
                raise UnsafeState(
                    f"{path} was changed since it was written: its digest differs; {RESTORE}"
                )
            yield content


def digests_of_shards(checkpoint: bytes) -> dict[str, str]:
    """The names of the shards of a checkpoint, and their SHA-256; empty for a whole model."""
    try:
        length = int.from_bytes(checkpoint[:8], "little")
        metadata = json.loads(checkpoint[8 : 8 + length])["__metadata__"]
        return json.loads(metadata[SHARDS]) if SHARDS in metadata else {}
    except (ValueError, KeyError, TypeError) as error:
        raise UnsafeState(f"the checkpoint cannot be read: {error}") from None


def _write_model(
    ranks: Ranks,
    folder: RunFolder,
    steps: int,
    checkpoint: Callable[[], bytes],
    is_sharded: bool,
) -> bytes:
    """Write the shards of a model. Return the content of the main file, which lists them.

    If the model is not sharded, nothing is written, and rank 0 returns the whole model.
    """
    from safetensors.numpy import save

    def write() -> bytes:
        if not is_sharded:
            return checkpoint() if ranks.rank == 0 else b""
        path, content = folder.shard(steps, ranks.rank, ranks.count, "safetensors"), checkpoint()
        replace_file(path, content, private=True)
        return json.dumps([path.name, hashlib.sha256(content).hexdigest()]).encode()

    content: bytes = ranks.together(write)
    if not is_sharded:
        return content
    return save({}, {SHARDS: json.dumps(dict(map(json.loads, ranks.all_gather(content))))})


def open_sharded_run(
    group: Group,
    folder: PathLike | None,
    target: Target,
    plan: DatasetPlan | None,
    settings: Settings,
    units: Units,
    checkpoint: Callable[[], bytes],
    held: Shard,
    *,
    model_is_sharded: bool,
    state_folder: PathLike | None,
    trust_folder: bool,
    insecure_test_key: int | None,
    on_progress: Progress | None,
) -> ShardedRun:
    """Create a run of several ranks in a folder, or resume the run that is there.

    All ranks must call this function, with the same arguments.

    Args:
        group: The processes that train together.
        folder: Folder for the files of the run, which all ranks can read; None keeps nothing.
        target: Epsilon, delta, epochs and batch size, from which the plan is made.
        plan: The plan, in place of the target.
        settings: All settings that are not in the plan.
        units: The privacy units of the data set.
        checkpoint: Returns what this rank writes of the model before the first step.
        held: The coordinates of the sum and the noise that this rank holds.
        model_is_sharded: Whether each rank holds a part of the model, and writes it.
        state_folder: Folder for the witness, of rank 0.
        trust_folder: Resume even if the witness is missing.
        insecure_test_key: Seed of a noise key that anybody can guess. For tests only.
        on_progress: Called during long planning; by default there are messages on stderr.

    Raises:
        InvalidInput: The arguments do not fit together, or not to the run in the folder.
        UnsafeState: The run must not be resumed.
    """
    ranks = Ranks(group)
    if settings.adaptive is not None:
        raise InvalidInput(
            "adaptive clipping is not supported with several ranks: give clip_norm a number"
        )
    check_arguments(ranks, settings, units, held)
    ranks.together(target.check)
    if ranks.rank != 0:
        on_progress = ignore_progress  # rank 0 says it for all
    if folder is None:
        own = ranks.together(lambda: planned(target, plan, units, on_progress))
        opened = _without_folder(ranks, own, settings, units, insecure_test_key)
        return ShardedRun(opened, units, None, ranks, held, model_is_sharded)
    place = RunFolder(Path(folder))
    exists = ranks.from_first(b"yes" if place.exists else b"") == b"yes"
    made: DatasetPlan | None = None
    content = b""
    if not exists:

        def prepare() -> DatasetPlan | None:
            if ranks.rank != 0:
                return None
            made = planned(target, plan, units, on_progress)
            check_units(made, settings, units)
            settings.check()
            place.make()
            return made

        made = ranks.together(prepare)
        content = _write_model(ranks, place, 0, checkpoint, model_is_sharded)

    def open_store() -> RunStore | None:
        state = None if state_folder is None else Path(state_folder)
        if ranks.rank != 0:
            return None
        if made is None:
            return RunStore.resume(place, state, trust_folder)
        return RunStore.create(place, made, settings, content, state, insecure_test_key)

    store: RunStore | None = ranks.together(open_store)
    try:
        opened = _read_opened(ranks, place, store)

        def check() -> ShardedRun:
            check_units(opened.plan, opened.file.settings, units)
            run = ShardedRun(opened, units, store, ranks, held, model_is_sharded)
            if exists:
                check_same(run, settings, plan, target, insecure_test_key)
                say(on_progress, resumed(run))
            return run

        return ranks.together(check)
    except BaseException:
        if store is not None:
            store.close()
        raise


def check_arguments(ranks: Ranks, settings: Settings, units: Units, held: Shard) -> None:
    """Refuse ranks with different arguments, or whose shards do not make up the model."""
    content = repr((settings, units.count, units.fingerprint())).encode()
    own = json.dumps([hashlib.sha256(content).hexdigest(), held.spans]).encode()
    digests, spans = zip(*map(json.loads, ranks.all_gather(own)), strict=True)
    if len(set(digests)) > 1:
        raise InvalidInput(
            "the ranks were given different models, data sets or settings; give all of them the "
            "same"
        )
    ends = sorted((start, stop) for shard in spans for start, stop in shard)
    starts = [0, *(stop for _, stop in ends)]
    if starts != [*(start for start, _ in ends), settings.size]:
        raise InvalidInput("the shards of all ranks must hold every coordinate exactly once")


def _without_folder(
    ranks: Ranks, plan: DatasetPlan, settings: Settings, units: Units, test_key: int | None
) -> Opened:
    """A run that keeps nothing: rank 0 draws the key."""
    check_units(plan, settings, units)
    settings.check()
    if len(set(ranks.all_gather(repr((plan.noise_multiplier, plan.mechanism)).encode()))) > 1:
        raise InvalidInput("the ranks made different plans; give all of them the same plan")
    is_test = test_key is not None
    own = NoiseKey.insecure_for_tests(test_key) if is_test else NoiseKey.generate()
    key = NoiseKey(memoryview(ranks.from_first(own.secret_bytes())))
    return Opened(plan, RunFile(run="", settings=settings, test_key=is_test), key, (), 0, None)


def _read_opened(ranks: Ranks, folder: RunFolder, store: RunStore | None) -> Opened:
    """What all ranks know of a run, from its files and from the journal that rank 0 has read."""
    journal = b""
    if store is not None:
        digests = [digest_of(one).secret_bytes() for one in store.state.digests]
        journal = store.state.saved.to_bytes(8, "big") + b"".join(digests)
    journal = ranks.from_first(journal)
    starts = range(8, len(journal), DIGEST_BYTES)
    digests = tuple(Secret(memoryview(journal)[i : i + DIGEST_BYTES]) for i in starts)
    saved = int.from_bytes(journal[:8], "big")

    def read() -> Opened:
        if store is not None:
            return Opened(store.plan, store.file, store.key, digests, saved, folder)
        folder.check_owner()
        key = folder.read_key()
        check_created(folder, key)
        file = read_json(folder.settings, RunFile, "centralized run")
        plan = load_dataset_plan(folder.plan, certify=False)  # sealed by the journal
        return Opened(plan, file, key, digests, saved, folder)

    return ranks.together(read)
