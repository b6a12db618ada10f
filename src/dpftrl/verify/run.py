"""The audit of a run: every check, in the order in which they build on each other."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import final

from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.verify.contacts import Contacts, check_cap, check_cohorts, check_timers
from dpftrl.verify.earlier_runs import EarlierRuns
from dpftrl.verify.files import Told, digest_must_be
from dpftrl.verify.folder import check_checkpoints, check_modes, check_witness, witness_folder
from dpftrl.verify.guarantee import Released
from dpftrl.verify.journal import Journal, fingerprint, read_journal, read_key
from dpftrl.verify.ledger import Ledger, read_ledger
from dpftrl.verify.verdict import Check, Verdict, tried


def verify_run(
    folder: str | os.PathLike[str],
    state_folder: str | os.PathLike[str] | None = None,
    *,
    witness: bool = True,
) -> Verdict:
    """Check a run from its files, while no server works on it.

    Args:
        folder: The folder of the run.
        state_folder: Where its witness is; by default $DPFTRL_STATE, or the user's state folder.
        witness: Whether to ask for one: without it, nobody can tell a folder from an older copy.

    Guarantees:
        Anything that was changed, dropped or added in the journal, the ledger, the plan, the
        settings or the kept checkpoints since they were written fails a check, unless it was done
        with the noise key and the witness at hand. Whatever the files say, they pass only if no
        client came too early or too often and the stated epsilon follows from what they hold,
        composed with the earlier runs that the start model was recorded with.
    """
    root = Path(folder)
    if not any((root / name).exists() for name in ("run.json", "private/journal.jsonl")):
        raise InvalidInput(f"{root} holds no run: there is neither run.json nor a journal in it")
    place = (witness_folder() if state_folder is None else Path(state_folder)) if witness else None
    return _Audit(root, place).verdict()


@final
class _Audit:
    """One audit: what was read, and what was found."""

    def __init__(self, root: Path, witness: Path | None):
        self.root = root
        self.witness = witness
        self.checks: list[Check] = []
        self.journal: Journal | None = None
        self.told: Told | None = None
        self.earlier: EarlierRuns | None = None
        self.ledger: Ledger | None = None
        self.epsilon: float | None = None

    def verdict(self) -> Verdict:
        self._check("file modes", lambda: check_modes(self.root / "private"))
        self._check("journal", self._read_journal)
        if self.journal is None:
            self._warn("everything else", "not looked at: the journal cannot be trusted")
        else:
            self._after_journal(self.journal)
        made = self.journal
        return Verdict(
            run=made.created.run if made else None,
            checks=tuple(self.checks),
            rounds=len(made.commits) if made else 0,
            epsilon=self.epsilon,
            delta=self.told.delta if self.told else None,
        )

    def _check(self, name: str, examine: Callable[[], str | Check]) -> None:
        self.checks.append(tried(name, examine))

    def _warn(self, name: str, text: str) -> None:
        self.checks.append(Check(name, "warning", text))

    def _read_journal(self) -> str:
        key = read_key(self.root / "private" / "noise.key")
        journal = read_journal(self.root / "private" / "journal.jsonl", key)
        if journal.created.key_fingerprint != fingerprint(key):
            raise UnsafeState("the noise key is not the one that the run began with")
        self.journal = journal
        flight = ", the last of them in flight" if journal.in_flight else ""
        return (
            f"{len(journal.macs):,} lines, unbroken: {len(journal.attempts):,} attempts{flight}, "
            f"{len(journal.commits):,} rounds released"
        )

    def _after_journal(self, journal: Journal) -> None:
        self._check_witness(journal)
        self._check("settings and plan", lambda: self._read_told(journal))
        if self.earlier is not None:
            self._check("start model", self.earlier.check)
        checkpoints = self.root / "private" / "checkpoints"
        self._check("checkpoints", lambda: check_checkpoints(checkpoints, journal))
        self._check("ledger", lambda: self._read_ledger(journal))
        if self.told is None or self.earlier is None:
            self._warn("guarantee", "not looked at: the settings or the plan cannot be trusted")
            return
        told, earlier, contacts = self.told, self.earlier, Contacts.of(journal.attempts)
        most = told.promise.stream.participation.max_participations
        self._check("cohorts", lambda: check_cohorts(journal, told))
        self._check("timers", lambda: check_timers(journal, contacts, told))
        self._check("cap", lambda: check_cap(contacts, most))
        self._check("epsilon", lambda: self._look_at_release(journal, contacts, told, earlier))
        if told.test_key:
            text = "NOT PRIVATE: the noise key is a fixed one for tests, which anybody can guess"
            self._warn("noise key", text)

    def _check_witness(self, journal: Journal) -> None:
        place = self.witness
        if place is None:
            self._warn("witness", "not asked: this may be an older copy of the run")
        else:
            self._check("witness", lambda: check_witness(journal, place))
        if not journal.torn:
            return
        seen = place is not None and self.checks[-1].outcome == "passed"
        text = "half a line is left at its end"
        if seen:
            text += "; nothing followed from it, and resuming cuts it off"
        self.checks.append(Check("journal's end", "warning" if seen else "failed", text))

    def _read_told(self, journal: Journal) -> str:
        created = journal.created
        digest_must_be(self.root / "run.json", created.settings_sha256, "the run began")
        digest_must_be(self.root / "plan.json", created.plan_sha256, "the run began")
        told = Told(self.root)
        if told.run != created.run:
            raise UnsafeState("run.json is that of another run")
        self.earlier = EarlierRuns(told, self.root / "run.json")
        self.told = told
        return "run.json, plan.json and the mechanism are what they were when the run began"

    def _read_ledger(self, journal: Journal) -> str | Check:
        self.ledger = read_ledger(self.root / "ledger.csv", journal.attempts)
        counted = sum(int(each.sum()) for each in self.ledger.counted)
        text = f"every contact once, {counted:,} of them counted"
        if not self.ledger.bytes_after:
            return text
        if not journal.in_flight:
            raise UnsafeState(
                f"it has {self.ledger.bytes_after:,} bytes that no round accounts for"
            )
        text += f"; {self.ledger.bytes_after:,} bytes at its end are of the round in flight"
        return Check("ledger", "warning", text)

    def _look_at_release(
        self, journal: Journal, contacts: Contacts, told: Told, earlier: EarlierRuns
    ) -> str:
        if not journal.commits:
            if (self.root / "guarantee.json").exists():
                raise UnsafeState("there is a guarantee.json, and nothing was released")
            self.epsilon = earlier.epsilon()
            return "nothing was released yet"
        released = Released(self.root, journal, contacts, told, earlier)
        for name, examine in released.examinations(self.ledger).items():
            self._check(name, examine)
        self.epsilon = released.epsilon()
        return f"epsilon is {self.epsilon:.6g} at delta {told.delta:g}, recomputed"
