"""The result of a verification as plain data and in one line."""

from typing import Any

from dpftrl._internal.formatting import rounded_up
from dpftrl.verify.centralized_epsilon import ESTIMATE
from dpftrl.verify.verdict import Verdict


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """The result as plain data, as `dpftrl verify --json` prints it."""
    return {
        "passed": verdict.passed,
        "run": verdict.run_id,
        "rounds": verdict.rounds,
        "empty_rounds": verdict.empty_rounds,
        "epsilon": verdict.epsilon,
        "delta": verdict.delta,
        "checks": verdict.checks,
    }


def verdict_summary(verdict: Verdict) -> str:
    """The result in one line."""
    failed = sum(check.outcome == "failed" for check in verdict.checks)
    warned = sum(check.outcome == "warning" for check in verdict.checks)
    warnings = f", with {warned} warning(s)" if warned else ""
    if failed:
        return f"FAILED: {failed} of {len(verdict.checks)} checks{warnings}"
    if verdict.epsilon is None:
        return f"passed{warnings}"
    if any(check.name == "noise key" for check in verdict.checks):
        warnings += ", NOT PRIVATE (the noise key is one for tests)"
    names = {check.name for check in verdict.checks}
    rounds = "steps" if "steps" in names else "rounds"
    basis = "confirmed by an estimate" if ESTIMATE in names else "recomputed"
    return (
        f"passed{warnings}: {verdict.rounds:,} {rounds}, epsilon {rounded_up(verdict.epsilon)} "
        f"at delta {verdict.delta:g}, {basis}"
    )
