"""Who was contacted when: the timers, checked from every single contact."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dpftrl.audit.journal import Attempt
from dpftrl.errors import UnsafeState

Keys = NDArray[np.uint64]
Numbers = NDArray[np.int64]


@final
@dataclass(frozen=True, eq=False)
class Contacts:
    """All contacts, those of one client together and in order.

    Attributes:
        clients: Whose.
        attempts: The index of the attempt.
        rows: The row of noise that it was for.
        place: Where each was before sorting: attempt after attempt.
    """

    clients: Keys
    attempts: Numbers
    rows: Numbers
    place: Numbers

    @classmethod
    def of(cls, attempts: Sequence[Attempt]) -> "Contacts":
        """The contacts of all attempts."""
        clients = np.concatenate([np.empty(0, np.uint64), *_identities(attempts)])
        sizes = [len(attempt.clients) for attempt in attempts]
        which = np.repeat(np.arange(len(attempts)), sizes)
        rows = np.array([attempt.cohort.row for attempt in attempts], dtype=np.int64)
        place = np.argsort(clients, kind="stable")
        return cls(clients[place], which[place], rows[which[place]], place)

    def __len__(self) -> int:
        return len(self.clients)

    def kept(self, which: NDArray[np.bool_]) -> "Contacts":
        """Some of them."""
        return Contacts(
            self.clients[which], self.attempts[which], self.rows[which], self.place[which]
        )

    def returns(self) -> tuple[Numbers, Numbers]:
        """Where, in these arrays, a client's contact and its next one are."""
        (again,) = np.nonzero(self.clients[1:] == self.clients[:-1])
        return again, again + 1

    def least_gap(self) -> int | None:
        """Fewest rows from one contact of a client to its next; None if nobody returned."""
        sooner, later = self.returns()
        gaps = self.rows[later] - self.rows[sooner]
        return int(gaps.min()) if len(gaps) else None

    def each(self) -> Numbers:
        """How many contacts each client has."""
        return np.diff(np.flatnonzero(np.append(self._starts(), True)))

    def most(self) -> int:
        """Contacts of the client that was contacted most often."""
        return int(self.each().max(initial=0))

    def _starts(self) -> NDArray[np.bool_]:
        return np.append(len(self) > 0, self.clients[1:] != self.clients[:-1])[: len(self)]


def _identities(attempts: Sequence[Attempt]) -> list[Keys]:
    """Numbers that tell clients apart: by name where the run has names, as the ledger does."""
    known: dict[str, int] = {}
    return [
        attempt.clients
        if (names := attempt.cohort.names) is None
        else np.array([known.setdefault(name, len(known)) for name in names], np.uint64)
        for attempt in attempts
    ]


def check_rounds_between(contacts: Contacts, min_sep: int) -> str:
    """Refuse two contacts of one client that are too close, in rows."""
    sooner, later = contacts.returns()
    gaps = contacts.rows[later] - contacts.rows[sooner]
    if len(gaps) and gaps.min() < min_sep:
        at = int(gaps.argmin())
        raise UnsafeState(
            f"{int((gaps < min_sep).sum()):,} time(s) a client was contacted too early, such as "
            f"for rows {contacts.rows[sooner[at]]} and {contacts.rows[later[at]]}; "
            f"min-sep is {min_sep}"
        )
    closest = f"at least {gaps.min():,} rows apart" if len(gaps) else "nobody twice"
    return f"{len(contacts):,} contacts, {closest} (min-sep {min_sep:,})"


def check_hours_between(contacts: Contacts, times: NDArray[np.float64], hours: float) -> str:
    """Refuse two contacts of one client that are too close, in time."""
    sooner, later = contacts.returns()
    waited = times[contacts.attempts[later]] - times[contacts.attempts[sooner]]
    if not np.all(waited >= hours):
        at = int(np.argmin(np.nan_to_num(waited, nan=-np.inf)))
        raise UnsafeState(
            f"{int((~(waited >= hours)).sum()):,} time(s) a client was contacted too early, such "
            f"as after {waited[at]:g} hours; the timer is {hours:g} hours"
        )
    closest = f"at least {waited.min():g} hours apart" if len(waited) else "nobody twice"
    return f"{len(contacts):,} contacts, {closest} (timer {hours:g} hours)"


def check_cap(contacts: Contacts, cap: int) -> str:
    """Refuse a client that was contacted too often."""
    most = contacts.most()
    if most > cap:
        raise UnsafeState(
            f"{int((contacts.each() > cap).sum()):,} client(s) were contacted more than {cap} "
            f"times, one of them {most}"
        )
    return f"no client more than {most:,} time(s) (cap {cap:,})"
