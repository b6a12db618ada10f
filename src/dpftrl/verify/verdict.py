"""What an audit finds."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

from dpftrl.errors import DpftrlError

Outcome = Literal["passed", "failed", "warning"]


@final
@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What it is about.
        outcome: How it went; a warning is something that an audit cannot settle, or must not hide.
        text: What was found, in one line.
    """

    name: str
    outcome: Outcome
    text: str


@final
@dataclass(frozen=True)
class Verdict:
    """The audit of a run.

    Attributes:
        run: The identity of the run, where it could be learnt.
        checks: All that was looked at.
        rounds: Rounds released, as far as the journal could be read.
        epsilon: What they guarantee, recomputed; None where that was not possible.
        delta: The delta that it is stated at.
    """

    run: str | None
    checks: tuple[Check, ...]
    rounds: int
    epsilon: float | None
    delta: float | None

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return not any(check.outcome == "failed" for check in self.checks)


def tried(name: str, examine: Callable[[], str | Check]) -> Check:
    """A check that fails if looking raises one of our errors, and else says what was found."""
    try:
        found = examine()
    except DpftrlError as error:
        return Check(name, "failed", str(error))
    return found if isinstance(found, Check) else Check(name, "passed", found)
