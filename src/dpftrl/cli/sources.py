"""What the argument of a command is: a mechanism, a plan, a guarantee, or the folder of a run.

Commands that need a mechanism take any of them. What a file states besides the mechanism is used
where the options leave it open, and `Source.announce` says what was taken.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import msgspec

from dpftrl._internal.formatting import in_full
from dpftrl._internal.storage import read_file, read_json
from dpftrl.accounting import Guarantee, Run, load_guarantee
from dpftrl.cli.output import say
from dpftrl.errors import InvalidInput
from dpftrl.federated.run_guarantee import RunGuarantee
from dpftrl.federated.settings import RunFile
from dpftrl.federated.start_model import TEST_KEY, Start
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import Participation
from dpftrl.plan import load_plan
from dpftrl.plan import mechanism as mechanism_by_name

Kind = Literal["mechanism", "plan", "guarantee", "run"]
MOST_JOURNAL_BYTES = 2**32


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
    kind: Kind
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
                f"{self.name} is a guarantee for {stated} devices of one person, and --devices "
                f"{given} would state a smaller epsilon; leave the option out"
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
            "devices": f"{self.guarantee.devices} device(s) of one person",
        }
        say(f"from the {self.kind} {self.name}: {', '.join(texts[one] for one in taken)}", err=True)


def kind_of(name: str) -> Kind:
    """What an argument is, by the file or folder that it names; anything else is a mechanism."""
    path = Path(name)
    try:
        if path.is_dir():
            if not (path / "plan.json").exists():
                raise InvalidInput(f"{name} is a folder without a run: there is no plan.json in it")
            return "run"
    except OSError as error:
        raise InvalidInput(f"{name} cannot be read: {error.strerror}") from None
    if not name.endswith(".json"):
        return "mechanism"
    written = read_json(path, Header, "plan, guarantee or mechanism").format
    kinds: dict[str, Kind] = {
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
