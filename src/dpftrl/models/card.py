"""The model card of an exported model, in the format of Hugging Face: YAML and Markdown."""

import json
from typing import Final

from dpftrl._internal.formatting import in_full, rounded_up
from dpftrl.models.description import ModelDescription, size_of_vocabulary
from dpftrl.models.released import MODEL_FILE, ReleasedModel
from dpftrl.statement.statement import Statement

# The first line of the metadata: the mark by which the command line knows a card of its own.
CARD_MARK: Final = "library_name: dpftrl"
LANGUAGES: Final = {"chitchat": "en", "stackoverflow": "en", "poetry": "lzh"}
TAGS: Final = ("differential-privacy", "federated-learning", "dp-ftrl")


def model_card(model: ReleasedModel, statement: Statement, file: str = MODEL_FILE) -> str:
    """Return the model card of an exported model, with its privacy statement.

    Everything in the card is public: the metadata of the model, and the statement. It has no
    metrics and no statistics of the text.

    Args:
        model: The exported model.
        statement: The privacy statement of the run that released it.
        file: The name of the model's file, for the examples.
    """
    described = model.description
    parts = [
        _front_matter(model),
        f"# {_title(described)}",
        _summary(model),
        "## How to use it",
        _usage(described, file),
        "## The model",
        _architecture(model),
        "## Where it comes from",
        _provenance(model),
        "## Limits",
        _limits(described),
        _demoted(statement.markdown()),
    ]
    return "\n\n".join(parts).rstrip() + "\n"


def _front_matter(model: ReleasedModel) -> str:
    described = model.description
    lines = ["---", CARD_MARK]
    if described is not None and described.task in LANGUAGES:
        lines += ["language:", f"- {LANGUAGES[described.task]}"]
    tags = (*TAGS, "next-word-prediction") if described is not None else TAGS
    lines += ["tags:", *(f"- {tag}" for tag in tags)]
    # Fields of our own; Hugging Face keeps what it does not know.
    lines += [
        "privacy:",
        f"  epsilon: {rounded_up(model.epsilon)}",
        f"  delta: {in_full(model.delta)}",
        f"  rounds: {model.rounds}",
        f"  runs: {json.dumps([run.run for run in model.runs])}",
        "---",
    ]
    return "\n".join(lines)


def _title(described: ModelDescription | None) -> str:
    if described is None:
        return "A model trained with differential privacy"
    return "A next-word model trained with differential privacy"


def _summary(model: ReleasedModel) -> str:
    return (
        f"This model was trained with DP-FTRL in {model.rounds:,} rounds. Its training is "
        f"({rounded_up(model.epsilon)}, {in_full(model.delta)})-differentially private for each "
        "client; the privacy statement below says what that means and what it rests on."
    )


def _usage(described: ModelDescription | None, file: str) -> str:
    if described is None:
        return (
            "```python\nimport dpftrl\n\n"
            f"model = dpftrl.load_model({json.dumps(file)})\n"
            "print(model.arrays.keys(), model.epsilon)\n```"
        )
    return (
        f'```console\n$ dpftrl predict {file} "see you"\n```\n\n'
        "```python\nimport dpftrl\n\n"
        f"model = dpftrl.load_model({json.dumps(file)})\n"
        'print(model.predict("see you", top=3))\n```'
    )


def _architecture(model: ReleasedModel) -> str:
    size = sum(array.size for array in model.arrays.values())
    if model.description is None:
        names = ", ".join(f"`{name}` {array.shape}" for name, array in model.arrays.items())
        return f"{size:,} parameters: {names}."
    described = model.description
    sizes = ", ".join(f"{name} {value}" for name, value in described.architecture.sizes.items())
    preprocessing = described.preprocessing
    return (
        f"`{described.architecture.name}` ({sizes}), {size:,} parameters. The vocabulary has "
        f"{len(described.words):,} words from a public source and "
        f"{size_of_vocabulary(described) - len(described.words)} special tokens. Text is split by "
        f"`{preprocessing.cut}`, and sentences had up to {preprocessing.sentence_length} words. "
        "All of this is in the metadata of the file, field `dpftrl_model`."
    )


def _provenance(model: ReleasedModel) -> str:
    lines = [
        f"- Private run `{run.run or 'not recorded'}`"
        + (f" ({_escaped(run.population)})" if run.population else "")
        + f": epsilon {rounded_up(run.guarantee.epsilon)} at delta {in_full(run.guarantee.delta)}"
        + ("; its noise key was a test key: NOTHING IS PRIVATE" if run.test_key else "")
        for run in model.runs
    ]
    if model.description is not None:
        source = model.description.source
        lines.append(
            f"- Task `{model.description.task}`" + (f": {_escaped(source)}" if source else "")
        )
        lines.append(f"- Written by {model.description.created_by}")
    return "\n".join(lines)


def _limits(described: ModelDescription | None) -> str:
    text = (
        "The guarantee bounds what the model reveals about any one client. It does not bound what "
        "it reveals about facts that many clients share, and it says nothing about bias or errors."
    )
    if described is None:
        return text
    return (
        f"{text} The model only predicts words of its vocabulary, one at a time. It was not "
        "checked for offensive suggestions."
    )


def _escaped(text: str) -> str:
    """Text of an operator, so that it cannot become markup."""
    return "".join(f"\\{c}" if c in r"\`*_[]<>|~&$#" else c for c in text)


def _demoted(markdown: str) -> str:
    """Markdown whose headings are one level lower, without images; code stays as it is."""
    lines, in_code = list[str](), False
    for line in markdown.splitlines():
        if line.startswith("!["):
            continue  # the curves: an image beside the statement, and metrics are not in a card
        if line.startswith("```"):
            in_code = not in_code
        lines.append(f"#{line}" if line.startswith("#") and not in_code else line)
    return "\n".join(lines)
