"""The sentences that a statement turns on, each written once."""

from collections import Counter

from dpftrl._internal.formatting import in_full, rounded_up
from dpftrl.accounting import Guarantee
from dpftrl.federated import EarlierRun
from dpftrl.participation import FixedEpochs, Participation
from dpftrl.statement.facts import Evidence, Facts, delta_text, empty
from dpftrl.statement.hypotheses import StatedBasis

ORIGINS = {
    "plan": "This is a plan: it will hold for a run that keeps to it and to its hypotheses.",
    "guarantee": "It was computed from a guarantee file. How the training went is not known here.",
    "log": (
        "It allows for the participation that the log shows, read after the run (ex post), because "
        "the limits were not kept."
    ),
}

# The same for what the server of a run wrote, by the evidence that there is for it.
OF_RUN: dict[Evidence, str] = {
    "verified": (
        "It is what the server of the run enforced and accounted: the run's files verify."
    ),
    "failed": "It is what the run's guarantee file says, and the run does not verify.",
    "none": (
        "It is what the run's guarantee file says. The run's private files are not here, so that "
        "nothing shows whether its server enforced it."
    ),
}


def summary(facts: Facts) -> str:
    """The guarantee in one sentence."""
    stated = facts.guarantee
    if empty(stated):
        return f"There is no guarantee for {whom(stated)}: the noise is far too small."
    runs = len(stated.runs)
    what = "the training, and with them all its models,"
    if runs > 1:
        what = f"the {runs} trainings together, and with them all their models,"
    return (
        f"All noisy rounds of {what} are "
        f"({rounded_up(stated.epsilon)}, {delta_text(stated)})-differentially private and "
        f"{rounded_up(stated.rho)}-zCDP, for {whom(stated)}."
    )


def origin(facts: Facts) -> str:
    """Where the numbers come from."""
    came_from = facts.happened.origin
    said = OF_RUN[facts.evidence] if came_from == "run" else ORIGINS[came_from]
    if facts.happened.kept:
        return f"{said} The participation log, read afterwards, keeps to the same limits."
    return said


def starts_from(facts: Facts) -> tuple[str, ...]:
    """A sentence for each private run behind the start model, or for a file without any."""
    start = facts.start
    if start is None:
        return ()
    if not start.earlier:
        return (
            "It starts from a model file whose origin is not known to dpftrl (SHA-256 "
            f"{start.sha256}): claimed public.",
        )
    return tuple(f"Starts from a private model: {_earlier(one)}." for one in start.earlier)


def _earlier(one: EarlierRun) -> str:
    label = "" if one.population is None else f", population {one.population!r}"
    run = f"run {one.run}" if one.run else "a run that version 0.1 did not record"
    name = f"{run} (epsilon {at_delta(one.guarantee)} by itself{label})"
    if one.people == "same":
        return f"{name} on the same people; composed"
    return f"{name}, stated by the operator: on other people (claimed); not composed"


def formal(facts: Facts) -> str:
    """The guarantee in one precise sentence."""
    stated = facts.guarantee
    if empty(stated):
        return "There is no epsilon with a delta below 1."
    what = "the run" if len(stated.runs) == 1 else f"all {len(stated.runs)} runs together"
    apart = "one device" if stated.devices == 1 else f"{stated.devices} devices"
    return (
        "If all hypotheses above hold, then for any two datasets D and D' that are neighbours by "
        f"zero-out of {apart}, and for any set S of outputs, the noisy rounds M of {what} satisfy "
        f"Pr[M(D) in S] ≤ exp({rounded_up(stated.epsilon)}) Pr[M(D') in S] + {delta_text(stated)}, "
        f"and M is {rounded_up(stated.rho)}-zCDP."
    )


def whom(guarantee: Guarantee) -> str:
    """Whom it protects."""
    if guarantee.devices == 1:
        return "each device"
    return f"every {guarantee.devices} devices of one person together"


def limits(participation: Participation) -> str:
    """How often one device may take part."""
    p = participation
    if p.max_participations == 1:
        return "at most 1 round of one device"
    apart = "exactly" if isinstance(p, FixedEpochs) else "at least"
    return f"at most {p.max_participations:,} rounds of one device, {apart} {p.min_sep:,} apart"


def bases(facts: Facts) -> str:
    """How many hypotheses are enforced, observed, claimed and assumed."""
    found = Counter(one.basis for one in facts.hypotheses)
    every: tuple[StatedBasis, ...] = ("enforced", "observed", "claimed", "assumed")
    return ", ".join(f"{found[basis]} {basis}" for basis in every)


def at_delta(guarantee: Guarantee) -> str:
    """Epsilon with its delta, for a table."""
    if empty(guarantee):
        return "no guarantee"
    return f"{rounded_up(guarantee.epsilon)} at {delta_text(guarantee)}"


def number_rows(guarantee: Guarantee) -> tuple[tuple[str, str, str], ...]:
    """The parameters, rounded up and in full."""
    g = guarantee
    return (
        ("epsilon", rounded_up(g.epsilon), in_full(g.epsilon)),
        ("delta", in_full(g.delta), in_full(g.delta)),
        ("delta of the sampler", rounded_up(g.sampler_delta, 2), in_full(g.sampler_delta)),
        ("rho (zCDP)", rounded_up(g.rho), in_full(g.rho)),
        ("mu (Gaussian DP)", rounded_up(g.mu), in_full(g.mu)),
    )
