"""What was released: its sensitivity and epsilon, recomputed, and the claims about them."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final, final

import numpy as np

from dpftrl._internal.storage import read_json
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.verify.contacts import Contacts, furthest_moved, limits_of
from dpftrl.verify.earlier_runs import EarlierRuns
from dpftrl.verify.files import GuaranteeFile, StreamContent, Told, stream_mechanism
from dpftrl.verify.gaussian import sampler_delta
from dpftrl.verify.journal import Journal
from dpftrl.verify.ledger import Ledger
from dpftrl.verify.patterns import ROUNDING, Limits
from dpftrl.verify.sensitivity import MOST_ROUNDS, Sensitivity, Strategy
from dpftrl.verify.verdict import Check

# How far two computations of epsilon may differ; below ours, only by rounding.
AGREEMENT: Final = 1e-6
RESTS_ON: Final = {"participation", "clipping", "zero-out", "keystream", "secrecy", "identity"}


def read_guarantee(path: Path, rounds: int) -> GuaranteeFile:
    """`guarantee.json`, which must be for exactly the rounds that were released."""
    if not path.exists():
        raise UnsafeState(f"guarantee.json is missing, and {rounds} rounds were released")
    claim = read_json(path, GuaranteeFile, "guarantee")
    covered = own_stream(claim).participation.rounds
    if covered == rounds + 1:
        raise UnsafeState(
            "guarantee.json is one round ahead: a server stopped while it committed a round; "
            "resuming rewrites it"
        )
    if covered != rounds:
        raise UnsafeState(f"it covers {covered} rounds, and {rounds} were released")
    return claim


def own_stream(claim: GuaranteeFile) -> StreamContent:
    """The stream of the run itself: the last, after those of the earlier runs."""
    if not claim.runs:
        raise UnsafeState("it names no stream of noise")
    return claim.runs[-1]


def claimed_limits(claim: GuaranteeFile) -> Limits:
    """The participation that a guarantee is stated for."""
    said = own_stream(claim).participation
    if not (said.rounds >= 1 and said.min_sep >= 1 and said.max_participations >= 1):
        raise InvalidInput("guarantee.json has a participation that nobody can keep to")
    return Limits(said.rounds, said.min_sep, said.max_participations)


def check_claim(
    claim: GuaranteeFile,
    path: Path,
    told: Told,
    earlier: EarlierRuns,
    narrow: Limits,
    wide: Limits,
) -> str:
    """Whether it speaks of this run.

    Args:
        claim: What `guarantee.json` says.
        path: Where it is.
        told: What the run was told.
        earlier: The earlier runs on the same people.
        narrow: What clients were held to, or what was observed, when the last round was released.
        wide: The same by now: a resumed server counts contacts of rounds in flight as well.
    """
    stream, limits = own_stream(claim), claimed_limits(claim)
    secrecy = [one.text for one in claim.hypotheses if one.name == "secrecy"]
    mu = math.hypot(*(one.sensitivity / _noise(one) + one.rounding for one in claim.runs))
    kind = stream.sensitivity_kind if len(claim.runs) == 1 else "upper bound"
    for what, holds in (
        ("the mechanism", stream_mechanism(stream, path) == told.mechanism),
        ("the noise multiplier", stream.noise_multiplier == told.noise_multiplier),
        ("the list of earlier runs", _same_runs(claim.runs[:-1], path, earlier)),
        ("delta", claim.delta == told.delta),
        ("min-sep", wide.min_sep <= limits.min_sep <= narrow.min_sep),
        ("max participations", narrow.most <= limits.cap <= wide.most),
        ("the unit", (claim.unit, claim.devices, claim.common_cap) == ("device", 1, None)),
        ("the adjacency", claim.adjacency == "zero-out"),
        ("the precision of the buffers", stream.buffers == told.buffers),
        ("mu", _same(claim.mu, mu)),
        ("rho", _same(claim.rho, claim.mu * (claim.mu / 2))),
        ("sampler_delta", sampler_delta(claim.mu) * (1 - AGREEMENT) <= claim.sampler_delta <= 1),
        ("kind", claim.kind == kind),
        ("what it rests on", {one.name for one in claim.hypotheses} == _rests_on(claim, earlier)),
        ("the basis", _bases_follow(claim, told)),
        ("secrecy", ("NOTHING IS PRIVATE" in "".join(secrecy)) == _test_key(told, earlier)),
    ):
        if not holds:
            raise UnsafeState(f"{what} in guarantee.json is not that of this run")
    together = f", composed with {len(claim.runs) - 1} earlier run(s)" if claim.runs[1:] else ""
    return (
        f"it covers {limits.rounds:,} rounds at min-sep {limits.min_sep:,}, as was released"
        f"{together}"
    )


def check_sensitivity(claimed: float, found: Sensitivity) -> str:
    """Whether a claimed sensitivity is what follows from the strategy."""
    if not claimed >= found.value * (1 - ROUNDING):
        raise UnsafeState(f"{claimed:.7g} is claimed, and one client can reach {found.value:.7g}")
    if not claimed <= found.claimable * (1 + ROUNDING):
        raise UnsafeState(f"{claimed:.7g} is claimed, and {found.claimable:.7g} follows")
    return f"no client can move the release by more than {found.value:.7g} clip norms"


def check_epsilon(claimed: float, least: float, most: float, where: str) -> str:
    """Whether a claimed epsilon lies between the least and the most that an honest file states."""
    if not claimed >= least * (1 - ROUNDING):
        raise UnsafeState(f"{where} says {claimed:.7g}, less than what follows: {least:.7g}")
    if not claimed <= most * (1 + AGREEMENT) + 1e-12:
        raise UnsafeState(f"{where} says {claimed:.7g}, and {most:.7g} follows")
    return f"{where} says {claimed:.6g}, recomputed {least:.6g}"


def _same_runs(claimed: list[StreamContent], path: Path, earlier: EarlierRuns) -> bool:
    """Whether the earlier runs in guarantee.json are those that run.json is sealed with."""
    if len(claimed) != len(earlier.composed):
        return False
    return all(
        (one.participation, one.noise_multiplier, one.buffers)
        == (sealed.stream.participation, sealed.stream.noise_multiplier, sealed.stream.buffers)
        and _same(one.sensitivity, sealed.stream.sensitivity)
        and _same(one.rounding, sealed.stream.rounding)
        and stream_mechanism(one, path) == sealed.mechanism
        for one, sealed in zip(claimed, earlier.composed, strict=True)
    )


def _rests_on(claim: GuaranteeFile, earlier: EarlierRuns) -> set[str]:
    """Hypotheses that are stated; version 1 of the file knew nothing of rounding."""
    uncovered = claim.version > 1 and any(stream.buffers == "float32" for stream in claim.runs)
    return {*RESTS_ON, *(["rounding"] if uncovered else []), *earlier.hypotheses()}


def _bases_follow(claim: GuaranteeFile, told: Told) -> bool:
    """Whether nothing is called enforced or observed but what a server of this run sees to."""
    own = {"participation": _participation_basis(told), "clipping": "enforced"}
    # The run's own hypotheses come first; the participation of an earlier run is assumed.
    return all(one.basis == own.pop(one.name, "assumed") for one in claim.hypotheses)


def _test_key(told: Told, earlier: EarlierRuns) -> bool:
    return told.test_key or earlier.test_key


def _noise(stream: StreamContent) -> float:
    if not 0 < stream.noise_multiplier < math.inf:
        raise InvalidInput("guarantee.json has a noise multiplier that is none")
    return stream.noise_multiplier


def _same(claimed: float, follows: float) -> bool:
    return math.isclose(claimed, follows, rel_tol=ROUNDING)


def _participation_basis(told: Told) -> str:
    if told.settings.identity == "unregistered":
        return "assumed"
    return "enforced" if told.settings.timer_hours is None else "observed"


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
        mu = self._strategy.mu_range(limits, told.noise_multiplier, told.buffers).composed_with(
            earlier.mu
        )
        return mu.epsilons(told.delta, told.buffers == "float32" or earlier.is_v1)

    def _epsilon_alone(self) -> float:
        """What this run guarantees by itself, which is what its plan promises."""
        told = self._told
        mu = self._strategy.mu_range(self._narrow, told.noise_multiplier, told.buffers)
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
        ideal = self._strategy.sensitivity(self._narrow).value / self._told.noise_multiplier
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
