"""The private runs behind the model that a run started from, recomputed."""

import math
from functools import cached_property
from pathlib import Path
from typing import Final, final

from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.mechanisms import Mechanism
from dpftrl.verify.files import EarlierRunContent, StreamContent, Told, stream_mechanism
from dpftrl.verify.gaussian import MuRange
from dpftrl.verify.patterns import ROUNDING, Limits
from dpftrl.verify.sensitivity import Strategy
from dpftrl.verify.verdict import Check

UNRECORDED: Final = "not recorded"


@final
class EarlierRun:
    """One of them, as the sealed `run.json` describes it.

    Attributes:
        name: Its identity, where that was recorded.
        is_same_people: Whether it is composed; else the operator states that its people are others.
        stream: Its stream of noise.
        mechanism: What correlates the noise.
    """

    def __init__(self, content: EarlierRunContent, run_file: Path):
        self._content = content
        self.name = content.run or UNRECORDED
        self.is_same_people = content.people == "same"
        self.test_key = content.test_key
        self.stream: StreamContent = content.guarantee.stream
        self.mechanism: Mechanism = stream_mechanism(self.stream, run_file)

    def __repr__(self) -> str:
        return f"EarlierRun({self.name})"

    @cached_property
    def mu(self) -> MuRange:
        """Recomputed from its mechanism, its participation and its noise."""
        stream, said = self.stream, self.stream.participation
        is_possible = (
            said.rounds >= 1
            and said.min_sep >= 1
            and said.max_participations >= 1
            and 0 < stream.noise_multiplier < math.inf
        )
        if not is_possible:
            raise InvalidInput(f"run.json has an earlier run that cannot have been: {self.name}")
        limits = Limits(said.rounds, said.min_sep, said.max_participations)
        strategy = Strategy(self.mechanism, said.rounds)
        return strategy.mu_range(limits, stream.noise_multiplier, stream.buffers)

    def check(self) -> None:
        """Refuse one that states less than what follows."""
        stated = self._content.guarantee.mu
        if not stated >= self.mu.least * (1 - ROUNDING):
            raise UnsafeState(
                f"earlier run {self.name} is stated with mu {stated:.7g}, and {self.mu.least:.7g} "
                "follows from its mechanism"
            )


@final
class EarlierRuns:
    """All private runs behind the start model; those on the same people are composed.

    Attributes:
        composed: Those on the same people, first to last.
        others: Those on other people, as the operator states.
    """

    def __init__(self, told: Told, run_file: Path):
        self._told = told
        contents = [] if told.start is None else told.start.earlier
        every = [EarlierRun(content, run_file) for content in contents]
        self.composed = tuple(one for one in every if one.is_same_people)
        self.others = tuple(one for one in every if not one.is_same_people)

    def __repr__(self) -> str:
        return f"EarlierRuns({len(self.composed)} composed, {len(self.others)} not)"

    @property
    def test_key(self) -> bool:
        """Whether anybody can guess the noise key of one that is composed."""
        return any(one.test_key for one in self.composed)

    @property
    def is_v1(self) -> bool:
        """Whether one that is composed is of version 0.1."""
        return any(one.stream.buffers == "float32" for one in self.composed)

    @cached_property
    def mu(self) -> MuRange:
        """Of those that are composed, together."""
        together = MuRange(0.0, 0.0)
        for one in self.composed:
            together = together.composed_with(one.mu)
        return together

    def epsilon(self) -> float:
        """What they spent before the first round of this run, at its delta."""
        if not self.composed:
            return 0.0
        least, _ = self.mu.epsilons(self._told.delta, self.is_v1)
        return least

    def hypotheses(self) -> set[str]:
        """What the guarantee of the run must name because of its start model."""
        if self._told.start is None:
            return set()
        return {
            *(["earlier runs"] if self.composed else []),
            *(["other people"] if self.others else []),
            *(["start model"] if not (self.composed or self.others) else []),
        }

    def check(self) -> str | Check:
        """What the run started from, as its sealed run.json says."""
        start = self._told.start
        if start is None and self._told.version == 1:
            return "not recorded: version 1 of run.json does not say what the run started from"
        if start is None:
            return "no model file: the arrays were handed over when the run began"
        for one in (*self.composed, *self.others):
            one.check()
        warnings = list[str]()
        if not start.earlier:
            warnings.append(
                f"its origin is not known to dpftrl (SHA-256 {start.sha256}): claimed public"
            )
        if self.test_key:
            warnings.append("NOT PRIVATE: anybody can guess the noise key of an earlier run")
        if self.others:
            names = ", ".join(one.name for one in self.others)
            warnings.append(f"stated by the operator to be on other people (claimed): {names}")
        composed = (
            f"{len(self.composed)} earlier run(s) on the same people are composed: epsilon "
            f"{self.epsilon():.6g} before the first round, recomputed from what the file states"
        )
        text = "; ".join([*([composed] if self.composed else []), *warnings])
        return Check("start model", "warning", text) if warnings else text
