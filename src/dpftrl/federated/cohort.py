"""Who is asked to take part in the next round."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import TooFewClients, UnsafeState
from dpftrl.federated.timers import NEVER, Timers

Keys = NDArray[np.uint64]


@final
class Rules:
    """When a client may take part again.

    Guarantees:
        With round timers, any two contacts of one client are at least `min_sep` rows apart; with
        either kind there are at most `cap` of them, and never two for one row. A contact counts
        whether or not a report followed.

    Args:
        min_sep: Rows from one contact to the next, where rounds are what clients wait for.
        cap: Most contacts of one client.
        timer_hours: Hours from one contact to the next, where time is what they wait for.
    """

    def __init__(self, min_sep: int, cap: int, timer_hours: float | None):
        self._min_sep = min_sep if timer_hours is None else 1
        self._cap = cap
        self._timer_hours = timer_hours
        self._times: list[float] = []

    def eligible(self, timers: Timers, keys: Keys, row: int, now: float | None) -> Keys:
        """Those who may be asked, in rising order, each once."""
        unique = np.unique(keys)
        last = timers.last(unique)
        rested = (last == NEVER) | (row - last.astype(np.int64) >= self._min_sep)
        if self._timer_hours is not None:
            rested &= self._waited(last, now)
        return unique[rested & (timers.contacts(unique) < self._cap)]

    def contact(self, row: int, now: float | None) -> None:
        """Clients are contacted for a row at a time; later of two for the same row counts."""
        if self._timer_hours is None:
            return
        while len(self._times) <= row:
            self._times.append(-np.inf)
        if now is None or not now >= max(self._times):
            raise UnsafeState(f"the clock went backwards, or says nothing: {now}")
        self._times[row] = now

    def _waited(self, last: NDArray[np.int32], now: float | None) -> NDArray[np.bool_]:
        if now is None or not np.isfinite(now):
            raise UnsafeState(f"timers by time need a clock, got {now}")
        times = np.array([*self._times, -np.inf])  # the last entry stands for NEVER
        return now - times[last] >= (self._timer_hours or 0.0)


def choose(eligible: Keys, size: int, seed: int, attempt: int) -> Keys:
    """A uniform choice that depends on the seed and the number of the attempt alone.

    Nobody is contacted unless all can be: a round that asks fewer is likely to come to nothing, and
    whoever was asked has lost a turn.
    """
    if len(eligible) < size:
        raise TooFewClients(
            f"{len(eligible):,} clients may take part now, and a round asks {size:,}; the others "
            "are away, still waiting for their turn, or have had all their turns"
        )
    generator = np.random.Generator(np.random.Philox(key=np.array([seed, attempt], np.uint64)))
    chosen = generator.choice(len(eligible), size, replace=False)
    return eligible[np.sort(chosen)]
