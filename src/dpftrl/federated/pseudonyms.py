"""Names under which clients appear in files: keyed hashes, by default."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput
from dpftrl.noise import NoiseKey

Keys = NDArray[np.uint64]

# A letter first, so that nobody takes a pseudonym for a number.
PREFIX: Final = "c"
# Names whose pseudonyms are remembered.
MOST_REMEMBERED: Final = 1_000_000


@final
class Pseudonyms:
    """Keyed hashes of 64 bits: without the key of the run, nobody can tell whose they are."""

    def __init__(self, key: NoiseKey):
        self._key = key.derive(b"pseudonyms")
        self._known: dict[str, int] = {}

    def __repr__(self) -> str:
        return "Pseudonyms(secret)"

    def keys(self, names: Sequence[str]) -> Keys:
        """The pseudonym of each name, as a number."""
        return np.fromiter((self.key(name) for name in names), np.uint64, len(names))

    def key(self, name: str) -> int:
        """The pseudonym of a name, as a number."""
        found = self._known.get(name) if type(name) is str else None
        if found is None:
            digest = blake2b(_content(name), digest_size=8, key=self._key.secret_bytes()).digest()
            found = int.from_bytes(digest, "big")
            if len(self._known) < MOST_REMEMBERED:
                self._known[name] = found
        return found


def _content(name: str) -> bytes:
    if type(name) is not str or not name:
        raise InvalidInput(f"a client's name is a text that is not empty, got {name!r:.60}")
    try:
        return name.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"a client's name must be valid Unicode, got {name!r:.60}") from None


def written(key: int) -> str:
    """A pseudonym as it stands in files."""
    return f"{PREFIX}{key:016x}"
