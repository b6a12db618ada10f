"""The changes to an app that docs/flower.md shows are complete, and they work."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from tiny_apps import SIZE, half_way, plan

import dpftrl.flower as flower
from dpftrl.flower import InProcessGrid, client_mod
from dpftrl.plan import save_plan

DOCS = Path(__file__).parents[2] / "docs" / "flower.md"
DIFFS = re.findall(r"```diff\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
ADDED = [[line[1:] for line in diff.splitlines() if line.startswith("+")] for diff in DIFFS]


def test_the_documented_diff_adds_at_most_five_lines() -> None:
    assert len(DIFFS) == 2
    assert sum(map(len, ADDED)) <= 5


@pytest.mark.parametrize("added", ADDED)
def test_the_documented_diff_imports_all_names_it_uses(added: list[str]) -> None:
    tree = ast.parse("\n".join(added))
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported <= set(flower.__all__)
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert called - {"ClientApp"} <= imported


def test_the_documented_server_lines_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "state"))
    save_plan(plan(), tmp_path / "plan.json")
    (lines,) = [added for added in ADDED if any("DpFtrl" in line for line in added)]
    source = "\n".join(lines).replace("/srv", str(tmp_path)).replace("True", "False")
    app = ClientApp(mods=[client_mod(simulated=True)])

    @app.train()
    def train(message: Message, _: object) -> Message:
        model = message.content["arrays"]["w"].numpy()
        arrays = ArrayRecord({"w": Array(half_way(model, 0, 0))})
        return Message(RecordDict({"arrays": arrays}), reply_to=message)

    grid: Grid = InProcessGrid(app, range(12))
    arrays = ArrayRecord({"w": Array(np.zeros(SIZE, np.float32))})
    exec(source, {"grid": grid, "arrays": arrays})
    assert (tmp_path / "run" / "guarantee.json").exists()


NO_FLOWER = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name == "flwr":
            raise ModuleNotFoundError("No module named 'flwr'", name="flwr")
sys.meta_path.insert(0, Absent())
import dpftrl.flower
"""


def test_without_flower_the_import_says_what_to_install() -> None:
    command = [sys.executable, "-c", NO_FLOWER]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("pip install 'dpftrl[flower]'")
