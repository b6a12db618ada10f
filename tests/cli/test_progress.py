"""Everything that takes longer than two seconds says so."""

import time

import pytest
from command_line import run

from dpftrl.cli import output


@pytest.fixture(autouse=True)
def _fast_hearts(monkeypatch):
    monkeypatch.setattr(output, "FIRST_BEAT", 0.05)
    monkeypatch.setattr(output, "NEXT_BEAT", 0.05)


def test_a_long_computation_is_reported_where_there_is_no_terminal(capsys):
    with output.progress_bar("reading") as on_progress:
        on_progress(0.25, "the \x1b[31mlog")
        time.sleep(0.4)
    err = capsys.readouterr().err
    assert err.startswith("reading: the \\x1b[31mlog, 25% done (0 s)\n")
    assert err.count("\n") >= 2
    time.sleep(0.2)
    assert capsys.readouterr().err == ""  # it has stopped


def test_a_short_computation_says_nothing(capsys, monkeypatch):
    monkeypatch.setattr(output, "FIRST_BEAT", 2.0)
    with output.working("computing"):
        pass
    assert capsys.readouterr().err == ""


SLOW = {
    "optimize": (
        "dpftrl.cli.optimize.optimize_robust_blt",
        ["optimize", "blt", "--rounds", "10..20", "--min-sep", "5..6"],
    ),
    "plan": (
        "dpftrl.cli.plan.solve_fleet",
        ["plan", "--population", "100", "--report-goal", "4", "--rounds", "9", "--delta", "1e-3"],
    ),
    "reproduce": ("dpftrl.cli.reproduce.reproduce", ["reproduce", "tab-mech"]),
    "account": (
        "dpftrl.cli.account.Run",
        ["account", "sqrt", "--rounds", "9", "--min-sep", "2", "--noise-multiplier", "1"],
    ),
}


@pytest.mark.parametrize("command", SLOW)
def test_commands_that_take_long_say_what_they_do(command, monkeypatch, tmp_path):
    name, arguments = SLOW[command]

    def slow(*_, **__):
        time.sleep(0.3)
        raise OSError(5, "enough")

    monkeypatch.chdir(tmp_path)
    if command == "account":
        monkeypatch.setattr(f"{name}.of", slow)
        arguments = [*arguments, "--delta", "1e-3"]
    else:
        monkeypatch.setattr(name, slow)
    if command == "plan":
        arguments = [*arguments, "--epsilon", "1"]
    code, _, err = run(*arguments)
    assert code == 2
    assert " s)\n" in err
