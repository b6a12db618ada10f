"""The checks of a Task."""

import numpy as np
import pytest

from dpftrl.errors import InvalidInput
from dpftrl.tasks import Task, Users, Vocabulary

WORDS = Vocabulary(("hello", "you"))
ROWS = np.array([[1, 4, 2], [1, 5, 2]], np.int32)
BEYOND = np.array([[1, 6, 2]], np.int32)


def users(*names: str, rows=ROWS) -> Users:
    return Users(names, rows[: len(names)], np.arange(len(names) + 1))


def test_a_consistent_task_is_accepted():
    task = Task("ours", "nowhere", WORDS, users("ann"), users("bob"), ROWS)
    assert "Users(1 people, 1 sentences)" in repr(task)
    assert not task.public.flags.writeable


@pytest.mark.parametrize(
    ("train", "heldout", "public", "message"),
    [
        (users(), users("ann"), None, "nobody to train on"),
        (users("ann", "bob"), users("bob"), None, "1 users are both held out and trained on"),
        (users("ann", rows=BEYOND), users(), None, "beyond the vocabulary"),
        (users("ann"), users(), BEYOND, "beyond the vocabulary"),
        (users("ann"), users(), ROWS[:, :2], "different lengths"),
        (users("ann"), users("bob", rows=ROWS[:, :2]), None, "different lengths"),
        (users("ann"), users(), ROWS.astype(np.int64), "public text must be"),
    ],
)
def test_inconsistent_tasks_are_refused(train, heldout, public, message):
    with pytest.raises(InvalidInput, match=message):
        Task("ours", "nowhere", WORDS, train, heldout, public)
