"""Runs recorded by the real server, and helpers that edit or forge their files."""

import hashlib
import hmac
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpftrl import MinSep, account, mechanism
from dpftrl.federated import Server, Settings
from dpftrl.plan import Fleet, Plan
from dpftrl.verify import Verdict, verify_run

CLIENTS = [f"client {i}" for i in range(24)]
PLAN = Plan(
    Fleet(population=24, report_goal=3, over_selection=1.3),
    account(mechanism("blt-b400"), MinSep(8, 4), noise_multiplier=3.0, delta=1e-6),
)


class RunFolders(NamedTuple):
    """The folder of a run, and the folder of its witness."""

    folder: Path
    state: Path

    def copy_to(self, root: Path) -> "RunFolders":
        shutil.copytree(self.folder, root / "run")
        shutil.copytree(self.state, root / "state")
        return RunFolders(root / "run", root / "state")

    def verify(self, **options) -> Verdict:
        return verify_run(self.folder, self.state, **options)

    @property
    def journal(self) -> Path:
        return self.folder / "private" / "journal.jsonl"

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.csv"

    @property
    def witness(self) -> Path:
        (path,) = self.state.glob("*.json")
        return path

    def open(self) -> Server:
        return Server.resume(self.folder, state_folder=self.state)


def create_run(
    root: Path, plan: Plan = PLAN, test_key: int | None = None, **settings
) -> RunFolders:
    run = RunFolders(root / "run", root / "state")
    Server.create(
        run.folder,
        plan,
        Settings(clip_norm=1.0, **settings),
        {"w": np.zeros(5)},
        state_folder=run.state,
        insecure_test_key=test_key,
    ).close()
    return run


def run_attempt(server: Server, abandon: bool = False, now: float | None = None) -> None:
    """Run one attempt: commit it, or abandon it after one report."""
    attempt = server.begin(CLIENTS, now)
    for client in list(attempt.clients)[: 1 if abandon else 3]:
        attempt.report(client, np.ones(5), attempt.attempt)
    if abandon:
        server.abandon(attempt, "too few")
    else:
        server.commit(attempt)


def record_run(root: Path, rounds: int, plan: Plan = PLAN, **settings) -> RunFolders:
    run = create_run(root, plan, **settings)
    with run.open() as server:
        for _ in range(rounds):
            run_attempt(server)
    return run


def failed(verdict: Verdict) -> dict[str, str]:
    return {check.name: check.text for check in verdict.checks if check.outcome == "failed"}


def warned(verdict: Verdict) -> dict[str, str]:
    return {check.name: check.text for check in verdict.checks if check.outcome == "warning"}


# --- Forgeries that need the noise key ------------------------------------------------------------


def read_records(run: RunFolders) -> list[dict]:
    return [json.loads(line)["record"] for line in run.journal.read_text().splitlines()]


def rewrite(
    run: RunFolders, records: list[dict], statuses: dict[int, list[str]] | None = None
) -> None:
    """Rewrite journal, ledger and witness with the noise key, so that all digests fit."""
    ledger, cohort, lines, mac = b"round,client,status\n", {}, [], bytes(32)
    secret = (run.folder / "private" / "noise.key").read_bytes()
    key = hmac.digest(secret, b"\0\0\0\x07journal" + bytes(8), "sha256")
    for record in records:
        if record["kind"] == "cohort":
            cohort = record
        elif record["kind"] != "created":
            ledger += ledger_rows(record, cohort, (statuses or {}).get(record["attempt"]))
            record["ledger_bytes"] = len(ledger)
            record["ledger_sha256"] = hashlib.sha256(ledger).hexdigest()
        content = json.dumps(record, separators=(",", ":")).encode()
        mac = hmac.digest(key, mac + content, "sha256")
        lines.append(b'{"mac":"%s","record":%s}\n' % (mac.hex().encode(), content))
    run.journal.write_bytes(b"".join(lines))
    run.ledger.write_bytes(ledger)
    witness = json.loads(run.witness.read_text())
    run.witness.write_text(json.dumps(witness | {"lines": len(lines), "mac": mac.hex()}))


def ledger_rows(record: dict, cohort: dict, statuses: list[str] | None) -> bytes:
    clients = split(cohort["clients"])
    if statuses is None:
        last = "abandoned" if record["kind"] == "abandoned" else "contacted"
        statuses = ["counted"] * record.get("reports", 0)
        statuses += [last] * (len(clients) - len(statuses))
    rows = zip(clients, statuses, strict=True)
    return b"".join(f"{record['row']},c{client},{status}\n".encode() for client, status in rows)


def split(clients: str) -> list[str]:
    return [clients[i : i + 16] for i in range(0, len(clients), 16)]
