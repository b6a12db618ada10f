"""The same noise to the last bit: with any threads, after any save; and other noise otherwise."""

import math
import os
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from noise_pieces import (
    KEY,
    ONE_OF_EACH,
    OTHER_KEY,
    check_uncorrelated,
    key_of_row,
    normals_of_key,
    released_rounds,
)

import dpftrl
from conformance import EVERY, Family, draw_case
from dpftrl._internal.compiled import TILE
from dpftrl.noise import Grid, NoiseKey, NoiseStream
from dpftrl.noise import round_noise as rounds
from dpftrl.noise.normals import TILE_BLOCKS
from dpftrl.noise.round_noise import CHUNK, BltRound, Buffer, Target, run_round

every = pytest.mark.parametrize("family", EVERY, ids=str)
each = pytest.mark.parametrize("name", ONE_OF_EACH)
SIZES = [1, 2, 3, 511, 512, 513, 1023, 1024, 1025, 2047, 2048, 2049]
SIZES += [CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5]
GRID = Grid.for_noise(2.0, 1.0)


@pytest.fixture(autouse=True)
def _even_little_work_is_shared(monkeypatch):
    """However few the chunks, every thread gets some."""
    monkeypatch.setattr(rounds, "SMALL_SHARE", 1)


def make(mechanism, size: int, **options) -> NoiseStream:
    return NoiseStream.unchecked(
        mechanism, size, **{"clip_norm": 1.0, "noise_multiplier": 2.0, "key": KEY, **options}
    )


def updates_of(rows: int, size: int, dtype="float32", seed: int = 0) -> np.ndarray:
    values = 1000 * np.random.default_rng(seed).standard_normal((rows, size))
    return values.astype(dtype)


def again(stream: NoiseStream) -> NoiseStream:
    """The stream as it stands, restored from a copy of its state."""
    with tempfile.TemporaryDirectory() as folder:
        stream.save(f"{folder}/state")
        return NoiseStream.load_unchecked(f"{folder}/state", stream.mechanism, key=KEY, at_least=0)


# --- Threads and chunks ------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ["blt-b400", "tree", "banded-mixed-sign"])
def test_the_number_of_threads_does_not_change_the_noise(name, size):
    updates = updates_of(3, size)
    made = [
        released_rounds(make(ONE_OF_EACH[name], size, threads=threads), updates)
        for threads in (1, 2, 4, 7)
    ]
    for other in made[1:]:
        assert np.array_equal(other, made[0])
    assert not np.array_equal(made[0], updates)


@pytest.mark.parametrize("mode", ["buffered", "regenerating"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["float32", "float64", "int64"])
def test_threads_do_not_change_the_noise_for_any_type_of_sum_and_buffer(kind, dtype, mode):
    size, grid = 3 * CHUNK + 5, GRID if kind == "int64" else None
    made = []
    for threads in (1, 3):
        stream = make(ONE_OF_EACH["sqrt"], size, threads=threads, dtype=dtype, mode=mode)
        rows = updates_of(3, size, kind)
        for row in rows:
            stream.add_to(row, grid)
        made.append(rows)
    assert np.array_equal(*made)


@each
def test_the_division_of_the_work_does_not_change_the_noise(name, monkeypatch):
    size = 5 * TILE + 77
    updates = updates_of(4, size)
    wanted = released_rounds(make(ONE_OF_EACH[name], size), updates)
    for tiles in (1, 3, 5, 6, 64):
        monkeypatch.setattr(rounds, "CHUNK_TILES", tiles)
        monkeypatch.setattr(rounds, "CHUNK", tiles * TILE)
        monkeypatch.setattr(rounds, "CHUNK_BLOCKS", tiles * TILE_BLOCKS)
        monkeypatch.setattr(rounds, "ZEROS", bytes(tiles * TILE_BLOCKS * 16))
        found = released_rounds(make(ONE_OF_EACH[name], size, threads=3), updates)
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("size", SIZES)
def test_every_coordinate_has_noise_of_its_own(size):
    """The rows of Z are read at the right place, from the first coordinate to the last."""
    for name in ("blt", "band-sqrt"):
        stream, update = make(ONE_OF_EACH[name], size, dtype="float64"), np.zeros(size)
        stream.add_to(update)
        wanted = 2.0 * normals_of_key(key_of_row(stream, 0), size)
        # An own diagonal of 1: the first round is the first row of Z.
        np.testing.assert_allclose(update, wanted, rtol=1e-14)
        assert len(set(update.tolist())) == size


def test_the_default_number_of_threads_does_not_change_the_noise(monkeypatch):
    """As many chunks as it takes for several threads, and several pieces of a digest."""
    monkeypatch.undo()
    size = 3 * rounds.SMALL_SHARE * CHUNK + 12_345
    made = []
    for threads in (1, 2, 3):
        update = {"a": np.ones(size - 5, np.float32), "b": [np.ones(4), np.ones(1, np.float32)]}
        make(ONE_OF_EACH["blt"], size, threads=threads).add_to(update)
        made.append(np.concatenate([update["a"], *update["b"]]))
    assert np.array_equal(made[0], made[1])
    assert np.array_equal(made[0], made[2])


def test_another_process_makes_the_same_noise():
    """Hash seeds, memory addresses and the order of imports have no part in it."""
    script = (
        "import hashlib, numpy as np, dpftrl\n"
        "from dpftrl.noise import NoiseKey, NoiseStream\n"
        "stream = NoiseStream.unchecked(dpftrl.BinaryTree(), 20_000, clip_norm=1.0,\n"
        "                     noise_multiplier=2.0, threads=1,\n"
        "                     key=NoiseKey.insecure_for_tests(20))\n"
        "update = {'b': np.ones(19_000), 'a': np.ones((10, 100), np.float32)}\n"
        "for _ in range(3): stream.add_to(update)\n"
        "print(hashlib.sha256(update['a'].tobytes() + update['b'].tobytes()).hexdigest())\n"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(made) == 1


# --- Saving ------------------------------------------------------------------------------------


@every
@settings(max_examples=3)
@given(data=st.data(), mode=st.sampled_from(["buffered", "regenerating"]))
def test_a_stream_can_be_resumed_from_any_round(family: Family, data, mode, tmp_path_factory):
    mechanism, last = draw_case(data, family, 12)
    dtype = data.draw(st.sampled_from(["float32", "float64"]))
    assume(np.abs(mechanism.decoder(last)).max() < 1e6)
    updates, path = updates_of(last, 2100), tmp_path_factory.mktemp("a") / "state"
    wanted = released_rounds(make(mechanism, 2100, mode=mode, dtype=dtype), updates)
    whole = make(mechanism, 2100, mode=mode, dtype=dtype)
    for done, update in enumerate(updates):
        whole.save(path)
        whole = NoiseStream.load_unchecked(
            path, mechanism, key=KEY, at_least=done, threads=done % 3 + 1
        )
        assert (whole.round, whole.mode) == (done, mode)
        whole.add_to(update)
    assert np.array_equal(updates, wanted)


def test_saving_does_not_change_the_stream(tmp_path):
    updates = updates_of(6, 300)
    wanted = released_rounds(make(ONE_OF_EACH["tree"], 300), updates)
    stream = make(ONE_OF_EACH["tree"], 300)
    for update in updates:
        stream.add_to(update)
        stream.save(tmp_path / "a")
    assert np.array_equal(updates, wanted)


def test_a_loaded_stream_shares_nothing_with_the_file_or_another(tmp_path):
    stream = make(ONE_OF_EACH["blt"], 300)
    stream.add_to(np.zeros(300))
    stream.save(tmp_path / "a")
    before = (tmp_path / "a").read_bytes()
    one, other = (
        NoiseStream.load_unchecked(tmp_path / "a", stream.mechanism, key=KEY, at_least=1)
        for _ in range(2)
    )
    released_rounds(one, updates_of(3, 300))
    assert (tmp_path / "a").read_bytes() == before
    updates = updates_of(3, 300)
    assert np.array_equal(released_rounds(other, updates), released_rounds(stream, updates))


@pytest.mark.parametrize("mode", ["buffered", "regenerating"])
def test_arguments_of_any_number_type_give_the_same_stream(mode, tmp_path):
    """A size that came from an array must not make another stream of what is saved and loaded."""
    updates = updates_of(4, 300)
    plain = NoiseStream.unchecked(
        ONE_OF_EACH["tree"], 300, noise_multiplier=2.0, clip_norm=1.0, key=KEY, mode=mode
    )
    wanted = released_rounds(plain, updates)
    numpy = NoiseStream.unchecked(
        ONE_OF_EACH["tree"],
        np.int64(300),
        noise_multiplier=np.float32(2),
        clip_norm=1,
        key=KEY,
        mode=mode,
        dtype=np.dtype("float64"),
        threads=np.int8(2),
    )
    start = released_rounds(numpy, updates[:2])
    numpy.save(tmp_path / "state")
    back = NoiseStream.load_unchecked(
        tmp_path / "state", numpy.mechanism, key=KEY, at_least=np.int64(2)
    )
    rest = released_rounds(back, updates[2:])
    assert np.array_equal(np.concatenate([start, rest]), wanted)


# --- Regenerating ------------------------------------------------------------------------------


@every
@settings(max_examples=3)
@given(data=st.data())
def test_regenerated_noise_is_that_of_buffers(family: Family, data):
    mechanism, last = draw_case(data, family, 14)
    growth = np.abs(mechanism.decoder(last)).sum(axis=1).max()
    assume(growth < 1e3)
    updates = np.zeros((last, 2100))
    buffered, regenerated = (
        released_rounds(make(mechanism, 2100, mode=mode, dtype="float64"), updates)
        for mode in ("buffered", "regenerating")
    )
    assert np.abs(buffered - regenerated).max() <= 1e-12 * (1 + growth)


# --- Rolling back ------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("mode", ["buffered", "regenerating"])
def test_the_same_sum_again_gets_the_same_noise(name, mode):
    stream = make(ONE_OF_EACH[name], 2100, mode=mode)
    updates = updates_of(5, 2100)
    released_rounds(stream, updates[:3])
    copied = again(stream)
    wanted = released_rounds(stream, updates[3:])
    assert np.array_equal(released_rounds(copied, updates[3:]), wanted)


@each
@pytest.mark.parametrize("mode", ["buffered", "regenerating"])
def test_another_sum_gets_other_noise(name, mode):
    """Even if it is another in the last bit of one coordinate."""
    size = 40_000
    stream = make(ONE_OF_EACH[name], size, mode=mode, dtype="float64")
    updates = updates_of(4, size, "float64")
    released_rounds(stream, updates[:3])
    copied = again(stream)
    other = updates[3:].copy()
    other[0, 777] = np.nextafter(other[0, 777], np.inf)
    one, two = released_rounds(stream, updates[3:])[0], released_rounds(copied, other)[0]
    fresh = stream._state.next_row - 1
    z = [normals_of_key(key_of_row(s, fresh), size) for s in (stream, copied)]
    check_uncorrelated(*z)
    # What both have in common are the rows from before; what they do not have is as large as new.
    assert np.std(one - two) > 0.5
    changed = np.flatnonzero(one == two)
    assert len(changed) < 5


def test_noise_that_does_not_depend_on_the_sum_is_noticed():
    z = normals_of_key(KEY, 40_000)
    with pytest.raises(AssertionError):
        check_uncorrelated(z, z)
    with pytest.raises(AssertionError):
        check_uncorrelated(z, -z)
    with pytest.raises(AssertionError):
        check_uncorrelated(z, 0.05 * z + normals_of_key(OTHER_KEY, 40_000))


def rows_that_cover_two_sums(mechanism, updates, keys) -> list[int]:
    """Rows of Z with one key in two runs, though C times the sums is not the same there."""
    covered = [mechanism.strategy(len(sums)) @ sums for sums in updates]
    differ = np.abs(covered[0] - covered[1]).max(axis=1) > 1e-9
    return [row for row in np.flatnonzero(differ).tolist() if keys[0][row] == keys[1][row]]


def two_branches(mechanism, size: int, parted: int = 3):
    """Eight rounds, and those from some round on again, with one client more in the first."""
    updates = np.stack([updates_of(8, size, "float64") / 1000] * 2)
    updates[1, parted] += np.random.default_rng(1).standard_normal(size)
    first = make(mechanism, size, dtype="float64")
    start = released_rounds(first, updates[0, :parted])
    second = again(first)
    released = [
        np.concatenate([start, released_rounds(stream, sums[parted:])])
        for stream, sums in zip((first, second), updates, strict=True)
    ]
    rows = range(first._state.next_row)
    keys = [[key_of_row(stream, row).secret_bytes() for row in rows] for stream in (first, second)]
    return updates, released, keys


@each
def test_no_row_of_noise_covers_two_sums_after_a_state_was_rolled_back(name):
    """One round is made again with one client more, and later rounds as they were.

    Rows of C reach back: what a later row of Z covers has changed too, though the sum of its own
    round has not.
    """
    for parted in range(8):
        updates, _, keys = two_branches(ONE_OF_EACH[name], 100, parted)
        assert rows_that_cover_two_sums(ONE_OF_EACH[name], updates, keys) == []
        # While rows from before the two parted are the same.
        assert (keys[0][0] == keys[1][0]) == (parted > 0)


def test_a_row_that_covers_two_sums_is_noticed():
    """The same check, on keys that depend on the row alone."""
    updates, _, keys = two_branches(ONE_OF_EACH["tree"], 100)
    found = rows_that_cover_two_sums(ONE_OF_EACH["tree"], updates, [keys[0], keys[0]])
    # The fourth round's leaf, and the three blocks that hold it.
    assert len(found) == 4


@pytest.mark.parametrize("name", ["blt", "blt-b400", "sqrt", "banded-normalised", "tree-full"])
def test_what_one_client_sent_is_not_the_difference_of_two_releases(name):
    """What follows from sharing a row: C times the difference of two releases would be bare.

    C times a release is C times the sums, plus Z; anybody knows C.
    """
    mechanism = ONE_OF_EACH[name]
    updates, released, _ = two_branches(mechanism, 2000)
    off = mechanism.strategy(8) @ ((released[0] - released[1]) - (updates[0] - updates[1]))
    # Two independent rows, times sigma.
    np.testing.assert_allclose(np.std(off[3:], axis=1), 2.0 * math.sqrt(2), rtol=0.15)


def test_repeating_counts_without_a_client_does_not_reveal_the_client():
    """The same mistake as a user would make it: counts, which no model feeds back into."""
    tree, size = dpftrl.BinaryTree(refine=False), 50
    with_client = np.random.default_rng(0).integers(0, 9, (4, size)).astype(np.int64)
    without = with_client.copy()
    without[1, 7] -= 1
    grid = Grid(1.0, 1.0)
    releases = []
    for counts in (with_client, without):
        stream = make(tree, size, noise_multiplier=100.0)
        made = counts.copy()
        for row in made:
            stream.add_to(row, grid)
        releases.append(made)
    difference = (releases[0] - releases[1]).sum(axis=0)
    # Noise of 100 on each: what is left is not the client's 1, give or take some rounding.
    assert np.std(difference) > 50


# --- Unlike streams ----------------------------------------------------------------------------


def first_rows(*, mechanism="blt", size=600, kind="float64", grid=None, cut=None, **options):
    stream = make(ONE_OF_EACH[mechanism], size, **options)
    update = np.zeros(size, kind)
    stream.add_to(update if cut is None else [update[:cut], update[cut:]], grid)
    return key_of_row(stream, 0).secret_bytes()


UNLIKE = {
    "another key": {"key": OTHER_KEY},
    "another mechanism": {"mechanism": "tree"},
    "another theta": {"mechanism": "blt-above-one"},
    "another sigma": {"noise_multiplier": np.nextafter(2.0, 3.0)},
    "another clip norm": {"clip_norm": np.nextafter(1.0, 2.0)},
    "sigma and clip norm that multiply to the same": {"noise_multiplier": 1.0, "clip_norm": 2.0},
    "another size": {"size": 601},
    "sums of float32": {"kind": "float32"},
    "sums on a grid": {"kind": "int64", "grid": GRID},
    "sums on a finer grid": {"kind": "int64", "grid": Grid(GRID.step / 2, 1.0)},
    "another division into arrays": {"cut": 300},
    "buffers of another precision": {"dtype": "float32"},
}


@pytest.mark.parametrize("difference", UNLIKE)
def test_streams_that_differ_in_one_argument_share_no_row(difference):
    """Even for the same sum: from x + a z and x + b z, x is easy to find."""
    assert first_rows() == first_rows()
    assert first_rows(**UNLIKE[difference]) != first_rows()


def test_no_two_unlike_streams_share_a_row():
    made = [first_rows(**options) for options in UNLIKE.values() if "dtype" not in options]
    assert len(set(made)) == len(made)


def test_two_noise_multipliers_for_the_same_sum_do_not_reveal_it():
    secret = updates_of(1, 50_000, "float64")[0] / 1000
    released = []
    for noise_multiplier in (1.0, 2.0):
        update = secret.copy()
        make(dpftrl.Independent(), 50_000, noise_multiplier=noise_multiplier).add_to(update)
        released.append(update)
    solved = 2 * released[0] - released[1]
    assert np.std(solved - secret) == pytest.approx(math.sqrt(8), rel=0.02)


def test_mechanisms_that_begin_alike_share_no_row():
    """A matrix for more rounds has the smaller one inside."""
    keys = set()
    for mechanism in (
        dpftrl.FullTree(8),
        dpftrl.FullTree(9),
        dpftrl.Banded.square_root(2, 8),
        dpftrl.Banded.square_root(2, 9),
        dpftrl.SquareRoot(3),
        dpftrl.SquareRoot(4),
        dpftrl.SquareRoot(),
        dpftrl.Toeplitz([1.0]),
        dpftrl.Toeplitz([1.0, 0.0]),
        dpftrl.Independent(),
        dpftrl.BinaryTree(),
        dpftrl.BinaryTree(refine=False),
        dpftrl.BLT([0.5], [0.0]),
        dpftrl.BLT([0.5], [1e-300]),
    ):
        stream = make(mechanism, 10)
        stream.add_to(np.zeros(10))
        keys.add(key_of_row(stream, 0).secret_bytes())
    assert len(keys) == 14


@pytest.mark.parametrize("kind", ["float32", "float64", "int64"])
def test_where_arrays_end_makes_no_difference_to_the_bits(kind):
    """Added tile by tile where one array has a whole chunk, and after the chunk where not."""
    sizes = [CHUNK - 1, 1, 0, CHUNK, 5, 2 * CHUNK + 3, 0, CHUNK - 8, TILE, 7]
    size, row = sum(sizes), NoiseKey.generate()

    def added(parts):
        buffers = [Buffer(np.zeros(size, np.float32)) for _ in range(3)]
        made = BltRound(row, np.array([0.9, 0.5, 0.2]), np.full(3, 0.1), buffers, size)
        run_round(made, Target(list(map(memoryview, parts)), 1000.0), size, 2)
        return np.concatenate(parts)

    start = np.arange(size).astype(kind)
    in_parts = added(np.split(start.copy(), np.cumsum(sizes)[:-1]))
    assert np.array_equal(in_parts, added([start.copy()]))
    assert not np.array_equal(in_parts, start)
