"""The sections of a statement about accounting, and about how to recompute the statement."""

import json
import shlex
from collections.abc import Iterator, Sequence
from decimal import ROUND_DOWN, Context
from itertools import count
from typing import Any, cast

import msgspec
import numpy as np

from dpftrl import __version__
from dpftrl._internal.formatting import in_full, rounded_down, rounded_up
from dpftrl.accounting import Guarantee, Run
from dpftrl.participation import FixedEpochs
from dpftrl.statement.document import Block, Commands, Paragraph, Section, Span, Table, Text
from dpftrl.statement.facts import (
    Facts,
    Input,
    StatedBasis,
    StatedHypothesis,
    catalogue_name,
    delta_text,
    is_empty,
    matrix_digest,
)
from dpftrl.statement.sections import (
    basis_counts,
    epsilon_at_delta,
    formal_sentence,
    limits_text,
    number_rows,
    unit_text,
)

# For each kind of input file: the module and the function that load the file, and the attribute of
# the loaded value that is the guarantee.
LOADERS = {
    "plan": ("dpftrl.plan", "load_plan", ".guarantee"),
    "guarantee": ("dpftrl.accounting", "load_guarantee", ""),
    "run guarantee": ("dpftrl.accounting", "load_guarantee", ""),
}


def verification_section(facts: Facts) -> Section:
    """Return the section that says how to recompute the statement."""
    return Section("4. Transparency and verification", tuple(_verification_blocks(facts)))


def _verification_blocks(facts: Facts) -> Iterator[Block]:
    date = "" if facts.date is None else f" It was made on {facts.date}."
    yield Paragraph(
        (
            f"This statement was made by dpftrl {__version__}, which is open source (Apache-2.0)."
            f"{date} The same facts, with all parameters in full, are in the JSON file that comes "
            "with it, of format ",
            Span("dpftrl statement", "code"),
            ".",
        )
    )
    if facts.inputs:
        rows = tuple(
            (file.role, Span(file.name, "code"), Span(file.sha256, "code")) for file in facts.inputs
        )
        yield Table("The files that it was made from.", ("", "file", "SHA-256"), rows)
    lines = tuple(_commands(facts))
    has_log = any(file.role == "log" for file in facts.inputs)
    not_published = (
        " Only the operator of the training has the log, which is not published." if has_log else ""
    )
    if facts.evidence != "none":
        not_published = (
            " Only the operator of the training has the log and the run's private files, which are "
            "not published. Without them, the same command says claimed instead of enforced."
        )
    if lines:
        yield Paragraph(
            "These commands recompute it, in a folder that has the files under these names."
            f"{not_published} The numbers in a file are never trusted: they are recomputed from "
            "its mechanism, its participation and its noise. Its words are not trusted either: a "
            "hypothesis is called enforced only if the run verifies."
        )
        yield Commands(lines)


def _commands(facts: Facts) -> Iterator[str]:
    """Yield the shell commands that recompute the statement and the guarantee of each run."""
    if facts.inputs:
        yield _statement_command(facts)
    source = next((file for file in facts.inputs if file.role == "run guarantee"), None)
    source = source or (facts.inputs[0] if facts.inputs else None)
    for number, run in enumerate(facts.guarantee.runs):
        name = catalogue_name(run)
        if name is None and source is not None:
            name = (
                "mechanism.json" if len(facts.guarantee.runs) == 1 else f"mechanism-{number}.json"
            )
            yield _extract_command(source, number, name)
        if name is not None:
            for unit in facts.by_unit:
                yield _account_command(unit, run, name)


def _statement_command(facts: Facts) -> str:
    words = ["dpftrl", "statement", facts.inputs[0].name]
    folder = next((file.name.rpartition("/")[0] for file in facts.inputs[1:]), "")
    words += ["--run", folder] if folder else []
    checks = () if facts.verdict is None else facts.verdict.checks
    if any((check.name, check.outcome) == ("witness", "warning") for check in checks):
        words += ["--no-witness"]
    words += [word for count in facts.devices for word in ("--devices", str(count))]
    words += [] if facts.date is None else ["--date", facts.date]
    for name, text in facts.details.given().items():
        words += [f"--{name.replace('_', '-')}", text]
    return shlex.join([*words, "--json"])


def _extract_command(source: Input, number: int, name: str) -> str:
    """Return the command that saves the mechanism of a run to a file.

    The command is for a mechanism that has no name on the command line.
    """
    module, load, field = LOADERS[source.role]
    # JSON strings have double quotes, so that shlex can put single quotes around the code.
    file = json.dumps(source.name, ensure_ascii=False)
    code = (
        f"import dpftrl, {module}; dpftrl.save_mechanism("
        f'{module}.{load}({file}){field}.runs[{number}].mechanism, "{name}")'
    )
    return shlex.join(["python", "-c", code])


def _account_command(unit: Guarantee, run: Run, name: str) -> str:
    p = run.participation
    words = ["dpftrl", "account", name, "--rounds", str(p.rounds), "--min-sep", str(p.min_sep)]
    words += ["--max-participations", str(p.max_participations)]
    words += ["--fixed-epochs"] if isinstance(p, FixedEpochs) else []
    words += [
        "--noise-multiplier",
        in_full(run.noise_multiplier),
        "--delta",
        in_full(unit.delta),
    ]
    if unit.devices > 1:
        words += ["--devices", str(unit.devices)]
    return shlex.join(words)


PARAMETER_DIGITS = 6  # digits of a parameter of a mechanism in the text
MOST_SHOWN = 24  # longer lists of numbers are only in the JSON file: they would fill the page

# Each basis has its own sign, so that the difference also shows without colors.
SIGNS: dict[StatedBasis, str] = {
    "enforced": "✔ enforced",
    "observed": "◉ observed",
    "claimed": "◇ claimed",
    "assumed": "△ assumed",
}


def accounting_section(facts: Facts) -> Section:
    """Return the section about accounting, from the mechanism to the formal statement."""
    runs = facts.guarantee.runs
    return Section(
        "3. Accounting",
        sections=(
            Section("3.1 Kind of accounting", tuple(map(Paragraph, _accounting_kind(facts)))),
            Section("3.2 Mechanism and noise", tuple(map(_run_table, runs, count(1)))),
            Section("3.3 Numbers", tuple(_numbers(facts))),
            Section("3.4 Hypotheses", tuple(_hypotheses(facts))),
            Section(
                "3.5 Formal statement",
                tuple(Paragraph(Span(formal_sentence(unit), "strong")) for unit in facts.by_unit),
            ),
            Section("3.6 Ideal noise and real noise", tuple(map(Paragraph, _real_noise(facts)))),
        ),
    )


def _accounting_kind(facts: Facts) -> Iterator[str]:
    yield (
        "The releases of each run follow from one Gaussian mechanism: the rows of C X + Z, where X "
        "has the clipped sums, C is the strategy of the mechanism, and Z is independent Gaussian "
        "noise. This stays true when a round depends on the models released before it."
    )
    yield (
        "Epsilon comes from exact accounting for Gaussian mechanisms. Privacy loss distributions "
        "(PLD) give the same value, up to their rounding. Rho is the parameter of "
        "zero-concentrated differential privacy (zCDP). No numerical error makes epsilon "
        "too small. This text shows few digits: the noise multiplier is rounded down, and all "
        "other numbers about privacy are rounded up. The JSON file has all digits."
    )
    yield (
        "For several clients (devices) of one person, mu is that of one client times their number "
        "(group privacy). This is an upper bound."
    )
    if len(facts.guarantee.runs) > 1:
        yield "The runs are composed: " + (
            "the squares of their mu add up, as if one client were at its worst in every run."
            if facts.guarantee.common_cap is None
            else "of all ways to divide the rounds of a client among the runs, the worst counts."
        )
    if facts.kind == "exact":
        yield "The numbers for one client are exact: some pattern of participation attains them."
    else:
        yield "The numbers are an upper bound: no pattern of participation need attain them."


def _run_table(run: Run, number: int) -> Table:
    kind = "exact" if run.sensitivity.kind == "exact" else "an upper bound"
    name = catalogue_name(run)
    rows: list[tuple[Text, ...]] = [
        ("mechanism", Span(name or run.mechanism.family, "code")),
        *((key, _parameter(value)) for key, value in run.mechanism.parameters().items()),
        ("rounds", f"{run.participation.rounds:,}"),
        ("participation", limits_text(run.participation)),
        ("sensitivity", f"{rounded_up(run.sensitivity.value)} ({kind}), at clip norm 1"),
        (
            "noise multiplier",
            f"{rounded_down(run.noise_multiplier)} (standard deviation of Z over the clip norm)",
        ),
        ("mu of one client", f"{rounded_up(run.mu)} (sensitivity over noise multiplier)"),
    ]
    caption = f"Run {number}: the noise that is added. The JSON file has all digits."
    return Table(caption, ("", "value"), tuple(rows))


def _parameter(value: Any) -> Text:
    if isinstance(value, np.ndarray):
        matrix = cast("np.ndarray[Any, Any]", value)
        shape = " x ".join(f"{size:,}" for size in matrix.shape)
        return f"{shape} numbers, as little-endian float64 of SHA-256 {matrix_digest(matrix)}"
    if isinstance(value, list) and len(cast("list[Any]", value)) > MOST_SHOWN:
        return f"{len(cast('list[Any]', value)):,} numbers, all of them in the JSON file"
    shown = _shortened(value)
    text = msgspec.json.encode(shown).decode().replace(",", ", ")
    return Span(text, "code") if shown == value else (Span(text, "code"), " (rounded)")


def _shortened(value: Any) -> Any:
    """Return a parameter with its numbers rounded to a few digits, towards zero.

    A mechanism's parameters have no safe side. Towards zero, a decay below 1 is not shown as 1.
    """
    if isinstance(value, float):
        context = Context(prec=PARAMETER_DIGITS, rounding=ROUND_DOWN)
        return float(context.create_decimal(repr(value)))
    if isinstance(value, list | tuple):
        return [_shortened(part) for part in cast("Sequence[Any]", value)]
    return value


def _numbers(facts: Facts) -> Iterator[Block]:
    head = ("", *map(unit_text, facts.by_unit))
    caption = "The stated parameters, rounded up. The JSON file has all digits."
    yield Table(caption, head, number_rows(facts.by_unit))
    head = ("delta", *(f"epsilon for {unit_text(unit)}" for unit in facts.by_unit))
    rows = tuple(_delta_row(facts, guarantee) for guarantee in facts.by_delta)
    yield Table("Epsilon at several deltas.", head, rows)


def _delta_row(facts: Facts, stated: Guarantee) -> tuple[str, ...]:
    """Return a delta, and the epsilon of each unit at that delta."""
    shown = delta_text(stated)
    mark = " (stated)" if stated.delta == facts.guarantee.delta else ""
    cells: list[str] = []
    for unit in facts.by_unit:
        guarantee = unit.at(stated.delta)
        # The sampler can add to the delta of many devices.
        is_same = delta_text(guarantee) == shown and not is_empty(guarantee)
        cells.append(rounded_up(guarantee.epsilon) if is_same else epsilon_at_delta(guarantee))
    return (shown + mark, *cells)


def _hypotheses(facts: Facts) -> Iterator[Block]:
    yield Paragraph(
        (
            "The guarantee holds if all of these hypotheses hold. ",
            _sign("enforced"),
            ": the server refused anything else during the run, and the run's files verify. ",
            _sign("observed"),
            ": it was read from the log, after the run. ",
            _sign("claimed"),
            ": a file or the operator says so, without evidence. ",
            _sign("assumed"),
            ": this statement has no evidence for it; it must be ensured in another way.",
        )
    )
    head = ("hypothesis", "basis", "what it says")
    caption = f"{len(facts.hypotheses)} hypotheses: {basis_counts(facts)}."
    yield Table(caption, head, tuple(map(_hypothesis_row, facts.hypotheses)))


def _hypothesis_row(hypothesis: StatedHypothesis) -> tuple[Text, ...]:
    return (hypothesis.name, _sign(hypothesis.basis), hypothesis.text)


def _sign(basis: StatedBasis) -> Span:
    return Span(SIGNS[basis], basis)


def _real_noise(facts: Facts) -> Iterator[str]:
    yield (
        "The guarantee is computational. The Gaussians are computed from a keystream that looks "
        "random to everybody who does not have its key. Epsilon does not bound what somebody "
        "learns who can tell this keystream from random bits."
    )
    uses = " and ".join(
        f"{rounded_up(unit.sampler_delta, 2)} (for {unit_text(unit)})" for unit in facts.by_unit
    )
    yield (
        "The sampler that turns the keystream into Gaussians has a finite range: it ends far out "
        f"in their tails. This uses at most {uses} of delta, and zCDP holds except for an event of "
        "that "
        "probability. The stated delta includes it."
    )
