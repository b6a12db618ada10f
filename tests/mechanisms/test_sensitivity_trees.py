"""The programme over nested blocks, against every pattern of small trees built by hand."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpftrl import BinaryTree, DpftrlError, FixedEpochs, FullTree, MinSep, SmoothTree
from dpftrl.mechanisms import _tree_sensitivity as nested
from dpftrl.mechanisms import tree as tree_module

MOST_ROUNDS = 18


def dyadic_blocks(rounds: int) -> np.ndarray:
    """One row for each complete block of a power of two, from any multiple of its size."""
    rows = []
    size = 1
    while size <= rounds:
        starts = range(0, rounds - size + 1, size)
        rows += [[start <= t < start + size for t in range(rounds)] for start in starts]
        size *= 2
    return np.array(rows, dtype=float)


def smooth_blocks(height: int, rounds: int) -> np.ndarray:
    """The left siblings on the paths to balanced leaves 1 ... rounds, as blocks of rounds.

    Written from the definition: a node is the first digits of a leaf's number.
    """
    leaves = [
        digits
        for digits in itertools.product("01", repeat=height)
        if digits.count("1") == height // 2
    ]
    used = {
        (*leaf[:i], "0") for leaf in leaves[1 : rounds + 1] for i in range(height) if leaf[i] == "1"
    }
    return np.array(
        [[leaf[: len(node)] == node for leaf in leaves[:rounds]] for node in sorted(used)],
        dtype=float,
    )


def every_pattern(rounds: int, min_sep: int) -> np.ndarray:
    """One row of zeros and ones for each pattern, grown a round at a time."""
    rows = [()]
    for _ in range(rounds):
        rows = [(*row, 0) for row in rows] + [
            (*row, 1) for row in rows if not any(row[max(0, len(row) - min_sep + 1) :])
        ]
    return np.array([row for row in rows if any(row)], dtype=float)


def squares(blocks: np.ndarray, patterns: np.ndarray) -> np.ndarray:
    return ((patterns @ blocks.T) ** 2).sum(axis=1)


@contextmanager
def limits(**changed: int) -> Iterator[None]:
    """Run with other limits. Answers may be remembered: forget them before and after."""
    forget = getattr(tree_module.tree_sensitivity, "cache_clear", lambda: None)
    forget()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in changed.items():
                patch.setattr(nested, name, value)
            yield
    finally:
        forget()


def check_all_caps(mechanism, blocks: np.ndarray, rounds: int, min_sep: int) -> None:
    patterns = every_pattern(rounds, min_sep)
    worth, taken = squares(blocks, patterns), patterns.sum(axis=1)
    for most in range(1, int(taken.max()) + 1):
        found = mechanism.sensitivity(MinSep(rounds, min_sep, most))
        assert found.kind == "exact"
        assert found.value**2 == pytest.approx(worth[taken <= most].max(), rel=1e-12), most


@pytest.mark.parametrize("rounds", range(1, MOST_ROUNDS + 1))
def test_trees_are_exact_for_every_gap_and_cap(rounds: int):
    blocks = dyadic_blocks(rounds)
    for min_sep in range(1 if rounds <= 11 else 2, rounds + 2):
        check_all_caps(BinaryTree(), blocks, rounds, min_sep)


@pytest.mark.parametrize("rounds", [1, 5, 8, 13])
def test_full_trees_have_the_sensitivity_of_the_tree(rounds: int):
    for min_sep in range(2, rounds + 2):
        check_all_caps(FullTree(rounds), dyadic_blocks(rounds), rounds, min_sep)


@pytest.mark.parametrize(
    ("height", "rounds"),
    [(2, 1), *((4, n) for n in range(1, 6)), *((6, n) for n in range(1, 18, 2)), (6, 18), (8, 17)],
)
def test_smooth_trees_are_exact_for_every_gap_and_cap(height: int, rounds: int):
    blocks = smooth_blocks(height, rounds)
    for min_sep in range(1 if rounds <= 10 else 2, rounds + 2):
        check_all_caps(SmoothTree(height), blocks, rounds, min_sep)


@pytest.mark.parametrize(("height", "rounds"), [(2, 1), (4, 5), (6, 7), (6, 19), (8, 40)])
def test_smooth_trees_have_the_blocks_of_the_definition(height: int, rounds: int):
    rows = SmoothTree(height).strategy(rounds)
    wanted = smooth_blocks(height, rounds)
    assert sorted(map(tuple, rows)) == sorted(map(tuple, wanted))


TREES = {
    "tree": (BinaryTree(), dyadic_blocks),
    "smooth-tree": (SmoothTree(8), lambda rounds: smooth_blocks(8, rounds)),
}


@pytest.mark.parametrize("tree", TREES)
@given(rounds=st.integers(1, 40), min_sep=st.integers(1, 42), most=st.integers(1, 42))
def test_fixed_epochs_are_exact(tree: str, rounds, min_sep, most):
    mechanism, blocks_of = TREES[tree]
    found = mechanism.sensitivity(FixedEpochs(rounds, min_sep, most))
    starts = np.zeros((rounds, rounds))
    for start in range(rounds):
        starts[start, list(range(start, rounds, min_sep))[:most]] = 1
    assert found.kind == "exact"
    assert found.value**2 == pytest.approx(squares(blocks_of(rounds), starts).max(), rel=1e-12)


@pytest.mark.parametrize("tree", TREES)
@given(data=st.data(), rounds=st.integers(1, 60))
def test_pattern_norm_counts_participations_in_blocks(tree: str, data, rounds):
    mechanism, blocks_of = TREES[tree]
    pattern = sorted(data.draw(st.sets(st.integers(0, rounds - 1), min_size=1)))
    taken = np.zeros((1, rounds))
    taken[0, pattern] = 1
    wanted = squares(blocks_of(rounds), taken)[0]
    assert mechanism.pattern_norm(pattern, rounds) ** 2 == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("rounds", "min_sep", "most", "squared"),
    [
        (2350, 438, 5, 92),
        (430, 92, 4, 43),
        (430, 92, 5, 53),
        (2000, 314, 6, 79),
        (2000, 400, 5, 60),
    ],
)
def test_trees_of_production_runs_have_the_values_of_independent_programs(
    rounds, min_sep, most, squared
):
    participation = MinSep(rounds, min_sep, most)
    for tree in (BinaryTree(), BinaryTree(refine=False), FullTree(rounds)):
        found = tree.sensitivity(participation)
        assert found.kind == "exact"
        assert found.value**2 == pytest.approx(squared, rel=1e-12)


def test_the_earliest_pattern_is_not_always_the_worst_for_trees():
    """The control: the pattern that the paper calls tight in practice stops at 90, not 92."""
    participation = MinSep(2350, 438, 5)
    greedy = BinaryTree().pattern_norm(participation.earliest(), 2350)
    assert greedy**2 == pytest.approx(90)
    assert BinaryTree().sensitivity(participation).value > greedy


@pytest.mark.parametrize("tree", TREES)
@given(rounds=st.integers(1, 30), min_sep=st.integers(1, 31), most=st.integers(1, 30))
def test_a_program_that_takes_too_long_is_replaced_by_a_valid_upper_bound(
    tree: str, rounds, min_sep, most
):
    mechanism, _ = TREES[tree]
    participation = MinSep(rounds, min_sep, most)
    exact = mechanism.sensitivity(participation)
    with limits(MOST_WORK=1):
        found = mechanism.sensitivity(participation)
    assert found.value >= exact.value * (1 - 1e-12)
    assert found.lower_bound <= exact.value * (1 + 1e-12)
    if found.kind == "exact":
        assert found.value == pytest.approx(exact.value, rel=1e-12)
    if found.pattern is not None:
        attained = mechanism.pattern_norm(found.pattern, rounds)
        assert found.lower_bound == pytest.approx(attained, rel=1e-12)


@pytest.mark.parametrize("tree", TREES)
def test_the_upper_bound_is_close_to_the_exact_value(tree: str):
    """It takes over at sizes where nothing else is known: it must not be out by a factor."""
    mechanism, _ = TREES[tree]
    participations = [MinSep(n, gap) for n in (24, 47, 60) for gap in (3, 7, 11)]
    exact = [mechanism.sensitivity(p).value for p in participations]
    with limits(MOST_WORK=1):
        bounds = [mechanism.sensitivity(p) for p in participations]
    assert any(found.kind == "upper bound" for found in bounds)
    assert all(found.value <= 1.5 * value for found, value in zip(bounds, exact, strict=True))


def test_a_bound_for_the_wrong_gap_would_be_noticed():
    """The control: with one round more between participations the bound falls below the truth."""
    truth = squares(dyadic_blocks(16), every_pattern(16, 2)).max() ** 0.5
    with limits(MOST_WORK=1):
        assert BinaryTree().sensitivity(MinSep(16, 2)).value >= truth
        assert BinaryTree().sensitivity(MinSep(16, 3)).value < truth


@pytest.mark.parametrize("work", [1, 10**9], ids=["bound", "programme"])
@pytest.mark.parametrize("tree", TREES)
@given(rounds=st.integers(1, 30), min_sep=st.integers(1, 31), most=st.integers(1, 30))
def test_fixed_epochs_with_many_starts_are_bounded(tree: str, work: int, rounds, min_sep, most):
    """Too many patterns to list are covered by those of any gaps, without claiming more."""
    mechanism, _ = TREES[tree]
    participation = FixedEpochs(rounds, min_sep, most)
    exact = mechanism.sensitivity(participation).value
    with limits(MOST_PATTERNS=0, MOST_WORK=work):
        found = mechanism.sensitivity(participation)
    assert found.lower_bound * (1 - 1e-12) <= exact <= found.value * (1 + 1e-12)


@pytest.mark.parametrize(("rounds", "min_sep"), [(10**9, 10**7), (2**40, 2**36), (10**6, 10**4)])
def test_very_long_runs_get_an_answer_in_time(rounds: int, min_sep: int):
    with limits(MOST_WORK=10**7):
        found = BinaryTree().sensitivity(MinSep(rounds, min_sep))
    assert 0 < found.lower_bound <= found.value < float("inf")


@pytest.mark.parametrize("tree", [BinaryTree(), SmoothTree(128)], ids=str)
def test_runs_beyond_64_bits_get_an_answer_or_a_refusal(tree):
    try:
        found = tree.sensitivity(MinSep(2**70, 2**68))
    except DpftrlError:
        return
    assert 0 < found.lower_bound <= found.value < float("inf")
