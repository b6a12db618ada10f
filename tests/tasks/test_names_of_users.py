"""Users whose names have commas, quotes and other characters that CSV and JSON treat specially."""

import json

import pytest

from dpftrl.tasks import load_task
from dpftrl.tasks.vocabulary import Vocabulary

NAMES = [
    "Smith,",
    ",",
    'a"b',
    '"a", "b",',
    "o'neil,",
    "two words",
    "é😀,",
    "王,",
    "a\\",
    "a;b",
    "#a",
]


@pytest.mark.parametrize("ascii_only", [True, False])
def test_a_task_keeps_the_names_of_its_users(tmp_path, ascii_only):
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"user": n, "text": "hello you"}, ensure_ascii=ascii_only) for n in NAMES]
    path.write_text("\n".join(lines))
    task = load_task("jsonl", path=path, vocabulary=Vocabulary(("hello", "you")), heldout_share=0.0)
    assert task.train.names == tuple(sorted(NAMES))
