"""Canaries: artificial participants of a run, each included or not by a secret fair coin.

There are two kinds. This module has those of white-box audits, whose updates are random gradient
directions; `dpftrl.auditing.sentences` has those of black-box audits, which hold unusual sentences.

A canary of this kind takes part in the rounds of the worst participation of one client, with an
update of full clip norm: what the guarantee allows at most. Its direction is random, and those of
two canaries are orthogonal: each canary has coordinates of its own, with random signs. A canary
whose coin says no contributes nothing, as in the zero-out adjacency of the guarantee.

How canaries count: they are added to the sum of a round, after the updates of clients or examples.
They take nobody's place: the report goal, the cohort and the batch are those of a run without
canaries, and sums are divided by the same number. They change nobody's guarantee: they do not
depend on anybody's data, so that for every real participant they are a part of what is public about
the sum, and its own update is clipped and covered by noise as before. The model does contain them,
as a little more noise.

Files: `canaries.json` (how many, in which rounds) may be published. `private/canaries.json` (coins
and directions) must stay secret until the audit is done. `private/canaries.safetensors` (what the
attack has seen) must never be published: the attack knows the updates of everybody else, and with
the released models the file shows sums without noise.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Protocol, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Vector
from dpftrl._internal.checks import whole_number
from dpftrl._internal.storage import read_file, read_json, replace_file
from dpftrl.accounting import Guarantee
from dpftrl.auditing.worst_updates import information, worst_updates
from dpftrl.centralized import TrainingRun
from dpftrl.centralized.settings import Settings
from dpftrl.clipping import ExactSum, Grid
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import Participation
from dpftrl.plan import DatasetPlan

PUBLIC: Final = "canaries.json"
SECRET: Final = "private/canaries.json"
SEEN: Final = "private/canaries.safetensors"
KEY_BYTES: Final = 16  # of the generator of directions
MOST_SEEN_BYTES: Final = 2**40

# Random gradient directions, or clients that train on unusual sentences.
CanaryKind = Literal["gradients", "sentences"]


class NoisyRun(Protocol):
    """The part of a plan that canaries need."""

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that correlates the noise."""
        ...

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of Z divided by the clip norm."""
        ...


@final
class CanaryFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`canaries.json`: what may be published.

    Attributes:
        canaries: Number of canaries.
        updates: For each round in which a canary takes part, 1 or -1: the sign of its update.
        rounds: Number of planned rounds.
        size: Number of coordinates of an update.
    """

    format: Literal["dpftrl canaries"]
    version: Literal[1]
    canaries: int
    updates: dict[int, int]
    rounds: int
    size: int

    def encoded(self) -> bytes:
        """The content of the file."""
        return msgspec.json.format(msgspec.json.encode(self)) + b"\n"

    @property
    def updates_by_round(self) -> Vector:
        """The sign of a canary's update in every round; 0 where it takes no part."""
        updates = np.zeros(self.rounds)
        updates[list(self.updates)] = list(self.updates.values())
        return updates


@final
class SecretFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`private/canaries.json`: what must stay secret until the audit is done.

    Attributes:
        key: The key of the generator of directions or sentences, in hexadecimal.
        coins: One bit per canary, in hexadecimal: whether it is included.
        start_losses: For sentences: the loss of each of them under the start model of the run.
            Empty for directions.
    """

    format: Literal["dpftrl canary secrets"] = "dpftrl canary secrets"
    version: Literal[1] = 1
    key: str
    coins: str
    start_losses: tuple[float, ...] = ()

    @classmethod
    def toss(cls, canaries: int) -> "SecretFile":
        """Toss the coins of a new run, with the generator of the operating system."""
        coins = os.urandom(-(-canaries // 8))
        return cls(key=os.urandom(KEY_BYTES).hex(), coins=coins.hex())

    def included(self, canaries: int) -> NDArray[np.bool_]:
        """The coin of every canary: whether it is included."""
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(self.coins), np.uint8))
        return bits[:canaries].astype(np.bool_)

    def generator(self) -> np.random.Generator:
        """The generator of directions or sentences."""
        key = int.from_bytes(bytes.fromhex(self.key), "little")
        return np.random.Generator(np.random.Philox(key=key))

    def save(self, folder: Path) -> None:
        """Write the file of the run in a folder, readable by the owner only."""
        replace_file(folder / SECRET, msgspec.json.encode(self), private=True)


def read_secrets(folder: Path) -> SecretFile:
    """The secrets of the canaries of a run."""
    return read_json(folder / SECRET, SecretFile, "secrets of canaries")


def canary_file(
    canaries: int, plan: NoisyRun, participation: Participation, size: int
) -> CanaryFile:
    """Describe the canaries of a new run.

    Args:
        canaries: Number of canaries.
        plan: Mechanism and noise of the run.
        participation: The planned participation; canaries take part as it allows at most.
        size: Number of coordinates of the model.

    Raises:
        InvalidInput: There are more canaries than coordinates, or too many rounds.
    """
    canaries = whole_number("canaries", canaries)
    if canaries > size:
        raise InvalidInput(
            f"each canary has coordinates of its own, and the model has {size:,}; got "
            f"{canaries:,} canaries"
        )
    plan.mechanism.check_dense(participation.rounds)
    worst = worst_updates(plan.mechanism, participation)
    updates = {t: int(worst.updates[t]) for t in worst.pattern}
    return CanaryFile("dpftrl canaries", 1, canaries, updates, participation.rounds, size)


@final
class Directions:
    """The directions of all canaries: a sign for every coordinate, and whose coordinate it is."""

    def __init__(self, canaries: int, size: int, generator: np.random.Generator):
        self.share = size // canaries  # coordinates of one canary
        order = generator.permutation(size)[: canaries * self.share]
        self._coordinates: NDArray[np.int64] = order.reshape(canaries, self.share)
        self._signs = generator.integers(0, 2, (canaries, self.share)) * 2 - 1
        self._size = size

    def steps(self, included: NDArray[np.bool_], grid: Grid) -> NDArray[np.int64]:
        """The sum of the updates of some canaries, in steps of a grid.

        Guarantees:
            The update of every canary has a norm of at most the clip norm of the grid: its
            coordinates are equal in size, and cut off towards zero.
        """
        height = int(grid.clip_norm / self.share**0.5 / grid.step)
        total = np.zeros(self._size, np.int64)
        total[self._coordinates[included]] = self._signs[included] * height
        return total

    def products(self, vector: NDArray[Any]) -> Vector:
        """The inner products of a vector with the directions of norm 1."""
        return (vector[self._coordinates] * self._signs).sum(axis=1) / self.share**0.5


@final
class Canaries:
    """The canaries of a run that is going on: adds them to sums, and keeps what an attack needs.

    The attack needs only one vector: the sum of all released noisy means, each without the mean of
    everybody else, and with the weight that the likelihood ratio gives it
    (`dpftrl.auditing.worst_updates`).
    """

    def __init__(self, folder: Path, file: CanaryFile, plan: NoisyRun):
        """Call `create` or `resume` instead."""
        secret = read_secrets(folder)
        self._path = folder / SEEN
        self._file = file
        self._directions = Directions(file.canaries, file.size, secret.generator())
        self._included = secret.included(file.canaries)
        self._steps = dict[Grid, NDArray[np.int64]]()  # the sum of the included, by its grid
        self._weights = information(plan.mechanism, file.rounds) @ file.updates_by_round
        self._seen, self._rounds = np.zeros(file.size), 0
        if self._path.exists():
            self._seen, self._rounds = read_seen(self._path)

    @classmethod
    def create(cls, folder: Path, file: CanaryFile, plan: NoisyRun) -> "Canaries":
        """Toss the coins of a new run, with the generator of the system, and write them."""
        SecretFile.toss(file.canaries).save(folder)
        return cls(folder, file, plan)

    @classmethod
    def resume(cls, folder: Path, plan: NoisyRun, released: int) -> "Canaries | None":
        """The canaries of a run that is resumed; None if it has none.

        Args:
            folder: Folder of the run.
            plan: Mechanism and noise of the run.
            released: Number of rounds that were released.
        """
        if (file := read_canary_file(folder)) is None:
            return None
        if secrets_exist(folder, released):
            return cls(folder, file, plan)
        return cls.create(folder, file, plan)

    def updates(self, number: int, grid: Grid) -> ExactSum | None:
        """The sum of the updates of all included canaries in a round; None if it has none."""
        sign = self._file.updates.get(number)
        if sign is None:
            return None
        if grid not in self._steps:
            self._steps = {grid: self._directions.steps(self._included, grid)}
        return ExactSum.of(grid, sign * self._steps[grid], int(self._included.sum()))

    def observe(self, number: int, others: NDArray[Any], mean: NDArray[Any]) -> None:
        """Note what a round has released; a round that was noted before is left out.

        Args:
            number: Number of the round.
            others: The mean of the round without noise and canaries. The guarantee holds against
                attackers who know everybody else's data, so the attack may use it.
            mean: The noisy mean that was released.
        """
        if number < self._rounds:  # repeated after a crash
            return
        self._seen += self._weights[number] * (mean - others)
        self._rounds = number + 1

    def save(self) -> None:
        """Write what was observed."""
        from safetensors.numpy import save

        content = save({"seen": self._seen}, {"rounds": str(self._rounds)})
        replace_file(self._path, content, private=True)


def secrets_exist(folder: Path, released: int) -> bool:
    """Whether the coins of a run were tossed; if not, the run was killed before it wrote them.

    Args:
        folder: Folder of the run.
        released: Number of rounds that were released.

    Raises:
        UnsafeState: They are gone, although a round was released.
    """
    if (folder / SECRET).exists():
        return True
    if released:
        raise UnsafeState(f"{folder / SECRET} is gone, so the canaries cannot go on")
    return False


def files_with_canaries(
    canaries: int, settings: Settings
) -> Callable[[DatasetPlan], dict[str, bytes]]:
    """What a new centralized run seals for its canaries, as a function of its plan.

    Args:
        canaries: Number of canaries; 0 for none.
        settings: The settings of the run.
    """
    canaries = whole_number("canaries", canaries, at_least=0)

    def files(plan: DatasetPlan) -> dict[str, bytes]:
        return {PUBLIC: _centralized_file(canaries, plan, settings).encoded()} if canaries else {}

    return files


def attach_canaries(run: TrainingRun, canaries: int) -> None:
    """Give a centralized run the canaries of its files.

    Args:
        run: The run, created (with `files_with_canaries`) or resumed.
        canaries: Number of canaries; 0 for none.

    Raises:
        InvalidInput: The run cannot have canaries, or has another number of them.
    """
    folder = None if run.store is None else run.store.folder.root
    if folder is None and canaries:
        raise InvalidInput("canaries need a folder, in which their coins are kept")
    kept = 0 if folder is None else canary_count(folder)
    if kept != canaries:
        raise InvalidInput(
            f"the run in {folder} has {kept:,} canaries, got canaries={canaries:,}; give the same "
            "number, or choose another folder"
        )
    if folder is not None:
        run.canaries = Canaries.resume(folder, run.plan, run.released)


def check_fixed_clip_norm(adaptive: object | None) -> None:
    """Refuse canaries if the clip norm adapts to the updates.

    Args:
        adaptive: The settings of adaptive clipping; None if the clip norm is fixed.
    """
    if adaptive is not None:
        raise InvalidInput(
            "canaries have the full clip norm, which is not fixed in adaptive clipping; give a "
            "number as clip_norm, or leave out the canaries"
        )


def _centralized_file(canaries: int, plan: DatasetPlan, settings: Settings) -> CanaryFile:
    if not isinstance(plan.guarantee, Guarantee):
        raise InvalidInput(
            f"canaries need batches in a fixed order (sampling='none'), got {plan.sampling}; audit "
            "a sampling with `dpftrl audit mechanism --dataset`"
        )
    check_fixed_clip_norm(settings.adaptive)
    return canary_file(canaries, plan, plan.dataset.in_order, settings.size)


def read_canary_file(folder: Path) -> CanaryFile | None:
    """`canaries.json` of a run; None if the run has no canaries."""
    path = folder / PUBLIC
    return read_json(path, CanaryFile, "canaries") if path.exists() else None


class _Header(msgspec.Struct, frozen=True):
    """What the files of all kinds of canaries have."""

    format: Literal["dpftrl canaries"]
    canaries: int
    kind: CanaryKind = "gradients"


def canary_kind(folder: Path) -> CanaryKind | None:
    """The kind of canaries that a run has, as `canaries.json` says; None if it has none."""
    path = folder / PUBLIC
    return read_json(path, _Header, "canaries").kind if path.exists() else None


def canary_count(folder: Path) -> int:
    """Number of canaries of a run, as `canaries.json` says."""
    path = folder / PUBLIC
    return read_json(path, _Header, "canaries").canaries if path.exists() else 0


def canary_sentence(canaries: int) -> str:
    """What a privacy statement says about canaries, of either kind."""
    return (
        f"The training contains canaries: {canaries:,} artificial participants, each included or "
        "not by a secret fair coin, which were added to measure what an attack achieves. They "
        "depend on nobody's data, took nobody's place, and change nobody's guarantee."
    )


def read_seen(path: Path) -> tuple[Vector, int]:
    """The weighted sum of released means, and the number of rounds in it."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    content = read_file(path, limit=MOST_SEEN_BYTES)
    try:
        header = msgspec.json.decode(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata: Mapping[str, str] = header["__metadata__"]
        return load(content)["seen"], int(metadata["rounds"])
    except (SafetensorError, KeyError, ValueError, msgspec.DecodeError) as error:
        raise InvalidInput(f"{path} is not what a run with canaries writes: {error}") from None
