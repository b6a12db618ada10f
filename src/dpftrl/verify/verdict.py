"""The result of a verification: a list of checks, and the recomputed epsilon."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

from dpftrl._internal.deprecation import warn
from dpftrl.errors import DpftrlError

Outcome = Literal["passed", "failed", "warning", "skipped"]


@final
@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: The subject of the check, such as "journal".
        outcome: The result. A warning is something that the verification cannot decide, or that
            the reader must know. A check is skipped if it does not apply, takes too long, or
            needs a package that is not installed.
        text: What the check found, in one line.
    """

    name: str
    outcome: Outcome
    text: str


@final
@dataclass(frozen=True)
class Verdict:
    """The result of verifying a run.

    Attributes:
        run_id: The identity of the run, or None if the journal could not be read.
        checks: The results of all checks.
        rounds: The number of released rounds, or 0 if the journal could not be read.
        empty_rounds: The number of these that were closed as rounds in which nobody took part.
        epsilon: The recomputed epsilon of these rounds, or None if it could not be recomputed.
        delta: The delta of that epsilon.
    """

    run_id: str | None
    checks: tuple[Check, ...]
    rounds: int
    epsilon: float | None
    delta: float | None
    empty_rounds: int = 0

    @property
    def passed(self) -> bool:
        """Whether no check failed. Warnings do not count as failures."""
        return not any(check.outcome == "failed" for check in self.checks)

    @property
    def run(self) -> str | None:
        """The old name of `run_id`."""
        warn("Verdict.run", "Verdict.run_id")
        return self.run_id


def run_check(name: str, check: Callable[[], str | Check]) -> Check:
    """Run a check and return its result.

    Args:
        name: The subject of the check.
        check: Returns the text of a passed check, or a `Check` of its own. It fails by raising a
            `DpftrlError`.
    """
    try:
        result = check()
    except DpftrlError as error:
        return Check(name, "failed", str(error))
    return result if isinstance(result, Check) else Check(name, "passed", result)
