"""When each client was last contacted, and how often: 16 bytes a client."""

from typing import Final, final

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
        found = np.full(len(keys), NEVER, np.int32)
        for table in (self._old, self._recent):
            known, at = table.find(keys)
            found[known] = table.last[at]
        return found

    def contacts(self, keys: Keys) -> Numbers:
        """How often each client was contacted."""
        found = np.zeros(len(keys), np.int32)
        for table in (self._old, self._recent):
            known, at = table.find(keys)
            found[known] = table.count[at]
        return found

    def mark(self, keys: Keys, row: int) -> None:
        """All these clients, no two alike, are contacted for a row."""
        self.least_gap = self.gap_with(keys, row)
        self.most_contacts = self.most_with(keys)
        is_new = np.ones(len(keys), bool)
        for table in (self._old, self._recent):
            known, at = table.find(keys)
            table.last[at] = row
            table.count[at] += 1
            is_new[known] = False
        self._recent.insert(np.sort(keys[is_new]), np.int32(row), np.int32(1))
        if len(self._recent.keys) > max(SMALLEST_RECENT, len(self._old.keys) // RECENT_SHARE):
            self._old.insert(self._recent.keys, self._recent.last, self._recent.count)
            self._recent = _Table()

    def gap_with(self, keys: Keys, row: int) -> int | None:
        """What `least_gap` will be once these clients are contacted for a row."""
        last = self.last(keys)
        gaps = [int(row - last[last != NEVER].max())] if (last != NEVER).any() else []
        return min([*gaps, *([] if self.least_gap is None else [self.least_gap])], default=None)

    def most_with(self, keys: Keys) -> int:
        """What `most_contacts` will be once these clients are contacted."""
        return max(self.most_contacts, int(self.contacts(keys).max(initial=0)) + (len(keys) > 0))


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
