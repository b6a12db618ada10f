"""What leaves a device is no longer than the clip norm."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dpftrl.engines.flower.clipping import write_update
from dpftrl.errors import InvalidInput

Arrays = dict[str, NDArray[Any]]


def clipped_update(handed: Arrays, trained: Arrays, clip_norm: float) -> Arrays:
    update = {name: np.full(array.shape, 7, np.float32) for name, array in handed.items()}
    write_update(update, handed, trained, clip_norm)
    return update


def test_a_small_update_is_not_scaled() -> None:
    found = clipped_update({"w": np.zeros(3)}, {"w": np.full(3, 0.1)}, 1.0)
    assert found["w"].tolist() == np.full(3, 0.1, np.float32).tolist()
    assert clipped_update({"w": np.ones(2)}, {"w": np.ones(2)}, 1.0)["w"].tolist() == [0, 0]


def test_clipping_is_done_in_float64() -> None:
    large = np.float32(3e30)  # its square has no place in float32
    found = clipped_update({"w": np.zeros(2, np.float32)}, {"w": np.array([large, 0])}, 1.0)
    assert found["w"].tolist() == [pytest.approx(1.0, rel=2e-7), 0.0]


def test_nan_is_passed_on_for_the_server_to_count_as_zeros() -> None:
    found = clipped_update({"w": np.zeros(2)}, {"w": np.array([np.nan, 1.0])}, 1.0)
    assert np.isnan(found["w"]).any()


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 37.0, 1e10, 1e30, 3e38])
@pytest.mark.parametrize("clip_norm", [1e-6, 0.5, 1.0, 1e6])
def test_no_norm_passes_the_clip_norm(kind: type, scale: float, clip_norm: float) -> None:
    dice = np.random.default_rng(0)
    trained = {"w": (scale * dice.uniform(-1, 1, (70, 1000))).astype(kind), "b": np.ones(3, kind)}
    handed = {"w": np.zeros((70, 1000), np.float32), "b": np.zeros(3, np.float32)}
    found = clipped_update(handed, trained, clip_norm)

    def norm(arrays: dict[str, NDArray[np.generic]]) -> float:
        return float(np.sqrt(sum(np.sum(a.astype(np.float64) ** 2) for a in arrays.values())))

    whole = norm(trained)
    # Each number is rounded once to float32: up or down, by no more than this.
    assert norm(found) <= min(clip_norm, whole) * (1 + 2**-24)
    if clip_norm / whole > 1e-37:  # below that, float32 has fewer digits
        assert norm(found) >= min(clip_norm, whole) * (1 - 2**-22)
    assert all(array.dtype == np.float32 for array in found.values())
    assert all((array == 0).all() for array in handed.values())


def test_an_array_without_dimensions_is_clipped_too() -> None:
    found = clipped_update({"w": np.array(0.0)}, {"w": np.array(8.0)}, 1.0)
    assert found["w"].shape == ()
    assert found["w"] == pytest.approx(1.0)


@pytest.mark.parametrize("unfit", [np.zeros(3), np.zeros((2, 1)), np.zeros(2, complex)])
def test_what_is_no_update_of_this_model_is_refused(unfit: NDArray[Any]) -> None:
    with pytest.raises((InvalidInput, TypeError)):
        clipped_update({"w": np.zeros(2)}, {"w": unfit}, 1.0)
