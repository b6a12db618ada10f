"""Secrets that do not show. Who holds the key and a released model can take the noise off again."""

import hmac
import os
from hashlib import sha256
from typing import Any, NoReturn, final

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpftrl.errors import InvalidInput

KEY_BYTES = 32


class Secret:
    """Bytes that cannot be printed, pickled or copied into a log by accident."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes):
        self._secret = secret

    def secret_bytes(self) -> bytes:
        """The secret itself, to store where only the server can read it."""
        return self._secret

    def followed_by(self, other: "Secret", times: int) -> "Secret":
        """This, and so many of the other, end to end."""
        return Secret(self._secret + other._secret * times)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(sha256(self._secret).digest())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} is not for pickling or copying")


@final
class NoiseKey(Secret):
    """Thirty-two secret bytes, from the operating system.

    Keep what `secret_bytes` returns as you would a private key: readable by the server alone, never
    beside a released model.

    >>> NoiseKey.generate()
    NoiseKey(secret)
    """

    __slots__ = ()

    def __init__(self, secret: bytes):
        fits = isinstance(secret, bytes) and len(secret) == KEY_BYTES  # pyright: ignore[reportUnnecessaryIsInstance]
        super().__init__(secret)
        del secret  # so that no traceback with local variables shows it
        if not fits:
            self._secret = b""
            raise InvalidInput(f"a noise key is {KEY_BYTES} bytes; NoiseKey.generate() makes one")

    @classmethod
    def generate(cls) -> "NoiseKey":
        """A fresh key."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def insecure_for_tests(cls, seed: int) -> "NoiseKey":
        """A key that anybody can guess: what it protects is not private. For tests alone."""
        return cls(sha256(b"insecure" + seed.to_bytes(16, "big", signed=True)).digest())

    def derive(
        self, purpose: bytes, public: bytes = b"", secret: Secret | None = None
    ) -> "NoiseKey":
        """A key for one purpose: HMAC-SHA256, so that none tells anything about another.

        Args:
            purpose: What it is for.
            public: What else it depends on.
            secret: What else, and may not be shown.
        """
        message = [purpose, public, b"" if secret is None else secret]
        return NoiseKey(hmac.digest(self._secret, b"".join(map(_with_length, message)), "sha256"))

    def fingerprint(self) -> str:
        """Sixteen letters that tell keys apart and give nothing away."""
        return self.derive(b"fingerprint")._secret[:8].hex()


def _with_length(part: "bytes | Secret") -> bytes:
    content = part.secret_bytes() if isinstance(part, Secret) else part
    return len(content).to_bytes(4, "big") + content


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
