"""Checks of the released rounds: sensitivity, epsilon, and what the files claim about them."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Final, final

import numpy as np

from dpftrl._internal.storage import read_json
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.participation import MinSep
from dpftrl.verify import rigorous
from dpftrl.verify.contacts import Contacts, Ledger, largest_client_shift, limits_of, limits_with
from dpftrl.verify.earlier_runs import EarlierRuns
from dpftrl.verify.epsilon import sampler_delta
from dpftrl.verify.journal import Journal
from dpftrl.verify.rigorous import NoiseStream
from dpftrl.verify.run_files import GuaranteeFile, RunFiles, StreamContent, stream_mechanism
from dpftrl.verify.sensitivity import ROUNDING, Limits
from dpftrl.verify.strategy_matrix import MOST_ROUNDS, Sensitivity, Strategy
from dpftrl.verify.verdict import Check, run_check

# A claimed epsilon may exceed the recomputed one by this share: the two solvers differ. It may be
# smaller only by ROUNDING.
AGREEMENT: Final = 1e-6
# The hypotheses that every guarantee must name.
REQUIRED_HYPOTHESES: Final = {
    "participation",
    "clipping",
    "zero-out",
    "keystream",
    "secrecy",
    "identity",
}
UNITS: Final = ("client", "device")  # older files call a client a device
TOO_LARGE: Final = f"runs of more than {MOST_ROUNDS:,} rounds are too large for dense matrices"


@final
class ReleasedRounds:
    """The checks of the released rounds of a run. There must be at least one released round.

    Args:
        root: The folder of the run.
        journal: The journal of the run.
        contacts: All contacts in the journal.
        run_files: The settings and the plan.
        earlier: The private runs behind the start model.
    """

    def __init__(
        self,
        root: Path,
        journal: Journal,
        contacts: Contacts,
        run_files: RunFiles,
        earlier: EarlierRuns,
    ):
        self._path = root / "guarantee.json"
        self._journal = journal
        self._run_files = run_files
        self._earlier = earlier
        self._contacts = contacts
        self._limits_at_release, self._limits_now = limits_of(journal, contacts, run_files)
        self._strategy = Strategy(run_files.mechanism, len(journal.commits))

    def __repr__(self) -> str:
        return f"ReleasedRounds({len(self._journal.commits)} rounds)"

    def checks(self, ledger: Ledger | None) -> dict[str, Callable[[], str | Check]]:
        """Return the checks by name. Without a ledger, there is no check client by client."""
        checks: dict[str, Callable[[], str | Check]] = {
            "noise": self._check_noise,
            "sensitivity": self._check_sensitivity,
            "rounding": self._check_rounding,
            "journalled epsilon": self._check_journal_epsilons,
            "guarantee.json": self._check_guarantee_file,
            "rigorous": self._check_rigorous,
            "budget": self._check_budget,
        }
        if ledger is not None:
            checks["what happened"] = lambda: self._check_each_client(ledger)
        return checks

    def epsilon(self) -> float:
        """Return the recomputed epsilon of the run, composed with the earlier runs."""
        least, _ = self._epsilons(self._limits_at_release)
        return least

    def _epsilons(self, limits: Limits) -> tuple[float, float]:
        return _epsilons(self._strategy, limits, self._run_files, self._earlier)

    def _epsilon_alone(self) -> float:
        """Return the epsilon of this run without the earlier runs, as a plan promises it."""
        run_files = self._run_files
        mu = self._strategy.mu_range(
            self._limits_at_release, run_files.noise_multiplier, run_files.buffers
        )
        least, _ = mu.epsilons(run_files.delta, run_files.buffers == "float32")
        return least

    def _check_noise(self) -> str | Check:
        if not self._strategy.is_small:
            text = f"the noise stream was not compared with its strategy: {TOO_LARGE}"
            return Check("noise", "warning", text)
        return self._strategy.check_noise()

    def _check_sensitivity(self) -> str | Check:
        sensitivity = self._strategy.sensitivity(self._limits_at_release)
        text = check_sensitivity(sensitivity.claimable, sensitivity)
        if sensitivity.independent:
            return f"{text}, recomputed from the strategy's columns"
        reason = "the bounds are loose" if self._strategy.is_small else TOO_LARGE
        text += f": not recomputed independently ({reason}); the library's own value was used"
        return Check("sensitivity", "warning", text)

    def _check_rounding(self) -> str | Check:
        if self._run_files.buffers == "float32":
            text = "not covered: version 0.1 kept its noise buffers in float32"
            return Check("rounding", "warning", text)
        sensitivity = self._strategy.sensitivity(self._limits_at_release)
        ideal_mu = sensitivity.value / self._run_files.noise_multiplier
        if not self._strategy.is_small:
            text = f"not recomputed independently ({TOO_LARGE}); the library's own bound was used"
            return Check("rounding", "warning", text)
        share = self._strategy.least_mu(ideal_mu) / ideal_mu - 1
        return (
            f"rounding in the noise buffers increases mu by a factor of 1 + {share:.1e}; epsilon "
            "includes it"
        )

    def _check_journal_epsilons(self) -> str:
        epsilons = [committed.epsilon for committed in self._journal.commits]
        for row, (before, after) in enumerate(pairwise(epsilons), start=1):
            if not after >= before * (1 - ROUNDING):
                raise UnsafeState(f"epsilon falls at row {row}, from {before:.7g} to {after:.7g}")
        return check_epsilon(epsilons[-1], *self._epsilons(self._limits_at_release), "the journal")

    def _check_guarantee_file(self) -> str:
        claim, rounds = read_guarantee(self._path), len(self._journal.commits)
        if own_stream(claim).participation.rounds == rounds + 1 and self._journal.in_flight:
            return check_guarantee_in_flight(
                self._path, self._journal, self._contacts, self._run_files, self._earlier
            )
        limits = self._limits_at_release, self._limits_now
        return _check_guarantee(
            claim, self._path, self._strategy, self._run_files, self._earlier, *limits
        )

    def _check_rigorous(self) -> str | Check:
        """Enclose epsilon in interval arithmetic, for the participation that the file states."""
        if run_check("guarantee.json", self._check_guarantee_file).outcome == "failed":
            text = "not checked rigorously, because guarantee.json cannot be trusted"
            return Check("rigorous", "skipped", text)
        claim, run_files = read_guarantee(self._path), self._run_files
        limits = claimed_limits(claim)
        streams = [run.noise_stream for run in self._earlier.composed]
        participation = MinSep(limits.rounds, limits.min_sep, limits.cap)
        own = NoiseStream(
            run_files.mechanism, participation, run_files.noise_multiplier, run_files.buffers
        )
        return rigorous.check_epsilon([*streams, own], run_files.delta, claim.epsilon)

    def _check_budget(self) -> str | Check:
        spent = max(self.epsilon(), self._journal.commits[-1].epsilon)
        budget, promised = self._run_files.settings.budget, self._run_files.promised.epsilon
        if budget is not None and not spent <= budget * (1 + ROUNDING):
            raise UnsafeState(f"epsilon is {spent:.7g}, but the budget is {budget:g}")
        # The plan is for this run alone; the budget is for everything that is composed with it.
        alone = self._epsilon_alone() if self._earlier.composed else spent
        by_itself = " for this run by itself" if self._earlier.composed else ""
        if not alone <= promised * (1 + ROUNDING):
            text = f"epsilon is {alone:.7g}, but the plan promised {promised:.7g}"
            if self._run_files.settings.timer_hours is None:
                raise UnsafeState(text)
            return Check("budget", "warning", text)
        limit = "no budget was set" if budget is None else f"the budget is {budget:g}"
        return f"epsilon is {spent:.6g}; {limit}, and the plan promised {promised:.6g}{by_itself}"

    def _check_each_client(self, ledger: Ledger) -> str | Check:
        """Check how far each client can move the release, from the rounds that counted it."""
        if not self._strategy.is_small:
            text = f"not recomputed client by client: {TOO_LARGE}; the timers and the cap bound it"
            return Check("what happened", "warning", text)
        counted = np.zeros(len(self._contacts), dtype=np.bool_)
        ended = np.concatenate([np.empty(0, np.bool_), *ledger.counted])
        counted[: len(ended)] = ended  # the attempt in flight, which is last, has counted nobody
        counted = counted[self._contacts.journal_positions]
        shift = largest_client_shift(self._strategy.gram, self._contacts.select(counted))
        allowed = self._strategy.sensitivity(self._limits_at_release).claimable
        if not shift <= allowed * (1 + ROUNDING):
            raise UnsafeState(
                f"a client can move the release by {shift:.7g} clip norms, but the sensitivity is "
                f"{allowed:.7g}"
            )
        return (
            f"in the rounds that counted it, no client can move the release by more than "
            f"{shift:.7g} clip norms"
        )


def check_guarantee_in_flight(
    path: Path,
    journal: Journal,
    contacts: Contacts,
    run_files: RunFiles,
    earlier: EarlierRuns,
) -> str:
    """Check a `guarantee.json` that covers the round in flight already.

    A server writes the file before it commits a round. A server that stops in between leaves a
    file that is one round ahead, and resuming the run rewrites it.

    Raises:
        UnsafeState: The file does not describe this run with one more round.
    """
    rounds = len(journal.commits) + 1
    limits = limits_with(rounds, contacts, run_files)
    strategy = Strategy(run_files.mechanism, rounds)
    text = _check_guarantee(
        read_guarantee(path), path, strategy, run_files, earlier, limits, limits
    )
    return f"{text}; it includes the round in flight, as after a server that stopped in a commit"


def _check_guarantee(
    claim: GuaranteeFile,
    path: Path,
    strategy: Strategy,
    run_files: RunFiles,
    earlier: EarlierRuns,
    at_release: Limits,
    now: Limits,
) -> str:
    """Check that a guarantee file describes this run, and that its numbers follow.

    The arguments are those of `check_claim`, and the strategy for the rounds that are covered.
    """
    covered = own_stream(claim).participation.rounds
    if covered != strategy.rounds:
        raise UnsafeState(f"it covers {covered} rounds, but {strategy.rounds} were released")
    coverage = check_claim(claim, path, run_files, earlier, at_release=at_release, now=now)
    limits = claimed_limits(claim)
    check_sensitivity(own_stream(claim).sensitivity, strategy.sensitivity(limits))
    own_mu = strategy.mu_range(limits, run_files.noise_multiplier, run_files.buffers)
    least_mu = own_mu.composed_with(earlier.mu).least
    if not claim.mu >= least_mu * (1 - ROUNDING):
        raise UnsafeState(
            f"the file states mu {claim.mu:.7g}, less than recomputed: {least_mu:.7g}"
        )
    epsilons = _epsilons(strategy, limits, run_files, earlier)
    return f"{coverage}; {check_epsilon(claim.epsilon, *epsilons, 'the file')}"


def _epsilons(
    strategy: Strategy, limits: Limits, run_files: RunFiles, earlier: EarlierRuns
) -> tuple[float, float]:
    """Return the smallest and the largest epsilon that a correct file may state."""
    own_mu = strategy.mu_range(limits, run_files.noise_multiplier, run_files.buffers)
    is_v1 = run_files.buffers == "float32" or earlier.is_v1
    return own_mu.composed_with(earlier.mu).epsilons(run_files.delta, is_v1)


def read_guarantee(path: Path) -> GuaranteeFile:
    """Read `guarantee.json`.

    Raises:
        UnsafeState: The file is missing.
    """
    if not path.exists():
        raise UnsafeState("guarantee.json is missing, although rounds were released")
    return read_json(path, GuaranteeFile, "guarantee")


def own_stream(claim: GuaranteeFile) -> StreamContent:
    """Return the noise stream of the run itself: the last one, after those of earlier runs."""
    if not claim.runs:
        raise UnsafeState("guarantee.json names no noise stream")
    return claim.runs[-1]


def claimed_limits(claim: GuaranteeFile) -> Limits:
    """Return the participation limits that a guarantee is stated for."""
    limits = own_stream(claim).participation
    if not (limits.rounds >= 1 and limits.min_sep >= 1 and limits.max_participations >= 1):
        raise InvalidInput(
            "guarantee.json needs rounds, min-sep and max participations of at least 1, got "
            f"{limits.rounds}, {limits.min_sep} and {limits.max_participations}"
        )
    return Limits(limits.rounds, limits.min_sep, limits.max_participations)


def check_claim(
    claim: GuaranteeFile,
    path: Path,
    run_files: RunFiles,
    earlier: EarlierRuns,
    *,
    at_release: Limits,
    now: Limits,
) -> str:
    """Check that a guarantee file describes this run.

    Args:
        claim: The content of `guarantee.json`.
        path: The path of that file.
        run_files: The settings and the plan of the run.
        earlier: The private runs behind the start model.
        at_release: The limits, enforced or observed, when the last round was released.
        now: The same limits with all later contacts. A resumed server includes the contacts of the
            attempt in flight.

    Raises:
        UnsafeState: The guarantee does not describe this run.
    """
    stream, limits = own_stream(claim), claimed_limits(claim)
    names = {hypothesis.name for hypothesis in claim.hypotheses}
    secrecy = [hypothesis.text for hypothesis in claim.hypotheses if hypothesis.name == "secrecy"]
    says_not_private = "NOTHING IS PRIVATE" in "".join(secrecy)
    mu = math.hypot(
        *(run.sensitivity / _noise_multiplier(run) + run.rounding for run in claim.runs)
    )
    kind = stream.sensitivity_kind if len(claim.runs) == 1 else "upper bound"
    for what, holds in (
        ("the mechanism", stream_mechanism(stream, path) == run_files.mechanism),
        ("the noise multiplier", stream.noise_multiplier == run_files.noise_multiplier),
        ("the list of earlier runs", _is_same_runs(claim.runs[:-1], path, earlier)),
        ("delta", claim.delta == run_files.delta),
        ("min-sep", now.min_sep <= limits.min_sep <= at_release.min_sep),
        (
            "max participations",
            at_release.max_participations <= limits.cap <= now.max_participations,
        ),
        ("the unit", claim.unit in UNITS and (claim.devices, claim.common_cap) == (1, None)),
        ("the adjacency", claim.adjacency == "zero-out"),
        ("the precision of the buffers", stream.buffers == run_files.buffers),
        ("mu", _is_close(claim.mu, mu)),
        ("rho", _is_close(claim.rho, claim.mu * (claim.mu / 2))),
        ("sampler_delta", sampler_delta(claim.mu) * (1 - AGREEMENT) <= claim.sampler_delta <= 1),
        ("kind", claim.kind == kind and stream.sensitivity_kind in ("exact", "upper bound")),
        ("the rounding", all(run.rounding >= 0 for run in claim.runs)),
        ("the clipping", _is_adaptive(claim) == run_files.adaptive),
        ("what it rests on", names == _required_hypotheses(claim, run_files, earlier)),
        ("the basis", _has_correct_bases(claim, run_files)),
        ("secrecy", says_not_private == (run_files.test_key or earlier.test_key)),
    ):
        if not holds:
            raise UnsafeState(f"{what} in guarantee.json is not that of this run")
    composed = f", composed with {len(claim.runs) - 1} earlier run(s)" if claim.runs[1:] else ""
    return f"it covers {limits.rounds:,} rounds at min-sep {limits.min_sep:,}{composed}"


def check_sensitivity(claimed: float, recomputed: Sensitivity) -> str:
    """Check that a claimed sensitivity agrees with the recomputed one.

    Raises:
        UnsafeState: The claimed sensitivity is too small, or larger than the library's own value.
    """
    if not claimed >= recomputed.value * (1 - ROUNDING):
        raise UnsafeState(
            f"the claimed sensitivity is {claimed:.7g}, but one client can reach "
            f"{recomputed.value:.7g}"
        )
    if not claimed <= recomputed.claimable * (1 + ROUNDING):
        raise UnsafeState(
            f"the claimed sensitivity is {claimed:.7g}, but {recomputed.claimable:.7g} follows "
            "from the mechanism"
        )
    return f"no client can move the release by more than {recomputed.value:.7g} clip norms"


def check_epsilon(claimed: float, least: float, most: float, source: str) -> str:
    """Check that a claimed epsilon is one that a correct file may state.

    Args:
        claimed: The epsilon.
        least: The smallest epsilon that a correct file may state.
        most: The largest one.
        source: Who claims it, as the subject of a sentence.

    Raises:
        UnsafeState: The claimed epsilon is out of that range.
    """
    if not claimed >= least * (1 - ROUNDING):
        raise UnsafeState(
            f"{source} states epsilon {claimed:.7g}, less than recomputed: {least:.7g}"
        )
    if not claimed <= most * (1 + AGREEMENT) + 1e-12:  # 1e-12: for an epsilon of 0
        raise UnsafeState(
            f"{source} states epsilon {claimed:.7g}, more than recomputed: {most:.7g}"
        )
    return f"{source} states epsilon {claimed:.6g}; recomputed: {least:.6g}"


def _is_same_runs(claimed: list[StreamContent], path: Path, earlier: EarlierRuns) -> bool:
    """Return whether the earlier runs in `guarantee.json` are those recorded in `run.json`."""
    if len(claimed) != len(earlier.composed):
        return False
    return all(
        (stream.participation, stream.noise_multiplier, stream.buffers)
        == (run.stream.participation, run.stream.noise_multiplier, run.stream.buffers)
        and _is_close(stream.sensitivity, run.stream.sensitivity)
        and _is_close(stream.rounding, run.stream.rounding)
        and stream_mechanism(stream, path) == run.mechanism
        for stream, run in zip(claimed, earlier.composed, strict=True)
    )


def _required_hypotheses(
    claim: GuaranteeFile, run_files: RunFiles, earlier: EarlierRuns
) -> set[str]:
    """Return the names of the hypotheses that a guarantee must state."""
    # Version 1 of the file did not name the rounding of float32 buffers.
    is_rounding_named = claim.version > 1 and any(run.buffers == "float32" for run in claim.runs)
    rounding = ["rounding"] if is_rounding_named else []
    aggregators = ["aggregators"] if run_files.settings.aggregators else []
    return {*REQUIRED_HYPOTHESES, *rounding, *aggregators, *earlier.hypotheses()}


def _is_adaptive(claim: GuaranteeFile) -> bool:
    """Return whether a guarantee is stated for a clip norm that moves. Its own text comes first."""
    texts = [hypothesis.text for hypothesis in claim.hypotheses if hypothesis.name == "clipping"]
    return bool(texts) and "clip norm of its round" in texts[0]


def _has_correct_bases(claim: GuaranteeFile, run_files: RunFiles) -> bool:
    """Return whether every hypothesis has the basis that the server of this run gives it."""
    # Where aggregators clip, the server enforces nothing.
    clipping = "assumed" if run_files.settings.aggregators else "enforced"
    own = {"participation": _participation_basis(run_files), "clipping": clipping}
    # The run's own hypotheses come first; the participation of an earlier run is assumed.
    return all(
        hypothesis.basis == own.pop(hypothesis.name, "assumed") for hypothesis in claim.hypotheses
    )


def _participation_basis(run_files: RunFiles) -> str:
    if run_files.settings.identity == "unregistered":
        return "assumed"
    return "enforced" if run_files.settings.timer_hours is None else "observed"


def _noise_multiplier(stream: StreamContent) -> float:
    if not 0 < stream.noise_multiplier < math.inf:
        raise InvalidInput(
            "guarantee.json needs a positive, finite noise multiplier, got "
            f"{stream.noise_multiplier}"
        )
    return stream.noise_multiplier


def _is_close(claimed: float, recomputed: float) -> bool:
    return math.isclose(claimed, recomputed, rel_tol=ROUNDING)
