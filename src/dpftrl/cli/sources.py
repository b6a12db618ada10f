"""What the argument of a command is: a mechanism, a plan, a guarantee, or the folder of a run.

Commands that need a mechanism take any of them. What a file states besides the mechanism is used
where the options leave it open, and `Source.announce` says what was taken.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import msgspec

from dpftrl._internal.formatting import in_full
from dpftrl._internal.storage import read_json
from dpftrl.accounting import Guarantee, load_guarantee
from dpftrl.accounting.guarantee import BufferType
from dpftrl.cli.output import say
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import Participation
from dpftrl.plan import load_plan
from dpftrl.plan import mechanism as mechanism_by_name

Kind = Literal["mechanism", "plan", "guarantee", "run"]


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
    def mechanism(self) -> Mechanism:
        """The mechanism of the run."""
        return self.guarantee.runs[0].mechanism

    @property
    def participation(self) -> Participation:
        """The participation that the guarantee is for."""
        return self.guarantee.runs[0].participation

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of the run."""
        return self.guarantee.runs[0].noise_multiplier

    @property
    def buffers(self) -> BufferType:
        """The number type of the noise buffers."""
        return self.guarantee.runs[0].buffers

    def announce(self, *taken: str) -> None:
        """Say on standard error what was taken from the source.

        Args:
            taken: Any of mechanism, participation, noise multiplier and delta.
        """
        texts = {
            "mechanism": self.mechanism.name,
            "participation": str(self.participation),
            "noise multiplier": f"noise multiplier {self.noise_multiplier:.6g}",
            "delta": f"delta {in_full(self.guarantee.delta)}",
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
    try:
        written = read_json(path, Header, "plan, guarantee or mechanism").format
    except InvalidInput:
        return "mechanism"  # reading it as one reports the error
    kinds: dict[str, Kind] = {"dpftrl plan": "plan", "dpftrl guarantee": "guarantee"}
    return kinds.get(written, "mechanism")


def read_source(name: str) -> Source | None:
    """Read a plan, a guarantee or a run; return None for a mechanism.

    A run that has released rounds states the guarantee of these rounds, another run that of its
    plan.

    Raises:
        InvalidInput: The file is not valid, or its guarantee covers several runs.
    """
    kind, path = kind_of(name), Path(name)
    if kind == "mechanism":
        return None
    guarantee = guarantee_in(name)
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
        return load_plan(path / "plan.json").guarantee
    return load_guarantee(path)


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
    source = read_source(name)
    if source is None:
        if participation is None:
            raise InvalidInput("give --rounds and --min-sep, or a plan in place of the mechanism")
        return mechanism_by_name(name, participation), participation, None
    taken = ("mechanism", *(() if participation else ("participation",)), *also)
    source.announce(*taken)
    return source.mechanism, participation or source.participation, source
