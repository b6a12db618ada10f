"""The key of the noise. Who holds it and a released model can take the noise off again."""

import hmac
import os
from hashlib import sha256
from typing import NoReturn, final

from dpftrl.errors import InvalidInput

KEY_BYTES = 32


@final
class NoiseKey:
    """Thirty-two secret bytes, from the operating system.

    It cannot be printed, pickled or copied into a log by accident. Keep what `secret_bytes` returns
    as you would a private key: readable by the server alone, never beside a released model.

    >>> NoiseKey.generate()
    NoiseKey(secret)
    """

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes):
        if not isinstance(secret, bytes) or len(secret) != KEY_BYTES:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInput(f"a noise key is {KEY_BYTES} bytes; NoiseKey.generate() makes one")
        self._secret = secret

    @classmethod
    def generate(cls) -> "NoiseKey":
        """A fresh key."""
        return cls(os.urandom(KEY_BYTES))

    @classmethod
    def insecure_for_tests(cls, seed: int) -> "NoiseKey":
        """A key that anybody can guess: what it protects is not private. For tests alone."""
        return cls(sha256(b"insecure" + seed.to_bytes(16, "big", signed=True)).digest())

    def secret_bytes(self) -> bytes:
        """The secret itself, to store where only the server can read it."""
        return self._secret

    def derive(self, purpose: bytes, content: bytes = b"") -> "NoiseKey":
        """A key for one purpose: HMAC-SHA256, so that none tells anything about another."""
        message = len(purpose).to_bytes(1, "big") + purpose + content
        return NoiseKey(hmac.digest(self._secret, message, "sha256"))

    def fingerprint(self) -> str:
        """Sixteen letters that tell keys apart and give nothing away."""
        return self.derive(b"fingerprint")._secret[:8].hex()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoiseKey) and hmac.compare_digest(self._secret, other._secret)

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __repr__(self) -> str:
        return "NoiseKey(secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a noise key is not for pickling; store secret_bytes() with care")
