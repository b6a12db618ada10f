"""Folders of runs with random damage: refused, or resumed to the same bits; never anything else."""

import hashlib
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from killed_run import Place, fast_places, go_on, result, unharmed

from dpftrl.errors import DpftrlError
from dpftrl.federated.store.run_folder import Checkpoint
from dpftrl.verify import verify_run

AT = 4  # rounds of the run that is damaged


def flip(content: bytes, dice: random.Random, _: bytes) -> bytes:
    if not content:
        return b"\0"
    at, bit = dice.randrange(len(content)), 1 << dice.randrange(8)
    return content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :]


def cut(content: bytes, dice: random.Random, _: bytes) -> bytes:
    return content[: dice.randrange(len(content) + 1)]


def lengthen(content: bytes, dice: random.Random, _: bytes) -> bytes:
    return content + dice.randbytes(dice.randrange(1, 40))


def overwrite(content: bytes, dice: random.Random, _: bytes) -> bytes:
    at = dice.randrange(len(content) + 1)
    return content[:at] + dice.randbytes(8) + content[at + 8 :]


def double_line(content: bytes, dice: random.Random, _: bytes) -> bytes:
    lines = content.splitlines(keepends=True) or [b"\n"]
    at = dice.randrange(len(lines))
    return b"".join([*lines[: at + 1], *lines[at:]])


def drop_line(content: bytes, dice: random.Random, _: bytes) -> bytes:
    lines = content.splitlines(keepends=True) or [b""]
    del lines[dice.randrange(len(lines))]
    return b"".join(lines)


def other_digit(content: bytes, dice: random.Random, _: bytes) -> bytes:
    places = [i for i, byte in enumerate(content) if 48 <= byte <= 57]
    if not places:
        return content + b"1"
    at = dice.choice(places)
    return content[:at] + str(dice.randrange(10)).encode() + content[at + 1 :]


def put_back(_: bytes, __: random.Random, old: bytes) -> bytes:
    return old


def empty(_: bytes, __: random.Random, ___: bytes) -> bytes:
    return b""


CHANGES: list[Callable[[bytes, random.Random, bytes], bytes]] = [
    *(flip, cut, lengthen, overwrite, double_line, drop_line, other_digit, put_back, empty)
]


def damage(place: Place, old: Place, dice: random.Random) -> str:
    """Damage one to three files of a run; `old` is the same run some rounds before."""
    done = list[str]()
    for _ in range(dice.choice([1, 1, 1, 2, 3])):
        files = sorted(
            path
            for root in (place.folder, place.state)
            for path in root.rglob("*")
            if path.is_file()
        )
        path = dice.choice(files)
        root, before = (
            (place.folder, old.folder)
            if path.is_relative_to(place.folder)
            else (place.state, old.state)
        )
        if dice.random() < 0.1:
            path.unlink()
            done.append(f"{path.name} is gone")
            continue
        change = dice.choice(CHANGES)
        earlier = before / path.relative_to(root)
        content = path.read_bytes()
        path.write_bytes(change(content, dice, earlier.read_bytes() if earlier.exists() else b""))
        done.append(f"{path.name}: {change.__name__}")
    return ", ".join(done)


def copy(place: Place, to: Place) -> None:
    shutil.copytree(place.folder, to.folder)
    shutil.copytree(place.state, to.state)


def check_mutants(number: int, seed: int) -> Counter[str]:
    """Damage so many copies of a run; how often each outcome came."""
    wanted, outcomes = unharmed(), Counter[str]()
    dice = random.Random(seed)
    with fast_places() as places:
        old, whole = next(places), next(places)
        with old.create() as server:
            go_on(server, rounds=AT - 2)
        copy(old, whole)
        with whole.open() as server:
            go_on(server, rounds=AT)
        for mutant in (next(places) for _ in range(number)):
            copy(whole, mutant)
            what = damage(mutant, old, dice)
            outcomes[outcome(mutant, wanted, what)] += 1
            for folder in (mutant.folder, mutant.state):
                shutil.rmtree(folder)
    return outcomes


def outcome(place: Place, wanted: dict[str, str], what: str) -> str:
    """What became of a damaged run: refused, or finished with the right result."""
    try:
        verdict = verify_run(place.folder, place.state)
        verified = all(check.outcome != "failed" for check in verdict.checks)
        if verified and verdict.rounds:
            assert verdict.rounds == AT, what
    except DpftrlError:
        verified = False
    reason = None
    try:
        with place.open() as server:
            go_on(server)
    except DpftrlError as error:
        reason = str(error)
    if reason is not None:
        assert "\n" not in reason, what
        assert not verified or "log" in what or "lock" in what or "noise" in what, (what, reason)
        return "refused"
    assert result(place) == wanted, what
    return "right"


def test_damaged_folders_are_refused_or_end_right():
    outcomes = check_mutants(60, seed=1)
    assert outcomes["refused"] > 20
    assert outcomes["right"] > 2  # what was damaged is made again


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 10))
def test_many_damaged_folders_are_refused_or_end_right(seed: int):
    outcomes = check_mutants(125, seed)
    assert outcomes["refused"] > 40


@pytest.mark.parametrize("is_blind", [False, True])
def test_a_wrong_result_would_be_noticed(monkeypatch, is_blind: bool):
    """The control: a server that does not check its checkpoints."""
    load, wanted = Checkpoint.load, unharmed()

    def blind(path: Path, _: str) -> Checkpoint:
        return load(path, hashlib.sha256(path.read_bytes()).hexdigest())

    if is_blind:
        monkeypatch.setattr(Checkpoint, "load", blind)
    with fast_places() as places:
        place = next(places)
        with place.create() as server:
            go_on(server, rounds=AT)
            path = server.folder.checkpoint(AT)
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        if is_blind:
            with pytest.raises(AssertionError, match="a flipped bit"):
                outcome(place, wanted, "a flipped bit")
        else:
            assert outcome(place, wanted, "a flipped bit") == "refused"


def test_the_damage_is_real():
    dice = random.Random(0)
    text = b"12 34\n56 78\n"
    assert sum(change(text, dice, b"old") != text for change in CHANGES) >= len(CHANGES) - 1
