"""AES-256 in counter mode: the bits behind the noise, at any place, without storing them.

Every row of Z has a key of its own, made from the noise key, the number of the row and a digest of
the sum that the row will cover. The same sum gives the same row again; any other sum gets a row
that has nothing to do with it. So no mistake with states, not even running an old copy of one, can
put the same noise on two different sums.
"""

from typing import Any, final

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpftrl.noise.key import NoiseKey

BLOCK_BYTES = 16
DIGEST_BYTES = 16
# Fixed: see `Digest`.
DIGEST_NONCE = bytes(12)


@final
class Keystream:
    """The keystream of one key from a block on, in pieces."""

    def __init__(self, key: NoiseKey, first_block: int = 0):
        counter = first_block.to_bytes(BLOCK_BYTES, "big")
        cipher = Cipher(algorithms.AES256(key.secret_bytes()), modes.CTR(counter))
        self._encryptor = cipher.encryptor()

    def __repr__(self) -> str:
        return "Keystream(secret)"

    def fill(self, zeros: Any, out: Any) -> None:
        """Write the next bytes, as many as there are `zeros`; `out` has room for 15 more."""
        self._encryptor.update_into(zeros, out)


@final
class Digest:
    """A keyed digest of what one row of noise will cover: 16 bytes, as secret as the noise.

    Guarantees:
        GHASH under a secret key is almost universal: two different sums of s bytes have the same
        digest with probability at most s / 16 / 2^128 over the key (McGrew and Viega 2004). The
        digest is never published; it only enters HMAC, a pseudo-random function, where universal
        hashing is enough (so that one fixed nonce does no harm).
    """

    def __init__(self, key: NoiseKey):
        secret = key.derive(b"digest")
        cipher = Cipher(algorithms.AES256(secret.secret_bytes()), modes.GCM(DIGEST_NONCE))
        self._encryptor = cipher.encryptor()

    def __repr__(self) -> str:
        return "Digest(secret)"

    def add(self, content: Any) -> None:
        """Take in more bytes."""
        self._encryptor.authenticate_additional_data(content)

    def finish(self) -> bytes:
        """The digest of all of them."""
        self._encryptor.finalize()
        return self._encryptor.tag


def row_key(key: NoiseKey, row: int, digest: bytes) -> NoiseKey:
    """The key of one row of Z."""
    return key.derive(b"row", row.to_bytes(8, "big") + digest)
