"""Files that commands write: refuse early what cannot be written, and what would be lost."""

import stat
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import click

from dpftrl._internal.storage import read_json
from dpftrl.cli.sources import Header
from dpftrl.errors import InvalidInput
from dpftrl.plots import MARK, check_plot_path

Kind = Literal["plan", "guarantee", "mechanism", "statement", "picture", "model"]

FORCE = "dpftrl.cli.force"


def _remember(context: click.Context, _: click.Parameter, force: bool) -> bool:
    context.meta[FORCE] = force
    return force


force_option = partial(
    click.option,
    "--force",
    is_flag=True,
    callback=_remember,
    help="Replace an existing file that dpftrl did not write.",
)
# How files that dpftrl writes begin. A file with another beginning is somebody's own.
BEGINNINGS: dict[str, tuple[bytes, ...]] = {
    ".png": (b"\x89PNG",),
    ".pdf": (b"%PDF",),
    ".svg": (b"<?xml", b"<svg"),
    ".md": (b"# Privacy statement",),
    ".html": (b"<!doctype html>",),
}


def check_target(path: Path | None, kind: Kind, *, force: bool = False) -> None:
    """Refuse a file that a command could not write, or that it would destroy.

    Commands call this before they compute.

    Args:
        path: The file; None if nothing is to be written.
        kind: What the command will write.
        force: Whether a file that dpftrl did not write may be replaced.

    Raises:
        InvalidInput: The folder is missing, the name belongs to something that is not a file, its
            ending does not fit, or the file is not of this kind.
    """
    if path is None:
        return
    if kind == "picture":
        if find_spec("matplotlib") is None:
            raise InvalidInput("plots need matplotlib: pip install 'dpftrl[plot]'")
        check_plot_path(path)
    elif kind in ("plan", "guarantee", "mechanism") and path.suffix != ".json":
        raise InvalidInput(f"{path}: a {kind} is saved as a .json file")
    try:
        if not path.absolute().parent.is_dir():
            raise InvalidInput(f"{path} cannot be written: there is no folder {path.parent}")
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidInput(f"{path} cannot be written: {reason}") from None
    if not stat.S_ISREG(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise InvalidInput(f"{path} cannot be written: it is {what}")
    if not force and not _is_ours(path, kind):
        raise InvalidInput(
            f"{path} exists and is not a {kind} that dpftrl wrote; choose another name, or give "
            "--force to replace it"
        )


def _is_ours(path: Path, kind: Kind) -> bool:
    """Whether an existing file looks like one that dpftrl wrote for the same purpose."""
    try:
        if path.stat().st_size == 0:
            return True
        if path.suffix == ".json":
            return read_json(path, Header, kind).format == f"dpftrl {kind}"
        content = path.read_bytes() if kind == "picture" else b""  # a PDF has its mark at the end
        with path.open("rb") as file:
            start = file.read(2**16)
    except (InvalidInput, OSError):
        return False
    if kind == "model":
        return _is_export(start)
    if path.suffix == ".html" and b"Privacy statement" not in start:
        return False
    if kind == "picture" and MARK.encode() not in content:
        return False
    return start.lower().startswith(tuple(b.lower() for b in BEGINNINGS.get(path.suffix, ())))


def _is_export(start: bytes) -> bool:
    """Whether a safetensors file that begins like this has the metadata of `dpftrl export`."""
    header = start[8 : 8 + int.from_bytes(start[:8], "little")]
    position = header.find(b'"__metadata__":{')
    names = (b'"epsilon":', b'"delta":', b'"rounds":')
    return position >= 0 and all(header.find(name, position) >= 0 for name in names)
