"""A private training of a PyTorch model that is killed at any instant comes to the same bits."""

import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killable_children import (
    KILLED,
    NEVER,
    Children,
    noise_on_two_sums,
    rows_with_two_releases,
    rows_with_two_sums,
)
from small_private_trainings import STEPS
from small_training_runs import Place, failed_checks, fast_places, journalled_steps

Job = dict[str, Any]


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    program = Children(Path(__file__).with_name("killed_private_training.py"))
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


class Tally:
    """What came of kills: how many there were, and which of them did harm."""

    def __init__(self, wanted: Job, log: Path):
        self._wanted, self.log = wanted, log
        self.kills = self.runs = self.repeated_noise = self.two_sums = 0
        self.divergences = list[Any]()
        self.steps = set[int]()  # how many steps were journalled when a process was killed

    def __str__(self) -> str:
        return (
            f"{self.kills} kills in {self.runs} runs, {len(self.divergences)} divergences, "
            f"{self.repeated_noise} repeated noises, {self.two_sums} rows with two sums; killed "
            f"after {sorted(self.steps)} steps"
        )

    def start(self) -> None:
        self.log.unlink(missing_ok=True)
        self.log.touch()

    def killed(self, place: Place) -> None:
        """Count a kill; what it leaves must pass verification."""
        self.kills += 1
        if place.journal.exists():
            self.steps.add(journalled_steps(place))
            if failures := failed_checks(place):
                self.divergences.append(("verification", {"error": str(failures)}))

    def finish(self, done: Job, place: Place, what: Any) -> None:
        self.runs += 1
        self.repeated_noise += noise_on_two_sums(self.log)
        self.two_sums += rows_with_two_releases(self.log) + rows_with_two_sums(self.log)
        if done.get("result") != self._wanted["result"]:
            self.divergences.append((what, done))
        else:
            assert journalled_steps(place) == STEPS
            if failures := failed_checks(place):
                self.divergences.append(("verification", {"error": str(failures)}))
        shutil.rmtree(place.folder, ignore_errors=True)

    def check(self) -> None:
        assert self.divergences == []
        assert (self.repeated_noise, self.two_sums) == (0, 0)


def killed_at(children: Children, points: range, tally: Tally, **job: Any) -> Tally:
    """Kill a run at each of the points, and let it go on to its end."""
    with fast_places() as places:
        for point, place in zip(points, places, strict=False):
            tally.start()
            done = children.run(place, fuse=point, log=str(tally.log), **job)
            assert done["status"] == KILLED
            tally.killed(place)
            done = children.run(place, log=str(tally.log), **job)
            tally.finish(done, place, point)
    return tally


def killed_after_delays(children: Children, kills: int, seed: int, tally: Tally) -> Tally:
    """Kill runs at random instants, several times each, and let them go on to their end."""
    dice = random.Random(seed)
    with fast_places() as places:
        started = time.perf_counter()
        children.run(next(places))
        longest = time.perf_counter() - started
        while tally.kills < kills:
            place, status = next(places), KILLED
            tally.start()
            while status == KILLED and tally.kills < kills:
                done = children.run(place, delay=dice.uniform(0, longest), log=str(tally.log))
                status = done["status"]
                if status == KILLED:
                    tally.killed(place)
            done = children.run(place, log=str(tally.log))
            tally.finish(done, place, tally.kills)
    return tally


def test_kills_at_writes_are_harmless(
    children: Children, unharmed: Job, creation: int, tmp_path: Path
) -> None:
    assert unharmed["points"] > creation + 200
    tally = Tally(unharmed, tmp_path / "log")
    killed_at(children, range(3, creation, 19), tally)
    killed_at(children, range(creation + 5, unharmed["points"], 31), tally)
    tally.check()
    assert tally.kills >= 12


def test_kills_at_random_instants_are_harmless(
    children: Children, unharmed: Job, tmp_path: Path
) -> None:
    killed_after_delays(children, 10, 0, Tally(unharmed, tmp_path / "log")).check()


@pytest.mark.slow
def test_a_kill_at_every_write_is_harmless(
    children: Children, unharmed: Job, tmp_path: Path
) -> None:
    tally = killed_at(children, range(unharmed["points"]), Tally(unharmed, tmp_path / "log"))
    report(tally, "every write")
    tally.check()


@pytest.mark.slow
def test_200_kills_at_random_instants_are_harmless(
    children: Children, unharmed: Job, tmp_path: Path
) -> None:
    tally = killed_after_delays(children, 200, 1, Tally(unharmed, tmp_path / "log"))
    report(tally, "random instants")
    tally.check()


def report(tally: Tally, what: str) -> None:
    """The figures, for whoever runs pytest with -s."""
    sys.stderr.write(f"\n{what}: {tally}\n")


@pytest.mark.parametrize("seed", range(2))
def test_kills_of_resuming_processes_are_harmless(
    children: Children, places: Iterator[Place], unharmed: Job, creation: int, seed: int
) -> None:
    dice, place = random.Random(seed), next(places)
    children.run(place, fuse=dice.randrange(creation, 150))
    for _ in range(8):
        children.run(place, fuse=dice.randrange(70))
    assert children.run(place)["result"] == unharmed["result"]


# --- Other gradients after a kill, and negative controls -----------------------------------------


def retrained(children: Children, place: Place, creation: int, log: Path, **job: Any) -> list[Job]:
    """Every process has other gradients for the steps that were not journalled yet."""
    dice, answers = random.Random(2), list[Job]()
    children.run(place, fuse=creation)
    for salt in range(20):
        fuse = dice.randrange(33, 54)  # the points of the first steps after resuming
        done = children.run(place, fuse=fuse, salt=salt, log=str(log), **job)
        answers.append(done)
        if done["status"] != KILLED:
            break
    return answers


def test_no_row_of_noise_covers_two_sums(
    children: Children, places: Iterator[Place], creation: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    answers = retrained(children, next(places), creation, log)
    assert not [done for done in answers if "error" in done]
    assert sum(done["status"] == KILLED for done in answers) > 8
    assert rows_with_two_sums(log) > 0  # else nothing was tested
    assert noise_on_two_sums(log) == 0
    assert rows_with_two_releases(log) == 0


def test_noise_that_forgets_its_sum_is_noticed(
    children: Children, places: Iterator[Place], creation: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    retrained(children, next(places), creation, log, broken=["noise forgets sums"])
    assert noise_on_two_sums(log) > 0


def test_a_model_that_changes_before_the_journal_is_noticed(
    children: Children, places: Iterator[Place], creation: int, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    retrained(children, next(places), creation, log, broken=["model first"])
    assert rows_with_two_releases(log) > 0


def test_a_checkpoint_that_is_journalled_too_early_is_noticed(
    children: Children, unharmed: Job, creation: int, tmp_path: Path
) -> None:
    points = range(creation + 47, creation + 75, 5)  # the first checkpoint is written there
    tally = killed_at(
        children, points, Tally(unharmed, tmp_path / "log"), broken=["checkpoint last"]
    )
    assert any("is missing" in done.get("error", "") for _, done in tally.divergences)


# --- Processes that load examples ----------------------------------------------------------------


def test_a_kill_is_harmless_with_processes_that_load_examples(
    children: Children, places: Iterator[Place], unharmed: Job, creation: int
) -> None:
    """Such processes outlive the killed one for some seconds, and must not hold its lock."""
    place = next(places)
    killed = children.run(place, fuse=creation + 100, num_workers=2)
    assert killed["status"] == KILLED
    done = children.run(place)
    assert "error" not in done
    assert done["result"] == unharmed["result"]
