"""BLTs that are optimised for a range of rounds and min-seps."""

import pytest

from dpftrl.errors import InvalidInput
from dpftrl.optimize import optimize_blt, optimize_robust_blt


def test_the_robust_blt_has_less_regret_than_any_specialist():
    robust = optimize_robust_blt((200, 800), (40, 160), buffers=3)
    specialists = {regret.participation: regret.specialist for regret in robust.regrets}
    for participation in list(specialists)[::6]:
        blt = optimize_blt(participation, 3).mechanism
        worst = max(blt.error_report(other).max_loss / best for other, best in specialists.items())
        assert robust.worst.ratio < worst
    assert robust.gradient_norm < 1e-5
    assert all(regret.ratio >= 1 - 1e-9 for regret in robust.regrets)
    assert robust.worst.loss == robust.mechanism.error_report(robust.worst.participation).max_loss


def test_a_range_of_one_point_is_the_specialist():
    robust = optimize_robust_blt((300, 300), (50, 50), buffers=2)
    assert robust.worst.ratio == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    "ranges", [((400, 200), (10, 20)), ((200, 400), (20, 10)), ((0, 4), (1, 2)), ((4, 8), (0, 2))]
)
def test_invalid_ranges_are_refused(ranges):
    with pytest.raises(InvalidInput):
        optimize_robust_blt(*ranges)
