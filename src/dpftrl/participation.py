"""Who may take part, and when: the sets of rounds that one client can appear in.

Rounds count from 0. A *pattern* is the increasing tuple of rounds in which one client takes part; a
participation is the set of all patterns that are allowed, and sensitivity is a maximum over it.
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
UNCAPPED = sys.maxsize
MOST_ROUNDS = 10**18


@dataclass(frozen=True)
class Participation(ABC):
    """Patterns within `rounds` rounds whose neighbours are at least `min_sep` rounds apart.

    Attributes:
        rounds: Number of rounds (the paper's n).
        min_sep: Smallest difference between two rounds of one client (the paper's b). 1 allows
            every round; above `rounds` means once.
        max_participations: Largest number of rounds of one client (the paper's k). A cap above what
            `rounds` and `min_sep` allow changes nothing, so it is stored as ceil(rounds / min_sep).
        observed: Whether this was read from a log after the run. The mechanism of a run was chosen
            before it, so that no mechanism is built for an observed participation.
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
        """Every non-empty pattern; use `pattern_count` first to learn how many there are."""

    @abstractmethod
    def pattern_count(self) -> int:
        """How many patterns there are, without listing them."""

    def earliest(self) -> Pattern:
        """The pattern 0, b, 2b, ...: as early and as often as possible."""
        return tuple(range(0, self.max_participations * self.min_sep, self.min_sep))


@final
@dataclass(frozen=True)
class MinSep(Participation):
    """Any two rounds of one client differ by at least `min_sep`, and there are at most so many.

    >>> MinSep(rounds=2052, min_sep=342)
    MinSep(rounds=2052, min_sep=342, max_participations=6)
    >>> list(MinSep(rounds=3, min_sep=2).patterns())
    [(0,), (0, 2), (1,), (2,)]
    """

    @classmethod
    def from_rounds_between(
        cls, rounds: int, rounds_between: int, max_participations: int = UNCAPPED
    ) -> Self:
        """Count the rounds strictly *between* two participations, as production tables do.

        No round between means every round, so `min_sep` is one more than `rounds_between`.

        >>> MinSep.from_rounds_between(rounds=2350, rounds_between=437).min_sep
        438
        """
        between = whole_number("rounds_between", rounds_between, at_least=0)
        return cls(rounds, between + 1, max_participations)

    @classmethod
    def once(cls, rounds: int) -> Self:
        """Each client takes part in at most one round."""
        return cls(rounds, min_sep=rounds, max_participations=1)

    def patterns(self) -> Iterator[Pattern]:
        """Every non-empty pattern, by depth-first extension."""
        return self._extensions(())

    def _extensions(self, pattern: Pattern) -> Iterator[Pattern]:
        earliest = pattern[-1] + self.min_sep if pattern else 0
        for following in range(earliest, self.rounds):
            extended = (*pattern, following)
            yield extended
            if len(extended) < self.max_participations:
                yield from self._extensions(extended)

    def pattern_count(self) -> int:
        """Choosing j rounds with gaps of b is choosing j of n - (j-1)(b-1) without any."""
        return sum(
            math.comb(self.rounds - (chosen - 1) * (self.min_sep - 1), chosen)
            for chosen in range(1, self.max_participations + 1)
        )


@final
@dataclass(frozen=True)
class FixedEpochs(Participation):
    """A client that starts in round i comes back in exactly i + b, i + 2b, ... until the cap.

    >>> list(FixedEpochs(rounds=5, min_sep=2).patterns())
    [(0, 2, 4), (1, 3)]
    """

    def __str__(self) -> str:
        return f"{super().__str__()}, exactly min-sep apart"

    def patterns(self) -> Iterator[Pattern]:
        """One pattern a starting round (under a cap, a client may start in a later epoch)."""
        for start in range(self.pattern_count()):
            whole = range(start, self.rounds, self.min_sep)
            yield tuple(whole[: self.max_participations])

    def pattern_count(self) -> int:
        """One for each start whose pattern no earlier start contains."""
        full = self.rounds - (self.max_participations - 1) * self.min_sep
        return max(full, min(self.min_sep, self.rounds))
