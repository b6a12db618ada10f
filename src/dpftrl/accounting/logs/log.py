"""Open a participation log and answer questions about it."""

import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, cast, final

from dpftrl._internal.checks import whole_number
from dpftrl._internal.client_ids import canonical_ids, shown
from dpftrl._internal.deprecation import renamed_argument
from dpftrl._internal.progress import Progress, ignore_progress
from dpftrl.accounting.logs.layout import (
    ROUND,
    TIME,
    LogLayout,
    as_text,
    read_first_time,
    read_times,
)
from dpftrl.accounting.logs.partitions import Clock, Contacts, Partitions, merge_contacts
from dpftrl.accounting.logs.reading import (
    Source,
    clean,
    client_ids,
    open_source,
    round_numbers,
    stream,
)
from dpftrl.accounting.logs.summary import Limits, Observed, WorstPattern, summarize
from dpftrl.accounting.logs.worst_pattern import worst_by_bounds, worst_by_gaps, worst_by_gram
from dpftrl.errors import DpftrlError, InvalidInput, TooLarge
from dpftrl.mechanisms.base import Mechanism
from dpftrl.participation import MOST_ROUNDS, MinSep

if TYPE_CHECKING:
    import polars as pl

# A partition of this many rows stays in the processor's cache.
ROWS_PER_PARTITION = 500_000

# The Gram matrix of this many rounds needs 128 MB and takes a few seconds to compute.
GRAM_LIMIT = 4096

GZIP: Final = b"\x1f\x8b"  # the first bytes of a gzip file


@final
@dataclass(frozen=True)
class ParticipationLog:
    """A log that was read once and sorted by client; create it with `open_log`.

    Guarantees:
        No answer counts one client as two because its id is written in two ways: a log in which
        two different ids have the same canonical form (see `_internal.client_ids`) is refused.

    Attributes:
        rounds: Number of training rounds.
        first_round: The number of the first round in the log.
        lacks_first_round: Whether no row of any status is in the first round. Perhaps the log
            counts its rounds from another number. False for a log with times.
    """

    rounds: int
    first_round: int
    lacks_first_round: bool
    _source: Source
    _partitions: Partitions
    _has_respelled_ids: bool
    _on_progress: Progress
    _clock: Clock | None = None
    _unseen_rounds: int = 0

    def summary(self, limits: Limits | None = None) -> Observed:
        """Summarize the log, and list the clients that broke the limits."""
        contacts = self._contacts("counting")
        observed = summarize(contacts, self.rounds, self.first_round, limits or Limits())
        if self._clock is None:
            return observed
        return replace(observed, from_times=True, unseen_rounds=self._unseen_rounds)

    def worst_pattern(self, mechanism: Mechanism, rounds: int | None = None) -> WorstPattern:
        """The pattern of the counted client that can change the strategy's output C X the most.

        For a log with times, this is the bound for the smallest gap and the largest count.

        Args:
            mechanism: The mechanism with the strategy C.
            rounds: Number of training rounds, if the run had more rounds than the log shows.
        """
        shown = self.rounds + self._unseen_rounds
        total = shown if rounds is None else mechanism.check_rounds(rounds)
        if total < self.rounds:
            raise InvalidInput(f"the log has {self.rounds:,} rounds, got rounds {total:,}")
        mechanism.check_rounds(total)
        if self._clock is not None:
            return worst_by_gaps(mechanism, total, self._contacts("patterns"))
        if total <= GRAM_LIMIT:
            return worst_by_gram(mechanism, total, self._contacts("patterns"))
        return worst_by_bounds(mechanism, total, lambda: self._contacts("patterns"))

    def _contacts(self, activity: str) -> Iterator[Contacts]:
        """The contacts of each partition; `activity` is what the progress callback shows."""
        for partition in range(len(self._partitions)):
            self._on_progress(partition / len(self._partitions), activity)
            contacts = merge_contacts(self._partitions.rows(partition), self._clock)
            if self._has_respelled_ids:
                _refuse_same_clients(cast("pl.Series", contacts.ids), self._source)
            yield contacts


@renamed_argument("report", "on_progress")
@contextmanager
def open_log(
    path: str | os.PathLike[str],
    *,
    rounds: int | None = None,
    first_round: int = 0,
    layout: LogLayout | None = None,
    rows_per_partition: int = ROWS_PER_PARTITION,
    on_progress: Progress | None = None,
) -> Generator[ParticipationLog]:
    """Read a log. Temporary files are deleted when the `with` statement ends.

    Args:
        path: A CSV, JSON lines or Parquet file, recognized by its ending, or - for standard input.
            It has the columns `round`, `client` and optionally `status`, which is counted (or
            empty), contacted or abandoned. A client's id must be written in the same way in all
            rows.
        rounds: Number of training rounds. Default: up to the last round in the log.
        first_round: The number of the first round; 1 for logs that count from 1.
        layout: How the log is written, if its columns or statuses have other names, if it has times
            instead of rounds, or if its ending does not say its format.
        rows_per_partition: About how many rows to hold in memory at the same time.
        on_progress: Called with the fraction done and a message.

    Raises:
        InvalidInput: The file cannot be read, or a row in it is not valid.
    """
    if find_spec("polars") is None:
        raise InvalidInput("reading logs needs polars: pip install 'dpftrl[logs]'")
    layout = layout or LogLayout()
    first = whole_number("first_round", first_round, at_least=0)
    if first > MOST_ROUNDS:
        raise InvalidInput(f"first_round must be at most {MOST_ROUNDS:,}, got {first}")
    if first and layout.time_column is not None:
        raise InvalidInput(
            "--first-round is for logs with rounds; with --time-column, rounds count from 0, and "
            "--first-time says when the first one began"
        )
    stated_rounds = None if rounds is None else MinSep.once(rounds).rounds
    stated_start = None
    if layout.first_time is not None:
        stated_start = read_first_time(layout.first_time, layout.time_zone)
    size = whole_number("rows_per_partition", rows_per_partition)
    callback = on_progress or ignore_progress
    with _as_file(path, layout.format) as file:
        source = open_source(file, layout)
        partitions = Partitions(1 + source.rows // size)
        try:
            reader = _Reader(file, layout, partitions, first, stated_rounds, stated_start, callback)
            stream(source, reader.receive)
            if not reader.rows:
                raise InvalidInput(f"{file} holds no participation: it has no rows")
            clock = reader.clock()
            if clock is not None:
                reader.check_last_round(clock)
            is_complete = clock is None or clock.starts_exactly or stated_rounds is not None
            yield ParticipationLog(
                rounds=stated_rounds or reader.last_round(clock) + 1,
                first_round=first,
                lacks_first_round=clock is None and reader.smallest > 0,
                _source=source,
                _partitions=partitions,
                _has_respelled_ids=reader.has_respelled_ids,
                _on_progress=callback,
                _clock=clock,
                _unseen_rounds=0 if is_complete else 1,
            )
        finally:
            partitions.close()


@renamed_argument("report", "on_progress")
def observe(
    path: str | os.PathLike[str],
    limits: Limits | None = None,
    *,
    rounds: int | None = None,
    first_round: int = 0,
    layout: LogLayout | None = None,
    on_progress: Progress | None = None,
) -> Observed:
    """Read a log, summarize it, and list the clients that broke the limits.

    The arguments are those of `open_log` and `ParticipationLog.summary`.
    """
    with open_log(
        path, rounds=rounds, first_round=first_round, layout=layout, on_progress=on_progress
    ) as log:
        return log.summary(limits)


@dataclass
class _Reader:
    """Checks batches of rows and adds them to the partitions."""

    path: str | os.PathLike[str]
    layout: LogLayout
    partitions: Partitions
    first_round: int
    stated_rounds: int | None
    stated_start: int | None
    on_progress: Progress
    rows: int = 0
    has_respelled_ids: bool = False
    # The smallest and the largest round, counted from 0, or time in microseconds.
    smallest: int = 0
    largest: int = 0
    notation: str | None = None
    inexact: bool = False

    def receive(self, batch: "pl.DataFrame") -> None:
        """Check one batch and add it to the partitions."""
        if not len(batch):
            return
        try:
            numbers = self._numbers(batch)
            cleaned = clean(batch, self.layout, numbers, self.rows)
        except InvalidInput as error:
            raise InvalidInput(f"{self.path}: {error}") from None
        numbers_array = numbers.to_numpy()
        smallest, largest = int(numbers_array.min()), int(numbers_array.max())
        self.smallest = min(self.smallest, smallest) if self.rows else smallest
        self.largest = max(self.largest, largest)
        self.rows += len(cleaned.rows)
        self.has_respelled_ids |= cleaned.respelled
        self.partitions.add(cleaned.rows, cleaned.forms)
        self.on_progress(None, f"{self.rows:,} rows read")

    def _numbers(self, batch: "pl.DataFrame") -> "pl.Series":
        """The round of each row, counted from 0, or its time in microseconds."""
        if self.layout.time_column is None:
            return round_numbers(batch[ROUND], self.first_round, self.stated_rounds, self.rows)
        times = read_times(batch[TIME], self.layout.time_zone, self.notation, self.rows)
        self.notation = times.notation
        self.inexact |= times.inexact
        return times.microseconds

    def clock(self) -> Clock | None:
        """How times become rounds, after all rows were read; None for a log with rounds."""
        if self.layout.time_column is None:
            return None
        start = self.smallest if self.stated_start is None else self.stated_start
        if self.smallest < start:
            raise InvalidInput(
                f"{self.path}: the first time in the log is {as_text(self.smallest)}, which is "
                f"before --first-time, {as_text(start)}; --first-time is the start of the first "
                "round"
            )
        length = self.layout.round_microseconds
        return Clock(start, length, int(self.inexact), self.stated_start is not None)

    def last_round(self, clock: Clock | None) -> int:
        """The last round in the log, counted from 0."""
        if clock is None:
            return self.largest
        return (self.largest - clock.start) // clock.length

    def check_last_round(self, clock: Clock) -> None:
        """Refuse times after the last of the stated rounds."""
        last = self.last_round(clock)
        if self.stated_rounds is not None and last >= self.stated_rounds:
            raise InvalidInput(
                f"{self.path}: {as_text(self.largest)} is in round {last:,}, counted from 0 at "
                f"{as_text(clock.start)}, but there are {self.stated_rounds:,} rounds; check "
                "--rounds and --round-length"
            )


@contextmanager
def _as_file(path: str | os.PathLike[str], kind: str | None) -> Generator[str | os.PathLike[str]]:
    """The log as a file. Standard input is copied to a temporary file that only its owner can read.

    Guarantees:
        Standard input is read by the same code as files are, so all checks of files hold for it.
    """
    if os.fspath(path) != "-":
        yield path
        return
    if kind is None:
        raise InvalidInput("a log from standard input needs --format: csv, json or parquet")
    # A program without standard input has None here.
    if sys.stdin is None or sys.stdin.closed:  # pyright: ignore[reportUnnecessaryComparison]
        raise InvalidInput("there is no standard input; name a file")
    if sys.stdin.isatty():
        raise InvalidInput("standard input is a terminal; pipe a log into it, or name a file")
    with tempfile.TemporaryDirectory(prefix="dpftrl-log-") as folder:
        try:
            file = _copy(sys.stdin.buffer, Path(folder), kind)
        except OSError as error:
            raise TooLarge(
                f"standard input is copied to {tempfile.gettempdir()}, which failed "
                f"({error.strerror}); point TMPDIR to a folder with room for the log"
            ) from None
        try:
            yield file
        except DpftrlError as error:
            raise type(error)(str(error).replace(str(file), "standard input")) from None


def _copy(log: IO[bytes], folder: Path, kind: str) -> Path:
    """Copy a log into a folder, under a name whose ending says its format."""
    start = log.read(len(GZIP))
    ending = {"csv": ".csv", "json": ".jsonl", "parquet": ".parquet"}[kind]
    if start == GZIP and kind != "parquet":
        ending += ".gz"
    file = folder / f"log{ending}"
    with file.open("xb") as copy:
        copy.write(start)
        shutil.copyfileobj(log, copy)
    return file


def _refuse_same_clients(ids: "pl.Series", source: Source) -> None:
    """Raise InvalidInput if two of these distinct ids have the same canonical form."""
    forms = canonical_ids(ids).forms
    if forms.n_unique() == len(forms):
        return
    repeated_form = forms.filter(forms.is_duplicated()).min()
    two_ids = ids.filter(forms == repeated_form).sort().head(2)
    rows = _first_rows(source, *two_ids)
    places = " and ".join(f"row {rows[client]:,} has client {shown(client)}" for client in rows)
    raise InvalidInput(
        f"{source.path}: {places}, which differ only in how they are written (white space or "
        "invisible characters, Unicode form, leading zeros or another notation of a number), so "
        "one client could be counted as two; write a client's id the same way in every row, or, "
        "if they are two clients, give each id a different prefix"
    )


def _first_rows(source: Source, *clients: str) -> dict[str, int]:
    """The number of the first row of each of these clients, in the order of the log."""
    first_rows, rows_before = dict[str, int](), 0

    def search(batch: "pl.DataFrame") -> None:
        nonlocal rows_before
        ids = client_ids(batch["client"])
        for position in ids.is_in(clients).arg_true():
            first_rows.setdefault(ids[position], rows_before + position + 1)
        rows_before += len(batch)

    stream(source, search)
    return first_rows
