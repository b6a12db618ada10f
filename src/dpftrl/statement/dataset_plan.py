"""The draft of a privacy statement for a plan for a data set, before the training."""

from dpftrl._internal.formatting import probability_in_words, rounded_down, rounded_up, short_up
from dpftrl.accounting import risk_of
from dpftrl.accounting.amplification import SampledGuarantee
from dpftrl.participation import CyclicPoisson
from dpftrl.plan import DatasetPlan
from dpftrl.statement.centralized import NOT_COVERED, SAMPLINGS, SETTING
from dpftrl.statement.document import (
    Bullets,
    Commands,
    Document,
    Notice,
    Paragraph,
    Section,
    Span,
    Table,
)


def draft_statement(plan: DatasetPlan) -> Document:
    """What a statement of a training with this plan could say.

    Nothing was trained, so every hypothesis is claimed or assumed. `dpftrl statement RUN` writes
    the statement of a run.
    """
    promised, dataset = plan.guarantee, plan.dataset
    epsilon, delta = rounded_up(promised.epsilon), short_up(promised.delta)
    summary = (
        f"All {dataset.steps:,} noisy steps of the planned training, and with them all its models, "
        f"will be ({epsilon}, {delta})-differentially private, for each example.",
        f"A delta of {delta} means {probability_in_words(promised.delta)}. Except for an event "
        "with at most this probability, epsilon bounds what anybody can learn from the releases "
        "about one example.",
        risk_of(promised).sentence("the data of an example"),
    )
    return Document(
        "Privacy statement (draft)",
        (
            Notice(
                (
                    Span("Draft.", "strong"),
                    " This describes a plan. Nothing was trained, and nothing was enforced.",
                )
            ),
        ),
        (
            Section("Summary", tuple(map(Paragraph, summary))),
            Section("1. Setting", (Paragraph(SETTING),)),
            Section(
                "2. What the guarantee is about",
                (
                    Paragraph("The unit of privacy is one example of the data set."),
                    Paragraph(f"Neighbors: {promised.adjacency} of one example."),
                    Paragraph("Not covered:"),
                    Bullets(NOT_COVERED),
                ),
            ),
            Section("3. Hypotheses", (_hypotheses(plan),)),
            Section("4. Accounting", (_accounting(plan, epsilon, delta),)),
            Section(
                "5. After the training",
                (
                    Paragraph("These verify the run, and write its statement:"),
                    Commands(("dpftrl verify RUN", "dpftrl statement RUN")),
                ),
            ),
        ),
    )


def _hypotheses(plan: DatasetPlan) -> Table:
    bases = (
        (one.name, one.text, "assumed" if one.basis == "assumed" else "claimed")
        for one in plan.guarantee.hypotheses
    )
    rows = tuple(
        (name, text, Span(basis, "assumed" if basis == "assumed" else "claimed"))
        for name, text, basis in bases
    )
    caption = "What must be true for the guarantee, and how it is known."
    return Table(caption, ("", "hypothesis", "basis"), rows)


def _accounting(plan: DatasetPlan, epsilon: str, delta: str) -> Table:
    promised, dataset = plan.guarantee, plan.dataset
    drawn = promised.sampling if isinstance(promised, SampledGuarantee) else None
    groups = drawn.groups if isinstance(drawn, CyclicPoisson) else 1
    batches = SAMPLINGS[plan.sampling].format(
        unit="example", epoch=dataset.steps_per_epoch, groups=groups
    )
    rows = [
        ("mechanism", plan.mechanism.name),
        ("noise multiplier", rounded_down(plan.noise_multiplier)),
        ("examples", f"{dataset.size:,}"),
        ("batch size", f"{dataset.batch_size:,}"),
        ("steps", f"{dataset.steps:,}"),
        ("batches", batches),
        ("epsilon", epsilon),
        ("delta", delta),
    ]
    if plan.failure:
        rows.append(("probability that the certificate is wrong", rounded_up(plan.failure)))
    return Table("The numbers behind epsilon.", ("", "value"), tuple(rows))
