"""Read, replace and append to files so that a mistake or a crash loses nothing."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from dpftrl.errors import InvalidInput

MOST_BYTES = 64 * 2**20  # far more than any file that is read whole
# The environment variable with the folder for state that must outlive the folder of a run.
STATE = "DPFTRL_STATE"

Content = TypeVar("Content")


def default_state_folder() -> Path:
    """The folder for state outside a run: $DPFTRL_STATE, or `dpftrl` in the user's state folder."""
    if given := os.environ.get(STATE):
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "dpftrl"


def read_json(path: Path, kind: type[Content], what: str) -> Content:
    """Read a JSON file and check it against its type.

    Args:
        path: The file.
        kind: The type of its content.
        what: The kind of file, for messages, such as "plan".

    Raises:
        InvalidInput: The file cannot be read, or is not of this kind.
    """
    content = read_file(path)
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        reason = _other_format(content, what) or error
        raise InvalidInput(f"{path} is not a {what} file: {reason}") from None


def _other_format(content: bytes, what: str) -> str | None:
    """A message that names the format, if this is another kind of dpftrl file; else None."""
    try:
        name = msgspec.json.decode(content, type=_Header).format
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    is_other = name.startswith("dpftrl ") and name != f"dpftrl {what}"
    return f"it holds a {name[:40]!r}" if is_other else None


class _Header(msgspec.Struct):
    """The field that all JSON files of dpftrl have."""

    format: str


def read_file(path: Path, limit: int = MOST_BYTES) -> bytes:
    """Read a whole file.

    Raises:
        InvalidInput: It cannot be read, is not a regular file, or has more than `limit` bytes.
    """
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise InvalidInput(f"{path} is not a file")
        if size > limit:
            raise InvalidInput(f"{path} has {size:,} bytes; the limit is {limit:,}")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be read: {reason}") from None


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file so that a crash leaves either the old file or the new one.

    The content is written to a draft in the same folder, which then replaces the file.
    """
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
    """Replace a file that only its owner can read. On return it is safely on the disk.

    Args:
        path: The file.
        write: A function that writes the content to the path that it is called with.
    """
    if not path.name:
        raise InvalidInput(f"{path} cannot be written: it is a folder")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        # Created empty with its final mode, so that no other user can open it before `chmod`.
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
    """Replace a file with this content; otherwise like `replace_secretly`."""
    replace_secretly(path, lambda draft: _overwrite(draft, content))


def append_durably(path: Path, content: bytes, at: int) -> None:
    """Append to a file that only its owner can read. On return it is safely on the disk.

    If writing fails, for example because the disk is full, the file is cut back to length `at`.

    Args:
        path: The file. It is created if it does not exist.
        content: The bytes to append.
        at: The expected length of the file. Anything after it is cut off before writing.

    Raises:
        InvalidInput: The file is shorter than `at`, or cannot be written.
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
    """Cut the file at `at`, write the content there, and wait until it is on the disk."""
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
    """Wait until a file, or the list of files in a folder, is on the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None
