"""The private runs that produced the start model of a run, with their guarantees recomputed."""

import math
from functools import cached_property
from pathlib import Path
from typing import Final, final

from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import MinSep
from dpftrl.verify.epsilon import MuRange
from dpftrl.verify.rigorous import NoiseStream
from dpftrl.verify.run_files import EarlierRunContent, RunFiles, StreamContent, stream_mechanism
from dpftrl.verify.sensitivity import ROUNDING, Limits
from dpftrl.verify.strategy_matrix import Strategy
from dpftrl.verify.verdict import Check

UNRECORDED: Final = "not recorded"


@final
class EarlierRuns:
    """All private runs that produced the start model.

    Runs on the same people are composed with the run that is verified.

    Attributes:
        composed: The runs on the same people, first to last.
        others: The runs on other people, as the operator states. They are not composed.
    """

    def __init__(self, run_files: RunFiles, run_json: Path):
        self._run_files = run_files
        contents = [] if run_files.start is None else run_files.start.earlier
        runs = [EarlierRun(content, run_json) for content in contents]
        self.composed = tuple(run for run in runs if run.is_same_people)
        self.others = tuple(run for run in runs if not run.is_same_people)

    def __repr__(self) -> str:
        return f"EarlierRuns({len(self.composed)} composed, {len(self.others)} not)"

    @property
    def test_key(self) -> bool:
        """Whether a composed run used a test key, so that anybody can guess its noise."""
        return any(run.test_key for run in self.composed)

    @property
    def is_v1(self) -> bool:
        """Whether a composed run was made by version 0.1, which kept float32 buffers."""
        return any(run.stream.buffers == "float32" for run in self.composed)

    @cached_property
    def mu(self) -> MuRange:
        """The mu of all composed runs together."""
        total = MuRange(0.0, 0.0)
        for run in self.composed:
            total = total.composed_with(run.mu)
        return total

    def epsilon(self) -> float:
        """Return the epsilon spent before the first round of this run, at the run's delta."""
        if not self.composed:
            return 0.0
        least, _ = self.mu.epsilons(self._run_files.delta, self.is_v1)
        return least

    def hypotheses(self) -> set[str]:
        """Return the names of the hypotheses that the guarantee needs for its start model."""
        if self._run_files.start is None:
            return set()
        return {
            *(["earlier runs"] if self.composed else []),
            *(["other people"] if self.others else []),
            *(["start model"] if not (self.composed or self.others) else []),
        }

    def check(self) -> str | Check:
        """Check every earlier run, and describe the start model as `run.json` records it.

        Raises:
            UnsafeState: An earlier run states less than follows from its mechanism.
        """
        start = self._run_files.start
        if start is None and self._run_files.version == 1:
            return "not recorded: version 1 of run.json does not say what the run started from"
        if start is None:
            return "no model file: the server was given arrays when the run was created"
        for run in (*self.composed, *self.others):
            run.check()
        warnings = list[str]()
        if not start.earlier:
            warnings.append(
                f"its origin is not known to dpftrl (SHA-256 {start.sha256}): claimed public"
            )
        if self.test_key:
            warnings.append("NOT PRIVATE: anybody can guess the noise key of an earlier run")
        if self.others:
            names = ", ".join(run.name for run in self.others)
            warnings.append(f"stated by the operator to be on other people (claimed): {names}")
        composed = (
            f"{len(self.composed)} earlier run(s) on the same people are composed: epsilon "
            f"{self.epsilon():.6g} before the first round, recomputed from what the file states"
        )
        text = "; ".join([*([composed] if self.composed else []), *warnings])
        return Check("start model", "warning", text) if warnings else text


@final
class EarlierRun:
    """One private run that trained the start model, as `run.json` describes it.

    The journal's first line holds the digest of `run.json`, so the description cannot be edited.

    Attributes:
        name: The identity of the run, or "not recorded".
        is_same_people: Whether the run is composed. If not, the operator states that it was on
            other people.
        test_key: Whether anybody can guess the run's noise key.
        stream: The run's noise stream.
        mechanism: The mechanism that correlates the noise.
    """

    def __init__(self, content: EarlierRunContent, run_json: Path):
        self._content = content
        self.name = content.run or UNRECORDED
        self.is_same_people = content.people == "same"
        self.test_key = content.test_key
        self.stream: StreamContent = content.guarantee.stream
        self.mechanism: Mechanism = stream_mechanism(self.stream, run_json)

    def __repr__(self) -> str:
        return f"EarlierRun({self.name})"

    @cached_property
    def mu(self) -> MuRange:
        """The mu of the run, recomputed from its mechanism, participation and noise.

        Raises:
            InvalidInput: The description contains impossible numbers.
        """
        stream, participation = self.stream, self.stream.participation
        is_possible = (
            participation.rounds >= 1
            and participation.min_sep >= 1
            and participation.max_participations >= 1
            and 0 < stream.noise_multiplier < math.inf
        )
        if not is_possible:
            raise InvalidInput(
                f"run.json describes the earlier run {self.name} with impossible numbers: rounds, "
                "min-sep and max participations must be at least 1, and the noise multiplier "
                "positive and finite"
            )
        limits = Limits(
            participation.rounds, participation.min_sep, participation.max_participations
        )
        strategy = Strategy(self.mechanism, participation.rounds)
        return strategy.mu_range(limits, stream.noise_multiplier, stream.buffers)

    @property
    def noise_stream(self) -> NoiseStream:
        """The run's noise stream, for interval arithmetic."""
        limits = self.stream.participation
        participation = MinSep(limits.rounds, limits.min_sep, limits.max_participations)
        return NoiseStream(
            self.mechanism, participation, self.stream.noise_multiplier, self.stream.buffers
        )

    def check(self) -> None:
        """Check that the stated mu is not below the recomputed one.

        Raises:
            UnsafeState: The stated mu is below the recomputed one.
        """
        stated = self._content.guarantee.mu
        if not stated >= self.mu.least * (1 - ROUNDING):
            raise UnsafeState(
                f"earlier run {self.name} states mu {stated:.7g}, but {self.mu.least:.7g} "
                "follows from its mechanism"
            )
