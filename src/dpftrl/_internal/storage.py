"""Reading and replacing files so that a mistake or a crash loses nothing."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from dpftrl.errors import InvalidInput

MOST_BYTES = 64 * 2**20
# Names the folder for what must outlive a run's own folder.
STATE = "DPFTRL_STATE"

Content = TypeVar("Content")


def default_state_folder() -> Path:
    """$DPFTRL_STATE, or `dpftrl` in the user's state folder."""
    if given := os.environ.get(STATE):
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "dpftrl"


def read_json(path: Path, kind: type[Content], what: str) -> Content:
    """The JSON of a file, checked against its type."""
    content = read_file(path)
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        why = _other_file(content, what) or error
        raise InvalidInput(f"{path} is not a {what} file: {why}") from None


def _other_file(content: bytes, what: str) -> str | None:
    """Which of our files it is, if it is another than was wanted."""
    try:
        found = msgspec.json.decode(content, type=_AnyOfOurs).format
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    is_other = found.startswith("dpftrl ") and found != f"dpftrl {what}"
    return f"it holds a {found[:40]!r}" if is_other else None


class _AnyOfOurs(msgspec.Struct):
    format: str


def read_file(path: Path, limit: int = MOST_BYTES) -> bytes:
    """The bytes of a file that is not absurdly large."""
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise InvalidInput(f"{path} is not a file")
        if size > limit:
            raise InvalidInput(f"{path} has {size:,} bytes, more than any file of ours")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be read: {reason}") from None


def replace_file(path: Path, content: bytes) -> None:
    """Write beside the target first, so that a crash leaves the old file or the new one."""
    if not path.name:
        raise InvalidInput(f"{path} cannot be written: it is a folder")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be written: {reason}") from None


def replace_secretly(path: Path, write: Callable[[Path], None]) -> None:
    """Replace a file that only its owner may read; on return it is on the disk.

    Args:
        path: The file.
        write: Writes the content to the path that it is given.
    """
    if not path.name:
        raise InvalidInput(f"{path} cannot be written: it is a folder")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        # Made with its mode before anything is in it, so that nobody can open it in between.
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        write(draft)
        draft.chmod(0o600)
        flush(draft)
        draft.replace(path)
        flush(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)
        if not isinstance(error, OSError | ValueError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be written: {reason}") from None


def replace_durably(path: Path, content: bytes) -> None:
    """As `replace_secretly`, with the content at hand."""
    replace_secretly(path, lambda draft: _overwrite(draft, content))


def append_durably(path: Path, content: bytes, at: int) -> None:
    """Write at the end of a file that only its owner may read; on return it is on the disk.

    If that fails, on a full disk for one, the file is as long as it was.

    Args:
        path: The file; made if it is not there.
        content: What to write.
        at: How long the file is; anything after that is cut off first. A shorter one is refused.
    """
    try:
        is_new = not path.exists()
        handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(handle).st_size < at:
                raise InvalidInput(f"{path} has lost some of its {at:,} bytes; nothing was written")
            _write_from(handle, content, at)
        finally:
            os.close(handle)
        if is_new:
            flush(path.parent)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None


def _overwrite(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _write_from(handle: int, content: bytes, at: int) -> None:
    os.ftruncate(handle, at)
    try:
        written = 0
        while written < len(content):
            written += os.pwrite(handle, content[written:], at + written)
        os.fsync(handle)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, at)
        raise


def flush(path: Path) -> None:
    """Wait until a file, or what is in a folder, is on the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None
