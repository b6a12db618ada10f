"""`dpftrl predict`: the next words that an exported model predicts."""

import sys
from collections.abc import Iterator
from pathlib import Path

import click

from dpftrl.cli.output import print_json, print_json_line, say, working
from dpftrl.models import ReleasedModel, load_model

PROMPT = "> "


@click.command("predict")
@click.argument("model", metavar="MODEL", type=click.Path(path_type=Path))
@click.argument("text", required=False)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Number of words to print.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; one line per text of a prompt.")
def predict_command(model: Path, text: str | None, top: int, as_json: bool) -> None:
    """Predict the next word after TEXT with an exported model.

    MODEL is a .safetensors file, or a folder, that `dpftrl export` wrote. The text that the model
    was trained on is not needed. Without TEXT, there is a prompt: type a text and press Enter;
    Ctrl-D ends. From a pipe, each line is a text.
    """
    with working(f"reading {model}"):
        loaded = load_model(model)
        loaded.predict("", top=1)  # refuses what cannot predict, and compiles the model
    if text is not None:
        if as_json:
            print_json(_as_json(loaded, text, top))
        else:
            _print(loaded, text, top)
        return
    if sys.stdin.isatty() and not as_json:
        say(f"{loaded!r}")
    for line in _lines():
        if as_json:
            print_json_line(_as_json(loaded, line, top))
        else:
            _print(loaded, line, top)


def _lines() -> Iterator[str]:
    """Yield the lines of standard input; show a prompt on a terminal."""
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            click.echo(PROMPT, nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            if is_terminal:
                click.echo(err=True)  # the shell's prompt starts on a new line
            return
        yield line.rstrip("\n")


def _as_json(model: ReleasedModel, text: str, top: int) -> dict[str, object]:
    return {
        "text": text,
        "predictions": [
            {"word": one.word, "probability": one.probability} for one in model.predict(text, top)
        ],
        "unknown_words": model.unknown_words(text),
        "epsilon": model.epsilon,
        "delta": model.delta,
    }


def _print(model: ReleasedModel, text: str, top: int) -> None:
    predictions = model.predict(text, top)
    width = max(len(one.word) for one in predictions)
    for one in predictions:
        say(f"{one.word:<{width}}  {one.probability:6.1%}")
    if unknown := model.unknown_words(text):
        say(f"not in the vocabulary: {', '.join(unknown)}", err=True)
