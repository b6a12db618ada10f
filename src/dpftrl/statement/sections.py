"""What a statement says of setting and definition, and of what happened.

The order is that of the checklist in section 5.3 of Ponomareva et al. (2023), How to DP-fy ML.
"""

from collections.abc import Iterator

from dpftrl._internal.formatting import in_full, percent_up, rounded_up
from dpftrl.accounting import Guarantee
from dpftrl.statement.document import Block, Bullets, Figure, Paragraph, Section, Span, Table
from dpftrl.statement.facts import NOT_COVERED, Facts, delta_text, empty
from dpftrl.statement.wording import at_delta, bases, limits, origin, starts_from, summary, whom

NOTHING = "-"

SETTING = (
    "This is central differential privacy. Devices send clipped updates to a server, which sums "
    "them and adds the noise. The server, and whoever runs it, is trusted to do this correctly, to "
    "keep the noise key and the noise state secret, and to release nothing else about the updates. "
    "Everybody else may be curious: those who see the models, and the other devices too."
)
OUTPUT = (
    "The output is every noisy round of the training. All intermediate models follow from it "
    "without another look at the data, so that they are covered as well, those sent to devices "
    "included."
)
UNIT = (
    "The unit is a device with all its data, however much that is. For a person with one device "
    "this protects the person. Where people share a device, each of them is protected at least as "
    "well. A person with several devices that take part is protected less; the table bounds by how "
    "much."
)
CURVES = (
    "Accuracy on held-out people, who are not protected by this guarantee, and epsilon, round by "
    "round."
)
ZERO_OUT = (
    "Zero-out: two datasets are neighbours if they are equal but for one device, whose every "
    "update is replaced by zeros in one of them. The rounds stay as they are, and so do all other "
    "devices and their number."
)


def summary_section(facts: Facts) -> Section:
    """The numbers, where they come from, and what they mean."""
    told = "the data of a device" if facts.guarantee.devices == 1 else "the data of a person"
    meaning = (
        "In plain words: suppose that somebody sees all releases, knows the data of everybody "
        f"else, and thinks it as likely as not that {told} was used. Whatever they do with that, "
        f"their guess is right with a probability of at most {percent_up(facts.right_guess)}."
    )
    rest = f"It rests on {len(facts.hypotheses)} hypotheses ({bases(facts)}): see section 3.4."
    first = (Span(summary(facts), "strong"), origin(facts), *starts_from(facts))
    texts = (*first, meaning, rest)
    return Section("Summary", tuple(map(Paragraph, texts)))


def happened_section(facts: Facts) -> Section:
    """Promise, run and log side by side."""
    columns = {"planned": facts.alike(facts.promised)}
    if facts.accounted is not None:
        columns["accounted by the server"] = facts.alike(facts.accounted)
    if facts.start is not None and facts.start.runs:
        columns["composed with the earlier runs"] = facts.guarantee
    head = ("", *columns, *(["observed in the log"] if facts.observed else []))
    rows = [
        (label, *(_of_runs(guarantee, label) for guarantee in columns.values()), *seen)
        for label, seen in _seen(facts).items()
    ]
    caption = f"What was promised and what happened; epsilon for {whom(facts.guarantee)}."
    blocks: list[Block] = [Table(caption, head, tuple(rows))]
    if facts.observed is not None:
        blocks.append(Paragraph(_about_log(facts)))
    if facts.curves is not None:
        blocks.append(Figure(CURVES, "curves.png", facts.curves))
    return Section("Planned and observed", tuple(blocks))


def _seen(facts: Facts) -> dict[str, tuple[str, ...]]:
    """The column of the log, if there is one, by row."""
    labels = ("rounds", "min-sep", "most rounds of one device", "noise multiplier", "epsilon")
    seen, ex_post = facts.observed, facts.happened.ex_post
    if seen is None:
        return dict.fromkeys(labels, ())
    apart = f"{seen.min_sep:,}" if seen.max_participations > 1 else NOTHING
    epsilon = NOTHING if ex_post is None else at_delta(ex_post)
    cells = (f"{seen.rounds:,}", apart, f"{seen.max_participations:,}", NOTHING, epsilon)
    return {label: (cell,) for label, cell in zip(labels, cells, strict=True)}


def _of_runs(guarantee: Guarantee, label: str) -> str:
    """One cell: a number a run."""
    if label == "epsilon":
        return at_delta(guarantee)
    cells = {
        "rounds": [f"{run.participation.rounds:,}" for run in guarantee.runs],
        "min-sep": [f"{run.participation.min_sep:,}" for run in guarantee.runs],
        "most rounds of one device": [
            f"{run.participation.max_participations:,}" for run in guarantee.runs
        ],
        "noise multiplier": [in_full(run.noise_multiplier) for run in guarantee.runs],
    }
    return " and ".join(cells[label])


def _about_log(facts: Facts) -> str:
    seen = facts.observed
    assert seen is not None
    devices = f"{seen.clients:,} devices with {seen.participations:,} participations in all"
    if facts.happened.ex_post is None:
        return f"The log has {devices}."
    return (
        f"The log has {devices}. The epsilon observed afterwards (ex post) is what the same noise "
        "gives for the smallest gap and the largest count in the log. It holds for this run, but "
        "no limit that anybody enforced stands behind it."
    )


def setting_section() -> Section:
    """Whom one has to trust."""
    return Section("1. Setting", (Paragraph(SETTING),))


def definition_section(facts: Facts) -> Section:
    """What exactly is private, for whom, against which change."""
    return Section(
        "2. What the guarantee is about",
        sections=(
            Section("2.1 Data accesses covered", tuple(_covered(facts))),
            Section("2.2 Output", (Paragraph(OUTPUT),)),
            Section("2.3 Unit of privacy", tuple(_unit(facts))),
            Section("2.4 Neighbouring datasets", (Paragraph(ZERO_OUT),)),
        ),
    )


def _covered(facts: Facts) -> Iterator[Block]:
    runs = facts.guarantee.runs
    what = "one training run" if len(runs) == 1 else f"{len(runs)} training runs together"
    yield Paragraph(
        f"Covered is every use of device data in {what}, for all devices that keep to the limits "
        "below. A device that does not weakens its own guarantee and nobody else's."
    )
    if facts.fleet is not None:
        yield Paragraph(
            f"It was planned for {facts.fleet.population:,} devices that may take part and "
            f"{facts.fleet.report_goal:,} reports a round."
        )
    rows = tuple(
        (f"run {number}", f"{run.participation.rounds:,}", limits(run.participation))
        for number, run in enumerate(runs, 1)
    )
    yield Table("Rounds, and how often one device may take part.", ("", "rounds", "limits"), rows)
    if facts.guarantee.common_cap is not None:
        yield Paragraph(
            f"Over all runs together: at most {facts.guarantee.common_cap:,} rounds of one device."
        )
    yield from _start_model(facts)
    yield Paragraph("Not covered:")
    yield Bullets(NOT_COVERED)


def _start_model(facts: Facts) -> Iterator[Block]:
    """Where the first model came from, as the run's files say."""
    record = facts.record
    if record is None:
        return
    if record.start is None and record.version == 1:
        yield Paragraph("What the run started from is not recorded: version 0.1 did not do so.")
    elif record.start is None:
        yield Paragraph("The run did not start from a model file.")
    elif not record.start.earlier:
        yield Paragraph(
            (
                "The run started from a model file of SHA-256 ",
                Span(record.start.sha256, "code"),
                ". Its origin is not known to dpftrl.",
            )
        )
    else:
        rows = tuple(
            (
                Span(one.run or "not recorded", "code"),
                one.population or NOTHING,
                f"{one.guarantee.runs[0].participation.rounds:,}" if one.run else NOTHING,
                at_delta(one.guarantee),
                "the same; composed" if one.people == "same" else "others (claimed); not composed",
            )
            for one in record.start.earlier
        )
        head = ("earlier run", "population", "rounds", "epsilon by itself", "people")
        caption = "The private runs that the start model was made by, as its file states."
        yield Table(caption, head, rows)


def _unit(facts: Facts) -> Iterator[Block]:
    yield Paragraph(UNIT)
    if facts.guarantee.devices > 1:
        yield Paragraph(f"What this statement says is for {whom(facts.guarantee)}.")
    rows = tuple(
        (f"{one.devices:,}", "no guarantee", NOTHING, NOTHING)
        if empty(one)
        else (
            f"{one.devices:,}",
            rounded_up(one.epsilon),
            delta_text(one),
            rounded_up(one.rho),
        )
        for one in facts.by_devices
    )
    head = ("devices of one person", "epsilon", "delta", "rho")
    yield Table("The guarantee for all devices of one person together.", head, rows)
