"""What comes from files and names cannot give orders to a terminal, and messages stay short."""

import json

import pytest
from command_line import run

from dpftrl.errors import LONGEST_MESSAGE, InvalidInput, visible

EVIL = "\x1b]0;owned\x07\x1b[31m\x9b2J\u202e"


def test_control_characters_are_shown_as_escapes():
    assert visible("plain ≤ text\nand more") == "plain ≤ text\nand more"
    assert visible(EVIL) == r"\x1b]0;owned\x07\x1b[31m\x9b2J\u202e"
    assert visible("\ud800").isprintable()


def test_an_error_is_one_short_line_without_control_characters():
    text = str(InvalidInput(f"a {EVIL} b\nc  d"))
    assert text.isprintable()
    long = str(InvalidInput("x" * 100_000 + " what to do"))
    assert len(long) < LONGEST_MESSAGE + 100
    assert long.endswith("what to do")
    assert "100,011 characters" in long


@pytest.mark.parametrize("as_json", [False, True])
def test_names_in_a_log_reach_the_terminal_as_escapes(tmp_path, as_json):
    log = tmp_path / "log.csv"
    rows = [f'{round_},"evil{EVIL}"\n' for round_ in (0, 1)]
    log.write_text("round,client\n" + "".join(rows), encoding="utf-8")
    arguments = [
        "observe",
        log,
        "--rounds",
        "9",
        "--min-sep",
        "5",
        *(["--json"] if as_json else []),
    ]
    code, out, err = run(*arguments)
    assert code in (1, 2), (out, err)
    for text in (out, err):
        assert all(c.isprintable() or c == "\n" for c in text)
    if as_json and out:
        json.loads(out)


def test_a_file_that_is_not_a_plan_is_refused_in_a_short_line(tmp_path):
    path = tmp_path / f"plan{EVIL}.json"
    path.write_text(json.dumps({"format": "dpftrl plan", "version": EVIL * 5_000}))
    code, out, err = run("account", path)
    assert (code, out) == (2, "")
    assert len(err) < 2_000
    assert err.count("\n") == 1
    assert err.strip().isprintable()
