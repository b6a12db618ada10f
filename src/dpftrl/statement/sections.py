"""The sentences and the sections of a statement, except the sections about accounting.

The most important sentences come first: the document, the JSON file and the command line repeat
them, and each is defined once. Then come the sections: summary, promised and observed, setting,
definition. Their order is that of the checklist in section 5.3 of Ponomareva et al. (2023), How to
DP-fy ML.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from dpftrl._internal.formatting import percent, percent_up, plain_number, rounded_down, rounded_up
from dpftrl.accounting import Guarantee, risk_of
from dpftrl.auditing.canaries import canary_sentence
from dpftrl.errors import InvalidInput
from dpftrl.federated import EarlierRun
from dpftrl.federated.run_guarantee import AGGREGATORS
from dpftrl.participation import FixedEpochs, Participation
from dpftrl.plan import Fleet
from dpftrl.statement.document import Block, Bullets, Figure, Paragraph, Section, Span, Table
from dpftrl.statement.facts import (
    NOT_COVERED,
    Evidence,
    Facts,
    StatedBasis,
    delta_in_words,
    delta_text,
    is_empty,
    right_guess,
)

ORIGINS = {
    "plan": (
        "This is a plan: the guarantee will hold for a run that keeps to the plan and its "
        "hypotheses."
    ),
    "guarantee": "It was computed from a guarantee file. How the training went is not known here.",
    "log": (
        "It allows for the participation in the log, which was read after the run (ex post), "
        "because the limits were not kept."
    ),
}

# The texts for a guarantee from the server of a run, by the evidence that the server enforced it.
RUN_ORIGINS: dict[Evidence, str] = {
    "verified": (
        "It is what the server of the run enforced and accounted: the run's files verify."
    ),
    "failed": "It is what the run's guarantee file says, but the verification of the run failed.",
    "none": (
        "It is what the run's guarantee file says. The run's private files are not available, so "
        "nothing shows whether its server enforced it."
    ),
}


def summary_sentence(facts: Facts) -> str:
    """Return the guarantee in one plain sentence for each unit, the stated unit first."""
    further = (_further_sentence(guarantee) for guarantee in facts.by_unit[1:])
    return " ".join([_first_sentence(facts.guarantee), *further])


def _first_sentence(stated: Guarantee) -> str:
    if is_empty(stated):
        return f"There is no guarantee for {unit_text(stated)}: the noise is far too small."
    runs = len(stated.runs)
    covered = "the training, and with them all its models,"
    if runs > 1:
        covered = f"the {runs} trainings together, and with them all their models,"
    return f"All noisy rounds of {covered} are {_parameters_text(stated)}, for {unit_text(stated)}."


def _further_sentence(guarantee: Guarantee) -> str:
    """Return the guarantee for one more unit, in one plain sentence."""
    unit = unit_text(guarantee)
    if is_empty(guarantee):
        return f"There is no guarantee for {unit}: the noise is far too small."
    return f"For {unit}, all noisy rounds are {_parameters_text(guarantee)}."


def _parameters_text(guarantee: Guarantee) -> str:
    return (
        f"({rounded_up(guarantee.epsilon)}, {delta_text(guarantee)})-differentially private and "
        f"{rounded_up(guarantee.rho)}-zCDP"
    )


def delta_sentences(facts: Facts) -> tuple[str, ...]:
    """Return what each delta of the headline means, in words; nothing if there is no guarantee."""
    by_text = {
        delta_text(guarantee): delta_in_words(guarantee)
        for guarantee in facts.by_unit
        if not is_empty(guarantee)
    }
    if not by_text:
        return ()
    meaning = (
        "Except for an event with at most this probability, epsilon bounds what anybody can learn "
        f"from the releases about one {' or one '.join(_protected(facts))}."
    )
    return (*(f"A delta of {text} means {words}." for text, words in by_text.items()), meaning)


def _protected(facts: Facts) -> list[str]:
    """Return whom the headline protects: a client, and a person if it is about several devices."""
    is_about_people = any(guarantee.devices > 1 for guarantee in facts.by_unit)
    return ["client", *(["person"] if is_about_people else [])]


def origin_text(facts: Facts) -> str:
    """Return one or two sentences that say where the numbers come from."""
    origin = facts.stated.origin
    text = RUN_ORIGINS[facts.evidence] if origin == "run" else ORIGINS[origin]
    if facts.stated.kept_limits:
        return f"{text} The participation log, read afterwards, keeps to the same limits."
    return text


def start_model_sentences(facts: Facts) -> tuple[str, ...]:
    """Return one sentence for each private run that trained the start model.

    A start model of unknown origin gets one sentence in all; a run without a start model gets none.
    """
    start = facts.start
    if start is None:
        return ()
    if not start.earlier:
        return (
            "It starts from a model file whose origin is not known to dpftrl (SHA-256 "
            f"{start.sha256}): claimed public.",
        )
    return tuple(f"Starts from a private model: {_earlier_run_text(run)}." for run in start.earlier)


def _earlier_run_text(run: EarlierRun) -> str:
    population = "" if run.population is None else f", population {run.population!r}"
    run_id = f"run {run.run}" if run.run else "a run that version 0.1 did not record"
    name = f"{run_id} (epsilon {epsilon_at_delta(run.guarantee)} by itself{population})"
    if run.people == "same":
        return f"{name} on the same people; composed"
    return f"{name}, stated by the operator: on other people (claimed); not composed"


def formal_sentence(stated: Guarantee) -> str:
    """Return a guarantee in one formal sentence."""
    if is_empty(stated):
        return f"For {unit_text(stated)}, there is no epsilon with a delta below 1."
    covered = "the run" if len(stated.runs) == 1 else f"all {len(stated.runs)} runs together"
    difference = _difference(stated)
    return (
        "If all hypotheses above hold, then for any two datasets D and D' that are neighbours by "
        f"zero-out of {difference}, and for any set S of outputs, the noisy rounds M of {covered} "
        f"satisfy Pr[M(D) in S] ≤ exp({rounded_up(stated.epsilon)}) Pr[M(D') in S] + "
        f"{delta_text(stated)}, and M is {rounded_up(stated.rho)}-zCDP."
    )


def unit_text(guarantee: Guarantee) -> str:
    """Return whom a guarantee protects."""
    if guarantee.devices == 1:
        return "each client"
    return f"each person with up to {guarantee.devices:,} devices"


def _difference(guarantee: Guarantee) -> str:
    """Return which clients neighbouring datasets differ in."""
    if guarantee.devices == 1:
        return "one client"
    return f"up to {guarantee.devices:,} clients (devices) of one person"


def limits_text(participation: Participation) -> str:
    """Return how often one client may take part."""
    p = participation
    if p.max_participations == 1:
        return "at most 1 round of one client"
    exactly = "exactly" if isinstance(p, FixedEpochs) else "at least"
    return f"at most {p.max_participations:,} rounds of one client, {exactly} {p.min_sep:,} apart"


def basis_counts(facts: Facts) -> str:
    """Return how many hypotheses are enforced, observed, claimed and assumed."""
    counts = Counter(hypothesis.basis for hypothesis in facts.hypotheses)
    all_bases: tuple[StatedBasis, ...] = ("enforced", "observed", "claimed", "assumed")
    return ", ".join(f"{counts[basis]} {basis}" for basis in all_bases)


def epsilon_at_delta(guarantee: Guarantee) -> str:
    """Return epsilon with its delta, for a table cell."""
    if is_empty(guarantee):
        return "no guarantee"
    return f"{rounded_up(guarantee.epsilon)} at {delta_text(guarantee)}"


def number_rows(guarantees: Sequence[Guarantee]) -> tuple[tuple[str, ...], ...]:
    """Return the name of each privacy parameter, and its value, rounded up, in each guarantee."""
    return (
        ("epsilon", *(_or_none(g, rounded_up(g.epsilon)) for g in guarantees)),
        ("delta", *(_or_none(g, f"{delta_text(g)} ({delta_in_words(g)})") for g in guarantees)),
        ("delta of the sampler", *(rounded_up(g.sampler_delta, 2) for g in guarantees)),
        ("rho (zCDP)", *(rounded_up(g.rho) for g in guarantees)),
        ("mu (Gaussian DP)", *(rounded_up(g.mu) for g in guarantees)),
    )


def _or_none(guarantee: Guarantee, text: str) -> str:
    return "no guarantee" if is_empty(guarantee) else text


NO_VALUE = "-"  # the text of a table cell without a value

SETTING = (
    "This is central differential privacy. Clients send clipped updates to a server, which sums "
    "them and adds the noise. The server, and whoever runs it, is trusted to do this correctly, to "
    "keep the noise key and the noise state secret, and to release nothing else about the updates. "
    "Everybody else may be curious: those who see the models, and the other clients too."
)
TRUSTED_AGGREGATORS = (
    "Some updates may have reached the server through aggregators, which clip and sum the updates "
    "of a share of the clients. The aggregators, and whoever runs them, are trusted like the "
    "server."
)
OUTPUT = (
    "The output is every noisy round of the training. All intermediate models are computed from it "
    "without another use of the data. So they are covered as well, including those that are sent "
    "to clients."
)
UNIT = (
    "The unit is a client: one device with all its data, however much that is. For a person with "
    "one device this protects the person. Where people share a device, each of them is protected "
    "at least as well. A person with several devices that take part is protected less; the table "
    "shows how much less at most."
)
# The same for a guarantee that protects all devices of one person together.
PERSON = (
    "The unit is a person with up to {devices:,} devices that take part: all data of these devices "
    "together, however much that is. Where people share a device, each of them is protected at "
    "least as well. A single client is protected better, and a person with more devices is "
    "protected less; the table shows how much."
)
CURVES = (
    "Accuracy on held-out people, who are not protected by this guarantee, and epsilon, per round."
)
ZERO_OUT = (
    "Zero-out: two datasets are neighbours if they differ in {difference} only, and every update "
    "there is replaced by zeros in one of the two datasets. The rounds, all other clients and the "
    "number of clients are the same."
)


def summary_section(facts: Facts) -> Section:
    """Return the section with the numbers, their origin and their meaning."""
    first, *others = facts.by_unit
    meaning = (
        "In plain words: suppose that somebody sees all releases, knows the data of everybody "
        f"else, and thinks it as likely as not that {_secret(first)} was used. Whatever they do, "
        f"their guess is right with a probability of at most {percent_up(right_guess(first))}."
    )
    for guarantee in others:
        share = percent_up(right_guess(guarantee))
        meaning += f" For {_secret(guarantee)}, this probability is at most {share}."
    hypotheses = (
        f"The guarantee rests on {len(facts.hypotheses)} hypotheses ({basis_counts(facts)}): see "
        "section 3.4."
    )
    attack = " ".join(risk_of(unit).sentence(_secret(unit)) for unit in facts.by_unit)
    texts = (
        Span(summary_sentence(facts), "strong"),
        *([" ".join(delta_sentences(facts))] if delta_sentences(facts) else []),
        origin_text(facts),
        *start_model_sentences(facts),
        meaning,
        attack,
        hypotheses,
    )
    return Section("Summary", tuple(map(Paragraph, texts)))


def _secret(guarantee: Guarantee) -> str:
    if guarantee.devices == 1:
        return "the data of a client"
    return f"the data of a person on up to {guarantee.devices:,} devices"


# The row labels of the details that the publisher gives.
DETAILS = {
    "organisation": "organisation",
    "model_name": "model",
    "contact": "contact",
    "public_data": "public data used",
    "shipped_checkpoint": "checkpoint that ships",
}


def details_table(facts: Facts) -> Table | None:
    """Return the table of what the publisher says, or None if they say nothing."""
    rows = tuple((DETAILS[name], text) for name, text in facts.details.given().items())
    caption = "What the publisher says about the training. dpftrl did not check it."
    return Table(caption, ("", "as stated"), rows) if rows else None


def promised_and_observed_section(facts: Facts) -> Section:
    """Return the section that compares the plan, the run and the log."""
    columns = {"planned": facts.comparable(facts.promised)}
    if facts.accounted is not None:
        columns["accounted by the server"] = facts.comparable(facts.accounted)
    if facts.start is not None and facts.start.runs:
        columns["composed with the earlier runs"] = facts.guarantee
    head = ("", *columns, *(["observed in the log"] if facts.observed else []))
    rows = [
        (label, *(_cell(guarantee, label) for guarantee in columns.values()), *in_log)
        for label, in_log in _log_column(facts).items()
    ]
    caption = f"What was promised and what was observed; epsilon for {unit_text(facts.guarantee)}."
    blocks: list[Block] = [Table(caption, head, tuple(rows))]
    if facts.observed is not None:
        blocks.append(Paragraph(_log_text(facts)))
    if facts.verdict is not None and facts.verdict.empty_rounds:
        blocks.append(
            Paragraph(
                f"In {facts.verdict.empty_rounds:,} of the {facts.verdict.rounds:,} rounds nobody "
                "took part, because too few clients could be contacted. The model took a step with "
                "the noise alone. These rounds count as rounds, and cost no client any privacy."
            )
        )
    if facts.curves is not None:
        blocks.append(Figure(CURVES, "curves.png", facts.curves))
    return Section("Planned and observed", tuple(blocks))


def _log_column(facts: Facts) -> dict[str, tuple[str, ...]]:
    """Return the cell of the log for each row label; no cell if there is no log."""
    labels = ("rounds", "min-sep", "most rounds of one client", "noise multiplier", "epsilon")
    observed, ex_post = facts.observed, facts.stated.ex_post
    if observed is None:
        return dict.fromkeys(labels, ())
    min_sep = f"{observed.min_sep:,}" if observed.max_participations > 1 else NO_VALUE
    epsilon = NO_VALUE if ex_post is None else epsilon_at_delta(ex_post)
    cells = (
        f"{observed.rounds:,}",
        min_sep,
        f"{observed.max_participations:,}",
        NO_VALUE,
        epsilon,
    )
    return {label: (cell,) for label, cell in zip(labels, cells, strict=True)}


def _cell(guarantee: Guarantee, label: str) -> str:
    """Return one cell of the table, with one number per run of the guarantee."""
    if label == "epsilon":
        return epsilon_at_delta(guarantee)
    cells = {
        "rounds": [f"{run.participation.rounds:,}" for run in guarantee.runs],
        "min-sep": [f"{run.participation.min_sep:,}" for run in guarantee.runs],
        "most rounds of one client": [
            f"{run.participation.max_participations:,}" for run in guarantee.runs
        ],
        "noise multiplier": [rounded_down(run.noise_multiplier) for run in guarantee.runs],
    }
    return " and ".join(cells[label])


def _log_text(facts: Facts) -> str:
    observed = facts.observed
    assert observed is not None
    clients = f"{observed.clients:,} clients with {observed.participations:,} participations in all"
    if facts.stated.ex_post is None:
        return f"The log has {clients}."
    return (
        f"The log has {clients}. The epsilon observed afterwards (ex post) is what the same noise "
        "gives for the smallest gap and the largest count in the log. It holds for this run, but "
        "it does not rest on a limit that was enforced."
    )


def setting_section(facts: Facts) -> Section:
    """Return the section that says who must be trusted."""
    has_aggregators = any(one.name == AGGREGATORS.name for one in facts.hypotheses)
    trusted = (SETTING, *([TRUSTED_AGGREGATORS] if has_aggregators else []))
    return Section("1. Setting", tuple(map(Paragraph, trusted)))


def definition_section(facts: Facts) -> Section:
    """Return the section that defines what is private: accesses, output, unit and neighbors."""
    return Section(
        "2. What the guarantee is about",
        sections=(
            Section("2.1 Data accesses covered", tuple(_covered(facts))),
            Section("2.2 Output", (Paragraph(OUTPUT),)),
            Section("2.3 Unit of privacy", tuple(_unit(facts))),
            Section("2.4 Neighbouring datasets", tuple(_neighbours(facts))),
        ),
    )


def _covered(facts: Facts) -> Iterator[Block]:
    runs = facts.guarantee.runs
    covered = "one training run" if len(runs) == 1 else f"{len(runs)} training runs together"
    yield Paragraph(
        f"The guarantee covers every use of client data in {covered}, for all clients that keep to "
        "the limits below. A client that does not keep to them weakens only its own guarantee."
    )
    if facts.fleet is not None:
        yield from _planned_fleet(facts.fleet)
    rows = tuple(
        (f"run {number}", f"{run.participation.rounds:,}", limits_text(run.participation))
        for number, run in enumerate(runs, 1)
    )
    yield Table("Rounds, and how often one client may take part.", ("", "rounds", "limits"), rows)
    if facts.guarantee.common_cap is not None:
        yield Paragraph(
            f"Over all runs together: at most {facts.guarantee.common_cap:,} rounds of one client."
        )
    yield from _start_model(facts)
    yield Paragraph("Not covered:")
    yield Bullets(NOT_COVERED)


def _planned_fleet(fleet: Fleet) -> Iterator[Block]:
    """Yield what the plan says about clients, availability and timers."""
    rows = [
        ("clients that may take part", f"{fleet.population:,}"),
        ("reports that complete a round", f"{fleet.report_goal:,}"),
        ("availability: share of the clients that can be contacted", percent(fleet.availability)),
        ("clients contacted per report needed", plain_number(fleet.over_selection)),
    ]
    if fleet.timer_days is not None and fleet.rounds_per_day is not None:
        rows += [
            ("timer: days that a client waits before it takes part again", _timer_text(fleet)),
            ("rounds per day", plain_number(fleet.rounds_per_day)),
        ]
    yield Table("What was planned about the clients.", ("", "planned"), tuple(rows))
    if fleet.timer_days is None:
        yield Paragraph("The plan has no timer, and no number of rounds per day.")


def _timer_text(fleet: Fleet) -> str:
    days = plain_number(fleet.timer_days or 0.0)
    try:
        return f"{days} ({fleet.timer_rounds:,} rounds)"
    except InvalidInput:  # a plan in a file can have such a timer
        return f"{days} (less than one round)"


def _start_model(facts: Facts) -> Iterator[Block]:
    """Yield what the run's files say about the model that the run started from."""
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
                Span(run.run or "not recorded", "code"),
                run.population or NO_VALUE,
                f"{run.guarantee.runs[0].participation.rounds:,}" if run.run else NO_VALUE,
                epsilon_at_delta(run.guarantee),
                "the same; composed" if run.people == "same" else "others (claimed); not composed",
            )
            for run in record.start.earlier
        )
        head = ("earlier run", "population", "rounds", "epsilon by itself", "people")
        caption = "The private runs that produced the start model, as its file states."
        yield Table(caption, head, rows)
    if record.canaries:
        yield Paragraph(canary_sentence(record.canaries))


def _unit(facts: Facts) -> Iterator[Block]:
    devices = facts.guarantee.devices
    yield Paragraph(UNIT if devices == 1 else PERSON.format(devices=devices))
    rows = tuple(
        (f"{guarantee.devices:,}", "no guarantee", NO_VALUE, NO_VALUE)
        if is_empty(guarantee)
        else (
            f"{guarantee.devices:,}",
            rounded_up(guarantee.epsilon),
            delta_text(guarantee),
            rounded_up(guarantee.rho),
        )
        for guarantee in facts.by_devices
    )
    head = ("devices of one person", "epsilon", "delta", "rho")
    yield Table("The guarantee for all devices of one person together.", head, rows)


def _neighbours(facts: Facts) -> Iterator[Block]:
    first, *others = facts.by_unit
    yield Paragraph(ZERO_OUT.format(difference=_difference(first)))
    for guarantee in others:
        yield Paragraph(
            f"In the guarantee for {unit_text(guarantee)}, they differ in {_difference(guarantee)} "
            "instead."
        )


# Each term has one or two plain sentences, for readers who are not engineers.
GLOSSARY = (
    (
        "differential privacy",
        "A mathematical limit on how much the published results can depend on the data of any one "
        "client or person. It holds whatever else somebody knows, and whatever they compute.",
    ),
    (
        "epsilon",
        "The size of that limit: what anybody sees is at most exp(epsilon) times as likely with "
        "the data as without it, apart from delta. A smaller epsilon is better privacy.",
    ),
    (
        "delta",
        "The largest probability with which the limit of epsilon may fail. It should be well below "
        "one divided by the number of clients.",
    ),
    (
        "rho (zCDP) and mu (Gaussian DP)",
        "Two other measures of the same limit, used by specialists. Smaller is better.",
    ),
    (
        "zero-out adjacency",
        "What is compared: the training as it was, and the same training in which all "
        "contributions of one client (or of one person's devices) are replaced by zeros.",
    ),
    (
        "client",
        "One phone, computer or other device that takes part under one identity, with all the data "
        "on it that is used for the training.",
    ),
    (
        "person",
        "Somebody who uses one or several of the devices. A person with several devices is "
        "protected less than a single client, as section 2.3 shows.",
    ),
    (
        "round",
        "One step of the training: the server collects updates from some clients, adds them up, "
        "adds noise, and improves the model.",
    ),
    (
        "clip norm",
        "The largest size that the update of a client may have. A larger update is scaled down to "
        "it before it is used.",
    ),
    (
        "noise multiplier",
        "How much random noise is added, measured in clip norms. More noise is better privacy.",
    ),
    (
        "min-sep",
        "The minimum separation of a client's contributions: if a client took part in round t, it "
        "takes part again in round t + min-sep at the earliest.",
    ),
    (
        "hypothesis (assumption)",
        "A condition that must be true for the guarantee to hold. Section 3.4 says for each one "
        "whether there is evidence for it.",
    ),
)


def glossary_section() -> Section:
    """Return the section that explains the technical terms in plain words."""
    return Section("5. Glossary", (Table("Technical terms.", ("term", "meaning"), GLOSSARY),))
