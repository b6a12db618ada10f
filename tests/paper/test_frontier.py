"""The lower bound on the loss of every mechanism."""

import numpy as np
import pytest

from dpftrl import BinaryTree, Independent, MinSep, SquareRoot
from dpftrl.optimize import optimize_blt
from dpftrl.paper.frontier import lower_bound


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
