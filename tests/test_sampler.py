"""Secret batches: bit by bit against a sampler written by hand, and against their distributions.

Every statistical test has fixed keys, so it always gives the same result, and a negative control:
the sampler with one deliberate mistake must fail the same statistic.
"""

import base64
import copy
import hmac
import itertools
import json
import math
import pickle
import sys
import traceback
import tracemalloc
from collections import Counter
from fractions import Fraction
from hashlib import sha256

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import special

from dpftrl import sampler as sampler_module
from dpftrl.errors import InvalidInput, TooLarge
from dpftrl.noise import NoiseKey
from dpftrl.noise.key import Secret, row_key
from dpftrl.participation import BallsInBins, CyclicPoisson, Poisson, Sampling
from dpftrl.sampler import Sampler, draw_below, shuffle_step, sort_by_label

KEY = NoiseKey.insecure_for_tests(1)
SMALLEST_P_VALUE = 1e-4

# All schemes, with and without a limit; the limit is below most batches before they are cut.
SCHEMES: dict[str, Sampling] = {
    "poisson": Poisson(60, 15, 40),
    "poisson-cut": Poisson(60, 15, 40, max_batch_size=15),
    "cyclic-poisson": CyclicPoisson(61, 7, 40, groups=5),
    "cyclic-poisson-cut": CyclicPoisson(61, 7, 40, groups=5, max_batch_size=7),
    "balls-in-bins": BallsInBins(60, 7, 40),
    "balls-in-bins-cut": BallsInBins(60, 7, 40, max_batch_size=7),
}
EVERY_SCHEME = pytest.mark.parametrize("sampling", SCHEMES.values(), ids=SCHEMES)


def batches(sampling: Sampling, key: NoiseKey = KEY) -> list[list[int]]:
    sampler = Sampler(sampling, key)
    return [sampler.batch(step).tolist() for step in range(sampling.steps)]


# --- The same batches, by hand -----------------------------------------------------------------


def derived(key: bytes, *parts: bytes) -> bytes:
    """HMAC of purpose, public part and no secret part, each after its length."""
    parts = (*parts, b"", b"")[:3]
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, message, "sha256")


def words_of(key: bytes):
    """The random words of a key, one at a time."""
    encrypt = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    for block in itertools.count():
        encrypted = encrypt.update(block.to_bytes(16, "big"))
        yield int.from_bytes(encrypted[:8], "little")
        yield int.from_bytes(encrypted[8:], "little")


def below(bound: int, words) -> int:
    return next(word % bound for word in words if word < 2**64 // bound * bound)


def shuffled(labels: list[int], key: bytes) -> list[int]:
    words = words_of(key)
    for last in range(len(labels) - 1, 0, -1):
        place = below(last + 1, words)
        labels[last], labels[place] = labels[place], labels[last]
    return labels


def batch_by_hand(sampling: Sampling, key: NoiseKey, step: int) -> list[int]:
    size, groups = sampling.dataset_size, getattr(sampling, "groups", 1)
    numbers = [("batch_size", sampling.batch_size), ("dataset_size", size)]
    if isinstance(sampling, CyclicPoisson):
        numbers.append(("groups", groups))
    numbers.append(("max_batch_size", sampling.max_batch_size))
    own = derived(key.secret_bytes(), b"batches", repr((sampling.name, numbers)).encode())
    number = step.to_bytes(8, "big")
    if isinstance(sampling, BallsInBins):
        words = words_of(derived(own, b"split"))
        batch = [i for i in range(size) if below(sampling.bins, words) == step % sampling.bins]
    else:
        labels = [i % groups for i in range(size)]
        if groups > 1:
            labels = shuffled(labels, derived(own, b"split"))
        part = [i for i in range(size) if labels[i] == step % groups]
        threshold = math.floor(Fraction(sampling.batch_size * groups, size) * 2**64)
        words = words_of(derived(own, b"step", number))
        batch = [i for i, word in zip(part, words, strict=False) if word < threshold]
    most = sampling.max_batch_size
    if most is not None and len(batch) > most:
        kept = [1] * most + [0] * (len(batch) - most)
        kept = shuffled(kept, derived(own, b"truncation", number))
        batch = list(itertools.compress(batch, kept))
    return batch


@EVERY_SCHEME
@pytest.mark.parametrize("chunk", [1, 7, 2**16])
def test_batches_are_those_drawn_by_hand(sampling, chunk, monkeypatch):
    monkeypatch.setattr(sampler_module, "CHUNK", chunk)
    by_hand = [batch_by_hand(sampling, KEY, step) for step in range(sampling.steps)]
    assert batches(sampling) == by_hand
    if sampling.max_batch_size is not None:
        assert any(len(batch) == sampling.max_batch_size for batch in by_hand)


def test_batches_of_more_than_one_chunk_are_those_drawn_by_hand():
    for sampling in (Poisson(70_000, 300, 2), BallsInBins(70_000, 700, 2)):
        assert batches(sampling) == [batch_by_hand(sampling, KEY, step) for step in range(2)]


def test_batches_do_not_change_between_versions():
    """A run that is resumed after an upgrade continues with the batches of its plan."""
    digests = {
        name: sha256(json.dumps(batches(sampling)).encode()).hexdigest()[:16]
        for name, sampling in SCHEMES.items()
    }
    assert digests == {
        "poisson": "2a8076883735f01f",
        "poisson-cut": "c58bbdee4194f86e",
        "cyclic-poisson": "3cdc8557eb63dde1",
        "cyclic-poisson-cut": "d54ab2847258ede2",
        "balls-in-bins": "61e389e29cea3dca",
        "balls-in-bins-cut": "b366d5bf83d56575",
    }


# --- What a batch depends on -------------------------------------------------------------------


@EVERY_SCHEME
def test_batches_are_sorted_indices_without_repetition(sampling):
    sampler = Sampler(sampling, KEY)
    for step in range(sampling.steps):
        batch = sampler.batch(step)
        assert batch.dtype == np.int64
        assert batch.ndim == 1
        assert np.all(np.diff(batch) > 0)
        assert np.all((batch >= 0) & (batch < sampling.dataset_size))


@EVERY_SCHEME
def test_batches_are_the_same_in_any_order_of_steps_and_after_a_restart(sampling):
    planned = batches(sampling)
    order = np.random.default_rng(0).permutation(sampling.steps)
    sampler = Sampler(sampling, KEY)
    for step in [*order, *order]:
        assert sampler.batch(step).tolist() == planned[step]
    for step in order[:5]:
        assert Sampler(sampling, KEY).batch(step).tolist() == planned[step]


@EVERY_SCHEME
def test_the_number_of_steps_does_not_change_the_batches(sampling):
    planned = batches(sampling)
    assert batches(sampling.after(3 * sampling.steps))[: sampling.steps] == planned
    assert batches(sampling.after(3)) == planned[:3]


@EVERY_SCHEME
def test_changing_a_returned_batch_does_not_change_later_ones(sampling):
    sampler = Sampler(sampling, KEY)
    first = sampler.batch(0)
    kept = first.copy()
    first[:] = 0
    assert np.array_equal(sampler.batch(0), kept)


def test_batches_depend_on_the_key_the_step_and_every_number_of_the_sampling():
    samplings = [
        *SCHEMES.values(),
        Poisson(60, 15, 40, max_batch_size=60),  # too high to cut anything
        Poisson(60, 16, 40),
        Poisson(61, 15, 40),
        CyclicPoisson(60, 15, 40, groups=1),
        CyclicPoisson(61, 7, 40, groups=4),
        BallsInBins(60, 8, 40),
    ]
    drawn = [
        str(batches(sampling, NoiseKey.insecure_for_tests(seed)))
        for seed in range(3)
        for sampling in samplings
    ]
    assert len(set(drawn)) == 3 * len(samplings)
    for sampling in (SCHEMES["poisson"], SCHEMES["cyclic-poisson"]):
        assert len(set(map(str, batches(sampling)))) == sampling.steps
    bins = SCHEMES["balls-in-bins"]
    assert len(set(map(str, batches(bins)))) == bins.bins


def test_sampling_and_noise_of_one_key_share_no_random_bits():
    """Neither keys nor blocks of keystream of the sampler occur among those of the noise."""
    sampler = Sampler(SCHEMES["cyclic-poisson-cut"], KEY)
    steps = [step.to_bytes(8, "big") for step in range(40)]
    of_batches = [sampler._key, sampler._key.derive(b"split")]
    of_batches += [sampler._key.derive(b"step", step) for step in steps]
    of_batches += [sampler._key.derive(b"truncation", step) for step in steps]
    of_noise = [KEY, *(KEY.derive(name) for name in (b"stream", b"state", b"piece", b"update"))]
    of_noise += [row_key(KEY, row, Secret(bytes(16))) for row in range(40)]
    of_noise += [row_key(KEY.derive(b"stream"), row, Secret(b"")) for row in range(40)]
    keys = [key.secret_bytes() for key in (*of_batches, *of_noise)]
    blocks = [tuple(itertools.islice(words_of(key), 2)) for key in keys]
    assert len(set(keys)) == len(set(blocks)) == len(keys)


# --- Exact probabilities -----------------------------------------------------------------------


def test_the_probability_of_joining_is_rounded_down_to_a_multiple_of_2_to_the_minus_64(monkeypatch):
    class GivenWords:
        def __init__(self, *_):
            pass

        def next(self, count):
            threshold = 2**64 // 3  # 1/3 is no multiple of 2^-64
            return np.array([0, threshold - 1, threshold, 2**64 - 1], np.uint64)[:count]

    monkeypatch.setattr(sampler_module, "_RandomWords", GivenWords)
    assert sampler_module._successes(KEY, 4, Fraction(1, 3)).tolist() == [0, 1]
    assert sampler_module._successes(KEY, 4, Fraction(1)).tolist() == [0, 1, 2, 3]
    assert sampler_module._successes(KEY, 4, Fraction(1, 2**70)).tolist() == []
    almost_one = Fraction(10**18 - 1, 10**18)
    assert sampler_module._successes(KEY, 4, almost_one).tolist() == [0, 1, 2]


@pytest.mark.parametrize("bound", [1, 2, 3, 5, 6, 7, 100, 2**16, 2**32 - 5, 2**32 - 1])
def test_words_after_the_last_multiple_of_the_bound_are_left_out(bound):
    rest = 2**64 % bound
    near_the_end = sorted({2**64 - 1, 2**64 - rest, 2**64 - rest - 1, 2**64 - bound, 0} - {2**64})
    accepted = [word % bound for word in near_the_end if word < 2**64 // bound * bound]
    labels = np.zeros(len(near_the_end), np.uint32)
    words = np.array(near_the_end, np.uint64)
    drawn = draw_below(words, np.uint64(bound), labels, 0)
    assert labels[:drawn].tolist() == accepted
    assert drawn == len(near_the_end) - sum(word >= 2**64 - rest for word in near_the_end)


def test_every_order_comes_from_equally_many_words():
    """All words below 4 * 3 * 2, read as three places: every order of four labels occurs once."""
    orders = Counter()
    for places in itertools.product(range(4), range(3), range(2)):
        labels = np.arange(4, dtype=np.uint32)
        assert shuffle_step(np.array(places, np.uint64), labels, 4) == 1
        orders[tuple(labels.tolist())] += 1
    assert len(orders) == 24
    labels = np.arange(3, dtype=np.uint32)
    words = np.array([2**64 - 1, 2], np.uint64)  # 2^64 - 1 is a multiple of 3
    assert shuffle_step(words, labels, 3) == 2
    assert labels.tolist() == [0, 1, 2]


def test_sorting_by_label_keeps_the_order_within_a_label():
    labels = np.array([2, 0, 2, 3, 0, 2], np.uint32)
    members, starts = np.empty(6, np.uint32), np.zeros(6, np.int64)
    sort_by_label(labels, members, starts)
    assert members.tolist() == [1, 4, 0, 2, 5, 3]
    assert starts.tolist() == [0, 2, 2, 5, 6, 6]


# --- Statistics --------------------------------------------------------------------------------


def chi_squared_p_value(statistic: float, degrees: int) -> float:
    return float(special.gammaincc(degrees / 2, statistic / 2))


def inclusion_p_value(joined: np.ndarray, probability: float, pair: float) -> float:
    """Whether all examples join with the given probability.

    The counts of the examples are normal with a covariance that is the same for all pairs. The
    statistic is chi-squared.

    Args:
        joined: Independent draws x examples.
        probability: The probability that an example joins.
        pair: The probability that two given examples join together.
    """
    draws, examples = joined.shape
    excess = joined.sum(axis=0) - draws * probability
    variance, covariance = probability * (1 - probability), pair - probability**2
    around_mean = variance - covariance
    of_mean = variance + (examples - 1) * covariance
    statistic = np.sum((excess - excess.mean()) ** 2) / (draws * around_mean)
    if of_mean < 1e-12:  # the size of a batch is fixed
        assert abs(excess.sum()) < 1e-6
        return chi_squared_p_value(statistic, examples - 1)
    statistic += examples * excess.mean() ** 2 / (draws * of_mean)
    return chi_squared_p_value(statistic, examples)


def pair_p_value(
    first: np.ndarray, second: np.ndarray, probability: float, pair: float, same: float | None
) -> float:
    """Whether example i joins in `first` and example j in `second` with the given probability.

    For each (i, j), the four cases "both", "only i", "only j", "neither" give a chi-squared
    statistic with three degrees of freedom. The result is the smallest p-value, times their number.

    Args:
        first: Independent draws x examples.
        second: Independent draws x examples.
        probability: The probability that an example joins.
        pair: The probability for i and j, i != j.
        same: The probability for i and i; None to leave these out.
    """
    draws, examples = first.shape
    both = first.T.astype(float) @ second
    only_first = first.sum(axis=0)[:, None] - both
    only_second = second.sum(axis=0)[None, :] - both
    neither = draws - both - only_first - only_second
    p_values = []
    of_others = ~np.eye(examples, dtype=bool)
    for cells, expected_pair in ((of_others, pair), (~of_others, same)):
        if expected_pair is None:
            continue
        one = probability - expected_pair
        statistic, degrees = np.zeros(np.count_nonzero(cells)), -1
        for counts, expected in (
            (both, expected_pair),
            (only_first, one),
            (only_second, one),
            (neither, 1 - 2 * probability + expected_pair),
        ):
            if expected < 1e-12:  # an impossible case
                if np.any(counts[cells]):
                    return 0.0
                continue
            statistic += (counts[cells] - draws * expected) ** 2 / (draws * expected)
            degrees += 1
        p_values += [chi_squared_p_value(statistic.max(), degrees) * len(statistic)]
    return min(p_values)


def size_p_value(sizes: np.ndarray, trials: int, probability: float) -> float:
    """Whether independent sizes are binomial."""
    possible = np.arange(trials + 1)
    expected = len(sizes) * special.comb(trials, possible)
    expected *= probability**possible * (1 - probability) ** (trials - possible)
    counts = np.bincount(sizes, minlength=trials + 1)
    likely = np.flatnonzero(expected >= 5)  # the rare sizes below and above are one cell each
    low, high = likely[0], likely[-1]
    cells = [slice(0, low + 1), *(slice(i, i + 1) for i in range(low + 1, high))]
    cells += [slice(high, trials + 1)]
    statistic = sum(
        (counts[cell].sum() - expected[cell].sum()) ** 2 / expected[cell].sum() for cell in cells
    )
    return chi_squared_p_value(statistic, len(cells) - 1)


def joined_in_steps(sampling: Sampling, steps: range, seed: int = 0) -> np.ndarray:
    """Steps x examples: who joins the batches of one key."""
    sampler = Sampler(sampling, NoiseKey.insecure_for_tests(seed))
    joined = np.zeros((len(steps), sampling.dataset_size), bool)
    for row, step in enumerate(steps):
        joined[row, sampler.batch(step)] = True
    return joined


def joined_by_key(sampling: Sampling, *steps: int, keys: int = 2_500) -> list[np.ndarray]:
    """For each of some steps, keys x examples: who joins the batch of that step."""
    joined = np.zeros((len(steps), keys, sampling.dataset_size), bool)
    for seed in range(keys):
        sampler = Sampler(sampling, NoiseKey.insecure_for_tests(seed))
        for row, step in enumerate(steps):
            joined[row, seed, sampler.batch(step)] = True
    return list(joined)


def passes(p_value: float) -> bool:
    return p_value >= SMALLEST_P_VALUE


def test_the_statistics_accept_draws_by_numpy():
    """The p-values of correct draws are about uniform: the statistics have the right scale."""
    random = np.random.default_rng(5)
    p_values = []
    for _ in range(200):
        joined = random.random((1_000, 12)) < 0.25
        p_values.append(
            (
                inclusion_p_value(joined, 0.25, 0.0625),
                pair_p_value(joined[::2], joined[1::2], 0.25, 0.0625, 0.0625),
                size_p_value(joined.sum(axis=1), 12, 0.25),
                inclusion_p_value(
                    np.argsort(random.random((1_000, 12)), axis=1) < 3, 0.25, 3 / 12 * 2 / 11
                ),
            )
        )
    inclusion, pairs, sizes, fixed_sizes = np.mean(np.array(p_values) < 0.1, axis=0)
    for share in (inclusion, sizes, fixed_sizes):
        assert 0.03 < share < 0.18
    assert 0.03 < pairs < 0.3  # the smaller of two bounds, so up to twice as many


# --- Poisson -----------------------------------------------------------------------------------

POISSON = Poisson(24, 6, 4_000)
ONE_GROUP = CyclicPoisson(24, 6, 4_000, groups=1)  # the same distribution
BOTH_POISSON = pytest.mark.parametrize("sampling", [POISSON, ONE_GROUP], ids=["poisson", "1 group"])
Q = 0.25


def poisson_p_values(sampling: Sampling) -> dict[str, float]:
    joined = joined_in_steps(sampling, range(4_000))
    return {
        "inclusion": inclusion_p_value(joined, Q, Q**2),
        "pairs": pair_p_value(joined, joined, Q, Q**2, None),
        "sizes": size_p_value(joined.sum(axis=1), 24, Q),
        "next step": pair_p_value(joined[::2], joined[1::2], Q, Q**2, Q**2),
        "distant step": pair_p_value(joined[:2_000], joined[2_000:], Q, Q**2, Q**2),
    }


@BOTH_POISSON
def test_poisson_batches_have_independent_examples_and_steps(sampling):
    p_values = poisson_p_values(sampling)
    assert all(map(passes, p_values.values())), p_values


def one_example_joins_more_often(key, trials, probability):
    batch = real_successes(key, trials, probability)
    return np.union1d(batch, [0]) if len(batch) % 16 == 5 else batch


def neighbors_join_together(key, trials, probability):
    pairs = real_successes(key, trials // 2, probability)
    return np.sort(np.concatenate([2 * pairs, 2 * pairs + 1]))


def the_size_is_fixed(key, trials, probability):
    seed = int.from_bytes(key.secret_bytes(), "big")
    chosen = np.random.default_rng(seed).permutation(trials)[: int(trials * probability)]
    return np.sort(chosen)


real_successes = sampler_module._successes
WRONG_DRAWS = {
    one_example_joins_more_often: {"inclusion"},
    neighbors_join_together: {"pairs", "sizes"},
    the_size_is_fixed: {"sizes"},
}


@BOTH_POISSON
@pytest.mark.parametrize("wrong", WRONG_DRAWS)
def test_wrong_poisson_draws_are_noticed(sampling, wrong, monkeypatch):
    monkeypatch.setattr(sampler_module, "_successes", wrong)
    p_values = poisson_p_values(sampling)
    assert {name for name, p_value in p_values.items() if not passes(p_value)} >= WRONG_DRAWS[wrong]


@pytest.mark.parametrize(
    ("wrong", "noticed_by"),
    [
        (lambda step: (step // 2).to_bytes(8, "big"), "next step"),
        (lambda step: (step % 2_000).to_bytes(8, "big"), "distant step"),
    ],
)
def test_steps_with_the_same_draws_are_noticed(wrong, noticed_by, monkeypatch):
    monkeypatch.setattr(sampler_module, "_number", wrong)
    p_values = poisson_p_values(POISSON)
    assert not passes(p_values[noticed_by])
    assert passes(p_values["inclusion"])


def test_poisson_probabilities_that_are_slightly_wrong_are_noticed():
    """Batches of 6 of 24 examples, tested against a probability of 0.26 instead of 0.25."""
    joined = joined_in_steps(POISSON, range(4_000))
    assert not passes(inclusion_p_value(joined, 0.26, 0.26**2))
    assert not passes(size_p_value(joined.sum(axis=1), 24, 0.26))


# --- Cyclic Poisson ----------------------------------------------------------------------------

CYCLIC = CyclicPoisson(24, 3, 10_000, groups=4)  # groups of 6, of which each joins with 1/2
IN_GROUP = 0.5


def cyclic_p_values() -> dict[str, float]:
    now, next_step, next_turn = joined_by_key(CYCLIC, 0, 1, 4)
    once = IN_GROUP / 4
    same_group, other_group = 6 / 24 * 5 / 23 * IN_GROUP**2, 6 / 24 * 6 / 23 * IN_GROUP**2
    return {
        "inclusion": inclusion_p_value(now, once, same_group),
        "later inclusion": inclusion_p_value(next_step, once, same_group),
        "pairs": pair_p_value(now, now, once, same_group, None),
        "next step": pair_p_value(now, next_step, once, other_group, 0.0),
        "next turn": pair_p_value(now, next_turn, once, same_group, IN_GROUP**2 / 4),
        "sizes": size_p_value(now.sum(axis=1), 6, IN_GROUP),
    }


def split_p_value(groups: int = 3, keys: int = 3_000) -> float:
    """Whether every position is equally often in every group, and pairs are too."""
    labels = np.array(
        [
            sampler_module._equal_parts(NoiseKey.insecure_for_tests(seed), 12, groups)
            for seed in range(keys)
        ]
    )
    size = 12 // groups
    pair = size / 12 * (size - 1) / 11
    p_values = [
        p_value
        for group in range(groups)
        for p_value in (
            inclusion_p_value(labels == group, 1 / groups, pair),
            pair_p_value(labels == group, labels == group, 1 / groups, pair, None),
        )
    ]
    return min(p_values) * len(p_values)


def test_cyclic_poisson_batches_have_the_right_distribution():
    p_values = cyclic_p_values()
    assert all(map(passes, p_values.values())), p_values


def test_the_turns_of_one_group_are_independent():
    joined = joined_in_steps(CYCLIC, range(0, 10_000, 4))
    members = joined.any(axis=0)
    assert members.sum() == 6
    joined = joined[:, members]
    assert passes(inclusion_p_value(joined, IN_GROUP, IN_GROUP**2))
    assert passes(pair_p_value(joined, joined, IN_GROUP, IN_GROUP**2, None))
    assert passes(pair_p_value(joined[::2], joined[1::2], IN_GROUP, IN_GROUP**2, IN_GROUP**2))
    repeated = joined[: len(joined) // 2].repeat(2, axis=0)  # a negative control
    assert not passes(
        pair_p_value(repeated[::2], repeated[1::2], IN_GROUP, IN_GROUP**2, IN_GROUP**2)
    )


def test_the_split_is_uniform():
    assert passes(split_p_value())


def without_a_shuffle(_, labels):
    """Leave the labels as they are: the same split for all keys."""


def shuffle_that_always_moves(words, labels, left):
    """The algorithm of Sattolo, which never leaves a label in its place."""
    for word in words:
        left -= 1
        place = int(word) % left if left else 0
        labels[left], labels[place] = labels[place], labels[left]
    return left


def shuffle_with_any_place(words, labels, left):
    """A well-known mistake: the place is drawn from all places."""
    for word in words:
        left -= 1
        place = int(word) % len(labels)
        labels[left], labels[place] = labels[place], labels[left]
    return left


@pytest.mark.parametrize("wrong", [shuffle_that_always_moves, shuffle_with_any_place])
def test_a_wrong_shuffle_is_noticed(wrong, monkeypatch):
    monkeypatch.setattr(sampler_module, "shuffle_step", wrong)
    assert not passes(split_p_value(12))


def test_a_correct_shuffle_passes_with_one_example_per_group():
    assert passes(split_p_value(12))


def groups_of_random_size(key, examples, parts):
    return sampler_module._independent_parts(key, examples, parts)


def neighbors_in_one_group(key, examples, parts):
    return np.asarray(real_groups(key, examples // 2, parts)).repeat(2).data


def the_same_groups_for_all_keys(_, examples, parts):
    return real_groups(KEY, examples, parts)


real_groups = sampler_module._equal_parts


@pytest.mark.parametrize(
    ("wrong", "noticed_by"),
    [
        (groups_of_random_size, "sizes"),
        (neighbors_in_one_group, "pairs"),
        (the_same_groups_for_all_keys, "inclusion"),
    ],
)
def test_wrong_groups_are_noticed(wrong, noticed_by, monkeypatch):
    monkeypatch.setattr(sampler_module, "_equal_parts", wrong)
    assert not passes(cyclic_p_values()[noticed_by])


def test_wrong_turns_are_noticed(monkeypatch):
    monkeypatch.setattr(sampler_module, "_number", lambda step: bytes([step % 4]))
    p_values = cyclic_p_values()
    assert not passes(p_values["next turn"])
    assert passes(p_values["next step"])
    monkeypatch.undo()
    part = sampler_module._Split.part
    monkeypatch.setattr(sampler_module._Split, "part", lambda self, i: part(self, i // 2))
    assert not passes(cyclic_p_values()["next step"])


@pytest.mark.parametrize(("examples", "groups"), [(61, 5), (64, 8), (7, 7), (10, 3)])
def test_group_sizes_differ_by_at_most_one_and_batches_stay_in_their_group(examples, groups):
    for seed in range(5):
        sampling = CyclicPoisson(examples, 1, 5 * groups, groups=groups)
        sampler = Sampler(sampling, NoiseKey.insecure_for_tests(seed))
        parts = [set(sampler._split.part(group)) for group in range(groups)]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert sorted(itertools.chain(*parts)) == list(range(examples))
        for step in range(sampling.steps):
            assert set(sampler.batch(step)) <= parts[step % groups]


# --- Balls in bins -----------------------------------------------------------------------------

BINS = BallsInBins(24, 6, 100)  # 4 bins


def bins_p_values(keys: int = 2_500) -> dict[str, float]:
    now, next_step = joined_by_key(BINS, 0, 1, keys=keys)
    return {
        "inclusion": inclusion_p_value(now, 0.25, 0.25**2),
        "later inclusion": inclusion_p_value(next_step, 0.25, 0.25**2),
        "pairs": pair_p_value(now, now, 0.25, 0.25**2, None),
        "next step": pair_p_value(now, next_step, 0.25, 0.25**2, 0.0),
        "sizes": size_p_value(now.sum(axis=1), 24, 0.25),
    }


def uniform_bins_p_value(bins: int = 6) -> float:
    """Whether all bins of one key get equally many of 60,000 examples."""
    sampler = Sampler(BallsInBins(60_000, 60_000 // bins, bins), KEY)
    counts = np.array([len(sampler.batch(step)) for step in range(bins)])
    expected = 60_000 / bins
    return chi_squared_p_value(float(np.sum((counts - expected) ** 2) / expected), bins - 1)


def test_balls_in_bins_batches_have_the_right_distribution():
    p_values = bins_p_values()
    assert all(map(passes, p_values.values())), p_values


def test_bins_are_equally_likely():
    assert passes(uniform_bins_p_value())
    assert passes(uniform_bins_p_value(100))


def bins_of_equal_size(key, examples, parts):
    labels = (np.arange(examples, dtype=np.uint32) % np.uint32(parts)).data
    sampler_module._shuffle(key, labels)
    return labels


def neighbors_in_one_bin(key, examples, parts):
    return np.asarray(real_bins(key, examples // 2, parts)).repeat(2).data


real_bins = sampler_module._independent_parts


@pytest.mark.parametrize(
    ("wrong", "noticed_by"), [(bins_of_equal_size, "sizes"), (neighbors_in_one_bin, "pairs")]
)
def test_wrong_bins_are_noticed(wrong, noticed_by, monkeypatch):
    monkeypatch.setattr(sampler_module, "_independent_parts", wrong)
    assert not passes(bins_p_values()[noticed_by])


def test_bins_from_one_byte_without_rejection_are_noticed(monkeypatch):
    def biased(words, bound, labels, drawn):
        labels[drawn : drawn + len(words)] = (words >> np.uint64(56)) % bound
        return drawn + len(words)

    monkeypatch.setattr(sampler_module, "draw_below", biased)
    assert not passes(uniform_bins_p_value(100))


@pytest.mark.parametrize("sampling", [BINS, SCHEMES["balls-in-bins"], BallsInBins(5, 1, 40)])
def test_every_example_is_in_exactly_one_batch_of_every_epoch(sampling):
    drawn = batches(sampling.after(3 * sampling.bins))
    for epoch in range(3):
        of_epoch = drawn[epoch * sampling.bins : (epoch + 1) * sampling.bins]
        assert sorted(itertools.chain(*of_epoch)) == list(range(sampling.dataset_size))
        assert of_epoch == drawn[: sampling.bins]


# --- Batches that are too large ----------------------------------------------------------------


def subset_p_value(sampling: Sampling, turn: int) -> float:
    """Whether the same batch is cut to a uniformly random subset in every one of its steps."""
    full = np.arange(20)
    sampler = Sampler(sampling, KEY)
    sampler._drawn = lambda _: full.copy()
    kept = np.zeros((3_000, 20), bool)
    for row in range(3_000):
        kept[row, sampler.batch(row * turn)] = True
    assert np.all(kept.sum(axis=1) == 8)
    share, pair = 8 / 20, 8 / 20 * 7 / 19
    p_values = [
        inclusion_p_value(kept, share, pair),
        pair_p_value(kept, kept, share, pair, None),
        pair_p_value(kept[::2], kept[1::2], share, share**2, share**2),
    ]
    return min(p_values) * len(p_values)


CUT = {
    "poisson": (Poisson(40, 8, 3_000, max_batch_size=8), 1),
    "cyclic": (CyclicPoisson(40, 8, 9_000, groups=3, max_batch_size=8), 3),
    "bins": (BallsInBins(40, 8, 15_000, max_batch_size=8), 5),
}


@pytest.mark.parametrize(("sampling", "turn"), CUT.values(), ids=CUT)
def test_a_batch_that_is_too_large_is_cut_to_a_uniform_subset_in_every_step(sampling, turn):
    assert passes(subset_p_value(sampling, turn))


def test_cutting_off_the_end_or_the_same_subset_every_time_is_noticed(monkeypatch):
    monkeypatch.setattr(sampler_module, "_shuffle", without_a_shuffle)
    assert not passes(subset_p_value(*CUT["bins"]))
    monkeypatch.undo()
    monkeypatch.setattr(sampler_module, "_number", lambda step: (step // 10).to_bytes(8, "big"))
    assert not passes(subset_p_value(*CUT["bins"]))


@pytest.mark.parametrize("name", ["poisson-cut", "cyclic-poisson-cut", "balls-in-bins-cut"])
def test_cut_batches_are_those_without_limit_unless_they_are_too_large(name):
    """The coupling that `overflow_probability` rests on."""
    sampling = SCHEMES[name]
    sampler, too_large = Sampler(sampling, KEY), 0
    for step in range(sampling.steps):
        full, batch = sampler._drawn(step), sampler.batch(step)
        if len(full) <= sampling.max_batch_size:
            assert np.array_equal(batch, full)
        else:
            assert len(batch) == sampling.max_batch_size
            assert set(batch) < set(full)
            too_large += 1
    assert 0 < too_large < sampling.steps


def test_batches_before_they_are_cut_have_the_distribution_without_limit():
    sampler = Sampler(Poisson(24, 6, 4_000, max_batch_size=6), KEY)
    sizes = np.array([len(sampler._drawn(step)) for step in range(4_000)])
    assert passes(size_p_value(sizes, 24, Q))
    assert not passes(size_p_value(np.minimum(sizes, 6), 24, Q))


# --- Edge cases and refusals -------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling",
    [
        Poisson(1, 1, 3),
        CyclicPoisson(1, 1, 3, groups=1),
        BallsInBins(1, 1, 3),
        Poisson(50, 50, 3),
        CyclicPoisson(50, 50, 3),
        BallsInBins(50, 50, 3),
        Poisson(50, 50, 3, max_batch_size=50),
    ],
    ids=repr,
)
def test_a_batch_as_large_as_the_data_set_is_the_data_set(sampling):
    assert batches(sampling) == [list(range(sampling.dataset_size))] * 3


def test_groups_as_small_as_a_batch_join_completely():
    drawn = batches(CyclicPoisson(12, 3, 8, groups=4))
    assert sorted(itertools.chain(*drawn[:4])) == list(range(12))
    assert drawn[:4] == drawn[4:]


def test_batches_may_be_empty():
    for sampling in (Poisson(10, 1, 60), CyclicPoisson(10, 1, 60, groups=2), BallsInBins(9, 1, 60)):
        sampler = Sampler(sampling, KEY)
        empty = [batch for batch in map(sampler.batch, range(60)) if len(batch) == 0]
        assert empty
        assert empty[0].dtype == np.int64
        assert empty[0].shape == (0,)


@EVERY_SCHEME
def test_steps_outside_the_plan_are_refused(sampling):
    sampler = Sampler(sampling, KEY)
    with pytest.raises(InvalidInput, match="step 40 is after the last planned step, 39"):
        sampler.batch(40)
    with pytest.raises(InvalidInput, match="no guarantee covers it; plan the run with more steps"):
        sampler.batch(10**30)
    for bad in (-1, 1.0, float("nan"), "3", None, True):
        with pytest.raises(InvalidInput, match="step must be a whole number of at least 0"):
            sampler.batch(bad)
    assert sampler.batch(np.int32(39)).tolist() == sampler.batch(39).tolist()


def test_keys_and_samplings_of_another_type_are_refused():
    with pytest.raises(InvalidInput, match=r"key must be a NoiseKey, got bytes; NoiseKey\.gen"):
        Sampler(POISSON, bytes(32))  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        InvalidInput, match="must be Poisson, CyclicPoisson or BallsInBins, got str"
    ):
        Sampler("poisson", KEY)  # pyright: ignore[reportArgumentType]


def test_splits_of_too_many_examples_are_refused():
    for sampling in (CyclicPoisson(2**32, 5, 10, groups=3), BallsInBins(10**18, 10**17, 10)):
        with pytest.raises(TooLarge, match="splits at most 4,294,967,295 examples"):
            Sampler(sampling, KEY)
    for sampling in (Poisson(10**18, 5, 10), CyclicPoisson(2**32, 5, 10)):
        assert Sampler(sampling, KEY).sampling == sampling


# --- Memory ------------------------------------------------------------------------------------

MANY = 20_000_000


def peak_and_kept_bytes(sampling: Sampling) -> tuple[int, int]:
    """The largest memory during the first batch, and the memory after it."""
    sampler = Sampler(sampling, KEY)
    tracemalloc.start()
    try:
        sampler.batch(0)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak, kept


def test_poisson_sampling_needs_memory_for_a_chunk_and_the_batch_only(monkeypatch):
    sampling = Poisson(MANY, 20_000, 10)
    limit = 4_000_000  # two chunks of 0.5 MB, and the batch of 0.16 MB in pieces and as a whole
    assert peak_and_kept_bytes(sampling)[0] < limit
    monkeypatch.setattr(sampler_module, "CHUNK", MANY)
    assert peak_and_kept_bytes(sampling)[0] > 50 * limit


@pytest.mark.parametrize(
    "sampling", [CyclicPoisson(MANY, 20_000, 10, groups=8), BallsInBins(MANY, 20_000, 10)]
)
def test_a_split_needs_eight_bytes_per_example_at_first_and_four_later(sampling):
    peak, kept = peak_and_kept_bytes(sampling)
    assert peak < 8 * MANY + 4_000_000
    assert kept < 4 * MANY + 1_000_000


# --- Secrecy -----------------------------------------------------------------------------------


@EVERY_SCHEME
def test_nothing_prints_a_secret(sampling):
    sampler = Sampler(sampling, KEY)
    sampler.batch(0)
    assert repr(sampler) == str(sampler) == f"Sampler({sampling!r})"
    shown = f"{vars(sampler)}"
    check_shows_no_secret(shown)
    assert "array" not in shown


@EVERY_SCHEME
def test_samplers_cannot_be_pickled_or_copied(sampling):
    sampler = Sampler(sampling, KEY)
    sampler.batch(0)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="create it again from the key"):
            copied(sampler)


def check_shows_no_secret(text: str) -> None:
    own = [Sampler(sampling, KEY)._key for sampling in SCHEMES.values()]
    for key in (KEY, *own):
        secret = key.secret_bytes()
        for spelling in (secret.hex(), repr(secret)[2:-1], base64.b64encode(secret).decode()):
            assert spelling not in text


def check_frames_hold_no_secret(error: BaseException, *files: str) -> int:
    """Look at all local variables of the functions in these files that an error came through."""
    frames = 0
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename in files:
            frames += 1
            for value in frame.f_locals.values():
                assert not isinstance(value, np.ndarray | bytearray | list)
                check_shows_no_secret(repr(value))
                assert "array(" not in repr(value)
    return frames


INTERRUPTED = ["_shuffle", "_successes", "shuffle_step", "draw_below", "sort_by_label", "_number"]


@pytest.mark.parametrize("name", [*INTERRUPTED, "fill", "fill later"])
def test_no_traceback_shows_a_batch_a_split_or_a_key(name, monkeypatch):
    fill, calls = sampler_module.Keystream.fill, itertools.count()

    def interrupted(*arguments):
        if name == "fill later" and next(calls) % 2 == 0:
            return fill(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(sampler_module, "CHUNK", 3)
    if name.startswith("fill"):
        monkeypatch.setattr(sampler_module.Keystream, "fill", interrupted)
    else:
        monkeypatch.setattr(sampler_module, name, interrupted)
    errors = list[BaseException]()
    for sampling in SCHEMES.values():
        try:
            batches(sampling)
        except KeyboardInterrupt as error:
            errors.append(error)
    assert len(errors) >= 2  # with and without a limit
    for error in errors:
        assert check_frames_hold_no_secret(error, sampler_module.__file__)


def test_a_local_variable_with_a_secret_would_be_noticed():
    def batch_in_a_local_variable():
        batch = Sampler(POISSON, KEY).batch(0)
        raise KeyboardInterrupt(len(batch))

    def key_in_a_local_variable():
        secret = {"key": KEY.secret_bytes()}
        raise KeyboardInterrupt(len(secret))

    for leaks in (batch_in_a_local_variable, key_in_a_local_variable):
        with pytest.raises(KeyboardInterrupt) as error:
            leaks()
        with pytest.raises(AssertionError):
            check_frames_hold_no_secret(error.value, __file__)


def test_drawing_batches_writes_nothing(capfd, caplog):
    with caplog.at_level(0):
        for sampling in SCHEMES.values():
            batches(sampling)
    sys.stdout.flush()
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []
