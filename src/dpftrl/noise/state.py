"""The state of a noise stream: keyed digests of the sums, buffers, and the state file.

A state file is a safetensors file with a header that is checked first. Whoever reads a state can
remove the noise from released models, so only the owner may read the file (mode 0600). A keyed seal
over the header and the content detects every change.
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
# Coordinates that one thread digests at a time. The number is large because every call has a cost.
PIECE: Final = 2**19
# Most bytes in one call of the cipher, which counts them in 31 bits.
MOST_AT_ONCE: Final = 2**30
# The nonce is fixed; `Digest` explains why that is safe.
NONCE: Final = bytes(12)
# Most buffers that a header may announce, so that a damaged header does not fill the memory.
MOST_BUFFERS: Final = 10**6


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
        return Secret(self._encryptor.tag)


def digest_of_update(
    key: NoiseKey, parts: Sequence[Array], scale: float, previous: Secret, threads: int
) -> Secret:
    """Digest of a sum and of all sums of earlier rounds.

    The digest covers the values, their unit, their division into arrays, and the digest of the
    previous round. The last one is necessary: two runs with different sums in one round and equal
    sums in the next would otherwise share the row of Z of that next round, and the difference of
    their releases would reveal the noise of the first.

    Threads digest pieces of the sum in parallel; a digest with another key combines the results.

    Args:
        key: The stream's key.
        parts: The arrays of the sum.
        scale: Standard deviation of Z in the unit of the arrays.
        previous: Digest of the previous round; empty before the first.
        threads: Number of threads.

    Raises:
        InvalidInput: The sum contains a NaN or an infinity.
    """
    pieces = [part[i : i + PIECE] for part in parts for i in range(0, part.size, PIECE)]
    of_piece = partial(_digest_of_piece, key.derive(b"piece"))
    whole = Digest(key.derive(b"update", secret=previous))
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
    """A model-sized vector that is as secret as the noise, and so never printed."""

    __slots__ = ("array",)

    def __init__(self, array: Array):
        self.array = array

    def __repr__(self) -> str:
        return "Buffer(secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Buffer cannot be pickled or copied")


@final
class NoiseState:
    """State of a noise stream between two rounds.

    Attributes:
        round: Number of rounds completed.
        buffers: The mechanism's buffers, in the order of `StreamState.buffers`.
    """

    __slots__ = ("_digests", "buffers", "round")

    def __init__(self, round_: int, digests: Secret, buffers: list[Buffer]):
        self.round = round_
        self.buffers = buffers
        self._digests = digests

    def __repr__(self) -> str:
        return f"NoiseState(round={self.round}, secret)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a NoiseState cannot be pickled or copied")

    @classmethod
    def start(cls) -> "NoiseState":
        """The state before the first round."""
        return cls(0, Secret(b""), [])

    def after(self, digest: Secret, fresh: int, buffers: list[Buffer]) -> "NoiseState":
        """The state after one more round.

        Args:
            digest: Digest of the round.
            fresh: Number of new rows of Z that the round used.
            buffers: The buffers after the round.
        """
        digests = self._digests.followed_by(digest, fresh)
        return NoiseState(self.round + 1, digests, buffers)

    @property
    def next_row(self) -> int:
        """Number of rows of Z used so far."""
        return len(self._digests.secret_bytes()) // DIGEST_BYTES

    def digest(self, row: int) -> Secret:
        """Digest of the sums that a row of Z covers."""
        position = slice(row * DIGEST_BYTES, (row + 1) * DIGEST_BYTES)
        return Secret(self._digests.secret_bytes()[position])

    def last_digest(self) -> Secret:
        """Digest of the last round; empty before the first."""
        return Secret(self._digests.secret_bytes()[-DIGEST_BYTES:])

    def tensors(self) -> dict[str, Array]:
        """The arrays of the state file.

        Never keep the result in a local variable: tracebacks may show local variables.
        """
        digests = np.frombuffer(self._digests.secret_bytes(), np.uint8)
        return {"digests": digests, **{f"buffer-{i}": b.array for i, b in enumerate(self.buffers)}}


class Header(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Header of a state file."""

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
    """SHA-256 of a mechanism's family and parameters."""
    hasher = sha256(mechanism.family.encode())
    for name, value in sorted(mechanism.parameters().items()):
        content = value.tobytes() if isinstance(value, np.ndarray) else msgspec.json.encode(value)
        hasher.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return hasher.hexdigest()


def write_state(path: Path, header: Header, state: NoiseState, key: NoiseKey) -> None:
    """Write a state file atomically: after a crash there is the old file or the new one."""
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
    """Read a state file and check that it may be used.

    Args:
        path: The file.
        mechanism: The mechanism that the state must belong to.
        key: The key that the state must belong to.
        at_least: Number of rounds that were released already.

    Raises:
        InvalidInput: The file is damaged or was changed, belongs to another key or mechanism, or
            is older than the last release.
    """
    loaded = _load(path)
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
        raise InvalidInput(f"{path} was changed since it was saved: its seal is wrong")
    if header.mechanism_sha256 != mechanism_sha256(mechanism):
        raise InvalidInput(
            f"{path} was saved with {header.mechanism}, which is not this {mechanism.name}; "
            "resume a stream with the mechanism that it was created with"
        )
    if header.round < at_least:
        raise InvalidInput(
            f"{path} is the state after {header.round} rounds, but {at_least} have been released; "
            "resuming from it would release rounds twice"
        )
    return header, state


def _seal(key: NoiseKey, header: bytes, state: NoiseState) -> str:
    """Keyed seal over header and state, in hexadecimal digits.

    It is the digest of both, passed through a pseudo-random function, because a digest with a fixed
    nonce must not be published.
    """
    digest = Digest(key.derive(b"state"))
    digest.add(len(header).to_bytes(8, "big") + header)
    for name in sorted(state.tensors()):
        described = f"{name} {state.tensors()[name].dtype} {state.tensors()[name].size}".encode()
        digest.add(len(described).to_bytes(8, "big") + described)
        digest.add(state.tensors()[name].view(np.uint8).data)
    return key.derive(b"seal", secret=digest.finish()).secret_bytes().hex()


@final
class _Loaded:
    """Content of a state file that was not checked yet. It is secret all the same."""

    def __init__(self, metadata: dict[str, str], tensors: dict[str, Array]):
        self.metadata = metadata
        self._tensors = tensors

    def __repr__(self) -> str:
        return "Loaded(secret)"

    def state(self, header: Header) -> NoiseState | None:
        """The state, if the file contains exactly the arrays that the header announces."""
        names = {"digests", *(f"buffer-{i}" for i in range(min(header.buffers, MOST_BUFFERS)))}
        if set(self._tensors) != names:
            return None
        buffers = [Buffer(self._tensors[f"buffer-{i}"]) for i in range(header.buffers)]
        return NoiseState(header.round, Secret(self._tensors["digests"].tobytes()), buffers)


def _load(path: Path) -> _Loaded:
    """Read a state file without any check of its content."""
    from safetensors import SafetensorError, safe_open

    try:
        path.stat()
        opened: Any = safe_open(path, framework="numpy")
        with opened as file:
            names: list[str] = list(file.keys())
            return _Loaded(file.metadata() or {}, {name: file.get_tensor(name) for name in names})
    except SafetensorError as error:
        raise InvalidInput(f"{path} is damaged, or is not a noise state: {error}") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be read: {reason}") from None
