"""Read a run for its status: without its locks, without writing, while a server may be training.

This is the only module of the package that knows how runs are stored. It reads them with the
classes that store them. Whoever can read the private folder of a run, with its key, can read its
status.
"""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, final

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
from dpftrl.federated.store.run_store import check_created
from dpftrl.journal import START, Journal, WitnessFile, witness_folder
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

    def files(self, state_folder: Path | None) -> tuple[Path, ...]:
        """The files that `read` reads."""
        witness = _witness_path(self.folder.root, state_folder, self.file.run)
        return self.folder.journal, self.folder.log, witness

    def read(self, state_folder: Path | None) -> FederatedReading:
        """Read the journal, the witness and the end of the private log."""
        state, timers, attempts = federated_journal.RunState(), Timers(), list[Attempt]()

        def follow(record: federated_journal.AnyRecord) -> None:
            state.follow(record)
            if isinstance(record, Cohort):
                keys = record.keys()
                timers.mark(keys, record.row)
                attempts.append(Attempt(record.row, len(keys), None, record.time))
            # A round for which nobody was contacted is no attempt, and ends none.
            elif attempts and attempts[-1].counted is None:
                counted = record.reports if isinstance(record, Committed) else 0
                attempts[-1] = attempts[-1]._replace(counted=counted)

        journal = Journal[federated_journal.AnyRecord](
            self.folder.journal, self._key, federated_journal.AnyRecord
        )
        witness = _read_journal(self.folder.root, state_folder, self.file.run, journal, follow)
        return FederatedReading(state, timers, attempts, witness, _read_log(self.folder.log))


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

    def files(self, state_folder: Path | None) -> tuple[Path, ...]:
        """The files that `read` reads."""
        return self.folder.journal, _witness_path(self.folder.root, state_folder, self.file.run)

    def read(self, state_folder: Path | None) -> CentralizedReading:
        """Read the journal and the witness."""
        state = centralized_store.RunState()
        journal = Journal[centralized_store.AnyRecord](
            self.folder.journal, self._key, centralized_store.AnyRecord
        )
        root, run = self.folder.root, self.file.run
        witness = _read_journal(root, state_folder, run, journal, state.follow)
        return CentralizedReading(state, witness)


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


def _read_journal(
    root: Path,
    state_folder: Path | None,
    run: str,
    journal: Journal[Any],
    follow: Callable[[Any], None],
) -> WitnessReading:
    """Read the witness and then the journal, to which another process may be appending.

    The witness comes first: a record is in the journal before the witness knows it, so the journal
    then has at least the lines that the witness has seen.
    """
    path = _witness_path(root, state_folder, run)
    seen = _read_witness(path)
    known = None if seen is None else (seen.run, seen.lines, seen.mac)
    is_known = known == (run, 0, START)  # a run that was killed while it was created
    for record, mac in journal.read():
        follow(record)
        is_known |= known == (run, journal.lines, mac)
    if not journal.lines:  # the first line is written when the run is created, and never changes
        raise UnsafeState(f"the journal in {root / 'private'} has no first line; it is damaged")
    behind = journal.lines - seen.lines if is_known and seen is not None else None
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
