"""Killed at any instant, a run resumes to the same bits, and no noise covers two sums."""

import json
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from killed_run import Children, Place, fast_places

from dpftrl.verify import verify_run

KILLED = -9
NEVER = 10**9


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    found = Children()
    yield found
    found.close()


@pytest.fixture
def places() -> Iterator[Iterator[Place]]:
    with fast_places() as found:
        yield found


@pytest.fixture(scope="module")
def unharmed(children: Children) -> dict[str, Any]:
    """What a run comes to that nobody killed, and at how many points it could have been."""
    with fast_places() as places:
        return children.run(next(places), fuse=NEVER)


@pytest.fixture(scope="module")
def creation(children: Children) -> int:
    """How many of the points belong to the creation."""
    with fast_places() as places:
        return children.run(next(places), fuse=NEVER, rounds=0)["points"]


def after_kills(children: Children, place: Place, fuses: list[int], **job: Any) -> dict[str, Any]:
    """Kill a run at these points, each of a new process, and let it go on to its end."""
    for fuse in fuses:
        done = children.run(place, fuse=fuse, **job)
        if done["status"] != KILLED:
            return done
    return children.run(place, **job)


def lost(children: Children, points: range, wanted: dict[str, Any], **job: Any) -> dict[int, Any]:
    """The points at which a kill did harm, and what came of it."""
    found: dict[int, Any] = {}
    with fast_places() as places:
        for point, place in zip(points, places, strict=False):
            done = after_kills(children, place, [point], **job)
            if done.get("result") != wanted["result"]:
                found[point] = done
            shutil.rmtree(place.folder, ignore_errors=True)
    return found


def test_a_kill_at_a_point_of_a_creation_is_harmless(
    children: Children, unharmed: dict[str, Any], creation: int
) -> None:
    assert creation > 50
    assert lost(children, range(0, creation, 9), unharmed) == {}


def test_a_kill_at_a_point_of_a_round_is_harmless(
    children: Children, unharmed: dict[str, Any], creation: int
) -> None:
    assert unharmed["points"] > creation + 200
    assert lost(children, range(creation, unharmed["points"], 31), unharmed) == {}


@pytest.mark.slow
def test_a_kill_at_any_point_is_harmless(children: Children, unharmed: dict[str, Any]) -> None:
    assert lost(children, range(unharmed["points"]), unharmed) == {}


def test_a_wrong_order_would_be_noticed(
    children: Children, unharmed: dict[str, Any], creation: int
) -> None:
    points = range(creation, creation + 24, 3)
    found = lost(children, points, unharmed, broken=["witness first"])
    assert any("rolled back" in done.get("error", "") for done in found.values())


@pytest.mark.parametrize("seed", range(5))
def test_kills_of_resuming_processes_are_harmless(
    children: Children, places: Iterator[Place], unharmed: dict[str, Any], creation: int, seed: int
) -> None:
    dice = random.Random(seed)
    fuses = [dice.randrange(creation, 150)] + [dice.randrange(90) for _ in range(12)]
    assert after_kills(children, next(places), fuses)["result"] == unharmed["result"]


def test_timers_by_time_and_plain_names_survive_kills(
    children: Children, places: Iterator[Place], creation: int
) -> None:
    wanted = children.run(next(places), kind="by_time")
    dice = random.Random(1)
    for _ in range(3):
        fuses = [dice.randrange(creation, 150)] + [dice.randrange(90) for _ in range(8)]
        found = after_kills(children, next(places), fuses, kind="by_time")
        assert found["result"] == wanted["result"]


def test_adaptive_clipping_survives_kills(children: Children, creation: int) -> None:
    with fast_places() as places:
        wanted = children.run(next(places), fuse=NEVER, kind="adaptive")
    points = range(creation, wanted["points"], 29)
    assert lost(children, points, wanted, kind="adaptive") == {}
    assert not_verified(children, range(creation, wanted["points"], 97), kind="adaptive") == {}


def test_fifty_kills_at_random_instants_are_harmless(
    children: Children, places: Iterator[Place], unharmed: dict[str, Any], creation: int
) -> None:
    dice, kills = random.Random(0), 0
    while kills < 50:
        place, status = next(places), KILLED
        children.run(place, fuse=creation)  # a creation is killed above, point by point
        while status == KILLED and kills < 50:
            done = children.run(place, delay=dice.uniform(0, 0.06))
            status = done["status"]
            kills += status == KILLED
        assert children.run(place)["result"] == unharmed["result"]


def noise_on_two_sums(log: Path) -> int:
    """How many noises were added to more than one sum."""
    sums: dict[str, set[str]] = defaultdict(set)
    for line in log.read_text().splitlines():
        _, before, noise = json.loads(line)
        sums[noise].add(before)
    return sum(len(some) > 1 for some in sums.values())


def made_again_with_other_updates(
    children: Children, places: Iterator[Place], creation: int, log: Path, **job: Any
) -> None:
    """Every process gets other updates for the same rounds than those that were killed."""
    for seed in range(2):
        dice, place = random.Random(seed), next(places)
        children.run(place, fuse=creation)
        for salt in range(18):
            fuse = dice.randrange(30, 70)
            if children.run(place, fuse=fuse, salt=salt, log=str(log), **job)["status"] != KILLED:
                break


def test_no_noise_is_added_to_two_sums(
    children: Children, places: Iterator[Place], creation: int, tmp_path: Path
) -> None:
    log = tmp_path / "noise"
    made_again_with_other_updates(children, places, creation, log)
    made = {tuple(json.loads(line)[:2]) for line in log.read_text().splitlines()}
    assert len(made) > len({row for row, _ in made}) + 3  # rows were made again, for other sums
    assert noise_on_two_sums(log) == 0


def test_noise_that_forgets_its_sum_would_be_noticed(
    children: Children, places: Iterator[Place], creation: int, tmp_path: Path
) -> None:
    log = tmp_path / "noise"
    broken = ["noise forgets sums"]
    made_again_with_other_updates(children, places, creation, log, broken=broken)
    assert noise_on_two_sums(log) > 0


@pytest.mark.parametrize("copied", [False, True])
def test_one_server_at_a_time(
    children: Children, places: Iterator[Place], unharmed: dict[str, Any], copied: bool
) -> None:
    place = next(places)
    children.run(place, rounds=2)
    other = Place(place.folder.with_name("copy"), place.state) if copied else place
    if copied:
        shutil.copytree(place.folder, other.folder)
    assert children.run(place, hold=True)["held"]
    try:
        refusal = children.run(other, rounds=3)["error"]
    finally:
        killed = children.run(place, kill_holder=True)
    assert "another program" in refusal
    assert killed["status"] == KILLED
    assert children.run(other)["result"] == unharmed["result"]


def not_verified(children: Children, points: range, **job: Any) -> dict[int, dict[str, str]]:
    """The points at which a kill leaves a folder that fails verification, and why."""
    failures: dict[int, dict[str, str]] = {}
    seen = 0
    with fast_places() as places:
        for point, place in zip(points, places, strict=False):
            assert children.run(place, fuse=point, **job)["status"] == KILLED
            if not (place.folder / "private" / "journal.jsonl").exists():
                continue
            seen += 1
            checks = verify_run(place.folder, place.state).checks
            if why := {check.name: check.text for check in checks if check.outcome == "failed"}:
                failures[point] = why
            shutil.rmtree(place.folder, ignore_errors=True)
    assert seen > len(points) // 2
    return failures


def test_what_a_kill_leaves_passes_verification(
    children: Children, unharmed: dict[str, Any], creation: int
) -> None:
    assert not_verified(children, range(creation, unharmed["points"], 23)) == {}


@pytest.mark.slow
def test_what_a_kill_at_any_point_leaves_passes_verification(
    children: Children, unharmed: dict[str, Any]
) -> None:
    assert not_verified(children, range(unharmed["points"])) == {}


def check_kills_of_an_empty_round(children: Children, row: int, by_time: bool, step: int) -> None:
    """A run killed while the row is closed resumes to the same bits, and verifies before that."""
    with fast_places() as places:
        before = children.run(next(places), fuse=NEVER, rounds=row, by_time=by_time)["points"]
        job: dict[str, Any] = {"empty_rows": [row], "by_time": by_time}
        last = children.run(next(places), fuse=NEVER, rounds=row + 1, **job)["points"]
        whole = children.run(next(places), **job)
    points = range(before, last, step)
    assert len(points) * step > 20
    assert lost(children, points, whole, **job) == {}
    assert not_verified(children, points, **job) == {}


def test_a_kill_at_a_point_of_an_empty_round_is_harmless(children: Children) -> None:
    check_kills_of_an_empty_round(children, row=1, by_time=False, step=4)


@pytest.mark.slow
@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize("row", [0, 1])
def test_a_kill_at_any_point_of_an_empty_round_is_harmless(
    children: Children, by_time: bool, row: int
) -> None:
    check_kills_of_an_empty_round(children, row, by_time, step=1)
