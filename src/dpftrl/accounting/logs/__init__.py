"""Participation logs: who took part in which round, and what that means for sensitivity."""

from dpftrl._internal.progress import Progress
from dpftrl.accounting.logs.layout import LogLayout
from dpftrl.accounting.logs.log import ParticipationLog, observe, open_log
from dpftrl.accounting.logs.summary import Bin, Broken, Duplicate, Limits, Observed, WorstPattern

__all__ = [
    "Bin",
    "Broken",
    "Duplicate",
    "Limits",
    "LogLayout",
    "Observed",
    "ParticipationLog",
    "Progress",
    "WorstPattern",
    "observe",
    "open_log",
]
