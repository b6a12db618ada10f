"""When each client was last contacted, and how often: 16 bytes a client."""

from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
Numbers = NDArray[np.int32]

NEVER: Final = -1
# Recent clients are inserted into a small table; it joins the large one at this share of it.
RECENT_SHARE: Final = 16
SMALLEST_RECENT: Final = 65_536


@final
class Timers:
    """The contacts of a run, by pseudonym.

    Two clients whose 64-bit pseudonyms are equal share a timer: that delays one of them, and never
    lets anybody come too early.

    Attributes:
        least_gap: Fewest rounds from one contact of a client to its next; None if nobody returned.
        most_contacts: Contacts of the client that was contacted most often.
    """

    def __init__(self) -> None:
        self._old = _Table()
        self._recent = _Table()
        self.least_gap: int | None = None
        self.most_contacts = 0

    def __len__(self) -> int:
        return len(self._old.keys) + len(self._recent.keys)

    def last(self, keys: Keys) -> Numbers:
        """The row of each client's last contact, or `NEVER`."""
        return self._look(keys).last

    def contacts(self, keys: Keys) -> Numbers:
        """How often each client was contacted."""
        return self._look(keys).often

    def mark(self, keys: Keys, row: int) -> None:
        """All these clients, no two alike, are contacted for a row."""
        seen = self._look(keys)
        gap, most = self._with(seen, row)
        for table, at in seen.places:
            table.last[at] = row
            table.count[at] += 1
        self._recent.insert(np.sort(keys[seen.last == NEVER]), np.int32(row), np.int32(1))
        self.least_gap, self.most_contacts = gap, most
        if len(self._recent.keys) > max(SMALLEST_RECENT, len(self._old.keys) // RECENT_SHARE):
            self._old.insert(self._recent.keys, self._recent.last, self._recent.count)
            self._recent = _Table()

    def after(self, keys: Keys, row: int) -> tuple[int | None, int]:
        """What `least_gap` and `most_contacts` will be once these are contacted for a row."""
        return self._with(self._look(keys), row)

    def _with(self, seen: "_Seen", row: int) -> tuple[int | None, int]:
        returned = seen.last[seen.last != NEVER]
        gaps = [row - int(returned.max())] if len(returned) else []
        known = [] if self.least_gap is None else [self.least_gap]
        most = int(seen.often.max()) + 1 if len(seen.often) else 0
        return min([*gaps, *known], default=None), max(self.most_contacts, most)

    def _look(self, keys: Keys) -> "_Seen":
        seen = _Seen(np.full(len(keys), NEVER, np.int32), np.zeros(len(keys), np.int32), [])
        for table in (self._old, self._recent):
            known, at = table.find(keys)
            seen.last[known], seen.often[known] = table.last[at], table.count[at]
            seen.places.append((table, at))
        return seen


class _Seen(NamedTuple):
    """What is known of some clients, and where."""

    last: Numbers
    often: Numbers
    places: list[tuple["_Table", NDArray[np.intp]]]


@final
class _Table:
    """Three columns, sorted by the first."""

    def __init__(self) -> None:
        self.keys: Keys = np.empty(0, np.uint64)
        self.last: Numbers = np.empty(0, np.int32)
        self.count: Numbers = np.empty(0, np.int32)

    def find(self, keys: Keys) -> tuple[NDArray[np.bool_], NDArray[np.intp]]:
        """Which keys are here, and where."""
        at = np.searchsorted(self.keys, keys)
        known = at < len(self.keys)
        known[known] = self.keys[at[known]] == keys[known]
        return known, at[known]

    def insert(self, keys: Keys, last: Numbers | np.int32, count: Numbers | np.int32) -> None:
        """Add rows whose keys, sorted, are not here yet."""
        at = np.searchsorted(self.keys, keys)
        self.keys = np.insert(self.keys, at, keys)
        self.last = np.insert(self.last, at, last)
        self.count = np.insert(self.count, at, count)
