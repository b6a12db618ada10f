"""The bits behind the noise: published vectors, an independent GHASH, and keys that never meet."""

import hmac
import itertools
import mmap

import ghash_by_hand as by_hand
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from dpftrl.errors import InvalidInput
from dpftrl.noise import NoiseKey
from dpftrl.noise import key as digest_module
from dpftrl.noise.key import (
    NONCE,
    PIECE,
    Digest,
    Keystream,
    Secret,
    digest_of_update,
    row_key,
)

# NIST SP 800-38A, F.5.5: CTR-AES256.Encrypt.
NIST_KEY = NoiseKey(
    bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
)
NIST_COUNTER = int("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff", 16)
NIST_PLAIN = bytes.fromhex(
    "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
)
NIST_ENCRYPTED = bytes.fromhex(
    "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
    "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
)
NIST_OUTPUT = bytes.fromhex(
    "0bdf7df1591716335e9a8b15c860c5025a6e699d536119065433863c8f657b94"
    "1bc12c9c01610d5d0d8bd6a3378eca622956e1c8693536b1bee99c73a31576b6"
)
KEY, OTHER = NoiseKey.insecure_for_tests(1), NoiseKey.insecure_for_tests(2)


def some(key: NoiseKey, first_block: int, *lengths: int) -> bytes:
    """Keystream in pieces of so many bytes."""
    stream, made = Keystream(key, first_block), b""
    for length in lengths:
        room = bytearray(length + 15)
        stream.fill(bytes(length), room)
        made += room[:length]
    return made


# --- Counter mode ------------------------------------------------------------------------------


def test_the_published_vector_of_aes_256_in_counter_mode():
    assert bytes(a ^ b for a, b in zip(NIST_PLAIN, NIST_ENCRYPTED, strict=True)) == NIST_OUTPUT
    assert some(NIST_KEY, NIST_COUNTER, 64) == NIST_OUTPUT
    wrong = some(NIST_KEY, NIST_COUNTER - 1, 64)
    assert wrong != NIST_OUTPUT
    assert wrong[16:] == NIST_OUTPUT[:48]


def test_starting_at_a_later_block_skips_the_earlier_ones():
    whole = some(KEY, 0, 16 * 300)
    for block in (1, 2, 17, 255, 256, 299):
        assert some(KEY, block, 16 * (300 - block)) == whole[16 * block :]


def test_a_keystream_is_the_blocks_of_the_counter_encrypted_one_by_one():
    encrypt = Cipher(algorithms.AES256(KEY.secret_bytes()), modes.ECB()).encryptor()
    for first in (0, 2**32 - 2, 2**64 - 2, 2**128 - 4):
        counters = b"".join((first + i).to_bytes(16, "big") for i in range(4))
        assert some(KEY, first, 64) == encrypt.update(counters)


def test_a_keystream_does_not_depend_on_how_it_is_cut():
    whole = some(KEY, 5, 4096)
    for lengths in ((4095, 1), (1, 4095), (16,) * 256, (5, 11, 80, 4000)):
        assert some(KEY, 5, *lengths) == whole


def test_filling_does_not_write_beyond_the_requested_bytes():
    room = bytearray(b"x" * 64)
    Keystream(KEY).fill(bytes(32), room)
    assert room[32:] == b"x" * 32
    with pytest.raises(ValueError, match="buffer"):
        Keystream(KEY).fill(bytes(32), bytearray(31))


@pytest.mark.parametrize("block", [-1, 2**128])
def test_blocks_outside_the_counter_range_are_refused(block: int):
    with pytest.raises(OverflowError):
        Keystream(KEY, block)


# --- Keys --------------------------------------------------------------------------------------


def test_row_keys_are_hmac_of_row_and_digest():
    digest = bytes(range(16))
    message = b"\0\0\0\3row" + b"\0\0\0\x08" + (258).to_bytes(8, "big") + b"\0\0\0\x10" + digest
    wanted = hmac.digest(KEY.secret_bytes(), message, "sha256")
    assert row_key(KEY, 258, Secret(digest)).secret_bytes() == wanted


def test_row_keys_differ_by_key_row_and_every_bit_of_the_digest():
    digests = [bytes(16), *((1 << bit).to_bytes(16, "big") for bit in range(128))]
    rows = [0, 1, 2, 255, 256, 65536, 2**40, 2**64 - 1]
    keys = [KEY, OTHER, KEY.derive(b"row"), KEY.derive(b"state")]
    made = {
        row_key(key, row, Secret(digest)).secret_bytes()
        for key, row, digest in itertools.product(keys, rows, digests)
    }
    assert len(made) == len(keys) * len(rows) * len(digests)


def test_purpose_and_content_cannot_run_into_each_other():
    pieces = [
        (b"stream"[:i], b"stream"[i:j], Secret(b"stream"[j:]))
        for i in range(7)
        for j in range(i, 7)
    ]
    assert len({KEY.derive(*parts).secret_bytes() for parts in pieces}) == len(pieces)
    assert KEY.derive(b"").secret_bytes() != KEY.derive(b"\0").secret_bytes()


def test_keystreams_of_unlike_row_keys_have_no_block_in_common():
    blocks = set()
    for row, last in itertools.product(range(8), range(8)):
        made = some(row_key(KEY, row, Secret(bytes(15) + bytes([last]))), 0, 1600)
        blocks |= {made[i : i + 16] for i in range(0, 1600, 16)}
    assert len(blocks) == 64 * 100


@pytest.mark.parametrize(
    "secret", [b"", bytes(31), bytes(33), bytes(64), "0" * 32, bytearray(32), 7]
)
def test_an_invalid_key_is_refused_without_being_shown(secret):
    with pytest.raises(InvalidInput) as error:
        NoiseKey(secret)
    assert str(error.value).startswith("a noise key must be 32 bytes")


def test_keys_are_equal_by_value_and_fresh_ones_never_are():
    assert NoiseKey(KEY.secret_bytes()) == KEY
    assert len({KEY, NoiseKey(KEY.secret_bytes()), OTHER}) == 2
    assert len({NoiseKey.generate().secret_bytes() for _ in range(100)}) == 100
    assert NoiseKey.insecure_for_tests(-1) != NoiseKey.insecure_for_tests(1)
    assert KEY.secret_bytes() != KEY


# --- Digests -----------------------------------------------------------------------------------


def digest(key: NoiseKey, *contents: bytes) -> bytes:
    made = Digest(key)
    for content in contents:
        made.add(content)
    return made.finish().secret_bytes()


def test_the_published_vectors_of_gcm():
    """Test cases 13 and 2 of McGrew and Viega; the first has our nonce of zeros."""
    assert digest(NoiseKey(bytes(32))) == bytes.fromhex("530f8afbc74536b9a963b4f1c4cb738b")
    h = int("66e94bd4ef8a2c3b884cfa59ca342b2e", 16)
    encrypted = bytes.fromhex("0388dace60b6a392f328c2b971b2fe78")
    assert by_hand.hashed(h, b"", encrypted) == int("f38cbb1ad69223dcc3457ae5b6b0f885", 16)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 100, 1000])
def test_a_digest_is_gmac_by_hand(length: int):
    content = np.random.default_rng(length).bytes(length)
    encrypt = Cipher(algorithms.AES256(KEY.secret_bytes()), modes.ECB()).encryptor()
    h = int.from_bytes(encrypt.update(bytes(16)), "big")
    mask = int.from_bytes(encrypt.update(NONCE + b"\0\0\0\1"), "big")
    wanted = (by_hand.hashed(h, content) ^ mask).to_bytes(16, "big")
    assert digest(KEY, content) == wanted
    assert digest(KEY, content[:5], content[5:]) == wanted
    assert AESGCM(KEY.secret_bytes()).encrypt(NONCE, b"", content) == wanted


def test_a_digest_does_not_depend_on_how_much_is_taken_in_at_once(monkeypatch):
    content = np.random.default_rng(1).bytes(1000)
    wanted = digest(KEY, content)
    for most in (1, 16, 17, 999, 1000):
        monkeypatch.setattr(digest_module, "MOST_AT_ONCE", most)
        assert digest(KEY, content) == digest(KEY, content[:3], content[3:]) == wanted


@pytest.mark.slow
def test_a_digest_takes_more_than_two_gibibytes_at_once():
    """As the buffers of a model of 600 million coordinates are, when a state is saved."""
    with mmap.mmap(-1, 2**31 + 16) as zeros:
        assert len(digest(KEY, zeros)) == 16


def of_update(
    *parts, scale: float = 1.0, key: NoiseKey = KEY, before: bytes = b"", threads: int = 1
) -> bytes:
    sums = list(map(memoryview, parts))
    return digest_of_update(key, sums, scale, Secret(before), threads).secret_bytes()


def check_every_bit_counts(digest_of) -> None:
    """Flips each bit of small updates of each kind."""
    for kind in ("float32", "float64", "int64"):
        update = np.arange(1, 8).astype(kind)
        before = digest_of(update)
        assert digest_of(update.copy()) == before
        seen = {before}
        for place, bit in itertools.product(range(update.nbytes), range(8)):
            update.view(np.uint8)[place] ^= 1 << bit
            if np.isfinite(update).all():
                assert digest_of(update) not in seen
                seen.add(digest_of(update))
            update.view(np.uint8)[place] ^= 1 << bit


def test_every_flipped_bit_changes_the_digest(monkeypatch):
    check_every_bit_counts(of_update)
    monkeypatch.setattr(digest_module, "PIECE", 3)
    check_every_bit_counts(of_update)


def test_a_digest_that_forgets_a_bit_is_noticed():
    def forgetful(update):
        content = update.copy()
        content.view(np.uint8)[3] &= 0xFE
        return digest(KEY, content.tobytes())

    with pytest.raises(AssertionError):
        check_every_bit_counts(forgetful)


def test_bits_at_the_ends_of_pieces_change_the_digest():
    update = np.zeros(2 * PIECE + 3, np.float32)
    seen = {of_update(update)}
    for place in (0, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE - 1, 2 * PIECE, 2 * PIECE + 2):
        update[place] = 1.0
        seen.add(of_update(update))
        update[place] = 0.0
    assert len(seen) == 8


def test_exchanging_pieces_changes_the_digest(monkeypatch):
    monkeypatch.setattr(digest_module, "PIECE", 4)
    one, other = np.arange(4.0), np.arange(4.0) + 1
    orders = [(one, other, one), (other, one, one), (one, one, other), (one, other), (one,)]
    made = {of_update(np.concatenate(order)) for order in orders}
    made |= {of_update(*order) for order in orders[:-1]}
    assert len(made) == 9


def test_the_digest_depends_on_type_division_scale_key_and_history_but_not_on_threads():
    update = np.arange(1.0, 9.0)
    made = [
        of_update(update),
        of_update(update, key=OTHER),
        of_update(update, before=bytes(16)),
        of_update(update, before=bytes(15) + b"\1"),
        of_update(update, scale=np.nextafter(1.0, 2.0)),
        of_update(update[:4], update[4:]),
        of_update(update[:5], update[5:]),
        of_update(update, np.zeros(0)),
        of_update(np.zeros(0), update),
        of_update(update.view(np.int64)),
        of_update(update.view(np.float32)),
        of_update(-update),
        of_update(update[:-1]),
        of_update(np.append(update, 0.0)),
    ]
    assert len(set(made)) == len(made)
    for threads in (1, 2, 7):
        assert of_update(update, threads=threads) == made[0]
    large = np.ones(5 * PIECE + 1, np.float32)
    assert of_update(large, threads=1) == of_update(large, threads=4)


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_digesting_a_sum_that_is_not_finite_is_refused(strange, kind):
    for place in (0, 2**15 - 1, 2**15, PIECE - 1, PIECE, PIECE + 6):
        update = np.zeros(PIECE + 7, kind)
        update[place] = strange
        with pytest.raises(InvalidInput, match="NaN or an infinity"):
            of_update(update, threads=2)
