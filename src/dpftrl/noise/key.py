"""Noise keys, the keystreams that they generate, and keyed digests of sums.

Whoever has a noise key and a released model can remove the noise from the model. Keys are therefore
wrapped so that they do not appear in logs, tracebacks or pickles.
"""

import hmac
import os
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from typing import Any, Final, NoReturn, final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpftrl._internal.compiled import all_finite
from dpftrl._internal.threads import parallel_map
from dpftrl.errors import InvalidInput

KEY_BYTES = 32  # an AES-256 key
BLOCK_BYTES = 16  # one AES block
DIGEST_BYTES: Final = 16
# Coordinates that one thread digests at a time. The number is large because every call has a fixed
# cost.
PIECE: Final = 2**19
# Largest number of bytes in one call of the cipher, which counts bytes in 31 bits.
MOST_AT_ONCE: Final = 2**30
# The nonce is fixed; `Digest` explains why that is safe.
NONCE: Final = bytes(12)


class Secret:
    """Bytes that cannot be printed, pickled or copied into a log by accident."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes | memoryview):
        """Keep a secret. If it is given as a memoryview, no traceback of this method shows it."""
        self._secret = bytes(secret)

    def secret_bytes(self) -> bytes:
        """The secret itself, to store where only the server can read it."""
        return self._secret

    def json_string(self) -> bytes:
        """The secret as a JSON string of hexadecimal digits, for files of the server."""
        return b'"' + self._secret.hex().encode() + b'"'

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(sha256(self._secret).digest())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} cannot be pickled or copied")


@final
class NoiseKey(Secret):
    """Thirty-two secret bytes from the operating system's random number generator.

    Store the result of `secret_bytes` like a private key: only the server may read it, and it must
    never be stored beside a released model.

    >>> NoiseKey.generate()
    NoiseKey(secret)
    """

    __slots__ = ()

    def __init__(self, secret: bytes | memoryview):
        fits = isinstance(secret, bytes | memoryview) and len(secret) == KEY_BYTES  # pyright: ignore[reportUnnecessaryIsInstance]
        self._secret = bytes(secret) if fits else b""
        del secret  # so that no traceback that prints local variables shows it
        if not fits:
            raise InvalidInput(
                f"a noise key must be {KEY_BYTES} bytes; NoiseKey.generate() creates one"
            )

    @classmethod
    def generate(cls) -> "NoiseKey":
        """Create a new random key."""
        return cls(memoryview(os.urandom(KEY_BYTES)))

    @classmethod
    def insecure_for_tests(cls, seed: int) -> "NoiseKey":
        """Create a key that anybody can guess. Use it in tests only: it gives no privacy."""
        return cls(sha256(b"insecure" + seed.to_bytes(16, "big", signed=True)).digest())

    def derive(
        self, purpose: bytes, public: bytes = b"", secret: Secret | None = None
    ) -> "NoiseKey":
        """Derive a key with HMAC-SHA256, so that derived keys reveal nothing about one another.

        Args:
            purpose: Name of the purpose.
            public: Public data that the key also depends on.
            secret: Secret data that the key also depends on.
        """
        message = [purpose, public, b"" if secret is None else secret]
        parts = memoryview(b"".join(map(_with_length, message)))
        return NoiseKey(memoryview(hmac.digest(self._secret, parts, "sha256")))

    def fingerprint(self) -> str:
        """Sixteen hexadecimal digits that identify the key and reveal nothing about it."""
        return self.derive(b"fingerprint")._secret[:8].hex()


def _with_length(part: "bytes | Secret") -> bytes:
    """The bytes of `part` after their length, so that a concatenation is unambiguous."""
    if isinstance(part, Secret):
        return len(part.secret_bytes()).to_bytes(4, "big") + part.secret_bytes()
    return len(part).to_bytes(4, "big") + part


@final
class Keystream:
    """AES-256 keystream in counter mode, from a given block on."""

    def __init__(self, key: NoiseKey, first_block: int = 0):
        counter = first_block.to_bytes(BLOCK_BYTES, "big")
        cipher = Cipher(algorithms.AES256(key.secret_bytes()), modes.CTR(counter))
        self._encryptor = cipher.encryptor()

    def __repr__(self) -> str:
        return "Keystream(secret)"

    def fill(self, zeros: Any, out: Any) -> None:
        """Write the next bytes of the keystream to `out`.

        Args:
            zeros: Zero bytes, as many as to write.
            out: Destination. It must have 15 bytes more than are written.
        """
        self._encryptor.update_into(zeros, out)


def row_key(key: NoiseKey, row: int, digest: Secret) -> NoiseKey:
    """Derive the key of one row of Z from the stream's key and the digest of the sums it covers."""
    return key.derive(b"row", row.to_bytes(8, "big"), digest)


@final
class Digest:
    """Keyed digest of bytes: GMAC with a fixed nonce.

    Guarantees:
        GHASH under a secret key is almost universal: two different contents of s bytes have the
        same digest with probability at most s / 16 / 2^128 over the key (McGrew and Viega 2004).
        A digest is never published. It is only an input of HMAC, a pseudo-random function, for
        which universal hashing is enough. Reusing the nonce therefore does no harm.
    """

    def __init__(self, key: NoiseKey):
        cipher = Cipher(algorithms.AES256(key.secret_bytes()), modes.GCM(NONCE))
        self._encryptor = cipher.encryptor()

    def __repr__(self) -> str:
        return "Digest(secret)"

    def add(self, content: Any) -> None:
        """Append bytes to the content."""
        view = memoryview(content)
        for i in range(0, len(view), MOST_AT_ONCE):
            self._encryptor.authenticate_additional_data(view[i : i + MOST_AT_ONCE])

    def finish(self) -> Secret:
        """Digest of the whole content."""
        self._encryptor.finalize()
        return Secret(memoryview(self._encryptor.tag))


def digest_of_update(
    key: NoiseKey,
    parts: Sequence[memoryview],
    scale: float,
    previous: Secret,
    threads: int,
    covered: bytes = b"",
) -> Secret:
    """Digest of a sum and of all sums of earlier rounds.

    The digest covers the values, their unit, their division into arrays, and the digest of the
    previous round. The digest of the previous round is necessary: two runs with different sums in
    one round and equal sums in the next would otherwise share the row of Z of that next round, and
    the difference of their releases would reveal the noise of the first.

    Threads digest pieces of the sum in parallel; a digest with another key combines the results.

    Args:
        key: The stream's key.
        parts: The arrays of the sum, as memoryviews: no traceback shows the content of these.
        scale: Standard deviation of Z in the unit of the arrays.
        previous: Digest of the previous round; empty before the first.
        threads: Number of threads.
        covered: Further bytes that the digest covers, such as the clip norm of the round.

    Raises:
        InvalidInput: The sum contains a NaN or an infinity.
    """
    pieces = [part[i : i + PIECE] for part in parts for i in range(0, len(part), PIECE)]
    of_piece = partial(_digest_of_piece, key.derive(b"piece"))
    whole = Digest(key.derive(b"update", covered, previous))
    whole.add(repr((scale, [(np.asarray(part).dtype.name, len(part)) for part in parts])).encode())
    for tag in parallel_map(of_piece, pieces, threads):
        whole.add(memoryview(tag.secret_bytes()))
    return whole.finish()


def _digest_of_piece(key: NoiseKey, piece: memoryview) -> Secret:
    if np.asarray(piece).dtype != np.int64 and not all_finite(np.asarray(piece)):
        raise InvalidInput("the update has a NaN or an infinity; nothing was changed")
    digest = Digest(key)
    digest.add(piece.cast("B"))
    return digest.finish()
