"""A run without a framework: steps, noise, divisor, epsilon, and what is refused."""

import copy
import os
import pickle

import numpy as np
import pytest
from small_training_runs import (
    CLIP,
    COMMIT_EVERY,
    DATASET,
    EXAMPLES,
    KEY,
    PLAN,
    SIZE,
    STEPS,
    Trainer,
    fast_places,
    journal_records,
    journalled_steps,
    plan_in_order,
    poisson_plan,
    result,
    settings_for,
    stated_guarantee,
)

from dpftrl import account
from dpftrl.centralized import TrainingRun, Units
from dpftrl.errors import InvalidInput, RoundsExceeded, RunInUse, UnsafeState
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.participation import FixedEpochs
from dpftrl.plan import Dataset


class Broken(Exception):
    """Whatever code of a user may raise."""


@pytest.fixture
def place():
    with fast_places() as places:
        yield next(places)


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    """What a run comes to that was never interrupted."""
    with fast_places() as places:
        place = next(places)
        with Trainer.create(place) as trainer:
            trainer.train()
        return result(place)


def fails_in_a_fork(act) -> str:
    """The error that an action raises in a forked copy of this process."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            act()
            os.write(writable, b"nothing was raised")
        except BaseException as error:
            os.write(writable, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(pid, 0)
    return answer


# --- Steps and noise -----------------------------------------------------------------------------


def test_noise_is_that_of_the_noise_stream_with_the_key_of_the_folder(place):
    with Trainer.create(place) as trainer:
        sums = list[tuple[np.ndarray, int]]()
        while trainer.run.steps < STEPS:
            sums.append((trainer.sum()[0].copy(), trainer.sum()[1]))
            trainer.step()
        grid = trainer.run.grid
    key = NoiseKey((place.folder / "private" / "noise.key").read_bytes())
    stream = NoiseStream(PLAN, SIZE, key=key, clip_norm=CLIP, threads=1)
    for (total, units), mean in zip(sums, trainer.means, strict=True):
        stream.add_to(total, grid, updates=units)
        np.testing.assert_array_equal(np.rint(mean * DATASET.batch_size / grid.step), total)


def test_the_key_of_the_folder_is_a_new_one_for_every_run():
    keys = set()
    with fast_places() as places:
        for _ in range(2):
            place = next(places)
            Trainer.create(place, insecure_test_key=None).run.close()
            keys.add((place.folder / "private" / "noise.key").read_bytes())
            assert '"test_key": false' in (place.folder / "run.json").read_text()
    assert len(keys) == 2
    assert NoiseKey.insecure_for_tests(KEY).secret_bytes() not in keys


@pytest.mark.parametrize("with_folder", [True, False])
def test_sums_are_divided_by_the_planned_batch_size(place, with_folder):
    """Also for the last batch of an epoch, which has 2 units in place of 6."""
    with Trainer.create(place if with_folder else None) as trainer:
        for _ in range(4):
            total, units = trainer.sum()
            noisy = total.copy()
            trainer.run.step(noisy, units, trainer.apply)
        assert units == 2
    np.testing.assert_array_equal(np.rint(trainer.means[-1] * 6 / trainer.run.grid.step), noisy)


def test_empty_batches_get_noise_and_the_planned_divisor(place):
    plan = poisson_plan(batch_size=1)
    with Trainer.create(place, plan, changes={"commit_every": 100}) as trainer:
        empty = 0
        while trainer.run.steps < plan.dataset.steps:
            total, units = trainer.sum()
            empty += units == 0
            assert units or not total.any()
            trainer.step()
            if not units:
                assert np.abs(trainer.means[-1]).min() > 0  # the divisor is 1: all noise
    assert empty > 3
    assert journalled_steps(place) == plan.dataset.steps


def test_a_sum_that_is_larger_than_its_units_allow_is_refused(place, wanted):
    with Trainer.create(place) as trainer:
        trainer.train(2)
        total, units = trainer.sum()
        total[0] = 2 * units * int(CLIP / trainer.run.grid.step)
        with pytest.raises(InvalidInput, match="clip each update"):
            trainer.run.step(total, units, trainer.apply)
        assert len(trainer.means) == 2
        assert journalled_steps(place) == 2
    with Trainer.resume(place) as trainer:
        trainer.train()
    assert result(place) == wanted


def test_a_step_after_the_last_is_refused(place, wanted):
    with Trainer.create(place) as trainer:
        trainer.train()
        for _ in range(2):
            with pytest.raises(RoundsExceeded, match="planned steps are done"):
                trainer.run.step(np.zeros(SIZE, np.int64), 0, trainer.apply)
    with Trainer.resume(place) as trainer:
        assert trainer.run.steps == STEPS
        with pytest.raises(RoundsExceeded):
            trainer.run.step(np.zeros(SIZE, np.int64), 0, trainer.apply)
        trainer.run.save(trainer.checkpoint)
    assert result(place) == wanted
    assert journalled_steps(place) == STEPS


def test_a_step_after_the_last_is_refused_without_a_folder():
    trainer = Trainer.create(None).train()
    with pytest.raises(RoundsExceeded):
        trainer.run.step(np.zeros(SIZE, np.int64), 0, trainer.apply)


def test_runs_with_and_without_a_folder_are_the_same(place):
    with Trainer.create(place) as stored:
        stored.train()
    assert stored.model.tobytes() == Trainer.create(None).train().model.tobytes()


@pytest.mark.parametrize("stops", [[1], [2, 4], [3], [4, 5, 7, 8], list(range(1, STEPS))])
def test_a_run_that_was_closed_and_resumed_comes_to_the_same_bits(place, wanted, stops):
    Trainer.create(place).run.close()
    for stop in [*stops, STEPS]:
        with Trainer.resume(place) as trainer:
            # Steps after the last checkpoint are repeated.
            assert trainer.run.steps % COMMIT_EVERY == 0
            trainer.train(stop)
    assert result(place) == wanted


def test_save_keeps_a_state_between_two_checkpoints(place, wanted):
    with Trainer.create(place) as trainer:
        trainer.train(4)
        trainer.run.save(trainer.checkpoint)
        trainer.run.save(trainer.checkpoint)
    with Trainer.resume(place) as trainer:
        assert (trainer.run.steps, trainer.run.repeating) == (4, 0)
        trainer.train()
    assert result(place) == wanted


def test_save_while_steps_are_repeated_changes_nothing(place, wanted):
    with Trainer.create(place) as trainer:
        trainer.train(5)
    with Trainer.resume(place) as trainer:
        assert (trainer.run.steps, trainer.run.repeating, trainer.run.released) == (3, 2, 5)
        trainer.train(4)
        lines = place.journal.read_bytes()
        trainer.run.save(trainer.checkpoint)
        assert place.journal.read_bytes() == lines
    with Trainer.resume(place) as trainer:
        assert trainer.run.steps == 3
        trainer.train()
    assert result(place) == wanted


@pytest.mark.parametrize("commit_every", [1, 5, 100])
def test_any_number_of_steps_between_checkpoints_gives_the_same_model(place, commit_every):
    with Trainer.create(place, changes={"commit_every": commit_every}) as trainer:
        trainer.train()
    saved = [one["steps"] for one in journal_records(place) if one["kind"] == "saved"]
    assert saved == sorted({*range(commit_every, STEPS, commit_every), STEPS})
    assert trainer.model.tobytes() == Trainer.create(None).train().model.tobytes()


# --- Failures within a step ----------------------------------------------------------------------


def test_a_repeated_step_with_another_sum_is_refused_and_harmless(place, wanted):
    with Trainer.create(place) as trainer:
        trainer.train(5)
    before = {path: path.read_bytes() for path in place.folder.rglob("*") if path.is_file()}
    with Trainer.resume(place) as trainer:
        with pytest.raises(UnsafeState, match="with other gradients"):
            trainer.step(salt=0.1)
        assert not trainer.means
        with pytest.raises(UnsafeState, match="resume it from its folder"):
            trainer.step()
        trainer.run.save(trainer.checkpoint)
    after = {path: path.read_bytes() for path in place.folder.rglob("*") if path.is_file()}
    assert after == before
    with Trainer.resume(place) as trainer:
        trainer.train()
    assert result(place) == wanted


@pytest.mark.parametrize("error", [Broken, KeyboardInterrupt, SystemExit])
def test_an_error_while_the_model_changes_stops_the_run(place, wanted, error):
    def broken(_):
        raise error

    with Trainer.create(place) as trainer:
        trainer.train(4)
        total, units = trainer.sum()
        with pytest.raises(error):
            trainer.run.step(total, units, broken)
        with pytest.raises(UnsafeState, match="stopped within a step"):
            trainer.step()
    with Trainer.resume(place) as trainer:
        assert trainer.run.released == 5
        trainer.train()
    assert result(place) == wanted


def test_an_error_while_the_model_changes_stops_a_run_without_a_folder():
    """Otherwise the batch takes part twice, with two rows of noise."""
    trainer = Trainer.create(None).train(4)
    total, units = trainer.sum()

    def broken(mean):
        trainer.apply(mean)
        raise Broken

    with pytest.raises(Broken):
        trainer.run.step(total, units, broken)
    with pytest.raises(UnsafeState):
        trainer.step()


def test_an_error_in_a_checkpoint_stops_the_run(place, wanted):
    def broken() -> bytes:
        raise Broken

    with Trainer.create(place) as trainer:
        trainer.train(4)
        with pytest.raises(Broken):
            trainer.run.save(broken)
        with pytest.raises(UnsafeState):
            trainer.step()
    with Trainer.resume(place) as trainer:
        trainer.train()
    assert result(place) == wanted


def test_a_closed_run_refuses_steps(place):
    with Trainer.create(place) as trainer:
        trainer.train(1)
    with pytest.raises(UnsafeState, match="closed"):
        trainer.step()
    trainer.run.close()


# --- Copies and other processes ------------------------------------------------------------------


def test_a_forked_copy_is_refused(place):
    with Trainer.create(place) as trainer:
        trainer.train(2)
        assert fails_in_a_fork(trainer.step).startswith("UnsafeState: this is a copy, by fork")
        assert fails_in_a_fork(lambda: trainer.run.save(trainer.checkpoint)).startswith(
            "UnsafeState: this is a copy, by fork"
        )
        trainer.train(4)  # the original goes on
    assert journalled_steps(place) == 4


def test_a_forked_copy_that_closes_the_run_releases_no_lock(place):
    with Trainer.create(place) as trainer:
        assert fails_in_a_fork(trainer.run.close) == "nothing was raised"
        with pytest.raises(RunInUse):
            Trainer.resume(place)
        trainer.train(1)


def test_a_forked_copy_of_a_run_without_a_folder_is_refused():
    """Two copies would release the same batch twice."""
    trainer = Trainer.create(None).train(2)
    assert fails_in_a_fork(trainer.step).startswith("UnsafeState")


def test_a_run_that_is_open_is_refused_to_others(place):
    with Trainer.create(place):
        with pytest.raises(RunInUse):
            Trainer.resume(place)
        assert fails_in_a_fork(lambda: Trainer.resume(place)).startswith("RunInUse")
    Trainer.resume(place).run.close()


def test_a_failed_resume_keeps_no_lock(place):
    Trainer.create(place).run.close()
    for _ in range(2):
        with pytest.raises(InvalidInput, match="another data set"):
            Trainer.resume(place, Units(EXAMPLES - 1))
    Trainer.resume(place).run.close()


def test_creating_twice_is_refused(place, wanted):
    with Trainer.create(place) as trainer:
        trainer.train(4)
    with pytest.raises(InvalidInput, match="resume it"):
        Trainer.create(place)
    with Trainer.resume(place) as trainer:
        trainer.train()
    assert result(place) == wanted


def test_a_run_cannot_be_pickled_or_copied(place):
    with Trainer.create(place) as trainer:
        for copier in (pickle.dumps, copy.deepcopy):
            with pytest.raises(TypeError):
                copier(trainer.run)


def test_a_creation_that_fails_leaves_no_lock_and_no_run(place):
    """2^40 coordinates are more than a guarantee covers."""
    with pytest.raises(InvalidInput):
        Trainer.create(place, changes={"size": 2**40})
    Trainer.create(place).run.close()


def test_a_plan_for_another_number_of_units_is_refused(place):
    with pytest.raises(InvalidInput, match="units"):
        Trainer.create(place, plan_in_order(Dataset(EXAMPLES + 5, 6, 3)))


def test_settings_for_another_data_set_than_the_units_are_refused(place):
    """Such a run could be created, but never resumed."""
    with pytest.raises(InvalidInput):
        TrainingRun.create(
            place.folder,
            PLAN,
            settings_for(Units(EXAMPLES), examples=7),
            Units(EXAMPLES),
            lambda: b"",
            state_folder=place.state,
            insecure_test_key=KEY,
        )


@pytest.mark.parametrize(
    "changes",
    [{"clip_norm": 0.0}, {"clip_norm": float("nan")}, {"commit_every": 0}, {"size": 0}],
)
@pytest.mark.parametrize("with_folder", [True, False])
def test_settings_that_make_no_sense_are_refused(place, changes, with_folder):
    with pytest.raises(InvalidInput):
        Trainer.create(place if with_folder else None, changes=changes)


def test_other_users_are_refused(place):
    owners = [n % 5 for n in range(EXAMPLES)]
    dataset = Dataset(5, 2, 3)
    units = Units(EXAMPLES, owners, 2)
    with Trainer.create(place, plan_in_order(dataset), units) as trainer:
        trainer.train(2)
    other = Units(EXAMPLES, [*owners[1:], 0], 2)
    for wrong in (other, Units(EXAMPLES), Units(EXAMPLES, [n % 4 for n in range(EXAMPLES)], 2)):
        with pytest.raises(InvalidInput, match="other users"):
            Trainer.resume(place, wrong)
    with Trainer.resume(place, Units(EXAMPLES, [f"user {n}" for n in owners], 2)) as trainer:
        trainer.train()


def test_another_limit_of_examples_per_user_is_refused(place):
    owners = [n % 5 for n in range(EXAMPLES)]
    with Trainer.create(place, plan_in_order(Dataset(5, 2, 3)), Units(EXAMPLES, owners, 2)):
        pass
    with pytest.raises(InvalidInput):
        Trainer.resume(place, Units(EXAMPLES, owners, 3)).run.close()


# --- Epsilon -------------------------------------------------------------------------------------


def test_epsilon_grows_with_the_steps_as_accounting_says(place):
    seen = list[float]()
    with Trainer.create(place) as trainer:
        assert trainer.run.epsilon == 0.0
        with pytest.raises(InvalidInput, match="no step"):
            trainer.run.guarantee()
        for steps in range(1, STEPS + 1):
            trainer.step()
            epochs = -(-steps // DATASET.steps_per_epoch)
            done = FixedEpochs(steps, DATASET.steps_per_epoch, epochs)
            expected = account(PLAN.mechanism, done, PLAN.noise_multiplier, 1e-6).epsilon
            assert trainer.run.epsilon == pytest.approx(expected, rel=1e-12)
            assert trainer.run.guarantee().epsilon >= trainer.run.epsilon * (1 - 1e-12)
            seen.append(trainer.run.epsilon)
    assert seen == sorted(seen)
    assert len(set(seen)) > DATASET.epochs
    assert seen[-1] == PLAN.guarantee.epsilon
    assert max(seen) <= PLAN.guarantee.epsilon


def test_epsilon_counts_journalled_steps_that_are_to_be_repeated(place):
    with Trainer.create(place) as trainer:
        trainer.train(5)
        spent = trainer.run.epsilon
    with Trainer.resume(place) as trainer:
        assert trainer.run.steps == 3
        assert trainer.run.epsilon == spent
        trainer.train(4)
        assert trainer.run.epsilon == spent
        trainer.train(6)
        assert trainer.run.epsilon > spent


def test_epsilon_with_sampling_is_the_planned_one():
    plan = poisson_plan()
    trainer = Trainer.create(None, plan)
    assert trainer.run.epsilon == 0.0
    trainer.train(1)
    assert trainer.run.epsilon == plan.guarantee.epsilon == 7.0


def test_guarantee_file_at_checkpoints_is_that_of_the_steps(place):
    with Trainer.create(place) as trainer:
        for steps in range(1, STEPS + 1):
            trainer.step()
            if steps % COMMIT_EVERY == 0:
                stated = stated_guarantee(place)
                assert stated is not None
                assert (stated["steps"], stated["epsilon"]) == (steps, trainer.run.epsilon)
                assert stated["clip_norm"] == CLIP
    assert stated["run"] == journal_records(place)[0]["run"]


def test_guarantee_file_is_never_below_what_the_journalled_steps_need(place):
    """The model of every step can be published, so the file beside it must cover it."""
    needed, stated = list[float](), list[float]()
    with Trainer.create(place) as trainer:
        for _ in range(STEPS):
            trainer.step()
            needed.append(PLAN.after(journalled_steps(place)).epsilon)
            file = stated_guarantee(place)
            stated.append(0.0 if file is None else file["epsilon"])
    low = [step for step in range(STEPS) if stated[step] < needed[step] * (1 - 1e-9)]
    assert low == []


def test_a_changed_guarantee_file_is_put_right_at_the_latest_when_the_run_is_resumed(place):
    with Trainer.create(place) as trainer:
        trainer.train()
    path = place.folder / "guarantee.json"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"epsilon": ', b'"epsilon": 0.000'))
    Trainer.resume(place).run.close()
    assert path.read_bytes() == content
