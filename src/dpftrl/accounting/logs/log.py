"""Open a participation log and answer questions about it."""

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from dpftrl._internal.checks import whole_number
from dpftrl._internal.client_ids import canonical_ids, shown
from dpftrl._internal.deprecation import renamed_argument
from dpftrl._internal.progress import Progress, ignore_progress
from dpftrl.accounting.logs.partitions import Contacts, Partitions, merge_contacts
from dpftrl.accounting.logs.reading import (
    Source,
    clean,
    client_ids,
    last_round,
    open_source,
    stream,
)
from dpftrl.accounting.logs.summary import Limits, Observed, WorstPattern, summarize
from dpftrl.accounting.logs.worst_pattern import worst_by_bounds, worst_by_gram
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms.base import Mechanism
from dpftrl.participation import MOST_ROUNDS, MinSep

if TYPE_CHECKING:
    import polars as pl

# A partition of this many rows stays in the processor's cache.
ROWS_PER_PARTITION = 500_000

# The Gram matrix of this many rounds needs 128 MB and takes a few seconds to compute.
GRAM_LIMIT = 4096


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
    """

    rounds: int
    first_round: int
    _source: Source
    _partitions: Partitions
    _has_respelled_ids: bool
    _on_progress: Progress

    def summary(self, limits: Limits | None = None) -> Observed:
        """Summarize the log, and list the clients that broke the limits."""
        contacts = self._contacts("counting")
        return summarize(contacts, self.rounds, self.first_round, limits or Limits())

    def worst_pattern(self, mechanism: Mechanism, rounds: int | None = None) -> WorstPattern:
        """The pattern of the counted client that can change the strategy's output C X the most.

        Args:
            mechanism: The mechanism with the strategy C.
            rounds: Number of training rounds, if the run had more rounds than the log shows.
        """
        total = self.rounds if rounds is None else mechanism.check_rounds(rounds)
        if total < self.rounds:
            raise InvalidInput(f"the log has {self.rounds:,} rounds, got rounds {total:,}")
        mechanism.check_rounds(total)
        if total <= GRAM_LIMIT:
            return worst_by_gram(mechanism, total, self._contacts("patterns"))
        return worst_by_bounds(mechanism, total, lambda: self._contacts("patterns"))

    def _contacts(self, activity: str) -> Iterator[Contacts]:
        """The contacts of each partition; `activity` is what the progress callback shows."""
        for partition in range(len(self._partitions)):
            self._on_progress(partition / len(self._partitions), activity)
            contacts = merge_contacts(self._partitions.rows(partition))
            if self._has_respelled_ids:
                _refuse_same_clients(contacts.ids, self._source)
            yield contacts


@renamed_argument("report", "on_progress")
@contextmanager
def open_log(
    path: str | os.PathLike[str],
    *,
    rounds: int | None = None,
    first_round: int = 0,
    rows_per_partition: int = ROWS_PER_PARTITION,
    on_progress: Progress | None = None,
) -> Generator[ParticipationLog]:
    """Read a log. Temporary files are deleted when the `with` statement ends.

    Args:
        path: A CSV, JSON lines or Parquet file, recognized by its ending. It has the columns
            `round`, `client` and optionally `status`, which is counted (or empty), contacted or
            abandoned. A client's id must be written in the same way in all rows.
        rounds: Number of training rounds. Default: up to the last round in the log.
        first_round: The number of the first round; 1 for logs that count from 1.
        rows_per_partition: About how many rows to hold in memory at the same time.
        on_progress: Called with the fraction done and a message.

    Raises:
        InvalidInput: The file cannot be read, or a row in it is not valid.
    """
    first = whole_number("first_round", first_round, at_least=0)
    if first > MOST_ROUNDS:
        raise InvalidInput(f"first_round must be at most {MOST_ROUNDS:,}, got {first}")
    stated_rounds = None if rounds is None else MinSep.once(rounds).rounds
    source = open_source(path)
    callback = on_progress or ignore_progress
    size = whole_number("rows_per_partition", rows_per_partition)
    partitions = Partitions(1 + source.rows // size)
    try:
        reader = _Reader(path, partitions, first, stated_rounds, callback)
        stream(source, reader.receive)
        if not reader.rows:
            raise InvalidInput(f"{path} holds no participation: it has no rows")
        yield ParticipationLog(
            rounds=stated_rounds or reader.last_round + 1,
            first_round=first,
            _source=source,
            _partitions=partitions,
            _has_respelled_ids=reader.has_respelled_ids,
            _on_progress=callback,
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
    on_progress: Progress | None = None,
) -> Observed:
    """Read a log, summarize it, and list the clients that broke the limits.

    The arguments are those of `open_log` and `ParticipationLog.summary`.
    """
    with open_log(path, rounds=rounds, first_round=first_round, on_progress=on_progress) as log:
        return log.summary(limits)


@dataclass
class _Reader:
    """Checks batches of rows and adds them to the partitions."""

    path: str | os.PathLike[str]
    partitions: Partitions
    first_round: int
    stated_rounds: int | None
    on_progress: Progress
    rows: int = 0
    last_round: int = 0
    has_respelled_ids: bool = False

    def receive(self, batch: "pl.DataFrame") -> None:
        """Check one batch and add it to the partitions."""
        if not len(batch):
            return
        try:
            cleaned = clean(batch, self.first_round, self.stated_rounds, self.rows)
        except InvalidInput as error:
            raise InvalidInput(f"{self.path}: {error}") from None
        self.rows += len(cleaned.rows)
        self.last_round = max(self.last_round, last_round(cleaned.rows))
        self.has_respelled_ids |= cleaned.respelled
        self.partitions.add(cleaned.rows, cleaned.forms)
        self.on_progress(None, f"{self.rows:,} rows read")


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
