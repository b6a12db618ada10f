"""What was released: its sensitivity and epsilon, recomputed, and the claims about them."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final, final

import numpy as np

from dpftrl.audit.cohorts import limits_of
from dpftrl.audit.contacts import Contacts
from dpftrl.audit.earlier import EarlierRuns
from dpftrl.audit.files import GuaranteeFile, Told
from dpftrl.audit.happened import furthest_moved
from dpftrl.audit.journal import Journal
from dpftrl.audit.ledger import Ledger
from dpftrl.audit.patterns import ROUNDING, Limits
from dpftrl.audit.promise import (
    check_claim,
    check_epsilon,
    check_sensitivity,
    claimed_limits,
    own_stream,
    read_guarantee,
)
from dpftrl.audit.strategy import MOST_ROUNDS, Strategy
from dpftrl.audit.verdict import Check
from dpftrl.errors import UnsafeState

TOO_LARGE: Final = f"more than {MOST_ROUNDS:,} rounds are not written down"


@final
class Released:
    """The rounds that were released, of which there is at least one."""

    def __init__(
        self, root: Path, journal: Journal, contacts: Contacts, told: Told, earlier: EarlierRuns
    ):
        self._path = root / "guarantee.json"
        self._journal = journal
        self._told = told
        self._earlier = earlier
        self._contacts = contacts
        self._narrow, self._wide = limits_of(journal, contacts, told)
        self._strategy = Strategy(told.mechanism, len(journal.commits))

    def __repr__(self) -> str:
        return f"Released({len(self._journal.commits)} rounds)"

    def examinations(self, ledger: Ledger | None) -> dict[str, Callable[[], str | Check]]:
        """The checks, by name."""
        checks: dict[str, Callable[[], str | Check]] = {
            "noise": self._check_noise,
            "sensitivity": self._check_sensitivity,
            "rounding": self._check_rounding,
            "journalled epsilon": self._check_journalled,
            "guarantee.json": self._check_guarantee,
            "budget": self._check_budget,
        }
        if ledger is not None:
            checks["what happened"] = lambda: self._check_happened(ledger)
        return checks

    def epsilon(self) -> float:
        """What all of it guarantees, with the earlier runs on the same people, recomputed."""
        least, _ = self._epsilons(self._narrow)
        return least

    def _epsilons(self, limits: Limits) -> tuple[float, float]:
        """The least and the most that an honest file states, if clients keep to these limits."""
        told, earlier = self._told, self._earlier
        mu = self._strategy.mu_range(limits, told.sigma, told.buffers).composed_with(earlier.mu)
        return mu.epsilons(told.delta, told.buffers == "float32" or earlier.is_v1)

    def _epsilon_alone(self) -> float:
        """What this run guarantees by itself, which is what its plan promises."""
        told = self._told
        mu = self._strategy.mu_range(self._narrow, told.sigma, told.buffers)
        least, _ = mu.epsilons(told.delta, told.buffers == "float32")
        return least

    def _check_noise(self) -> str | Check:
        if not self._strategy.is_small:
            return Check("noise", "warning", f"the stream was not compared with C: {TOO_LARGE}")
        return self._strategy.check_noise()

    def _check_sensitivity(self) -> str | Check:
        found = self._strategy.sensitivity(self._narrow)
        text = check_sensitivity(found.claimable, found)
        if found.independent:
            return f"{text}, recomputed from its columns"
        why = "its bounds are loose" if self._strategy.is_small else TOO_LARGE
        text += f": not recomputed independently ({why}); the library's own value was used"
        return Check("sensitivity", "warning", text)

    def _check_rounding(self) -> str | Check:
        if self._told.buffers == "float32":
            text = "not covered: version 0.1 kept its noise buffers in float32"
            return Check("rounding", "warning", text)
        ideal = self._strategy.sensitivity(self._narrow).value / self._told.sigma
        if not self._strategy.is_small:
            text = f"not recomputed independently ({TOO_LARGE}); the library's own bound was used"
            return Check("rounding", "warning", text)
        share = self._strategy.least_mu(ideal) / ideal - 1
        return f"rounding in the noise buffers costs {share:.1e} of mu, which epsilon covers"

    def _check_journalled(self) -> str:
        said = [committed.epsilon for committed in self._journal.commits]
        for row, (before, after) in enumerate(pairwise(said), start=1):
            if not after >= before * (1 - ROUNDING):
                raise UnsafeState(f"epsilon falls at row {row}, from {before:.7g} to {after:.7g}")
        return check_epsilon(said[-1], *self._epsilons(self._narrow), "the journal")

    def _check_guarantee(self) -> str:
        claim: GuaranteeFile = read_guarantee(self._path, len(self._journal.commits))
        covered = check_claim(
            claim, self._path, self._told, self._earlier, self._narrow, self._wide
        )
        limits = claimed_limits(claim)
        check_sensitivity(own_stream(claim).sensitivity, self._strategy.sensitivity(limits))
        epsilon = check_epsilon(claim.epsilon, *self._epsilons(limits), "it")
        return f"{covered}; {epsilon}"

    def _check_budget(self) -> str | Check:
        spent = max(self.epsilon(), self._journal.commits[-1].epsilon)
        budget, promised = self._told.settings.budget, self._told.promise.epsilon
        if budget is not None and not spent <= budget * (1 + ROUNDING):
            raise UnsafeState(f"epsilon is {spent:.7g}, and the budget {budget:g}")
        # The plan is for this run alone; the budget for all that is composed with it.
        alone = self._epsilon_alone() if self._earlier.composed else spent
        by_itself = " for this run by itself" if self._earlier.composed else ""
        if not alone <= promised * (1 + ROUNDING):
            text = f"epsilon is {alone:.7g}, more than the plan promised: {promised:.7g}"
            if self._told.settings.timer_hours is None:
                raise UnsafeState(text)
            return Check("budget", "warning", text)
        limit = "no budget was set" if budget is None else f"the budget is {budget:g}"
        return f"epsilon is {spent:.6g}; {limit}, and the plan promises {promised:.6g}{by_itself}"

    def _check_happened(self, ledger: Ledger) -> str | Check:
        if not self._strategy.is_small:
            text = f"not recomputed client by client: {TOO_LARGE}; timers and cap hold it in bounds"
            return Check("what happened", "warning", text)
        counted = np.zeros(len(self._contacts), dtype=np.bool_)
        ended = np.concatenate([np.empty(0, np.bool_), *ledger.counted])
        counted[: len(ended)] = ended  # an attempt in flight has counted nobody yet
        counted = counted[self._contacts.place]
        moved = furthest_moved(self._strategy.gram, self._contacts.kept(counted))
        claimed = self._strategy.sensitivity(self._narrow).claimable
        if not moved <= claimed * (1 + ROUNDING):
            raise UnsafeState(
                f"a client could move the release by {moved:.7g}, above {claimed:.7g}"
            )
        return f"by its own rounds, no client can move the release by more than {moved:.7g}"
