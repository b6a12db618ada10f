"""A keyed digest of what one row of noise will cover: 16 bytes, as secret as the noise."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final, final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput
from dpftrl.noise.kernels import all_finite
from dpftrl.noise.key import NoiseKey, Secret
from dpftrl.noise.workers import side_by_side

DIGEST_BYTES: Final = 16
# Coordinates that are digested at a time, each by one of several threads. Many, since every call
# costs something.
PIECE: Final = 2**19
# The cipher counts the bytes of one call in 31 bits.
MOST_AT_ONCE: Final = 2**30
# Fixed: see `Digest`.
NONCE: Final = bytes(12)

Array = NDArray[Any]


@final
class Digest:
    """GMAC with a fixed nonce.

    Guarantees:
        GHASH under a secret key is almost universal: two different contents of s bytes have the
        same digest with probability at most s / 16 / 2^128 over the key (McGrew and Viega 2004).
        A digest is never published; it only enters HMAC, a pseudo-random function, where universal
        hashing is enough, so that a nonce that is used again does no harm.
    """

    def __init__(self, key: NoiseKey):
        cipher = Cipher(algorithms.AES256(key.secret_bytes()), modes.GCM(NONCE))
        self._encryptor = cipher.encryptor()

    def __repr__(self) -> str:
        return "Digest(secret)"

    def add(self, content: Any) -> None:
        """Take in more bytes."""
        view = memoryview(content)
        for i in range(0, len(view), MOST_AT_ONCE):
            self._encryptor.authenticate_additional_data(view[i : i + MOST_AT_ONCE])

    def finish(self) -> Secret:
        """The digest of all of them."""
        self._encryptor.finalize()
        return Secret(self._encryptor.tag)


def digest_of_update(
    key: NoiseKey, parts: Sequence[Array], scale: float, before: Secret, threads: int
) -> Secret:
    """The digest of an update and of all before it.

    It covers the values, their unit, how they are divided into arrays, and the digest of the round
    before. Without the latter, two runs that part in one round and have equal sums in the next
    would share that next row, and the difference of their releases would undo the first.

    Pieces are digested side by side, and their digests under another key. An update with a NaN or
    an infinity is refused.
    """
    pieces = [part[i : i + PIECE] for part in parts for i in range(0, part.size, PIECE)]
    of_piece = partial(_digest_of_piece, key.derive(b"piece"))
    whole = Digest(key.derive(b"update", secret=before))
    whole.add(repr((scale, [(part.dtype.name, part.size) for part in parts])).encode())
    for tag in side_by_side(of_piece, pieces, threads):
        whole.add(tag.secret_bytes())
    return whole.finish()


def _digest_of_piece(key: NoiseKey, piece: Array) -> Secret:
    if piece.dtype != np.int64 and not all_finite(piece):
        raise InvalidInput("the update has a NaN or an infinity; nothing was changed")
    digest = Digest(key)
    digest.add(piece.view(np.uint8).data)
    return digest.finish()
