"""What a statement says of how to check it: versions, files, commands."""

import json
import shlex
from collections.abc import Iterator

from dpftrl import __version__
from dpftrl.accounting import Run
from dpftrl.participation import FixedEpochs
from dpftrl.report.document import Block, Commands, Paragraph, Section, Span, Table
from dpftrl.report.facts import Facts, Input, catalogue_name
from dpftrl.report.numbers import in_full

LOADERS = {
    "plan": ("dpftrl.plan", "load_plan", ".guarantee"),
    "guarantee": ("dpftrl.accounting", "load_guarantee", ""),
    "run guarantee": ("dpftrl.accounting", "load_guarantee", ""),
}


def verification_section(facts: Facts) -> Section:
    """How to recompute everything."""
    return Section("4. Transparency and verification", tuple(_blocks(facts)))


def _blocks(facts: Facts) -> Iterator[Block]:
    made = "" if facts.date is None else f" It was made on {facts.date}."
    yield Paragraph(
        (
            f"This statement was made by dpftrl {__version__}, which is open source (Apache-2.0)."
            f"{made} The same facts, with all parameters in full, are in the JSON file that comes "
            "with it, of format ",
            Span("dpftrl statement", "code"),
            ".",
        )
    )
    if facts.inputs:
        rows = tuple(
            (one.role, Span(one.name, "code"), Span(one.sha256, "code")) for one in facts.inputs
        )
        yield Table("What it was made from.", ("", "file", "SHA-256"), rows)
    lines = tuple(_commands(facts))
    has_log = any(one.role == "log" for one in facts.inputs)
    log = " The log, which is not published, is for whoever ran the training." if has_log else ""
    if facts.evidence != "none":
        log = (
            " The log and the run's private files, which are not published, are for whoever ran "
            "the training: without them the same command says claimed instead of enforced."
        )
    if lines:
        yield Paragraph(
            f"These commands recompute it, in a folder that holds the files by these names.{log} "
            "The numbers in a file are never trusted: they are computed again from its mechanism, "
            "its participation and its noise. Nor are its words: a hypothesis is called enforced "
            "only if the run verifies."
        )
        yield Commands(lines)


def _commands(facts: Facts) -> Iterator[str]:
    if facts.inputs:
        yield _statement(facts)
    source = next((one for one in facts.inputs if one.role == "run guarantee"), None)
    source = source or (facts.inputs[0] if facts.inputs else None)
    for number, run in enumerate(facts.guarantee.runs):
        name = catalogue_name(run)
        if name is None and source is not None:
            name = (
                "mechanism.json" if len(facts.guarantee.runs) == 1 else f"mechanism-{number}.json"
            )
            yield _extract(source, number, name)
        if name is not None:
            yield _account(facts, run, name)


def _statement(facts: Facts) -> str:
    words = ["dpftrl", "statement", facts.inputs[0].name]
    folder = next((one.name.rpartition("/")[0] for one in facts.inputs[1:]), "")
    words += ["--run", folder] if folder else []
    checks = () if facts.verdict is None else facts.verdict.checks
    if any((check.name, check.outcome) == ("witness", "warning") for check in checks):
        words += ["--no-witness"]
    words += [word for count in facts.devices for word in ("--devices", str(count))]
    words += [] if facts.date is None else ["--date", facts.date]
    return shlex.join([*words, "--json"])


def _extract(source: Input, number: int, name: str) -> str:
    """Take a mechanism without a name out of the file."""
    module, load, field = LOADERS[source.role]
    file = json.dumps(source.name, ensure_ascii=False)  # double quotes: easier on the shell's
    code = (
        f"import dpftrl, {module}; dpftrl.save_mechanism("
        f'{module}.{load}({file}){field}.runs[{number}].mechanism, "{name}")'
    )
    return shlex.join(["python", "-c", code])


def _account(facts: Facts, run: Run, name: str) -> str:
    p = run.participation
    words = ["dpftrl", "account", name, "--rounds", str(p.rounds), "--min-sep", str(p.min_sep)]
    words += ["--max-participations", str(p.max_participations)]
    words += ["--fixed-epochs"] if isinstance(p, FixedEpochs) else []
    words += ["--noise-multiplier", in_full(run.sigma), "--delta", in_full(facts.guarantee.delta)]
    if facts.guarantee.devices > 1:
        words += ["--devices", str(facts.guarantee.devices)]
    return shlex.join(words)
