"""Files that commands write: nothing of the user's is lost, and wrong names are refused early."""

import os

import numpy as np
import pytest
from command_line import refused_in_one_line, run
from matplotlib.figure import Figure

from dpftrl.cli.files import check_target
from dpftrl.errors import InvalidInput

LIMITS = ["--rounds", "20", "--min-sep", "5"]
ACCOUNT = ["account", "blt-b400", *LIMITS, "--noise-multiplier", "5", "--delta", "1e-6"]
FLEET = ["--population", "1000", "--report-goal", "10", "--rounds", "20"]
PLAN = ["plan", *FLEET, "--epsilon", "8", "--delta", "1e-6"]
WRITERS = {
    "account": ([*ACCOUNT, "--out"], "file.json"),
    "plan": ([*PLAN, "--out"], "file.json"),
    "optimize": (["optimize", "blt", *LIMITS, "--out"], "file.json"),
    "plot": (["compare", "sqrt", "tree", *LIMITS, "--plot"], "file.png"),
    "show": (["show", "sqrt", "--plot"], "file.svg"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_of_the_user_is_replaced_only_by_force(tmp_path, name):
    arguments, file = WRITERS[name]
    path = tmp_path / file
    path.write_text("my notes")
    code, out, err = run(*arguments, path)
    assert (code, out) == (2, "")
    assert "--force" in err
    assert path.read_text() == "my notes"
    assert run(*arguments, path, "--force")[0] == 0
    written = path.read_bytes()
    assert written != b"my notes"
    assert run(*arguments, path)[0] == 0  # a file of the same kind is replaced


def test_a_file_of_another_kind_is_not_replaced(tmp_path):
    assert run(*PLAN, "--out", tmp_path / "plan.json")[0] == 0
    before = (tmp_path / "plan.json").read_bytes()
    code, _, err = run(*ACCOUNT, "--out", tmp_path / "plan.json")
    assert code == 2
    assert "is not a guarantee that dpftrl wrote" in err
    assert (tmp_path / "plan.json").read_bytes() == before


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("wrong", ["folder", "pipe", "missing folder", "ending"])
def test_what_cannot_be_written_is_refused_before_computing(tmp_path, name, wrong, monkeypatch):
    arguments, file = WRITERS[name]
    path = tmp_path / file
    if wrong == "folder":
        path.mkdir()
    elif wrong == "pipe":
        os.mkfifo(path)
    elif wrong == "missing folder":
        path = tmp_path / "missing" / file
    else:
        path = tmp_path / "file.xyz"

    def fails(*_, **__):
        raise AssertionError("computed before the file was checked")

    for place in ("plan.solve_fleet", "optimize.optimize_blt", "account.guarantee_of"):
        monkeypatch.setattr(f"dpftrl.cli.{place}", fails)
    code, out, err = run(*arguments, path, "--force")
    assert (code, out) == (2, ""), err
    assert err.count("\n") == 1
    assert "None" not in err


def test_a_plan_is_kept_when_its_plot_fails(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("dpftrl.cli.plan.plot_extrapolation", fails)
    code, _, err = run(*PLAN, "--out", tmp_path / "plan.json", "--plot", tmp_path / "plan.png")
    assert code == 2
    assert "No space left" in err
    assert run("account", tmp_path / "plan.json")[0] == 0


def test_a_missing_matplotlib_is_noticed_before_computing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setattr("dpftrl.cli.plan.solve_fleet", None)  # would fail if it were called
    code, _, err = run(*PLAN, "--plot", tmp_path / "plan.png")
    assert code == 2
    assert "pip install" in err


def test_a_statement_is_not_written_beside_a_device(tmp_path):
    assert run(*PLAN, "--out", tmp_path / "plan.json")[0] == 0
    code, _, err = run("statement", tmp_path / "plan.json", "--out", "/dev/null")
    assert code == 2
    assert "device" in err
    assert not os.path.exists("/dev/null.md")
    (tmp_path / "s.md").write_text("my notes")
    code, _, err = run("statement", tmp_path / "plan.json", "--out", tmp_path / "s")
    assert code == 2
    assert "--force" in err
    assert (tmp_path / "s.md").read_text() == "my notes"
    assert run("statement", tmp_path / "plan.json", "--out", tmp_path / "s", "--force")[0] == 0
    assert run("statement", tmp_path / "plan.json", "--out", tmp_path / "s")[0] == 0


def test_a_model_of_the_user_is_not_replaced_by_an_export(tmp_path):
    from safetensors.numpy import save_file

    path = tmp_path / "mine.safetensors"
    save_file({"epsilon": np.zeros(2), "delta": np.zeros(1), "rounds": np.ones(1)}, path)
    with pytest.raises(InvalidInput, match="--force"):
        check_target(path, "model")
    save_file({"w": np.zeros(2)}, path, {"epsilon": "1", "delta": "1e-6", "rounds": "3"})
    check_target(path, "model")


def test_training_does_not_replace_files_of_the_user(tmp_path):
    for name in ("config.toml", "metrics.jsonl", "statement.md", "events"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_text("my notes")
        code, _, err = run("train", "--out", folder)
        assert code == 2
        assert "choose an empty folder" in err
        assert (folder / name).read_text() == "my notes"


def test_training_does_not_mix_its_files_with_those_of_the_user(tmp_path):
    (tmp_path / "thesis.tex").write_text("my notes")
    err = refused_in_one_line("train", "--out", tmp_path)
    assert f"{tmp_path} is not empty: it holds thesis.tex; choose an empty folder with --out" in err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("leftover", [".DS_Store", "lost+found", "private", "state"])
def test_a_folder_with_nothing_of_the_user_can_become_a_run(tmp_path, leftover):
    """Each command stops at the data, which is missing: behind the check of the folder."""
    (tmp_path / leftover).mkdir()
    data = ("--set", 'task="jsonl"', "--state-folder", tmp_path / "state")
    assert "give its path" in refused_in_one_line("train", *data, "--out", tmp_path)


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf"])
def test_a_picture_of_the_user_is_replaced_only_by_force(tmp_path, ending):
    path = tmp_path / f"holiday{ending}"
    Figure().savefig(path)
    before = path.read_bytes()
    arguments = ["show", "sqrt", "--plot", path]
    assert "--force" in run(*arguments)[2]
    assert path.read_bytes() == before
    assert run(*arguments, "--force")[0] == 0
    assert run(*arguments)[0] == 0  # one of ours
