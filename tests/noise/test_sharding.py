"""Shards of a stream, put together, are one stream to the last bit, for any number of ranks."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noise_pieces import KEY, ONE_OF_EACH, OTHER_KEY

from dpftrl import BLT
from dpftrl.errors import InvalidInput
from dpftrl.noise import Grid, NoiseStream, Shard, key, sharding
from dpftrl.noise import round_noise as rounds
from dpftrl.noise.key import Secret

GRID = Grid.for_noise(2.0, 1.0)
# BLTs with 1 to 8 buffers, beside one of each mechanism.
MECHANISMS = ONE_OF_EACH | {
    f"blt, d = {d}": BLT(np.linspace(0.5, 0.999, 8)[-d:], np.full(d, 0.1)) for d in range(1, 9)
}
each = pytest.mark.parametrize("name", MECHANISMS)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """Digests of small sums consist of several pieces, and even little work is shared."""
    for module in (key, sharding):
        monkeypatch.setattr(module, "PIECE", 1000)
    monkeypatch.setattr(rounds, "SMALL_SHARE", 1)
    monkeypatch.setattr(sharding, "SMALL_SHARE", 1)


class Ranks:
    """All ranks of a stream in one process."""

    def __init__(self, streams: list[NoiseStream], shards: list[Shard]):
        self.streams, self.shards = streams, shards
        self.exchanged = list[list[Secret]]()

    @classmethod
    def make(cls, name: str, shards: list[Shard], **options: Any) -> "Ranks":
        return cls([make(name, shard.size, shard=shard, **options) for shard in shards], shards)

    def add_to(self, total: np.ndarray, grid: Grid | None) -> None:
        """Do one round: first collect the 16 bytes of every rank, then let each rank add noise."""
        parts = [own(total, shard) for shard in self.shards]
        given = [
            self._given(stream, part.copy(), grid)
            for stream, part in zip(self.streams, parts, strict=True)
        ]
        self.exchanged.append(given)
        for stream, part, shard in zip(self.streams, parts, self.shards, strict=True):
            stream.add_to(part, grid, exchange=lambda _: given)
            put(total, shard, part)

    @staticmethod
    def _given(stream: NoiseStream, part: np.ndarray, grid: Grid | None) -> Secret:
        class Given(Exception):
            pass

        kept = list[Secret]()

        def exchange(secret: Secret) -> list[Secret]:
            kept.append(secret)
            raise Given

        with pytest.raises(Given):
            stream.add_to(part, grid, exchange=exchange)
        return kept[0]


def make(name: str, size: int, **options: Any) -> NoiseStream:
    defaults = {"clip_norm": 1.0, "noise_multiplier": 2.0, "key": KEY, "threads": 2}
    return NoiseStream.unchecked(MECHANISMS[name], size, **{**defaults, **options})


def own(total: np.ndarray, shard: Shard) -> np.ndarray:
    return np.concatenate([total[a:b] for a, b in shard.spans] + [total[:0]])


def put(total: np.ndarray, shard: Shard, part: np.ndarray) -> None:
    start = 0
    for a, b in shard.spans:
        total[a:b] = part[start : start + b - a]
        start += b - a


def even(size: int, ranks: int) -> list[Shard]:
    return [Shard.even(size, rank, ranks) for rank in range(ranks)]


def sums(rows: int, size: int, dtype: str) -> list[np.ndarray]:
    values = 1000 * np.random.default_rng(3).standard_normal((rows, size))
    return list(values.astype(dtype))


def check_equal(
    one: NoiseStream, ranks: Ranks, totals: list[np.ndarray], grid: Grid | None
) -> None:
    for total in totals:
        expected, actual = total.copy(), total.copy()
        one.add_to(expected, grid)
        ranks.add_to(actual, grid)
        np.testing.assert_array_equal(actual, expected)
        assert all(stream.last_digest() == one.last_digest() for stream in ranks.streams)


@each
@pytest.mark.parametrize("mode", ["buffered", "regenerating"])
def test_1_2_and_4_ranks_have_the_bits_of_one_stream(name, mode):
    size = 5003
    for ranks in (1, 2, 4):
        one = make(name, size, mode=mode)
        check_equal(
            one, Ranks.make(name, even(size, ranks), mode=mode), sums(5, size, "int64"), GRID
        )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_floating_point_sums_have_the_bits_of_one_stream(dtype):
    size = 5003
    ranks = Ranks.make("blt", even(size, 3))
    check_equal(make("blt", size), ranks, sums(3, size, dtype), None)


@pytest.mark.parametrize("size", [1, 2, 999, 1000, 1001, 2047, 2048, 2049, 3 * rounds.CHUNK + 5])
@pytest.mark.parametrize("name", ["blt-b400", "tree", "banded-normalised"])
def test_sizes_around_tiles_pieces_and_chunks(name, size):
    check_equal(make(name, size), Ranks.make(name, even(size, 4)), sums(2, size, "int64"), GRID)


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 9000), max_size=12),
    owners=st.lists(st.integers(0, 3), min_size=13, max_size=13),
    name=st.sampled_from(["blt", "gblt", "tree", "independent"]),
)
def test_intervals_of_any_rank_in_any_order(cuts, owners, name):
    size = 9000
    ends = sorted({0, size, *cuts})
    spans = list(pairwise(ends))
    shards = [
        Shard(size, tuple(span for span, owner in zip(spans, owners, strict=False) if owner == r))
        for r in range(4)
    ]
    check_equal(make(name, size), Ranks.make(name, shards), sums(2, size, "int64"), GRID)


@pytest.mark.parametrize("name", ["blt-b400", "tree", "sqrt", "banded-normalised", "independent"])
@pytest.mark.parametrize("after", [1, 3])
def test_shards_can_be_resumed_by_another_number_of_ranks(name, after, tmp_path):
    size = 5003
    totals = sums(5, size, "int64")
    one = make(name, size)
    before = Ranks.make(name, even(size, 4))
    check_equal(one, before, totals[:after], GRID)
    paths = saved(before, tmp_path)
    for ranks in (1, 2, 3):
        shards = even(size, ranks)
        loaded = [load(name, paths, shard) for shard in shards]
        check_equal(make_again(one), Ranks(loaded, shards), totals[after:], GRID)
    whole = load(name, paths, None)
    check_same(whole, make_again(one), totals[after:])


def saved(ranks: Ranks, folder: Path) -> list[Path]:
    paths = [folder / f"shard-{rank}" for rank in range(len(ranks.streams))]
    for path, stream in zip(paths, ranks.streams, strict=True):
        stream.save(path)
    return paths


def load(name: str, paths: Any, shard: Shard | None, **options: Any) -> NoiseStream:
    known = {"key": KEY, "at_least": 0, "shard": shard, **options}
    return NoiseStream.load_unchecked(paths, ONE_OF_EACH[name], **known)


def make_again(stream: NoiseStream) -> NoiseStream:
    """A copy of a stream, by its digests."""
    copy = NoiseStream.unchecked(
        stream.mechanism, 5003, clip_norm=1.0, noise_multiplier=2.0, key=KEY, mode=stream.mode
    )
    for digest in dict.fromkeys(stream._state.digests):  # a round of a tree has several rows
        copy.replay(digest)
    return copy


def check_same(left: NoiseStream, right: NoiseStream, totals: list[np.ndarray]) -> None:
    for total in totals:
        a, b = total.copy(), total.copy()
        left.add_to(a, GRID)
        right.add_to(b, GRID)
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rank", range(4))
def test_another_sum_on_one_rank_gives_fresh_noise_on_all_ranks(rank):
    """Negative control of the digest: what every rank adds depends on the sum of each rank."""
    size = 5003
    shards = even(size, 4)
    (total,) = sums(1, size, "int64")
    changed = total.copy()
    changed[shards[rank].spans[0][0]] ^= 1
    noisy, other = total.copy(), changed.copy()
    Ranks.make("blt", shards).add_to(noisy, GRID)
    Ranks.make("blt", shards).add_to(other, GRID)
    equal = (noisy - total) == (other - changed)
    for shard in shards:
        assert own(equal, shard).mean() < 0.01


def test_without_the_bytes_of_other_ranks_the_digest_is_wrong():
    """Negative control: a rank that ignores the others would give two sums the same noise."""
    size = 5003
    shards = even(size, 2)
    (total,) = sums(1, size, "int64")
    results = list[np.ndarray]()
    for change in (0, 1):
        given = total.copy()
        given[-1] ^= change  # of the other rank
        part = own(given, shards[0])
        make("blt", size, shard=shards[0]).add_to(part, GRID, exchange=lambda one: [one])
        results.append(part)
    np.testing.assert_array_equal(results[0], results[1])


def test_a_swap_of_coordinates_between_ranks_changes_the_digest():
    size = 4000
    shards = even(size, 4)
    (total,) = sums(1, size, "int64")
    swapped = total.copy()
    swapped[:2000], swapped[2000:] = total[2000:], total[:2000]
    left, right = Ranks.make("blt", shards), Ranks.make("blt", shards)
    left.add_to(total.copy(), GRID)
    right.add_to(swapped, GRID)
    assert left.streams[0].last_digest() != right.streams[0].last_digest()


def test_each_rank_exchanges_16_bytes_and_holds_its_share_of_the_buffers():
    size = 100_000
    ranks = Ranks.make("blt-b400", even(size, 4))
    one = make("blt-b400", size)
    check_equal(one, ranks, sums(1, size, "int64"), GRID)
    assert {len(part.secret_bytes()) for part in ranks.exchanged[0]} == {16}
    for stream in ranks.streams:
        assert stream.memory_bytes <= one.memory_bytes / 4 + 8 * 16
    assert sum(stream.memory_bytes for stream in ranks.streams) == one.memory_bytes


def test_replay_of_a_shard_is_the_round():
    size = 5003
    (first, second) = sums(2, size, "int64")
    shards = even(size, 2)
    done = Ranks.make("gblt", shards)
    done.add_to(first.copy(), GRID)
    again = Ranks.make("gblt", shards)
    for stream in again.streams:
        stream.replay(done.streams[0].last_digest())
    left, right = second.copy(), second.copy()
    done.add_to(left, GRID)
    again.add_to(right, GRID)
    np.testing.assert_array_equal(left, right)


# --- Refusals -------------------------------------------------------------------------------------


def refused(match: str) -> Any:
    return pytest.raises(InvalidInput, match=match)


@pytest.mark.parametrize("spans", [((5, 3), (2, 4), (3, 6)), ((0, 11),), ((-1, 3),)])
def test_impossible_spans_are_refused(spans):
    with refused("spans of a shard"):
        Shard(10, spans)


def test_an_impossible_rank_is_refused():
    with refused("rank must be from 0 to 3"):
        Shard.even(10, 4, 4)


def test_a_shard_of_another_model_is_refused():
    with refused("the shard is of 11 coordinates"):
        make("blt", 10, shard=Shard.whole(11))


def test_a_sum_without_exchange_or_of_another_size_is_refused():
    stream = make("blt", 10, shard=Shard(10, ((2, 5),)))
    with refused("needs `exchange`"):
        stream.add_to(np.zeros(3, np.int64), GRID)
    with refused("has 4 coordinates, the stream 3"):
        stream.add_to(np.zeros(4, np.int64), GRID)
    with refused("16 bytes"):
        stream.add_to(np.zeros(3, np.int64), GRID, exchange=lambda _: [Secret(b"")])
    with refused("NaN"):
        stream.add_to(np.full(3, np.nan), exchange=lambda one: [one])
    assert stream.round == 0


def _incomplete(paths: list[Path], _: Path) -> Any:
    return paths[:-1], "do not hold each coordinate once"


def _twice(paths: list[Path], _: Path) -> Any:
    return [*paths, paths[0]], "do not hold each coordinate once"


def _another_state(paths: list[Path], folder: Path) -> Any:
    ranks = Ranks.make("blt", even(5003, 4))
    for total in sums(2, 5003, "int64"):
        ranks.add_to(total, GRID)
    (folder / "other").mkdir()
    return [*paths[:-1], saved(ranks, folder / "other")[-1]], "not of the same state"


def _edited(paths: list[Path], _: Path) -> Any:
    content = bytearray(paths[1].read_bytes())
    content[-1] ^= 1
    paths[1].write_bytes(content)
    return paths, "seal is wrong"


@pytest.mark.parametrize("change", [_incomplete, _twice, _another_state, _edited])
def test_files_that_do_not_belong_together_are_refused(change: Callable[..., Any], tmp_path):
    ranks = Ranks.make("blt", even(5003, 4))
    ranks.add_to(sums(1, 5003, "int64")[0], GRID)
    paths, match = change(saved(ranks, tmp_path), tmp_path)
    with refused(match):
        load("blt", paths, Shard.even(5003, 0, 1))


def test_files_of_another_key_or_size_are_refused(tmp_path):
    ranks = Ranks.make("blt", even(5003, 2))
    ranks.add_to(sums(1, 5003, "int64")[0], GRID)
    paths = saved(ranks, tmp_path)
    with refused("belongs to key"):
        load("blt", paths, Shard.whole(5003), key=OTHER_KEY)
    with refused("is of a stream for 5,003 coordinates"):
        load("blt", paths, Shard.whole(5002))
