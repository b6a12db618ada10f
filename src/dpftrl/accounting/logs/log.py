"""A participation log that has been read once and can be asked several things."""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from dpftrl._internal.checks import whole_number
from dpftrl._internal.client_ids import canonical_ids, shown
from dpftrl.accounting.logs.patterns import Visits, visits
from dpftrl.accounting.logs.reading import (
    Partitions,
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

# Few enough for the caches of a processor to help.
ROWS_PER_PARTITION = 500_000

# A Gram matrix of so many rounds has 128 MB, and takes a few seconds to make.
GRAM_LIMIT = 4096

# Called with how far the work is (None if nobody knows) and what is being done.
Report = Callable[[float | None, str], None]


@final
@dataclass(frozen=True)
class ParticipationLog:
    """A log sorted by client; `open_log` makes one.

    Guarantees:
        No answer counts one client as two because its id is written in two ways: a log in which
        two different ids have the same canonical form (see `_internal.client_ids`) is refused.

    Attributes:
        rounds: Rounds of training.
        first_round: The number that the log gives to the first.
    """

    rounds: int
    first_round: int
    _source: Source
    _partitions: Partitions
    _has_respelled_ids: bool
    _report: Report

    def summary(self, limits: Limits | None = None) -> Observed:
        """What the log says, and who broke the limits."""
        parts = self._visits("counting")
        return summarize(parts, self.rounds, self.first_round, limits or Limits())

    def worst_pattern(self, mechanism: Mechanism, rounds: int | None = None) -> WorstPattern:
        """The most that any one client who was counted could have moved the strategy's output.

        Args:
            mechanism: Whose strategy.
            rounds: Rounds of training, if more than the log's.
        """
        made = self.rounds if rounds is None else mechanism.check_rounds(rounds)
        if made < self.rounds:
            raise InvalidInput(f"the log has {self.rounds:,} rounds, got rounds {made:,}")
        mechanism.check_rounds(made)
        if made <= GRAM_LIMIT:
            return worst_by_gram(mechanism, made, self._visits("patterns"))
        return worst_by_bounds(mechanism, made, lambda: self._visits("patterns"))

    def _visits(self, doing: str) -> Iterator[Visits]:
        for partition in range(len(self._partitions)):
            self._report(partition / len(self._partitions), doing)
            partition_visits = visits(self._partitions.rows(partition))
            if self._has_respelled_ids:
                _refuse_same_clients(partition_visits.ids, self._source)
            yield partition_visits


@contextmanager
def open_log(
    path: str | os.PathLike[str],
    *,
    rounds: int | None = None,
    first_round: int = 0,
    rows_per_partition: int = ROWS_PER_PARTITION,
    report: Report | None = None,
) -> Generator[ParticipationLog]:
    """Read a log; what was sorted on disk is gone when the `with` statement ends.

    Args:
        path: CSV, JSON lines or Parquet by its ending, with columns `round`, `client` and, if
            there is one, `status`: counted (or nothing), contacted or abandoned. A client's id must
            be written in the same way in all rows.
        rounds: Rounds of training; the last round of the log if it is not known.
        first_round: The number of the first round, 1 in logs that count from 1.
        rows_per_partition: Rows to have in memory at once, or so.
        report: Is told how far the work is.
    """
    first = whole_number("first_round", first_round, at_least=0)
    if first > MOST_ROUNDS:
        raise InvalidInput(f"first_round must be at most {MOST_ROUNDS:,}, got {first}")
    stated = None if rounds is None else MinSep.once(rounds).rounds
    source, told = open_source(path), report or _silence
    size = whole_number("rows_per_partition", rows_per_partition)
    partitions = Partitions(1 + source.rows // size)
    try:
        reader = _Reader(path, partitions, first, stated, told)
        stream(source, reader.receive)
        if not reader.rows:
            raise InvalidInput(f"{path} holds no participation: it has no rows")
        yield ParticipationLog(
            rounds=stated or reader.last_round + 1,
            first_round=first,
            _source=source,
            _partitions=partitions,
            _has_respelled_ids=reader.has_respelled_ids,
            _report=told,
        )
    finally:
        partitions.close()


def observe(
    path: str | os.PathLike[str],
    limits: Limits | None = None,
    *,
    rounds: int | None = None,
    first_round: int = 0,
    report: Report | None = None,
) -> Observed:
    """What a log says, and who broke the limits; see `open_log`."""
    with open_log(path, rounds=rounds, first_round=first_round, report=report) as log:
        return log.summary(limits)


@dataclass
class _Reader:
    """Cleans batches and sorts them into partitions."""

    path: str | os.PathLike[str]
    partitions: Partitions
    first_round: int
    stated_rounds: int | None
    report: Report
    rows: int = 0
    last_round: int = 0
    has_respelled_ids: bool = False

    def receive(self, batch: "pl.DataFrame") -> None:
        """Take one batch."""
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
        self.report(None, f"{self.rows:,} rows read")


def _refuse_same_clients(ids: "pl.Series", source: Source) -> None:
    """Refuse a partition in which two ids, no two of them equal, have the same canonical form."""
    forms = canonical_ids(ids).forms
    if forms.n_unique() == len(forms):
        return
    form = forms.filter(forms.is_duplicated()).min()
    one, other = ids.filter(forms == form).sort().head(2)
    rows = _first_rows(source, one, other)
    places = " and ".join(f"row {rows[client]:,} has client {shown(client)}" for client in rows)
    raise InvalidInput(
        f"{source.path}: {places}, which differ only in how they are written (white space or "
        "invisible characters, Unicode form, leading zeros or another notation of a number), so "
        "that one client could be counted as two; write one client's id in one way, and if they "
        "are two clients, put something else in front of each"
    )


def _first_rows(source: Source, *clients: str) -> dict[str, int]:
    """The first row of each of these clients, in the order of the log."""
    rows, before = dict[str, int](), 0

    def look(batch: "pl.DataFrame") -> None:
        nonlocal before
        ids = client_ids(batch["client"])
        for position in ids.is_in(clients).arg_true():
            rows.setdefault(ids[position], before + position + 1)
        before += len(batch)

    stream(source, look)
    return rows


def _silence(_: float | None, __: str) -> None: ...
