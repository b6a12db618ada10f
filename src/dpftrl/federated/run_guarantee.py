"""The guarantee of a run after some rounds, and whether the next round fits into the budget."""

from dataclasses import dataclass
from typing import final

from dpftrl.accounting import Guarantee, guarantee_of
from dpftrl.accounting.guarantee import ADAPTIVE_CLIPPING, CLIPPING, Basis, Hypothesis
from dpftrl.adaptive_clipping import AdaptiveClipping
from dpftrl.federated.eligibility import Exposure
from dpftrl.federated.settings import Settings
from dpftrl.federated.start_model import TEST_KEY, EarlierRun, Start
from dpftrl.participation import MinSep
from dpftrl.plan import Plan

ENFORCED_CLIPPING = Hypothesis(CLIPPING.name, CLIPPING.text, "enforced")
ENFORCED_ADAPTIVE_CLIPPING = Hypothesis(CLIPPING.name, ADAPTIVE_CLIPPING.text, "enforced")
IDENTITY = Hypothesis(
    "identity",
    "Each client has one name for the whole run: one that comes back under another is taken for "
    "another client.",
)
IDENTITIES = {
    "stated": IDENTITY,
    "registered": Hypothesis(
        IDENTITY.name,
        "Each client is known by a key that was registered for it beforehand, and others are "
        "refused. Only the operator can register keys, and gives each client one.",
    ),
    "unregistered": Hypothesis(
        IDENTITY.name,
        "No client was started again during the run: nobody had to register, and a client that "
        "starts again gets a new name and counts as another client.",
    ),
}
AGGREGATORS = Hypothesis(
    "aggregators",
    "Aggregators, which clip updates and add them up for the server, are trusted like the server: "
    "each clips every update to the clip norm before it adds it, adds no client twice, and keeps "
    "updates and sums secret. The server checks who is counted and the norm of each sum, and "
    "cannot check more.",
)


@final
@dataclass(frozen=True)
class RunGuarantee:
    """Computes the guarantee of a run after any number of rounds.

    Attributes:
        plan: The plan of the run.
        settings: The settings of the run, with its budget and the kind of its timers.
        test_key: Whether the noise key is a test key.
        start: The model file that the run started from, with the private runs that trained it.
    """

    plan: Plan
    settings: Settings
    test_key: bool
    start: Start | None = None

    @property
    def planned(self) -> Guarantee:
        """The guarantee after the last round of the plan, composed with the earlier runs."""
        return self._composed(self.plan.guarantee)

    @property
    def epsilon_before(self) -> float:
        """Epsilon of the earlier runs on the same people, before the first round of this run."""
        return 0.0 if self.start is None else self.start.epsilon(self.plan.guarantee.delta)

    def after(self, rounds: int, exposure: Exposure) -> Guarantee:
        """The guarantee of the first rounds, composed with the earlier runs on the same people.

        The arguments are those of `alone_after`.
        """
        return self._composed(self.alone_after(rounds, exposure))

    def _composed(self, alone: Guarantee) -> Guarantee:
        return alone if self.start is None else self.start.composed_with(alone)

    def alone_after(self, rounds: int, exposure: Exposure) -> Guarantee:
        """The guarantee of the first rounds of this run, without the earlier runs.

        Args:
            rounds: Number of rounds.
            exposure: How closely and how often clients were contacted in these rounds.
        """
        settings, planned_run = self.settings, self.plan.guarantee.runs[0]
        planned, basis = planned_run.participation, _basis(settings)
        if settings.timer_hours is None:
            covered = MinSep(rounds, planned.min_sep, planned.max_participations)
        else:
            covered = MinSep(rounds, exposure.min_gap or rounds, max(1, exposure.max_contacts))
        run = planned_run.with_participation(covered)
        participation = Hypothesis("participation", run.hypothesis.text, basis)
        # The hypothesis ZERO_OUT stays assumed: the server cannot see why a client is absent, fails
        # or is late.
        adaptive = isinstance(settings.clip_norm, AdaptiveClipping)
        clipping = ENFORCED_ADAPTIVE_CLIPPING if adaptive else ENFORCED_CLIPPING
        # With aggregators, clipping too is assumed: the server enforces it for its own sums only.
        trusted = [AGGREGATORS] if settings.aggregators else [clipping]
        known = [participation, *trusted, IDENTITIES[settings.identity]]
        known += [TEST_KEY] if self.test_key else []
        return guarantee_of([run], self.plan.guarantee.delta, known)

    def over_budget(self, rounds: int, exposure: Exposure) -> str | None:
        """The reason why this many rounds would exceed the budget, or None if they would not."""
        budget = self.settings.budget
        if budget is None:
            return None
        epsilon = self.after(rounds, exposure).epsilon
        if epsilon <= budget:
            return None
        before = self.epsilon_before
        earlier = f"; the earlier runs spent {before:.10g} of it" if before else ""
        return (
            f"the budget is spent: after {rounds - 1:,} rounds, one more would make epsilon "
            f"{epsilon:.10g}, above {budget:g}{earlier}"
        )

    def history(self, run_id: str, rounds: int, exposure: Exposure) -> tuple[EarlierRun, ...]:
        """All private runs that trained the model; this run, up to `rounds`, is the last one."""
        before = () if self.start is None else self.start.earlier
        alone = self.alone_after(rounds, exposure)
        return (*before, EarlierRun(run_id, self.settings.population, self.test_key, alone))


def _basis(settings: Settings) -> Basis:
    """The basis of the participation hypothesis.

    It is only assumed for unregistered clients: a client that returns under a new name cannot be
    refused.
    """
    if settings.identity == "unregistered":
        return "assumed"
    return "enforced" if settings.timer_hours is None else "observed"
