"""What dpftrl uses of Flower beyond its public modules: all of it in one place, and still there."""

import ast
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import dpftrl.flower
from dpftrl.flower import _flwr_internals as internals
from dpftrl.flower.run import NodeIdentity

SOURCES = sorted(Path(dpftrl.flower.__file__).parent.glob("*.py"))
PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy"}


def grid() -> internals.HttpGrid:
    """A grid as Flower makes it for a ServerApp; it connects when it is first used."""
    return internals.HttpGrid("127.0.0.1:1", insecure=True, token="t")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_only_one_module_uses_what_is_not_public(path: Path) -> None:
    if path.name == "_flwr_internals.py":
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flwr"
    }
    assert imported <= PUBLIC
    private = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.endswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    assert not private


def test_the_private_fields_of_a_grid_are_where_they_were() -> None:
    assert internals.connection_of(grid()) == ("127.0.0.1:1", True, None)
    assert isinstance(internals.runtime_client(grid()), internals.RuntimeHttpClient)
    for name in ("PullMessages", "PullObject", "ConfirmMessageReceived", "GetNodes"):
        assert callable(getattr(internals.RuntimeHttpClient, name))
    for name in ("RegisterNode", "UnregisterNode", "from_server_address"):
        assert callable(getattr(internals.FleetHttpClient, name))


def test_a_field_that_was_moved_is_named() -> None:
    moved = grid()
    del moved._insecure
    with pytest.raises(ImportError, match=r"HttpGrid has no _insecure.*pip install 'flwr>=1.41"):
        internals.connection_of(moved)


def test_the_identity_is_asked_for_at_the_start_and_after_a_lost_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("dpftrl.flower.run.identity_of", lambda _: asked.append(1) or "registered")
    connected = grid()
    nodes = NodeIdentity(connected)
    assert [nodes.current() for _ in range(5)] == ["registered"] * 5
    assert len(asked) == 1

    def fails_once() -> int:
        if not failures:
            failures.append(1)
            raise ConnectionError("the SuperLink is gone")
        return 7

    failures: list[int] = []
    invoker = connected._retry_invoker  # Flower repeats every request of a grid through it
    invoker.recoverable_exceptions = (ConnectionError,)
    invoker.wait_function = lambda _: None
    assert invoker.invoke(fails_once) == 7
    nodes.current()
    assert len(asked) == 2


@pytest.mark.parametrize("known", ["1.41.0", "1.42.3", version("flwr")])
def test_known_versions_are_accepted(known: str) -> None:
    internals.check_version(known)


@pytest.mark.parametrize("unknown", ["1.40.9", "1.43.0", "2.0.0", "0.1", "main", "1.43.0.dev2"])
def test_other_versions_are_refused(unknown: str) -> None:
    with pytest.raises(ImportError, match=f"this is Flower {unknown} .*'flwr>=1.41,<1.43'"):
        internals.check_version(unknown)


@pytest.mark.parametrize(
    "change",
    [
        "importlib.metadata.version = lambda name: '1.43.0'",
        "import flwr.superlink.grid; del flwr.superlink.grid.HttpGrid",
        "import flwr.supercore.run; sys.modules['flwr.supercore.run'] = None",
    ],
)
def test_another_flower_gives_one_clear_message(change: str) -> None:
    code = f"import importlib.metadata, sys; import numpy\n{change}\nimport dpftrl.flower"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: dpftrl.flower works with Flower from 1.41 to below 1.43")


def test_pyproject_and_the_guard_name_the_same_versions() -> None:
    oldest, newest = internals.FIRST_VERSION, internals.FIRST_UNKNOWN_VERSION
    wanted = f">={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1]}"
    pyproject = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert pyproject.count(f'"flwr{wanted}"') == 1
    assert pyproject.count(f'"flwr[simulation]{wanted}"') == 1
