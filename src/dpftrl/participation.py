"""Participation: the sets of rounds in which one client may take part.

Rounds count from 0. A *pattern* is the increasing tuple of rounds in which one client takes part. A
participation is the set of all allowed patterns. Sensitivity is a maximum over this set.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Self, final

from dpftrl._internal.checks import whole_number
from dpftrl.errors import InvalidInput

Pattern = tuple[int, ...]
# No limit on the number of participations.
UNCAPPED = sys.maxsize
# Twice a round number, plus 1, must fit into 64 bits (see `accounting.logs`).
MOST_ROUNDS = 10**18


@dataclass(frozen=True)
class Participation(ABC):
    """A set of patterns in which two rounds of one client are at least `min_sep` rounds apart.

    Attributes:
        rounds: Number of rounds (the paper's n).
        min_sep: Smallest difference between two rounds of one client (the paper's b). With 1, a
            client may take part in every round. With `rounds` or more, it takes part once.
        max_participations: Largest number of rounds of one client (the paper's k). A value above
            what `rounds` and `min_sep` allow is stored as ceil(rounds / min_sep).
        observed: Whether this was read from a log after the run. A run's mechanism was chosen
            before the run, so no mechanism is built for an observed participation.
    """

    rounds: int
    min_sep: int
    max_participations: int = UNCAPPED
    observed: bool = field(default=False, compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        rounds = whole_number("rounds", self.rounds)
        if rounds > MOST_ROUNDS:
            raise InvalidInput(f"rounds must be at most {MOST_ROUNDS:,}, got {rounds}")
        min_sep = whole_number("min_sep", self.min_sep)
        cap = whole_number("max_participations", self.max_participations)
        object.__setattr__(self, "rounds", rounds)
        object.__setattr__(self, "min_sep", min_sep)
        object.__setattr__(self, "max_participations", min(cap, -(-rounds // min_sep)))

    def __str__(self) -> str:
        return (
            f"{self.rounds:,} rounds, min-sep {self.min_sep:,}, "
            f"at most {self.max_participations:,} participation(s)"
        )

    @abstractmethod
    def patterns(self) -> Iterator[Pattern]:
        """Yield every non-empty pattern; there may be very many, see `pattern_count`."""

    @abstractmethod
    def pattern_count(self) -> int:
        """The number of patterns, computed without listing them."""

    def earliest(self) -> Pattern:
        """The pattern 0, b, 2b, ...: a client that takes part as early and as often as possible."""
        return tuple(range(0, self.max_participations * self.min_sep, self.min_sep))


@final
@dataclass(frozen=True)
class MinSep(Participation):
    """All patterns whose rounds differ by at least `min_sep`, with at most `max_participations`.

    >>> MinSep(rounds=2052, min_sep=342)
    MinSep(rounds=2052, min_sep=342, max_participations=6)
    >>> list(MinSep(rounds=3, min_sep=2).patterns())
    [(0,), (0, 2), (1,), (2,)]
    """

    @classmethod
    def from_rounds_between(
        cls, rounds: int, rounds_between: int, max_participations: int = UNCAPPED
    ) -> Self:
        """Create a participation from the number of rounds *between* two participations.

        Published tables of production runs state this number. `min_sep` is one more: with no round
        between, a client may take part in every round.

        >>> MinSep.from_rounds_between(rounds=2350, rounds_between=437).min_sep
        438
        """
        between = whole_number("rounds_between", rounds_between, at_least=0)
        return cls(rounds, between + 1, max_participations)

    @classmethod
    def once(cls, rounds: int) -> Self:
        """The participation in which each client takes part in at most one round."""
        return cls(rounds, min_sep=rounds, max_participations=1)

    def patterns(self) -> Iterator[Pattern]:
        """Yield every non-empty pattern, in lexicographic order."""
        return self._extensions(())

    def _extensions(self, pattern: Pattern) -> Iterator[Pattern]:
        """Yield every allowed pattern that starts with `pattern` and is longer."""
        earliest = pattern[-1] + self.min_sep if pattern else 0
        for following in range(earliest, self.rounds):
            extended = (*pattern, following)
            yield extended
            if len(extended) < self.max_participations:
                yield from self._extensions(extended)

    def pattern_count(self) -> int:
        """The number of patterns.

        Choosing j of n rounds with gaps of at least b is the same as choosing any j of
        n - (j-1)(b-1) rounds.
        """
        return sum(
            math.comb(self.rounds - (chosen - 1) * (self.min_sep - 1), chosen)
            for chosen in range(1, self.max_participations + 1)
        )


@final
@dataclass(frozen=True)
class FixedEpochs(Participation):
    """A client that starts in round i takes part in rounds i, i + b, i + 2b, ... and in no others.

    It stops after `max_participations` rounds or at the last round.

    >>> list(FixedEpochs(rounds=5, min_sep=2).patterns())
    [(0, 2, 4), (1, 3)]
    """

    def __str__(self) -> str:
        return f"{super().__str__()}, exactly min-sep apart"

    def patterns(self) -> Iterator[Pattern]:
        """Yield one pattern per starting round.

        If `max_participations` is below the number of epochs, a client may start in a later epoch.
        """
        for start in range(self.pattern_count()):
            every_epoch = range(start, self.rounds, self.min_sep)
            yield tuple(every_epoch[: self.max_participations])

    def pattern_count(self) -> int:
        """The number of starting rounds whose pattern is not part of an earlier one."""
        full = self.rounds - (self.max_participations - 1) * self.min_sep
        return max(full, min(self.min_sep, self.rounds))
