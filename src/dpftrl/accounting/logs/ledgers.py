"""The summary of the ledger that a run of dpftrl wrote, with polars or without it."""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, final

import numpy as np

from dpftrl._internal.client_ids import canonical_id
from dpftrl._internal.progress import Progress
from dpftrl.accounting.logs.log import observe
from dpftrl.accounting.logs.partitions import Contacts, Integers
from dpftrl.accounting.logs.summary import Limits, Observed, summarize
from dpftrl.errors import InvalidInput
from dpftrl.participation import MOST_ROUNDS

COLUMNS: Final = ["round", "client", "status"]
STATUSES: Final = ("counted", "contacted", "abandoned")


def observe_ledger(
    path: str | os.PathLike[str],
    limits: Limits | None = None,
    *,
    on_progress: Progress | None = None,
) -> Observed:
    """Summarize the ledger of a run. The package polars makes this faster, and is not needed.

    Args:
        path: A CSV file with the columns that a run of dpftrl writes.
        limits: The limits to check.
        on_progress: Called with the fraction done and a message.

    Raises:
        InvalidInput: The file is no such ledger.
    """
    if find_spec("polars") is not None:
        return observe(path, limits, on_progress=on_progress)
    contacts = _contacts(Path(path))
    return summarize([contacts], int(contacts.rounds.max()) + 1, 0, limits or Limits())


@final
@dataclass(frozen=True)
class Ids:
    """Client ids with the methods of a polars Series that summaries use."""

    ids: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, position: int) -> str:
        return self.ids[position]

    def gather(self, positions: Integers) -> "Ids":
        """The ids at these positions."""
        return Ids([self.ids[position] for position in positions.tolist()])

    def min(self) -> str:
        """The smallest id."""
        return min(self.ids)

    def to_list(self) -> list[str]:
        """The ids as a list."""
        return self.ids


def _contacts(path: Path) -> Contacts:
    """All contacts of a ledger, as one partition."""
    number_of, owners, contacts = dict[str, int](), list[int](), list[int]()
    for number, client, is_counted in _rows(path):
        owners.append(number_of.setdefault(client, len(number_of)))
        contacts.append(2 * number + is_counted)
    if not owners:
        raise InvalidInput(f"{path} holds no participation: it has no rows")
    if len({canonical_id(client) for client in number_of}) < len(number_of):
        raise InvalidInput(
            f"{path}: two clients differ only in how their ids are written, so one client could be "
            "counted as two; write a client's id the same way in every row"
        )
    owner, contact = np.array(owners, np.int64), np.array(contacts, np.int64)
    order = np.lexsort((contact, owner))
    owner, contact = owner[order], contact[order]
    rounds = contact >> 1
    is_first = (np.diff(owner, prepend=-1) != 0) | (np.diff(rounds, prepend=-1) != 0)
    first = np.flatnonzero(is_first)
    counted_rows = np.add.reduceat(contact & 1, first)
    return Contacts(Ids(list(number_of)), owner[first], rounds[first], counted_rows)


def _rows(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield round, client and whether it was counted, of each row."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file)
            if next(reader, None) != COLUMNS:
                raise InvalidInput(
                    f"{path} has other columns than the ledger of a run; reading it needs polars: "
                    "pip install 'dpftrl[logs]'"
                )
            for row in reader:
                if len(row) != len(COLUMNS) or not _is_row(*row):
                    raise InvalidInput(
                        f"{path}, line {reader.line_num:,}: expected a round, a client and one of "
                        f"{', '.join(STATUSES)}, got {','.join(row)!r:.60}"
                    )
                yield int(row[0]), row[1], row[2] == "counted"
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInput(f"{path} is no CSV file in UTF-8: {error}") from None


def _is_row(number: str, client: str, status: str) -> bool:
    is_round = number.isascii() and number.isdigit() and len(number) <= len(str(MOST_ROUNDS))
    return is_round and int(number) < MOST_ROUNDS and bool(client) and status in STATUSES
