"""Killed at any instant, a centralized run resumes to the same bits; no row covers two sums."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killable_children import (
    HERE,
    KILLED,
    NEVER,
    Children,
    noise_on_two_sums,
    read_log,
    rows_with_two_releases,
    rows_with_two_sums,
)
from small_training_runs import (
    STEPS,
    Place,
    failed_checks,
    fast_places,
    journal_records,
    stated_guarantee,
)

Job = dict[str, Any]


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    program = Children(HERE / "killed_training_run.py")
    yield program
    program.close()


@pytest.fixture
def places() -> Iterator[Iterator[Place]]:
    with fast_places() as found:
        yield found


@pytest.fixture(scope="module")
def unharmed(children: Children) -> Job:
    with fast_places() as places:
        return children.run(next(places), fuse=NEVER)


@pytest.fixture(scope="module")
def creation(children: Children) -> int:
    """How many of the points at which a process can be killed belong to the creation."""
    with fast_places() as places:
        return children.run(next(places), fuse=NEVER, steps=0)["points"]


def after_kills(children: Children, place: Place, fuses: list[int], **job: Any) -> Job:
    """Kill a run at these points, each of a new process, and let it go on to its end."""
    for fuse in fuses:
        done = children.run(place, fuse=fuse, **job)
        if done["status"] != KILLED:
            return done
    return children.run(place, **job)


def lost(children: Children, points: range, wanted: Job, log: Path, **job: Any) -> dict[int, Any]:
    """The points at which a kill did harm, and what came of it."""
    harm: dict[int, Any] = {}
    with fast_places() as places:
        for point, place in zip(points, places, strict=False):
            log.unlink(missing_ok=True)
            log.touch()
            done = after_kills(children, place, [point], log=str(log), **job)
            if done.get("result") != wanted["result"] or "error" in done:
                harm[point] = done
            elif noise_on_two_sums(log) or rows_with_two_releases(log) or rows_with_two_sums(log):
                harm[point] = "noise"
            else:
                journal_records(place)
                assert failed_checks(place) == {}
            shutil.rmtree(place.folder, ignore_errors=True)
    return harm


def test_a_kill_during_creation_is_harmless(
    children: Children, unharmed: Job, creation: int, tmp_path: Path
) -> None:
    assert creation > 40
    assert lost(children, range(0, creation, 6), unharmed, tmp_path / "log") == {}


def test_a_kill_during_steps_is_harmless(
    children: Children, unharmed: Job, creation: int, tmp_path: Path
) -> None:
    assert unharmed["points"] > creation + 200
    points = range(creation, unharmed["points"], 17)
    assert lost(children, points, unharmed, tmp_path / "log") == {}


@pytest.mark.slow
def test_a_kill_at_every_point_is_harmless(
    children: Children, unharmed: Job, tmp_path: Path
) -> None:
    assert lost(children, range(unharmed["points"]), unharmed, tmp_path / "log") == {}


@pytest.mark.parametrize("seed", range(4))
def test_kills_of_resuming_processes_are_harmless(
    children: Children, places: Iterator[Place], unharmed: Job, creation: int, seed: int
) -> None:
    dice = random.Random(seed)
    fuses = [dice.randrange(creation, 150)] + [dice.randrange(70) for _ in range(10)]
    place = next(places)
    assert after_kills(children, place, fuses)["result"] == unharmed["result"]
    assert len(journal_records(place)) == 1 + STEPS + 4


def retrained(
    children: Children,
    places: Iterator[Place],
    creation: int,
    log: Path,
    seeds: int = 1,
    **job: Any,
) -> list[Job]:
    """Every process has other gradients for steps that were not journalled yet."""
    answers = list[Job]()
    for seed in range(seeds):
        dice, place = random.Random(seed), next(places)
        children.run(place, fuse=creation)
        own = log.with_name(f"{log.name} {seed}")
        for salt in range(25):
            # Mostly within the first step after resuming; sometimes some steps later.
            fuse = dice.randrange(33, 46) if salt % 3 else dice.randrange(60, 120)
            done = children.run(place, fuse=fuse, salt=salt, log=str(own), **job)
            answers.append(done)
            if done["status"] != KILLED:
                break
    return answers


def logs(log: Path) -> list[Path]:
    return sorted(log.parent.glob(f"{log.name} *"))


def test_no_row_of_noise_covers_two_sums(
    children: Children, places: Iterator[Place], creation: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    answers = retrained(children, places, creation, log, seeds=3)
    assert not [done for done in answers if "error" in done]
    assert sum(done["status"] == KILLED for done in answers) > 30
    assert sum(rows_with_two_sums(one) for one in logs(log)) > 3  # else nothing was tested
    for one in logs(log):
        assert noise_on_two_sums(one) == 0
        assert rows_with_two_releases(one) == 0
        assert max(row for kind, row, *_ in read_log(one) if kind == "applied") > 5


def test_noise_that_forgets_its_sum_is_noticed(
    children: Children, places: Iterator[Place], creation: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    retrained(children, places, creation, log, broken=["noise forgets sums"])
    assert sum(noise_on_two_sums(one) for one in logs(log)) > 0


def test_a_model_that_changes_before_the_journal_is_noticed(
    children: Children, places: Iterator[Place], creation: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    retrained(children, places, creation, log, broken=["model first"])
    assert sum(rows_with_two_releases(one) for one in logs(log)) > 0


def test_repeated_steps_that_are_not_compared_are_noticed(
    children: Children, places: Iterator[Place], creation: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    broken = ["repeats are not compared"]
    retrained(children, places, creation, log, broken=broken, mixed=True)
    assert sum(rows_with_two_releases(one) for one in logs(log)) > 0


def test_a_checkpoint_that_is_journalled_too_early_is_noticed(
    children: Children, unharmed: Job, creation: int, tmp_path: Path
) -> None:
    points = range(creation + 20, creation + 110, 7)  # the first checkpoint is written there
    harm = lost(children, points, unharmed, tmp_path / "log", broken=["checkpoint last"])
    assert any("is missing" in done.get("error", "") for done in harm.values()), harm


def test_other_gradients_for_repeated_steps_are_refused(
    children: Children, places: Iterator[Place], unharmed: Job
) -> None:
    """A process is killed between two checkpoints; the next one has other data."""
    place = next(places)
    children.run(place, steps=5)
    done = children.run(place, salt=3, mixed=True)
    assert "step 3 was done before" in done["error"]
    assert children.run(place)["result"] == unharmed["result"]


@pytest.mark.parametrize("copied", [False, True])
def test_one_process_at_a_time(
    children: Children, places: Iterator[Place], unharmed: Job, copied: bool
) -> None:
    place = next(places)
    children.run(place, steps=2)
    other = Place(place.folder.with_name("copy"), place.state) if copied else place
    if copied:
        shutil.copytree(place.folder, other.folder)
    assert children.run(place, hold=True)["held"]
    try:
        refusal = children.run(other, steps=3)["error"]
    finally:
        killed = children.run(place, kill_holder=True)
    assert refusal.startswith("RunInUse")
    assert killed["status"] == KILLED
    assert children.run(other)["result"] == unharmed["result"]


def test_guarantee_file_after_a_kill_covers_the_newest_checkpoint(
    children: Children, places: Iterator[Place], unharmed: Job, creation: int
) -> None:
    """Whoever takes the checkpoint of a killed run finds a guarantee that covers it."""
    seen = 0
    for point in range(creation, unharmed["points"], 13):
        place = next(places)
        assert children.run(place, fuse=point)["status"] == KILLED
        records = journal_records(place)
        assert failed_checks(place) == {}
        saved = max((one["steps"] for one in records if one["kind"] == "saved"), default=0)
        stated = stated_guarantee(place)
        if saved:
            seen += 1
            assert stated is not None
            assert stated["steps"] >= saved
            assert stated["epsilon"] >= max(
                one["epsilon"] for one in records if one["kind"] == "saved"
            )
    assert seen > 10
