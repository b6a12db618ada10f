"""Eligibility: which clients may take part in the next round, and which of them are chosen.

`Pseudonyms` turns names into keyed hashes. `Timers` stores when each client was last contacted and
how often, in 16 bytes per client. `Rules` decides who may be contacted again. The function `choose`
draws the cohort. `Eligibility` combines these parts, and refuses names under which one client could
appear twice.
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.client_ids import (
    canonical_id,
    has_known_spellings,
    is_plain_id,
    other_spellings,
    shown,
    why_unfit,
)
from dpftrl.errors import InvalidInput, TooFewClients, UnsafeState
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

    def last(self, keys: Keys) -> Numbers:
        """The round of each client's last contact, or `NEVER`."""
        return self._look(keys).last

    def contacts(self, keys: Keys) -> Numbers:
        """The number of contacts of each client."""
        return self._look(keys).often

    def entries(self) -> tuple[Numbers, Numbers]:
        """The round of the last contact, and the number of contacts, of every client so far."""
        tables = (self._old, self._recent)
        last = np.concatenate([table.last for table in tables])
        return last, np.concatenate([table.count for table in tables])

    def mark(self, keys: Keys, row: int) -> None:
        """Record that these clients, each given once, are contacted for a round."""
        seen = self._look(keys)
        exposure = self._exposure_with(seen, row)
        for table, at in seen.places:
            table.last[at] = row
            table.count[at] += 1
        self._recent.insert(np.sort(keys[seen.last == NEVER]), np.int32(row), np.int32(1))
        self.exposure = exposure
        if len(self._recent.keys) > max(SMALLEST_RECENT, len(self._old.keys) // RECENT_SHARE):
            self._old.insert(self._recent.keys, self._recent.last, self._recent.count)
            self._recent = _Table()

    def exposure_after(self, keys: Keys, row: int) -> Exposure:
        """The value of `exposure` after these clients are contacted for a round."""
        return self._exposure_with(self._look(keys), row)

    def _exposure_with(self, seen: "_Seen", row: int) -> Exposure:
        known = self.exposure
        returned = seen.last[seen.last != NEVER]
        gaps = [row - int(returned.max())] if len(returned) else []
        gaps += [] if known.min_gap is None else [known.min_gap]
        most = int(seen.often.max()) + 1 if len(seen.often) else 0
        return Exposure(min(gaps, default=None), max(known.max_contacts, most))

    def _look(self, keys: Keys) -> "_Seen":
        seen = _Seen(np.full(len(keys), NEVER, np.int32), np.zeros(len(keys), np.int32), [])
        for table in (self._old, self._recent):
            known, at = table.find(keys)
            seen.last[known], seen.often[known] = table.last[at], table.count[at]
            seen.places.append((table, at))
        return seen


class _Seen(NamedTuple):
    """The entries of some clients in the tables.

    Attributes:
        last: The round of each client's last contact, or `NEVER`.
        often: The number of contacts of each client.
        places: Each table with the positions of these clients in it.
    """

    last: Numbers
    often: Numbers
    places: list[tuple["_Table", NDArray[np.intp]]]


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

    def insert(self, keys: Keys, last: Numbers | np.int32, count: Numbers | np.int32) -> None:
        """Add rows; their keys are sorted and not yet in the table."""
        at = np.searchsorted(self.keys, keys)
        self.keys = np.insert(self.keys, at, keys)
        self.last = np.insert(self.last, at, last)
        self.count = np.insert(self.count, at, count)


# Pseudonyms start with a letter, so that no program takes them for numbers.
PREFIX: Final = "c"
# Largest number of names that are cached with their pseudonyms.
MOST_REMEMBERED: Final = 1_000_000


@final
class Pseudonyms:
    """Keyed 64-bit hashes of client names, which only the holder of the run's key can compute."""

    def __init__(self, key: NoiseKey):
        self._key = key.derive(b"pseudonyms")
        self._known: dict[str, int] = {}
        # Pseudonyms of names that may be another spelling of another name: mostly none. A name is
        # checked when it is hashed, so that later rounds need not check all available clients.
        self._not_plain: set[int] = set()

    def __repr__(self) -> str:
        return "Pseudonyms(secret)"

    def keys(self, names: Sequence[str]) -> Keys:
        """The pseudonym of each name, as a number."""
        return np.fromiter((self.key(name) for name in names), np.uint64, len(names))

    def key(self, name: str) -> int:
        """The pseudonym of a name, as a number."""
        pseudonym = self._known.get(name) if type(name) is str else None
        if pseudonym is None:
            pseudonym = self._hash(name)
            if not is_plain_id(name):
                self._not_plain.add(pseudonym)
            if len(self._known) < MOST_REMEMBERED:
                self._known[name] = pseudonym
        return pseudonym

    def _hash(self, name: str) -> int:
        digest = blake2b(_content(name), digest_size=8, key=self._key.secret_bytes()).digest()
        return int.from_bytes(digest, "big")

    def unclear(self, by_key: Mapping[int, str]) -> dict[int, str]:
        """Of names by pseudonym, those that may not be their own canonical form.

        Args:
            by_key: Names by the pseudonyms that `key` has returned for them.
        """
        if not self._not_plain:
            return {}
        return {key: name for key, name in by_key.items() if key in self._not_plain}

    def refuse_renamed(self, names: Sequence[str], timers: Timers) -> None:
        """Refuse a client that was contacted before under another spelling of the same number.

        The files of a run contain hashes, not names. Therefore all other spellings that
        `refuse_unclear` accepts are hashed and looked up. This works after a restart too.

        Args:
            names: Names of the clients that are about to be contacted.
            timers: The contacts of the run so far.
        """
        # A client that was contacted before was checked at its first contact.
        never = (timers.contacts(self.keys(names)) == 0).tolist()
        pairs = [
            (name, other)
            for name, is_new in zip(names, never, strict=True)
            if is_new
            for other in other_spellings(name)
        ]
        keys = np.fromiter((self._hash(other) for _, other in pairs), np.uint64, len(pairs))
        for position in np.flatnonzero(timers.contacts(keys) > 0)[:1]:
            name, other = pairs[int(position)]
            raise _two_spellings(name, f"{shown(other)}, who was contacted before,")


def refuse_unclear(by_key: Mapping[int, str], unclear: Mapping[int, str], timers: Timers) -> None:
    """Refuse names under which one client could be counted as two clients.

    Guarantees:
        Two different names that pass here and in `Pseudonyms.refuse_renamed`, in any rounds of one
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


def _content(name: str) -> bytes:
    if type(name) is not str or not name:
        raise InvalidInput(f"a client's name is a text that is not empty, got {name!r:.60}")
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"a client's name must be valid Unicode, got {name!r:.60}") from None


def written(key: int) -> str:
    """A pseudonym as text, as it is written to files."""
    return f"{PREFIX}{key:016x}"


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

    def eligible(self, timers: Timers, keys: Keys, row: int, now: float | None) -> Keys:
        """The pseudonyms of the clients that may be contacted now, in increasing order."""
        unique = np.unique(keys)
        may = self.first_rows(timers, unique) <= row
        if self._timer_hours is not None:
            may &= self._waited(timers.last(unique), now)
        return unique[may]

    def first_rows(self, timers: Timers, keys: Keys) -> NDArray[np.int64]:
        """The first row for which each client may be contacted; `NO_ROW` if it is at its cap.

        Timers in hours are left out: they end without a further round.
        """
        last = timers.last(keys).astype(np.int64)
        first = np.where(last == NEVER, 0, last + self._min_sep)
        return np.where(timers.contacts(keys) < self._cap, first, NO_ROW)

    def contact(self, row: int, now: float | None) -> None:
        """Record the time of a contact; a later attempt at the same round replaces the time."""
        if self._timer_hours is None:
            return
        if now is None or not now >= self._latest:
            raise UnsafeState(f"the time of a contact is missing, or before an earlier one: {now}")
        while len(self._times) <= row:
            self._times.append(-np.inf)
        self._times[row] = self._latest = now

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
        names: Names of the clients, in the same order.
        exposure: The exposure of the run after the cohort is contacted.
        time: The time on the clock of the run, in hours; None without timers by time.
        eligible: Number of clients from which the cohort was chosen.
    """

    keys: Keys
    names: tuple[str, ...]
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

    def by_key(self, names: Sequence[str]) -> dict[int, str]:
        """The names by pseudonym."""
        return {self.pseudonyms.key(name): name for name in names}

    def choose(
        self, by_key: Mapping[int, str], row: int, attempt: int, now: float | None
    ) -> Chosen:
        """Choose the cohort of a round among available clients, given by pseudonym.

        Raises:
            InvalidInput: A name could be another spelling of another client's name.
            TooFewClients: Too few clients may be contacted now.
        """
        refuse_unclear(by_key, self.pseudonyms.unclear(by_key), self.timers)
        keys = np.fromiter(by_key, np.uint64, len(by_key))
        time = self._rules.run_time(now)
        eligible = self._rules.eligible(self.timers, keys, row, time)
        chosen = choose(eligible, self._size, self._seed, attempt)
        names = tuple(by_key[key] for key in chosen.tolist())
        self.pseudonyms.refuse_renamed(names, self.timers)
        exposure = self.timers.exposure_after(chosen, row)
        return Chosen(chosen, names, exposure, time, len(eligible))

    def shortage(self, by_key: Mapping[int, str], row: int, now: float | None) -> Shortage | None:
        """Why `choose` would refuse these clients; None if they are enough."""
        keys = np.fromiter(by_key, np.uint64, len(by_key))
        eligible = len(self._rules.eligible(self.timers, keys, row, self._rules.run_time(now)))
        if eligible >= self._size:
            return None
        first = np.sort(self._rules.first_rows(self.timers, keys))
        first = first[first != NO_ROW]
        rows = max(0, int(first[self._size - 1]) - row) if len(first) >= self._size else None
        contacted = self.timers.keys()
        blocked = int((self._rules.first_rows(self.timers, contacted) > row).sum())
        fleet = len(contacted) + int((self.timers.contacts(keys) == 0).sum())
        left = max(self._population, fleet) - blocked
        return Shortage(row, self._size, len(keys), eligible, rows, left)

    def contact(self, keys: Keys, row: int, now: float | None) -> None:
        """Start the timers of clients that are contacted for a round."""
        self._rules.contact(row, now)
        self.timers.mark(keys, row)
