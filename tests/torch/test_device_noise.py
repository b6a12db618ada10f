"""Correlated noise in tensor operations of PyTorch, on its CPU backend."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from device_pieces import (
    ROUNDS,
    SUPPORTED,
    DevicePlan,
    check_keystream,
    check_many_normals,
    check_normals,
    check_rounds,
    float64_normals,
    keystream,
    random_words,
    sampled_plan,
)
from noise_pieces import KEY, OTHER_KEY

import dpftrl
from dpftrl.errors import InvalidInput, RoundsExceeded
from dpftrl.noise import Grid
from dpftrl.noise.device import ARITHMETIC, FLOAT64, SPLIT, Split, chacha20, split_normals
from dpftrl.noise.key import Secret, row_key
from dpftrl.plan.device import noise_multiplier_on_device
from dpftrl.torch import device_noise
from dpftrl.torch.device_noise import OPS, DeviceNoise

CLIP, SIZE = 0.5, 1003
GRID = Grid.for_noise(2.0, CLIP)
each = pytest.mark.parametrize("arithmetic", ["float64", "split"])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(device_noise, "CHUNK", 512)


def words_of(tensor):
    return tensor.numpy().view(np.uint32)


def tensors(words):
    return [torch.from_numpy(row.copy().view(np.int32)) for row in np.atleast_1d(words)]


def make(name="blt-3", arithmetic=None, size=SIZE, **options):
    known = {"key": KEY, "clip_norm": CLIP, "arithmetic": arithmetic}
    return DeviceNoise(DevicePlan(SUPPORTED[name]), size, **{**known, **options})


def sums(rounds=ROUNDS, size=SIZE):
    rng = np.random.default_rng(4)
    return torch.from_numpy(rng.integers(-1000, 1000, (rounds, size)))


def run(noise, totals):
    """What the noise adds to each sum."""
    added = []
    for total in totals:
        given = total.clone()
        noise.add_to(given, GRID, updates=100)
        added.append((given - total).numpy())
    return added


def rows_of(noise, digests, size=SIZE, first_block=0):
    """The rows of Z, by the ChaCha20 of `cryptography` and NumPy."""
    rows = []
    for row, digest in enumerate(digests):
        key = row_key(noise._row_keys, row, digest).secret_bytes()
        blocks = np.arange(first_block, first_block + -(-size // 8))
        rows.append(float64_normals(keystream(key, blocks)).T.reshape(-1)[:size])
    return rows


def run_and_rows(noise, totals, **options):
    added, digests = [], []
    for total in totals:
        added += run(noise, [total])
        digests.append(noise.last_digest())
    return added, rows_of(noise, digests, len(totals[0]), **options)


def scale_of(noise):
    return noise.noise_multiplier * CLIP / GRID.step


# --- Parts ----------------------------------------------------------------------------------------


def test_the_keystream_is_chacha20():
    def blocks_of(key, counters, nonce):
        (counter,) = tensors(counters[None])
        blocks = chacha20(
            OPS, [t[()] for t in tensors(key[:, None])], counter, tensors(nonce[:, None])
        )
        return np.stack([words_of(word) for word in blocks])

    check_keystream(blocks_of)


def split_normals_of(words):
    return Split(*(part.numpy() for part in split_normals(OPS, tensors(words))))


def float64_normals_of(words):
    return device_noise.float64_normals(tensors(words)).numpy()


@pytest.mark.parametrize(
    ("normals_of", "kind"), [(split_normals_of, SPLIT), (float64_normals_of, FLOAT64)]
)
def test_normals_are_within_the_claimed_bound_and_look_like_normals(normals_of, kind):
    check_normals(normals_of, kind)
    words = random_words(25_000, seed=2)
    check_many_normals(normals_of(words), words, kind)


# --- Streams --------------------------------------------------------------------------------------


@each
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_stream_is_the_reference_of_the_mechanism_on_the_same_keystream(name, arithmetic):
    noise = make(name, arithmetic)
    added, rows = run_and_rows(noise, sums())
    check_rounds(added, rows, SUPPORTED[name], scale_of(noise), ARITHMETIC[arithmetic])
    assert noise.round == ROUNDS
    words = 8 * SIZE  # one float64, or two float32
    assert noise.memory_bytes == words * SUPPORTED[name].memory(ROUNDS)


@each
@pytest.mark.parametrize("size", [1, 7, 8, 9, 511, 512, 513])
def test_sizes_around_blocks_and_chunks(size, arithmetic):
    noise = make("blt-1", arithmetic, size)
    added, rows = run_and_rows(noise, sums(2, size))
    check_rounds(added, rows, SUPPORTED["blt-1"], scale_of(noise), ARITHMETIC[arithmetic])


def test_a_wrong_counter_decay_or_scale_is_noticed():
    wrong = dpftrl.BLT([0.9, 0.5, 0.98], [0.2, 0.3, 0.1])
    noise = make()
    added, rows = run_and_rows(noise, sums())
    check_rounds(added, rows, SUPPORTED["blt-3"], scale_of(noise), SPLIT)
    with pytest.raises(AssertionError):
        check_rounds(added, rows, wrong, scale_of(noise), SPLIT)
    with pytest.raises(AssertionError):
        check_rounds(added, rows, SUPPORTED["blt-3"], scale_of(noise) / 2, SPLIT)
    noise = make()
    added, rows = run_and_rows(noise, sums(), first_block=1)
    with pytest.raises(AssertionError):
        check_rounds(added, rows, SUPPORTED["blt-3"], scale_of(noise), SPLIT)


@each
def test_the_noise_multiplier_is_that_of_the_guarantee(arithmetic, monkeypatch):
    monkeypatch.setattr(device_noise, "CHUNK", 2**18)
    noise = make(arithmetic=arithmetic)
    plan = DevicePlan(SUPPORTED["blt-3"])
    assert noise.noise_multiplier == noise_multiplier_on_device(plan, SIZE, arithmetic)
    assert noise.noise_multiplier > plan.noise_multiplier
    z = run(make("independent", arithmetic, 20_000), sums(1, 20_000))[0] / scale_of(noise)
    assert z.std() == pytest.approx(1.0, abs=0.03)


@each
def test_the_same_sums_get_the_same_bits_and_another_sum_gets_other_noise(arithmetic):
    totals = sums(4)
    first, again = (run(make(arithmetic=arithmetic), totals) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    changed = totals.clone()
    changed[2, -1] += 1
    other = run(make(arithmetic=arithmetic), changed)
    np.testing.assert_array_equal(first[:2], other[:2])
    # The round of the other sum, and all later ones although their sums are the same.
    for one, another in zip(first[2:], other[2:], strict=True):
        assert (one == another).mean() < 0.01


@each
def test_low_bits_of_fine_grids_are_rounded_away(arithmetic):
    """On a grid that is 64 times finer, the noisy sum is a multiple of 64 steps."""
    fine, noise = Grid.for_noise(2.0, CLIP, 2**30), make("independent", arithmetic)
    total = sums(1)[0]
    given = total.clone()
    noise.add_to(given, fine, updates=100)
    assert (given % 64 == 0).all()
    assert (total % 64 != 0).any()
    (row,) = rows_of(noise, [noise.last_digest()])
    wanted = noise.noise_multiplier * CLIP / fine.step * row + total.numpy()
    assert np.abs(given.numpy() - wanted).max() <= 32 + 1


def test_streams_share_no_noise():
    """Another key, clip norm, size, plan or arithmetic has other rows, for the same sum."""
    zeros = torch.zeros(1, SIZE, dtype=torch.int64)
    wide = torch.zeros(1, SIZE + 1, dtype=torch.int64)
    known = [run(make("independent", "float64"), zeros)[0] / scale_of(make())]
    for noise, total in (
        (make("independent", "split"), zeros),
        (make("independent", "float64", key=OTHER_KEY), zeros),
        (make("blt-1", "float64"), zeros),
        (make("independent", "float64", SIZE + 1), wide),
        (_other_rounds(), zeros),
    ):
        z = run(noise, total)[0][:SIZE] / scale_of(noise)
        assert all(abs(np.corrcoef(z, one)[0, 1]) < 0.2 for one in known)
        known.append(z)


def _other_rounds():
    plan = DevicePlan(SUPPORTED["independent"], participation=dpftrl.MinSep.once(ROUNDS + 1))
    return DeviceNoise(plan, SIZE, key=KEY, clip_norm=CLIP, arithmetic="float64")


@each
def test_replayed_rounds_leave_the_same_buffers(arithmetic):
    totals = sums(4)
    noise, again = make(arithmetic=arithmetic), make(arithmetic=arithmetic)
    for total in totals[:2]:
        run(noise, [total])
        again.replay(noise.last_digest())
    np.testing.assert_array_equal(run(noise, totals[2:]), run(again, totals[2:]))


# --- Refusals -------------------------------------------------------------------------------------


def refused(match):
    return pytest.raises(InvalidInput, match=match)


def test_wrong_arguments_are_refused():
    with refused("got bytes"):
        make(key=b"secret")
    with refused("float64 or split, got 'float32'"):
        make(arithmetic="float32")
    with refused("clip_norm"):
        make(clip_norm=0.0)
    with refused("mps has no float64"):
        make(arithmetic="float64", device="mps")
    with refused("more than the 2\\^40"):
        make(size=2**40)
    with refused("counts up to 2\\^32"):
        make(size=2**36)


@pytest.mark.parametrize(
    "mechanism", [dpftrl.BinaryTree(), dpftrl.SquareRoot(), dpftrl.Banded.square_root(3, ROUNDS)]
)
def test_other_mechanisms_are_refused_by_name(mechanism):
    with refused(f"BLTs and independent noise, not {mechanism.name}"):
        DeviceNoise(DevicePlan(mechanism), SIZE, key=KEY, clip_norm=CLIP)


def test_a_plan_for_sampled_batches_is_refused():
    with refused("does not cover the rounding of noise on a device"):
        DeviceNoise(sampled_plan(), SIZE, key=KEY, clip_norm=CLIP)


def test_wrong_sums_are_refused_and_change_nothing():
    noise, total = make(), sums(1)[0]
    before = total.clone()
    with refused("int64"):
        noise.add_to(total.to(torch.float32), GRID, updates=100)
    with refused("int64"):
        noise.add_to(total[1:], GRID, updates=100)
    with refused("the grid clips to 0.6"):
        noise.add_to(total, Grid.for_noise(2.0, 0.6), updates=100)
    with refused("at most 2\\^36"):
        noise.add_to(total, replace(GRID, step=GRID.step * 2.0**-20), updates=100)
    with refused("too large for 0 updates"):
        noise.add_to(total, GRID, updates=0)
    with refused("16 bytes"):
        noise.replay(Secret(b"short"))
    assert torch.equal(total, before)
    assert noise.round == 0
    np.testing.assert_array_equal(run(noise, [total]), run(make(), [total]))


def test_a_round_after_the_last_is_refused():
    noise = make("independent")
    run(noise, sums())
    with pytest.raises(RoundsExceeded, match="all 6 rounds"):
        run(noise, sums(1))


def test_an_interrupted_stream_is_refused(monkeypatch):
    noise = make()
    run(noise, sums(1))
    chunk, calls = noise._chunk, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return chunk(*arguments)

    monkeypatch.setattr(noise, "_chunk", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(noise, sums(1))
    with refused("interrupted within a round"):
        run(noise, sums(1))


def test_the_noise_is_secret():
    noise = make()
    run(noise, sums(1))
    assert repr(noise) == "DeviceNoise(blt, 1,003, cpu, secret)"
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            copied(noise)
