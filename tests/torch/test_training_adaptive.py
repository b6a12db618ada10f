"""Adaptive clipping of PyTorch gradients: sums by hand, norms, and the same bits after a stop."""

import math
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from small_private_trainings import (  # noqa: E402
    EXAMPLES,
    INPUTS,
    LABELS,
    STEPS,
    bits,
    loss_fn,
    private,
    small_model,
    train,
)
from small_training_runs import Place, failed_checks, fast_places, journal_records  # noqa: E402
from torch import nn  # noqa: E402

from dpftrl import AdaptiveClipping  # noqa: E402
from dpftrl.clipping import Grid, JointClip  # noqa: E402
from dpftrl.errors import InvalidInput  # noqa: E402
from dpftrl.torch.gradients import ClippedSums  # noqa: E402

GRID = Grid(2.0**-40, 1.0)
BETA = 0.4


@pytest.fixture
def place() -> Iterator[Place]:
    with fast_places() as places:
        yield next(places)


def gradient(model: nn.Module, row: int, scale: float = 1.0) -> np.ndarray:
    model.zero_grad()
    (scale * loss_fn(model, (INPUTS[row : row + 1], LABELS[row : row + 1]))).backward()
    found = [p.grad.numpy().reshape(-1).astype(np.float64) for p in model.parameters()]
    model.zero_grad()
    return np.concatenate(found)


@pytest.mark.parametrize("clip_norm", [1e-3, 0.5, 1.0, 1e3])
def test_the_joint_sum_is_that_of_a_plain_loop(clip_norm):
    model = small_model()
    sums = ClippedSums(model, GRID, largest_batch=EXAMPLES)
    sums.joint = JointClip(clip_norm, BETA)
    stats = sums.add(loss_fn, (INPUTS, LABELS))
    root, wanted, signs = math.sqrt(1 - BETA**2), np.zeros(sums.size), 0
    for row in range(EXAMPLES):
        own = gradient(model, row)
        norm = np.linalg.norm(own)
        wanted += root * own / max(norm, clip_norm)
        signs += 1 if norm <= clip_norm else -1
    assert sums.steps * GRID.step == pytest.approx(wanted, abs=1e-5)
    assert sums.joint_steps()[-1] == signs * math.floor(BETA / GRID.step)
    assert stats.clipped == (EXAMPLES - signs) // 2


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e10, 1e30, math.inf])
@pytest.mark.parametrize("clip_norm", [1e-6, 0.7, 1e6])
def test_no_unit_moves_the_joint_sum_by_more_than_1(scale, clip_norm):
    model = small_model()
    sums = ClippedSums(model, GRID, largest_batch=1)
    sums.joint = JointClip(clip_norm, 0.9)
    for row in range(3):
        sums.add(lambda m, b: scale * loss_fn(m, b), (INPUTS[row : row + 1], LABELS[row : row + 1]))
        steps = sums.joint_steps().tolist()
        assert sum(step * step for step in steps) <= round(1 / GRID.step) ** 2
        assert any(steps) == math.isfinite(scale)


@pytest.mark.parametrize("stops", [[], [1, 4, 5, 11]])
def test_a_training_resumes_to_the_same_bits_and_verifies(place, stops):
    whole, model = small_model(), small_model()
    with private(None, whole, clip_norm="adaptive") as training:
        train(training)
    for stop in [*stops, STEPS]:
        with private(place, model, clip_norm="adaptive") as training:
            train(training, stop)
            training.statement(place.state / "statement")
    assert bits(model) == bits(whole)
    assert failed_checks(place) == {}
    steps = [record for record in journal_records(place) if record["kind"] == "step"]
    norms = [record["clipping"]["state"]["clip_norm"] for record in steps]
    assert norms[0] == 0.1
    assert len(set(norms)) == STEPS
    (clipping,) = (one for one in training.run.hypotheses if one.name == "clipping")
    assert "clip norm of its step" in clipping.text
    assert training.run.moving is not None
    assert "adaptive" in (place.state / "statement.md").read_text()


def test_another_clip_norm_is_refused_when_a_run_is_resumed(place):
    with private(place, small_model(), clip_norm="adaptive") as training:
        train(training, 2)
    for other in (0.8, AdaptiveClipping(start=0.2)):
        with pytest.raises(InvalidInput, match="clip_norm"):
            private(place, small_model(), clip_norm=other)
    with pytest.raises(InvalidInput, match="clip_norm"):
        private(None, small_model(), clip_norm="median")


def test_edited_steps_fail_verification(place, monkeypatch):
    from dpftrl.noise import NoiseStream

    honest = NoiseStream.add_to

    def careless(self, total, *args, **options):
        raw = total.steps[-1]
        honest(self, total, *args, **options)
        total.steps[-1] = raw  # the bits are released without noise

    monkeypatch.setattr(NoiseStream, "add_to", careless)
    with private(place, small_model(), clip_norm="adaptive") as training:
        train(training, 3)
    assert "noise of that row" in failed_checks(place)["clip norms"]
