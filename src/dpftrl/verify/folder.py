"""The files themselves: who may read them, and whether the checkpoints are those of the journal."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from dpftrl._internal.storage import read_json
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.verify.files import digest_must_be
from dpftrl.verify.journal import Journal


class WitnessFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the JSON holds."""

    format: Literal["dpftrl witness"]
    version: Literal[1]
    run: str
    lines: int
    mac: str


def witness_folder() -> Path:
    """Where witnesses are, unless somebody says otherwise."""
    if given := os.environ.get("DPFTRL_STATE"):
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "dpftrl"


def check_witness(journal: Journal, folder: Path) -> str:
    """Compare; what is returned says how they agree."""
    run, lines = journal.created.run, len(journal.macs)
    path = folder / f"{run}.json"
    if not path.exists():
        raise UnsafeState(
            f"there is no witness of this run in {folder}, so nobody knows whether the folder is "
            "its newest state; bring it along, or leave this out with --no-witness"
        )
    seen = read_json(path, WitnessFile, "witness")
    if seen.run != run:
        raise UnsafeState(f"{path} is the witness of another run")
    if not 0 <= seen.lines <= lines:
        raise UnsafeState(
            f"the run was rolled back: its journal has {lines} whole lines, and the witness has "
            f"seen {seen.lines}"
        )
    if ("0" * 64, *journal.macs)[seen.lines] != seen.mac:
        raise UnsafeState(f"line {seen.lines} is not the one that the witness has seen")
    if lines - seen.lines > 1:
        raise UnsafeState(
            f"the journal has {lines} lines and the witness has seen {seen.lines}; a server stops "
            "at most one line ahead, so lines were added, or the witness is an old copy"
        )
    ahead = "; a server stopped between the last line and the witness" if lines > seen.lines else ""
    return f"it has seen {seen.lines:,} of {lines:,} lines{ahead}"


def check_modes(private: Path) -> str:
    """Refuse private files that others than the owner may touch."""
    try:
        open_to_others = list(_open_to_others(private))
        number = sum(1 for _ in private.rglob("*"))
    except OSError as error:
        raise InvalidInput(f"{private} cannot be read: {error.strerror}") from None
    if open_to_others:
        path, mode = open_to_others[0]
        raise UnsafeState(
            f"{path.relative_to(private.parent)} has mode {mode:04o}, open to more than its owner"
            + (f", and {len(open_to_others) - 1} more" if len(open_to_others) > 1 else "")
            + "; others may have read what is in it"
        )
    return f"{private.name}/ and the {number} entries in it are for the owner alone"


def _open_to_others(private: Path) -> Iterator[tuple[Path, int]]:
    for path in (private, *sorted(private.rglob("*"))):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & ~stat.S_IRWXU:  # its owner may take rights away from themselves
            yield path, mode


def check_checkpoints(folder: Path, journal: Journal) -> str:
    """Compare every checkpoint that is kept; the last one must be there."""
    digests = [journal.created.checkpoint_sha256]
    digests += [committed.checkpoint_sha256 for committed in journal.commits]
    last = len(digests) - 1
    found = {path.stem: path for path in folder.glob("*.safetensors") if path.name[0] != "."}
    if f"{last:08d}" not in found:
        raise UnsafeState(f"the model after {last} rounds is missing")
    checked = 0
    for rounds, sha256 in enumerate(digests):
        if (path := found.pop(f"{rounds:08d}", None)) is not None:
            digest_must_be(path, sha256, f"round {rounds} was released" if rounds else "it began")
            checked += 1
    if journal.in_flight:
        found.pop(f"{last + 1:08d}", None)  # written before the line that would release it
    if found:
        raise UnsafeState(f"{sorted(found)[0]}.safetensors belongs to no round of the journal")
    return f"{checked} kept, the last after {last} rounds, as they were released"
