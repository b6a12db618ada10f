"""Participation: in which rounds one client may take part, or how a trainer draws its batches.

Two kinds of values describe it. A `Participation` states what the trainer only limits: which rounds
are possible for one client. A `Sampling` states what the trainer draws at random, in secret, which
makes the guarantee stronger ("amplification").

Rounds and steps count from 0. A *pattern* is the increasing tuple of rounds in which one client
takes part. A participation is the set of all allowed patterns. Sensitivity is a maximum over this
set.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal, Self, final

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


Adjacency = Literal["zero-out", "add-or-remove"]


@dataclass(frozen=True)
class Sampling(ABC):
    """How a trainer draws secret random batches from a data set, one batch per step.

    An observer who does not know the batches learns less, so that less noise gives the same
    guarantee. The batches must be drawn with a secret key (see `dpftrl.sampler`) and stay secret.
    Batches have random sizes, and some may be empty: divide sums by `batch_size`, never by the
    actual size.

    Attributes:
        dataset_size: Number of examples. It is a public number: of two neighboring data sets, it is
            the size of one, and both are sampled with it.
        batch_size: Expected number of examples per batch; for balls-in-bins, where it does not
            divide the data set, a batch is slightly smaller.
        steps: Number of steps.
        max_batch_size: Largest number of examples in a batch. Of a larger batch, examples chosen at
            random are left out, at a price in delta (`overflow_probability`). None for no limit.
    """

    dataset_size: int
    batch_size: int
    steps: int
    max_batch_size: int | None = field(default=None, kw_only=True)

    name: ClassVar[str]
    # How the guarantee is computed.
    accountant: ClassVar[Literal["privacy loss distribution", "certified Monte Carlo"]]
    # The neighboring relations that the guarantee holds for; the first one is stated.
    adjacencies: ClassVar[tuple[Adjacency, ...]]

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset_size", whole_number("dataset_size", self.dataset_size))
        object.__setattr__(self, "batch_size", whole_number("batch_size", self.batch_size))
        object.__setattr__(self, "steps", whole_number("steps", self.steps))
        if self.batch_size > self.dataset_size:
            raise InvalidInput(
                f"a batch of {self.batch_size:,} examples is larger than the data set, which has "
                f"{self.dataset_size:,}"
            )
        if max(self.dataset_size, self.steps) > MOST_ROUNDS:
            raise InvalidInput(
                f"dataset_size and steps must be at most {MOST_ROUNDS:,}, got "
                f"{self.dataset_size} and {self.steps}"
            )
        if self.max_batch_size is not None:
            object.__setattr__(
                self, "max_batch_size", whole_number("max_batch_size", self.max_batch_size)
            )
            if self.max_batch_size < self.batch_size:
                raise InvalidInput(
                    f"max_batch_size {self.max_batch_size:,} is below the expected batch size "
                    f"{self.batch_size:,}; about half of all batches would be cut"
                )

    @property
    def adjacency(self) -> Adjacency:
        """The neighboring relation for which guarantees are stated."""
        return self.adjacencies[0]

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in which every example is expected to take part about once."""
        return -(-self.dataset_size // self.batch_size)

    def as_json(self) -> dict[str, Any]:
        """The sampling as a JSON object; `sampling_from_json` reads it."""
        return {"sampling": self.name, **asdict(self)}

    def after(self, steps: int) -> Self:
        """The same sampling, for another number of steps: what a run that stopped early used."""
        return replace(self, steps=steps)

    @property
    def overflow_probability(self) -> float:
        """An upper bound on the probability that some batch exceeds `max_batch_size`."""
        if self.max_batch_size is None:
            return 0.0
        trials, probability, batches = self._batches()
        if self.max_batch_size >= trials:
            return 0.0
        from scipy.special import betainc  # here, because importing scipy is slow

        cap = self.max_batch_size
        one = float(betainc(cap + 1.0, float(trials - cap), probability))  # P(size > cap)
        # The margins are far larger than the rounding errors of scipy, and cover underflow.
        return min(1.0, batches * (one * (1 + 1e-6) + 1e-300))

    @abstractmethod
    def _batches(self) -> tuple[int, float, int]:
        """Batch sizes are binomial: the number of trials, their probability, and how many."""

    def __str__(self) -> str:
        cut = "" if self.max_batch_size is None else f" (at most {self.max_batch_size:,})"
        return (
            f"{self.steps:,} steps of about {self.batch_size:,}{cut} of {self.dataset_size:,} "
            f"examples, {self.name} sampling"
        )


@final
@dataclass(frozen=True)
class Poisson(Sampling):
    """Every example is in every batch with the same probability, independently.

    This is the sampling of DP-SGD. It amplifies independent noise only.

    >>> print(Poisson(dataset_size=50_000, batch_size=500, steps=1_000))
    1,000 steps of about 500 of 50,000 examples, poisson sampling
    """

    name = "poisson"
    accountant = "privacy loss distribution"
    adjacencies = ("zero-out", "add-or-remove")

    @property
    def probability(self) -> float:
        """The probability that an example is in a batch."""
        return self.batch_size / self.dataset_size

    def _batches(self) -> tuple[int, float, int]:
        return self.dataset_size, self.probability, self.steps


@final
@dataclass(frozen=True)
class CyclicPoisson(Sampling):
    """The data set is split into groups at random; the groups take turns with Poisson sampling.

    Step t draws from group t mod `groups` only. It amplifies strategies with at most `groups`
    bands: an example's two participations are then so far apart that their noise is independent.

    Attributes:
        groups: Number of groups, whose sizes differ by at most one.

    >>> CyclicPoisson(dataset_size=50_000, batch_size=500, steps=1_000, groups=8).probability
    0.08
    """

    groups: int = 1

    name = "cyclic-poisson"
    accountant = "privacy loss distribution"
    adjacencies = ("zero-out",)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "groups", whole_number("groups", self.groups))
        if self.batch_size * self.groups > self.dataset_size:
            raise InvalidInput(
                f"each of {self.groups:,} groups of {self.dataset_size:,} examples is smaller than "
                f"a batch of {self.batch_size:,}; use at most "
                f"{self.dataset_size // self.batch_size:,} groups"
            )

    @property
    def probability(self) -> float:
        """The probability that an example is in a batch of its group."""
        return self.batch_size * self.groups / self.dataset_size

    def _batches(self) -> tuple[int, float, int]:
        return -(-self.dataset_size // self.groups), self.probability, self.steps

    def __str__(self) -> str:
        return f"{super().__str__()} in {self.groups:,} group(s)"


@final
@dataclass(frozen=True)
class BallsInBins(Sampling):
    """Every example is put into one bin at random, once; the bins take turns.

    An example of bin i takes part in the steps i, i + bins, i + 2 bins, and so on: once per epoch.
    It amplifies every strategy without negative entries, such as a BLT (Choquette-Choo et al. 2024,
    arXiv 2410.06266).

    >>> BallsInBins(dataset_size=50_000, batch_size=500, steps=1_000).bins
    100
    """

    name = "balls-in-bins"
    accountant = "certified Monte Carlo"
    adjacencies = ("zero-out", "add-or-remove")

    @property
    def bins(self) -> int:
        """Number of bins: the steps of one epoch."""
        return self.steps_per_epoch

    def _batches(self) -> tuple[int, float, int]:
        return self.dataset_size, 1 / self.bins, min(self.bins, self.steps)


def sampling_from_json(content: Mapping[str, Any]) -> Sampling:
    """Read a sampling that `Sampling.as_json` wrote.

    Raises:
        InvalidInput: It is not the JSON object of a sampling.

    >>> sampling_from_json(BallsInBins(100, 10, 20).as_json())
    BallsInBins(dataset_size=100, batch_size=10, steps=20, max_batch_size=None)
    """
    fields = dict(content)
    name = fields.pop("sampling", None)
    kinds: dict[str, type[Sampling]] = {
        kind.name: kind for kind in (Poisson, CyclicPoisson, BallsInBins)
    }
    if not isinstance(name, str) or name not in kinds:
        raise InvalidInput(f"there is no sampling {name!r:.40}; there are {', '.join(kinds)}")
    try:
        return kinds[name](**fields)
    except TypeError:
        raise InvalidInput(
            f"these are not the numbers of {name} sampling: {', '.join(map(str, fields))}"
        ) from None
