"""Numbers from elsewhere: independent implementations, and decoders written out by hand."""

import numpy as np
import pytest

import dpftrl
from dpftrl import MinSep

PAPER = MinSep(rounds=2052, min_sep=342, max_participations=6)


@pytest.mark.parametrize(
    ("name", "max_loss", "rms_loss", "half_a_digit"),
    [
        ("independent", 110.96, 78.48, 0.005),
        ("sqrt", 11.401, 10.870, 0.0005),
        ("band-sqrt:342", 11.048, 8.978, 0.0005),
        ("band-sqrt", 11.048, 8.978, 0.0005),
        ("tree-full", 14.98, 12.47, 0.005),
    ],
)
def test_losses_at_the_size_of_the_paper(name, max_loss, rms_loss, half_a_digit):
    loss = dpftrl.mechanism(name, PAPER).error_report(PAPER)
    assert loss.sensitivity.kind == "exact"
    assert loss.max_loss == pytest.approx(max_loss, abs=half_a_digit)
    assert loss.rms_loss == pytest.approx(rms_loss, abs=half_a_digit)


def test_one_participation_more_or_less_would_be_noticed():
    """The control: the printed digits do not fit any neighbouring participation."""
    for other in (MinSep(2052, 342, 5), MinSep(2052, 341, 7), MinSep(2053, 342, 7)):
        loss = dpftrl.mechanism("sqrt").error_report(other)
        assert loss.max_loss != pytest.approx(11.401, abs=0.0005)


def test_independent_noise_has_losses_known_in_closed_form():
    loss = dpftrl.Independent().error_report(PAPER)
    assert loss.max_loss == pytest.approx((6 * 2052) ** 0.5, rel=1e-14)
    assert loss.rms_loss == pytest.approx((6 * 2053 / 2) ** 0.5, rel=1e-14)


def tree_rows(rounds: int) -> np.ndarray:
    """The strategy of a tree: every complete dyadic block, in any order."""
    rows = []
    size = 1
    while size <= rounds:
        for start in range(0, rounds - size + 1, size):
            row = np.zeros(rounds)
            row[start : start + size] = 1
            rows.append(row)
        size *= 2
    return np.array(rows)


@pytest.mark.parametrize("rounds", [1, 2, 3, 7, 8, 21, 64, 100, 255])
def test_the_full_tree_has_the_error_of_the_pseudoinverse(rounds: int):
    prefix = np.tril(np.ones((rounds, rounds)))
    wanted = np.linalg.norm(prefix @ np.linalg.pinv(tree_rows(rounds)), axis=1)
    full = dpftrl.FullTree(rounds)
    np.testing.assert_allclose(full.error_curve(rounds), wanted, rtol=1e-10)
    assert full.max_error(rounds) == pytest.approx(wanted.max(), rel=1e-10)
    assert full.rms_error(rounds) == pytest.approx((wanted**2).mean() ** 0.5, rel=1e-10)


@pytest.mark.parametrize("rounds", [1, 5, 8, 30])
def test_the_full_tree_streams_noise_with_the_covariance_of_the_pseudoinverse(rounds: int):
    decoder = dpftrl.FullTree(rounds).decoder(rounds)
    best = np.linalg.pinv(tree_rows(rounds))
    np.testing.assert_allclose(decoder @ decoder.T, best @ best.T, atol=1e-12)
    strategy = dpftrl.FullTree(rounds).strategy(rounds)
    wanted = tree_rows(rounds).T @ tree_rows(rounds)
    np.testing.assert_allclose(strategy.T @ strategy, wanted, atol=1e-10)
    assert np.array_equal(strategy, np.tril(strategy))


@pytest.mark.parametrize("rounds", [1, 2, 3, 8, 13, 32, 50])
def test_no_decoder_of_the_tree_beats_the_full_one(rounds: int):
    """And refining beats not refining."""
    full = dpftrl.FullTree(rounds).error_curve(rounds)
    refined = dpftrl.BinaryTree().error_curve(rounds)
    plain = dpftrl.BinaryTree(refine=False).error_curve(rounds)
    assert np.all(full <= refined * (1 + 1e-12))
    assert np.all(refined <= plain * (1 + 1e-12))


@pytest.mark.parametrize("rounds", [1, 2, 3, 8, 13, 32, 50])
def test_trees_have_the_nodes_written_down_by_hand(rounds: int):
    rows = dpftrl.BinaryTree().strategy(rounds)
    assert sorted(map(tuple, rows)) == sorted(map(tuple, tree_rows(rounds)))


def test_the_third_prefix_of_a_tree_uses_the_nodes_three_and_four():
    """Nodes count as they are completed: leaf 1, leaf 2, their sum, leaf 3, ..."""
    prefixes = np.cumsum(dpftrl.BinaryTree(refine=False).decoder(3), axis=0)
    np.testing.assert_allclose(prefixes[2], [0, 0, 1, 1], atol=1e-15)


def test_the_square_root_squares_to_prefix_sums():
    root = dpftrl.SquareRoot().strategy(50)
    np.testing.assert_allclose(root @ root, np.tril(np.ones((50, 50))), rtol=1e-12)
