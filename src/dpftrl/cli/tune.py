"""`dpftrl tune`: choose the settings of a training on public text, without spending privacy."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click
from rich.table import Table

from dpftrl.cli.files import TUNED as MARK
from dpftrl.cli.files import check_target, force_option
from dpftrl.cli.options import Count, SettingsCommand, json_option
from dpftrl.cli.output import print_json, print_table, progress_bar, say

if TYPE_CHECKING:
    from dpftrl.simulation.config import Config
    from dpftrl.tuning import Choice

# Trials that the result shows.
MOST_SHOWN = 8
TRANSFERS = (
    "What transfers: learning rates, clip norm, rounds and report goal depend mostly on the model, "
    "the noise and the number of clients, which are those of your training.",
    "What may not: the best model size and the client's learning rate also depend on how much text "
    "people have and how different they are. The accuracy itself is that of the stand-in.",
)


@click.command("tune", cls=SettingsCommand)
@click.argument("config_file", metavar="[CONFIG.toml]", required=False)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("tuned.toml"),
    show_default=True,
    help="Config file to write. Its journal is beside it, and an interrupted tuning continues.",
)
@click.option(
    "--set",
    "changes",
    multiple=True,
    metavar="KEY=VALUE",
    help="""Change a setting, in TOML syntax, as for `dpftrl train`.""",
)
@click.option("--minutes", type=float, default=10.0, show_default=True, help="Time budget.")
@click.option("--trials", type=int, default=16, show_default=True, help="Most candidates to try.")
@click.option("--workers", type=int, help="Parallel processes; by default one per core.")
@click.option("--stand-in", metavar="TASK", help="Task with published text: chitchat or poetry.")
@click.option(
    "--public",
    type=click.Path(dir_okay=False, path_type=Path),
    help='Public text to tune on: lines of {"user": ..., "text": ...}.',
)
@click.option("--population", type=Count(), help="Clients of the training; by default counted.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the candidates.")
@force_option()
@json_option
def tune_command(
    config_file: str | None,
    out: Path,
    changes: tuple[str, ...],
    minutes: float,
    trials: int,
    workers: int | None,
    stand_in: str | None,
    public: Path | None,
    population: int | None,
    seed: int,
    force: bool,
    as_json: bool,
) -> None:
    """Choose the settings of a private training by trials on public text.

    It searches clip norm, learning rates, report goal, rounds and model size for the training that
    CONFIG describes, with the noise that its plan has, and writes a config for `dpftrl train`. The
    text of the private users is never used: trials are run on another task, or on the text of
    --public. Epsilon and delta stay as they are.
    """
    from dpftrl.simulation.config import read_config

    config = read_config(Path(config_file) if config_file else None, changes)
    check_target(out, "config", force=force)
    from dpftrl.cli.train import check_extra

    check_extra()
    from dpftrl.tuning import choose_stand_in, tune

    chosen = choose_stand_in(config, task=stand_in, public=public, population=population)
    if not as_json:
        say(
            f"trials are run on {chosen.title}, with {chosen.population:,} clients; the text of "
            "your own users is not used"
        )
    with progress_bar("tuning") as on_progress:
        choice = tune(
            config,
            chosen,
            out.with_name(out.name + ".trials.jsonl"),
            minutes=minutes,
            trials=trials,
            workers=workers,
            seed=seed,
            on_progress=on_progress,
        )
    out.write_text(tuned_text(choice, config), encoding="utf-8")
    _print_result(choice, config, out, as_json)


def tuned_text(choice: "Choice", config: "Config") -> str:
    """Return the chosen configuration as TOML, with the reasons as comments."""
    from dpftrl.simulation.config import config_text

    lines = [
        f"{MARK}.",
        f"# Trials were run on {choice.stand_in.title}, not on the users of this training, with",
        f"# {choice.stand_in.population:,} clients and the noise of the plan. Nothing here was",
        "# computed from the private users.",
        "#",
        *(f"# {reason}" for reason in reasons(choice, config)),
        "#",
        *(f"# {line}" for line in TRANSFERS),
        "",
    ]
    return "\n".join(lines) + "\n" + config_text(choice.config)


def reasons(choice: "Choice", config: "Config") -> list[str]:
    """Return why each setting was changed or kept, one line each."""
    from dpftrl.tuning.candidates import FACTORS, setting

    best, base = choice.best, choice.base
    trained = [one for one in choice.results if one.failed is None and one.share == best.share]
    lines = [
        f"The chosen settings reached an accuracy of {best.accuracy:.2%} on held-out people, the "
        f"best of {len(trained)} trials that were trained to the end."
    ]
    reached = "" if base.share == 1 else f" after {base.share:.0%} of their rounds"
    lines.append(f"The settings before the tuning reached {base.accuracy:.2%}{reached}.")
    for name in FACTORS:
        before, after = setting(config, name), setting(choice.config, name)
        if before is None:
            continue
        if before == after:
            lines.append(f"{name} stays at {_value(before)}.")
            continue
        others = [one.accuracy for one in trained if name not in one.changes]
        against = f"; best with {_value(before)}: {max(others):.2%}" if others else ""
        lines.append(f"{name}: {_value(before)} -> {_value(after)}{against}.")
    return lines


def _value(value: Any) -> str:
    if isinstance(value, dict):
        sizes = cast("dict[str, int]", value)
        return ", ".join(f"{name} {size}" for name, size in sizes.items())
    return f"{value:g}"


def _print_result(choice: "Choice", config: "Config", out: Path, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "config": str(out),
                "stand_in": choice.stand_in.title,
                "population": choice.stand_in.population,
                "changes": choice.best.changes,
                "accuracy": choice.best.accuracy,
                "accuracy_before": choice.base.accuracy,
                "reasons": reasons(choice, config),
                "transfers": TRANSFERS,
                "trials": choice.results,
            }
        )
        return
    table = Table("trial", "changes", "rounds", "accuracy", "perplexity", "seconds")
    ranked = sorted(choice.results, key=lambda one: (-one.share, -one.accuracy))
    for one in ranked[:MOST_SHOWN]:
        changes = "; ".join(f"{name} {_value(value)}" for name, value in one.changes.items())
        numbers = (f"{one.accuracy:.2%}", f"{one.perplexity:.1f}", f"{one.seconds:.0f}")
        table.add_row(str(one.trial), changes or "none", f"{one.share:.0%}", *numbers)
    print_table(table)
    for line in (*reasons(choice, config), *TRANSFERS):
        say(line)
    say(f"settings: {out}; to train with them: dpftrl train {out} --out run")
