"""Next-word prediction on real people's text: vocabularies, users and the tasks made of them."""

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
