"""Next-word prediction on text of real people: vocabularies, users, tasks and models."""

from dpftrl.tasks.load import TASKS, load_task
from dpftrl.tasks.task import Report, Task
from dpftrl.tasks.users import Users
from dpftrl.tasks.vocabulary import BEGIN, END, PAD, UNKNOWN, Vocabulary

__all__ = [
    "BEGIN",
    "END",
    "PAD",
    "TASKS",
    "UNKNOWN",
    "Report",
    "Task",
    "Users",
    "Vocabulary",
    "load_task",
]
