"""The journal of a run: one line a decision, on the disk before anything follows from it.

Every line carries a keyed digest of itself and of all lines before it, so that nobody without the
key can change, drop or reorder any but the last ones; and those the witness remembers.
"""

import hmac
from collections.abc import Iterator
from pathlib import Path
from typing import Final, final

import msgspec

from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.federated.records import AnyRecord
from dpftrl.noise import NoiseKey
from dpftrl.storage import append_durably, replace_durably

# Before the first line.
START: Final = "0" * 64


class Line(msgspec.Struct, forbid_unknown_fields=True):
    """A record and its digest."""

    mac: str
    record: msgspec.Raw


@final
class Journal:
    """A journal that can be continued.

    Attributes:
        lines: How many it has.
        mac: The digest of the last.
    """

    def __init__(self, path: Path, key: NoiseKey):
        self._path = path
        self._key = key.derive(b"journal")
        self._bytes = 0
        self.lines = 0
        self.mac = START

    def __repr__(self) -> str:
        return f"Journal({self._path}, {self.lines} lines)"

    def append(self, record: AnyRecord) -> None:
        """Add a line; on return it is on the disk."""
        try:
            content = msgspec.json.encode(record)
        except UnicodeEncodeError:
            raise InvalidInput("the journal holds valid Unicode, and nothing else") from None
        _decoded(content)  # what could not be read back must never be written
        mac = self._mac(content)
        line = msgspec.json.encode(Line(mac, msgspec.Raw(content))) + b"\n"
        if self.lines:
            append_durably(self._path, line, self._bytes)
        else:  # a journal has a first line, or does not exist
            replace_durably(self._path, line)
        self._move(line, mac)

    def read(self) -> Iterator[tuple[AnyRecord, str]]:
        """Go through all lines, from the first, with the digest of each.

        A last line that was only half written is left out: nothing followed from it. If it is not
        that but was cut or changed, the witness knows.
        """
        try:
            with self._path.open("rb") as file:
                yield from self._read(file)
        except OSError as error:
            raise InvalidInput(f"{self._path} cannot be read: {error.strerror}") from None

    def _read(self, file: Iterator[bytes]) -> Iterator[tuple[AnyRecord, str]]:
        for line in file:
            known = self._authentic(line)
            if known is None:
                if next(file, None) is not None:
                    raise UnsafeState(
                        f"{self._path}: line {self.lines + 1} was changed, or a line before it is "
                        "missing; the run cannot go on from it"
                    )
                return
            self._move(line, known.mac)
            yield _decoded(bytes(known.record)), known.mac

    def _authentic(self, line: bytes) -> Line | None:
        try:
            known = msgspec.json.decode(line, type=Line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        whole = line.endswith(b"\n")
        fits = hmac.compare_digest(known.mac.encode(), self._mac(bytes(known.record)).encode())
        return known if whole and fits else None

    def _mac(self, content: bytes) -> str:
        message = bytes.fromhex(self.mac) + content
        return hmac.digest(self._key.secret_bytes(), message, "sha256").hex()

    def _move(self, line: bytes, mac: str) -> None:
        self._bytes += len(line)
        self.lines += 1
        self.mac = mac


def _decoded(content: bytes) -> AnyRecord:
    try:
        return msgspec.json.decode(content, type=AnyRecord)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"the journal cannot hold this: {error}") from None
