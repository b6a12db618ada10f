"""The secret bytes that the journal's digests are made with. Nothing here shows them."""

import hmac
from pathlib import Path
from typing import Final

from dpftrl.errors import UnsafeState
from dpftrl.storage import read_file

KEY_BYTES: Final = 32


def read_key(path: Path) -> bytes:
    """The noise key of a run."""
    key = read_file(path, limit=2**20)
    if len(key) != KEY_BYTES:
        raise UnsafeState(f"{path} is no noise key: it has {len(key)} bytes, not {KEY_BYTES}")
    return key


def derived(key: bytes, purpose: bytes) -> bytes:
    """HMAC-SHA256 of three parts, each with its length before it; the last two are empty."""
    parts = (purpose, b"", b"")
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.digest(key, message, "sha256")


def fingerprint(key: bytes) -> str:
    """What tells keys apart and gives nothing away."""
    return derived(key, b"fingerprint")[:8].hex()
