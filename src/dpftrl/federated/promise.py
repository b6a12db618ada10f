"""What a run guarantees after some rounds, and whether the next one fits into the budget."""

from dataclasses import dataclass
from typing import final

from dpftrl.accounting import Guarantee, Run, guarantee_of
from dpftrl.accounting.guarantee import CLIPPING, Basis, BufferType, Hypothesis
from dpftrl.federated.settings import Settings
from dpftrl.participation import MinSep
from dpftrl.plan import Plan

ENFORCED_CLIPPING = Hypothesis(CLIPPING.name, CLIPPING.text, "enforced")
IDENTITY = Hypothesis(
    "identity",
    "Each device has one name for the whole run: one that comes back under another is taken for "
    "another device.",
)
IDENTITIES = {
    "stated": IDENTITY,
    "registered": Hypothesis(
        IDENTITY.name,
        "Each device is known by a key that was registered for it beforehand, and others are "
        "refused. Only the operator can register keys, and gives each device one.",
    ),
    "unregistered": Hypothesis(
        IDENTITY.name,
        "No device was started again during the run: nobody had to register, and a device that "
        "starts again gets a new name and counts as another device.",
    ),
}
TEST_KEY = Hypothesis(
    "secrecy",
    "NOTHING IS PRIVATE HERE: the noise key is a fixed one for tests, which anybody can guess.",
)


@final
@dataclass(frozen=True)
class Promise:
    """What a run promises, round by round.

    Attributes:
        plan: What was planned.
        settings: Whether timers go by rounds, which the server enforces, or by time; budget.
        test_key: Whether the noise key is one for tests.
        buffers: What the noise buffers are kept in.
    """

    plan: Plan
    settings: Settings
    test_key: bool
    buffers: BufferType

    def after(self, rounds: int, least_gap: int | None, most_contacts: int) -> Guarantee:
        """The guarantee of everything released in so many rounds.

        Args:
            rounds: How many.
            least_gap: Fewest rounds from one contact of a client to its next.
            most_contacts: Contacts of the client that was contacted most often.
        """
        plan, settings, planned = self.plan, self.settings, self.plan.participation
        if settings.timer_hours is None:
            covered = MinSep(rounds, planned.min_sep, planned.max_participations)
        else:
            covered = MinSep(rounds, least_gap or rounds, max(1, most_contacts))
        run = Run.of(plan.mechanism, covered, plan.sigma, self.buffers)
        found = guarantee_of([run], plan.guarantee.delta)
        said = Hypothesis("participation", found.runs[0].hypothesis.text, _basis(settings))
        # Zero-out stays assumed: who is available, fails or comes late, the server cannot see.
        known = [said, ENFORCED_CLIPPING, IDENTITIES[settings.identity]]
        return found.resting_on(*known, *([TEST_KEY] if self.test_key else []))

    def over_budget(self, rounds: int, least_gap: int | None, most_contacts: int) -> str | None:
        """Why so many rounds would be too many for the budget, if they would."""
        budget = self.settings.budget
        if budget is None:
            return None
        epsilon = self.after(rounds, least_gap, most_contacts).epsilon
        if epsilon <= budget:
            return None
        return (
            f"the budget is spent: after {rounds - 1:,} rounds, one more would make epsilon "
            f"{epsilon:.10g}, above {budget:g}"
        )


def _basis(settings: Settings) -> Basis:
    """Why participation is what it is: a server cannot hold back those whom it does not know."""
    if settings.identity == "unregistered":
        return "assumed"
    return "enforced" if settings.timer_hours is None else "observed"
