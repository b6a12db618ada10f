"""Forecast of the clients that may be contacted in the next rounds, from the timers of a run.

With timers in rounds, the forecast for the next `min_sep` rounds is exact if every round contacts
the same number of clients: who is contacted now does not return in that time. Later rounds may
depend on who was chosen, because some clients are nearer to their cap than others. There, expected
numbers are used, since cohorts are drawn uniformly.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int32]
Classes = NDArray[np.float64]

MOST_ROUNDS: Final = 5_000  # rounds that a forecast looks ahead
ROUNDING: Final = 1e-6  # for sums and quotients of numbers that are not whole


@final
@dataclass(frozen=True)
class Rest:
    """How long a client rests after a contact.

    Attributes:
        rounds: Number of rounds, for timers in rounds; 1 with timers in hours.
        hours: Number of hours; None for timers in rounds.
        times: For timers in hours, the time of each round's last contact, in hours.
        now: For timers in hours, the time of the next round, in hours.
        hours_per_round: For timers in hours, the time from one round to the next; None if that is
            not known.
    """

    rounds: int
    hours: float | None = None
    times: Sequence[float] = ()
    now: float = 0.0
    hours_per_round: float | None = None

    def returning(self, contacted_in: Numbers, next_round: int) -> NDArray[np.float64]:
        """The number of rounds after the next in which clients may be contacted again.

        Args:
            contacted_in: The rounds of their last contacts.
            next_round: The number of the next round.

        Returns:
            0 or less for those that may be contacted in the next round; infinity if it is not known
            when later rounds are.
        """
        if self.hours is None:
            return contacted_in.astype(np.float64) + self.rounds - next_round
        hours_left = np.asarray(self.times, np.float64)[contacted_in] + self.hours - self.now
        if self.hours_per_round is None:
            return np.where(hours_left <= 0, 0.0, np.inf)
        rounds_left = np.ceil(hours_left / self.hours_per_round - ROUNDING)
        return np.maximum(rounds_left, contacted_in + 1.0 - next_round)

    @property
    def rounds_of_new_contacts(self) -> float:
        """The rounds that somebody rests who is contacted in the next round or later."""
        if self.hours is None:
            return self.rounds
        if self.hours_per_round is None:
            return np.inf
        return max(1.0, np.ceil(self.hours / self.hours_per_round - ROUNDING))


@final
@dataclass(frozen=True)
class Contacts:
    """The contacts of a run so far.

    Attributes:
        last: The round of the last contact of each client.
        count: The number of contacts of each client.
        cap: The largest number of contacts of one client.
        next_round: The number of the next round.
        rest: How long a client rests.
    """

    last: Numbers
    count: Numbers
    cap: int
    next_round: int
    rest: Rest

    def rested(self) -> int:
        """The number of these clients that may be contacted in the next round."""
        back = self.rest.returning(self.last, self.next_round) <= 0
        return int(np.count_nonzero(back & (self.count < self.cap)))

    def eligible(self, fresh: int, per_round: float, needed: int, rounds: int) -> list[float]:
        """Clients that may be contacted in each of the next rounds, up to the first stand-still.

        Args:
            fresh: Number of clients that were never contacted.
            per_round: Clients that each round contacts, with its abandoned attempts.
            needed: Clients that one attempt contacts: with fewer, a round cannot begin.
            rounds: Number of rounds to look ahead.

        Returns:
            One number per round. If the last one is below `needed`, the run stands still there.
        """
        rounds = min(rounds, MOST_ROUNDS)
        rest = self.rest.rounds_of_new_contacts
        # Clients by the contacts that they have left: 1, 2, and so on. Nobody can have more than
        # `most` contacts in these rounds, so all who have more left are in the last class.
        most = 0 if rest == np.inf else -(-rounds // int(rest))
        returning: dict[int, Classes] = {}

        def classes_in(ahead: int) -> Classes:
            return returning.setdefault(ahead, np.zeros(most + 1))

        back = np.maximum(self.rest.returning(self.last, self.next_round), 0.0)
        left = np.minimum(self.cap - self.count.astype(np.int64), most + 1)
        soon = (left > 0) & (back < rounds)
        groups, numbers = np.unique(
            back[soon].astype(np.int64) * (most + 1) + left[soon] - 1, return_counts=True
        )
        for group, number in zip(groups.tolist(), numbers.tolist(), strict=True):
            ahead, contacts_left = divmod(group, most + 1)
            classes_in(ahead)[contacts_left] += number
        classes_in(0)[min(self.cap, most + 1) - 1] += fresh
        pool, found = np.zeros(most + 1), list[float]()
        for ahead in range(rounds):
            pool = pool + returning.pop(ahead, 0.0)
            found.append(float(pool.sum()))
            if not found[-1] >= needed - ROUNDING:
                break
            taken = pool * min(1.0, per_round / found[-1])
            pool = pool - taken
            if ahead + rest < rounds:
                classes_in(int(ahead + rest))[:-1] += taken[1:]  # with one contact less
        return found
