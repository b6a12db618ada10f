"""The state of a noise stream as a file: safetensors, with a header that is checked first.

Whoever reads a state can take the noise off released models, so the file is for its owner alone
(mode 0600). A keyed digest over header and content shows every flipped bit.
"""

import hmac
import os
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.noise.digest import DIGEST_BYTES, Digest
from dpftrl.noise.key import NoiseKey
from dpftrl.storage import replace_secretly

Array = NDArray[Any]


@final
@dataclass(repr=False)
class NoiseState:
    """Where a stream stands.

    Attributes:
        round: Rounds made.
        digests: One for each row of Z taken so far, end to end.
        buffers: Model-sized vectors, in the mechanism's order.
    """

    round: int = 0
    digests: bytes = b""
    buffers: list[Array] = field(default_factory=list[Array])

    @property
    def next_row(self) -> int:
        """Rows of Z taken so far."""
        return len(self.digests) // DIGEST_BYTES

    def digest(self, row: int) -> bytes:
        """The digest of the sum that a row covers."""
        return self.digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]


class Header(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What a state file says about itself."""

    mechanism: str
    mechanism_sha256: str
    round: int
    next_row: int
    size: int
    sigma: float
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
    from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]

    tensors = _tensors(state)
    text = msgspec.json.encode(header)
    metadata = {"header": text.decode(), "digest": _digest(key, text, tensors).hex()}
    replace_secretly(path, lambda draft: save_file(tensors, draft, metadata))


def read_state(
    path: Path, mechanism: Mechanism, key: NoiseKey, at_least: int
) -> tuple[Header, NoiseState]:
    """Read a state, or say why it must not be used."""
    metadata, tensors = _open(path)
    text = metadata.get("header", "").encode()
    try:
        header = msgspec.json.decode(text, type=Header)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"{path} is not a noise state: {error}") from None
    if header.key_fingerprint != key.fingerprint():
        raise InvalidInput(
            f"{path} belongs to key {header.key_fingerprint}, not to {key.fingerprint()}"
        )
    if not hmac.compare_digest(_digest(key, text, tensors).hex(), metadata.get("digest", "")):
        raise InvalidInput(f"{path} was changed since it was saved: its digest does not fit")
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
    return header, _state(header, tensors)


def _tensors(state: NoiseState) -> dict[str, Array]:
    digests = np.frombuffer(state.digests, np.uint8)
    return {"digests": digests, **{f"buffer-{i}": b for i, b in enumerate(state.buffers)}}


def _state(header: Header, tensors: dict[str, Array]) -> NoiseState:
    buffers = [tensors[f"buffer-{i}"] for i in range(header.buffers)]
    return NoiseState(header.round, tensors["digests"].tobytes(), buffers)


def _digest(key: NoiseKey, header: bytes, tensors: dict[str, Array]) -> bytes:
    digest = Digest(key.derive(b"state"))
    digest.add(len(header).to_bytes(8, "big") + header)
    for name in sorted(tensors):
        described = f"{name} {tensors[name].dtype} {tensors[name].size}".encode()
        digest.add(len(described).to_bytes(8, "big") + described)
        digest.add(tensors[name].view(np.uint8).data)
    return digest.finish()


def _open(path: Path) -> tuple[dict[str, str], dict[str, Array]]:
    from safetensors import SafetensorError, safe_open

    try:
        os.stat(path)
        opened: Any = safe_open(path, framework="numpy")
        with opened as file:
            metadata: dict[str, str] = file.metadata() or {}
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InvalidInput(f"{path} is damaged, or is no noise state: {error}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be read: {reason}") from None
