"""The page about centralised training: its code runs, and its diff is as short as it says."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "centralised.md").read_text()


def diff() -> list[str]:
    (found,) = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)
    return found.splitlines()


def run(lines: list[str], folder: Path, monkeypatch) -> dict:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DPFTRL_STATE", str(folder / "state"))
    found: dict = {}
    exec(compile("\n".join(lines), "centralised.md", "exec"), found)
    return found


def test_an_ordinary_loop_becomes_private_with_five_changed_lines(tmp_path, monkeypatch):
    (before_folder := tmp_path / "before").mkdir()
    (after_folder := tmp_path / "after").mkdir()
    before = run([line[1:] for line in diff() if line[0] in " -"], before_folder, monkeypatch)
    after = run([line[1:] for line in diff() if line[0] in " +"], after_folder, monkeypatch)
    assert sum(line.startswith("+") for line in diff()) <= 5
    assert len([line for line in diff() if line[0] in " -"]) >= 20
    assert (before_folder / "model.pt").exists()
    assert before["model"].state_dict().keys() == after["model"].state_dict().keys()
    assert after["private"].epsilon == pytest.approx(8.0)
    assert after["private"].steps == 16
    after["private"].close()


def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_loop_with_validation_runs_after_the_first_example(tmp_path, monkeypatch, capsys):
    (validation,) = [block for block in blocks() if "test_inputs" in block]
    assert validation.count("\n") == 6
    lines = [line[1:] for line in diff() if line[0] in " +"]
    setup = lines[: lines.index("for batch in private.loader:")]
    public = "test_inputs, test_labels = data.tensors"
    found = run([*setup, public, *validation.splitlines()], tmp_path, monkeypatch)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("epoch 1: ")
    assert second.startswith("epoch 2: ")
    found["private"].close()


@pytest.mark.parametrize("number", range(2))
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
def test_the_examples_of_the_page_run(number, tmp_path, monkeypatch):
    whole = [block for block in blocks() if "import" in block]
    assert len(whole) == 2
    found = run(whole[number].splitlines(), tmp_path, monkeypatch)
    epsilon = found["private"].epsilon if "private" in found else found["optimizer"].get_epsilon()
    assert epsilon == pytest.approx(8.0)
