"""Who was contacted when: the timers, checked from every single contact."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Matrix
from dpftrl.errors import UnsafeState
from dpftrl.verify.files import Told
from dpftrl.verify.journal import Attempt, Committed, Journal
from dpftrl.verify.patterns import Limits

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


# A client counted in more than this share of the rounds is cheaper to multiply out.
OFTEN: Final = 1 / 32
AT_ONCE: Final = 256


def furthest_moved(gram: Matrix, counted: Contacts) -> float:
    """The largest norm of the sum of a client's columns."""
    if not len(counted):
        return 0.0
    each = counted.each()
    is_often = np.repeat(each > OFTEN * len(gram), each)
    squares = (_by_pairs(gram, counted.kept(~is_often)), _by_rows(gram, counted.kept(is_often)))
    return max(squares) ** 0.5


def _by_pairs(gram: Matrix, counted: Contacts) -> float:
    """Add up the Gram entries of all pairs of rounds: next neighbours, then those beyond."""
    if not len(counted):
        return 0.0
    clients, rows = counted.clients, counted.rows
    sizes = counted.each()
    owner = np.repeat(np.arange(len(sizes)), sizes)
    total = np.bincount(owner, gram[rows, rows])
    for lag in range(1, int(sizes.max())):
        (first,) = np.nonzero(clients[lag:] == clients[:-lag])
        pairs = 2 * gram[rows[first], rows[first + lag]]
        total += np.bincount(owner[first], pairs, minlength=len(total))
    return float(total.max())


def _by_rows(gram: Matrix, counted: Contacts) -> float:
    """Multiply the Gram matrix by who was counted, some clients at a time."""
    sizes, worst = counted.each(), 0.0
    owner = np.repeat(np.arange(len(sizes)), sizes)
    for start in range(0, len(sizes), AT_ONCE):
        here = (owner >= start) & (owner < start + AT_ONCE)
        taken = np.zeros((len(gram), AT_ONCE))
        taken[counted.rows[here], owner[here] - start] = 1.0
        worst = max(worst, float(np.einsum("ij,ij->j", taken, gram @ taken).max()))
    return worst


def check_cohorts(journal: Journal, told: Told) -> str:
    """Refuse cohorts, reports and rows that the plan has no room for."""
    planned = told.promise.stream.participation.rounds
    if len(journal.commits) > planned:
        raise UnsafeState(f"{len(journal.commits)} rounds were released, and {planned} planned")
    for attempt in journal.attempts:
        if why := _misfit(attempt, told):
            raise UnsafeState(f"attempt {attempt.cohort.attempt}: {why}")
    goal = told.fleet.report_goal
    return f"{goal:,} to {told.cohort_size:,} clients contacted, {goal:,} reports in every sum"


def _misfit(attempt: Attempt, told: Told) -> str | None:
    cohort, end, goal = attempt.cohort, attempt.end, told.fleet.report_goal
    by_time, hashed = told.settings.timer_hours is not None, told.settings.hash_clients
    if not goal <= len(attempt.clients) <= told.cohort_size:
        return f"{len(attempt.clients)} clients, not {goal} to {told.cohort_size}"
    if isinstance(end, Committed) and end.reports != goal:
        return f"{end.reports} reports in the sum, and the report goal is {goal}"
    if by_time and cohort.time is None:
        return "no time, and timers go by time"
    if (cohort.names is None) != hashed:
        return "names where the run hashes them, or none where it does not"
    return None


def check_timers(journal: Journal, contacts: Contacts, told: Told) -> str:
    """Refuse a client that came back too early, for an attempt that was released or not."""
    hours = told.settings.timer_hours
    if hours is None:
        return check_rounds_between(contacts, told.promise.stream.participation.min_sep)
    check_rounds_between(contacts, 1)
    times = [attempt.cohort.time for attempt in journal.attempts]
    return check_hours_between(contacts, np.array(times, dtype=np.float64), hours)


def limits_of(journal: Journal, contacts: Contacts, told: Told) -> tuple[Limits, Limits]:
    """What guarantees are stated for: at the last release, and by now.

    Where timers go by rounds the server enforces the plan, and both are the same. Where they go by
    time, it is what was observed, of everyone who was contacted.
    """
    rounds, planned = len(journal.commits), told.promise.stream.participation
    if told.settings.timer_hours is None:
        limits = Limits(rounds, planned.min_sep, planned.max_participations)
        return limits, limits
    last = max(
        number
        for number, attempt in enumerate(journal.attempts)
        if isinstance(attempt.end, Committed)
    )
    return _observed(rounds, contacts.kept(contacts.attempts <= last)), _observed(rounds, contacts)


def _observed(rounds: int, contacts: Contacts) -> Limits:
    return Limits(rounds, contacts.least_gap() or rounds, max(1, contacts.most()))
