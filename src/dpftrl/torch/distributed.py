"""`make_private` for models that several processes train together: DDP and FSDP2.

Every rank computes the clipped gradients of some micro-batches of each batch. Their sums are whole
numbers, so the sum over ranks is exact. Each rank then adds the noise of its shard alone. The model
after a step has the same bits for any number of ranks.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false
# (the types of PyTorch are partial)

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, final

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, default_collate

from dpftrl._internal.checks import whole_number
from dpftrl._internal.progress import Progress
from dpftrl.adaptive_clipping import ClipNorm
from dpftrl.centralized import Settings, Units
from dpftrl.centralized.owner import Metrics, PathLike, Target, TrainingOwner, length_of
from dpftrl.centralized.sharded_run import ShardedRun, open_sharded_run
from dpftrl.clipping import Steps
from dpftrl.errors import InvalidInput
from dpftrl.noise import Shard
from dpftrl.plan import DatasetPlan, SamplingChoice
from dpftrl.torch._fsdp import GatheredModel, is_sharded, like, shard_of
from dpftrl.torch._micro_batches import LossFn, check_step_arguments
from dpftrl.torch._modules import check_layers
from dpftrl.torch._sharded_checkpoint import read_shards, write_shard
from dpftrl.torch.checkpoint import write_checkpoint
from dpftrl.torch.gradient_check import check_gradients
from dpftrl.torch.gradients import BatchStats, ClippedSums
from dpftrl.torch.loader import Request, Rows, plain_batch, seeded, tensors_of
from dpftrl.torch.training import check_dataset, check_optimizer, trainable

__all__ = ["DistributedTraining", "ShareLoader", "TorchGroup", "make_private"]

# Bytes of a short message: its length, and its content.
FRAME: Final = 512
LENGTH_BYTES: Final = 8
# Without `micro_batch`, a batch has this number of micro-batches, whatever the number of ranks.
MICRO_BATCHES: Final = 8


@final
class TorchGroup:
    """The processes of a group of `torch.distributed`, such as those that `torchrun` starts."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        if not (dist.is_available() and dist.is_initialized()):
            raise InvalidInput(
                "torch.distributed is not initialised; call "
                "torch.distributed.init_process_group('gloo') first, and start with torchrun"
            )
        self._group = group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def __repr__(self) -> str:
        return f"TorchGroup({self.rank} of {self.ranks})"

    def all_gather(self, content: bytes) -> list[bytes]:
        """Give bytes to all ranks, and return those of all ranks in their order."""
        frames = self._gathered(content, FRAME - LENGTH_BYTES, len(content))
        lengths = [int.from_bytes(frame[:LENGTH_BYTES], "big") for frame in frames]
        longest = max(lengths)
        if longest > FRAME - LENGTH_BYTES:
            frames = self._gathered(content, longest, len(content))
        return [
            frame[LENGTH_BYTES : LENGTH_BYTES + length]
            for frame, length in zip(frames, lengths, strict=True)
        ]

    def _gathered(self, content: bytes, room: int, length: int) -> list[bytes]:
        frame = length.to_bytes(LENGTH_BYTES, "big") + content[:room].ljust(room, b"\0")
        own = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        frames = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(frames, own, group=self._group)
        return [one.numpy().tobytes() for one in frames]

    def reduce_scatter(self, total: Steps, shards: Sequence[Shard]) -> Steps:
        """Add up the sums of all ranks, exactly; each rank gets the coordinates of its shard."""
        own = torch.empty(0, dtype=torch.int64)
        for rank, shard in enumerate(shards):
            parts = [total[start:stop] for start, stop in shard.spans]
            joined = np.concatenate([*parts, total[:0]]) if len(parts) != 1 else parts[0].copy()
            piece = torch.from_numpy(joined)
            if piece.numel():
                to = rank if self._group is None else dist.get_global_rank(self._group, rank)
                dist.reduce(piece, dst=to, op=dist.ReduceOp.SUM, group=self._group)
            if rank == self.rank:
                own = piece
        return own.numpy()

    def all_gather_shards(self, part: NDArray[Any], shards: Sequence[Shard]) -> NDArray[Any]:
        """The whole vector, of which every rank has one span."""
        longest = max(shard.count for shard in shards)
        own = torch.zeros(longest, dtype=torch.from_numpy(part[:0]).dtype)
        own[: part.size] = torch.from_numpy(part)
        parts = [torch.empty_like(own) for _ in shards]
        dist.all_gather(parts, own, group=self._group)
        whole = [one.numpy()[: shard.count] for one, shard in zip(parts, shards, strict=True)]
        return np.concatenate(whole)


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    folder: PathLike | None,
    clip_norm: ClipNorm,
    epsilon: float | None = None,
    delta: float | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    plan: DatasetPlan | None = None,
    sampling: SamplingChoice | None = "auto",
    mechanism: str | None = None,
    max_batch_size: int | None = None,
    units: Sequence[Any] | None = None,
    examples_per_unit: int = 1,
    scheduler: Any = None,
    micro_batch: int | None = None,
    commit_every: int = 100,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    num_workers: int = 0,
    state_folder: PathLike | None = None,
    trust_folder: bool = False,
    insecure_test_key: int | None = None,
    on_progress: Progress | None = None,
    canaries: int = 0,
    group: dist.ProcessGroup | None = None,
) -> "DistributedTraining":
    """Make the training of a model by several processes private. Create the run, or resume it.

    All ranks must call this function, with the same arguments. The run may be resumed by another
    number of ranks, and with DDP in place of FSDP2 or the other way round.

    The model is the same on all ranks (then it may be wrapped in `DistributedDataParallel`, which
    is not used), or it was sharded with `fully_shard`. A sharded model is gathered for the
    gradients of each step; its parameters, the state of the optimizer and the noise stay sharded.

    Args:
        model: The model; see `dpftrl.torch.make_private`, as for the arguments without a word here.
        optimizer: Its optimizer.
        dataset: The whole data set, the same on all ranks.
        folder: Folder for the files of the run, which all ranks can read and write. Rank 0 owns its
            journal. None keeps nothing on the disk.
        clip_norm: The gradient of every unit is clipped to this L2 norm. It must be a number.
        epsilon: The target epsilon.
        delta: The target delta.
        epochs: How often every unit takes part.
        batch_size: Expected number of units per batch, of all ranks together.
        plan: A plan, in place of epsilon, delta, epochs, batch_size, sampling and mechanism.
        sampling: How batches are drawn: `auto`, `none` (a fixed order), or the name of a sampling.
        mechanism: The name of a mechanism.
        max_batch_size: Largest number of units in a sampled batch.
        units: The user of each example, for user-level privacy.
        examples_per_unit: Largest number of a user's examples in one step; by default 1.
        scheduler: A learning-rate scheduler of the optimizer.
        micro_batch: Number of units whose gradients are computed at a time. Micro-batches are dealt
            out to the ranks, so it should be at most `batch_size / ranks`; by default it is
            `batch_size / 8`.
        commit_every: Number of steps between two checkpoints; by default 100. After an
            interruption, at most so many steps are repeated.
        collate_fn: Makes a micro-batch of a list of examples.
        num_workers: Number of processes that load examples, on each rank.
        state_folder: Folder for the witness of the run, of rank 0.
        trust_folder: Resume even if the witness is missing.
        insecure_test_key: Seed of a noise key that anybody can guess. For tests only.
        on_progress: Called during long planning, with what was planned, and with the step at which
            a run is resumed; by default there are messages on stderr.
        canaries: Must be 0: canaries of an audit are supported in a single process only.
        group: The processes that train together; by default all.

    Raises:
        InvalidInput: The arguments do not fit together, or not to the run in the folder.
        UnsafeState: The run must not be resumed, or another rank has failed.
    """
    processes = TorchGroup(group)
    if canaries:
        raise InvalidInput(
            f"canaries are not supported with several processes, got canaries={canaries!r}; audit "
            "a training in a single process with dpftrl.torch.make_private"
        )
    module = model.module if isinstance(model, DistributedDataParallel) else model
    check_layers(module)
    check_optimizer(module, optimizer, scheduler)
    check_dataset(dataset)
    data_units = Units(length_of(dataset), units, examples_per_unit)
    names, size = trainable(module)
    settings = Settings.of(data_units, clip_norm, names, size, commit_every, "torch", mechanism)
    settings = msgspec.structs.replace(settings, sharded=True)
    sharded = is_sharded(module)
    held = shard_of(module) if sharded else Shard.even(size, processes.rank, processes.ranks)
    write = write_shard if sharded else write_checkpoint
    usual = batch_size if plan is None else plan.dataset.batch_size
    if micro_batch is None and usual is not None:
        micro_batch = -(-usual // MICRO_BATCHES)
    extra = {"micro_batch": micro_batch}
    run = open_sharded_run(
        processes,
        folder,
        Target(epsilon, delta, epochs, batch_size, sampling, mechanism, max_batch_size),
        plan,
        settings,
        data_units,
        lambda: write(module, optimizer, scheduler, extra),
        held,
        model_is_sharded=sharded,
        state_folder=state_folder,
        trust_folder=trust_folder,
        insecure_test_key=insecure_test_key,
        on_progress=on_progress,
    )

    def opened() -> DistributedTraining:
        size = micro_batch
        if folder is not None:
            saved = run.saved_checkpoint()
            kept = read_shards(lambda: _contents(run, saved), module, optimizer, scheduler)
            size = kept["micro_batch"]
        size = whole_number("micro_batch", size or 1)
        shares = _Shares(run, size)
        loader = ShareLoader(shares, dataset, collate_fn, num_workers)
        return DistributedTraining(run, processes, module, optimizer, scheduler, loader, size)

    try:
        training: DistributedTraining = run.ranks.together(opened)
        training.check_same_model()
    except BaseException:
        run.close()
        raise
    return training


def _contents(run: ShardedRun, saved: bytes) -> Iterator[bytes]:
    """The contents of the files of a checkpoint: those of its shards, or the whole model."""
    empty = True
    for content in run.saved_shards(saved):
        empty = False
        yield content
    if empty:
        yield saved


class Share(NamedTuple):
    """The micro-batches of a step that this rank computes.

    Attributes:
        step: The step.
        numbers: The number of each micro-batch in the batch.
        requests: What to load for each micro-batch.
        units: Number of units of the whole batch, of all ranks.
    """

    step: int
    numbers: list[int]
    requests: list[Request]
    units: int


@final
class _Shares:
    """Divides batches into micro-batches, and deals these out to the ranks.

    The division does not depend on the number of ranks.
    """

    def __init__(self, run: ShardedRun, micro_batch: int):
        self.run, self._size = run, micro_batch

    def of(self, step: int) -> Share:
        """The share of this rank in a step."""
        run, size = self.run, self._size
        batch = run.batch(step)
        counts = None if batch.counts is None else batch.counts.tolist()
        ends = np.concatenate([[0], np.cumsum(np.ones(batch.units) if counts is None else counts)])
        numbers = list(range(run.ranks.rank, -(-batch.units // size), run.ranks.count))
        requests = list[Request]()
        for number in numbers:
            own = slice(number * size, min((number + 1) * size, batch.units))
            rows = batch.examples[int(ends[own.start]) : int(ends[own.stop])].tolist()
            seed = run.micro_batch_seed(step, number, "data")
            requests.append(Request(step, seed, rows, None if counts is None else counts[own]))
        return Share(step, numbers, requests, batch.units)


@final
class ShareLoader:
    """What this rank loads for all remaining steps: one list of micro-batches per step.

    A list may be empty. Pass each of them to `step`.
    """

    def __init__(
        self,
        shares: _Shares,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any],
        num_workers: int,
    ):
        self._shares, self._num_workers = shares, num_workers
        self._rows = Rows(dataset, collate_fn)
        self._share: Share | None = None

    def __len__(self) -> int:
        run = self._shares.run
        return run.plan.dataset.steps - run.steps

    def __iter__(self) -> Iterator[list[Any]]:
        run = self._shares.run
        first, last = run.steps, run.plan.dataset.steps
        ahead = dict[int, Share]()  # shares of which something was loaded before their step

        def requests() -> Iterator[Request]:
            for step in range(first, last):
                ahead[step] = self._shares.of(step)
                yield from ahead[step].requests

        loaded: Any = iter(
            DataLoader(
                self._rows,
                batch_size=None,
                sampler=requests(),  # pyright: ignore[reportArgumentType]
                num_workers=self._num_workers,
            )
        )
        for step in range(first, last):
            if step != run.steps:
                raise InvalidInput(
                    f"step {run.steps:,} was not done: pass every list of the loader to `step`, in "
                    "their order"
                )
            share = ahead.pop(step, None) or self._shares.of(step)
            batches = [next(loaded) for _ in share.requests]
            self._share = share
            yield batches

    def check(self, batches: Any) -> Share:
        """The share of the current step, if these micro-batches can be it."""
        share, step = self._share, self._shares.run.steps
        if share is None or share.step != step:
            raise InvalidInput(
                f"step {step:,} needs its own micro-batches: take lists from the loader, and pass "
                "each of them to `step` once"
            )
        given = [_rows(batch) for batch in batches]
        wanted = [{len(request.examples)} for request in share.requests]
        if given != wanted:
            raise InvalidInput(
                f"step {step:,} has micro-batches of {[min(one) for one in wanted]} rows on this "
                "rank, and others were given; pass the list that the loader yielded"
            )
        return share


def _rows(batch: Any) -> set[int]:
    return {len(tensor) if tensor.ndim else 0 for tensor in tensors_of(batch)}


@final
class DistributedTraining(TrainingOwner):
    """A private training of a PyTorch model by several processes; `make_private` creates it.

    Guarantees:
        See `dpftrl.centralized.sharded_run.ShardedRun` for batches, noise and files, and
        `dpftrl.torch.gradients.ClippedSums` for clipping.

    Attributes:
        loader: One list of micro-batches for each remaining step. Pass each list to `step`.
    """

    def __init__(
        self,
        run: ShardedRun,
        group: TorchGroup,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        loader: ShareLoader,
        micro_batch: int,
    ):
        """Call `make_private` instead."""
        super().__init__(run)
        self._sharded_run, self._group = run, group
        self._model, self._optimizer, self._scheduler = model, optimizer, scheduler
        self.loader = loader
        self._is_sharded = is_sharded(model)
        self._gathered: Callable[[], Any] = contextlib.nullcontext
        if self._is_sharded:
            self._gathered = GatheredModel(model)
        self._parameters = [one for one in model.parameters() if one.requires_grad]
        is_float32 = all(one.dtype == torch.float32 for one in self._parameters)
        self._mean_dtype = np.float32 if is_float32 else np.float64
        self._micro_batch = micro_batch
        self._shards = _all_shards(run)
        self._checked = False
        with self._gathered():
            self._sums = ClippedSums(
                model,
                run.grid,
                largest_batch=run.batches.largest,
                usual_batch=run.plan.dataset.batch_size,
                examples_per_unit=run.settings.examples_per_unit,
                micro_batch=micro_batch,
            )

    @property
    def noise_bytes(self) -> int:
        """Size of the noise buffers of this rank."""
        return self._sharded_run.noise_bytes

    def check_same_model(self) -> None:
        """Refuse ranks that begin with different models."""
        digest = b""
        if not self._is_sharded:
            hasher = hashlib.sha256()
            for parameter in self._model.parameters():
                flat = parameter.detach().contiguous().view(-1)
                hasher.update(flat.view(torch.uint8).numpy().data)
            digest = hasher.digest()
        if len(set(self._sharded_run.ranks.all_gather(digest))) > 1:
            raise InvalidInput(
                "the ranks have different models; begin with the same one on all of them, for "
                "example with the same torch.manual_seed"
            )

    def step(self, loss_fn: LossFn, batches: list[Any]) -> Metrics:
        """Do one step, on all ranks: clip and sum gradients, add noise, and step the optimizer.

        Args:
            loss_fn: Called as `loss_fn(model, micro_batch)`; returns the mean loss of a batch of
                any size, or the loss of every example.
            batches: The list that `loader` has just yielded.

        Returns:
            What happened in this step, on all ranks. The guarantee does not cover it, so do not
            publish it.

        Raises:
            InvalidInput: The batches are not those of this step, or their examples are mixed.
            UnsafeState: Another rank has failed.
            RoundsExceeded: All planned steps are done.
        """
        run = self._sharded_run
        run.check_usable()
        with self._gathered():
            try:
                check_step_arguments(loss_fn, batches)
                share = self.loader.check(batches)
                total, measured = self._sum(loss_fn, batches, share)
            except Exception as error:
                run.ranks.fail(error)
            stats = _gathered_stats(run, measured)
        own = self._group.reduce_scatter(total, self._shards)
        run.step(own, share.units, self._apply, dtype=self._mean_dtype)
        run.save_if_due(self._checkpoint)
        return Metrics(stats, self._warned)

    def statement(self, path: PathLike) -> Any:
        """Write the privacy statement of all steps so far; only rank 0 writes.

        Args:
            path: Path of the files to write, without suffix.
        """
        from dpftrl.statement.centralized import save_centralized_statement

        if self._sharded_run.ranks.rank == 0:
            return save_centralized_statement(self._run, path)
        return None

    def _sum(
        self, loss_fn: LossFn, batches: Sequence[Any], share: Share
    ) -> tuple[Steps, list[tuple[int, BatchStats]]]:
        """The sum of the clipped gradients of this rank, and what was measured."""
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None:
                raise InvalidInput(
                    f"{name} has a gradient already: something else called backward(), and this "
                    "gradient is not private; `step` computes all gradients itself"
                )
        run, sums = self._sharded_run, self._sums
        total: Steps = np.zeros(0, np.int64)
        measured = list[tuple[int, BatchStats]]()
        for number, request, batch in zip(share.numbers, share.requests, batches, strict=True):
            plain = plain_batch(batch)
            seed = run.micro_batch_seed(share.step, number, "model")
            if not self._checked and len(request.examples) > 1:
                with seeded(seed):
                    self._checked = check_gradients(sums, loss_fn, plain)
            with seeded(seed):
                measured.append((number, sums.add(loss_fn, plain, request.counts)))
            total = total + sums.steps if total.size else sums.steps.copy()
        return (total if total.size else np.zeros(sums.size, np.int64)), measured

    def _apply(self, mean: NDArray[Any]) -> None:
        """Change the model by one step of the optimizer, given the coordinates of this rank."""
        if not self._is_sharded:
            mean = self._group.all_gather_shards(mean, self._shards)
        values, start = torch.from_numpy(mean), 0
        for parameter in self._parameters:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            end = start + local.numel()
            # Optimizers may keep gradients, and the next step overwrites the mean.
            grad = values[start:end].to(parameter.dtype, copy=True).view(local.shape)
            parameter.grad = like(grad, parameter) if isinstance(parameter, DTensor) else grad
            start = end
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._scheduler is not None:
            self._scheduler.step()

    def _checkpoint(self) -> bytes:
        write = write_shard if self._is_sharded else write_checkpoint
        extra = {"micro_batch": self._micro_batch}
        return write(self._model, self._optimizer, self._scheduler, extra)


class _Stats(NamedTuple):
    """What happened to all units of a batch, on all ranks."""

    losses: NDArray[np.float64]
    clipped: int
    not_finite: int


def _gathered_stats(run: ShardedRun, measured: list[tuple[int, BatchStats]]) -> _Stats:
    """What all ranks have measured. All of them have computed their sums after this."""
    own = b"".join(
        np.array([number, one.clipped, one.not_finite, one.losses.size], "<i8").tobytes()
        + one.losses.astype("<f8").tobytes()
        for number, one in measured
    )
    losses = dict[int, NDArray[np.float64]]()
    clipped = not_finite = 0
    for message in run.ranks.all_gather(own):
        place = 0
        while place < len(message):
            number, cut, bad, count = np.frombuffer(message, "<i8", 4, place).tolist()
            losses[number] = np.frombuffer(message, "<f8", count, place + 32)
            clipped, not_finite, place = clipped + cut, not_finite + bad, place + 32 + 8 * count
    ordered = [losses[number] for number in sorted(losses)]
    return _Stats(np.concatenate([*ordered, np.zeros(0)]), clipped, not_finite)


def _all_shards(run: ShardedRun) -> list[Shard]:
    """The coordinates that each rank holds."""
    messages = run.ranks.all_gather(json.dumps(run.held.spans).encode())
    return [Shard(run.held.size, tuple(map(tuple, json.loads(one)))) for one in messages]
