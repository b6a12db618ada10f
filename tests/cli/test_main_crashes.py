"""Input that once ended in a traceback or in a message that helped nobody."""

import os
import subprocess
import sys

import pytest
from command_line import run

LIMITS = ["--rounds", "10", "--min-sep", "2"]


def refused(*arguments: object) -> str:
    code, out, err = run(*arguments)
    assert (code, out) == (2, ""), (out, err)
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    "command",
    [
        ["statement", "{loop}"],
        ["statement", "{loop}.json"],
        ["account", "{loop}"],
        ["account", "{loop}.json"],
        ["observe", "{loop}.csv"],
        ["verify", "{loop}"],
        ["export", "{loop}", "model.safetensors"],
        ["train", "--out", "{loop}", "--resume"],
        ["compose", "{loop}.json", "--delta", "1e-3"],
        ["show", "{loop}"],
    ],
    ids=str,
)
def test_links_that_lead_to_themselves(tmp_path, command):
    for name in ("loop", "loop.json", "loop.csv"):
        (tmp_path / name).symlink_to(tmp_path / name)
    refused(*(part.format(loop=tmp_path / "loop") for part in command))


def test_a_statement_is_not_written_to_a_link_that_leads_to_itself(tmp_path):
    plan = ["plan", "--population", "100", "--report-goal", "4", "--rounds", "9"]
    assert run(*plan, "--delta", "1e-3", "--epsilon", "1", "--out", tmp_path / "p.json")[0] == 0
    (tmp_path / "s.md").symlink_to(tmp_path / "s.md")
    assert "cannot be written" in refused("statement", tmp_path / "p.json", "--out", tmp_path / "s")


@pytest.mark.parametrize("command", ["loss", "compare"])
def test_coefficients_that_overflow(command):
    assert "too large for float64" in refused(command, "toeplitz:1e308,1e308", *LIMITS)


@pytest.mark.parametrize(
    ("change", "choices"),
    [
        ('model.name="foo"', "lstm, window"),
        ('server={name="foo"}', "sgd, adam"),
        ('task="foo"', "chitchat, jsonl, poetry, stackoverflow"),
    ],
)
def test_a_wrong_choice_is_answered_with_the_choices(change, choices):
    assert choices in refused("train", "--set", change, "--show-config")


def test_data_in_place_of_a_configuration_is_answered_with_what_to_do(tmp_path):
    (tmp_path / "deb.jsonl").write_text('{"user": "a", "text": "b"}\n')
    assert "data.path" in refused("train", tmp_path / "deb.jsonl", "--show-config")


def test_the_configuration_is_shown_without_jax():
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('jax', 'equinox', 'tensorboardX')))\n"
        "from dpftrl.cli import start\n"
        "sys.argv = ['dpftrl', 'train', '--show-config']; start()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "[privacy]" in ended.stdout


def test_a_missing_witness_is_answered_with_the_options(tmp_path, monkeypatch):
    import numpy as np

    from dpftrl import Server, Settings, make_plan

    plan = make_plan(population=100, report_goal=4, rounds=9, epsilon=1, delta=1e-3)
    Server.create(
        tmp_path / "run",
        plan,
        Settings(clip_norm=1.0),
        {"w": np.zeros(2)},
        state_folder=tmp_path / "state",
    ).close()
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "elsewhere"))
    message = refused("export", tmp_path / "run", tmp_path / "m.safetensors")
    assert "--state-folder" in message
    assert "--trust-folder" in message
    assert os.listdir(tmp_path / "elsewhere") != ["m.safetensors"]
