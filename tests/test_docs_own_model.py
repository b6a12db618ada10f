"""The examples of the page about one's own model run as they are, and learn something."""

import re
from pathlib import Path

import pytest

from dpftrl import verify_run

PAGE = (Path(__file__).parents[1] / "docs" / "own_model.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def run(number: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("DPFTRL_STATE", str(folder / "state"))
    found: dict = {}
    exec(compile(EXAMPLES[number], "own_model.md", "exec"), found)
    return found


def test_the_example_in_numpy_runs(tmp_path, monkeypatch):
    assert len(EXAMPLES) == 3
    result = run(0, tmp_path, monkeypatch)["result"]
    assert result.epsilon == pytest.approx(8.0)
    assert result.evaluation["error"] < 0.1


def test_the_example_in_pytorch_runs(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    found = run(1, tmp_path, monkeypatch)
    assert found["result"].evaluation["accuracy"] > 0.75
    assert verify_run(tmp_path / "run-torch").passed
    assert torch.load("model.pt").keys() == found["network"].state_dict().keys()


def test_the_example_in_jax_runs(tmp_path, monkeypatch):
    equinox = pytest.importorskip("equinox")
    found = run(2, tmp_path, monkeypatch)
    assert found["result"].evaluation["accuracy"] > 0.75
    assert isinstance(found["result"].model, equinox.nn.MLP)
