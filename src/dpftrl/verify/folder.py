"""Checks of the files of a run: the witness, the file modes and the checkpoints."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from dpftrl._internal.storage import read_json
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.verify.files import check_digest
from dpftrl.verify.journal import Journal


class WitnessFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a witness file: how much of the journal had been written."""

    format: Literal["dpftrl witness"]
    version: Literal[1]
    run: str
    lines: int
    mac: str


def witness_folder() -> Path:
    """Return the default folder of witnesses: $DPFTRL_STATE, or the user's state folder."""
    if configured := os.environ.get("DPFTRL_STATE"):
        return Path(configured)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "dpftrl"


def check_witness(journal: Journal, folder: Path) -> str:
    """Compare the journal with the witness of the run.

    Args:
        journal: The journal of the run.
        folder: The folder of witnesses.

    Raises:
        UnsafeState: There is no witness, or it has seen another journal.
    """
    run, lines = journal.created.run, len(journal.macs)
    path = folder / f"{run}.json"
    if not path.exists():
        raise UnsafeState(
            f"there is no witness of this run in {folder}, so this may be an older copy of the "
            "run; give the folder of the witness with --state-folder, or skip this check with "
            "--no-witness"
        )
    witness = read_json(path, WitnessFile, "witness")
    if witness.run != run:
        raise UnsafeState(f"{path} is the witness of another run")
    if not 0 <= witness.lines <= lines:
        raise UnsafeState(
            f"the run was rolled back: its journal has {lines} complete lines, but the "
            f"witness has seen {witness.lines}"
        )
    if ("0" * 64, *journal.macs)[witness.lines] != witness.mac:
        raise UnsafeState(
            f"line {witness.lines} of the journal is not the line that the witness saw"
        )
    if lines - witness.lines > 1:
        raise UnsafeState(
            f"the journal has {lines} lines, but the witness has seen {witness.lines}; a server "
            "stops at most one line ahead of its witness, so lines were added, or the witness is "
            "an old copy"
        )
    ahead = (
        "; the server stopped after it wrote the last line and before it updated the witness"
        if lines > witness.lines
        else ""
    )
    return f"it has seen {witness.lines:,} of {lines:,} lines{ahead}"


def check_modes(private: Path) -> str:
    """Check that only the owner may access the private files.

    Raises:
        UnsafeState: Somebody else may read, write or execute one of them.
    """
    try:
        open_to_others = list(_open_to_others(private))
        entries = sum(1 for _ in private.rglob("*"))
    except OSError as error:
        raise InvalidInput(f"{private} cannot be read: {error.strerror}") from None
    if open_to_others:
        path, mode = open_to_others[0]
        raise UnsafeState(
            f"{path.relative_to(private.parent)} has mode {mode:04o}, open to more than its owner"
            + (f", and {len(open_to_others) - 1} more" if len(open_to_others) > 1 else "")
            + "; other users may have read it"
        )
    return f"{private.name}/ and its {entries} entries are accessible by the owner only"


def _open_to_others(private: Path) -> Iterator[tuple[Path, int]]:
    """Yield each path that others may access, with its mode."""
    for path in (private, *sorted(private.rglob("*"))):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & ~stat.S_IRWXU:  # the owner may have fewer rights, as in an archive
            yield path, mode


def check_checkpoints(folder: Path, journal: Journal) -> str:
    """Compare the digest of every kept checkpoint with the journal.

    Raises:
        UnsafeState: The last checkpoint is missing, or a checkpoint differs from the journal.
    """
    digests = [journal.created.checkpoint_sha256]
    digests += [committed.checkpoint_sha256 for committed in journal.commits]
    last = len(digests) - 1
    paths = {path.stem: path for path in folder.glob("*.safetensors") if path.name[0] != "."}
    if f"{last:08d}" not in paths:
        raise UnsafeState(f"the model after {last} rounds is missing")
    checked = 0
    for rounds, sha256 in enumerate(digests):
        if (path := paths.pop(f"{rounds:08d}", None)) is not None:
            when = f"round {rounds} was released" if rounds else "the run was created"
            check_digest(path, sha256, when)
            checked += 1
    if journal.in_flight:
        # A checkpoint is written before the journal line that releases it.
        paths.pop(f"{last + 1:08d}", None)
    if paths:
        raise UnsafeState(f"{sorted(paths)[0]}.safetensors belongs to no round of the journal")
    return f"{checked} checkpoint(s), the last after {last} rounds, unchanged since their release"
