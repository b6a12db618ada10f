"""Who was contacted and who was counted: the ledger, cohort sizes, timers and participation caps.

The journal says who was contacted and, from version 2 on, who was counted. With version 1 the
ledger says that, and is compared with the journal: every contact must be in it exactly once. The
other checks use every single contact in the journal, so they do not depend on the counters that the
server kept.
"""

import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, final

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from dpftrl._internal.arrays import Matrix
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.verify.journal import LEDGER_HEADER, Abandoned, Attempt, Committed, Journal
from dpftrl.verify.run_files import RunFiles
from dpftrl.verify.sensitivity import Limits

Keys = NDArray[np.uint64]
Numbers = NDArray[np.int64]

# Clients counted in more than this share of the rounds: multiplying by the Gram matrix is cheaper
# for them than adding up all pairs of their rounds.
FREQUENT_SHARE: Final = 1 / 32
# Clients multiplied by the Gram matrix in one call: bounds the memory to rounds x 256 numbers.
CLIENTS_PER_BATCH: Final = 256


@final
@dataclass(frozen=True, eq=False)
class Ledger:
    """Who was counted, from the journal or from the ledger of a journal of version 1.

    Attributes:
        counted: For each attempt that has ended, a mask of the clients that were counted.
        trailing_bytes: The number of bytes after the last row that the journal covers.
    """

    counted: tuple[NDArray[np.bool_], ...]
    trailing_bytes: int


def read_ledger(path: Path, attempts: Sequence[Attempt]) -> Ledger:
    """Read the ledger attempt by attempt, and compare it with the journal.

    Raises:
        UnsafeState: The ledger cannot be read, was changed, or contradicts the journal.
    """
    try:
        if path.exists() and not path.is_file():
            raise UnsafeState(f"{path.name} is not a file")
        with path.open("rb") as file:
            return _read_ledger(file, path.stat().st_size, attempts)
    except OSError as error:
        raise UnsafeState(f"ledger.csv cannot be read: {error.strerror}") from None


def _read_ledger(file: BinaryIO, size: int, attempts: Sequence[Attempt]) -> Ledger:
    hasher, position = hashlib.sha256(), len(LEDGER_HEADER)
    if (header := file.read(position)) != LEDGER_HEADER:
        raise UnsafeState("the first line of ledger.csv must be round,client,status")
    hasher.update(header)
    counted: list[NDArray[np.bool_]] = []
    for attempt in attempts:
        if (end := attempt.end) is None or end.ledger_bytes is UNSET:
            continue
        label = f"attempt {end.attempt} (round {end.row})"
        if end.ledger_bytes > size:
            raise UnsafeState(f"ledger.csv ends too early: rows are missing from {label} on")
        rows = file.read(end.ledger_bytes - position)
        hasher.update(rows)
        if hasher.hexdigest() != end.ledger_sha256:
            raise UnsafeState(f"rows up to {label} were changed after they were written")
        try:
            counted.append(_counted_mask(attempt, end, rows))
        except InvalidInput as error:
            raise UnsafeState(f"the rows of {label} contradict the journal: {error}") from None
        position = end.ledger_bytes
    return Ledger(tuple(counted), size - position)


def counted_in_journal(attempts: Sequence[Attempt]) -> Ledger:
    """Return who was counted, from a journal of version 2."""
    masks = (attempt.counted for attempt in attempts)
    return Ledger(tuple(mask for mask in masks if mask is not None), trailing_bytes=0)


def check_ledger_copy(path: Path, attempts: Sequence[Attempt]) -> bool:
    """Compare a ledger that was derived from a journal of version 2 with this journal.

    Returns:
        Whether the ledger is complete. If not, it is that of an earlier state of the run.

    Raises:
        UnsafeState: The ledger cannot be read, or contradicts the journal.
    """
    try:
        if path.exists() and not path.is_file():
            raise UnsafeState(f"{path.name} is not a file")
        with path.open("rb") as file:
            if file.read(len(LEDGER_HEADER)) != LEDGER_HEADER:
                raise UnsafeState("the first line of ledger.csv must be round,client,status")
            for attempt in attempts:
                if attempt.counted is None:
                    continue
                rows = _ledger_rows(attempt, attempt.counted)
                if (content := file.read(len(rows))) == rows:
                    continue
                if not content:
                    return False
                raise UnsafeState(f"ledger.csv contradicts the journal at attempt {attempt.number}")
            if file.read(1):
                raise UnsafeState("ledger.csv has rows that belong to no attempt of the journal")
    except OSError as error:
        raise UnsafeState(f"ledger.csv cannot be read: {error.strerror}") from None
    return True


def _ledger_rows(attempt: Attempt, counted: NDArray[np.bool_]) -> bytes:
    """Return the rows that a ledger has for an attempt. Names are in quotes, pseudonyms are not."""
    names = None if attempt.cohort is None else attempt.cohort.names
    other = "abandoned" if isinstance(attempt.end, Abandoned) else "contacted"
    statuses = ["counted" if each else other for each in counted.tolist()]
    row = attempt.row
    if names is None:
        clients = attempt.clients.tolist()
        pairs = zip(clients, statuses, strict=True)
        return "".join(f"{row},c{client:016x},{status}\n" for client, status in pairs).encode()
    quoted = (name.replace('"', '""') for name in names)
    pairs = zip(quoted, statuses, strict=True)
    return "".join(f'{row},"{name}","{status}"\n' for name, status in pairs).encode()


def _counted_mask(
    attempt: Attempt, end: Committed | Abandoned, csv_bytes: bytes
) -> NDArray[np.bool_]:
    """Return a mask of the clients of an attempt that were counted.

    Args:
        attempt: The attempt, from the journal.
        end: The journal record that ended it.
        csv_bytes: The rows of the attempt in the ledger.

    Raises:
        InvalidInput: The rows contradict the journal.
    """
    stored = None if attempt.cohort is None else attempt.cohort.names
    names = stored or [f"c{client:016x}" for client in attempt.clients.tolist()]
    try:
        rows = list(csv.reader(io.StringIO(csv_bytes.decode(), newline=""), strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidInput(f"they are not valid CSV ({error})") from None
    if any(len(row) != 3 or row[0] != str(end.row) for row in rows):
        raise InvalidInput("a row belongs to another round, or does not have three fields")
    status_of = {client: status for _, client, status in rows}
    if len(rows) != len(names) or set(status_of) != set(names):
        raise InvalidInput(
            f"expected one row for each of the {len(names)} clients, got {len(rows)} rows or rows "
            "of other clients"
        )
    allowed = {"abandoned"} if isinstance(end, Abandoned) else {"counted", "contacted"}
    if not set(status_of.values()) <= allowed:
        raise InvalidInput(f"a row has a status other than {' or '.join(sorted(allowed))}")
    counted = np.array([status_of[name] == "counted" for name in names], dtype=np.bool_)
    if isinstance(end, Committed) and counted.sum() != end.reports:
        raise InvalidInput(
            f"{counted.sum()} rows are counted, but the journal has {end.reports} reports"
        )
    return counted


@final
@dataclass(frozen=True, eq=False)
class Contacts:
    """All contacts of a run, sorted by client and, within a client, by time.

    The four arrays have one entry per contact.

    Attributes:
        clients: A number that identifies the client.
        attempts: The index of the attempt that the client was contacted for.
        rows: The noise row (the round) of that attempt.
        journal_positions: The position of the contact in the journal, before sorting.
    """

    clients: Keys
    attempts: Numbers
    rows: Numbers
    journal_positions: Numbers

    @classmethod
    def of(cls, attempts: Sequence[Attempt]) -> "Contacts":
        """Collect and sort the contacts of all attempts."""
        clients = np.concatenate([np.empty(0, np.uint64), *_client_numbers(attempts)])
        sizes = [len(attempt.clients) for attempt in attempts]
        attempt_numbers = np.repeat(np.arange(len(attempts)), sizes)
        attempt_rows = np.array([attempt.row for attempt in attempts], dtype=np.int64)
        order = np.argsort(clients, kind="stable")
        return cls(
            clients[order], attempt_numbers[order], attempt_rows[attempt_numbers[order]], order
        )

    def __len__(self) -> int:
        return len(self.clients)

    def select(self, mask: NDArray[np.bool_]) -> "Contacts":
        """Return the contacts for which `mask` is true."""
        return Contacts(
            self.clients[mask],
            self.attempts[mask],
            self.rows[mask],
            self.journal_positions[mask],
        )

    def consecutive_pairs(self) -> tuple[Numbers, Numbers]:
        """Return the indices of every contact that has a next one, and of that next one."""
        (earlier,) = np.nonzero(self.clients[1:] == self.clients[:-1])
        return earlier, earlier + 1

    def min_gap(self) -> int | None:
        """Return the fewest rows between two contacts of one client, or None if there are none."""
        earlier, later = self.consecutive_pairs()
        gaps = self.rows[later] - self.rows[earlier]
        return int(gaps.min()) if len(gaps) else None

    def counts(self) -> Numbers:
        """Return the number of contacts of each client."""
        return np.diff(np.flatnonzero(np.append(self._is_first_of_client(), True)))

    def max_count(self) -> int:
        """Return the number of contacts of the client that was contacted most often."""
        return int(self.counts().max(initial=0))

    def _is_first_of_client(self) -> NDArray[np.bool_]:
        return np.append(len(self) > 0, self.clients[1:] != self.clients[:-1])[: len(self)]


def _client_numbers(attempts: Sequence[Attempt]) -> list[Keys]:
    """Return a number for each contacted client: one per name if the run records names."""
    number_of_name: dict[str, int] = {}
    return [
        attempt.clients
        if attempt.cohort is None or (names := attempt.cohort.names) is None
        else np.array(
            [number_of_name.setdefault(name, len(number_of_name)) for name in names], np.uint64
        )
        for attempt in attempts
    ]


def check_cohorts(journal: Journal, run_files: RunFiles) -> str:
    """Check the number of rounds, and the clients and reports of every attempt, against the plan.

    Raises:
        UnsafeState: The plan does not allow one of them.
    """
    planned = run_files.promised.stream.participation.rounds
    if len(journal.commits) > planned:
        raise UnsafeState(
            f"{len(journal.commits)} rounds were released, but only {planned} were planned"
        )
    for attempt in journal.attempts:
        if problem := _cohort_problem(attempt, run_files):
            raise UnsafeState(f"attempt {attempt.number}: {problem}")
    goal, empty = run_files.fleet.report_goal, journal.empty_rounds
    exceptions = f", but for {empty:,} round(s) in which nobody took part" if empty else ""
    return (
        f"every cohort has {goal:,} to {run_files.cohort_size:,} clients, "
        f"and every sum has {goal:,} reports{exceptions}"
    )


def _cohort_problem(attempt: Attempt, run_files: RunFiles) -> str | None:
    """Say what is wrong with an attempt, or return None if nothing is."""
    cohort, end, goal = attempt.cohort, attempt.end, run_files.fleet.report_goal
    settings = run_files.settings
    if cohort is None:  # the round was closed as empty, which reading the journal has checked
        return None
    if not goal <= len(attempt.clients) <= run_files.cohort_size:
        return (
            f"{len(attempt.clients)} clients were contacted, expected {goal} to "
            f"{run_files.cohort_size}"
        )
    if isinstance(end, Committed) and end.reports != goal:
        return f"the sum has {end.reports} reports, but the report goal is {goal}"
    if settings.timer_hours is not None and cohort.time is None:
        return "the time is missing, although the timer of this run is in hours"
    if (cohort.names is None) != settings.hash_clients:
        return (
            "client names are in the journal, although this run hashes them"
            if settings.hash_clients
            else "client names are missing, although this run does not hash them"
        )
    return None


def check_timers(journal: Journal, contacts: Contacts, run_files: RunFiles) -> str:
    """Check that no client was contacted again too early, whether or not the round was released.

    Raises:
        UnsafeState: A client was contacted too early.
    """
    hours = run_files.settings.timer_hours
    if hours is None:
        return check_rounds_between(contacts, run_files.promised.stream.participation.min_sep)
    check_rounds_between(contacts, 1)
    cohorts = (attempt.cohort for attempt in journal.attempts)
    times = [None if cohort is None else cohort.time for cohort in cohorts]
    return check_hours_between(contacts, np.array(times, dtype=np.float64), hours)


def check_rounds_between(contacts: Contacts, min_sep: int) -> str:
    """Check that contacts of one client are at least `min_sep` rows apart.

    Raises:
        UnsafeState: Two contacts are closer than that.
    """
    earlier, later = contacts.consecutive_pairs()
    gaps = contacts.rows[later] - contacts.rows[earlier]
    if len(gaps) and gaps.min() < min_sep:
        closest = int(gaps.argmin())
        raise UnsafeState(
            f"{int((gaps < min_sep).sum()):,} time(s) a client was contacted too early, for example"
            f" for rows {contacts.rows[earlier[closest]]} and {contacts.rows[later[closest]]}; "
            f"min-sep is {min_sep}"
        )
    smallest_gap = (
        f"at least {gaps.min():,} rows apart" if len(gaps) else "no client was contacted twice"
    )
    return f"{len(contacts):,} contacts, {smallest_gap} (min-sep {min_sep:,})"


def check_hours_between(contacts: Contacts, times: NDArray[np.float64], hours: float) -> str:
    """Check that contacts of one client are at least `hours` apart.

    Args:
        contacts: All contacts.
        times: The time of each attempt, in hours. NaN fails the check.
        hours: The timer of the run.

    Raises:
        UnsafeState: Two contacts are closer than that.
    """
    earlier, later = contacts.consecutive_pairs()
    waits = times[contacts.attempts[later]] - times[contacts.attempts[earlier]]
    if not np.all(waits >= hours):
        shortest = int(np.argmin(np.nan_to_num(waits, nan=-np.inf)))
        raise UnsafeState(
            f"{int((~(waits >= hours)).sum()):,} time(s) a client was contacted too early, for "
            f"example after {waits[shortest]:g} hours; the timer is {hours:g} hours"
        )
    smallest_gap = (
        f"at least {waits.min():g} hours apart" if len(waits) else "no client was contacted twice"
    )
    return f"{len(contacts):,} contacts, {smallest_gap} (timer {hours:g} hours)"


def check_cap(contacts: Contacts, cap: int) -> str:
    """Check that no client was contacted more than `cap` times.

    Raises:
        UnsafeState: A client was contacted more often.
    """
    max_count = contacts.max_count()
    if max_count > cap:
        raise UnsafeState(
            f"{int((contacts.counts() > cap).sum()):,} client(s) were contacted more than {cap} "
            f"times; the highest count is {max_count}"
        )
    return f"no client was contacted more than {max_count:,} time(s) (cap {cap:,})"


def limits_of(journal: Journal, contacts: Contacts, run_files: RunFiles) -> tuple[Limits, Limits]:
    """Return the participation limits at the last release, and those after the last contact.

    With a timer in rounds, the server enforces the planned limits, and both values are the same.
    With a timer in hours, the limits are observed: they come from all contacts so far.
    """
    rounds = len(journal.commits)
    now = limits_with(rounds, contacts, run_files)
    if run_files.settings.timer_hours is None:
        return now, now
    last_released = max(
        number
        for number, attempt in enumerate(journal.attempts)
        if isinstance(attempt.end, Committed)
    )
    at_release = contacts.select(contacts.attempts <= last_released)
    return limits_with(rounds, at_release, run_files), now


def limits_with(rounds: int, contacts: Contacts, run_files: RunFiles) -> Limits:
    """Return the participation limits for this number of rounds and these contacts."""
    if run_files.settings.timer_hours is None:
        planned = run_files.promised.stream.participation
        return Limits(rounds, planned.min_sep, planned.max_participations)
    return Limits(rounds, contacts.min_gap() or rounds, max(1, contacts.max_count()))


def largest_client_shift(gram: Matrix, counted: Contacts) -> float:
    """Return the largest norm, over clients, of the sum of the columns of C of a client's rounds.

    Args:
        gram: C^T C.
        counted: The contacts whose updates are in a sum.
    """
    if not len(counted):
        return 0.0
    counts = counted.counts()
    is_frequent = np.repeat(counts > FREQUENT_SHARE * len(gram), counts)
    squared_norms = (
        _max_square_by_pairs(gram, counted.select(~is_frequent)),
        _max_square_by_product(gram, counted.select(is_frequent)),
    )
    return max(squared_norms) ** 0.5


def _max_square_by_pairs(gram: Matrix, counted: Contacts) -> float:
    """Add up the Gram entries of all pairs of rounds of a client, one lag after the other."""
    if not len(counted):
        return 0.0
    clients, rows = counted.clients, counted.rows
    counts = counted.counts()
    owner = np.repeat(np.arange(len(counts)), counts)
    squares = np.bincount(owner, gram[rows, rows])
    for lag in range(1, int(counts.max())):
        (first,) = np.nonzero(clients[lag:] == clients[:-lag])
        pairs = 2 * gram[rows[first], rows[first + lag]]
        squares += np.bincount(owner[first], pairs, minlength=len(squares))
    return float(squares.max())


def _max_square_by_product(gram: Matrix, counted: Contacts) -> float:
    """Compute x^T G x for each client's 0/1 vector x of rounds, one batch of clients at a time."""
    counts, largest = counted.counts(), 0.0
    owner = np.repeat(np.arange(len(counts)), counts)
    for start in range(0, len(counts), CLIENTS_PER_BATCH):
        in_batch = (owner >= start) & (owner < start + CLIENTS_PER_BATCH)
        takes_part = np.zeros((len(gram), CLIENTS_PER_BATCH))
        takes_part[counted.rows[in_batch], owner[in_batch] - start] = 1.0
        squares = np.einsum("ij,ij->j", takes_part, gram @ takes_part)
        largest = max(largest, float(squares.max()))
    return largest
