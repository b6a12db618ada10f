"""Files that commands read and write.

The argument of a command is a mechanism, a plan, a guarantee, or the folder of a run. Commands that
need a mechanism take any of them. What a file states besides the mechanism is used where the
options leave it open, and `Source.announce` says what was taken.

`check_target` refuses early what a command could not write, and what it would destroy.
"""

import stat
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, final

import click
import msgspec

from dpftrl._internal.formatting import in_full
from dpftrl._internal.storage import read_file, read_json
from dpftrl.accounting import Guarantee, Run, load_guarantee
from dpftrl.cli.output import say
from dpftrl.errors import InvalidInput
from dpftrl.federated.run_guarantee import RunGuarantee
from dpftrl.federated.settings import RunFile
from dpftrl.federated.start_model import TEST_KEY, Start
from dpftrl.federated.store.ledger import ledger_file
from dpftrl.federated.store.run_folder import HEADER
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import Participation
from dpftrl.plan import load_plan
from dpftrl.plan import mechanism as mechanism_by_name
from dpftrl.plots import MARK, check_plot_path

SourceKind = Literal["mechanism", "plan", "guarantee", "run"]
TargetKind = Literal[
    "plan",
    "dataset plan",
    "guarantee",
    "mechanism",
    "statement",
    "picture",
    "model",
    "card",
    "ledger",
    "config",
]

MOST_JOURNAL_BYTES = 2**32
# The header of a safetensors file is smaller than this.
MOST_HEADER_BYTES = 100 * 10**6
# The first line of the metadata of a model card; see `dpftrl.models.card`.
CARD_MARK = "library_name: dpftrl"
# The key of the option --force in click's `Context.meta`.
FORCE = "dpftrl.cli.force"


class Header(msgspec.Struct):
    """The field of a .json file that says what kind of file it is."""

    format: str


@final
@dataclass(frozen=True)
class Source:
    """A plan, a guarantee or a run that a command was given.

    Attributes:
        name: The argument.
        kind: What it is.
        guarantee: The guarantee that it states. It covers one run.
    """

    name: str
    kind: SourceKind
    guarantee: Guarantee

    @property
    def run(self) -> Run:
        """The run that the guarantee covers: mechanism, participation and noise."""
        return self.guarantee.runs[0]

    def devices(self, given: int | None) -> int:
        """The number of devices of one person: the given one, or that of the guarantee.

        Raises:
            InvalidInput: The guarantee is for more devices than were given.
        """
        stated = self.guarantee.devices
        if given is not None and given < stated:
            raise InvalidInput(
                f"{self.name} is a guarantee for {stated} clients (devices) of one person, and "
                f"--devices {given} would state a smaller epsilon; leave the option out"
            )
        return stated if given is None else given

    def announce(self, *taken: str) -> None:
        """Say on standard error what was taken from the source.

        Args:
            taken: Any of mechanism, participation, noise multiplier, delta and devices.
        """
        texts = {
            "mechanism": self.run.mechanism.name,
            "participation": str(self.run.participation),
            "noise multiplier": f"noise multiplier {self.run.noise_multiplier:.6g}",
            "delta": f"delta {in_full(self.guarantee.delta)}",
            "devices": f"{self.guarantee.devices} clients (devices) of one person",
        }
        say(f"from the {self.kind} {self.name}: {', '.join(texts[one] for one in taken)}", err=True)


def kind_of(name: str) -> SourceKind:
    """What an argument is, by the file or folder that it names; anything else is a mechanism."""
    path = Path(name)
    try:
        if path.is_dir():
            if not (path / "plan.json").exists():
                raise InvalidInput(f"{name} is a folder without a run: there is no plan.json in it")
            refuse_centralized(path)
            return "run"
    except OSError as error:
        raise InvalidInput(f"{name} cannot be read: {error.strerror}") from None
    if not name.endswith(".json"):
        return "mechanism"
    written = read_json(path, Header, "plan, guarantee or mechanism").format
    kinds: dict[str, SourceKind] = {
        "dpftrl plan": "plan",
        "dpftrl guarantee": "guarantee",
        "dpftrl mechanism": "mechanism",
    }
    if written not in kinds:
        raise InvalidInput(
            f"{name} holds a {written!r:.40}, not a plan, a guarantee or a mechanism; for a run, "
            "give its folder"
        )
    return kinds[written]


def refuse_centralized(folder: Path) -> None:
    """Refuse the folder of a centralized run, which only some commands take."""
    from dpftrl.verify.centralized_files import is_centralized  # here, because it is slow to import

    if is_centralized(folder):
        raise InvalidInput(
            f"{folder} is a centralized run; `dpftrl verify` and `dpftrl statement` take it"
        )


@contextmanager
def log_file(log: Path) -> Generator[Path]:
    """The file of a participation log; for the folder of a run, its ledger."""
    if not log.is_dir():
        yield log
        return
    refuse_centralized(log)
    with ledger_file(log) as path:
        yield path


def read_source(name: str, *, planned: bool = False) -> Source | None:
    """Read a plan, a guarantee or a run; return None for a mechanism.

    Args:
        name: The file or folder.
        planned: Whether a run stands for its plan, with all its rounds. Otherwise it stands for
            the rounds that it has released, or for its plan before the first of them.

    Raises:
        InvalidInput: The file is not valid, or its guarantee covers several runs.
    """
    kind, path = kind_of(name), Path(name)
    if kind == "mechanism":
        return None
    guarantee = load_plan(path / "plan.json").guarantee if kind == "run" and planned else None
    guarantee = guarantee or guarantee_in(name)
    if len(guarantee.runs) != 1:
        raise InvalidInput(
            f"{path} covers {len(guarantee.runs)} runs, and this needs one; `dpftrl compose` takes "
            "such guarantees"
        )
    return Source(name, kind, guarantee)


def guarantee_in(name: str) -> Guarantee:
    """The guarantee that a plan, a guarantee file or the folder of a run states."""
    kind, path = kind_of(name), Path(name)
    if kind == "plan":
        return load_plan(path).guarantee
    if kind == "run":
        if (path / "guarantee.json").exists():
            return load_guarantee(path / "guarantee.json")
        return _planned_guarantee(path)
    return load_guarantee(path)


def _planned_guarantee(folder: Path) -> Guarantee:
    """The guarantee that a run will have after its last round, with the runs behind its start."""
    file = read_json(folder / "run.json", RunFile, "run")
    journal = folder / "private" / "journal.jsonl"
    if journal.exists() and b'"kind":"committed"' in read_file(journal, MOST_JOURNAL_BYTES):
        raise InvalidInput(
            f"{folder} has released rounds, but its guarantee.json is missing; resuming the run "
            "writes it"
        )
    if file.settings.timer_hours is not None:
        raise InvalidInput(
            f"{folder} has released no round, and its timers go by time: how often one client "
            "takes part is not known yet; give its plan.json for what was planned"
        )
    start = None if file.start is None else Start.of_content(file.start, folder / "run.json")
    plan = load_plan(folder / "plan.json")
    planned = RunGuarantee(plan, file.settings, file.test_key, start).planned
    return planned.resting_on(TEST_KEY) if file.test_key else planned


def resolve(
    name: str, participation: Participation | None, *also: str
) -> tuple[Mechanism, Participation, Source | None]:
    """The mechanism and the participation of an argument and of the options beside it.

    Args:
        name: The argument.
        participation: The participation that the options state; None if they state none.
        also: What else the command takes from a source, as for `Source.announce`.

    Raises:
        InvalidInput: A mechanism was given without a participation.
    """
    source = read_source(name, planned=True)
    if source is None:
        if participation is None:
            raise InvalidInput("give --rounds and --min-sep, or a plan in place of the mechanism")
        return mechanism_by_name(name, participation), participation, None
    taken = ("mechanism", *(() if participation else ("participation",)), *also)
    source.announce(*taken)
    return source.run.mechanism, participation or source.run.participation, source


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
# How a config file of `dpftrl tune` begins.
TUNED = "# Settings chosen by `dpftrl tune`"
# How files that dpftrl writes begin. A file with another beginning is somebody's own.
BEGINNINGS: dict[str, tuple[bytes, ...]] = {
    ".png": (b"\x89PNG",),
    ".pdf": (b"%PDF",),
    ".svg": (b"<?xml", b"<svg"),
    ".md": (b"# Privacy statement",),
    ".html": (b"<!doctype html>",),
}


def check_target(path: Path | None, kind: TargetKind, *, force: bool = False) -> None:
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
    elif kind in ("plan", "dataset plan", "guarantee", "mechanism") and path.suffix != ".json":
        raise InvalidInput(f"{path}: a {kind} is saved as a .json file")
    try:
        if not path.absolute().parent.is_dir():
            raise InvalidInput(
                f"{path} cannot be written: there is no folder {path.parent}; create it first"
            )
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


def _is_ours(path: Path, kind: TargetKind) -> bool:
    """Whether an existing file looks like one that dpftrl wrote for the same purpose."""
    try:
        if path.stat().st_size == 0:
            return True
        if path.suffix == ".json":
            written = read_json(path, Header, kind).format
            return written in (f"dpftrl {kind}", f"dpftrl centralized {kind}")
        content = path.read_bytes() if kind == "picture" else b""  # a PDF has its mark at the end
        with path.open("rb") as file:
            start = file.read(MOST_HEADER_BYTES if kind == "model" else 2**16)
    except (InvalidInput, OSError):
        return False
    if kind == "model":
        return _is_export(start)
    if kind == "card":
        return start.startswith(f"---\n{CARD_MARK}\n".encode())
    if kind == "config":
        return start.startswith(TUNED.encode())
    if kind == "ledger":
        return start.startswith(HEADER.encode())
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
