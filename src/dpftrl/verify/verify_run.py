"""Verification of a run: all checks, in the order in which they depend on each other."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, final

from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.verify.centralized import CentralizedVerification
from dpftrl.verify.centralized_files import is_centralized
from dpftrl.verify.check_guarantee import ReleasedRounds, check_guarantee_in_flight
from dpftrl.verify.clip_norms import AdaptiveRun, check_clip_norms, grid_step
from dpftrl.verify.contacts import (
    Contacts,
    Ledger,
    check_cap,
    check_cohorts,
    check_ledger_copy,
    check_timers,
    counted_in_journal,
    read_ledger,
)
from dpftrl.verify.earlier_runs import EarlierRuns
from dpftrl.verify.journal import Journal, fingerprint, read_journal, read_key
from dpftrl.verify.run_files import (
    RunFiles,
    check_checkpoints,
    check_digest,
    check_modes,
    witness_checks,
    witness_folder,
)
from dpftrl.verify.verdict import Check, Verdict, run_check

STEPS_PER_DEVIATION: Final = 2**24  # of the grid of sums, at least
CONFIG: Final = "config.toml"  # the configuration that `dpftrl train` keeps in a run


def verify_run(
    folder: str | os.PathLike[str],
    state_folder: str | os.PathLike[str] | None = None,
    *,
    witness: bool = True,
) -> Verdict:
    """Verify a federated or centralized run from its files. No process may be using the run.

    Args:
        folder: The folder of the run.
        state_folder: The folder of the run's witness. The default is $DPFTRL_STATE, or the user's
            state folder.
        witness: Whether to compare the run with its witness. Without a witness, an older copy of
            the run cannot be recognized.

    Returns:
        The results of all checks, and the recomputed epsilon. A failed check does not raise. For
        sampled batches, epsilon is the stated one, once a check has confirmed it; with
        balls-in-bins sampling, this check is an estimate and no certificate.

    Raises:
        InvalidInput: The folder does not contain a run.

    Guarantees:
        A check fails if anything was changed, removed or added in the journal, the ledger, the
        plan, the settings or the kept checkpoints after they were written, unless whoever did it
        had the noise key and the witness. Whatever the files say, they pass only if no client was
        contacted too early or too often, if every adaptive clip norm follows from the noisy bits of
        earlier rounds, and if the stated epsilon follows from their content, composed with the
        earlier runs that are recorded for the start model. For a centralized
        run, that no step was repeated with other noise, that there are no more steps than planned,
        and that the stated epsilon and hypotheses follow from the plan and the settings.
    """
    root = Path(folder)
    if not any((root / name).exists() for name in ("run.json", "private/journal.jsonl")):
        raise InvalidInput(
            f"{root} holds no run: it has neither run.json nor private/journal.jsonl"
        )
    state = witness_folder() if state_folder is None else Path(state_folder)
    verification = CentralizedVerification if is_centralized(root) else _Verification
    return verification(root, state if witness else None).verdict()


@final
class _Verification:
    """The state of one verification: the files read so far, and the results of the checks.

    A file that could not be read, or failed its check, is None.
    """

    def __init__(self, root: Path, witness_folder: Path | None):
        self.root = root
        self.witness_folder = witness_folder
        self.checks: list[Check] = []
        self.journal: Journal | None = None
        self.run_files: RunFiles | None = None
        self.earlier: EarlierRuns | None = None
        self.ledger: Ledger | None = None
        self.epsilon: float | None = None

    def verdict(self) -> Verdict:
        """Run all checks and return their results."""
        self._check("file modes", lambda: check_modes(self.root / "private"))
        self._check("journal", self._read_journal)
        if self.journal is None:
            self._warn("everything else", "not checked, because the journal cannot be trusted")
        else:
            self._check_other_files(self.journal)
        journal = self.journal
        return Verdict(
            run_id=journal.created.run if journal else None,
            checks=tuple(self.checks),
            rounds=len(journal.commits) if journal else 0,
            epsilon=self.epsilon,
            delta=self.run_files.delta if self.run_files else None,
            empty_rounds=journal.empty_rounds if journal else 0,
        )

    def _check(self, name: str, check: Callable[[], str | Check]) -> None:
        self.checks.append(run_check(name, check))

    def _warn(self, name: str, text: str) -> None:
        self.checks.append(Check(name, "warning", text))

    def _read_journal(self) -> str:
        key = read_key(self.root / "private" / "noise.key")
        journal = read_journal(self.root / "private" / "journal.jsonl", key)
        if journal.created.key_fingerprint != fingerprint(key):
            raise UnsafeState("the noise key is not the key that the run was created with")
        self.journal = journal
        in_flight = ", the last of them in flight" if journal.in_flight else ""
        return (
            f"{len(journal.macs):,} lines, all unchanged: {len(journal.attempts):,} attempts"
            f"{in_flight}, {len(journal.commits):,} rounds released"
        )

    def _check_other_files(self, journal: Journal) -> None:
        """Run the checks that compare other files with the journal."""
        self.checks += witness_checks(journal, self.witness_folder, self.root)
        self._check("settings and plan", lambda: self._read_run_files(journal))
        if self.earlier is not None:
            self._check("start model", self.earlier.check)
        checkpoints = self.root / "private" / "checkpoints"
        self._check("checkpoints", lambda: check_checkpoints(checkpoints, journal))
        self._check("ledger", lambda: self._read_ledger(journal))
        if self.run_files is None or self.earlier is None:
            text = "not checked, because the settings or the plan cannot be trusted"
            self._warn("guarantee", text)
            return
        run_files, earlier = self.run_files, self.earlier
        contacts = Contacts.of(journal.attempts)
        cap = run_files.promised.stream.participation.max_participations
        self._check("cohorts", lambda: check_cohorts(journal, run_files))
        if run_files.adaptive or any(commit.clipping is not None for commit in journal.commits):
            key = read_key(self.root / "private" / "noise.key")
            adaptive = _adaptive(journal, run_files)
            self._check("clip norms", lambda: check_clip_norms(adaptive, key))
        self._check("timers", lambda: check_timers(journal, contacts, run_files))
        self._check("cap", lambda: check_cap(contacts, cap))
        self._check("epsilon", lambda: self._check_epsilon(journal, contacts, run_files, earlier))
        if run_files.test_key:
            text = "NOT PRIVATE: the noise key is a fixed key for tests, which anybody can guess"
            self._warn("noise key", text)

    def _read_run_files(self, journal: Journal) -> str | Check:
        created = journal.created
        check_digest(self.root / "run.json", created.settings_sha256, "the run was created")
        check_digest(self.root / "plan.json", created.plan_sha256, "the run was created")
        for name, sha256 in created.files.items():
            check_digest(self.root / name, sha256, "the run was created")
        run_files = RunFiles(self.root)
        if run_files.run_id != created.run:
            raise UnsafeState("run.json belongs to another run")
        self.earlier = EarlierRuns(run_files, self.root / "run.json")
        self.run_files = run_files
        names = ", ".join(("run.json", "plan.json", *created.files))
        text = f"{names} and the mechanism are unchanged since the run was created"
        if (self.root / CONFIG).exists() and CONFIG not in created.files:
            text += f"; {CONFIG} is not sealed, as in all runs of version 0.1"
            return Check("settings and plan", "warning", text)
        return text

    def _read_ledger(self, journal: Journal) -> str | Check:
        """Read who was counted; from version 2 of the journal on, a ledger is only a copy."""
        path = self.root / "ledger.csv"
        if journal.created.version == 1:
            return self._read_kept_ledger(journal)
        self.ledger = counted_in_journal(journal.attempts)
        text = "it follows from the journal"
        if not path.exists():
            return text
        if check_ledger_copy(path, journal.attempts):
            return f"{text}, and {path.name} is a copy of it"
        text = f"{path.name} is older than the journal; write it again with `dpftrl ledger`"
        return Check("ledger", "warning", text)

    def _read_kept_ledger(self, journal: Journal) -> str | Check:
        self.ledger = read_ledger(self.root / "ledger.csv", journal.attempts)
        counted = sum(int(mask.sum()) for mask in self.ledger.counted)
        text = f"every contact is there once; {counted:,} of them were counted"
        if not self.ledger.trailing_bytes:
            return text
        if not journal.in_flight:
            raise UnsafeState(
                f"ledger.csv ends with {self.ledger.trailing_bytes:,} bytes that belong to no "
                "attempt of the journal"
            )
        text += f"; its last {self.ledger.trailing_bytes:,} bytes belong to the attempt in flight"
        return Check("ledger", "warning", text)

    def _check_epsilon(
        self, journal: Journal, contacts: Contacts, run_files: RunFiles, earlier: EarlierRuns
    ) -> str:
        """Run the checks of the released rounds, and recompute their epsilon."""
        if not journal.commits:
            self._check_guarantee_of_nothing(journal, contacts, run_files, earlier)
            self.epsilon = earlier.epsilon()
            return "no round was released yet"
        released = ReleasedRounds(self.root, journal, contacts, run_files, earlier)
        for name, check in released.checks(self.ledger).items():
            self._check(name, check)
        self.epsilon = released.epsilon()
        return f"epsilon is {self.epsilon:.6g} at delta {run_files.delta:g}, recomputed"

    def _check_guarantee_of_nothing(
        self, journal: Journal, contacts: Contacts, run_files: RunFiles, earlier: EarlierRuns
    ) -> None:
        """Check that there is no guarantee yet, except one for the first round in flight."""
        path = self.root / "guarantee.json"
        if not path.exists():
            return
        if not journal.in_flight:
            raise UnsafeState("there is a guarantee.json, although no round was released")
        self._check(
            "guarantee.json",
            lambda: check_guarantee_in_flight(path, journal, contacts, run_files, earlier),
        )


def _adaptive(journal: Journal, run_files: RunFiles) -> AdaptiveRun:
    """Return what the files of a run say about its adaptive clipping."""
    goal = run_files.fleet.report_goal
    return AdaptiveRun(
        options=run_files.settings.clip_norm,
        rounds=[commit.clipping for commit in journal.commits],
        digests=[commit.digest for commit in journal.commits],
        goal=goal,
        most=goal,
        step=grid_step(run_files.noise_multiplier, STEPS_PER_DEVIATION),
        mechanism=run_files.mechanism,
        noise_multiplier=run_files.noise_multiplier,
        size=run_files.size,
        buffers=run_files.buffers,
    )
