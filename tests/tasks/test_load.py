"""The options of load_task."""

import subprocess
import sys

import pytest

import dpftrl.tasks
from dpftrl.errors import InvalidInput
from dpftrl.tasks import TASKS, Progress, Vocabulary, load_task
from dpftrl.tasks.language_model import Window, pretrain

WORDS = Vocabulary(("hello", "you"))


@pytest.fixture
def path(tmp_path):
    target = tmp_path / "texts.jsonl"
    lines = [f'{{"user": "user{i}", "text": "hello"}}\n' for i in range(3)]
    target.write_text("".join(lines))
    return target


def test_an_unknown_task_is_refused_with_the_known_names():
    with pytest.raises(InvalidInput, match="chitchat, poetry, stackoverflow, jsonl; got 'reddit'"):
        load_task("reddit")
    assert TASKS == ("chitchat", "poetry", "stackoverflow", "jsonl")


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocabulary_size": 0}, "vocabulary_size must be a whole number of at least 1, got 0"),
        ({"sentence_length": 1.5}, "sentence_length must be a whole number of at least 1"),
        ({"sentences_per_user": -1}, "sentences_per_user must be a whole number"),
        ({"most_users": 0}, "most_users must be a whole number of at least 1"),
        ({"heldout_share": float("nan")}, "heldout_share must be from 0 to below 1, got nan"),
        ({"heldout_share": 1}, "heldout_share must be from 0 to below 1, got 1.0"),
        ({"heldout_share": -0.1}, "heldout_share must be from 0 to below 1"),
        ({"vocabulary_size": 5, "vocabulary": WORDS}, "not both"),
    ],
)
def test_invalid_options_are_refused(name, options, message):
    with pytest.raises(InvalidInput, match=message):
        load_task(name, **options)


def test_a_share_that_holds_out_nobody_is_refused(path):
    with pytest.raises(InvalidInput, match="none of 3 users is held out at a share of 1e-09"):
        load_task("jsonl", path=path, vocabulary=WORDS, heldout_share=1e-9)


def test_a_share_that_leaves_nobody_to_train_on_is_refused(path):
    with pytest.raises(InvalidInput, match="nobody to train on"):
        load_task("jsonl", path=path, vocabulary=WORDS, heldout_share=1 - 1e-9)


def test_importing_tasks_loads_no_heavy_packages():
    heavy = ["jax", "equinox", "wordfreq", "chitchat_dataset", "matplotlib", "polars", "flwr"]
    code = f"import sys, dpftrl.tasks; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_old_names_of_progress_callbacks_still_work(path):
    with pytest.warns(DeprecationWarning, match=r"dpftrl\.tasks\.Report is now .*Progress"):
        assert dpftrl.tasks.Report is Progress
    messages, steps = [], []
    with pytest.warns(DeprecationWarning, match="report of load_task is now on_progress"):
        task = load_task(
            "jsonl",
            path=path,
            vocabulary=WORDS,
            heldout_share=0,
            report=lambda _, message: messages.append(message),
        )
    assert messages == ["reading texts.jsonl"]
    with pytest.warns(DeprecationWarning, match="report of pretrain is now on_step"):
        pretrain(
            Window(len(WORDS), 2, 2, 2),
            task.train.sentences,
            0,
            steps=1,
            report=lambda step, _: steps.append(step),
        )
    assert steps == [1]
