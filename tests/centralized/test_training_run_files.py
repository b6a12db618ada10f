"""Files of a centralized run that were rolled back, changed, damaged, removed or not written."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from small_training_runs import (
    STEPS,
    Place,
    Trainer,
    fast_places,
    journal_records,
    journalled_steps,
    result,
    stated_guarantee,
    witnesses,
)

from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.journal import WITNESS_BYTES
from dpftrl.noise import NoiseKey

NEVER = 10**9


@pytest.fixture
def places():
    with fast_places() as found:
        yield found


@pytest.fixture
def place(places):
    return next(places)


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    with fast_places() as places:
        place = next(places)
        with Trainer.create(place) as trainer:
            trainer.train()
        return result(place)


def trained(place: Place, steps: int) -> None:
    with Trainer.open(place) as trainer:
        trainer.train(steps)


def backup(place: Place) -> Place:
    copy = Place(place.folder.with_name(place.folder.name + " copy"), place.state)
    shutil.rmtree(copy.folder, ignore_errors=True)
    shutil.copytree(place.folder, copy.folder)
    return copy


def restore(place: Place, copy: Place) -> None:
    shutil.rmtree(place.folder)
    shutil.copytree(copy.folder, place.folder)


# --- Rolled back ---------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 2, 3, 5])
@pytest.mark.parametrize("more", [2, 3, 7])
@pytest.mark.parametrize("trust", [False, True])
def test_a_folder_that_was_rolled_back_is_refused(place, before, more, trust):
    trained(place, before)
    copy = backup(place)
    trained(place, before + more)
    restore(place, copy)
    with pytest.raises(UnsafeState, match="rolled back"):
        Trainer.resume(place, trust=trust)


def test_a_folder_rolled_back_by_one_line_is_accepted_only_if_the_line_was_not_acted_on(place):
    """The witness is written after the journal and before the step, so one line is noticed too."""
    trained(place, 4)
    copy = backup(place)
    with Trainer.resume(place) as trainer:
        trainer.train(5)
    restore(place, copy)
    with pytest.raises(UnsafeState, match="rolled back"):
        Trainer.resume(place)


def test_a_copy_cannot_go_on_after_the_original(place):
    trained(place, 3)
    copy = backup(place)
    trained(place, 5)
    with pytest.raises(UnsafeState):
        Trainer.resume(copy)


def test_a_missing_witness_is_refused_unless_the_folder_is_trusted(place, wanted):
    trained(place, 5)
    (witness,) = witnesses(place, journal_records(place)[0]["run"])
    witness.unlink()
    with pytest.raises(UnsafeState, match="witness of this run is missing"):
        Trainer.resume(place)
    with Trainer.resume(place, trust=True) as trainer:
        trainer.train()
    assert result(place) == wanted


def test_another_state_folder_is_a_missing_witness(place, tmp_path):
    trained(place, 2)
    with pytest.raises(UnsafeState, match="witness of this run is missing"):
        Trainer.resume(Place(place.folder, tmp_path / "elsewhere"))


def test_a_witness_within_the_folder_is_refused(place):
    with pytest.raises(InvalidInput, match="rolled back with it"):
        Trainer.create(Place(place.folder, place.folder / "state"))


def test_a_run_whose_journal_is_gone_does_not_start_again(place):
    """Its releases are not forgotten: the key and the checkpoints are still there."""
    trained(place, 5)
    place.journal.unlink()
    with pytest.raises(UnsafeState):
        Trainer.open(place)


# --- Changed files -------------------------------------------------------------------------------


def edit_json(path, **changes: Any) -> None:
    content = json.loads(path.read_bytes())
    for name, value in changes.items():
        *parents, last = name.split("__")
        target = content
        for parent in parents:
            target = target[parent]
        assert target[last] != value
        target[last] = value
    path.write_text(json.dumps(content))


EDITS: dict[str, Callable[[Place], None]] = {
    "plan: noise": lambda p: edit_json(p.folder / "plan.json", noise_multiplier=0.1),
    "plan: epsilon": lambda p: edit_json(p.folder / "plan.json", epsilon=1e9),
    "plan: steps": lambda p: edit_json(p.folder / "plan.json", dataset__epochs=30),
    "plan: one space": lambda p: append(p.folder / "plan.json", b" "),
    "run: clip norm": lambda p: edit_json(p.folder / "run.json", settings__clip_norm=9.0),
    "run: commit_every": lambda p: edit_json(p.folder / "run.json", settings__commit_every=2),
    "run: test key": lambda p: edit_json(p.folder / "run.json", test_key=False),
    "run: identity": lambda p: edit_json(p.folder / "run.json", run="0" * 32),
    "key: other": lambda p: write_key(p, NoiseKey.insecure_for_tests(77).secret_bytes()),
    "key: short": lambda p: write_key(p, b"short"),
    "key: empty": lambda p: write_key(p, b""),
    "key: gone": lambda p: (p.folder / "private" / "noise.key").unlink(),
    "plan: gone": lambda p: (p.folder / "plan.json").unlink(),
    "run: gone": lambda p: (p.folder / "run.json").unlink(),
    "journal: empty": lambda p: p.journal.write_bytes(b""),
    "journal: first line gone": lambda p: drop_line(p, 0),
    "journal: line gone": lambda p: drop_line(p, 2),
    "journal: last two lines gone": lambda p: (drop_line(p, -1), drop_line(p, -1)),
    "journal: last line gone": lambda p: drop_line(p, -1),
    "journal: lines exchanged": lambda p: exchange_lines(p, 2, 3),
    "journal: digest changed": lambda p: change_line(p, 2, b'"digest":"', b'"digest":"0'),
    "journal: step changed": lambda p: change_line(p, 2, b'"step":1', b'"step":2'),
    "journal: epsilon changed": lambda p: change_line(p, 4, b'"epsilon":', b'"epsilon":0'),
    "journal: spaces": lambda p: change_line(p, 2, b'"record":', b'"record": '),
    "journal: link": lambda p: link(p.journal),
    "checkpoint: byte": lambda p: flip(newest(p, "safetensors"), -3),
    "checkpoint: cut": lambda p: cut(newest(p, "safetensors")),
    "checkpoint: gone": lambda p: newest(p, "safetensors").unlink(),
    "checkpoint: link": lambda p: link(newest(p, "safetensors")),
    "private: open to all": lambda p: (p.folder / "private").chmod(0o777),
}


def append(path, content: bytes) -> None:
    path.write_bytes(path.read_bytes() + content)


def write_key(place: Place, content: bytes) -> None:
    (place.folder / "private" / "noise.key").write_bytes(content)


def drop_line(place: Place, index: int) -> None:
    lines = place.journal.read_bytes().splitlines(keepends=True)
    del lines[index]
    place.journal.write_bytes(b"".join(lines))


def exchange_lines(place: Place, first: int, second: int) -> None:
    lines = place.journal.read_bytes().splitlines(keepends=True)
    lines[first], lines[second] = lines[second], lines[first]
    place.journal.write_bytes(b"".join(lines))


def change_line(place: Place, index: int, old: bytes, new: bytes) -> None:
    lines = place.journal.read_bytes().splitlines(keepends=True)
    assert old in lines[index]
    lines[index] = lines[index].replace(old, new)
    place.journal.write_bytes(b"".join(lines))


def newest(place: Place, suffix: str):
    (path,) = (place.folder / "private" / "checkpoints").glob(f"*.{suffix}")
    return path


def flip(path, index: int) -> None:
    content = bytearray(path.read_bytes())
    content[index] ^= 1
    path.write_bytes(content)


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def link(path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("name", list(EDITS))
def test_changed_files_are_refused(place, name):
    trained(place, 5)
    EDITS[name](place)
    with pytest.raises(InvalidInput):
        Trainer.resume(place)
    with pytest.raises(InvalidInput):  # and no lock was kept
        Trainer.resume(place)


@pytest.mark.parametrize("junk", [b"{", b"junk\n", None])
def test_junk_at_the_end_of_the_journal_is_cut_off(place, wanted, junk):
    """It looks like a line that a killed process has not finished, and nobody acted on it."""
    trained(place, 5)
    lines = place.journal.read_bytes()
    append(place.journal, lines.splitlines(keepends=True)[-1] if junk is None else junk)
    with Trainer.resume(place) as trainer:
        assert place.journal.read_bytes() == lines
        trainer.train()
    assert result(place) == wanted


def test_every_changed_byte_of_the_journal_is_noticed(place):
    trained(place, 4)
    content = place.journal.read_bytes()
    accepted = []
    for index in range(0, len(content), 7):
        changed = bytearray(content)
        changed[index] ^= 0x01
        place.journal.write_bytes(changed)
        try:
            Trainer.resume(place).run.close()
        except InvalidInput:
            continue
        accepted.append(index)
    assert accepted == []


@pytest.mark.parametrize("steps", [3, 5, STEPS])
@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(os.urandom(100)),
        cut,
        partial(flip, index=-1),
        partial(flip, index=40),
        lambda path: (path.unlink(), path.mkdir()),
    ],
)
def test_damaged_noise_is_computed_again_to_the_same_bits(place, wanted, steps, damage):
    trained(place, steps)
    damage(newest(place, "noise"))
    with Trainer.resume(place) as trainer:
        trainer.train()
    assert result(place) == wanted


def test_noise_of_another_checkpoint_is_not_used(place, wanted):
    """The state after 3 steps under the name of that after 6, and the reverse."""
    trained(place, 3)
    early = newest(place, "noise").read_bytes()
    trained(place, 6)
    late = newest(place, "noise")
    late.write_bytes(early)
    trained(place, 8)
    assert journalled_steps(place) == 8
    with Trainer.resume(place) as trainer:
        trainer.train()
    assert result(place) == wanted


def test_noise_of_a_later_step_is_not_used(places, wanted):
    place, other = next(places), next(places)
    trained(place, 3)
    trained(other, 6)  # with the same test key
    newest(place, "noise").write_bytes(newest(other, "noise").read_bytes())
    with Trainer.resume(place) as trainer:
        assert trainer.run.steps == 3
        trainer.train()
    assert result(place) == wanted


def test_files_are_for_their_owner_only(place):
    trained(place, 4)
    for path in (place.folder / "private").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    public = [path.name for path in place.folder.iterdir() if path.is_file()]
    assert sorted(public) == ["guarantee.json", "plan.json", "run.json"]


def test_secrets_are_in_no_public_file(place):
    trained(place, STEPS)
    key = (place.folder / "private" / "noise.key").read_bytes()
    digests = [one["digest"] for one in journal_records(place) if one["kind"] == "step"]
    for path in place.folder.iterdir():
        if path.is_file():
            content = path.read_bytes()
            assert key not in content
            assert key.hex().encode() not in content
            assert not any(digest.encode() in content for digest in digests)


def test_drafts_and_old_checkpoints_are_removed(place, wanted):
    trained(place, 4)
    private = place.folder / "private"
    draft = "0123456789abcdef"
    left = [
        private / f".noise.key.{draft}",
        private / "checkpoints" / f".00000003.safetensors.{draft}",
        private / "checkpoints" / "00000006.safetensors",
        private / "checkpoints" / "00000006.noise",
        place.folder / f".guarantee.json.{draft}",
    ]
    for path in left:
        path.write_bytes(b"left by a killed process")
    (private / "notes.txt").write_text("of the user")
    with Trainer.resume(place) as trainer:
        assert not any(path.exists() for path in left)
        trainer.train()
    assert (private / "notes.txt").exists()
    assert result(place) == wanted


# --- Full disks ----------------------------------------------------------------------------------


class Disk:
    """Takes so many writes, and then none until there is space again."""

    def __init__(self) -> None:
        self.make_space()

    def write(self) -> None:
        self.writes += 1
        if self.writes > self.space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill_after(self, writes: int) -> None:
        self.space, self.writes = writes, 0

    def make_space(self) -> None:
        self.space, self.writes = NEVER, 0


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """All ways in which a run writes; a write fails before, halfway or at the flush after it."""
    full = Disk()
    honest = {
        name: getattr(os, name)
        for name in ("open", "pwrite", "fsync", "fdatasync", "replace", "mkdir")
    }

    def opened(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT and not os.path.exists(path):
            full.write()
        return honest["open"](path, flags, *rest, **options)

    def pwrite(handle: int, content: Any, at: int) -> int:
        try:
            full.write()
        except OSError:
            # A witness is overwritten within one sector, of which disks write all or nothing.
            if at > 0 or len(content) != WITNESS_BYTES:
                honest["pwrite"](handle, content[: len(content) // 2], at)
            raise
        return honest["pwrite"](handle, content, at)

    def plain(name: str, *args: Any, **options: Any) -> Any:
        full.write()
        return honest[name](*args, **options)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", pwrite)
    for name in ("fsync", "fdatasync", "replace", "mkdir"):
        monkeypatch.setattr(os, name, partial(plain, name))
    return full


def ran_out(act: Callable[[], object]) -> bool:
    """Whether there was no space for it; then the error says so, in one line."""
    try:
        act()
    except InvalidInput as error:
        reason = str(error)
    else:
        return False
    assert "No space left" in reason
    return True


def test_a_disk_that_is_full_during_creation(disk, places, wanted):
    for writes in range(200):
        place = next(places)
        disk.fill_after(writes)
        is_full = ran_out(lambda place=place: Trainer.create(place).run.close())
        disk.make_space()
        with Trainer.open(place) as trainer:
            if writes % 4 == 0:
                trainer.train()
        assert writes % 4 or result(place) == wanted
        if not is_full:
            break
    assert 15 < writes < 199


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_a_disk_that_is_full_during_a_step(disk, places, wanted, steps):
    """The third step writes a checkpoint; every failure leaves an object that refuses to go on."""
    failures = 0
    for writes in range(100):
        place = next(places)
        with Trainer.create(place) as trainer:
            trainer.train(steps - 1)
            applied = len(trainer.means)
            disk.fill_after(writes)
            is_full = ran_out(trainer.step)
            disk.make_space()
            failures += is_full
            journalled = journalled_steps(place)
            assert len(trainer.means) <= journalled  # no change of the model without a line
            if is_full:
                before = len(trainer.means)
                with pytest.raises(UnsafeState, match="resume it from its folder"):
                    trainer.step()
                assert len(trainer.means) == before
                assert before - applied in (0, 1)
        with Trainer.resume(place) as trainer:
            assert trainer.run.released == journalled
            if writes % 3 == 0:
                trainer.train()
        assert writes % 3 or result(place) == wanted
        if not is_full:
            break
    assert failures >= 4


def test_a_disk_that_is_full_while_resuming(disk, places, wanted):
    for writes in range(50):
        place = next(places)
        with Trainer.create(place) as trainer:
            trainer.train(5)
        disk.fill_after(writes)
        is_full = ran_out(lambda place=place: Trainer.resume(place).run.close())
        disk.make_space()
        with Trainer.resume(place) as trainer:
            trainer.train()
        assert result(place) == wanted
        if not is_full:
            break
    assert 2 < writes < 49


def test_a_guarantee_covers_a_saved_model_however_saving_fails(disk, places):
    for writes in range(40):
        place = next(places)
        with Trainer.create(place) as trainer:
            trainer.train(5)
            disk.fill_after(writes)
            ran_out(trainer.step)
            disk.make_space()
        saved = max(one["steps"] for one in journal_records(place) if one["kind"] == "saved")
        stated = stated_guarantee(place)
        assert stated is not None
        assert stated["steps"] >= saved
        with Trainer.resume(place) as trainer:
            assert trainer.run.steps == saved
            assert stated["epsilon"] >= trainer.run.plan.after(saved).epsilon * (1 - 1e-12)
