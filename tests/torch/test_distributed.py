"""Private training by several processes: the bits of one process, also after kills."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_ranks import Launcher
from small_private_trainings import (
    PLAN,
    STEPS,
    loss_fn,
    plain_data,
    private,
    sgd,
    small_model,
)
from small_training_runs import Place, failed_checks, fast_places

from dpftrl.errors import InvalidInput
from dpftrl.torch.distributed import make_private


@pytest.fixture(scope="module")
def ranks() -> Iterator[Launcher]:
    with Launcher() as launcher:
        yield launcher


@pytest.fixture
def root() -> Iterator[Path]:
    with fast_places() as places:
        place = next(places)
        place.folder.mkdir(parents=True)
        yield place.folder


@pytest.fixture(scope="module")
def one_rank(ranks: Launcher) -> Any:
    """What a single process comes to."""
    return ranks.run("ddp", 1)[0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("count", [2, 4])
def test_several_ranks_come_to_the_bits_of_one(ranks: Launcher, one_rank, root, kind, count):
    answers = ranks.run(kind, count, root)
    for answer in answers:
        assert answer["model"] == one_rank["model"]
        assert answer["losses"] == one_rank["losses"]
        assert answer["epsilon"] == one_rank["epsilon"]
    assert sum(answer["noise_bytes"] for answer in answers) == one_rank["noise_bytes"]
    check_verified(root)


def check_verified(root: Path) -> None:
    """All checks of `dpftrl verify` pass but the one about the test key."""
    assert not failed_checks(Place(root / "run", root / "state"))


def test_a_run_is_resumed_by_other_numbers_of_ranks_and_by_ddp_or_fsdp(ranks, one_rank, root):
    """The steps after the last checkpoint (3 and 6) are repeated by other ranks."""
    ranks.run("fsdp", 4, root, steps=5)
    check_verified(root)
    ranks.run("ddp", 2, root, steps=8)
    check_verified(root)
    (answer,) = ranks.run("fsdp", 1, root, steps=10)
    assert answer["steps"] == 10
    answers = ranks.run("fsdp", 3, root)
    assert {answer["model"] for answer in answers} == {one_rank["model"]}
    check_verified(root)


def test_frozen_parameters_and_wrapped_models(ranks):
    frozen = [ranks.run(kind, 2, frozen=True)[0]["model"] for kind in ("ddp", "fsdp")]
    assert frozen[0] == frozen[1]
    assert ranks.run("wrapped", 2, steps=3)[0]["model"] == ranks.run("ddp", 1, steps=3)[0]["model"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_few_kills_do_no_harm(ranks: Launcher, one_rank, root, kind):
    tally = ranks.run_with_kills([kind], 4, root, kills=3, seed=1)
    assert set(tally.models) == {one_rank["model"]}
    assert not tally.divergences


@pytest.mark.slow
def test_100_kills_of_4_ranks_do_no_harm(ranks: Launcher, one_rank, root):
    tally = ranks.run_with_kills(["ddp", "fsdp"], 4, root, kills=100, seed=2)
    assert tally.kills >= 100
    assert set(tally.models) == {one_rank["model"]}
    assert not tally.divergences
    for number in range(len(tally.models)):
        check_verified(root / f"run {number}")


def test_a_repeated_step_with_another_sum_on_one_rank_is_refused_by_all(ranks, root):
    """Negative control: gradients of rank 1 change after a restart."""
    ranks.run("ddp", 2, root, steps=5)
    answers = ranks.run("ddp", 2, root, scale=1.5, scaled_rank=1)
    assert answers[0]["error"].startswith("UnsafeState: step 3 was done before, with other")
    assert answers[1]["error"].startswith("RankFailed: rank 0 has stopped: UnsafeState: step 3")


def test_different_models_or_arguments_are_refused(ranks, root):
    ranks.run("ddp", 2, root, steps=1)
    answers = ranks.run("ddp", 2, root, options={"clip_norm": 0.5})
    assert all("clip_norm 0.5 instead of 0.8" in answer["error"] for answer in answers)
    answers = ranks.run("ddp", 2, root, options={"clip_norm": "adaptive"})
    assert all("adaptive clipping is not supported" in answer["error"] for answer in answers)


def test_canaries_are_refused(ranks, root):
    """Canaries need a single process, and ranks cannot resume a run that has some."""
    answers = ranks.run("ddp", 2, root, options={"canaries": 4})
    assert all("canaries are not supported with several" in one["error"] for one in answers)
    assert not (root / "run").exists()
    model = small_model()
    with private(Place(root / "run", root / "state"), model, sgd(model), canaries=2) as training:
        for batch in training.loader:
            training.step(loss_fn, batch)
            break
    for options in ({}, {"canaries": 2}):
        answers = ranks.run("ddp", 2, root, options=options)
        assert all("single process" in answer["error"] for answer in answers)


def test_a_changed_shard_is_refused(ranks, root):
    ranks.run("fsdp", 2, root, steps=4)
    (path,) = (root / "run").glob("private/checkpoints/00000003.shard-00001-*.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert set(failed_checks(Place(root / "run", root / "state"))) == {"checkpoints"}
    answers = ranks.run("fsdp", 2, root)
    assert all("was changed since it was written" in answer["error"] for answer in answers)


@pytest.mark.parametrize("damage", ["missing", "changed"])
def test_noise_is_recomputed_if_a_shard_of_it_is_lost(ranks, one_rank, root, damage):
    ranks.run("fsdp", 2, root, steps=4)
    (path,) = (root / "run").glob("private/checkpoints/00000003.shard-00001-*.noise")
    content = path.read_bytes()
    path.unlink() if damage == "missing" else path.write_bytes(content[:-1] + b"!")
    assert ranks.run("ddp", 2, root)[0]["model"] == one_rank["model"]


def test_without_processes_there_is_a_clear_error():
    model = small_model()
    with pytest.raises(InvalidInput, match="init_process_group"):
        make_private(model, sgd(model), plain_data(), folder=None, clip_norm=1.0, plan=PLAN)


def test_the_steps_are_all_done(one_rank):
    assert one_rank["steps"] == STEPS
    assert torch.isfinite(torch.tensor(one_rank["losses"])).all()
