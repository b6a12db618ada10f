"""Updates that leave a device never exceed the clip norm."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput
from dpftrl.flower.client import BLOCK, write_update

Arrays = dict[str, NDArray[Any]]


def clipped_update(received: Arrays, trained: Arrays, clip_norm: float) -> Arrays:
    update = {name: np.full(array.shape, 7, np.float32) for name, array in received.items()}
    write_update(update, received, trained, clip_norm)
    return update


def test_a_small_update_is_not_scaled() -> None:
    update = clipped_update({"w": np.zeros(3)}, {"w": np.full(3, 0.1)}, 1.0)
    assert update["w"].tolist() == np.full(3, 0.1, np.float32).tolist()
    assert clipped_update({"w": np.ones(2)}, {"w": np.ones(2)}, 1.0)["w"].tolist() == [0, 0]


def test_clipping_is_done_in_float64() -> None:
    large = np.float32(3e30)  # its square overflows float32
    update = clipped_update({"w": np.zeros(2, np.float32)}, {"w": np.array([large, 0])}, 1.0)
    assert update["w"].tolist() == [pytest.approx(1.0, rel=2e-7), 0.0]


def test_nan_is_sent_unchanged() -> None:
    update = clipped_update({"w": np.zeros(2)}, {"w": np.array([np.nan, 1.0])}, 1.0)
    assert np.isnan(update["w"]).any()


@pytest.mark.parametrize("kind", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 37.0, 1e10, 1e30, 3e38])
@pytest.mark.parametrize("clip_norm", [1e-6, 0.5, 1.0, 1e6])
def test_the_norm_never_exceeds_the_clip_norm(kind: type, scale: float, clip_norm: float) -> None:
    dice = np.random.default_rng(0)
    trained = {"w": (scale * dice.uniform(-1, 1, (70, 1000))).astype(kind), "b": np.ones(3, kind)}
    received = {"w": np.zeros((70, 1000), np.float32), "b": np.zeros(3, np.float32)}
    update = clipped_update(received, trained, clip_norm)

    def norm(arrays: dict[str, NDArray[np.generic]]) -> float:
        return float(np.sqrt(sum(np.sum(a.astype(np.float64) ** 2) for a in arrays.values())))

    whole = norm(trained)
    # Each number is rounded once to float32, by at most this factor.
    assert norm(update) <= min(clip_norm, whole) * (1 + 2**-24)
    if clip_norm / whole > 1e-37:  # below that, float32 has fewer digits
        assert norm(update) >= min(clip_norm, whole) * (1 - 2**-22)
    assert all(array.dtype == np.float32 for array in update.values())
    assert all((array == 0).all() for array in received.values())


def test_an_array_without_dimensions_is_clipped_too() -> None:
    update = clipped_update({"w": np.array(0.0)}, {"w": np.array(8.0)}, 1.0)
    assert update["w"].shape == ()
    assert update["w"] == pytest.approx(1.0)


@pytest.mark.parametrize("unfit", [np.zeros(3), np.zeros((2, 1)), np.zeros(2, complex)])
def test_a_model_of_other_names_or_shapes_is_refused(unfit: NDArray[Any]) -> None:
    with pytest.raises((InvalidInput, TypeError)):
        clipped_update({"w": np.zeros(2)}, {"w": unfit}, 1.0)


@pytest.mark.parametrize("order", ["CC", "CF", "FC", "FF"])
def test_fortran_order_does_not_move_numbers(order: str) -> None:
    received = np.array([[1, 2, 3], [4, 5, 6]], np.float32, order=order[0])
    change = np.array([[1, 0, 2], [-1, 3, 4]], np.float32) / 64
    trained = np.array(received + change, order=order[1])
    assert clipped_update({"w": received}, {"w": trained}, 1.0)["w"].tolist() == change.tolist()


def test_arrays_are_matched_by_name_not_by_position() -> None:
    trained = {"b": np.full(2, 0.25), "a": np.full(2, -0.5)}
    update = clipped_update({"a": np.zeros(2), "b": np.zeros(2)}, trained, 9.0)
    assert (update["a"].tolist(), update["b"].tolist()) == ([-0.5, -0.5], [0.25, 0.25])


@pytest.mark.parametrize("clip_norm", [0.1, 0.2, 1 / 3, 0.7, 0.9])
def test_the_scaling_factor_is_rounded_down(clip_norm: float) -> None:
    """The update is a power of two, so that only the factor is rounded."""
    update = clipped_update({"w": np.zeros(1)}, {"w": np.array([8.0])}, clip_norm)
    assert clip_norm * (1 - 2**-23) < float(update["w"][0]) <= clip_norm


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_every_number_is_written_once_at_any_block_size(size: int) -> None:
    received, trained = {"w": np.zeros(size)}, {"w": np.ones(size)}
    assert (clipped_update(received, trained, float(size))["w"] == 1).all()
    update = clipped_update(received, trained, 0.5)["w"]
    assert update == pytest.approx(0.5 / size**0.5, rel=1e-6)


@pytest.mark.parametrize("strange", [np.nan, np.inf, 1e39])
def test_a_non_finite_update_sends_no_other_numbers(strange: float) -> None:
    update = clipped_update({"w": np.zeros(3)}, {"w": np.array([strange, 1e9, 0.1])}, 1.0)
    assert not (np.abs(update["w"]) > 0).any()
