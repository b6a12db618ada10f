"""Whether the journal has all that was ever written to it, as the witness outside remembers."""

import os
from pathlib import Path
from typing import Literal

import msgspec

from dpftrl.audit.journal import Journal
from dpftrl.errors import UnsafeState
from dpftrl.storage import read_json


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
