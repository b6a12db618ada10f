"""Next-word prediction on text of real people: vocabularies, users, tasks and models."""

from typing import Any

from dpftrl._internal import deprecation
from dpftrl._internal.progress import Progress
from dpftrl.tasks.load import TASKS, load_task
from dpftrl.tasks.task import Task, Users
from dpftrl.tasks.vocabulary import BEGIN, END, PAD, UNKNOWN, Vocabulary

__all__ = [
    "BEGIN",
    "END",
    "PAD",
    "TASKS",
    "UNKNOWN",
    "Progress",
    "Task",
    "Users",
    "Vocabulary",
    "load_task",
]


def __getattr__(name: str) -> Any:
    if name == "Report":
        deprecation.warn("dpftrl.tasks.Report", "dpftrl.tasks.Progress")
        return Progress
    raise AttributeError(f"module 'dpftrl.tasks' has no attribute {name!r}")
