"""`dpftrl observe`: tables, JSON, warnings and exit codes."""

import json
from functools import partial

import command_line
import pytest

LOG = """round,client,status
0,ann,counted
0,bob,contacted
3,ann,counted
4,bob,
5,cyd,abandoned
"""


@pytest.fixture
def run():
    """Run `dpftrl observe` in this process; return its exit code, output and error output."""
    return partial(command_line.run, "observe")


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    return path


def test_json_has_the_promised_keys(run, log):
    code, out, err = run(log, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "rounds": 6,
        "first_round": 0,
        "empty_rounds": 3,
        "clients": 2,
        "participations": 3,
        "min_sep": 3,
        "max_participations": 2,
        "gaps": [{"from": 3, "to": 3, "number": 1}],
        "counts": [
            {"from": 1, "to": 1, "number": 1},
            {"from": 2, "to": 2, "number": 1},
        ],
        "contacted_clients": 3,
        "contacts": 5,
        "contacted_min_sep": 3,
        "duplicate_rows": 0,
        "duplicate_example": None,
    }


def test_the_table_has_headings_and_readable_numbers(run, log):
    code, out, err = run(log)
    assert (code, err) == (0, "")
    for words in ("log.csv: observed participation", "6 (0 to 5)", "participations", "min-sep"):
        assert words in out
    assert "\x1b" not in out


def test_kept_limits_give_exit_code_0(run, log):
    code, out, err = run(log, "--min-sep", 3, "--max-participations", 2, "--json")
    answer = json.loads(out)
    assert (code, err, answer["broken"], answer["broken_clients"]) == (0, "", [], 0)
    assert answer["limits"] == {"min_sep": 3, "max_participations": 2}


def test_a_broken_limit_gives_exit_code_1_and_the_table(run, log):
    code, out, err = run(log, "--min-sep", 4, "--max-participations", 1, "--json")
    assert code == 1
    answer = json.loads(out)
    assert answer["broken"] == [
        {"client": "ann", "limit": "min_sep", "rounds": [0, 3], "counted": True},
        {"client": "ann", "limit": "max_participations", "count": 2, "counted": True},
        {"client": "bob", "limit": "max_participations", "count": 2, "counted": False},
    ]
    assert (answer["broken_clients"], answer["broken_counted_clients"]) == (2, 1)
    assert err == (
        "limits broken: 2 client(s), of which 1 in released sums; use the observed guarantee "
        "(dpftrl account --log), not the promised one\n"
    )
    code, out, _ = run(log, "--max-participations", 1)
    assert code == 1
    assert "no, contacted only" in out
    assert "2 participations" in out


@pytest.mark.parametrize("how", [["--json"], []])
def test_duplicates_are_a_warning(run, log, how):
    log.write_text(LOG + "3,ann,counted\n3,ann,\n")
    code, out, err = run(log, *how)
    assert code == 0
    assert err.startswith("warning: 2 counted row(s) repeat a client and round, such as client ann")
    assert err.count("\n") == 1
    if how:
        answer = json.loads(out)
        assert answer["duplicate_rows"] == 2
        assert answer["duplicate_example"] == {"client": "ann", "round": 3, "rows": 3}
        assert answer["participations"] == 3


def test_logs_that_count_from_one(run, log):
    _, out, _ = run(log, "--rounds", "1k", "--json")
    assert json.loads(out)["rounds"] == 1000
    code, _, err = run(log, "--first-round", 1)
    assert code == 2
    assert "rounds count from 1" in err
    log.write_text(LOG.replace("\n0,", "\n1,"))
    _, out, _ = run(log, "--first-round", 1, "--json")
    answer = json.loads(out)
    assert (answer["rounds"], answer["first_round"]) == (5, 1)


def test_control_characters_in_client_ids_are_escaped(run, log):
    log.write_text('round,client\n0,[red]x\n1,[red]x\n0,"a\x1b[1m\x07b"\n1,"a\x1b[1m\x07b"\n')
    _, out, _ = run(log, "--min-sep", 2)
    assert "[red]x" in out
    assert r"'a\x1b[1m\x07b'" in out
    assert "\x1b" not in out


MISTAKES = {
    "no file": ["nowhere.csv"],
    "a folder": ["."],
    "no rounds": ["LOG", "--rounds", "0"],
    "too few rounds": ["LOG", "--rounds", "5"],
    "no min-sep": ["LOG", "--min-sep", "0"],
    "no participations": ["LOG", "--max-participations", "0"],
    "before the first": ["LOG", "--first-round", "-1"],
    "not a number": ["LOG", "--min-sep", "many"],
    "no log": [],
}


@pytest.mark.parametrize("arguments", MISTAKES.values(), ids=MISTAKES.keys())
def test_an_error_is_one_line_and_exit_code_2(run, log, arguments):
    code, out, err = run(*(str(log) if word == "LOG" else word for word in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dpftrl: ")
