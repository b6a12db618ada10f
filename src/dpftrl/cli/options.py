"""Options and argument types that several commands share."""

import csv
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from dpftrl._internal.written_numbers import count_from_text, share_from_text
from dpftrl.errors import InvalidInput
from dpftrl.participation import UNCAPPED, FixedEpochs, MinSep, Participation

Command = TypeVar("Command", bound=Callable[..., Any])


class Count(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """A whole number as people write it: 2052, 2_052, 2,052, 6.5K, 4.21M, 1e9."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert the text to the exact whole number."""
        if isinstance(value, int):
            return value
        try:
            return count_from_text(str(value))
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


class Share(click.ParamType):  # pyright: ignore[reportMissingTypeArgument]
    """A share as people write it: 0.6 or 60%."""

    name = "share"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Convert the text to a number; the option itself checks the range."""
        if isinstance(value, float):
            return value
        try:
            return share_from_text(str(value))
        except InvalidInput as error:
            self.fail(str(error), param, ctx)


class SettingsCommand(click.Command):
    """Command with `--set`: an unknown option that is the name of a setting gets that hint."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            NoSuchOption: An option is unknown. The message says how to write a setting.
        """
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            hint = _setting_hint(error.option_name, given)
            if hint is None:
                raise
            message = f"No such option: {error.option_name}; a setting is written {hint}"
            raise click.NoSuchOption(error.option_name, message, ctx=ctx) from None


def _setting_hint(option: str, args: list[str]) -> str | None:
    """The `--set` for an option that is the name of a setting; None if it is not."""
    from dpftrl.simulation._setting_names import set_option, setting_kinds, similar_settings
    from dpftrl.simulation.config import Config

    name = option.lstrip("-").replace("-", "_")
    names = setting_kinds(Config)
    settings = [name] if name in names else similar_settings(name, Config)
    if not settings:
        return None
    value = "VALUE"
    for argument, following in zip(args, [*args[1:], ""], strict=True):
        if argument == option and following and not following.startswith("-"):
            value = following
        elif argument.startswith(f"{option}="):
            value = argument.partition("=")[2]
    return " or ".join(set_option(one, value, Config) for one in settings)


max_participations_option = click.option(
    "--max-participations",
    type=Count(),
    default=UNCAPPED,
    show_default="rounds / min-sep, rounded up",
    help="Most rounds that one client can take part in, if the server enforces such a cap.",
)


def participation_options(command: Command) -> Command:
    """Add --rounds, --min-sep and related options; the command gets a `participation`."""

    @_participation_flags(rounds_required=True)
    @functools.wraps(command)
    def with_participation(*args: Any, rounds: int, **kwargs: Any) -> Any:
        chosen = _participation(rounds, kwargs)
        if chosen is None:
            raise InvalidInput("give one of --min-sep and --rounds-between")
        return command(*args, participation=chosen, **kwargs)

    return with_participation  # type: ignore[return-value]


def participation_or_source_options(command: Command) -> Command:
    """Add the same options, all optional; the command gets a `participation`, or None."""

    @_participation_flags(rounds_required=False)
    @functools.wraps(command)
    def with_optional(*args: Any, rounds: int | None, **kwargs: Any) -> Any:
        chosen = None if rounds is None else _participation(rounds, kwargs)
        if rounds is not None and chosen is None:
            raise InvalidInput("give one of --min-sep and --rounds-between")
        if rounds is None and _take_flags(kwargs):
            raise InvalidInput("--min-sep and the other participation options need --rounds too")
        return command(*args, participation=chosen, **kwargs)

    return with_optional  # type: ignore[return-value]


def participation_or_log_options(command: Command) -> Command:
    """Add the same options and --log, all optional; the command gets what was given, or None."""

    @_participation_flags(rounds_required=False)
    @click.option(
        "--log",
        type=click.Path(path_type=Path),
        help="Account for the participation in this log (CSV, JSON lines or Parquet; - is standard "
        "input), or in a run (its folder). The options --rounds and --min-sep then state what was "
        "planned.",
    )
    @functools.wraps(command)
    def with_either(*args: Any, rounds: int | None, log: Path | None, **kwargs: Any) -> Any:
        chosen = None if rounds is None else _participation(rounds, kwargs)
        stated = chosen is not None or _take_flags(kwargs)
        if rounds is None and stated:
            raise InvalidInput("--min-sep and the other participation options need --rounds too")
        return command(*args, participation=chosen, log=log, rounds=rounds, **kwargs)

    return with_either  # type: ignore[return-value]


# For logs that are not written as a run of dpftrl writes them: name, metavar and help.
_LAYOUT_OPTIONS = (
    ("--client-column", "NAME", "Column of the log with the client's id.  [default: client]"),
    ("--round-column", "NAME", "Column with the number of the round.  [default: round]"),
    (
        "--status-column",
        "NAME",
        "Column with the status.  [default: status; without one, all rows are counted]",
    ),
    (
        "--time-column",
        "NAME",
        "Column with times, instead of --round-column: ISO 8601 with a time zone, or Unix seconds. "
        "Two contacts of a client count as floor(duration / round length) rounds apart, and as 1 "
        "if they are closer.",
    ),
    (
        "--round-length",
        "LENGTH",
        "For --time-column: 6h, 30min, 1d, or seconds as a plain number. No round may have been "
        "longer. A larger value is safe, if --rounds is stated and --first-time is not.",
    ),
    (
        "--first-time",
        "TIME",
        "For --time-column: when the first round began, if every round had exactly the round "
        "length. Two contacts that are closer than that can then be known to be in two rounds.  "
        "[default: the first time in the log]",
    ),
    ("--time-zone", "UTC", "For --time-column: the times have no time zone, and are in UTC."),
    (
        "--delimiter",
        "CHARACTER",
        r"Character between the columns of a .csv, .tsv or .txt file, such as ';' or '\t' (tab).  "
        "[default: a comma, and a tab in .tsv]",
    ),
)


def log_layout_options(command: Command) -> Command:
    """Add the options that say how a log is written; the command gets a `layout`."""

    @functools.wraps(command)
    def with_layout(*args: Any, status: tuple[str, ...], log_format: str | None, **kwargs: Any):
        from dpftrl.accounting.logs import LogLayout

        names = [name[2:].replace("-", "_") for name, _, _ in _LAYOUT_OPTIONS]
        given = {name: kwargs.pop(name) for name in names}
        stated = {name: value for name, value in given.items() if value is not None}
        layout = LogLayout(**stated, statuses=_statuses(status), format=log_format)
        return command(*args, layout=layout, **kwargs)

    flags = [click.option(name, metavar=value, help=text) for name, value, text in _LAYOUT_OPTIONS]
    flags.insert(
        3,
        click.option(
            "--status",
            multiple=True,
            metavar="MEANING=VALUE,...",
            help="What the log's own statuses mean, such as counted=ok,done. A meaning is counted, "
            "contacted or abandoned. Give the option once per meaning.",
        ),
    )
    flags.append(
        click.option(
            "--format",
            "log_format",
            metavar="FORMAT",
            help="Format of a log from standard input, or with an unknown ending: csv, json or "
            "parquet.",
        )
    )
    decorated: Any = with_layout
    for flag in reversed(flags):
        decorated = flag(decorated)
    return decorated


def _statuses(texts: tuple[str, ...]) -> dict[str, list[str]]:
    """Read --status: `counted=ok,done` gives {"counted": ["ok", "done"]}."""
    statuses = dict[str, list[str]]()
    for text in texts:
        meaning, equals, values = text.partition("=")
        if not equals:
            raise InvalidInput(
                f"--status takes a meaning and values, such as counted=ok,done, got {text!r:.60}"
            )
        # A value that contains a comma is written in double quotes, as in CSV.
        listed = next(csv.reader([values], skipinitialspace=True), [""])
        statuses.setdefault(meaning.strip(), []).extend(listed or [""])
    return statuses


def _participation_flags(rounds_required: bool) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        flags = (
            click.option(
                "--rounds", type=Count(), required=rounds_required, help="Rounds of training."
            ),
            click.option(
                "--min-sep",
                type=Count(),
                help="Smallest difference between two rounds of one client; 1 allows every round.",
            ),
            click.option(
                "--rounds-between",
                type=Count(),
                help="Instead of --min-sep: rounds strictly between two rounds of one client "
                "(min-sep minus 1).",
            ),
            max_participations_option,
            click.option(
                "--fixed-epochs",
                is_flag=True,
                help="Clients return after exactly --min-sep rounds, instead of at least.",
            ),
        )
        for flag in reversed(flags):
            command = flag(command)
        return command

    return add


def _take_flags(given: dict[str, Any]) -> bool:
    """Remove the participation options from `given`; return whether any of them was set."""
    min_sep, between = given.pop("min_sep", None), given.pop("rounds_between", None)
    cap, fixed = given.pop("max_participations", UNCAPPED), given.pop("fixed_epochs", False)
    return min_sep is not None or between is not None or cap != UNCAPPED or fixed


def _participation(rounds: int, given: dict[str, Any]) -> Participation | None:
    """Remove the participation options from `given` and return the participation they state.

    Returns None if they state no min-sep.
    """
    min_sep, between = given["min_sep"], given["rounds_between"]
    cap, fixed = given["max_participations"], given["fixed_epochs"]
    _take_flags(given)
    if min_sep is not None and between is not None:
        raise InvalidInput("give one of --min-sep and --rounds-between")
    if fixed and between is not None:
        raise InvalidInput("--fixed-epochs goes with --min-sep")
    if between is not None:
        return MinSep.from_rounds_between(rounds, between, cap)
    if min_sep is None:
        if fixed or cap != UNCAPPED:
            raise InvalidInput("--max-participations and --fixed-epochs go with --min-sep")
        return None
    return FixedEpochs(rounds, min_sep, cap) if fixed else MinSep(rounds, min_sep, cap)


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
state_folder_option = click.option(
    "--state-folder",
    type=click.Path(path_type=Path),
    help="Folder with the witness of the run.",
    show_default="$DPFTRL_STATE, or ~/.local/state/dpftrl",
)
no_witness_option = click.option(
    "--no-witness",
    is_flag=True,
    help="Verify the run without its witness. The folder may then be an older copy of the run.",
)


def describe(participation: Participation) -> dict[str, int]:
    """Return the participation as fields of a JSON object."""
    return {
        "rounds": participation.rounds,
        "min_sep": participation.min_sep,
        "max_participations": participation.max_participations,
    }
