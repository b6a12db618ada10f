"""The status of real runs: in progress, killed, standing still, damaged, and as planned."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from small_runs import PEOPLE, create, fill, one_round, reopen, small_plan
from small_training_runs import STEPS, Place, Trainer, fast_places

from dpftrl import Server, StartModel, Status, read_status
from dpftrl.errors import InvalidInput, TooFewClients, UnsafeState
from dpftrl.federated.eligibility import Exposure, Timers
from dpftrl.federated.store import run_store
from dpftrl.status import StatusReader
from dpftrl.status.figures import StandStill

WATCHED = Path(__file__).parent / "watched_run.py"
DAY = 86_400.0


def status_of(server: Server, **options) -> Status:
    root = server.folder.root
    return read_status(root, state_folder=root.parent / "state", **options)


def kinds(status: Status) -> set[str]:
    return {warning.kind for warning in status.warnings}


@contextlib.contextmanager
def in_another_process(place: Path, *arguments: str) -> Generator[subprocess.Popen[str]]:
    """A server that trains; it has released a round, or has contacted the clients of one."""
    program = [sys.executable, str(WATCHED), str(place), *arguments]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            if arguments:
                assert process.stdout.readline() == "stuck\n"
            yield process
        finally:
            process.kill()


# --- A run that is trained -----------------------------------------------------------------------


def test_the_figures_follow_a_server_of_another_process(tmp_path):
    with in_another_process(tmp_path) as process:
        reader = StatusReader(tmp_path / "run", state_folder=tmp_path / "state")
        seen = [reader.read()]
        (tmp_path / "go").touch()
        while seen[-1].private.process.running:
            seen.append(reader.read())
        assert process.wait(60) == 0
    rounds = [status.public.rounds for status in seen]
    assert rounds == sorted(rounds)
    assert len(set(rounds)) > 3  # it saw the run go on
    assert seen[0].private.process.pid == process.pid
    for status in seen:
        assert status.private.witness.state == "in step"
        assert not kinds(status)
    last = reader.read()
    assert last.public.ended == "all 40 rounds are done"
    assert last.public.epsilon == last.public.epsilon_planned
    assert not last.private.process.running


def test_a_killed_run_has_an_open_round_and_no_server(tmp_path):
    with in_another_process(tmp_path, "--stuck") as process:
        alive = read_status(tmp_path / "run", state_folder=tmp_path / "state")
        assert alive.private.process.pid == process.pid
        process.send_signal(signal.SIGKILL)
        process.wait()
    status = read_status(tmp_path / "run", state_folder=tmp_path / "state")
    assert status.private.process.running is False
    assert status.public.rounds == 3
    assert status.private.attempts is not None
    opened = status.private.attempts.open
    assert opened is not None
    assert (opened.attempt, opened.contacted) == (3, 3)
    assert not kinds(status)
    later = read_status(tmp_path / "run", state_folder=tmp_path / "state", now=status.time + DAY)
    assert kinds(later) == {"no round"}
    assert "resume it" in later.warnings[0].text
    with Server.resume(tmp_path / "run", state_folder=tmp_path / "state") as server:
        assert server.in_flight  # reading has changed nothing


def test_reading_takes_no_lock_and_writes_nothing(tmp_path, monkeypatch):
    with create(tmp_path) as server:
        one_round(server)
        server.begin(PEOPLE)
        before = everything_in(tmp_path)
        opened, real = list[int](), os.open

        def watched(path, flags, *rest, **options):
            opened.append(flags)
            return real(path, flags, *rest, **options)

        def refused(*_):
            raise AssertionError("a lock was taken")

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", watched)
            patch.setattr(fcntl, "flock", refused)
            status_of(server)
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
        assert opened
        assert not any(flags & writing for flags in opened)
        assert everything_in(tmp_path) == before


def everything_in(place: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, b"" if path.is_dir() else path.read_bytes())
        for path in [place, *place.rglob("*")]
    }


def test_an_incomplete_last_line_is_left_out(tmp_path):
    with create(tmp_path) as server:
        one_round(server)
        one_round(server)
    known = status_of(server)
    content = server.folder.journal.read_bytes()
    last = content.splitlines(keepends=True)[-1]
    server.folder.journal.write_bytes(content[: -len(last) // 2])
    status = status_of(server)
    assert (known.public.rounds, status.public.rounds) == (2, 1)
    assert status.private.attempts is not None
    assert status.private.attempts.open is not None
    # The witness had seen that line: this is not what a killed process leaves.
    assert kinds(status) - kinds(known) == {"witness"}


# --- What the figures say ------------------------------------------------------------------------


def test_public_figures_do_not_depend_on_what_clients_did(tmp_path):
    """Other people, other availability, abandoned attempts, unfit updates: nothing public."""
    texts = list[bytes]()
    for name, people, update, abandoned in (
        ("calm", PEOPLE, None, 0),
        ("wild", [f"other {i}" for i in range(50)], lambda *_: np.full(5, np.nan), 2),
    ):
        with create(tmp_path / name, small_plan(population=80), key=7) as server:
            for _ in range(abandoned):
                server.abandon(server.begin(people), "too few")
            for _ in range(3):
                one_round(server, people, *([] if update is None else [update]))
            status = status_of(server)
            public = msgspec.structs.replace(status.public, run="")
            texts.append(msgspec.json.encode(public))
            if abandoned:
                attempts = status.private.attempts
                assert attempts is not None
                assert (attempts.total, attempts.abandoned, attempts.unfit) == (5, 2, 9)
                assert attempts.drop_out == pytest.approx(6 / 15)
    assert texts[0] == texts[1]


def test_eligible_clients_are_those_that_the_next_round_chooses_from(tmp_path):
    """The server notes how many clients it could choose from; the status knew it before."""
    with create(tmp_path, small_plan(20, 4, goal=3, over_selection=1.3), key=None) as server:
        for number in range(9):
            clients = status_of(server).private.clients
            assert clients is not None
            assert clients.eligible is not None
            if number == 4:
                server.abandon(server.begin(PEOPLE), "too few")
                clients = status_of(server).private.clients
                assert clients is not None
            one_round(server)
            after = status_of(server).private.clients
            assert after is not None
            assert after.eligible_at_begin == clients.eligible
            assert after.available_at_begin == len(PEOPLE)
            if number < 3:
                assert after.eligible == clients.eligible_next[0]


def test_a_round_in_flight_is_taken_to_be_committed(tmp_path):
    """Then the clients of an earlier round are rested, which they are not before."""
    with create(tmp_path, small_plan(20, 2), key=None) as server:
        one_round(server)
        attempt = server.begin(PEOPLE)
        clients = status_of(server).private.clients
        fill(attempt)
        server.commit(attempt)
        one_round(server)
        after = status_of(server).private.clients
    assert clients is not None
    assert after is not None
    assert (clients.eligible, clients.rested) == (after.eligible_at_begin, 3)


def test_rounds_within_the_budget_are_those_that_the_server_does(tmp_path):
    plan = small_plan(12)
    budget = 0.5 * plan.guarantee.epsilon
    with create(tmp_path, plan, key=None, budget=budget) as server:
        within = status_of(server).public.rounds_within_budget
        by_hand = sum(
            server._guarantee.after(rounds, Exposure()).epsilon <= budget for rounds in range(1, 13)
        )
        assert within == by_hand
        assert 0 < by_hand < 12
        while not server.ended():
            assert status_of(server).public.ended is None
            one_round(server)
        status = status_of(server)
        assert server.rounds == within
        assert status.public.ended == server.ended()
        assert status.public.epsilon == server.epsilon
        assert not kinds(status)  # the run has ended as it should


def test_a_nearly_spent_budget_warns(tmp_path):
    plan = small_plan(12)
    with create(tmp_path, plan, key=None, budget=plan.guarantee.epsilon) as server:
        spent = list[tuple[float, bool]]()
        while server.rounds < 11:
            one_round(server)
            status = status_of(server)
            share = server.epsilon / plan.guarantee.epsilon
            spent.append((share, "budget" in kinds(status)))
    assert [warned for _, warned in spent] == [share >= 0.8 for share, _ in spent]
    assert {warned for _, warned in spent} == {True, False}


def test_pace_and_expected_end_follow_the_private_log(tmp_path):
    with create(tmp_path, key=None) as server:
        assert status_of(server).private.pace.seconds_per_round is None
        for _ in range(4):
            one_round(server)
    path = server.folder.log
    entries = [json.loads(line) for line in path.read_bytes().splitlines()]
    # Rounds took 100, 300 and, with a pause of the server, 10,000 seconds.
    for entry, at in zip(entries, (0.0, 100.0, 400.0, 10_400.0), strict=True):
        entry["time"] = 1.7e9 + at
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    now = 1.7e9 + 10_500.0
    pace = status_of(server, now=now).private.pace
    assert pace.seconds_per_round == 300.0  # the median
    assert pace.last_round == 1.7e9 + 10_400.0
    assert pace.expected_end == now + 16 * 300.0
    path.unlink()
    pace = status_of(server).private.pace
    assert pace.basis == "whole run"
    created, last = server.folder.settings.stat(), server.folder.checkpoint(4).stat()
    assert pace.seconds_per_round == pytest.approx((last.st_mtime - created.st_mtime) / 4)


def test_a_run_that_starts_from_a_private_model_states_both(tmp_path):
    with create(tmp_path / "first", key=None) as server:
        one_round(server)
        server.export(tmp_path / "model.safetensors")
    model = StartModel.load(tmp_path / "model.safetensors")
    with create(tmp_path / "second", model=model, key=None) as server:
        public = status_of(server).public
        assert public.epsilon == server.epsilon > 0
        assert public.epsilon_planned == server.planned.epsilon


# --- Stand-stills --------------------------------------------------------------------------------


def until_too_few(server: Server, people: Sequence[str]) -> None:
    with contextlib.suppress(TooFewClients):
        while True:  # raises RunOver at the end
            one_round(server, people)


def still_of(status: Status) -> StandStill | None:
    assert status.private.clients is not None
    return status.private.clients.stand_still


def test_abandoned_attempts_bring_a_stand_still_that_is_foreseen(tmp_path):
    plan = small_plan(20, 4, goal=3, population=13)
    people = PEOPLE[:13]
    with create(tmp_path, plan, key=None) as server:
        one_round(server, people)
        assert still_of(status_of(server)) is None
        server.abandon(server.begin(people), "too few")
        status = status_of(server)
        still = still_of(status)
        assert still is not None
        assert not still.observed
        assert kinds(status) == {"stand-still", "drop-outs"}
        assert "waiting does not end it" in status.warnings[0].text
        until_too_few(server, people)
        # Attempts are abandoned less often than so far, so it comes at that round or later.
        assert still.round <= server.rounds
        status = status_of(server)
        still = still_of(status)
        assert still is not None
        assert still.observed
        assert (still.rounds_left, still.round) == (0, server.rounds)
        assert "the server waits for clients" in status.warnings[0].text
        assert status.private.pace.expected_end is None
        one_round(server, PEOPLE)  # new clients end it
        assert "observed" not in str(still_of(status_of(server)) or "")


def test_a_forecast_names_the_round_at_which_the_server_has_too_few(tmp_path):
    """Without abandoned attempts to come, the forecast is exact."""
    plan = small_plan(20, 6, goal=3, population=18)
    people = PEOPLE[:18]
    with create(tmp_path, plan, key=None) as server:
        server.abandon(server.begin(people), "too few")
        for _ in range(2):
            one_round(server, people)
        reader = StatusReader(tmp_path / "run", state_folder=tmp_path / "state")
        still = still_of(reader.read())
        assert still is not None
        foreseen, eligible = still.round, still.eligible
        until_too_few(server, people)
        assert foreseen <= server.rounds
        assert eligible is not None
        assert eligible < 3
        still = still_of(reader.read())  # the log changed, and the journal did not
        assert still is not None
        assert still.observed


@pytest.mark.parametrize("hours", [None, 2.0])
def test_rounds_that_are_closed_as_empty_are_rounds_and_no_attempts(tmp_path, hours):
    plan = small_plan(20, 4, goal=3, population=12)
    people = PEOPLE[:12]
    with create(tmp_path, plan, key=None, timer_hours=hours) as server:

        def now() -> float | None:
            return None if hours is None else float(server.rounds)

        one_round(server, people, now=now())
        server.abandon(server.begin(people, now()), "too few")
        server.close_empty_round(people[:2], "nobody", now())
        for _ in range(2):
            one_round(server, people, now=now())
        status = status_of(server)
        attempts, clients = status.private.attempts, status.private.clients
        assert status.public.rounds == 4
        assert attempts is not None
        assert (attempts.abandoned, attempts.recent, attempts.recent_contacts) == (1, 4, 12)
        assert attempts.drop_out == pytest.approx(3 / 12)
        assert clients is not None
        one_round(server, people, now=now())
        after = status_of(server).private.clients
        assert after is not None
        assert after.eligible_at_begin == clients.eligible


def test_timers_in_hours_end_a_stand_still_by_themselves(tmp_path):
    plan = small_plan(20, 4, goal=3, population=9)
    people = PEOPLE[:9]
    with create(tmp_path, plan, key=None, timer_hours=24.0) as server:
        for hour in range(2):
            one_round(server, people, now=float(hour))
        status = status_of(server)
        still = still_of(status)
        assert still is not None
        assert still.ends_by_waiting
        assert (still.round, still.rounds_left) == (3, 1)
        assert "ends by itself" in status.warnings[0].text
        one_round(server, people, now=2.0)
        with pytest.raises(TooFewClients):
            server.begin(people, now=23.0)
        one_round(server, people, now=24.0)


def test_an_unknown_population_is_said_to_be_unknown(tmp_path):
    """More clients were contacted than the plan knows: nobody knows how many there are."""
    plan = small_plan(20, 4, goal=3, population=12)
    with create(tmp_path, plan, key=None) as server:
        for number in range(4):
            one_round(server, PEOPLE[3 * number : 3 * number + 3])
        clients = status_of(server).private.clients
        assert clients is not None
        assert (clients.contacted, clients.never_contacted) == (12, 0)
        one_round(server, PEOPLE[12:15])
        clients = status_of(server).private.clients
        assert clients is not None
        assert clients.contacted == 15
        assert clients.rested == 6  # these are known: those of rounds 0 and 1
        assert clients.never_contacted is None
        assert clients.eligible is None
        assert clients.eligible_next == ()
        assert clients.stand_still is None
        assert (clients.available_at_begin, clients.eligible_at_begin) == (3, 3)


# --- Health --------------------------------------------------------------------------------------


def test_a_disk_that_is_too_small_warns(tmp_path):
    with create(tmp_path, key=None) as server:
        one_round(server)
        needed = status_of(server).private.disk.bytes_needed
        enough = status_of(server, free_bytes=needed)
        short = status_of(server, free_bytes=needed - 1)
    assert kinds(enough) == set()
    assert kinds(short) == {"disk"}
    assert short.private.disk.free_bytes == needed - 1
    grown = short.private.disk.bytes_per_round
    assert grown is not None
    assert grown >= server.folder.journal.stat().st_size
    # 19 rounds are to come.
    assert needed >= 19 * grown


def test_what_a_run_needs_is_what_it_then_takes(tmp_path):
    with create(tmp_path, key=None) as server:
        for _ in range(3):
            one_round(server)
        disk = status_of(server).private.disk
        while not server.ended():
            one_round(server)
        after = status_of(server).private.disk
    assert after.run_bytes - disk.run_bytes <= disk.bytes_needed


def test_files_that_others_can_read_warn(tmp_path):
    with create(tmp_path, key=None) as server:
        one_round(server)
    assert not kinds(status_of(server))
    server.folder.log.chmod(0o644)
    status = status_of(server)
    assert kinds(status) == {"permissions"}
    assert str(server.folder.log) in status.warnings[0].text
    server.folder.log.chmod(0o600)
    server.folder.private.chmod(0o755)
    assert kinds(status_of(server)) == {"permissions"}


def test_the_witness_is_compared_with_the_journal(tmp_path):
    with create(tmp_path, key=None) as server:
        one_round(server)
        witness = tmp_path / "state" / f"{server.run_id}.json"
        old = witness.read_bytes()
        one_round(server)
        new = witness.read_bytes()
    reader = StatusReader(server.folder.root, state_folder=tmp_path / "state")
    assert reader.read().private.witness.state == "in step"
    witness.write_bytes(old)
    status = reader.read()
    assert (status.private.witness.state, status.private.witness.lines_behind) == ("behind", 2)
    witness.write_bytes(new.replace(b'"lines":5', b'"lines":4'))
    assert reader.read().private.witness.state == "differs"
    witness.write_bytes(new.replace(server.run_id.encode(), b"0" * 32))
    assert reader.read().private.witness.state == "differs"
    witness.write_bytes(b"{")
    assert reader.read().private.witness.state == "differs"
    witness.unlink()
    status = reader.read()
    assert status.private.witness.state == "missing"
    assert kinds(status) == {"witness"}


def test_a_test_key_warns(tmp_path):
    with create(tmp_path) as server:
        assert kinds(status_of(server)) == {"test key"}
        assert status_of(server).public.test_key


# --- Damaged folders -----------------------------------------------------------------------------


def change_line(server: Server) -> None:
    lines = server.folder.journal.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"row":0', b'"row":1')
    server.folder.journal.write_bytes(b"".join(lines))


DAMAGE = {
    "a changed line": change_line,
    "no journal": lambda server: server.folder.journal.unlink(),
    "an empty journal": lambda server: server.folder.journal.write_bytes(b""),
    "no key": lambda server: server.folder.key.unlink(),
    "another key": lambda server: server.folder.key.write_bytes(bytes(32)),
    "a short key": lambda server: server.folder.key.write_bytes(b"x"),
    "no settings": lambda server: server.folder.settings.unlink(),
    "damaged settings": lambda server: server.folder.settings.write_bytes(b"{"),
    "changed plan": lambda server: server.folder.plan.write_bytes(
        server.folder.plan.read_bytes() + b" "
    ),
    "a link": lambda server: server.folder.journal.symlink_to(
        server.folder.journal.rename(server.folder.root / "elsewhere")
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_refused_with_one_clear_line(tmp_path, name):
    with create(tmp_path, key=None) as server:
        one_round(server)
        one_round(server)
    status_of(server)
    DAMAGE[name](server)
    with pytest.raises(InvalidInput) as refused:
        status_of(server)
    assert "\n" not in str(refused.value)
    assert str(server.folder.root) in str(refused.value)


def test_a_run_that_is_damaged_while_it_is_watched_is_refused(tmp_path):
    with create(tmp_path, key=None) as server:
        one_round(server)
        one_round(server)
    reader = StatusReader(server.folder.root, state_folder=tmp_path / "state")
    reader.read()
    change_line(server)
    with pytest.raises(UnsafeState, match="line 3 was changed"):
        reader.read()


# --- Centralized runs ----------------------------------------------------------------------------


@pytest.fixture
def place() -> Generator[Place]:
    with fast_places() as found:
        yield next(found)


def test_a_centralized_run_has_the_figures_that_it_can_have(place):
    with Trainer.create(place, insecure_test_key=None) as trainer:
        trainer.train(until=5)
        status = read_status(place.folder, state_folder=place.state)
        public = status.public
        assert (public.kind, public.unit) == ("centralized", "example")
        assert (public.rounds, public.rounds_planned, public.population) == (5, STEPS, 20)
        assert public.epsilon == trainer.run.epsilon
        assert public.epsilon_planned == trainer.run.plan.guarantee.epsilon
        assert public.ended is None
        assert (status.private.attempts, status.private.clients) == (None, None)
        assert status.private.process.pid == os.getpid()
        assert status.private.witness.state == "in step"
        assert not kinds(status)
        assert (
            read_status(place.folder, state_folder=place.state, free_bytes=10).warnings[0].kind
            == "disk"
        )
        trainer.train()
    status = read_status(place.folder, state_folder=place.state, now=4e9)
    assert status.public.ended == f"all {STEPS} steps are done"
    assert status.public.epsilon == status.public.epsilon_planned
    assert not kinds(status)


# --- The value -----------------------------------------------------------------------------------

KEYS = {
    "": "folder format private public time version warnings",
    "public": "clip_norm clip_norm_moves contacts_per_round delta drop_out_planned ended epsilon "
    "epsilon_budget epsilon_planned kind mechanism min_sep noise_multiplier population report_goal "
    "rounds rounds_planned rounds_within_budget run test_key timer_hours unit",
    "private": "attempts clients disk pace process witness",
    "private.attempts": "abandoned drop_out open recent recent_abandoned recent_contacts total "
    "unfit",
    "private.attempts.open": "attempt contacted seconds",
    "private.clients": "available_at_begin contacted eligible eligible_at_begin eligible_next "
    "never_contacted rested stand_still",
    "private.clients.stand_still": "eligible ends_by_waiting observed reason round rounds_left "
    "seconds_left",
    "private.disk": "bytes_needed bytes_per_round free_bytes problems run_bytes",
    "private.pace": "basis expected_end last_round seconds_per_round",
    "private.process": "last_change pid running",
    "private.witness": "folder lines_behind state",
    "warnings.0": "kind text",
}


def test_the_keys_of_the_json_are_these(tmp_path):
    people = PEOPLE[:12]
    with create(tmp_path, small_plan(population=12)) as server:
        server.abandon(server.begin(people), "too few")
        server.begin(people)
        status = status_of(server)
    content = json.loads(msgspec.json.encode(status))
    found = dict[str, str]()

    def visit(value, place):
        if isinstance(value, dict):
            found[place] = " ".join(sorted(value))
            for name, inner in value.items():
                visit(inner, f"{place}.{name}".strip("."))
        elif isinstance(value, list) and place == "warnings":
            visit(value[0], "warnings.0")

    visit(content, "")
    assert found == KEYS
    assert msgspec.json.decode(msgspec.json.encode(status), type=Status) == status


def test_a_resumed_run_goes_on_with_its_status(tmp_path):
    with create(tmp_path, key=None) as server:
        one_round(server)
        attempt = server.begin(PEOPLE)
        fill(attempt)
        server = reopen(server)
        assert status_of(server).private.process.pid == os.getpid()
        one_round(server)
        attempts = status_of(server).private.attempts
        assert attempts is not None
        assert (attempts.total, attempts.open) == (2, None)
        server.close()


def saving_snapshots(monkeypatch):
    """Let every round of a small run save a snapshot."""
    monkeypatch.setattr(run_store, "FEWEST_CONTACTS", 1)


def test_a_snapshot_changes_no_figure(tmp_path, monkeypatch):
    saving_snapshots(monkeypatch)
    with create(tmp_path, small_plan(rounds=9), key=None) as server:
        for _ in range(3):
            one_round(server)
        server.abandon(server.begin(PEOPLE), "too few")
        one_round(server)
        server.close_empty_round([], "nobody is online")
        server.begin(PEOPLE)
    figures = {"state_folder": tmp_path / "state", "now": 2e9, "free_bytes": 10**12}
    assert server.folder.snapshot.exists()
    with_snapshot = read_status(server.folder.root, **figures)
    size = server.folder.snapshot.stat().st_size
    server.folder.snapshot.unlink()
    without = read_status(server.folder.root, **figures)
    assert with_snapshot.public == without.public
    assert with_snapshot.private.attempts == without.private.attempts
    assert with_snapshot.private.clients == without.private.clients
    assert with_snapshot.private.witness == without.private.witness
    assert with_snapshot.private.disk.run_bytes == without.private.disk.run_bytes + size


def test_lines_before_a_snapshot_and_lines_read_before_start_no_timers(tmp_path, monkeypatch):
    """With millions of contacts, starting the timers again would take many seconds."""
    saving_snapshots(monkeypatch)
    with create(tmp_path, key=None) as server:
        for _ in range(4):
            one_round(server)
        marked, mark = list[int](), Timers.mark
        reader = StatusReader(server.folder.root, state_folder=tmp_path / "state")
        monkeypatch.setattr(
            Timers, "mark", lambda self, keys, row: (marked.append(row), mark(self, keys, row))[1]
        )
        reader.read()
        assert marked == []
        monkeypatch.setattr(run_store, "FEWEST_CONTACTS", 10**9)
        one_round(server)
        one_round(server)
        marked.clear()
        status = reader.read()
        assert marked == [4, 5]
        assert (status.public.rounds, status.private.attempts.total) == (6, 6)
        assert status.private.witness.state == "in step"


def test_a_newer_snapshot_than_the_journal_is_not_used(tmp_path, monkeypatch):
    saving_snapshots(monkeypatch)
    with create(tmp_path, key=None) as server:
        one_round(server)
        old = server.folder.journal.read_bytes()
        reader = StatusReader(server.folder.root, state_folder=tmp_path / "state")
        reader.read()
        one_round(server)
        assert reader.read().public.rounds == 2
    server.folder.journal.write_bytes(old)
    for one in (reader, StatusReader(server.folder.root, state_folder=tmp_path / "state")):
        status = one.read()
        assert (status.public.rounds, status.private.attempts.total) == (1, 1)
        assert status.private.witness.state == "differs"


def test_the_clip_norm_is_that_of_the_last_round(tmp_path):
    with create(tmp_path, key=None, clip_norm=0.25) as server:
        public = status_of(server).public
    assert (public.clip_norm, public.clip_norm_moves) == (0.25, False)
    with create(tmp_path / "adaptive", key=None, clip_norm="adaptive") as server:
        first = server.clip_norm
        assert status_of(server).public.clip_norm == first == 0.1
        one_round(server)
        second = server.clip_norm
        assert status_of(server).public.clip_norm == first
        one_round(server)
        public = status_of(server).public
    assert (public.clip_norm, public.clip_norm_moves) == (second, True)
    assert second != first
