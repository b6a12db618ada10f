"""The verdicts on claims."""

import pytest

from dpftrl.paper.item import Claim, holds, printed, rounds_to


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
