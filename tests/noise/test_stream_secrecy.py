"""What must never be shown: the key, the keystream, rows of Z, buffers, digests.

The widest of nets: tracebacks with local variables, as error trackers send them away by default.
"""

import base64
import contextlib
import copy
import dataclasses
import io
import json
import logging
import os
import pathlib
import pickle
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from noise_pieces import KEY, ONE_OF_EACH, OTHER_KEY, key_of_row, normals_of_key, released_rounds

import dpftrl
from dpftrl.errors import InvalidInput
from dpftrl.noise import Grid, NoiseKey, NoiseStream, state_file
from dpftrl.noise import key as digest_module
from dpftrl.noise import round_noise as rounds
from dpftrl.noise import stream as stream_module
from dpftrl.noise.key import Digest, Keystream, Secret, row_key
from dpftrl.noise.round_noise import CHUNK

SOURCE = str(pathlib.Path(stream_module.__file__).parent.parent)
SIGMA = 3.0


@pytest.fixture(autouse=True)
def _even_little_work_is_shared(monkeypatch):
    """However few the chunks, every thread gets some."""
    monkeypatch.setattr(rounds, "SMALL_SHARE", 1)


def make(name="blt", size=300, **options) -> NoiseStream:
    return NoiseStream.unchecked(
        ONE_OF_EACH[name],
        size,
        **{"clip_norm": 1.0, "noise_multiplier": SIGMA, "key": KEY, **options},
    )


# --- Looking for secrets -----------------------------------------------------------------------


def spellings(secret: bytes) -> set[str]:
    """Ways in which bytes can get into a text."""
    shown = {secret.hex(), secret.hex().upper(), secret.hex(" "), str(list(secret))[1:-1]}
    shown |= {base64.b64encode(secret).decode().rstrip("=")[:-1], repr(secret)[2:-1]}
    shown |= {str(int.from_bytes(secret, order)) for order in ("big", "little")}
    return shown | {secret.decode("latin-1"), repr(bytearray(secret))[12:-2]}


def digits_of(values: np.ndarray) -> set[str]:
    """The first and last values as numpy prints them, without the digits that it rounds."""
    flat = np.asarray(values, np.float64).reshape(-1)
    ends = [*flat[:3], *flat[-3:]]
    return {repr(abs(float(value)))[:8] for value in ends if 1e-3 < abs(value) < 1e3}


class Secrets(NamedTuple):
    """How what tells something about the noise would be spelt."""

    keys: set[str]
    digests: set[str]
    values: set[str]


KINDS = pytest.mark.parametrize("kind", Secrets._fields)


def secrets_of(*streams: NoiseStream) -> Secrets:
    """All that tells something about the noise that streams have made so far."""
    found = Secrets(set(), set(), set())
    for stream in streams:
        keys = [key_of_row(stream, row) for row in range(stream._state.next_row)]
        for key in (stream._key, stream._row_keys, stream._key.derive(b"state"), *keys):
            found.keys.update(spellings(key.secret_bytes()))
        for row, key in enumerate(keys):
            z = normals_of_key(key, stream._size)
            found.digests.update(spellings(stream._state.digests[row].secret_bytes()))
            found.values.update(digits_of(z), digits_of(stream._noise_multiplier * z))
        for buffer in stream._state.buffers:
            found.values.update(digits_of(buffer.array))
    return found


def shown_by(error: BaseException) -> str:
    """The message, and the local variables of all our functions that it came through."""
    lines = []
    pending, seen = [traceback.TracebackException.from_exception(error, capture_locals=True)], 0
    while pending:
        one = pending.pop()
        seen += 1
        lines += list(one.format_exception_only())
        lines += [
            f"{frame.name}: {name} = {value}"
            for frame in one.stack
            if frame.filename.startswith(SOURCE)
            for name, value in (frame.locals or {}).items()
        ]
        pending += [more for more in (one.__cause__, one.__context__) if more is not None]
    assert seen
    return "\n".join(lines)


def check_hides(text: str, secrets: Secrets, kind: str | None = None) -> None:
    """Whether no line of a text has a secret of some kind in it, or of any."""
    searched = set().union(*secrets) if kind is None else getattr(secrets, kind)
    assert len(searched) > 5
    lines = [line[:60] for line in text.splitlines() if any(secret in line for secret in searched)]
    assert lines == []


def test_a_secret_that_is_shown_is_noticed():
    stream = make()
    stream.add_to(np.ones(300))
    secrets = secrets_of(stream)
    key, row = KEY.secret_bytes(), key_of_row(stream, 0).secret_bytes()
    digest = stream._state.digests[0].secret_bytes()
    z, buffer = normals_of_key(key_of_row(stream, 0), 300), stream._state.buffers[0].array
    leaks = {
        "keys": (key, bytearray(key), key.hex(), list(key), base64.b64encode(key), row),
        "digests": (digest, {"digest": digest}),
        "values": (buffer, buffer.tolist(), {"b": buffer}, z, z[:3], SIGMA * z, [z.tolist()]),
    }
    for kind, texts in leaks.items():
        for leak in texts:
            for shown in (f"a local: {leak}", f"a local: {leak!r}"):
                with pytest.raises(AssertionError):
                    check_hides(shown, secrets, kind)
    check_hides(repr(stream) + repr(np.ones(300)) + KEY.fingerprint(), secrets)


# --- Printing ----------------------------------------------------------------------------------


@pytest.fixture
def scratches(monkeypatch) -> list:
    """All the room for keystream and noise that is made from here on."""
    made, scratch = [], rounds.Scratch

    def remembered(*arguments):
        made.append(scratch(*arguments))
        return made[-1]

    monkeypatch.setattr(rounds, "Scratch", remembered)
    return made


@pytest.mark.parametrize("name", ["blt", "tree", "sqrt"])
def test_nothing_prints_a_secret(name, scratches):
    stream = make(name)
    released_rounds(stream, np.ones((5, 300)))
    secrets, text = secrets_of(stream), io.StringIO()
    logger = logging.Logger("test")
    logger.addHandler(logging.StreamHandler(text))
    row = key_of_row(stream, 0)
    made, after = stream._next_round(Secret(bytes(16)))
    shown = [KEY, stream, row, Keystream(row), Digest(KEY), *scratches, stream._state, made, after]
    shown += [stream._decoder_rows, [KEY], {"key": KEY}, (stream,), vars(stream)]
    for item in shown:
        logger.warning("%s %r", item, item)
        logger.warning(f"{item} {item!r} {item!s} {item!a}")
        logger.warning(item)
    assert text.getvalue().count("\n") == 3 * len(shown)
    check_hides(text.getvalue(), secrets)
    assert repr(KEY) == str(KEY) == f"{KEY}" == "NoiseKey(secret)"
    assert "secret" in repr(Keystream(row))
    assert "secret" in repr(scratches[0])
    assert len(repr(stream).splitlines()) == 1


def test_a_key_has_no_dictionary_to_print():
    with pytest.raises(TypeError):
        vars(KEY)
    assert not hasattr(KEY, "__dict__")
    with pytest.raises(AttributeError):
        KEY.note = "something"
    with pytest.raises(TypeError):
        format(KEY, ">40")
    with pytest.raises(TypeError):
        bytes(KEY)


# --- Copying -----------------------------------------------------------------------------------


COPIES = {
    "pickle": pickle.dumps,
    "old pickle": lambda item: pickle.dumps(item, 0),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "json": lambda item: json.dumps(item, default=vars),
    "msgspec": msgspec.json.encode,
    "builtins": msgspec.to_builtins,
    "asdict": dataclasses.asdict,
}
HELD = {
    "key": lambda _: KEY,
    "row key": lambda stream: key_of_row(stream, 0),
    "stream": lambda stream: stream,
    "keystream": lambda stream: Keystream(key_of_row(stream, 0)),
    "digest": lambda _: Digest(KEY),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("held", HELD)
def test_secrets_are_not_copied_by_accident(held, way):
    stream = make()
    stream.add_to(np.ones(300))
    for item in (HELD[held](stream), [HELD[held](stream)], {"x": HELD[held](stream)}):
        if way == "copy" and (held in ("keystream", "digest") or isinstance(item, list | dict)):
            continue  # another name for the same
        with pytest.raises((TypeError, pickle.PicklingError)) as error:
            COPIES[way](item)
        check_hides(str(error.value), secrets_of(stream))


@pytest.mark.parametrize("mode", ["buffered", "regenerating"])
@pytest.mark.parametrize("way", ["pickle", "json", "msgspec", "builtins", "asdict"])
def test_states_can_only_be_written_by_save(way, mode):
    """A state is worth as much as the key."""
    stream = make(mode=mode)
    stream.add_to(np.ones(300))
    with pytest.raises((TypeError, msgspec.MsgspecError)):
        COPIES[way](stream._state)


def test_keystream_is_not_pickled(scratches):
    make().add_to(np.ones(300))
    with pytest.raises((TypeError, pickle.PicklingError)):
        pickle.dumps(scratches[0])


# --- Errors ------------------------------------------------------------------------------------


class Broken(Exception):
    """What a machine that fails raises."""


def fails(*_, **__):
    raise Broken


def fails_after(calls: int, call):
    left = iter(range(calls))

    def sometimes(*arguments, **named):
        if next(left, None) is None:
            raise Broken
        return call(*arguments, **named)

    return sometimes


# What a round calls, and how often it gets through before it fails.
FAILURES = [
    (rounds, "blt_step_onto", "blt", 0),
    (rounds, "blt_step_onto", "blt", 2),
    (rounds, "add_normals", "tree", 1),
    (rounds, "mix_buffers", "tree", 1),
    (rounds, "add_normals", "sqrt", 3),
    (rounds, "add_scaled", "tree", 0),
    (rounds, "add_scaled", "tree", 1),
    (rounds, "Scratch", "blt", 0),
    (rounds, "Scratch", "tree", 0),
    (rounds, "Keystream", "blt", 0),
    (Keystream, "fill", "blt", 1),
    (Keystream, "fill", "tree", 1),
]
# The same before anything is changed: the stream can go on.
EARLY_FAILURES = [
    (digest_module, "all_finite", "blt", 0),
    (Digest, "finish", "blt", 0),
    (Digest, "finish", "blt", 1),
    (stream_module, "row_key", "blt", 0),
    (stream_module, "row_key", "tree", 0),
    (stream_module, "row_key", "sqrt", 1),
    (stream_module, "transition", "tree", 0),
    (stream_module, "LinearRound", "tree", 0),
    (stream_module, "BltRound", "blt", 0),
    (rounds, "NoiseState", "blt", 0),
]


def case(failure) -> str:
    module, call, name, calls = failure
    return f"{module.__name__.rpartition('.')[2]}.{call} of {name} after {calls}"


def broken_round(failure, threads: int, monkeypatch, size=3 * CHUNK):
    """A stream that fails in its third round, its secrets, and all that the error shows."""
    module, call, name, calls = failure
    stream = make(name, size, threads=threads)
    released_rounds(stream, np.ones((2, size)))
    # Its twin makes the round that fails, and so the noise that must not be shown.
    twin = make(name, size, threads=threads)
    noise = released_rounds(twin, np.ones((3, size)))[2] - 1
    secrets = secrets_of(stream, twin)
    for start in range(0, size, CHUNK):
        secrets.values.update(digits_of(noise[start:] / SIGMA), digits_of(noise[start:]))
    with monkeypatch.context() as patch:
        patch.setattr(module, call, fails_after(calls, getattr(module, call)))
        with pytest.raises(Broken) as error:
            stream.add_to(np.ones(size))
    return stream, secrets, shown_by(error.value)


@pytest.mark.parametrize("failure", [*FAILURES, *EARLY_FAILURES], ids=case)
@KINDS
def test_a_round_that_fails_shows_no_secret(failure, kind, monkeypatch):
    for threads in (1, 3):
        _, secrets, shown = broken_round(failure, threads, monkeypatch)
        assert "add_to" in shown
        check_hides(shown, secrets, kind)


@pytest.mark.parametrize("failure", FAILURES, ids=case)
def test_an_interrupted_stream_refuses_to_continue(failure, monkeypatch, tmp_path):
    stream, _, _ = broken_round(failure, 2, monkeypatch)
    for _ in range(2):
        update = np.ones(3 * CHUNK)
        with pytest.raises(InvalidInput, match="interrupted"):
            stream.add_to(update)
        assert np.array_equal(update, np.ones(3 * CHUNK))
        with pytest.raises(InvalidInput, match="interrupted"):
            stream.save(tmp_path / "state")
    assert os.listdir(tmp_path) == []
    assert stream.round == 2


@pytest.mark.parametrize("failure", EARLY_FAILURES, ids=case)
def test_a_round_that_fails_before_any_change_can_be_repeated(failure, monkeypatch, tmp_path):
    stream, _, _ = broken_round(failure, 2, monkeypatch)
    assert stream.round == 2
    wanted = released_rounds(make(failure[2], 3 * CHUNK), np.ones((4, 3 * CHUNK)))
    stream.save(tmp_path / "state")
    assert np.array_equal(released_rounds(stream, np.ones((2, 3 * CHUNK))), wanted[2:])


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_keyboard_interrupt_within_a_round_stops_the_stream(interruption, monkeypatch, tmp_path):
    stream = make(size=2 * CHUNK)
    with monkeypatch.context() as patch:

        def interrupted(*_):
            raise interruption

        patch.setattr(rounds, "blt_step_onto", interrupted)
        with pytest.raises(interruption):
            stream.add_to(np.ones(2 * CHUNK))
    with pytest.raises(InvalidInput, match="interrupted"):
        stream.add_to(np.ones(2 * CHUNK))
    with pytest.raises(InvalidInput, match="interrupted"):
        stream.save(tmp_path / "state")


@KINDS
def test_a_round_on_a_grid_that_fails_shows_no_secret(kind, monkeypatch):
    size, grid = 2 * CHUNK, Grid.for_noise(SIGMA, 1.0)
    twin = make(size=size)
    twin.add_to(np.zeros(size, np.int64), grid)
    stream = make(size=size)
    monkeypatch.setattr(rounds, "blt_step_onto", fails)
    with pytest.raises(Broken) as error:
        stream.add_to(np.zeros(size, np.int64), grid)
    check_hides(shown_by(error.value), secrets_of(twin), kind)


def test_worker_threads_print_nothing(monkeypatch, capfd):
    broken_round((rounds, "blt_step_onto", "blt", 1), 4, monkeypatch)
    assert capfd.readouterr() == ("", "")


# --- Errors of files ---------------------------------------------------------------------------


def saved(tmp_path, name="blt", rounds_made=3):
    stream = make(name)
    released_rounds(stream, np.ones((rounds_made, 300)))
    stream.save(tmp_path / "state")
    secrets = secrets_of(stream)
    return stream, secrets, tmp_path / "state"


REFUSALS = {
    "a round that is too low": {"at_least": 4},
    "another mechanism": {"mechanism": dpftrl.Independent()},
    "another key": {"key": OTHER_KEY},
    "no number": {"at_least": -1},
}


@pytest.mark.parametrize("name", ["blt", "tree", "sqrt"])
@pytest.mark.parametrize("reason", REFUSALS)
@KINDS
def test_a_state_that_is_refused_is_not_shown(reason, name, kind, tmp_path):
    stream, secrets, path = saved(tmp_path, name)
    options = {"mechanism": stream.mechanism, "key": KEY, "at_least": 3, **REFUSALS[reason]}
    with pytest.raises(InvalidInput) as error:
        NoiseStream.load_unchecked(path, **options)
    check_hides(shown_by(error.value), secrets, kind)


@pytest.mark.parametrize("name", ["blt", "tree"])
@KINDS
def test_a_state_that_is_damaged_is_not_shown(name, kind, tmp_path):
    stream, secrets, path = saved(tmp_path, name)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match="was changed") as error:
        NoiseStream.load_unchecked(path, stream.mechanism, key=KEY, at_least=0)
    check_hides(shown_by(error.value), secrets, kind)


@pytest.mark.parametrize("name", ["blt", "tree"])
@pytest.mark.parametrize("call", [(Digest, "finish"), (state_file, "NoiseState")])
@KINDS
def test_loading_that_fails_shows_no_secret(call, name, kind, tmp_path, monkeypatch):
    stream, secrets, path = saved(tmp_path, name)
    monkeypatch.setattr(*call, fails)
    with pytest.raises(Broken) as error:
        NoiseStream.load_unchecked(path, stream.mechanism, key=KEY, at_least=0)
    check_hides(shown_by(error.value), secrets, kind)


@pytest.mark.parametrize("name", ["blt", "tree", "sqrt"])
@KINDS
def test_saving_that_fails_shows_no_secret(name, kind, tmp_path, monkeypatch):
    stream, secrets, path = saved(tmp_path, name)
    with pytest.raises(InvalidInput) as error:
        stream.save(tmp_path / "missing" / "state")
    check_hides(shown_by(error.value), secrets, kind)
    for call in ("dpftrl.noise.state_file._write_tensors", "dpftrl._internal.storage.os.fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(call, fails)
            with pytest.raises(Broken) as error:
                stream.save(path)
        check_hides(shown_by(error.value), secrets, kind)


@pytest.mark.parametrize("wrong", [{"threads": 0}, {"mode": "x"}, {"dtype": "int8"}], ids=str)
def test_a_stream_that_was_refused_can_be_printed(wrong):
    """Half made as it is: whoever shows local variables prints it."""
    with pytest.raises(InvalidInput) as error:
        make(**wrong)
    assert "self = " in shown_by(error.value)


def test_a_key_of_the_wrong_length_is_not_shown():
    """As when somebody pastes hexadecimal, or reads a file with a newline at its end."""
    secret = KEY.secret_bytes()
    for wrong in (secret + b"\n", secret[:-1], secret.hex()):
        with pytest.raises(InvalidInput) as error:
            NoiseKey(wrong)
        shown = shown_by(error.value)
        for spelling in (secret.hex(), repr(secret[:-1])[2:-1]):
            assert spelling not in shown


@pytest.mark.parametrize("call", ["hmac.digest", "dpftrl.noise.key.NoiseKey.__init__"])
def test_deriving_that_fails_shows_no_secret(call, monkeypatch):
    digest = bytes(range(100, 116))
    with monkeypatch.context() as patch:
        patch.setattr(call, fails)
        with pytest.raises(Broken) as error:
            row_key(KEY, 1, Secret(digest))
    secrets = Secrets(spellings(KEY.secret_bytes()), spellings(digest), set())
    check_hides(shown_by(error.value), secrets)


# --- Two at once -------------------------------------------------------------------------------


def test_concurrent_calls_are_serialized_or_refused(monkeypatch):
    """Both may pass all checks before either begins: they must not change the same buffers."""
    stream, inside, most = make(size=1000, threads=1), [], []
    digest_of_update, run_round = stream_module.digest_of_update, stream_module.run_round
    meetings = [threading.Barrier(2, timeout=1) for _ in range(2)]

    def meet(meeting):
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait()

    def digest_and_meet(*arguments):
        digest = digest_of_update(*arguments)
        meet(meetings[0])
        return digest

    def meet_and_run(*arguments):
        inside.append(1)
        meet(meetings[1])
        most.append(len(inside))
        run_round(*arguments)
        inside.pop()

    def attempt(value):
        try:
            stream.add_to(np.full(1000, value))
        except InvalidInput:
            return 0
        return 1

    monkeypatch.setattr(stream_module, "digest_of_update", digest_and_meet)
    monkeypatch.setattr(stream_module, "run_round", meet_and_run)
    with ThreadPoolExecutor(2) as pool:
        rounds_made = sum(pool.map(attempt, (1.0, 2.0)))
    assert max(most) == 1
    assert stream.round == rounds_made
