"""What several commands ask for."""

import functools
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any, TypeVar

import click

from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism, load_mechanism, mechanism
from dpftrl.participation import UNCAPPED, FixedEpochs, MinSep, Participation

Command = TypeVar("Command", bound=Callable[..., Any])

SUFFIXES = {"k": 10**3, "M": 10**6, "B": 10**9}


class Count(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """A whole number as people write it: 2052, 2_052, 6.5k, 4.21M, 1e9."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number, exactly."""
        if isinstance(value, int):
            return value
        text, factor = str(value).replace("_", ""), 1
        if text[-1:] in SUFFIXES:
            text, factor = text[:-1], SUFFIXES[text[-1]]
        try:
            number = Decimal(text) * factor
            whole = int(number)
        except (InvalidOperation, ValueError, OverflowError):
            self.fail(f"{value!r} is not a number like 2052, 6.5k or 4.21M", param, ctx)
        if whole != number or abs(whole) > 10**18:
            self.fail(f"{value!r} is not a whole number below 1e18", param, ctx)
        return whole


def participation_options(command: Command) -> Command:
    """Add --rounds and its companions; the command gets a `participation`."""

    @click.option("--rounds", type=Count(), required=True, help="Rounds of training.")
    @click.option(
        "--min-sep",
        type=Count(),
        help="Least difference between two rounds of one client; 1 allows every round.",
    )
    @click.option(
        "--rounds-between",
        type=Count(),
        help="Instead of --min-sep: the rounds strictly between, one less.",
    )
    @click.option(
        "--max-participations",
        type=Count(),
        default=UNCAPPED,
        show_default="rounds / min-sep, rounded up",
        help="Most rounds of one client.",
    )
    @click.option(
        "--fixed-epochs",
        is_flag=True,
        help="Clients come back after exactly --min-sep rounds, not at least.",
    )
    @functools.wraps(command)
    def with_participation(
        *args: Any,
        rounds: int,
        min_sep: int | None,
        rounds_between: int | None,
        max_participations: int,
        fixed_epochs: bool,
        **kwargs: Any,
    ) -> Any:
        if (min_sep is None) == (rounds_between is None):
            raise InvalidInput("give one of --min-sep and --rounds-between")
        if fixed_epochs and rounds_between is not None:
            raise InvalidInput("--fixed-epochs goes with --min-sep")
        if fixed_epochs and min_sep is not None:
            chosen: Participation = FixedEpochs(rounds, min_sep, max_participations)
        elif min_sep is not None:
            chosen = MinSep(rounds, min_sep, max_participations)
        else:
            assert rounds_between is not None
            chosen = MinSep.from_rounds_between(rounds, rounds_between, max_participations)
        return command(*args, participation=chosen, **kwargs)

    return with_participation  # type: ignore[return-value]


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def resolve(name: str, participation: Participation | None = None) -> Mechanism:
    """A mechanism from its name or from a .json file."""
    if name.endswith(".json"):
        return load_mechanism(name)
    return mechanism(name, participation)


def describe(participation: Participation) -> dict[str, int]:
    """The participation as JSON."""
    return {
        "rounds": participation.rounds,
        "min_sep": participation.min_sep,
        "max_participations": participation.max_participations,
    }
