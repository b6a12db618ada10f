"""Runs recorded by the real server, and helpers that edit or forge their files."""

import hashlib
import hmac
import json
import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
from journal_codes import clients_of, counted_of, set_clients, set_counted

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
    """Rewrite journal, witness and a kept ledger with the noise key, so that all digests fit.

    Args:
        run: The run.
        records: The records of its journal.
        statuses: Other statuses of the clients of some attempts, in their order.
    """
    ledger, cohort = b"round,client,status\n", {}
    keeps_ledger = any(record.get("version", 1) == 1 for record in records[:1])
    for record in records:
        if record["kind"] == "cohort":
            cohort = record
        elif record["kind"] != "created":
            said = _statuses(record, cohort, (statuses or {}).get(record["attempt"]))
            if keeps_ledger:
                ledger += _ledger_rows(record, cohort, said)
                record["ledger_bytes"] = len(ledger)
                record["ledger_sha256"] = hashlib.sha256(ledger).hexdigest()
            elif record["kind"] == "committed":
                set_counted(record, [status == "counted" for status in said])
    if keeps_ledger:
        run.ledger.write_bytes(ledger)
    forge(run, records)


def forge(run: RunFolders, records: list[dict]) -> None:
    """Write these records as the journal, with digests that fit, and let the witness see them."""
    lines, mac = [], bytes(32)
    secret = (run.folder / "private" / "noise.key").read_bytes()
    key = hmac.digest(secret, b"\0\0\0\x07journal" + bytes(8), "sha256")
    for record in records:
        content = json.dumps(record, separators=(",", ":")).encode()
        mac = hmac.digest(key, mac + content, "sha256")
        lines.append(b'{"mac":"%s","record":%s}\n' % (mac.hex().encode(), content))
    run.journal.write_bytes(b"".join(lines))
    (run.folder / "private" / "snapshot.bin").unlink(missing_ok=True)
    witness = json.loads(run.witness.read_text())
    run.witness.write_text(json.dumps(witness | {"lines": len(lines), "mac": mac.hex()}))


def keep_a_ledger(run: RunFolders) -> RunFolders:
    """Turn a run into one whose journal has version 1, with a ledger beside it."""
    records, cohort, statuses = read_records(run), {}, {}
    del records[0]["version"]
    for record in records[1:]:
        if record["kind"] == "cohort":
            cohort = record
            clients = clients_of(record)
            del record["size"]
            set_clients(record, clients)
        elif record["kind"] == "committed":
            counted = counted_of(record, len(clients_of(cohort)))
            said = ["counted" if one else "contacted" for one in counted]
            statuses[record["attempt"]] = said
            del record["counted"]
    rewrite(run, records, statuses)
    return run


def _statuses(record: dict, cohort: dict, statuses: list[str] | None) -> list[str]:
    if statuses is not None:
        return statuses
    clients = clients_of(cohort)
    if record["kind"] == "abandoned":
        return ["abandoned"] * len(clients)
    said = ["counted"] * record["reports"]
    return said + ["contacted"] * (len(clients) - len(said))


def _ledger_rows(record: dict, cohort: dict, statuses: list[str]) -> bytes:
    rows = zip(clients_of(cohort), statuses, strict=True)
    return b"".join(f"{record['row']},c{client},{status}\n".encode() for client, status in rows)
