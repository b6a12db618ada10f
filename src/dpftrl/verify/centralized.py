"""Verification of a centralized run: a training on a data set in one place.

The files are those that `dpftrl.centralized` writes. Each step is in the journal before the model
changes, so all steps in the journal count as released. `guarantee.json` is written with every
checkpoint, and before the first step after it, for all steps up to the next one. So it covers at
least the steps of the last recorded checkpoint, and at most those up to the next one.

Epsilon is recomputed in a way that depends on the sampling: one Gaussian for `none`, composed
privacy losses for `poisson` and `cyclic-poisson`, and a Monte Carlo estimate of delta for
`balls-in-bins`. For sampled batches, the guarantee of all planned steps is stated from the first
step on.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from dpftrl._internal.storage import read_json
from dpftrl.errors import DpftrlError, UnsafeState
from dpftrl.mechanisms.registry import mechanism_from
from dpftrl.verify import rigorous
from dpftrl.verify.centralized_epsilon import ESTIMATE, InOrder, Sampled
from dpftrl.verify.centralized_files import CentralizedFiles, GuaranteeFile, PlanFile
from dpftrl.verify.centralized_hypotheses import check_hypotheses
from dpftrl.verify.centralized_journal import StepJournal, check_checkpoints, read_step_journal
from dpftrl.verify.clip_norms import AdaptiveRun, check_clip_norms, grid_step
from dpftrl.verify.epsilon import MOST_DRAWS
from dpftrl.verify.journal import (
    fingerprint,
    read_key,
)
from dpftrl.verify.run_files import (
    AdaptiveContent,
    check_digest,
    check_modes,
    witness_checks,
)
from dpftrl.verify.sensitivity import ROUNDING
from dpftrl.verify.strategy_matrix import MOST_ROUNDS, Strategy
from dpftrl.verify.verdict import Check, Verdict, run_check

MOST_FAILURE: Final = 1e-6  # a certificate that fails with a larger probability is a warning
STEPS_PER_DEVIATION: Final = 2**34  # of the grid of sums, at least
JAX_STEP: Final = 2.0**-24  # the step of the grid of sums in JAX, with adaptive clipping
CANARIES: Final = "canaries.json"  # says that artificial participants were added for an audit


@final
class CentralizedVerification:
    """The state of one verification: the files read so far, and the results of the checks.

    A file that could not be read, or failed its check, is None.

    Args:
        root: The folder of the run.
        witness_folder: The folder of the run's witness; None to leave it out.
    """

    def __init__(self, root: Path, witness_folder: Path | None):
        self.root = root
        self.witness_folder = witness_folder
        self.checks: list[Check] = []
        self.journal: StepJournal | None = None
        self.files: CentralizedFiles | None = None
        self.epsilon: float | None = None

    def __repr__(self) -> str:
        return f"CentralizedVerification({self.root})"

    def verdict(self) -> Verdict:
        """Run all checks and return their results."""
        self._check("file modes", lambda: check_modes(self.root / "private"))
        self._check("journal", self._read_journal)
        if self.journal is None:
            text = "not checked, because the journal cannot be trusted"
            self.checks.append(Check("everything else", "warning", text))
        else:
            self._check_other_files(self.journal)
        journal, files = self.journal, self.files
        return Verdict(
            run_id=journal.created.run if journal else None,
            checks=tuple(self.checks),
            rounds=journal.steps if journal else 0,
            epsilon=self.epsilon,
            delta=files.plan.delta if files else None,
        )

    def _check(self, name: str, check: Callable[[], str | Check]) -> None:
        self.checks.append(run_check(name, check))

    def _read_journal(self) -> str:
        key = read_key(self.root / "private" / "noise.key")
        journal = read_step_journal(self.root / "private" / "journal.jsonl", key)
        if journal.created.key_fingerprint != fingerprint(key):
            raise UnsafeState("the noise key is not the key that the run was created with")
        self.journal = journal
        return (
            f"{len(journal.macs):,} lines, all unchanged: {journal.steps:,} steps, all different, "
            f"and {len(journal.saves):,} checkpoints"
        )

    def _check_other_files(self, journal: StepJournal) -> None:
        """Run the checks that compare other files with the journal."""
        self.checks += witness_checks(journal, self.witness_folder, self.root)
        self._check("settings and plan", lambda: self._read_files(journal))
        checkpoints = self.root / "private" / "checkpoints"
        self._check("checkpoints", lambda: check_checkpoints(checkpoints, journal))
        if self.files is None:
            text = "not checked, because the settings or the plan cannot be trusted"
            self.checks.append(Check("guarantee", "warning", text))
            return
        files = self.files
        self._check("steps", lambda: _check_steps(journal, files))
        if isinstance(files.run.settings.clip_norm, AdaptiveContent) or journal.clipped:
            key = read_key(self.root / "private" / "noise.key")
            self._check("clip norms", lambda: check_clip_norms(_adaptive(journal, files), key))
        self._check("noise", lambda: _check_noise(files))
        if files.plan.sampling == "none":
            self._check_in_order(journal, files)
        else:
            self._check_sampled(journal, files)
        if files.plan.failure or files.plan.sampling == "balls-in-bins":
            self._check("certificate", lambda: _check_certificate(files.plan))
        if files.run.test_key:
            text = "NOT PRIVATE: the noise key is a fixed key for tests, which anybody can guess"
            self.checks.append(Check("noise key", "failed", text))

    def _read_files(self, journal: StepJournal) -> str | Check:
        created = journal.created
        check_digest(self.root / "run.json", created.settings_sha256, "the run was created")
        check_digest(self.root / "plan.json", created.plan_sha256, "the run was created")
        for name, sha256 in created.files.items():
            check_digest(self.root / name, sha256, "the run was created")
        files = CentralizedFiles(self.root)
        if files.run.run != created.run:
            raise UnsafeState("run.json belongs to another run")
        files.check_units()
        self.files = files
        names = ", ".join(("run.json", "plan.json", *created.files))
        text = f"{names} and the mechanism are unchanged since the run was created"
        if (self.root / CANARIES).exists() and CANARIES not in created.files:
            text += f"; {CANARIES} is not sealed: the run did not have it when it was created"
            return Check("settings and plan", "warning", text)
        return text

    def _check_in_order(self, journal: StepJournal, files: CentralizedFiles) -> None:
        """Run the checks of epsilon of a run without sampling."""
        in_order, plan = InOrder(files), files.plan
        planned = plan.dataset.steps
        self._check("epsilon", lambda: in_order.check(plan.epsilon, planned, "the plan"))
        steps = min(journal.steps, planned)

        def check_saved() -> str | Check:
            for before, after in zip(journal.saves, journal.saves[1:], strict=False):
                if not after.epsilon >= before.epsilon * (1 - ROUNDING):
                    raise UnsafeState(
                        f"epsilon falls from {before.epsilon:.7g} to {after.epsilon:.7g} between "
                        f"the checkpoints after {before.steps} and {after.steps} steps"
                    )
            if not journal.saves:
                return "no checkpoint was written yet"
            last = journal.saves[-1]
            return in_order.check(last.epsilon, min(last.steps, planned), "the journal")

        def check_coverage(claim: GuaranteeFile) -> str | Check:
            stated = in_order.check(claim.epsilon, min(claim.steps, planned), "the file")
            text = stated.text if isinstance(stated, Check) else stated
            needed = in_order.range(steps).least if steps else 0.0
            if claim.steps < journal.steps and not claim.epsilon >= needed * (1 - ROUNDING):
                text += (
                    ". All steps in the journal count as released, so the file is older than the "
                    f"run: their epsilon is {needed:.6g}. Resume the run to write it again"
                )
                return Check("guarantee.json", "warning", text)
            return text

        self._check("journalled epsilon", check_saved)
        self._check_guarantee(journal, files, check_coverage)
        self._check("rigorous", lambda: self._check_rigorous(in_order))
        if journal.steps <= planned:
            try:
                self.epsilon = in_order.range(steps).least if steps else 0.0
            except DpftrlError:  # a check above has failed with the same message
                self.epsilon = None

    def _check_sampled(self, journal: StepJournal, files: CentralizedFiles) -> None:
        """Run the checks of epsilon of a run with sampling."""
        sampled, plan = Sampled(files), files.plan
        self._check("sampling", sampled.check_strategy)
        is_estimate = plan.sampling == "balls-in-bins"
        confirmation = run_check(
            ESTIMATE if is_estimate else "epsilon",
            sampled.check_bins if is_estimate else sampled.check_poisson,
        )
        self.checks.append(confirmation)
        # What was recomputed is an upper bound or an estimate. The stated epsilon is confirmed.
        if confirmation.outcome != "failed" and journal.steps <= plan.dataset.steps:
            self.epsilon = plan.epsilon if journal.steps else 0.0

        def check_saved() -> str:
            for saved in journal.saves:
                if saved.epsilon != plan.epsilon:
                    raise UnsafeState(
                        f"epsilon after {saved.steps} steps is {saved.epsilon:.7g} in the journal, "
                        f"and {plan.epsilon:.7g} in the plan; with sampling they are equal"
                    )
            return "the epsilon of every checkpoint is that of the plan"

        def check_coverage(claim: GuaranteeFile) -> str:
            if claim.epsilon != plan.epsilon:
                raise UnsafeState(
                    f"the file states epsilon {claim.epsilon:.7g}, and the plan {plan.epsilon:.7g};"
                    " with sampling they are equal"
                )
            return "its epsilon is that of the plan, which covers all planned steps"

        self._check("journalled epsilon", check_saved)
        self._check_guarantee(journal, files, check_coverage)
        self.checks.append(Check("rigorous", "skipped", rigorous.SAMPLED))

    def _check_rigorous(self, in_order: "InOrder") -> str | Check:
        """Enclose epsilon in interval arithmetic, for the steps that the file covers."""
        path = self.root / "guarantee.json"
        outcomes = {check.name: check.outcome for check in self.checks}
        if not path.exists() or outcomes.get("guarantee.json") != "passed":
            text = "not checked rigorously: there is no guarantee.json that passed its check"
            return Check("rigorous", "skipped", text)
        claim = read_json(path, GuaranteeFile, "centralized guarantee")
        stream = in_order.noise_stream(claim.steps)
        return rigorous.check_epsilon([stream], claim.delta, claim.epsilon)

    def _check_guarantee(
        self,
        journal: StepJournal,
        files: CentralizedFiles,
        check_coverage: Callable[[GuaranteeFile], str | Check],
    ) -> None:
        """Run the checks of `guarantee.json`.

        Args:
            journal: The journal of the run.
            files: The settings and the plan.
            check_coverage: Checks the epsilon of the file.
        """
        path = self.root / "guarantee.json"
        if not path.exists():
            self._check("guarantee.json", lambda: _check_no_guarantee(journal))
            return
        claims: list[GuaranteeFile] = []

        def check() -> str | Check:
            claim = read_json(path, GuaranteeFile, "centralized guarantee")
            claims.append(claim)
            text = _check_description(claim, path, files, journal)
            result = check_coverage(claim)
            if isinstance(result, Check):
                return Check("guarantee.json", result.outcome, f"{text}; {result.text}")
            return f"{text}; {result}"

        self._check("guarantee.json", check)
        for claim in claims:
            self._check("hypotheses", lambda claim=claim: check_hypotheses(claim.hypotheses, files))


def _check_no_guarantee(journal: StepJournal) -> str:
    if journal.steps:
        raise UnsafeState("guarantee.json is missing, although a step was done")
    return "no step was done yet, so there is none"


def _check_description(
    claim: GuaranteeFile, path: Path, files: CentralizedFiles, journal: StepJournal
) -> str:
    """Check that a guarantee file describes this run.

    Raises:
        UnsafeState: It does not.
    """
    run, plan = files.run, files.plan
    for what, holds in (
        ("the identity of the run", claim.run == run.run),
        ("the unit", claim.unit == run.settings.unit),
        ("the adjacency", claim.adjacency == "zero-out"),
        ("the data set", claim.dataset == plan.dataset),
        ("the sampling", claim.sampling == plan.sampling),
        ("the number of groups", claim.groups == plan.groups),
        ("the mechanism", mechanism_from(claim.mechanism, path) == files.mechanism),
        ("the noise multiplier", claim.noise_multiplier == plan.noise_multiplier),
        ("the clip norm", claim.clip_norm == run.settings.clip_norm),
        ("delta", claim.delta == plan.delta),
        ("the failure probability", claim.failure == plan.failure),
    ):
        if not holds:
            raise UnsafeState(f"{what} in guarantee.json is not that of this run")
    most = files.next_checkpoint(journal.steps)
    if not max(1, journal.saved_steps) <= claim.steps <= most:
        raise UnsafeState(
            f"it covers {claim.steps:,} steps; the last checkpoint was written after "
            f"{journal.saved_steps:,} steps, and the next one is due after {most:,}"
        )
    return f"it covers {claim.steps:,} steps, and the journal has {journal.steps:,}"


def _check_steps(journal: StepJournal, files: CentralizedFiles) -> str:
    """Check the number of steps, and that the guarantee covers so many normals."""
    planned, size = files.plan.dataset.steps, files.run.settings.size
    if journal.steps > planned:
        raise UnsafeState(
            f"the journal has {journal.steps:,} steps, and the plan only {planned:,}: no guarantee "
            "covers the others"
        )
    if not 0 < size * planned <= MOST_DRAWS:
        raise UnsafeState(
            f"a model of {size:,} coordinates in {planned:,} steps needs more normals than the "
            "2^40 that a guarantee covers"
        )
    return f"{journal.steps:,} of {planned:,} planned steps"


def _check_noise(files: CentralizedFiles) -> str | Check:
    """Check that the noise stream of the mechanism multiplies by the inverse of C."""
    steps = files.plan.dataset.steps
    checked = min(steps, MOST_ROUNDS)
    text = Strategy(files.mechanism, checked).check_noise()
    if checked == steps:
        return text
    return Check("noise", "warning", f"{text}; the later ones of {steps:,} were not compared")


def _check_certificate(plan: PlanFile) -> str | Check:
    """Check the failure probability of certificates from random samples."""
    if not plan.failure:
        raise UnsafeState(
            "epsilon rests on random samples, which can mislead, but the failure probability is 0"
        )
    text = f"the certificate of epsilon is wrong with probability {plan.failure:.2g} at most"
    if plan.failure > MOST_FAILURE:
        return Check("certificate", "warning", f"{text}, which is more than {MOST_FAILURE:g}")
    return text


def _adaptive(journal: StepJournal, files: CentralizedFiles) -> AdaptiveRun:
    """Return what the files of a run say about its adaptive clipping."""
    plan, settings = files.plan, files.run.settings
    if len(journal.clipped) != journal.steps:
        raise UnsafeState("a step has no clip norm in the journal")
    finest = grid_step(plan.noise_multiplier, STEPS_PER_DEVIATION)
    return AdaptiveRun(
        options=settings.clip_norm,
        rounds=[step.clipping for step in journal.clipped],
        digests=[step.digest for step in journal.clipped],
        goal=plan.dataset.batch_size,
        most=plan.dataset.size,
        step=JAX_STEP if settings.framework == "jax" else finest,
        mechanism=files.mechanism,
        noise_multiplier=plan.noise_multiplier,
        size=settings.size,
        buffers="float64",
    )
