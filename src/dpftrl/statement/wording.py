"""The most important sentences of a statement. Each of them is defined once, here."""

from collections import Counter

from dpftrl._internal.formatting import in_full, rounded_up
from dpftrl.accounting import Guarantee
from dpftrl.federated import EarlierRun
from dpftrl.participation import FixedEpochs, Participation
from dpftrl.statement.facts import Evidence, Facts, delta_text, is_empty
from dpftrl.statement.hypotheses import StatedBasis

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

# The same if the guarantee comes from the server of a run, by the evidence for it.
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
    """Return the guarantee in one plain sentence."""
    stated = facts.guarantee
    if is_empty(stated):
        return f"There is no guarantee for {unit_text(stated)}: the noise is far too small."
    runs = len(stated.runs)
    covered = "the training, and with them all its models,"
    if runs > 1:
        covered = f"the {runs} trainings together, and with them all their models,"
    return (
        f"All noisy rounds of {covered} are "
        f"({rounded_up(stated.epsilon)}, {delta_text(stated)})-differentially private and "
        f"{rounded_up(stated.rho)}-zCDP, for {unit_text(stated)}."
    )


def origin_text(facts: Facts) -> str:
    """Return one or two sentences that say where the numbers come from."""
    origin = facts.stated.origin
    text = RUN_ORIGINS[facts.evidence] if origin == "run" else ORIGINS[origin]
    if facts.stated.kept_limits:
        return f"{text} The participation log, read afterwards, keeps to the same limits."
    return text


def start_model_sentences(facts: Facts) -> tuple[str, ...]:
    """Return one sentence per private run behind the start model, or one if there is none."""
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


def formal_sentence(facts: Facts) -> str:
    """Return the guarantee in one formal sentence."""
    stated = facts.guarantee
    if is_empty(stated):
        return "There is no epsilon with a delta below 1."
    covered = "the run" if len(stated.runs) == 1 else f"all {len(stated.runs)} runs together"
    difference = "one device" if stated.devices == 1 else f"{stated.devices} devices"
    return (
        "If all hypotheses above hold, then for any two datasets D and D' that are neighbours by "
        f"zero-out of {difference}, and for any set S of outputs, the noisy rounds M of {covered} "
        f"satisfy Pr[M(D) in S] ≤ exp({rounded_up(stated.epsilon)}) Pr[M(D') in S] + "
        f"{delta_text(stated)}, and M is {rounded_up(stated.rho)}-zCDP."
    )


def unit_text(guarantee: Guarantee) -> str:
    """Return whom a guarantee protects."""
    if guarantee.devices == 1:
        return "each device"
    return f"every {guarantee.devices} devices of one person together"


def limits_text(participation: Participation) -> str:
    """Return how often one device may take part."""
    p = participation
    if p.max_participations == 1:
        return "at most 1 round of one device"
    exactly = "exactly" if isinstance(p, FixedEpochs) else "at least"
    return f"at most {p.max_participations:,} rounds of one device, {exactly} {p.min_sep:,} apart"


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


def number_rows(guarantee: Guarantee) -> tuple[tuple[str, str, str], ...]:
    """Return the name of each parameter with its value, rounded up and in full."""
    g = guarantee
    return (
        ("epsilon", rounded_up(g.epsilon), in_full(g.epsilon)),
        ("delta", in_full(g.delta), in_full(g.delta)),
        ("delta of the sampler", rounded_up(g.sampler_delta, 2), in_full(g.sampler_delta)),
        ("rho (zCDP)", rounded_up(g.rho), in_full(g.rho)),
        ("mu (Gaussian DP)", rounded_up(g.mu), in_full(g.mu)),
    )
