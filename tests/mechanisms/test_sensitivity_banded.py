"""Banded strategies against brute force over patterns, signs and directions."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance import allowed_patterns, participations, true_sensitivity
from dpftrl import Banded, DpftrlError, FixedEpochs, MinSep
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import _banded_sensitivity as banded
from dpftrl.mechanisms._banded_sensitivity import (
    banded_pattern_norm,
    banded_sensitivity,
    gram_at_gap,
)


def dense(columns: np.ndarray) -> np.ndarray:
    """C written out an entry at a time."""
    bands, rounds = columns.shape
    strategy = np.zeros((rounds, rounds))
    for p in range(bands):
        for j in range(rounds - p):
            strategy[j + p, j] = columns[p, j]
    return strategy


def random_columns(seed: int, bands: int, rounds: int, low: float) -> np.ndarray:
    random = np.random.default_rng(seed)
    columns = random.uniform(low, 1.0, (bands, rounds))
    columns[0] = random.uniform(0.2, 1.5, rounds)
    for p in range(bands):
        columns[p, rounds - p :] = 0.0
    return columns


def best_directions(gram: np.ndarray, seed: int) -> float:
    """The norm of C u for unit vectors u_t in the plane or beyond, improved one at a time.

    With frustrated signs (a triangle of negative entries) directions beat any choice of signs.
    """
    size = len(gram)
    vectors = np.random.default_rng(seed).standard_normal((size, size))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    for _ in range(12):
        for i in range(size):
            pull = gram[i] @ vectors - gram[i, i] * vectors[i]
            if (length := np.linalg.norm(pull)) > 0:
                vectors[i] = pull / length
    return float(np.einsum("ij,id,jd->", gram, vectors, vectors)) ** 0.5


SEEDS = st.integers(0, 2**32)
LOWS = {"positive": 0.0, "mixed": -1.0}
# Rounds, bands and min-sep for each way in which participations can interact.
REGIMES = {
    "bands <= min_sep": st.integers(2, 5).flatmap(
        lambda gap: st.tuples(st.integers(5, 12), st.integers(1, gap), st.just(gap))
    ),
    "bands <= 2 min_sep": st.integers(2, 4).flatmap(
        lambda gap: st.tuples(st.integers(9, 12), st.integers(gap + 1, 2 * gap), st.just(gap))
    ),
    "bands > 2 min_sep": st.integers(1, 3).flatmap(
        lambda gap: st.tuples(st.integers(7, 9), st.integers(2 * gap + 1, 7), st.just(gap))
    ),
}


@pytest.mark.parametrize("signs", LOWS)
@pytest.mark.parametrize("regime", REGIMES)
@given(data=st.data(), seed=SEEDS)
def test_the_dynamic_program_is_never_below_brute_force(regime: str, signs: str, data, seed):
    rounds, bands, gap = data.draw(REGIMES[regime])
    participation = MinSep(rounds, gap, data.draw(st.integers(1, 5)))
    columns = random_columns(seed, bands, rounds, LOWS[signs])
    found = banded_sensitivity(columns, participation)
    attained, bound = true_sensitivity(dense(columns), participation)
    assert found.value >= attained * (1 - 1e-12)
    assert found.lower_bound <= bound * (1 + 1e-12)
    if found.kind == "exact":
        assert found.value <= bound * (1 + 1e-9)
    if regime == "bands <= min_sep":
        assert found.kind == "exact"
    if signs == "positive" and regime == "bands <= 2 min_sep":
        assert found.kind == "exact"
        assert found.value == pytest.approx(attained, rel=1e-12)
    if regime == "bands <= 2 min_sep":
        assert found.value == pytest.approx(bound, rel=1e-9)
    if found.pattern is not None:
        assert found.pattern in allowed_patterns(participation)
        moved = np.linalg.norm(dense(columns)[:, list(found.pattern)].sum(axis=1))
        assert found.lower_bound == pytest.approx(moved, rel=1e-9)


@given(seed=SEEDS, bands=st.integers(2, 6), gap=st.integers(1, 3))
def test_updates_that_point_in_any_direction_are_covered(seed, bands, gap):
    participation = MinSep(7, gap)
    columns = random_columns(seed, bands, 7, -1.0)
    strategy = dense(columns)
    gram = strategy.T @ strategy
    value = banded_sensitivity(columns, participation).value
    for pattern in allowed_patterns(participation):
        if len(pattern) >= 3:
            reached = best_directions(gram[np.ix_(pattern, pattern)], seed)
            assert value >= reached * (1 - 1e-12)
            assert banded_pattern_norm(columns, pattern) >= reached * (1 - 1e-12)


def test_updates_in_other_directions_can_exceed_all_choices_of_signs():
    """The control: with three columns that repel each other, signs alone are not the worst."""
    gram = np.array([[1.0, -0.4, -0.4], [-0.4, 1.0, -0.4], [-0.4, -0.4, 1.0]])
    signs = max(np.array(s) @ gram @ s for s in [(1, 1, 1), (1, 1, -1), (1, -1, 1), (1, -1, -1)])
    assert best_directions(gram, 0) ** 2 > signs + 0.1


@pytest.mark.parametrize("signs", LOWS)
@given(data=st.data(), seed=SEEDS, rounds=st.integers(1, 9))
def test_fixed_epochs_are_bounded_and_their_pattern_attains_what_it_claims(
    signs: str, data, seed, rounds
):
    columns = random_columns(seed, data.draw(st.integers(1, rounds)), rounds, LOWS[signs])
    gap, most = data.draw(st.integers(1, rounds + 1)), data.draw(st.integers(1, rounds))
    participation = FixedEpochs(rounds, gap, most)
    found = banded_sensitivity(columns, participation)
    attained, bound = true_sensitivity(dense(columns), participation)
    assert attained * (1 - 1e-12) <= found.value
    assert found.lower_bound <= bound * (1 + 1e-12)
    if signs == "positive":
        assert found.kind == "exact"
        assert found.value == pytest.approx(attained, rel=1e-12)
    assert found.pattern is not None
    moved = np.linalg.norm(dense(columns)[:, list(found.pattern)].sum(axis=1))
    assert found.lower_bound == pytest.approx(moved, rel=1e-9)


@pytest.mark.parametrize("limit", ["MOST_WORK", "MOST_ENTRIES"])
@pytest.mark.parametrize("signs", LOWS)
@given(data=st.data(), seed=SEEDS, rounds=st.integers(1, 9))
def test_the_majorant_bound_used_for_large_problems_is_valid(
    limit: str, signs: str, data, seed, rounds
):
    columns = random_columns(seed, data.draw(st.integers(1, rounds)), rounds, LOWS[signs])
    participation = data.draw(participations(rounds))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(banded, limit, -1)
        found = banded_sensitivity(columns, participation)
    attained, bound = true_sensitivity(dense(columns), participation)
    assert found.value >= attained * (1 - 1e-12)
    assert found.lower_bound <= bound * (1 + 1e-12)
    if found.kind == "exact":
        assert found.value <= bound * (1 + 1e-9)


@pytest.mark.parametrize("signs", LOWS)
@given(data=st.data(), seed=SEEDS, rounds=st.integers(1, 9))
def test_fixed_epochs_with_many_starts_are_bounded(signs: str, data, seed, rounds):
    """Too many patterns to list are covered by those of any gaps, without claiming more."""
    columns = random_columns(seed, data.draw(st.integers(1, rounds)), rounds, LOWS[signs])
    gap, most = data.draw(st.integers(1, rounds + 1)), data.draw(st.integers(1, rounds))
    participation = FixedEpochs(rounds, gap, most)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(banded, "MOST_PATTERNS", 0, raising=False)
        found = banded_sensitivity(columns, participation)
    attained, bound = true_sensitivity(dense(columns), participation)
    assert found.value >= attained * (1 - 1e-12)
    assert found.lower_bound <= bound * (1 + 1e-12)
    if found.kind == "exact":
        assert found.value <= bound * (1 + 1e-9)


def test_the_majorant_bound_replaces_a_program_that_takes_too_long(monkeypatch):
    """The control: under the limit the answer is exact, above it a bound."""
    columns = random_columns(3, 4, 12, 0.0)
    participation = MinSep(12, 2)
    assert banded_sensitivity(columns, MinSep(12, 2)).kind == "exact"
    monkeypatch.setattr(banded, "MOST_WORK", -1)
    assert banded_sensitivity(columns, participation).kind == "upper bound"


def test_ignoring_interactions_would_be_noticed():
    """The control: column norms alone are below brute force once bands overlap."""
    columns = np.ones((4, 9))
    participation = MinSep(9, 2)
    norms_only = (participation.max_participations * (columns**2).sum(axis=0).max()) ** 0.5
    assert norms_only < true_sensitivity(dense(columns), participation).attained


@given(seed=SEEDS, rounds=st.integers(2, 9), bands=st.integers(1, 9))
def test_gram_entries_are_those_of_the_dense_matrix(seed, rounds, bands):
    columns = random_columns(seed, min(bands, rounds), rounds, -1.0)
    gram = dense(columns).T @ dense(columns)
    for gap in range(min(bands, rounds)):
        wanted = np.diagonal(gram, gap)
        np.testing.assert_allclose(gram_at_gap(columns, gap), wanted, atol=1e-13)


def test_long_runs_agree_with_the_sum_over_separate_stretches():
    """Bands of 2 and a min-sep of 2 make columns orthogonal: the answer is the best few columns.

    They are chosen by hand at the far end of a run too long for brute force.
    """
    rounds = 3000
    columns = np.ones((2, rounds))
    columns[1, -1] = 0.0
    columns[:, [100, 2000, 2500]] = 3.0
    columns[:, 101] = 2.9  # too near to round 100 to be taken with it
    found = Banded(columns).sensitivity(MinSep(rounds, 2, 4))
    assert found.kind == "exact"
    assert found.value**2 == pytest.approx(3 * 18 + 2)
    assert found.pattern is None or {100, 2000, 2500} < set(found.pattern)


@pytest.mark.parametrize("power", [-600, -300, 300, 600])
@pytest.mark.parametrize("kind", [MinSep, FixedEpochs])
def test_very_small_and_very_large_entries_are_never_underestimated(power: int, kind):
    """Squares leave the range of floats long before the numbers do: refusing is fine, 0 is not."""
    columns = random_columns(5, 3, 8, 0.0)
    participation = kind(8, 2)
    wanted = banded_sensitivity(columns, participation).value * 2.0**power
    try:
        found = Banded(columns * 2.0**power).sensitivity(participation)
    except DpftrlError:
        return
    assert wanted <= found.value * (1 + 1e-12)
    assert np.isfinite(found.value)


@pytest.mark.parametrize(
    "columns",
    [
        [[1.0, 2.0], [3.0]],
        [["x", "y"]],
        [["1.0", "2.0"]],
        [[10**400, 1.0]],
        [[1j, 1.0]],
        [[None, 1.0]],
        [[float("nan"), 1.0]],
        [[float("inf"), 1.0]],
        [[0.0, 1.0]],
        [[-1.0, 1.0]],
        [[1.0, 1.0], [0.5, 0.5]],
        [[1.0], [0.0]],
        [1.0, 1.0],
        [],
        [[]],
        [[[1.0]]],
        1.0,
        None,
        "columns",
        {"a": 1},
        {1.0},
        object(),
    ],
    ids=lambda columns: re.sub(r" at 0x\w+", "", repr(columns))[:30],
)
def test_arrays_that_are_not_banded_matrices_are_refused(columns):
    with pytest.raises(InvalidInput) as refused:
        Banded(columns)
    assert "\n" not in str(refused.value)
