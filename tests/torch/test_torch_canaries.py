"""Canaries in private trainings with PyTorch: audited, verified, resumed, and refused."""

import pytest
import torch
from small_training_runs import Place
from torch import nn

from dpftrl import InvalidInput, verify_run
from dpftrl.auditing.canaries import PUBLIC
from dpftrl.auditing.run import audit_run
from dpftrl.errors import UnsafeState
from dpftrl.noise import NoiseStream
from dpftrl.torch import make_private

INPUTS = torch.randn(60, 30, generator=torch.Generator().manual_seed(1))
DATA = torch.utils.data.TensorDataset(INPUTS, (INPUTS[:, 0] > 0).long())


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def private(place: Place, **changes):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 60), nn.ReLU(), nn.Linear(60, 2))
    options = {
        "folder": place.folder,
        "state_folder": place.state,
        "clip_norm": 1.0,
        "epsilon": 8.0,
        "delta": 1e-4,
        "epochs": 3,
        "batch_size": 20,
        "sampling": "none",
        "mechanism": "blt-b400",
        "canaries": 400,
        "commit_every": 4,
        **changes,
    }
    return make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), DATA, **options)


def train(training, until=None):
    for batch in training.loader:
        training.step(loss_fn, batch)
        if training.steps == until:
            break


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "run", tmp_path / "state")


def test_a_training_with_canaries_is_consistent_with_its_claim(place, tmp_path):
    with private(place) as training:
        train(training)
        training.statement(tmp_path / "statement")
    assert "400 artificial participants" in (tmp_path / "statement.md").read_text()
    assert verify_run(place.folder, place.state).passed
    found = audit_run(place.folder)
    assert not found.exceeds_claim
    assert found.rounds == 9
    assert found.mu_independent > 0.5 * found.claim.mu


def test_noise_divided_by_4_is_rejected(place, monkeypatch):
    import dpftrl.centralized.run as centralized

    def too_small(plan, size, *, key, clip_norm, threads):
        return NoiseStream.unchecked(
            plan.mechanism,
            size,
            noise_multiplier=plan.noise_multiplier / 4,
            key=key,
            clip_norm=clip_norm,
            threads=threads,
        )

    monkeypatch.setattr(centralized, "NoiseStream", too_small)
    monkeypatch.setattr(centralized.RunStore, "noise_at_checkpoint", lambda _, noise: noise)
    with private(place) as training:
        train(training)
    found = audit_run(place.folder)
    assert found.exceeds_claim
    assert found.mu_independent > found.claim.mu


def test_a_resumed_training_repeats_its_steps_with_the_same_canaries(place):
    with private(place) as training:
        train(training, until=6)  # two steps after the last checkpoint
    with private(place) as training:
        assert training.steps == 4
        train(training)
    found = audit_run(place.folder)
    assert found.rounds == 9
    assert found.mu_independent > 0.5 * found.claim.mu


@pytest.mark.parametrize("change", ["edited", "removed"])
def test_the_public_file_is_sealed(place, change):
    with private(place) as training:
        train(training, until=4)
    assert verify_run(place.folder, place.state).passed
    path = place.folder / PUBLIC
    content = path.read_bytes()
    if change == "edited":
        path.write_bytes(content.replace(b"400", b"300"))
    else:
        path.unlink()
    verdict = verify_run(place.folder, place.state)
    assert not verdict.passed
    assert [check.name for check in verdict.checks if check.outcome == "failed"] == [
        "settings and plan"
    ]
    with pytest.raises((UnsafeState, InvalidInput), match=PUBLIC):
        private(place, canaries=300)
    path.write_bytes(content)
    assert verify_run(place.folder, place.state).passed


def test_a_file_of_canaries_that_was_added_later_gives_a_warning(place, tmp_path):
    with private(place, canaries=0) as training:
        train(training, until=4)
    with private(Place(tmp_path / "other", tmp_path / "other state")):
        pass
    (place.folder / PUBLIC).write_bytes((tmp_path / "other" / PUBLIC).read_bytes())
    verdict = verify_run(place.folder, place.state)
    (check,) = [one for one in verdict.checks if one.name == "settings and plan"]
    assert check.outcome == "warning"
    assert "not sealed" in check.text


def test_another_number_of_canaries_is_refused(place):
    with private(place) as training:
        train(training, until=4)
    for other in (0, 401):
        with pytest.raises(InvalidInput, match="400 canaries"):
            private(place, canaries=other)


def test_trainings_that_cannot_have_canaries_are_refused(place):
    with pytest.raises(InvalidInput, match="sampling='none'"):
        private(place, sampling="poisson", mechanism=None)
    assert not place.folder.exists()  # refused before there are any files
    with pytest.raises(InvalidInput, match="adaptive"):
        private(place, clip_norm="adaptive")
    assert not place.folder.exists()
    with pytest.raises(InvalidInput, match="folder"):
        private(Place(None, None))
