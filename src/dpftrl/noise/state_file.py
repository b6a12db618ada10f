"""The file that holds the state of a noise stream.

It is a safetensors file with a header that is checked first. Whoever reads a state can remove the
noise from released models, so only the owner may read the file (mode 0600). A keyed seal over the
header and the content detects every change.
"""

import hmac
import stat
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Final, Literal, final

import msgspec
import numpy as np

from dpftrl._internal.arrays import Array
from dpftrl._internal.storage import replace_with
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.noise.key import DIGEST_BYTES, Digest, NoiseKey, Secret
from dpftrl.noise.round_noise import Buffer, NoiseState

# Names of number types in safetensors files.
SAFETENSORS_NAMES: Final = {"uint8": "U8", "float32": "F32", "float64": "F64"}
# Largest number of buffers that a header may announce, so that a damaged header does not fill the
# memory.
MOST_BUFFERS: Final = 10**6


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
    # The coordinates whose buffers the file holds. The field is left out if it holds all of them.
    spans: tuple[tuple[int, int], ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def shard_spans(self) -> tuple[tuple[int, int], ...]:
        """The coordinates whose buffers the file holds: `size` of them if it is a whole state."""
        return ((0, self.size),) if isinstance(self.spans, msgspec.UnsetType) else self.spans


def mechanism_sha256(mechanism: Mechanism) -> str:
    """SHA-256 of a mechanism's family and parameters."""
    hasher = sha256(mechanism.family.encode())
    for name, value in sorted(mechanism.parameters().items()):
        content = value.tobytes() if isinstance(value, np.ndarray) else msgspec.json.encode(value)
        hasher.update(f"\0{name}\0{len(content)}\0".encode() + content)
    return hasher.hexdigest()


def write_state(path: Path, header: Header, state: NoiseState, key: NoiseKey) -> None:
    """Write a state file atomically: after a crash, either the old file or the new one is there."""
    text = msgspec.json.encode(header)
    metadata = {"header": text.decode(), "seal": _seal(key, text, state)}
    replace_with(path, lambda file: _write_tensors(file, metadata, state), private=True)


def _write_tensors(file: IO[bytes], metadata: dict[str, str], state: NoiseState) -> None:
    """Write a safetensors file. Unlike the library `safetensors`, this does not copy the tensors.

    The format is a length of 8 bytes, a JSON object with the position of each tensor, padded with
    spaces to a multiple of 8, and the tensors.
    """
    entries: dict[str, Any] = {"__metadata__": metadata}
    names = sorted(state.tensors(), key=lambda name: (name == "digests", name))
    end = 0
    for name in names:
        start, end = end, end + state.tensors()[name].nbytes
        entries[name] = {
            "dtype": SAFETENSORS_NAMES[state.tensors()[name].dtype.name],
            "shape": list(state.tensors()[name].shape),
            "data_offsets": [start, end],
        }
    positions = msgspec.json.encode(entries)
    positions += b" " * (-len(positions) % 8)
    file.write(len(positions).to_bytes(8, "little") + positions)
    for name in names:
        file.write(state.tensors()[name].view(np.uint8).data)


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
        content = memoryview(self._tensors["digests"].tobytes())  # tracebacks show no content
        if len(content) % DIGEST_BYTES:
            return None
        starts = range(0, len(content), DIGEST_BYTES)
        digests = tuple(Secret(content[i : i + DIGEST_BYTES]) for i in starts)
        return NoiseState(header.round, digests, buffers)


def _load(path: Path) -> _Loaded:
    """Read a state file without any check of its content."""
    from safetensors import SafetensorError, safe_open

    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise InvalidInput(f"{path} cannot be read: it is not a file")
        opened: Any = safe_open(path, framework="numpy")
        with opened as file:
            names: list[str] = list(file.keys())
            return _Loaded(file.metadata() or {}, {name: file.get_tensor(name) for name in names})
    except SafetensorError as error:
        raise InvalidInput(f"{path} is damaged, or is not a noise state: {error}") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be read: {reason}") from None
