"""What the system says about a run: its disk, its permissions, and the process that works on it."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from dpftrl._internal.storage import check_own_folder
from dpftrl.errors import DpftrlError
from dpftrl.status.figures import Disk, Process

# How the names of files that grow with every round begin, below the folder of a run, and those of
# files in between that are replaced instead.
GROWING = ("private/", "ledger.csv", "metrics.jsonl", "events/")
REPLACED = ("private/checkpoints/", "private/noise.")
# The list of file locks of the system, which Linux has.
LOCKS = Path("/proc/locks")


def process_of(lock: Path, journal: Path) -> Process:
    """The process that holds the lock of a run. The lock is not touched."""
    changed = journal.stat().st_mtime
    if not lock.exists():  # whoever opens a run creates it
        return Process(running=False, pid=None, last_change=changed)
    try:
        status, held = lock.stat(), LOCKS.read_text()
        pid = int(lock.read_text() or 0)
    except (OSError, ValueError):
        return Process(running=None, pid=None, last_change=changed)
    # Such as `1: FLOCK ADVISORY WRITE 4711 fe:00:2147092 0 EOF`. The device is not compared: some
    # file systems show another one. A process writes its id into the file that it locks.
    for fields in map(str.split, held.splitlines()):
        is_ours = fields[1:2] == ["FLOCK"] and fields[4:5] == [str(pid)]
        if is_ours and fields[5].rpartition(":")[2] == str(status.st_ino):
            return Process(running=True, pid=pid, last_change=changed)
    return Process(running=False, pid=None, last_change=changed)


def disk_of(
    root: Path, rounds: int, rounds_left: int | None, noise_bytes: int, free_bytes: int | None
) -> Disk:
    """Room for the files of a run, and what is wrong with their permissions.

    Args:
        root: The folder of the run.
        rounds: Number of rounds so far.
        rounds_left: Number of rounds to come; None if the run has ended.
        noise_bytes: Bytes of the noise buffers, which may not have been saved yet.
        free_bytes: Free bytes on the disk; None asks the system.
    """
    total, growing, replaced = 0, 0, [0]
    for name, status in _files(root):
        total += status.st_size
        if name.startswith(REPLACED):
            replaced.append(status.st_size)
        elif name.startswith(GROWING):
            growing += status.st_size
    per_round = growing / rounds if rounds else None
    if free_bytes is None:
        system = os.statvfs(root)
        free_bytes = system.f_bavail * system.f_frsize
    # A new checkpoint is complete before an old one is removed, and so is the noise.
    drafts = 2 * max(replaced) + noise_bytes
    growth = round((per_round or 0) * (rounds_left or 0))
    return Disk(
        free_bytes=free_bytes,
        run_bytes=total,
        bytes_per_round=per_round,
        bytes_needed=0 if rounds_left is None else growth + drafts,
        problems=tuple(_problems(root)),
    )


def _files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """All files of a run, by their names below its folder. Files may vanish at any time."""
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder) / name
            try:
                status = path.lstat()
            except OSError:
                continue
            if stat.S_ISREG(status.st_mode):
                yield str(path.relative_to(root)), status


def _problems(root: Path) -> Iterator[str]:
    """What is wrong with owners and permissions, in words."""
    private = root / "private"
    for folder in (root, private, private / "checkpoints"):
        try:
            check_own_folder(folder, may_be_link=folder is root)
        except DpftrlError as error:
            yield str(error)
    if private.stat().st_mode & 0o077:
        yield f"others may open {private}: chmod 700 {private}"
    for name, status in _files(root):
        if status.st_uid != os.geteuid():
            yield f"{root / name} belongs to another user"
        elif (name.startswith("private/") or name == "ledger.csv") and status.st_mode & 0o077:
            yield f"others may read {root / name}: chmod 600 {root / name}"
