"""A quick part of `benchmarks/planted_bugs.py`: bugs are caught, correct code is not flagged."""

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("planted", BENCHMARKS / "planted_bugs.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_correct_code_is_not_flagged(script):
    control = script.attack(None)
    assert not script.is_flagged(control), control


def test_wrong_numbers_are_caught_by_verify(script):
    assert "guarantee.json" in script.attack("delta")["verify"]


def test_a_client_that_counts_twice_is_caught_by_the_audit_of_the_server(script):
    result = script.attack("counted-twice")
    assert result["server audit"] == ["reports twice"]
    assert not result["white-box audit"]


def test_every_bug_has_tests_by_the_fixed_rule(script):
    for name, bug in script.BUGS.items():
        assert script.test_files(bug.module), name
        assert (BENCHMARKS.parent / "src" / "dpftrl" / f"{bug.module}.py").exists(), name
