"""State files: for the owner's eyes only, replaced whole, and refused if anything is off."""

import contextlib
import errno
import json
import os
import re
import stat

import ghash_by_hand as by_hand
import msgspec
import numpy as np
import pytest
from noise_pieces import KEY, ONE_OF_EACH, OTHER_KEY, released_rounds
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import dpftrl
from dpftrl._internal import storage
from dpftrl._internal.storage import replace_file, replace_with
from dpftrl.errors import InvalidInput
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.noise import state_file as state_module
from dpftrl.noise.key import Secret
from dpftrl.noise.round_noise import NoiseState
from dpftrl.noise.state_file import mechanism_sha256

BLT = dpftrl.BLT([0.9, 0.5], [0.2, 0.3])


def made(mechanism=BLT, size=3, rounds=2, key=KEY, **options) -> NoiseStream:
    stream = NoiseStream.unchecked(
        mechanism, size, clip_norm=1.0, noise_multiplier=1.5, key=key, threads=1, **options
    )
    released_rounds(stream, np.ones((rounds, size)))
    return stream


def load(path, mechanism=BLT, key=KEY, at_least=0) -> NoiseStream:
    return NoiseStream.load_unchecked(path, mechanism, key=key, at_least=at_least, threads=1)


@pytest.fixture
def path(tmp_path):
    """A state at round 2."""
    made().save(tmp_path / "state")
    return tmp_path / "state"


def refusal(path, **options) -> str:
    """The one line with which a file is refused."""
    with pytest.raises(InvalidInput) as error:
        load(path, **options)
    message = str(error.value)
    assert message.count("\n") == 0
    return message


def read(path) -> tuple[dict, dict]:
    with safe_open(path, framework="numpy") as file:
        return file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def edit(path, **changes) -> None:
    """Change fields of the header, and leave all else, the digest too, as it is."""
    metadata, tensors = read(path)
    header = {**json.loads(metadata["header"]), **changes}
    header = {name: value for name, value in header.items() if value is not ...}
    save_file(tensors, path, {**metadata, "header": json.dumps(header, separators=(",", ":"))})


# --- Files of any mechanism --------------------------------------------------------------------


@pytest.mark.parametrize("name", ONE_OF_EACH)
@pytest.mark.parametrize("mode", ["buffered", "regenerating"])
def test_every_mechanism_is_saved_and_loaded(name, mode, tmp_path):
    for rounds in (0, 1, 7, 15):
        stream = made(ONE_OF_EACH[name], 5, rounds, mode=mode, dtype="float64")
        stream.save(tmp_path / "state")
        back = load(tmp_path / "state", ONE_OF_EACH[name], at_least=rounds)
        assert repr(back) == repr(stream)
        assert (back.round, back.mode) == (rounds, mode)
        assert back.memory_bytes == stream.memory_bytes
        update, wanted = np.ones(5), np.ones(5)
        back.add_to(update)
        stream.add_to(wanted)
        assert np.array_equal(update, wanted)


def test_a_state_is_saved_again_after_the_last_round(tmp_path):
    mechanism = dpftrl.FullTree(3)
    made(mechanism, rounds=3).save(tmp_path / "state")
    back = load(tmp_path / "state", mechanism, at_least=3)
    with pytest.raises(dpftrl.DpftrlError, match="3 rounds"):
        back.add_to(np.ones(3))


# --- Refusals ----------------------------------------------------------------------------------


def test_another_mechanism_is_refused(path):
    for other in (
        dpftrl.BLT([0.9, np.nextafter(0.5, 1)], [0.2, 0.3]),
        dpftrl.BLT([0.9, 0.5], [0.2, np.nextafter(0.3, 0)]),
        dpftrl.BLT([0.5, 0.9], [0.3, 0.2]),
        *ONE_OF_EACH.values(),
    ):
        assert "which is not this" in refusal(path, mechanism=other)


def test_different_mechanisms_have_different_digests():
    one_parameter = [dpftrl.BandedInverse.one_parameter(x) for x in (0.1, 0.2)]
    several = [*ONE_OF_EACH.values(), BLT, *one_parameter]
    several += [dpftrl.Toeplitz([1.0]), dpftrl.BandedInverse([1.0]), dpftrl.SquareRoot(1)]
    several += [dpftrl.Banded([[1.0, 1.0]]), dpftrl.Banded([[1.0]]), dpftrl.FullTree(1)]
    several += [dpftrl.Banded([[1.0, 2.0, 3.0, 4.0]]), dpftrl.Banded([[1.0, 2.0], [3.0, 0.0]])]
    several += [dpftrl.Banded([[1.0, 2.0, 3.0, 0.5], [0.0] * 4]), dpftrl.Toeplitz([1.0, 0.0])]
    assert len({mechanism_sha256(mechanism) for mechanism in several}) == len(several)


def test_another_key_is_refused_by_its_fingerprint(path):
    message = refusal(path, key=OTHER_KEY)
    assert KEY.fingerprint() in message
    assert OTHER_KEY.fingerprint() in message


def test_a_state_from_before_what_was_released_is_refused(path):
    assert load(path, at_least=2).round == 2
    assert re.search(r"after 2 rounds, but 3 have been released", refusal(path, at_least=3))
    assert "10000000000000000" in refusal(path, at_least=10**16)
    for wrong in (-1, 1.0, True, None, "2"):
        assert "at_least" in refusal(path, at_least=wrong)


@pytest.mark.parametrize("name", ["independent", "blt"])
def test_every_flipped_bit_is_noticed(name, tmp_path):
    path, mechanism = tmp_path / "state", ONE_OF_EACH[name]
    made(mechanism).save(path)
    content = path.read_bytes()
    step = 1 if name == "independent" else 7
    for bit in range(0, 8 * len(content), step):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(InvalidInput):
            load(path, mechanism)
    path.write_bytes(content)
    assert load(path, mechanism).round == 2


def test_every_truncation_and_any_addition_is_noticed(path):
    content = path.read_bytes()
    for length in range(len(content)):
        path.write_bytes(content[:length])
        refusal(path)
    for more in (b"\0", b" ", content):
        path.write_bytes(content + more)
        refusal(path)


def test_changes_of_several_bits_are_noticed(path):
    content = path.read_bytes()
    random = np.random.default_rng(0)
    for _ in range(300):
        changed = bytearray(content)
        a, b = sorted(random.integers(0, len(content), 2))
        changed[a:b] = random.bytes(b - a)
        if changed != content:
            path.write_bytes(changed)
            refusal(path)


def test_a_flipped_bit_that_nobody_checks_would_be_noticed(path, monkeypatch):
    """The same change, with the digest out of the way, is taken for a state."""
    metadata, tensors = read(path)
    tensors["buffer-0"].view(np.uint8)[0] ^= 1
    save_file(tensors, path, metadata)
    assert "seal is wrong" in refusal(path)
    monkeypatch.setattr(state_module.hmac, "compare_digest", lambda *_: True)
    assert load(path).round == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"version": 0},
        {"version": "1"},
        {"version": None},
        {"format": "dpftrl"},
        {"format": ...},
        {"round": 3},
        {"round": -1},
        {"round": 2.5},
        {"next_row": 5},
        {"size": 4},
        {"sigma": 1.0},
        {"sigma": "NaN"},
        {"clip_norm": 2.0},
        {"dtype": "float32"},
        {"dtype": "float16"},
        {"mode": "regenerating"},
        {"mode": "auto"},
        {"buffers": 0},
        {"buffers": 1},
        {"buffers": 10**9},
        {"mechanism": "tree"},
        {"mechanism_sha256": "0" * 64},
        {"key_fingerprint": OTHER_KEY.fingerprint()},
        {"key_fingerprint": ...},
        {"more": 1},
    ],
    ids=str,
)
def test_an_edited_header_is_refused(path, changes):
    edit(path)
    assert load(path).round == 2
    edit(path, **changes)
    refusal(path)


def test_tensors_that_are_exchanged_renamed_or_reshaped_are_refused(path):
    metadata, tensors = read(path)
    one, other, digests = tensors["buffer-0"], tensors["buffer-1"], tensors["digests"]
    for wrong in (
        {"buffer-0": other, "buffer-1": one, "digests": digests},
        {"buffer-0": one, "buffer-2": other, "digests": digests},
        {"buffer-0": one, "digests": digests},
        {"buffer-0": one, "buffer-1": other},
        {"buffer-0": one.view(np.int32), "buffer-1": other, "digests": digests},
        {"buffer-0": one[:2], "buffer-1": other, "digests": digests},
        {**tensors, "more": one},
        {},
    ):
        save_file(wrong, path, metadata)
        refusal(path)


def test_states_of_two_streams_cannot_be_put_together(tmp_path):
    """A header of one and the content of another, both of the same key."""
    made(rounds=2).save(tmp_path / "a")
    made(rounds=3).save(tmp_path / "b")
    for header, digest, content in ("aab", "aba", "abb", "baa", "bab", "bba"):
        part = {name: read(tmp_path / name) for name in "ab"}
        mixed = {"header": part[header][0]["header"], "seal": part[digest][0]["seal"]}
        save_file(part[content][1], tmp_path / "c", mixed)
        refusal(tmp_path / "c")


@pytest.mark.parametrize("digest", ["", "0" * 32, "é" * 32, "\0" * 32, "F" * 32, "x"])
def test_a_state_with_a_malformed_seal_is_refused(path, digest):
    metadata, tensors = read(path)
    save_file(tensors, path, {**metadata, "seal": digest})
    refusal(path)


def test_metadata_that_is_missing_is_refused(path):
    metadata, tensors = read(path)
    for name in metadata:
        save_file(tensors, path, {k: v for k, v in metadata.items() if k != name})
        refusal(path)
    save_file(tensors, path)
    refusal(path)


def foreign(kind: str, width: int) -> bytes:
    """A safetensors file with four numbers of some kind."""
    described = {"x": {"dtype": kind, "shape": [4], "data_offsets": [0, 4 * width]}}
    header = json.dumps(described).encode()
    return len(header).to_bytes(8, "little") + header + bytes(4 * width)


FOREIGN = {
    "empty": b"",
    "one byte": b"\0",
    "zeros": bytes(1000),
    "json": b'{"format": "dpftrl noise state", "version": 1}',
    "text": b"not a state\n" * 100,
    "a header of 2^63 bytes": b"\xff" * 7 + b"\x7f" + bytes(100),
    "no tensors": (2).to_bytes(8, "little") + b"{}",
    "F32": foreign("F32", 4),
    "F16": foreign("F16", 2),
    "BF16": foreign("BF16", 2),
    "F8_E4M3": foreign("F8_E4M3", 1),
    "F8_E5M2": foreign("F8_E5M2", 1),
    "BOOL": foreign("BOOL", 1),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_file_that_is_not_a_state_is_refused(kind, tmp_path):
    (tmp_path / "file").write_bytes(FOREIGN[kind])
    assert str(tmp_path / "file") in refusal(tmp_path / "file")


def test_a_path_that_is_not_a_readable_file_is_refused(tmp_path):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "file").write_bytes(b"")
    for wrong in ("missing", "", "file/inside", "loop", "x" * 5000, "a\0b"):
        refusal(tmp_path / wrong if wrong else tmp_path)
    if os.geteuid():
        (tmp_path / "file").chmod(0)
        refusal(tmp_path / "file")


# --- The digest of a state ---------------------------------------------------------------------


def test_two_states_do_not_allow_forging_a_third(tmp_path):
    """GMAC with one nonce twice gives its key away: the digest must not lie open in the file.

    Two states of independent noise after one round differ in their last 16 bytes alone. If those
    are one block, the difference of the digests is that of the blocks times h squared.
    """
    states = []
    for noise_multiplier in (1.5 + 2.0**-n for n in range(60)):
        for update in (0.0, 1.0):
            stream = NoiseStream.unchecked(
                dpftrl.Independent(),
                3,
                clip_norm=1.0,
                noise_multiplier=noise_multiplier,
                key=KEY,
                threads=1,
            )
            stream.add_to(np.full(3, update))
            stream.save(tmp_path / str(update))
        states = [read(tmp_path / name) for name in ("0.0", "1.0")]
        contents = [hashed_content(*state) for state in states]
        if len(contents[0]) % 16 == 0:
            break
    assert len(contents[0]) % 16 == 0
    blocks = [by_hand.blocks_of(content) for content in contents]
    assert blocks[0][:-1] == blocks[1][:-1]
    tags = [int(metadata["seal"][:32], 16) for metadata, _ in states]
    gap = by_hand.multiply(tags[0] ^ tags[1], by_hand.inverse(blocks[0][-1] ^ blocks[1][-1]))
    h = by_hand.square_root(gap)
    mask = tags[0] ^ by_hand.hashed(h, contents[0])
    # The attacker moves the state on, to get past `at_least`.
    metadata, tensors = states[0]
    header = metadata["header"].replace('"round":1,', '"round":9,')
    metadata = {"header": header, "seal": ""}
    forged = mask ^ by_hand.hashed(h, hashed_content(metadata, tensors))
    save_file(tensors, tmp_path / "forged", {**metadata, "seal": f"{forged:032x}"})
    refusal(tmp_path / "forged", mechanism=dpftrl.Independent(), at_least=9)


def hashed_content(metadata: dict, tensors: dict) -> bytes:
    """What the digest of a state is taken of, as anybody can read in the source."""
    header = metadata["header"].encode()
    content = len(header).to_bytes(8, "big") + header
    for name in sorted(tensors):
        described = f"{name} {tensors[name].dtype} {tensors[name].size}".encode()
        content += len(described).to_bytes(8, "big") + described + tensors[name].tobytes()
    return content


# --- Writing -----------------------------------------------------------------------------------


@contextlib.contextmanager
def umask(mask: int):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_only_the_owner_can_read_a_state(mask, tmp_path):
    (tmp_path / "old").write_bytes(b"")
    (tmp_path / "old").chmod(0o666)
    with umask(mask):
        for name in ("new", "old"):
            made().save(tmp_path / name)
            assert mode_of(tmp_path / name) == 0o600


def test_only_the_owner_can_read_a_state_while_it_is_written(tmp_path, monkeypatch):
    """At no moment is there a file in the folder that others can open."""
    seen = []

    def look(*_):
        seen.extend(mode_of(file) for file in tmp_path.iterdir())

    def watched(*arguments):
        look()
        write_tensors(*arguments)
        look()

    write_tensors = state_module._write_tensors
    monkeypatch.setattr(state_module, "_write_tensors", watched)
    monkeypatch.setattr(storage.os, "fsync", look)
    with umask(0):
        made().save(tmp_path / "state")
    assert len(seen) >= 4
    assert set(seen) == {0o600}


def test_a_state_is_on_the_disk_when_save_returns(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(storage.os, "fsync", lambda handle: flushed.append(os.fstat(handle)))
    made().save(tmp_path / "state")
    inodes = [status.st_ino for status in flushed]
    assert inodes == [(tmp_path / "state").stat().st_ino, tmp_path.stat().st_ino]


def test_a_leftover_draft_or_link_is_not_followed(tmp_path):
    """Another user of a shared folder could point it at a file of theirs."""
    (tmp_path / "trap").write_bytes(b"")
    (tmp_path / "state").symlink_to(tmp_path / "trap")
    made().save(tmp_path / "state")
    assert (tmp_path / "trap").read_bytes() == b""
    assert sorted(file.name for file in tmp_path.iterdir()) == ["state", "trap"]
    assert not (tmp_path / "state").is_symlink()


@pytest.mark.parametrize("leave", ["link", "file"])
def test_a_draft_that_somebody_made_before_is_neither_followed_nor_adopted(
    tmp_path, monkeypatch, leave
):
    """Nobody can guess the name of a draft; this one guesses it all the same."""
    monkeypatch.setattr(storage.secrets, "token_hex", lambda _: "00")
    (tmp_path / "trap").write_bytes(b"")
    draft = tmp_path / ".state.00"
    draft.symlink_to(tmp_path / "trap") if leave == "link" else draft.write_bytes(b"old")
    with pytest.raises(InvalidInput, match="File exists"):
        made().save(tmp_path / "state")
    assert (tmp_path / "trap").read_bytes() == b""
    assert not (tmp_path / "state").exists()


def test_names_of_drafts_cannot_be_guessed(tmp_path, monkeypatch):
    names = set()
    monkeypatch.setattr(storage.os, "fsync", lambda _: names.update(os.listdir(tmp_path)))
    for _ in range(5):
        made().save(tmp_path / "state")
    assert len({name for name in names if re.fullmatch(r"\.state\.[0-9a-f]{16}", name)}) == 5


def test_the_safetensors_library_reads_what_was_written_without_it(tmp_path):
    for name in ("blt", "tree", "sqrt"):
        stream = made(ONE_OF_EACH[name], 5, 3)
        stream.save(tmp_path / "state")
        tensors = load_file(tmp_path / "state")
        expected = stream._state.tensors()
        assert tensors.keys() == expected.keys()
        for key, value in expected.items():
            assert tensors[key].dtype == value.dtype
            assert np.array_equal(tensors[key], value)


FAILURES = [
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("something"),
    MemoryError(),
    RuntimeError("something"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: type(failure).__name__)
def test_a_failing_writer_leaves_the_old_state_and_no_draft(path, failure, monkeypatch):
    """What is left of a draft is half a state, which is as secret as a whole one."""
    before = path.read_bytes()

    def fails(file, *_):
        file.write(b"half of it")
        raise failure

    monkeypatch.setattr(state_module, "_write_tensors", fails)
    stream = made(rounds=3)
    with pytest.raises(BaseException) as error:  # noqa: PT011
        stream.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["state"]
    if isinstance(failure, OSError):
        assert isinstance(error.value, InvalidInput)
        assert "No space left on device" in str(error.value)
    monkeypatch.undo()
    stream.save(path)
    assert load(path, at_least=3).round == 3


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failing_disk_leaves_the_old_state_and_no_draft(path, call, monkeypatch):
    before = path.read_bytes()

    def fails(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    stream = made(rounds=3)
    with monkeypatch.context() as patch:
        patch.setattr(storage.os, call, fails)
        with pytest.raises(InvalidInput, match="cannot be written: Input/output error"):
            stream.save(path)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["state"]


def test_writing_where_nothing_can_be_written_is_refused(tmp_path):
    stream = made()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for wrong in ("missing/state", "folder", "file/state", "a\0b", "x" * 300):
        with pytest.raises(InvalidInput, match="cannot be written") as error:
            stream.save(tmp_path / wrong)
        assert "\n" not in str(error.value)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "folder"]
    update, wanted = np.ones(3), np.ones(3)
    stream.add_to(update)
    made(rounds=2).add_to(wanted)
    assert np.array_equal(update, wanted)


@pytest.mark.parametrize("path", ["", ".", "/"])
def test_a_path_without_a_name_is_refused(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for write in (
        lambda: made().save(path),
        lambda: replace_with(storage.Path(path), lambda _: None),
        lambda: replace_file(storage.Path(path), b""),
    ):
        with pytest.raises(InvalidInput, match="cannot be written"):
            write()


def test_a_link_is_replaced_and_what_it_pointed_to_is_left(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    made().save(tmp_path / "link")
    assert (tmp_path / "real").read_bytes() in (b"old", (tmp_path / "link").read_bytes())
    assert load(tmp_path / "link").round == 2


def test_paths_may_be_text_or_paths(tmp_path):
    for path in (str(tmp_path / "state é"), tmp_path / "state é"):
        made().save(path)
        assert load(path).round == 2


# --- What is in a state ------------------------------------------------------------------------


def test_a_state_file_does_not_contain_the_key(path):
    content = path.read_bytes()
    for secret in (KEY, KEY.derive(b"stream"), KEY.derive(b"state"), made()._row_keys):
        assert secret.secret_bytes() not in content
        assert secret.secret_bytes()[:8].hex().encode() not in content
    assert KEY.fingerprint().encode() in content


def test_a_header_is_strict_json(path):
    header = read(path)[0]["header"]
    assert msgspec.json.decode(header)["format"] == "dpftrl noise state"
    assert "NaN" not in header


def test_a_state_counts_rows_by_its_digests():
    state = NoiseState.start()
    assert (state.round, state.next_row, state.last_digest.secret_bytes()) == (0, 0, b"")
    for fresh, digest in ((1, b"a" * 16), (3, b"b" * 16), (2, b"c" * 16)):
        state = state.after(Secret(digest), fresh, [])
        assert state.last_digest == Secret(digest)
    assert (state.round, state.next_row) == (3, 6)
    assert b"".join(state.digests[row].secret_bytes()[:1] for row in range(6)) == b"abbbcc"


def test_generated_keys_work_like_test_keys(tmp_path):
    key = NoiseKey.generate()
    made(key=key).save(tmp_path / "state")
    again = NoiseKey(key.secret_bytes())
    assert load(tmp_path / "state", key=again).round == 2
