"""Read a run for its status: without its locks, without writing, while a server may be training.

This is the only module of the package that knows how runs are stored. It reads them with the
classes that store them. Whoever can read the private folder of a run, with its key, can read its
status.
"""

import contextlib
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar, final

import msgspec

from dpftrl._internal.storage import open_own, read_json
from dpftrl.centralized import store as centralized_store
from dpftrl.centralized.settings import RunFile as CentralizedFile
from dpftrl.errors import DpftrlError, InvalidInput, UnsafeState
from dpftrl.federated.eligibility import Timers
from dpftrl.federated.run_guarantee import RunGuarantee
from dpftrl.federated.settings import RunFile as FederatedFile
from dpftrl.federated.start_model import Start
from dpftrl.federated.store import journal as federated_journal
from dpftrl.federated.store.journal import Cohort, Committed
from dpftrl.federated.store.run_folder import RunFolder
from dpftrl.federated.store.run_store import check_created, eligibility_of
from dpftrl.federated.store.snapshot import load_snapshot
from dpftrl.journal import START, AnyRecord, Journal, WitnessFile, witness_folder
from dpftrl.noise import NoiseKey
from dpftrl.plan import load_dataset_plan, load_plan

# A server may write while a file is read. Reading is repeated so often before it fails.
ATTEMPTS: Final = 4
PAUSE_SECONDS: Final = 0.05
# Bytes at the end of the private log that are read: some hundred rounds.
LOG_BYTES: Final = 2**18

Value = TypeVar("Value")


class Attempt(NamedTuple):
    """One attempt at a round.

    Attributes:
        row: The number of rounds committed before it.
        contacted: Number of clients contacted.
        counted: Number of reports in the sum: 0 if it was abandoned, None if it is open.
        time: The time of the contact in hours, with timers in hours.
    """

    row: int
    contacted: int
    counted: int | None
    time: float | None


class WitnessReading(NamedTuple):
    """What the witness says.

    Attributes:
        folder: The folder where it is looked for.
        exists: Whether there is a witness file.
        lines_behind: Lines of the journal that it has not seen; None if its line is not there.
    """

    folder: Path
    exists: bool
    lines_behind: int | None


@final
@dataclass(frozen=True)
class LogEntry:
    """What an entry of the private log says about time and clients.

    Attributes:
        time: When it was written, in seconds since 1970.
        row: The number of rounds before the committed one; None if the server had too few clients.
        unfit: Updates of the round that could not be used.
        available: Clients that were available.
        eligible: How many of them could be contacted; None if that is not known.
        waiting: Why no round could begin; None for a committed round.
    """

    time: float
    row: int | None = None
    unfit: int = 0
    available: int | None = None
    eligible: int | None = None
    waiting: str | None = None


@final
@dataclass(frozen=True)
class FederatedReading:
    """What the journal, the witness and the private log of a run say."""

    state: federated_journal.RunState
    timers: Timers
    attempts: list[Attempt]
    witness: WitnessReading
    log: list[LogEntry]


@final
@dataclass(frozen=True)
class CentralizedReading:
    """What the journal and the witness of a run say."""

    state: centralized_store.RunState
    witness: WitnessReading


@final
class FederatedRun:
    """A run with clients. What was fixed when it was created is read once."""

    def __init__(self, root: Path):
        self.folder = RunFolder(root)
        self._key = _read_key(self.folder)
        check_created(self.folder, self._key)
        self.file = read_json(self.folder.settings, FederatedFile, "run")
        self.plan = load_plan(self.folder.plan)
        content = self.file.start
        start = None if content is None else Start.of_content(content, self.folder.settings)
        self.guarantee = RunGuarantee(self.plan, self.file.settings, self.file.test_key, start)
        self._followed: _FollowedRun | None = None

    def files(self, state_folder: Path | None) -> tuple[Path, ...]:
        """The files that `read` reads."""
        witness = _witness_path(self.folder.root, state_folder, self.file.run)
        return self.folder.journal, self.folder.log, witness

    def read(self, state_folder: Path | None) -> FederatedReading:
        """Read the journal, the witness and the end of the private log."""
        root, run = self.folder.root, self.file.run
        seen = _read_witness(_witness_path(root, state_folder, run))
        followed, self._followed = self._followed, None  # forgotten if reading fails
        if followed is None or not followed.read_on(self._journal()):
            followed = self._started(use_snapshot=True)
            if not followed.read_on(self._journal()) or not followed.has_snapshot_line():
                followed = self._started(use_snapshot=False)
                followed.read_on(self._journal())
        witness = _compared(root, state_folder, run, seen, followed.macs)
        self._followed = followed
        log = _read_log(self.folder.log)
        return FederatedReading(followed.state, followed.timers, followed.attempts, witness, log)

    def _journal(self) -> Journal[federated_journal.AnyRecord]:
        return Journal(self.folder.journal, self._key, federated_journal.AnyRecord)

    def _started(self, *, use_snapshot: bool) -> "_FollowedRun":
        """A run of which no line was read yet. Its snapshot saves most of the work."""
        state, snapshot = federated_journal.RunState(), None
        eligibility = eligibility_of(self.plan, self.file.settings, self._key)
        if use_snapshot:
            path, run = self.folder.snapshot, self.file.run
            snapshot = load_snapshot(path, self._key, run, state, eligibility)
        line = (0, START) if snapshot is None else snapshot.line
        return _FollowedRun(state, eligibility.timers, line)


class _Followed(ABC, Generic[AnyRecord]):
    """What follows from a journal, which is read again whenever it has grown.

    The digests of all lines are checked each time; only the records of new lines are followed.

    Attributes:
        macs: The digest before the first line, and those of all lines.
    """

    def __init__(self) -> None:
        self.macs = [START]

    def read_on(self, journal: Journal[AnyRecord]) -> bool:
        """Read a journal; whether it begins with the lines that were read before."""
        before = len(self.macs)
        for record, mac in journal.read(skip=before - 1):
            if record is not None:
                self.macs.append(mac)
                self.follow(record)
            elif mac != self.macs[journal.lines]:
                return False
        return journal.lines >= before - 1

    @abstractmethod
    def follow(self, record: AnyRecord) -> None:
        """Apply the record of the line that was read last."""


@final
class _FollowedRun(_Followed[federated_journal.AnyRecord]):
    """The journal of a run with clients.

    Args:
        state: The state of the run after the line `snapshot`.
        timers: The contacts up to there.
        snapshot: The number and the digest of a line of the journal.
    """

    def __init__(
        self, state: federated_journal.RunState, timers: Timers, snapshot: tuple[int, str]
    ):
        super().__init__()
        self.state = state
        self.timers = timers
        self.attempts: list[Attempt] = []
        self._snapshot = snapshot

    def has_snapshot_line(self) -> bool:
        """Whether the line of the snapshot is in the journal; if not, it was rolled back."""
        line, mac = self._snapshot
        return line < len(self.macs) and self.macs[line] == mac

    def follow(self, record: federated_journal.AnyRecord) -> None:
        """Apply a record: to the attempts, and after the snapshot to the state and the timers."""
        if len(self.macs) - 1 > self._snapshot[0]:
            self.state.follow(record)
            if isinstance(record, Cohort):
                self.timers.mark(record.keys(), record.row)
        if isinstance(record, Cohort):
            self.attempts.append(Attempt(record.row, record.contacted, None, record.time))
        # A round for which nobody was contacted is no attempt, and ends none.
        elif self.attempts and self.attempts[-1].counted is None:
            counted = record.reports if isinstance(record, Committed) else 0
            self.attempts[-1] = self.attempts[-1]._replace(counted=counted)


@final
class CentralizedRun:
    """A run on a data set. What was fixed when it was created is read once."""

    def __init__(self, root: Path):
        self.folder = centralized_store.RunFolder(root)
        self._key = _read_key(self.folder)
        centralized_store.check_created(self.folder, self._key)
        self.file = read_json(self.folder.settings, CentralizedFile, "centralized run")
        # The plan is sealed by the journal, so its certificate need not be computed again.
        self.plan = load_dataset_plan(self.folder.plan, certify=False)
        self._followed: _FollowedTraining | None = None

    def files(self, state_folder: Path | None) -> tuple[Path, ...]:
        """The files that `read` reads."""
        return self.folder.journal, _witness_path(self.folder.root, state_folder, self.file.run)

    def read(self, state_folder: Path | None) -> CentralizedReading:
        """Read the journal and the witness."""
        root, run = self.folder.root, self.file.run
        seen = _read_witness(_witness_path(root, state_folder, run))
        followed, self._followed = self._followed, None  # forgotten if reading fails
        if followed is None or not followed.read_on(self._journal()):
            followed = _FollowedTraining()
            followed.read_on(self._journal())
        witness = _compared(root, state_folder, run, seen, followed.macs)
        self._followed = followed
        return CentralizedReading(followed.state, witness)

    def _journal(self) -> Journal[centralized_store.AnyRecord]:
        return Journal(self.folder.journal, self._key, centralized_store.AnyRecord)


@final
class _FollowedTraining(_Followed[centralized_store.AnyRecord]):
    """The journal of a centralized run."""

    def __init__(self) -> None:
        super().__init__()
        self.state = centralized_store.RunState()

    def follow(self, record: centralized_store.AnyRecord) -> None:
        """Apply a record to the state."""
        self.state.follow(record)


def open_run(root: Path) -> FederatedRun | CentralizedRun:
    """Read what was fixed when a run was created.

    Raises:
        InvalidInput: The folder holds no run.
        UnsafeState: A file was changed, or belongs to another user.
    """
    if not RunFolder(root).exists:
        name = RunFolder(root).journal.relative_to(root)
        raise InvalidInput(f"{root} holds no run that you can read; there is no {name} in it")
    header = read_json(root / "run.json", _Header, "run")
    is_centralized = header.format == "dpftrl centralized run"
    return CentralizedRun(root) if is_centralized else FederatedRun(root)


def steadily(read: Callable[[], Value]) -> Value:
    """Call a function that reads files, again if a server may have been writing one of them.

    Raises:
        DpftrlError: Reading failed every time: the files are damaged.
    """
    for _ in range(ATTEMPTS - 1):
        with contextlib.suppress(DpftrlError):
            return read()
        time.sleep(PAUSE_SECONDS)
    return read()


def _read_key(folder: RunFolder | centralized_store.RunFolder) -> NoiseKey:
    """Read the noise key.

    Raises:
        UnsafeState: It is missing or damaged.
    """
    try:
        return folder.read_key()
    except InvalidInput as error:
        if str(folder.key) in str(error):
            raise
        raise UnsafeState(f"{folder.key} is damaged: it is not the noise key of a run") from None


class _Header(msgspec.Struct):
    """The field that all JSON files of dpftrl have."""

    format: str


def _witness_path(root: Path, state_folder: Path | None, run: str) -> Path:
    return witness_folder(root, state_folder) / f"{run}.json"


def _compared(
    root: Path, state_folder: Path | None, run: str, seen: WitnessFile | None, macs: Sequence[str]
) -> WitnessReading:
    """Compare the witness with a journal, to which another process may be appending.

    The witness must be read before the journal: a record is in the journal before the witness knows
    it, so the journal then has at least the lines that the witness has seen.

    Args:
        root: The folder of the run.
        state_folder: The folder of the witness.
        run: The identity of the run.
        seen: The content of the witness.
        macs: The digest before the first line, and those of all lines.

    Raises:
        UnsafeState: The journal has no line.
    """
    lines = len(macs) - 1
    if not lines:  # the first line is written when the run is created, and never changes
        raise UnsafeState(f"the journal in {root / 'private'} has no first line; it is damaged")
    behind = None
    if seen is not None and seen.run == run and 0 <= seen.lines <= lines:
        behind = lines - seen.lines if macs[seen.lines] == seen.mac else None
    path = _witness_path(root, state_folder, run)
    return WitnessReading(path.parent, path.exists(), behind)


def _read_witness(path: Path) -> WitnessFile | None:
    """The content of a witness file; None if it is missing or damaged.

    A server may be overwriting it, so it is read until it is twice the same.
    """
    seen: WitnessFile | None = None
    for _ in range(2 * ATTEMPTS):
        before = seen
        try:
            seen = read_json(path, WitnessFile, "witness", own=True)
        except DpftrlError:
            seen = None
        if seen is not None and seen == before:
            break
    return seen


def _read_log(path: Path) -> list[LogEntry]:
    """The entries about rounds at the end of the private log, in their order.

    The log is a help for the operator, and nothing rests on it: what cannot be read is left out.
    """
    try:
        with os.fdopen(open_own(path), "rb") as file:
            start = max(0, os.fstat(file.fileno()).st_size - LOG_BYTES)
            file.seek(start)
            lines = file.read().splitlines()[1 if start else 0 :]
    except (DpftrlError, OSError):
        return []
    entries = list[LogEntry]()
    for line in lines:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            entries.append(msgspec.json.decode(line, type=LogEntry))
    return entries
