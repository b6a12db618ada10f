"""Verdicts, the lower bound, and the promise to use what users can use."""

import ast
import importlib
from pathlib import Path

import numpy as np
import pytest

import dpftrl.paper
from dpftrl import BinaryTree, Independent, MinSep, SquareRoot
from dpftrl.optimize import optimize_blt
from dpftrl.paper.findings import Claim, holds, printed, rounds_to
from dpftrl.paper.frontier import lower_bound
from dpftrl.paper.items import chosen
from dpftrl.paper.output import as_csv, shown

SOURCES = sorted(Path(dpftrl.paper.__file__).parent.glob("*.py"))
# Modules that the paper may use although they are internal: they compute nothing.
INFRASTRUCTURE = {
    "dpftrl._internal.cache",
    "dpftrl._internal.progress",
    "dpftrl._internal.storage",
    "dpftrl.plots",
}


@pytest.mark.parametrize(
    ("paper", "ours", "up", "verdict"),
    [
        ("10.79", 10.7514, False, "better"),
        ("10.21", 10.2106, False, "reproduces"),
        ("9.33", 9.639, False, "does not"),
        ("0.16", 0.1534, True, "reproduces"),
        ("0.16", 0.1534, False, "better"),
        ("0.0245", 0.02444, True, "reproduces"),
        ("0.20", 0.2001, True, "does not"),
    ],
)
def test_verdicts_on_printed_numbers(paper, ours, up, verdict):
    assert printed("x", paper, ours, up=up).verdict == verdict


def test_nan_never_reproduces_a_number():
    assert not rounds_to(float("nan"), "1.0")
    assert printed("x", "1.0", float("nan")).verdict == "does not"


def test_verdicts_on_statements_and_ratios_of_numbers():
    assert holds("x", False, 1.0).verdict == "does not"
    assert Claim("x", "2", 3.0, "reproduces").ratio == 1.5
    assert Claim("x", "below 1", 3.0, "reproduces").ratio is None
    assert Claim("x", "2", "words", "reproduces").ratio is None
    assert Claim("x", "2", 3.0, "better", "why").at_reduced_size().verdict == "not at this size"


def test_formatting_of_numbers():
    assert shown(12345.6) == "12,346"
    assert shown(-0.00001234) == "-1.234e-05"
    assert as_csv([{"a": 0.1, "b": None}]) == "a,b\n0.1,\n"


@pytest.mark.parametrize(("rounds", "min_sep"), [(24, 24), (24, 8), (24, 2), (60, 10)])
def test_no_mechanism_is_below_the_lower_bound(rounds, min_sep):
    clients = MinSep(rounds, min_sep)
    bound = lower_bound(clients, (0.0, 0.3, 0.6, 1.0))
    rivals = [SquareRoot(), Independent(), BinaryTree(), optimize_blt(clients, 3, "rms").mechanism]
    best = min(one.error_report(clients).rms_loss for one in rivals)
    assert bound <= best
    assert bound > 0.8 * best  # and it is not an empty one


def test_the_lower_bound_holds_for_any_factorisation():
    clients = MinSep(12, 4)
    bound = lower_bound(clients, (0.0, 0.2, 0.4, 0.8))
    random = np.random.default_rng(5)
    for _ in range(50):
        C = np.tril(random.normal(size=(12, 12)) + 2 * np.eye(12))
        B = np.tri(12) @ np.linalg.inv(C)
        # Signs matter here: the largest over all of them, for every pattern.
        worst = max(
            np.linalg.norm(C[:, list(pattern)] @ signs)
            for pattern in clients.patterns()
            for signs in _signs(len(pattern))
        )
        assert np.linalg.norm(B) / 12**0.5 * worst >= bound


def _signs(count):
    return np.array(np.meshgrid(*[[-1, 1]] * count)).reshape(count, -1).T


def test_for_one_participation_the_bound_is_the_nuclear_norm():
    n = 16
    nuclear = np.linalg.svd(np.tri(n), compute_uv=False).sum()
    assert lower_bound(MinSep.once(n), (0.0,)) == pytest.approx(nuclear / n, rel=1e-12)


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


def test_items_come_in_the_order_of_the_paper_and_once():
    names = [item.name for item in chosen(["launches", "tab-mech", "launches"])]
    assert names == ["tab-mech", "launches"]
