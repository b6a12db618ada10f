"""What a statement says of the accounting: mechanism, numbers, hypotheses, the formal sentence."""

import json
import shlex
from collections.abc import Iterator
from itertools import count
from typing import Any, cast

import msgspec
import numpy as np

from dpftrl import __version__
from dpftrl._internal.formatting import in_full, rounded_up
from dpftrl.accounting import Run
from dpftrl.participation import FixedEpochs
from dpftrl.statement.document import Block, Commands, Paragraph, Section, Span, Table, Text
from dpftrl.statement.facts import Facts, Input, catalogue_name, delta_text, empty
from dpftrl.statement.hypotheses import StatedBasis, StatedHypothesis
from dpftrl.statement.json_content import matrix_digest
from dpftrl.statement.wording import bases, formal, limits, number_rows

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
    words += [
        "--noise-multiplier",
        in_full(run.noise_multiplier),
        "--delta",
        in_full(facts.guarantee.delta),
    ]
    if facts.guarantee.devices > 1:
        words += ["--devices", str(facts.guarantee.devices)]
    return shlex.join(words)


# Longer lists of numbers are left to the JSON twin.
MOST_SHOWN = 24

# With a sign each, so that black and white shows the difference too.
SIGNS: dict[StatedBasis, str] = {
    "enforced": "✔ enforced",
    "observed": "◉ observed",
    "claimed": "◇ claimed",
    "assumed": "△ assumed",
}


def accounting_section(facts: Facts) -> Section:
    """From the mechanism to the formal statement."""
    runs = facts.guarantee.runs
    return Section(
        "3. Accounting",
        sections=(
            Section("3.1 Kind of accounting", tuple(map(Paragraph, _kind(facts)))),
            Section("3.2 Mechanism and noise", tuple(map(_run, runs, count(1)))),
            Section("3.3 Numbers", tuple(_numbers(facts))),
            Section("3.4 Hypotheses", tuple(_hypotheses(facts))),
            Section("3.5 Formal statement", (Paragraph(Span(formal(facts), "strong")),)),
            Section("3.6 Ideal noise and real noise", tuple(map(Paragraph, _real(facts)))),
        ),
    )


def _kind(facts: Facts) -> Iterator[str]:
    yield (
        "The releases follow from one Gaussian mechanism a run: the rows of C X + Z, where X has "
        "the clipped sums, C is the strategy of the mechanism, and Z is independent Gaussian "
        "noise. This stays true when a round depends on the models released before it."
    )
    yield (
        "Epsilon is that of exact accounting for Gaussian mechanisms, which is also what privacy "
        "loss distributions (PLD) give, up to their rounding. Rho is that of zero-concentrated "
        "differential privacy (zCDP). No numerical error makes epsilon smaller than it is, and "
        "whatever is rounded here is rounded up."
    )
    if len(facts.guarantee.runs) > 1:
        yield "The runs are composed: " + (
            "the squares of their mu add up, as if one device were at its worst in every run."
            if facts.guarantee.common_cap is None
            else "of all ways in which a device may share its rounds out, the worst counts."
        )
    if facts.kind == "exact":
        yield "The numbers are exact: some pattern of participation attains them."
    else:
        yield "The numbers are an upper bound: no pattern of participation need attain them."


def _run(run: Run, number: int) -> Table:
    kind = "exact" if run.sensitivity.kind == "exact" else "an upper bound"
    name = catalogue_name(run)
    rows: list[tuple[Text, ...]] = [
        ("mechanism", Span(name or run.mechanism.family, "code")),
        *((key, _parameter(value)) for key, value in run.mechanism.parameters().items()),
        ("rounds", f"{run.participation.rounds:,}"),
        ("participation", limits(run.participation)),
        ("sensitivity", f"{in_full(run.sensitivity.value)} ({kind}), at clip norm 1"),
        (
            "noise multiplier",
            f"{in_full(run.noise_multiplier)} (standard deviation of Z over the clip norm)",
        ),
        ("mu", f"{in_full(run.mu)} (sensitivity over noise multiplier)"),
    ]
    caption = f"Run {number}: the noise that is added, with every digit."
    return Table(caption, ("", "value"), tuple(rows))


def _parameter(value: Any) -> Text:
    if isinstance(value, np.ndarray):
        matrix = cast("np.ndarray[Any, Any]", value)
        shape = " x ".join(f"{size:,}" for size in matrix.shape)
        return f"{shape} numbers, as little-endian float64 of SHA-256 {matrix_digest(matrix)}"
    if isinstance(value, list) and len(cast("list[Any]", value)) > MOST_SHOWN:
        return f"{len(cast('list[Any]', value)):,} numbers, all of them in the JSON file"
    return Span(msgspec.json.encode(value).decode().replace(",", ", "), "code")


def _numbers(facts: Facts) -> Iterator[Block]:
    stated = facts.guarantee
    yield Table(
        "The parameters that are stated, rounded up, and as they were computed.",
        ("", "stated", "in full"),
        number_rows(stated),
    )
    rows = tuple(
        (
            delta_text(one) + (" (stated)" if one.delta == stated.delta else ""),
            "no guarantee" if empty(one) else rounded_up(one.epsilon),
        )
        for one in facts.by_delta
    )
    yield Table("Epsilon at several deltas.", ("delta", "epsilon"), rows)


def _hypotheses(facts: Facts) -> Iterator[Block]:
    yield Paragraph(
        (
            "The guarantee holds if all of these do. ",
            _sign("enforced"),
            ": the server refused anything else during the run, and the run's files verify. ",
            _sign("observed"),
            ": read from the log, after the run. ",
            _sign("claimed"),
            ": a file or the operator says so, and nothing here shows it. ",
            _sign("assumed"),
            ": taken for granted here; somebody has to see to it.",
        )
    )
    head = ("hypothesis", "basis", "what it says")
    caption = f"Of {len(facts.hypotheses)} hypotheses: {bases(facts)}."
    yield Table(caption, head, tuple(map(_hypothesis, facts.hypotheses)))


def _hypothesis(one: StatedHypothesis) -> tuple[Text, ...]:
    return (one.name, _sign(one.basis), one.text)


def _sign(basis: StatedBasis) -> Span:
    return Span(SIGNS[basis], basis)


def _real(facts: Facts) -> Iterator[str]:
    yield (
        "The guarantee is computational. The Gaussians are made from a keystream that looks random "
        "to everybody who does not have its key; somebody who could tell the difference would not "
        "be bound by epsilon."
    )
    yield (
        "The sampler that turns the keystream into Gaussians ends far out in their tails. That "
        f"takes at most {rounded_up(facts.guarantee.sampler_delta, 2)} of delta (more for more "
        "devices together), and zCDP holds but for an event of that probability. The delta that is "
        "stated includes it."
    )
