"""What all optimizers share: arguments that they refuse."""

import pytest

from dpftrl import MinSep, Workload
from dpftrl.errors import InvalidInput
from dpftrl.optimize import optimize_band_inverse, optimize_band_toeplitz, optimize_bandmf


@pytest.mark.parametrize("optimize", [optimize_band_toeplitz, optimize_band_inverse])
@pytest.mark.parametrize(
    ("bands", "objective", "message"),
    [
        (0, "rms", "bands must be a whole number of at least 1, got 0"),
        (9, "rms", "bands must be at most the 8 rounds, got 9"),
        (2, "mean", "objective must be max or rms, got 'mean'"),
    ],
)
def test_invalid_arguments_are_refused(optimize, bands, objective, message):
    with pytest.raises(InvalidInput, match=message):
        optimize(MinSep(8, 2), bands, objective)


@pytest.mark.parametrize(
    "optimize", [optimize_band_toeplitz, optimize_band_inverse, optimize_bandmf]
)
def test_learning_rates_that_are_all_zero_are_refused(optimize):
    with pytest.raises(InvalidInput, match="of the first 2 rounds are all zero"):
        optimize(MinSep(2, 2), 2, workload=Workload(learning_rates=(0.0, 0.0, 1.0)))
