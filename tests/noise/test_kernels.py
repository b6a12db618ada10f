"""The inner loops of the noise against plain NumPy."""

import numpy as np
import pytest

from dpftrl.clipping import SHIFT, SHIFT_BITS
from dpftrl.noise.kernels import add_rounded

LARGEST = 2.0**51  # the fast way to round is exact below


@pytest.mark.parametrize("scale", [1.0, 0.5, 3.7, 2.0**-30, 1e6, 2.0**44, LARGEST / 40, 2.0**56])
@pytest.mark.parametrize("size", [0, 1, 3, 2047, 5000])
def test_noise_is_rounded_as_rint_does(scale: float, size: int) -> None:
    rng = np.random.default_rng(size)
    noise = 3 * rng.standard_normal(size)
    halves = np.arange(-40, 40) + 0.5  # ties go to the even neighbour
    noise[: halves.size] = halves[:size]
    total = rng.integers(-(2**40), 2**40, size)
    expected = total + np.rint(scale * noise).astype(np.int64)
    add_rounded(noise, scale, total)
    assert np.array_equal(total, expected)


@pytest.mark.parametrize("number", [LARGEST, -LARGEST - 1, 1.5 * LARGEST, -(2.0**60), 2.0**60])
def test_one_large_number_does_not_spoil_its_neighbours(number: float) -> None:
    noise = np.array([0.5, 1.5, number, -2.5, 0.0, -0.0, 1e-300, LARGEST - 1, -LARGEST])
    total = np.zeros(noise.size, dtype=np.int64)
    add_rounded(noise, 1.0, total)
    assert total.tolist() == [int(x) for x in np.rint(noise)]


def test_the_fast_way_alone_would_be_wrong_for_large_numbers() -> None:
    number = LARGEST * 1.5 + 1
    fast = (np.array([number + SHIFT]).view(np.int64) - SHIFT_BITS).item()
    assert fast != int(number)
