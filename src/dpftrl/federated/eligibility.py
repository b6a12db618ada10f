"""Eligibility: which clients may take part in the next round, and which of them are chosen.

`Timers` stores when each client was last contacted and
how often, in 16 bytes per client. `Rules` decides who may be contacted again. The function `choose`
draws the cohort. `Eligibility` combines these parts, and refuses names under which one client could
appear twice.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, final

import numba
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.client_ids import (
    canonical_id,
    has_known_spellings,
    other_spellings,
    shown,
    why_unfit,
)
from dpftrl._internal.compiled import compiled
from dpftrl.errors import InvalidInput, TooFewClients, UnsafeState
from dpftrl.federated.pseudonyms import Hashed, Population, Pseudonyms
from dpftrl.noise import NoiseKey

Keys = NDArray[np.uint64]
Numbers = NDArray[np.int32]

NEVER: Final = -1
NO_ROW: Final = np.iinfo(np.int64).max
# New clients go into a small table, which is merged into the large one at this share of its size.
RECENT_SHARE: Final = 16
SMALLEST_RECENT: Final = 65_536


@final
class Exposure(NamedTuple):
    """How closely and how often clients were contacted, which determines the sensitivity.

    Attributes:
        min_gap: Fewest rounds from one contact of a client to its next; None if nobody returned.
        max_contacts: Number of contacts of the client that was contacted most often.
    """

    min_gap: int | None = None
    max_contacts: int = 0


@final
class Timers:
    """The contacts of a run, by pseudonym.

    Two clients whose 64-bit pseudonyms are equal share a timer. This can delay a client, but never
    allows a contact too early.

    Attributes:
        exposure: How closely and how often clients were contacted so far.
    """

    def __init__(self) -> None:
        self._old = _Table()
        self._recent = _Table()
        self.exposure = Exposure()

    def __len__(self) -> int:
        return len(self._old.keys) + len(self._recent.keys)

    def keys(self) -> Keys:
        """The pseudonyms of all clients that were contacted."""
        return np.concatenate([self._old.keys, self._recent.keys])

    def seen(self, keys: Keys) -> "Seen":
        """When and how often many clients were contacted; their keys rise, and none repeats."""
        seen = Seen.nothing(len(keys))
        for table in (self._old, self._recent):
            _look_up(table.keys, table.last, table.count, keys, seen.last, seen.often)
        return seen

    def last(self, keys: Keys) -> Numbers:
        """The round of each client's last contact, or `NEVER`."""
        return self._look(keys)[0].last

    def contacts(self, keys: Keys) -> Numbers:
        """The number of contacts of each client."""
        return self._look(keys)[0].often

    def entries(self) -> tuple[Numbers, Numbers]:
        """The round of the last contact, and the number of contacts, of every client so far."""
        tables = (self._old, self._recent)
        last = np.concatenate([table.last for table in tables])
        return last, np.concatenate([table.count for table in tables])

    def mark(self, keys: Keys, row: int) -> None:
        """Record that these clients, each given once, are contacted for a round."""
        seen, places = self._look(keys)
        exposure = self._exposure_with(seen, row)
        for table, at in places:
            table.last[at] = row
            table.count[at] += 1
        new = np.sort(keys[seen.last == NEVER])
        self._recent = self._recent.with_rows(new, np.int32(row), np.int32(1))
        self.exposure = exposure
        if len(self._recent.keys) > max(SMALLEST_RECENT, len(self._old.keys) // RECENT_SHARE):
            self._old, self._recent = self._merged(), _Table()

    def exposure_after(self, keys: Keys, row: int) -> Exposure:
        """The value of `exposure` after these clients are contacted for a round."""
        return self._exposure_with(self._look(keys)[0], row)

    def columns(self) -> tuple[Keys, Numbers, Numbers]:
        """Pseudonym, last round and number of contacts of every client, sorted by pseudonym.

        This changes nothing, so that an interruption does no harm.
        """
        merged = self._merged()
        return merged.keys, merged.last, merged.count

    def restore(self, keys: Keys, last: Numbers, count: Numbers, exposure: Exposure) -> None:
        """Take over the contacts of another object of this class."""
        self._old.keys, self._old.last, self._old.count = keys, last, count
        self.exposure = exposure

    def _merged(self) -> "_Table":
        return self._old.with_rows(self._recent.keys, self._recent.last, self._recent.count)

    def _exposure_with(self, seen: "Seen", row: int) -> Exposure:
        known = self.exposure
        returned = seen.last[seen.last != NEVER]
        gaps = [row - int(returned.max())] if len(returned) else []
        gaps += [] if known.min_gap is None else [known.min_gap]
        most = int(seen.often.max()) + 1 if len(seen.often) else 0
        return Exposure(min(gaps, default=None), max(known.max_contacts, most))

    def _look(self, keys: Keys) -> tuple["Seen", list[tuple["_Table", NDArray[np.intp]]]]:
        """The contacts of some clients, and each table with the positions of these clients."""
        seen, places = Seen.nothing(len(keys)), list[tuple["_Table", NDArray[np.intp]]]()
        for table in (self._old, self._recent):
            known, at = table.find(keys)
            seen.last[known], seen.often[known] = table.last[at], table.count[at]
            places.append((table, at))
        return seen, places


class Seen(NamedTuple):
    """When and how often some clients were contacted.

    Attributes:
        last: The round of each client's last contact, or `NEVER`.
        often: The number of contacts of each client.
    """

    last: Numbers
    often: Numbers

    @classmethod
    def nothing(cls, clients: int) -> "Seen":
        """No contact of so many clients."""
        return cls(np.full(clients, NEVER, np.int32), np.zeros(clients, np.int32))


@final
class _Table:
    """Three columns, sorted by the first: pseudonym, last round, number of contacts."""

    def __init__(self) -> None:
        self.keys: Keys = np.empty(0, np.uint64)
        self.last: Numbers = np.empty(0, np.int32)
        self.count: Numbers = np.empty(0, np.int32)

    def find(self, keys: Keys) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
        """Whether each key is in the table, and the positions of those that are."""
        at = np.searchsorted(self.keys, keys)
        known = at < len(self.keys)
        known[known] = self.keys[at[known]] == keys[known]
        return known, at[known]

    def with_rows(
        self, keys: Keys, last: Numbers | np.int32, count: Numbers | np.int32
    ) -> "_Table":
        """A table with more rows; their keys are sorted and not yet in this one."""
        at, table = np.searchsorted(self.keys, keys), _Table()
        table.keys = np.insert(self.keys, at, keys)
        table.last = np.insert(self.last, at, last)
        table.count = np.insert(self.count, at, count)
        return table


@numba.njit(**compiled)
def _look_up(
    table: Any, last: Any, count: Any, keys: Any, found_last: Any, found_count: Any
) -> None:
    """Copy `last` and `count` of the keys that are in a table; both are sorted, and no key repeats.

    This walks through both once: for millions of keys, that is faster than to search each of them.
    """
    i = 0
    for j in range(len(keys)):
        while i < len(table) and table[i] < keys[j]:
            i += 1
        if i < len(table) and table[i] == keys[j]:
            found_last[j] = last[i]
            found_count[j] = count[i]


def refuse_renamed(names: Sequence[str], pseudonyms: Pseudonyms, timers: Timers) -> None:
    """Refuse a client that was contacted before under another spelling of the same number.

    The files of a run contain hashes, not names. Therefore all other spellings that
    `refuse_unclear` accepts are hashed and looked up. This works after a restart too.

    Args:
        names: Names of the clients that are about to be contacted.
        pseudonyms: The hashes of the run.
        timers: The contacts of the run so far.
    """
    # A client that was contacted before was checked at its first contact.
    never = (timers.contacts(pseudonyms.keys(names)) == 0).tolist()
    pairs = [
        (name, other)
        for name, is_new in zip(names, never, strict=True)
        if is_new
        for other in other_spellings(name)
    ]
    keys = pseudonyms.keys([other for _, other in pairs])
    for position in np.flatnonzero(timers.contacts(keys) > 0)[:1]:
        name, other = pairs[int(position)]
        raise _two_spellings(name, f"{shown(other)}, who was contacted before,")


def refuse_unclear(by_key: Mapping[int, str], unclear: Mapping[int, str], timers: Timers) -> None:
    """Refuse names under which one client could be counted as two clients.

    Guarantees:
        Two different names that pass here and in `refuse_renamed`, in any rounds of one
        run, have different canonical forms (see `_internal.client_ids`). A name must be its own
        canonical form. The exceptions are digits with leading zeros (`007`), and names such as
        `1e5`, which may be a number with an exponent or hexadecimal digits. They are accepted
        because all such spellings of a number can be listed.

    A run that was created by version 0.1.0 may have contacted clients under other names. Those
    names are accepted in that run, because a client that gets a new name would lose its timer. The
    guarantee above does not cover such names.

    Args:
        by_key: The names of the available clients, by pseudonym.
        unclear: Those of them that may not be their own canonical form; see `Pseudonyms.unclear`.
        timers: The contacts of the run so far.
    """
    if not unclear:
        return
    contacted = timers.contacts(np.fromiter(unclear, np.uint64, len(unclear))) > 0
    all_names, by_form = set(by_key.values()), dict[str, str]()
    for name, is_known in zip(unclear.values(), contacted.tolist(), strict=True):
        form = canonical_id(name)
        if not is_known:
            _refuse_unusual(name, form)
        other = form if form in all_names else by_form.setdefault(form, name)
        if other != name:
            raise _two_spellings(name, shown(other))


def _refuse_unusual(name: str, form: str) -> None:
    if has_known_spellings(name):
        return
    if reason := why_unfit(name):
        raise InvalidInput(f"client name {shown(name)} {reason}")
    if name == form:
        return
    if has_known_spellings(form.removeprefix("-")):
        raise InvalidInput(
            f"client name {shown(name)} is a number, and one client could come under two spellings "
            f"of it; pass {shown(form)}, or put a letter in front of all names"
        )
    raise InvalidInput(
        f"client name {shown(name)} has white space or invisible characters at its ends, or is not "
        f"in Unicode form NFC, so that one client could come under two names; pass {shown(form)}"
    )


def _two_spellings(name: str, other: str) -> InvalidInput:
    return InvalidInput(
        f"client names {shown(name)} and {other} differ only in how they are written, so that one "
        "client could take part under both; pass one of them only, or begin a run in which all "
        "names start with a letter"
    )


@final
class Rules:
    """When a client may be contacted again.

    Guarantees:
        With timers in rounds, any two contacts of one client are at least `min_sep` rows apart.
        With either kind of timer, one client has at most `cap` contacts, and never two for the same
        row. A contact counts whether or not the client reported.

    Args:
        min_sep: Smallest difference between two rounds of one client, for timers in rounds.
        cap: Largest number of contacts of one client.
        timer_hours: Smallest number of hours between two contacts of one client; None for timers in
            rounds.
    """

    def __init__(self, min_sep: int, cap: int, timer_hours: float | None):
        self._min_sep = min_sep if timer_hours is None else 1
        self._cap = cap
        self._timer_hours = timer_hours
        self._times: list[float] = []
        self._latest = -np.inf
        self._set_back = 0.0  # hours by which the clock was set back

    def allowed(self, seen: Seen, row: int, now: float | None) -> NDArray[np.bool_]:
        """Which clients may be contacted now, given when and how often they were contacted."""
        rested = (seen.last == NEVER) | (seen.last <= row - self._min_sep)
        if self._timer_hours is not None:
            rested &= self._waited(seen.last, now)
        return rested & (seen.often < self._cap)

    def first_rows(self, seen: Seen) -> NDArray[np.int64]:
        """The first row for which each client may be contacted; `NO_ROW` if it is at its cap.

        Timers in hours are left out: they end without a further round.
        """
        last = seen.last.astype(np.int64)
        first = np.where(last == NEVER, 0, last + self._min_sep)
        return np.where(seen.often < self._cap, first, NO_ROW)

    def contact(self, row: int, now: float | None) -> None:
        """Record the time of a contact; a later attempt at the same round replaces the time."""
        if self._timer_hours is None:
            return
        if now is None or not now >= self._latest:
            raise UnsafeState(f"the time of a contact is missing, or before an earlier one: {now}")
        while len(self._times) <= row:
            self._times.append(-np.inf)
        self._times[row] = self._latest = now

    def times(self) -> NDArray[np.float64]:
        """The time of the last contact for each round; empty without timers by time."""
        return np.array(self._times, np.float64)

    def restore(self, times: NDArray[np.float64], latest: float | None) -> None:
        """Take over the times of another object of this class, and the time of its last contact."""
        self._times = times.tolist()
        self._latest = -np.inf if latest is None or self._timer_hours is None else latest

    def run_time(self, now: float | None) -> float | None:
        """The time on the clock of the run, in hours. This clock never goes back.

        A clock that is set back stands still for the run once, and goes on from there. So one jump
        forward does not keep a run from going on when the clock is corrected. Clients may return
        early after a jump; the guarantee covers that, because it is computed from the rounds
        between contacts.

        Raises:
            UnsafeState: Timers go by time, and there is none.
        """
        if self._timer_hours is None:
            return now
        if now is None or not np.isfinite(now):
            raise UnsafeState(f"timers by time need a clock, got {now}")
        self._set_back = max(self._set_back, self._latest - now)
        return max(now + self._set_back, self._latest)

    def _waited(self, last: NDArray[np.int32], now: float | None) -> NDArray[np.bool_]:
        assert now is not None  # `run_time` requires a time
        times = np.array([*self._times, -np.inf])  # `NEVER` is the index of the last entry
        return now - times[last] >= (self._timer_hours or 0.0)


def choose(eligible: Keys, size: int, seed: int, attempt: int) -> Keys:
    """Choose a cohort uniformly at random, from the seed and the attempt number alone.

    If there are too few clients, nobody is contacted: a smaller cohort would probably miss the
    report goal, and its clients would have used up a contact for nothing.
    """
    if len(eligible) < size:
        raise TooFewClients(
            f"{len(eligible):,} clients may take part now, and a round contacts {size:,}; the "
            "others are not available, were contacted too recently, or have reached their cap"
        )
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, attempt], np.uint64)))
    chosen = generator.choice(len(eligible), size, replace=False)
    return eligible[np.sort(chosen)]


class Chosen(NamedTuple):
    """A cohort that was chosen, but not contacted yet.

    Attributes:
        keys: Pseudonyms of the clients, in increasing order.
        names: Names of the clients by pseudonym, in the same order.
        exposure: The exposure of the run after the cohort is contacted.
        time: The time on the clock of the run, in hours; None without timers by time.
        eligible: Number of clients from which the cohort was chosen.
    """

    keys: Keys
    names: Mapping[int, str]
    exposure: Exposure
    time: float | None
    eligible: int


@final
class Shortage(NamedTuple):
    """Why a round cannot begin: fewer of the available clients may be contacted than it needs.

    Attributes:
        row: The round, by the number of rounds released before it.
        needed: Number of clients that a round contacts.
        available: Number of available clients.
        eligible: Number of available clients that may be contacted now.
        rows: Number of rounds that must pass until enough of the available clients may be
            contacted. 0: none, the timers in hours are what is missing. None: these clients are
            too few for any round.
        left: Number of clients of the planned population that may still be contacted for this
            round, available or not.
    """

    row: int
    needed: int
    available: int
    eligible: int
    rows: int | None
    left: int

    @property
    def is_standstill(self) -> bool:
        """Whether the available clients would be enough, but only for a later round."""
        return bool(self.rows)

    @property
    def is_permanent(self) -> bool:
        """Whether no client of the planned population could end the standstill."""
        return self.is_standstill and self.left < self.needed

    def __str__(self) -> str:
        text = (
            f"round {self.row + 1} contacts {self.needed:,} clients, and {self.eligible:,} of the "
            f"{self.available:,} available clients may be contacted"
        )
        if not self.is_standstill:
            return f"{text} now; wait for more clients, or until their timers end"
        others = (
            "and the planned population has no others"
            if self.is_permanent
            else f"and at most {self.left:,} of the planned population may be"
        )
        return (
            f"{text}: the others were contacted for this round already, or too few rounds before "
            f"it, {others}; register more clients, or close {self.rows:,} round(s) as rounds in "
            "which nobody took part (Server.close_empty_round; on Flower, "
            "DpFtrl(close_empty_rounds=True)), which costs rounds and no privacy"
        )


@final
class History(NamedTuple):
    """All that the contacts so far come to.

    Attributes:
        keys: Pseudonyms of all clients that were contacted, in rising order.
        last: The round of the last contact of each.
        often: The number of contacts of each.
        times: The time of the last contact for each round; empty without timers by time.
        exposure: How closely and how often clients were contacted.
    """

    keys: Keys
    last: Numbers
    often: Numbers
    times: NDArray[np.float64]
    exposure: Exposure


@final
class Eligibility:
    """Decides who may take part in a run: pseudonyms, timers and rules together.

    Args:
        key: The noise key of the run, from which pseudonyms are derived.
        rules: When a client may be contacted again.
        size: Number of clients that a round contacts.
        seed: Seed of the choice of cohorts.
        population: Number of clients of the plan.
    """

    def __init__(self, key: NoiseKey, rules: Rules, size: int, seed: int, population: int):
        self._population = population
        self.pseudonyms = Pseudonyms(key)
        self.timers = Timers()
        self._rules = rules
        self._size = size
        self._seed = seed

    def population(self, names: Iterable[str], *, check: bool = True) -> Population:
        """Hash the names of clients.

        Args:
            names: The names.
            check: Whether to refuse names under which one client could be counted as two.

        Raises:
            InvalidInput: A name is not a text, or could be another spelling of another name.
        """
        kept = tuple(names)
        hashed = self.pseudonyms.hashed(kept)
        population = Population(kept, hashed.keys, self)
        if check and len(hashed.unclear):
            self._refuse_unclear(kept, hashed, population)
        return population

    def _refuse_unclear(self, names: Sequence[str], hashed: Hashed, population: Population) -> None:
        """Call `refuse_unclear` for all names that it could refuse; often these are few."""
        forms, keys = hashed.forms, hashed.keys[hashed.unclear]
        order = np.argsort(forms)
        in_order = forms[order]
        same = np.flatnonzero(in_order[1:] == in_order[:-1])
        pairs = in_order[same[keys[order[same]] != keys[order[same + 1]]]]
        as_names = population.names_of(in_order[in_order != keys[order]])
        twice = np.union1d(pairs, np.fromiter(as_names, np.uint64))
        if not len(twice) and not len(hashed.unusual):
            return
        suspects = np.union1d(hashed.unclear[np.isin(forms, twice)], hashed.unusual).tolist()
        unclear = {int(hashed.keys[i]): names[i] for i in map(int, suspects)}
        refuse_unclear({**as_names, **unclear}, unclear, self.timers)

    def choose(self, population: Population, row: int, attempt: int, now: float | None) -> Chosen:
        """Choose the cohort of a round among available clients.

        Raises:
            InvalidInput: A client was contacted before under another spelling of its name.
            TooFewClients: Too few clients may be contacted now.
        """
        time = self._rules.run_time(now)
        seen = self.timers.seen(population.keys)
        allowed = self._rules.allowed(seen, row, time)
        if population.available is not None:
            allowed &= population.available
        eligible = population.keys[allowed]
        chosen = choose(eligible, self._size, self._seed, attempt)
        names = population.names_of(chosen)
        # If all clients that were contacted before are in this population, in which no client has
        # two names, then nobody comes under a second name now.
        if np.count_nonzero(seen.often) < len(self.timers):
            refuse_renamed(tuple(names.values()), self.pseudonyms, self.timers)
        exposure = self.timers.exposure_after(chosen, row)
        return Chosen(chosen, names, exposure, time, len(eligible))

    def shortage(self, population: Population, row: int, now: float | None) -> Shortage | None:
        """Why `choose` would refuse these clients; None if they are enough."""
        available = slice(None) if population.available is None else population.available
        keys = population.keys[available]
        seen = self.timers.seen(keys)
        eligible = int(self._rules.allowed(seen, row, self._rules.run_time(now)).sum())
        if eligible >= self._size:
            return None
        first = np.sort(self._rules.first_rows(seen))
        first = first[first != NO_ROW]
        rows = max(0, int(first[self._size - 1]) - row) if len(first) >= self._size else None
        contacted = Seen(*self.timers.entries())
        blocked = int((self._rules.first_rows(contacted) > row).sum())
        fleet = len(self.timers) + int((seen.often == 0).sum())
        left = max(self._population, fleet) - blocked
        return Shortage(row, self._size, len(keys), eligible, rows, left)

    def contact(self, keys: Keys, row: int, now: float | None) -> None:
        """Start the timers of clients that are contacted for a round."""
        self._rules.contact(row, now)
        self.timers.mark(keys, row)

    def history(self) -> History:
        """All that `restore` needs to go on from here."""
        return History(*self.timers.columns(), self._rules.times(), self.timers.exposure)

    def restore(self, history: History, clock: float | None) -> None:
        """Start from the contacts of an earlier process.

        Args:
            history: What `history` returned there.
            clock: The time of the last contact, in hours; None without timers by time.
        """
        self.timers.restore(history.keys, history.last, history.often, history.exposure)
        self._rules.restore(history.times, clock)
