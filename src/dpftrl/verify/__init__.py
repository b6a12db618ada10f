"""Verification of a run: recompute its guarantee from its files, with independent code.

The package follows the file formats in `docs/runs.md`. It shares no code with `dpftrl.federated`,
`dpftrl.centralized` or `dpftrl.accounting`, so that a mistake there is not repeated here.
"""

from dpftrl.verify.verdict import Check, Verdict
from dpftrl.verify.verify_run import verify_run

__all__ = ["Check", "Verdict", "verify_run"]
