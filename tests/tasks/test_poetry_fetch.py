"""Fetching and checking the tarball, with a fake npm: nothing is downloaded here."""

import hashlib
import os

import pytest

from dpftrl.errors import InvalidInput
from dpftrl.tasks.poetry import Tarball

CONTENT = b"the right bytes"
TARBALL = Tarball("some-poems", "1.2.3", hashlib.sha256(CONTENT).hexdigest())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "dpftrl"


def put_npm(monkeypatch, tmp_path, script: str) -> None:
    """Put a fake npm on the PATH."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "npm").write_text(f"#!/bin/sh\n{script}\n")
    (bin_ / "npm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_}:{os.defpath}")


def silence(*_) -> None:
    pass


def test_the_tarball_is_fetched_once(monkeypatch, tmp_path, folder):
    put_npm(
        monkeypatch,
        tmp_path,
        f'[ "$*" = "pack --ignore-scripts some-poems@1.2.3" ] || exit 9\n'
        f'echo again >> {tmp_path}/calls\nprintf "the right bytes" > some-poems-1.2.3.tgz',
    )
    progress = []
    for _ in range(2):
        content = TARBALL.read_or_fetch(folder, lambda *message: progress.append(message))
        assert content == CONTENT
    assert (tmp_path / "calls").read_text() == "again\n"
    assert progress == [(None, "fetching some-poems@1.2.3")]
    assert [path.name for path in folder.iterdir()] == ["some-poems-1.2.3.tgz"]


def test_a_damaged_copy_is_fetched_again(monkeypatch, tmp_path, folder):
    put_npm(monkeypatch, tmp_path, 'printf "the right bytes" > some-poems-1.2.3.tgz')
    folder.mkdir(parents=True)
    (folder / TARBALL.file_name).write_bytes(b"the wrong bytes")
    assert TARBALL.read_or_fetch(folder, silence) == CONTENT
    assert TARBALL.read(folder / TARBALL.file_name) == CONTENT


def test_a_tarball_with_another_digest_is_refused(monkeypatch, tmp_path, folder):
    put_npm(monkeypatch, tmp_path, 'printf "the wrong bytes" > some-poems-1.2.3.tgz')
    with pytest.raises(InvalidInput, match=r"is not some-poems@1\.2\.3: its SHA-256 is fcab93c1"):
        TARBALL.read_or_fetch(folder, silence)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo 'npm error code ENOTFOUND\nnpm error network secret.host' >&2; exit 1", "ENOTFOUND"),
        ("exit 7", "code 7"),
        ("exit 0", "code 0"),
    ],
)
def test_without_a_network_it_says_what_to_do(monkeypatch, tmp_path, folder, script, why):
    put_npm(monkeypatch, tmp_path, script)
    with pytest.raises(InvalidInput, match=f"npm failed with {why}; run `npm pack .* path=") as e:
        TARBALL.read_or_fetch(folder, silence)
    assert "host" not in str(e.value)
    assert "\n" not in str(e.value)


def test_without_npm_it_says_what_to_do(monkeypatch, folder):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InvalidInput, match="npm was not found; run `npm pack some-poems@"):
        TARBALL.read_or_fetch(folder, silence)


def test_a_folder_that_cannot_be_created_is_reported(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="cannot be written"):
        TARBALL.read_or_fetch(tmp_path / "file" / "dpftrl", silence)
