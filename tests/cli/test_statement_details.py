"""`dpftrl statement`: the publisher, persons with several devices, and the planned fleet."""

import json
import re
import shlex

import command_line
import pytest

import dpftrl
from dpftrl import MinSep
from dpftrl.accounting import account
from dpftrl.plan import Fleet, Plan, save_plan

PROMISED = account(dpftrl.mechanism("tree"), MinSep(rounds=200, min_sep=50), 8.0, 1e-10)
OPTIONS = {
    "--organisation": "Ex & Co <b>Ltd</b>",
    "--model-name": "next word | *v2*",
    "--contact": "-not-an-option@example.org",
    "--public-data": "C4, 'cleaned'",
    "--shipped-checkpoint": "round 1,900",
}


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.json"
    fleet = Fleet(50_000, 1000, 0.25, 1.3, timer_days=2.5, rounds_per_day=24)
    save_plan(Plan(fleet, PROMISED), path)
    return path


def test_options_of_the_publisher_are_in_all_three_files(plan, tmp_path, monkeypatch):
    given = [word for pair in OPTIONS.items() for word in pair]
    content = command_line.answer("statement", plan, *given, "--out", tmp_path / "a")
    names = [option[2:].replace("-", "_") for option in OPTIONS]
    assert content["publisher"] == dict(zip(names, OPTIONS.values(), strict=True))
    assert "Ex \\& Co \\<b\\>Ltd\\</b\\>" in (tmp_path / "a.md").read_text(encoding="utf-8")
    assert "Ex &amp; Co &lt;b&gt;Ltd&lt;/b&gt;" in (tmp_path / "a.html").read_text(encoding="utf-8")
    # The command in the statement repeats the texts of the publisher.
    text = (tmp_path / "a.md").read_text(encoding="utf-8")
    again = re.search(r"^dpftrl statement .*$", text, re.MULTILINE)
    assert again is not None
    monkeypatch.chdir(tmp_path)
    _, out, _ = command_line.run(*shlex.split(again[0])[1:])
    assert out.encode() == (tmp_path / "a.json").read_bytes()


def test_without_options_nothing_is_said_about_a_publisher(plan, tmp_path):
    assert "publisher" not in command_line.answer("statement", plan)
    assert "publisher" not in (tmp_path / "statement.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("option", OPTIONS)
def test_a_blank_text_is_refused_in_one_line(plan, option, tmp_path):
    error = command_line.refused_in_one_line("statement", plan, option, " ")
    assert "is blank; give a text, or leave it out" in error
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_the_printed_summary_is_about_three_devices_too(plan):
    code, out, _ = command_line.run("statement", plan, "--devices", "3")
    assert code == 0
    assert "for each client." in out
    assert "For each person with up to 3 devices, all noisy rounds are (" in out
    assert "A delta of 1e-10 means one in ten billion." in out


def test_the_planned_timer_is_stated(plan, tmp_path):
    fleet = command_line.answer("statement", plan)["fleet"]
    assert (fleet["timer_days"], fleet["rounds_per_day"], fleet["availability"]) == (2.5, 24, 0.25)
    text = (tmp_path / "statement.md").read_text(encoding="utf-8")
    assert "before it takes part again | 2.5 (60 rounds) |" in text


def test_the_help_names_the_options():
    code, out, _ = command_line.run("statement", "--help")
    assert code == 0
    for option in OPTIONS:
        assert option in out


def test_json_keeps_all_digits(plan):
    content = command_line.answer("statement", plan, "--devices", "3")
    assert content["epsilon"] == PROMISED.epsilon
    three = {row["devices"]: row for row in content["devices"]}[3]
    assert three["epsilon"] == PROMISED.for_devices(3).epsilon
    assert json.dumps(content["runs"][0]["sensitivity"]) == repr(PROMISED.runs[0].sensitivity.value)
