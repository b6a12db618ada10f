"""What a statement says of the accounting: mechanism, numbers, hypotheses, the formal sentence."""

from collections.abc import Iterator
from itertools import count
from typing import Any, cast

import msgspec
import numpy as np

from dpftrl.accounting import Run
from dpftrl.report.document import Block, Paragraph, Section, Span, Table, Text
from dpftrl.report.facts import Facts, catalogue_name, delta_text, empty
from dpftrl.report.hypotheses import StatedBasis, StatedHypothesis
from dpftrl.report.numbers import in_full, rounded_up
from dpftrl.report.twin import matrix_digest
from dpftrl.report.wording import bases, formal, limits, number_rows

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
        ("noise multiplier", f"{in_full(run.sigma)} (standard deviation of Z over the clip norm)"),
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
