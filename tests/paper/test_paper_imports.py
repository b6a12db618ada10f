"""The paper is recomputed with what users can import, and nothing else."""

import ast
import importlib
from pathlib import Path

import pytest

import dpftrl.paper

SOURCES = sorted(Path(dpftrl.paper.__file__).parent.glob("*.py"))
# Modules that the paper may use although they are internal: they compute nothing.
INFRASTRUCTURE = {
    "dpftrl._internal.cache",
    "dpftrl._internal.progress",
    "dpftrl._internal.storage",
    "dpftrl.plots",
}


@pytest.mark.parametrize("path", SOURCES, ids=[path.stem for path in SOURCES])
def test_the_paper_imports_only_the_public_api(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not any(one.name.startswith("dpftrl") for one in node.names)
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("dpftrl"):
            continue
        if node.module.startswith("dpftrl.paper") or node.module in INFRASTRUCTURE:
            continue
        module = importlib.import_module(node.module)
        for one in node.names:
            assert not one.name.startswith("_") or one.name == "__version__"
            is_public = one.name in getattr(module, "__all__", ()) or node.module == "dpftrl.errors"
            assert is_public or one.name == "__version__", (node.module, one.name)
