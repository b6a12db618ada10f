"""AES-256 in counter mode: the bits behind the noise, at any place, without storing them.

Every row of Z has a key of its own, made from the noise key, the number of the row and a digest of
the sums that the row covers: that of its own round, and those of all rounds before, because rows of
the strategy reach back. The same sums give the same row again; anything else gets a row that has
nothing to do with it. So no mistake with states, not even running an old copy of one, can put the
same noise on two different sums.
"""

from typing import Any, final

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpftrl.noise.key import NoiseKey, Secret

BLOCK_BYTES = 16


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


def row_key(key: NoiseKey, row: int, digest: Secret) -> NoiseKey:
    """The key of one row of Z."""
    return key.derive(b"row", row.to_bytes(8, "big"), digest)
