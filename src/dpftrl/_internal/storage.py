"""Read, replace and append to files so that a mistake, a crash or another user harms nothing.

New content goes to a draft with an unguessable name, which then replaces the file: after a crash
there is the old file or the new one. Files and folders of a run must belong to the user who runs
it, and must not be links: nobody else can have prepared them.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn, TypeVar

import msgspec

from dpftrl.errors import DpftrlError, InvalidInput, UnsafeState

MOST_BYTES = 64 * 2**20  # far more than any file that is read whole
# The environment variable with the folder for state that must outlive the folder of a run.
STATE = "DPFTRL_STATE"
# Random bytes in the name of a draft.
DRAFT_BYTES = 8

Content = TypeVar("Content")


def default_state_folder() -> Path:
    """The folder for state outside a run: $DPFTRL_STATE, or `dpftrl` in the user's state folder."""
    if given := os.environ.get(STATE):
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "dpftrl"


def read_json(path: Path, kind: type[Content], what: str, *, own: bool = False) -> Content:
    """Read a JSON file and check it against its type.

    Args:
        path: The file.
        kind: The type of its content.
        what: The kind of file, for messages, such as "plan".
        own: Whether the file must belong to this user and must not be a link.

    Raises:
        InvalidInput: The file cannot be read, or is not of this kind.
    """
    content = read_file(path, own=own)
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


def read_file(path: Path, limit: int = MOST_BYTES, *, own: bool = False) -> bytes:
    """Read a whole file.

    Args:
        path: The file.
        limit: The largest number of bytes that the file may have.
        own: Whether the file must belong to this user and must not be a link.

    Raises:
        InvalidInput: The file cannot be read, is not a regular file, or is too large.
        UnsafeState: The file is a link or belongs to another user, and `own` was asked for.
    """
    try:
        if own:
            with os.fdopen(open_own(path), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                return file.read() if size <= limit else _too_large(path, size, limit)
        size = path.stat().st_size
        if not path.is_file():
            raise InvalidInput(f"{path} is not a file")
        return path.read_bytes() if size <= limit else _too_large(path, size, limit)
    except DpftrlError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be read: {reason}") from None


def _too_large(path: Path, size: int, limit: int) -> NoReturn:
    raise InvalidInput(f"{path} has {size:,} bytes; the limit is {limit:,}")


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of this user, and return its descriptor.

    Args:
        path: The file. If it is created, only its owner can read it.
        flags: Flags of `os.open`.

    Raises:
        UnsafeState: The file is a link, or not a file, or belongs to another user.
        OSError: The file cannot be opened.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for somebody at its other end.
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise UnsafeState(
                f"{path} is a link or a pipe; a file of a run must be neither"
            ) from None
        raise
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(handle)
        raise UnsafeState(_not_own(path, status))
    return handle


def sha256_of(path: Path) -> str:
    """SHA-256 of the content of a file, in hexadecimal."""
    try:
        with os.fdopen(open_own(path), "rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from None


def check_own_folder(path: Path, *, may_be_link: bool = False) -> None:
    """Refuse a folder in which somebody else could exchange files.

    Args:
        path: The folder.
        may_be_link: Whether the folder may be a link that belongs to this user.

    Raises:
        UnsafeState: The path is a link, is not a folder, belongs to another user, or is a folder
            that everybody may write to.
    """
    try:
        status = path.lstat()
        if may_be_link and stat.S_ISLNK(status.st_mode) and status.st_uid == os.geteuid():
            status = path.stat()
    except OSError as error:
        raise InvalidInput(f"{path} cannot be opened: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise UnsafeState(_not_own(path, status))
    if status.st_mode & stat.S_IWOTH:
        raise UnsafeState(
            f"everybody may write to {path}, and could exchange files of the run; use another "
            f"folder, or chmod o-w"
        )


def _not_own(path: Path, status: os.stat_result) -> str:
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a link; files and folders of a run must not be links"
    if status.st_uid != os.geteuid():
        return (
            f"{path} belongs to another user (number {status.st_uid}), who could read or change "
            "what the run writes there; use a folder of your own"
        )
    return f"{path} is not what it should be: a file in place of a folder, or the reverse"


def replace_file(path: Path, content: bytes | memoryview, *, private: bool = False) -> None:
    """Replace a file; on return the new content is on the disk.

    Args:
        path: The file. A link is replaced, not followed.
        content: The new content. Secret content is a memoryview, which no traceback shows.
        private: Whether only the owner can read the file.

    Raises:
        InvalidInput: The file cannot be written, or something that is not a file has its name.
    """
    replace_with(path, lambda file: file.write(content), private=private)


def replace_with(
    path: Path, write: Callable[[IO[bytes]], object], *, private: bool = False
) -> None:
    """Replace a file with what a function writes; otherwise like `replace_file`."""
    if not path.name:
        raise InvalidInput(f"{path} cannot be written: it is a folder")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(DRAFT_BYTES)}")
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    _refuse_other_kinds(path)
    try:
        with os.fdopen(os.open(draft, flags, 0o600 if private else 0o666), "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
        # A folder that may be written but not read cannot be flushed; the file itself was.
        with contextlib.nullcontext() if private else contextlib.suppress(InvalidInput):
            flush(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError, ValueError):
            draft.unlink(missing_ok=True)
        if not isinstance(error, OSError | ValueError) or isinstance(error, DpftrlError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be written: {reason}") from None


def _refuse_other_kinds(path: Path) -> None:
    """Refuse to replace a folder, a device or a pipe."""
    try:
        mode = path.lstat().st_mode
    except (OSError, ValueError):  # the caller's attempt to write reports the reason
        return
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise InvalidInput(f"{path} cannot be written: it is {kind}")


def append_durably(path: Path, content: bytes | memoryview, at: int) -> None:
    """Append to a file of this user. On return the content is on the disk.

    If writing fails, for example because the disk is full, the file is cut back to length `at`.

    Args:
        path: The file. It is created if it does not exist, for its owner only.
        content: The bytes to append.
        at: The length that the file must have now.

    Raises:
        UnsafeState: The file has another length: somebody else has changed it.
        InvalidInput: The file cannot be written.
    """
    try:
        is_new = not at and not path.exists()
        handle = open_own(path, os.O_CREAT | os.O_WRONLY)
        try:
            if (size := os.fstat(handle).st_size) != at:
                raise UnsafeState(
                    f"{path} has {size:,} bytes instead of {at:,}: somebody else has changed it, "
                    "and nothing was written"
                )
            _write_from(handle, content, at)
        finally:
            os.close(handle)
        if is_new:
            flush(path.parent)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None


def overwrite_durably(path: Path, handle: int, content: bytes) -> None:
    """Overwrite a small open file in place. On return the content is on the disk.

    Args:
        path: The path of the file, for messages.
        handle: The open file.
        content: As many bytes as the file has, and no more than a disk writes at once: a sector.

    Raises:
        InvalidInput: The file cannot be written.
    """
    try:
        _write_rest(handle, content, 0)
        os.fdatasync(handle) if hasattr(os, "fdatasync") else os.fsync(handle)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None


def cut_durably(path: Path, length: int) -> None:
    """Cut a file of this user to a length, which must not exceed its current length.

    Raises:
        UnsafeState: The file is shorter.
        InvalidInput: The file cannot be written.
    """
    try:
        handle = open_own(path, os.O_WRONLY)
        try:
            if os.fstat(handle).st_size < length:
                raise UnsafeState(f"{path} has lost some of its {length:,} bytes")
            os.ftruncate(handle, length)
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise InvalidInput(f"{path} cannot be written: {error.strerror}") from None


def _write_from(handle: int, content: bytes | memoryview, at: int) -> None:
    """Write the content at `at`, the end of the file, and wait until it is on the disk."""
    try:
        _write_rest(handle, content, at)
        os.fsync(handle)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(handle, at)
        raise


def _write_rest(handle: int, content: bytes | memoryview, at: int) -> None:
    done = 0
    view = memoryview(content)
    while done < len(view):
        done += os.pwrite(handle, view[done:], at + done)


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
