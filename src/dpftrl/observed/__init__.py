"""What really happened: participation logs, and what they say about sensitivity."""

from dpftrl.observed.histogram import Bin
from dpftrl.observed.log import ParticipationLog, Report, observe, open_log
from dpftrl.observed.result import Broken, Duplicate, Limits, Observed, WorstPattern

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
