"""Checking a run from its files alone, by other means than the server that wrote them.

What is here follows `docs/runs.md`. It shares no code with `dpftrl.federated`, `dpftrl.accounting`
or `dpftrl.accounting.logs`, so that one mistake cannot be made and missed alike.
"""

from dpftrl.verify.run import verify_run
from dpftrl.verify.verdict import Check, Verdict

__all__ = ["Check", "Verdict", "verify_run"]
