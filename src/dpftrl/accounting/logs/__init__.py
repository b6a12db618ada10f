"""What really happened: participation logs, and what they say about sensitivity."""

from dpftrl.accounting.logs.log import ParticipationLog, Report, observe, open_log
from dpftrl.accounting.logs.summary import Bin, Broken, Duplicate, Limits, Observed, WorstPattern

__all__ = [
    "Bin",
    "Broken",
    "Duplicate",
    "Limits",
    "Observed",
    "ParticipationLog",
    "Report",
    "WorstPattern",
    "observe",
    "open_log",
]
