"""Files that somebody else prepared, and files that are no files."""

import os
import stat
from pathlib import Path

import pytest

from dpftrl._internal import storage
from dpftrl._internal.storage import (
    append_durably,
    check_own_folder,
    cut_durably,
    open_own,
    read_file,
    replace_file,
)
from dpftrl.errors import InvalidInput, UnsafeState


@pytest.fixture
def _another_user(monkeypatch):
    """What exists belongs to somebody else."""
    someone = os.geteuid() + 1
    monkeypatch.setattr(storage.os, "geteuid", lambda: someone)


def test_a_link_is_replaced_and_not_followed(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_bytes(b"old")
    path.symlink_to(victim)
    replace_file(path, b"new")
    assert (victim.read_bytes(), path.read_bytes()) == (b"old", b"new")
    assert not path.is_symlink()


def test_a_private_file_is_for_its_owner_and_another_for_the_umask(tmp_path):
    old = os.umask(0o022)
    try:
        replace_file(tmp_path / "private", b"", private=True)
        replace_file(tmp_path / "public", b"")
    finally:
        os.umask(old)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("private", "public")]
    assert modes == [0o600, 0o644]


def test_a_replaced_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    steps = list[str]()
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(storage.os, "fsync", lambda handle: [steps.append("fsync"), fsync(handle)])
    monkeypatch.setattr(
        storage.os, "replace", lambda *paths: [steps.append("replace"), replace(*paths)]
    )
    replace_file(tmp_path / "guarantee.json", b"{}")
    assert steps == ["fsync", "replace", "fsync"]


@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_only_a_file_or_a_link_is_replaced(tmp_path, kind):
    path = tmp_path / "thing"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path = Path(os.devnull)
    with pytest.raises(InvalidInput, match="cannot be written: it is a"):
        replace_file(path, b"new")
    assert not stat.S_ISREG(path.stat().st_mode)


def test_an_append_needs_a_file_that_ends_where_it_should(tmp_path):
    path = tmp_path / "journal"
    append_durably(path, b"one", 0)
    append_durably(path, b"two", 3)
    for at in (5, 7, 0):
        with pytest.raises(UnsafeState, match="6 bytes instead of"):
            append_durably(path, b"x", at)
    assert path.read_bytes() == b"onetwo"
    cut_durably(path, 3)
    assert path.read_bytes() == b"one"
    with pytest.raises(UnsafeState, match="lost some"):
        cut_durably(path, 4)


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_own_files_are_no_links_and_no_pipes(tmp_path, kind):
    path, victim = tmp_path / "file", tmp_path / "victim"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(victim)
        if kind == "link":
            victim.write_bytes(b"")
    acts = [lambda: read_file(path, own=True), lambda: append_durably(path, b"x", 0)]
    acts += [lambda: cut_durably(path, 0)]
    for act in acts:
        with pytest.raises(InvalidInput):
            act()
    assert not victim.exists() or victim.read_bytes() == b""


@pytest.mark.usefixtures("_another_user")
def test_files_and_folders_of_others_are_refused(tmp_path):
    path = tmp_path / "ledger.csv"
    path.write_bytes(b"")
    for act in (
        lambda: open_own(path),
        lambda: append_durably(path, b"x", 0),
        lambda: check_own_folder(tmp_path),
    ):
        with pytest.raises(UnsafeState, match="belongs to another user"):
            act()
    assert path.read_bytes() == b""


def test_folders_that_somebody_could_exchange_are_refused(tmp_path):
    real, link, open_to_all = tmp_path / "real", tmp_path / "link", tmp_path / "open"
    real.mkdir()
    link.symlink_to(real)
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    check_own_folder(real)
    check_own_folder(link, may_be_link=True)
    with pytest.raises(UnsafeState, match="is a link"):
        check_own_folder(link)
    with pytest.raises(UnsafeState, match="everybody may write"):
        check_own_folder(open_to_all)
    with pytest.raises(InvalidInput, match="cannot be opened"):
        check_own_folder(tmp_path / "missing")


def test_a_link_of_somebody_else_is_refused_where_a_link_of_ones_own_is_not(tmp_path, monkeypatch):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    honest = Path.lstat

    def of_another(path):
        status = list(honest(path))
        status[stat.ST_UID] += 1
        return os.stat_result(status)

    monkeypatch.setattr(Path, "lstat", of_another)
    with pytest.raises(UnsafeState, match="is a link"):
        check_own_folder(link, may_be_link=True)
