"""Tasks that take long to read are kept in the cache, as arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Self, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl.cache import load_tensors, store_tensors
from dpftrl.tasks.task import Options
from dpftrl.tasks.users import Users
from dpftrl.tasks.vocabulary import Vocabulary

# Goes into the names of cached files: a change to how text is cut or encoded needs a new one.
FORMAT = 1


class Encoded(NamedTuple):
    """A task before anybody is held out."""

    vocabulary: Vocabulary
    users: Users
    public: NDArray[np.int32]


@final
@dataclass(frozen=True)
class Store:
    """The place of one task, as it was asked for, in the cache."""

    folder: Path
    key: str

    @classmethod
    def of(cls, folder: Path, name: str, options: Options, data_sha256: str) -> Self:
        """What does not change the encoding is left out."""
        words = options.vocabulary.sha256 if options.vocabulary else options.vocabulary_size
        asked = (FORMAT, data_sha256, words, options.sentence_length, options.sentences_per_user)
        return cls(folder, f"{name}-{sha256(msgspec.json.encode(asked)).hexdigest()[:32]}")

    def load(self) -> Encoded | None:
        """What is there, unless it is damaged."""
        held: dict[str, Any] = load_tensors(self.folder, self.key) or {}
        digest = held.pop("sha256", None)
        if digest is None or digest.tobytes() != _digest(held).tobytes():
            return None
        users = Users(_strings(held["names"]), held["sentences"], held["offsets"])
        return Encoded(Vocabulary(_strings(held["words"])), users, held["public"])

    def save(self, encoded: Encoded) -> None:
        """Put it there; where that is impossible, do without."""
        users = encoded.users
        held: dict[str, NDArray[Any]] = {
            "names": _bytes(users.names),
            "sentences": users.sentences,
            "offsets": users.offsets,
            "words": _bytes(encoded.vocabulary.words),
            "public": encoded.public,
        }
        held["sha256"] = _digest(held)
        store_tensors(self.folder, self.key, held)


def _digest(held: Mapping[str, NDArray[Any]]) -> NDArray[np.uint8]:
    """Over everything, so that no damage goes unseen."""
    digest = sha256()
    for name, values in sorted(held.items()):
        digest.update(f"{name} {values.dtype} {values.shape}\n".encode())
        digest.update(np.ascontiguousarray(values).data)
    return np.frombuffer(digest.digest(), dtype=np.uint8)


def _bytes(strings: tuple[str, ...]) -> NDArray[np.uint8]:
    """Names and words have no line breaks, so that these can part them."""
    return np.frombuffer("\n".join(strings).encode(), dtype=np.uint8)


def _strings(content: NDArray[np.uint8]) -> tuple[str, ...]:
    return tuple(content.tobytes().decode().split("\n"))
