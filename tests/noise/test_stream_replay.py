"""A stream goes through rounds again from their digests alone, and then on to the same bits."""

import numpy as np
import pytest

from dpftrl import MinSep, errors, mechanism
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.noise.key import Secret

ROUNDS = 9
NAMES = ["blt-b400", "tree", "tree-full", "smooth-tree", "sqrt", "band-sqrt:4", "independent"]
KEY = NoiseKey.insecure_for_tests(7)


def stream(name: str, mode: str) -> NoiseStream:
    made_for = mechanism(name, MinSep(ROUNDS, 3))
    return NoiseStream.unchecked(
        made_for, 5_000, clip_norm=1.0, noise_multiplier=2.0, key=KEY, mode=mode
    )


def last_sums(of: NoiseStream, first: int) -> list[bytes]:
    sums = [np.full(5_000, float(t)) for t in range(first, ROUNDS)]
    for total in sums:
        of.add_to(total)
    return [total.tobytes() for total in sums]


@pytest.mark.parametrize("mode", ["buffered", "regenerating"])
@pytest.mark.parametrize("name", NAMES)
def test_a_replayed_stream_continues_with_the_same_bits(name, mode):
    whole, again = stream(name, mode), stream(name, mode)
    for t in range(5):
        whole.add_to(np.full(5_000, float(t)))
        again.replay(whole.last_digest())
    assert last_sums(again, 5) == last_sums(whole, 5)


def test_replaying_another_digest_gives_other_noise():
    whole, again = stream("blt-b400", "buffered"), stream("blt-b400", "buffered")
    whole.add_to(np.zeros(5_000))
    again.replay(Secret(bytes(16)))
    assert last_sums(again, 1)[0] != last_sums(whole, 1)[0]


def test_a_digest_of_another_size_is_refused():
    with pytest.raises(errors.InvalidInput, match="16 bytes"):
        stream("tree", "buffered").replay(Secret(b"short"))


def test_replaying_beyond_the_last_round_is_refused():
    full = stream("tree-full", "buffered")
    for _ in range(ROUNDS):
        full.replay(Secret(bytes(16)))
    with pytest.raises(errors.RoundsExceeded):
        full.replay(Secret(bytes(16)))
