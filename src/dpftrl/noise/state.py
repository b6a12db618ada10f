"""The state of a noise stream as a file: safetensors, with a header that is checked first.

Whoever reads a state can take the noise off released models, so the file is for its owner alone
(mode 0600). A seal, keyed, over header and content shows every flipped bit.
"""

import hmac
from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, final

import msgspec
import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpftrl._internal.arrays import Array
from dpftrl._internal.compiled import all_finite
from dpftrl._internal.storage import replace_secretly
from dpftrl._internal.threads import parallel_map
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.noise.key import NoiseKey, Secret

DIGEST_BYTES: Final = 16
# Coordinates that are digested at a time, each by one of several threads. Many, since every call
# costs something.
PIECE: Final = 2**19
# The cipher counts the bytes of one call in 31 bits.
MOST_AT_ONCE: Final = 2**30
# Fixed: see `Digest`.
NONCE: Final = bytes(12)


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
    for tag in parallel_map(of_piece, pieces, threads):
        whole.add(tag.secret_bytes())
    return whole.finish()


def _digest_of_piece(key: NoiseKey, piece: Array) -> Secret:
    if piece.dtype != np.int64 and not all_finite(piece):
        raise InvalidInput("the update has a NaN or an infinity; nothing was changed")
    digest = Digest(key)
    digest.add(piece.view(np.uint8).data)
    return digest.finish()


@final
class Buffer:
    """A model-sized vector that is as secret as the noise, and does not show."""

    __slots__ = ("array",)

    def __init__(self, array: Array):
        self.array = array

    def __repr__(self) -> str:
        return "Buffer(secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Buffer is not for pickling or copying")


@final
class NoiseState:
    """Where a stream stands.

    Attributes:
        round: Rounds made.
        buffers: In the mechanism's order.
    """

    __slots__ = ("_digests", "buffers", "round")

    def __init__(self, round_: int, digests: Secret, buffers: list[Buffer]):
        self.round = round_
        self.buffers = buffers
        self._digests = digests

    def __repr__(self) -> str:
        return f"NoiseState(round={self.round}, secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a NoiseState is not for pickling or copying")

    @classmethod
    def start(cls) -> "NoiseState":
        """Before the first round."""
        return cls(0, Secret(b""), [])

    def after(self, digest: Secret, fresh: int, buffers: list[Buffer]) -> "NoiseState":
        """One round on, which took so many rows of Z."""
        known = self._digests.followed_by(digest, fresh)
        return NoiseState(self.round + 1, known, buffers)

    @property
    def next_row(self) -> int:
        """Rows of Z taken so far."""
        return len(self._digests.secret_bytes()) // DIGEST_BYTES

    def digest(self, row: int) -> Secret:
        """The digest of what a row covers."""
        where = slice(row * DIGEST_BYTES, (row + 1) * DIGEST_BYTES)
        return Secret(self._digests.secret_bytes()[where])

    def last_digest(self) -> Secret:
        """The digest of the last round; an empty one before the first."""
        return Secret(self._digests.secret_bytes()[-DIGEST_BYTES:])

    def tensors(self) -> dict[str, Array]:
        """What a file holds. Never keep it in a local variable: tracebacks may show those."""
        digests = np.frombuffer(self._digests.secret_bytes(), np.uint8)
        return {"digests": digests, **{f"buffer-{i}": b.array for i, b in enumerate(self.buffers)}}


class Header(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a state file says about itself."""

    mechanism: str
    mechanism_sha256: str
    round: int
    next_row: int
    size: int
    noise_multiplier: float = msgspec.field(name="sigma")  # its name in files since version 0.1
    clip_norm: float
    dtype: Literal["float32", "float64"]
    mode: Literal["buffered", "regenerating"]
    buffers: int
    key_fingerprint: str
    format: Literal["dpftrl noise state"] = "dpftrl noise state"
    version: Literal[1] = 1


def mechanism_sha256(mechanism: Mechanism) -> str:
    """Tells mechanisms apart, by family and parameters."""
    hasher = sha256(mechanism.family.encode())
    for name, value in sorted(mechanism.parameters().items()):
        content = value.tobytes() if isinstance(value, np.ndarray) else msgspec.json.encode(value)
        hasher.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return hasher.hexdigest()


def write_state(path: Path, header: Header, state: NoiseState, key: NoiseKey) -> None:
    """Write header and state, so that a crash leaves the old file or the new one."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

    text = msgspec.json.encode(header)
    metadata = {"header": text.decode(), "seal": _seal(key, text, state)}
    try:
        replace_secretly(path, lambda draft: save_file(state.tensors(), draft, metadata))
    except SafetensorError as error:
        raise InvalidInput(f"{path} cannot be written: {error}") from None


def read_state(
    path: Path, mechanism: Mechanism, key: NoiseKey, at_least: int
) -> tuple[Header, NoiseState]:
    """Read a state, or say why it must not be used."""
    loaded = _open(path)
    text = loaded.metadata.get("header", "").encode()
    try:
        header = msgspec.json.decode(text, type=Header)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"{path} is not a noise state: {error}") from None
    if header.key_fingerprint != key.fingerprint():
        raise InvalidInput(
            f"{path} belongs to key {header.key_fingerprint:.16}, not to {key.fingerprint()}"
        )
    state = loaded.state(header)
    if state is None or not hmac.compare_digest(
        _seal(key, text, state).encode(), loaded.metadata.get("seal", "").encode()
    ):
        raise InvalidInput(f"{path} was changed since it was saved: its seal does not fit")
    if header.mechanism_sha256 != mechanism_sha256(mechanism):
        raise InvalidInput(
            f"{path} was saved with {header.mechanism}, which is not this {mechanism.name}; "
            "a stream goes on with the mechanism that it began with"
        )
    if header.round < at_least:
        raise InvalidInput(
            f"{path} stands at round {header.round}, but {at_least} have been released; "
            "going on from it would release rounds twice"
        )
    return header, state


def _seal(key: NoiseKey, header: bytes, state: NoiseState) -> str:
    """A keyed digest of all of it, behind a pseudo-random function: GMAC's own must not be seen."""
    digest = Digest(key.derive(b"state"))
    digest.add(len(header).to_bytes(8, "big") + header)
    for name in sorted(state.tensors()):
        described = f"{name} {state.tensors()[name].dtype} {state.tensors()[name].size}".encode()
        digest.add(len(described).to_bytes(8, "big") + described)
        digest.add(state.tensors()[name].view(np.uint8).data)
    return key.derive(b"seal", secret=digest.finish()).secret_bytes().hex()


@final
class _Loaded:
    """What a file holds, not checked yet, and as secret as if it were."""

    def __init__(self, metadata: dict[str, str], tensors: dict[str, Array]):
        self.metadata = metadata
        self._tensors = tensors

    def __repr__(self) -> str:
        return "Loaded(secret)"

    def state(self, header: Header) -> NoiseState | None:
        """The state, if everything is there that the header speaks of, and nothing else."""
        names = {"digests", *(f"buffer-{i}" for i in range(min(header.buffers, 10**6)))}
        if set(self._tensors) != names:
            return None
        buffers = [Buffer(self._tensors[f"buffer-{i}"]) for i in range(header.buffers)]
        return NoiseState(header.round, Secret(self._tensors["digests"].tobytes()), buffers)


def _open(path: Path) -> _Loaded:
    from safetensors import SafetensorError, safe_open

    try:
        path.stat()
        opened: Any = safe_open(path, framework="numpy")
        with opened as file:
            names: list[str] = list(file.keys())
            return _Loaded(file.metadata() or {}, {name: file.get_tensor(name) for name in names})
    except SafetensorError as error:
        raise InvalidInput(f"{path} is damaged, or is no noise state: {error}") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be read: {reason}") from None
