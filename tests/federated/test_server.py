"""Using the server in ways it was not meant to be: refused in one line, and nothing lost."""

import datetime
import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from small_runs import (
    PEOPLE,
    SIZE,
    create,
    fill,
    ledger,
    log,
    one_round,
    records,
    reopen,
    small_plan,
)

from dpftrl import FixedEpochs, account, mechanism
from dpftrl.accounting import load_guarantee
from dpftrl.errors import (
    DpftrlError,
    InvalidInput,
    ReportRefused,
    TooFewClients,
    UnsafeState,
)
from dpftrl.federated import Adam, Server, Settings, Sgd
from dpftrl.federated.round import Reports
from dpftrl.federated.store.run_folder import Checkpoint
from dpftrl.noise import ExactSum, NoiseStream
from dpftrl.plan import Fleet, Plan


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


def update_of(client: str, row: int) -> np.ndarray:
    return np.cos(np.arange(SIZE) * len(client) + row)


def refused(error: type[DpftrlError], said: str = "."):
    return pytest.raises(error, match=rf"\A(?=.*{said})[^\n]+\Z")


# --- The order of things -------------------------------------------------------------------------


def test_a_round_is_begun_once(tmp_path):
    with create(tmp_path) as server:
        attempt = server.begin(PEOPLE)
        with refused(InvalidInput, "commit or abandon"):
            server.begin(PEOPLE)
        fill(attempt)
        assert server.commit(attempt).rounds == 1


def test_a_copy_by_fork_can_neither_go_on_nor_keep_the_run_from_others(tmp_path):
    """In a process of its own: this one has threads, which a fork would not take along."""
    program = Path(__file__).with_name("forked_run.py")
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, check=True)
    found = json.loads(done.stdout)
    for action in ("begin", "commit", "abandon"):
        assert "a copy, by fork" in found["copy"][action]
    assert found["copy"]["close"] == "done"  # its own end only
    assert "another object" in found["while it is open"]
    assert found["journal grew"] is False
    assert found["rounds"] == 1
    assert found["rounds after close"] == 1


def test_a_round_is_not_committed_too_early(tmp_path):
    with create(tmp_path) as server:
        attempt = server.begin(PEOPLE)
        for client in attempt.clients:
            with refused(InvalidInput, "too few"):
                server.commit(attempt)
            attempt.report(client, np.ones(SIZE), attempt.attempt)
        assert server.commit(attempt).rounds == 1


def test_a_round_that_is_over_is_over(tmp_path):
    with create(tmp_path, small_plan(over_selection=1.5)) as server:
        attempt = server.begin(PEOPLE)
        fill(attempt)
        model = server.commit(attempt).model["w"].copy()
        with refused(ReportRefused, "closed"):
            attempt.report(attempt.clients[-1], np.ones(SIZE), attempt.attempt)
        for again in (lambda: server.commit(attempt), lambda: server.abandon(attempt, "late")):
            with refused(InvalidInput, "not the round that is open"):
                again()
        assert np.array_equal(server.model, model)
        assert [record["kind"] for record in records(server)] == ["created", "cohort", "committed"]


def test_a_round_that_was_abandoned_releases_nothing(tmp_path):
    with create(tmp_path) as server:
        attempt = server.begin(PEOPLE)
        server.abandon(attempt, "too slow")
        for client in attempt.clients:
            try:
                attempt.report(client, np.ones(SIZE), attempt.attempt)
            except ReportRefused:
                continue
        for again in (lambda: server.commit(attempt), lambda: server.abandon(attempt, "late")):
            with refused(InvalidInput):
                again()
        assert server.rounds == 0
        assert {status for _, _, status in ledger(server)} == {"abandoned"}


def test_an_attempt_of_another_server_is_refused(tmp_path):
    with create(tmp_path / "a") as one, create(tmp_path / "b") as other:
        attempt = one.begin(PEOPLE)
        other.begin(PEOPLE)
        fill(attempt)
        with refused(InvalidInput, "not the round that is open"):
            other.commit(attempt)
        with refused(InvalidInput, "not the round that is open"):
            other.abandon(attempt, "wrong one")
        assert other.rounds == 0
        assert one.commit(attempt).rounds == 1


def test_an_attempt_from_before_a_restart_is_refused(tmp_path):
    closed = create(tmp_path)
    old = closed.begin(PEOPLE)
    fill(old, update_of)
    server = reopen(closed)
    server.begin(PEOPLE)
    with refused(InvalidInput, "not the round"):
        server.commit(old)
    with refused(UnsafeState, "closed"):
        closed.commit(old)
    server.close()


def test_a_closed_server_does_nothing_and_lets_go_of_the_run(tmp_path):
    server = create(tmp_path)
    one_round(server)
    attempt = server.begin(PEOPLE)
    fill(attempt)
    with refused(UnsafeState, "another object"):
        Server.resume(tmp_path / "run", state_folder=tmp_path / "state")
    server.close()
    server.close()
    for use in (
        lambda: server.begin(PEOPLE),
        lambda: server.commit(attempt),
        lambda: server.abandon(attempt, "late"),
    ):
        with refused(UnsafeState, "resume the run"):
            use()
    with Server.resume(tmp_path / "run", state_folder=tmp_path / "state") as again:
        assert again.rounds == 1
    with Server.resume(tmp_path / "run", state_folder=tmp_path / "state") as again:
        assert again.rounds == 1


def test_a_run_is_not_begun_over_another(tmp_path):
    create(tmp_path).close()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with refused(InvalidInput, "a run has begun"):
        create(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    reopen(Server.resume(tmp_path / "run", state_folder=tmp_path / "state")).close()


def test_the_model_cannot_be_written_to(tmp_path):
    with create(tmp_path) as server:
        released = one_round(server)
        for array in (server.model, server.arrays()["w"], released.model["w"]):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 7.0


def test_what_was_released_stays_as_it_was(tmp_path):
    with create(tmp_path) as server:
        first = one_round(server)
        before = first.model["w"].tobytes()
        one_round(server)
        assert first.model["w"].tobytes() == before
        assert first.rounds == 1


def test_nothing_is_guaranteed_before_anything_is_released(tmp_path):
    with create(tmp_path) as server, refused(InvalidInput, "nothing has been released"):
        server.guarantee()


def test_the_sum_waits_for_a_report_that_is_still_being_added(tmp_path, monkeypatch):
    """A thread that sees the report goal reached must not commit half of the last update."""
    with create(tmp_path, small_plan(goal=1)) as server:
        attempt = server.begin(PEOPLE)
        in_the_middle, go_on, read = threading.Event(), threading.Event(), threading.Event()
        add = ExactSum.add

        def slowly(self: ExactSum, update: np.ndarray) -> None:
            in_the_middle.set()
            go_on.wait(10)
            add(self, update)

        monkeypatch.setattr(ExactSum, "add", slowly)
        who, number = attempt.clients[0], attempt.attempt
        reporting = threading.Thread(target=attempt.report, args=(who, np.ones(SIZE), number))
        reading = threading.Thread(target=lambda: (attempt.reports.sum(), read.set()))
        reporting.start()
        in_the_middle.wait(10)
        was_enough = attempt.enough
        reading.start()
        too_early = was_enough and read.wait(0.1)
        go_on.set()
        reporting.join()
        reading.join()
        assert not too_early


# --- Failing in the middle -----------------------------------------------------------------------


def full_disk(*_: object, **__: object) -> None:
    raise InvalidInput("no space left")


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


RUN_STORE = "federated.store.run_store."
MIDDLES = [
    (NoiseStream, "add_to"),
    (Checkpoint, "save"),
    ("dpftrl.journal.Journal", "append"),
    ("dpftrl.journal.Witness", "remember"),
    ("dpftrl.federated.store.run_store", "save_guarantee"),
]


@pytest.mark.parametrize("failure", [full_disk, interrupted])
@pytest.mark.parametrize(("where", "what"), MIDDLES, ids=lambda value: str(value).split(".")[-1])
def test_a_commit_that_fails_in_the_middle_is_made_again_to_the_same_bits(
    tmp_path, where, what, failure
):
    whole = create(tmp_path / "whole", hash_clients=False)
    for _ in range(4):
        one_round(whole, PEOPLE, update_of)
    server = create(tmp_path / "broken", hash_clients=False)
    one_round(server, PEOPLE, update_of)
    attempt = server.begin(PEOPLE)
    fill(attempt, update_of)
    with pytest.MonkeyPatch.context() as patch:
        target = f"{where}.{what}" if isinstance(where, str) else (where, what)
        patch.setattr(*([target, failure] if isinstance(target, str) else [*target, failure]))
        with pytest.raises((InvalidInput, KeyboardInterrupt)):
            server.commit(attempt)
    for use in (
        lambda: server.commit(attempt),
        lambda: server.abandon(attempt, "x"),
        lambda: server.begin(PEOPLE),
    ):
        with refused(UnsafeState, "resume the run"):
            use()
    server = reopen(server)
    while server.rounds < 4:
        one_round(server, PEOPLE, update_of)
    assert server.model.tobytes() == whole.model.tobytes()
    assert ledger(server) == ledger(whole)
    assert server.epsilon == whole.epsilon
    assert load_guarantee(server.folder.guarantee) == whole.guarantee()
    server.close()
    whole.close()


def test_an_attempt_that_cannot_be_abandoned_is_still_open_after_a_restart(tmp_path):
    server = create(tmp_path)
    attempt = server.begin(PEOPLE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpftrl.journal.Journal.append", full_disk)
        with pytest.raises(InvalidInput):
            server.abandon(attempt, "too slow")
    with refused(UnsafeState):
        server.begin(PEOPLE)
    server = reopen(server)
    assert server.begin(PEOPLE).clients == attempt.clients
    assert ledger(server) == []
    server.close()


def test_a_cohort_that_cannot_be_journalled_is_not_handed_out(tmp_path):
    server = create(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpftrl.journal.Journal.append", full_disk)
        with pytest.raises(InvalidInput):
            server.begin(PEOPLE)
    with refused(UnsafeState):
        server.begin(PEOPLE)
    server = reopen(server)
    assert server.begin(PEOPLE).attempt == 0
    server.close()


def test_an_opening_that_fails_gives_the_lock_back(tmp_path):
    server = create(tmp_path)
    one_round(server)
    server.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dpftrl.federated.store.run_store.save_guarantee", full_disk)
        with refused(InvalidInput, "no space left"):
            reopen(server)
    server = reopen(server)
    one_round(server)
    server.close()


def test_a_beginning_that_fails_can_be_tried_again(tmp_path):
    for what in ("journal.Journal.append", "federated.store.run_folder.Checkpoint.save"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"dpftrl.{what}", full_disk)
            with refused(InvalidInput, "no space left"):
                create(tmp_path)
    with create(tmp_path) as server:
        assert one_round(server).rounds == 1


@pytest.mark.parametrize("what", ["noise.NoiseStream.save", RUN_STORE + "save_snapshot"])
def test_a_snapshot_that_fails_does_not_lose_the_round(tmp_path, what):
    with create(tmp_path, snapshot_every=1) as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(f"dpftrl.{RUN_STORE}FEWEST_CONTACTS", 1)
            patch.setattr(f"dpftrl.{what}", full_disk)
            try:
                one_round(server)
            except InvalidInput:
                assert server.rounds == 1
        assert one_round(server).rounds == 2


# --- What is told to the server ------------------------------------------------------------------

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "settings",
    [
        *({"clip_norm": value} for value in (0.0, -1.0, NAN, INF, 1e-200, 1e200, None, "1", True)),
        *({"budget": value} for value in (0.0, -1.0, NAN, INF, "4", True)),
        *({"timer_hours": value} for value in (0.0, -1.0, NAN, INF, "4", True)),
        *({"seed": value} for value in (-1, 1.5, 2**64, NAN, "1", None, True)),
        *({"snapshot_every": value} for value in (0, -1, 1.5, NAN, "1", None, True)),
        *({"hash_clients": value} for value in (1, 0, "no", None)),
        *({"optimizer": value} for value in (None, "sgd", Sgd(momentum="0.9"), Sgd(nesterov=1))),
        {"optimizer": Sgd(schedule=(1.0,) * 20)},
        {"optimizer": Sgd(learning_rate=None)},
        {"optimizer": Adam(tau="1")},
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused_before_anything_is_written(tmp_path, settings):
    with refused(InvalidInput):
        create(tmp_path, **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"clip_norm": 1, "budget": 30, "timer_hours": 3},
        {"seed": 2**64 - 1},
        {"clip_norm": 2.0**-370},
        {"clip_norm": 2.0**380},
        {"optimizer": Sgd(1, 0.9, True, "cooldown:last-half:0.5")},
        {"optimizer": Adam(1, 0, 0, 1)},
    ],
    ids=str,
)
def test_settings_that_make_sense_are_read_back(tmp_path, settings):
    server = create(tmp_path, **settings)
    now = 0.0 if "timer_hours" in settings else None
    one_round(server, now=now)
    server = reopen(server)
    told = server.settings
    assert told == Settings(**{"clip_norm": 1.0, **settings})
    one_round(server, now=now)
    server.close()


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5)])
def test_a_numpy_number_is_refused_or_read_back(tmp_path, number):
    try:
        server = create(tmp_path, clip_norm=number)
    except InvalidInput:
        assert not (tmp_path / "run").exists()
    else:
        reopen(server).close()


def test_more_than_the_population_allows_is_refused(tmp_path):
    # Each round asks 3 of 60, so that nobody can wait for more than 20 rounds.
    create(tmp_path / "20", small_plan(100, 20)).close()
    with refused(InvalidInput, "too few"):
        create(tmp_path / "21", small_plan(100, 21))
    # A run that is over before anybody would have to return is fine.
    create(tmp_path / "once", small_plan(20, 100)).close()
    with refused(InvalidInput, "too few"):
        create(tmp_path / "more", small_plan(21, 100))
    # By time, rounds are not what they wait for.
    create(tmp_path / "time", small_plan(100, 21), timer_hours=1.0).close()
    with refused(InvalidInput, "too few"):
        create(tmp_path / "over", small_plan(100, 20, over_selection=1.2))


def test_fixed_epochs_cannot_be_enforced(tmp_path):
    promise = account(mechanism("blt-b400"), FixedEpochs(20, 4), noise_multiplier=1.0, delta=1e-6)
    with refused(InvalidInput, "MinSep"):
        create(tmp_path, Plan(Fleet(population=60, report_goal=3), promise))


def test_a_grid_too_fine_for_the_report_goal_is_refused(tmp_path):
    """Else updates past what a sum holds would silently count as zeros."""
    plan = small_plan(4, 1, goal=20, noise_multiplier=1.5e-11)
    try:
        server = create(tmp_path, plan)
    except InvalidInput:
        return
    attempt = server.begin(PEOPLE)
    fill(attempt, lambda *_: np.ones(SIZE))
    server.close()
    assert attempt.reports.unfit == 0


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"w": np.zeros(0)},
        {"w": np.array([1.0, NAN])},
        {"w": np.array([1.0, INF])},
        {"w": np.array([1e300])},
        {"w": np.zeros(3, np.int64)},
        {"w": np.zeros(3, np.float16)},
        {"w": [0.0]},
        {0: np.zeros(3)},
    ],
    ids=str,
)
def test_models_that_cannot_be_trained_are_refused(tmp_path, model):
    with refused(InvalidInput):
        create(tmp_path, model=model)
    assert not (tmp_path / "run" / "private" / "journal.jsonl").exists()


STRANGE_TIMES = (
    *(datetime.datetime(2024, 1, 1), "12", True, 10**400, 10**30, NAN, INF),
    *(np.float64(3), np.float32(3), [1.0], np.array([1.0, 2.0])),
)


@pytest.mark.parametrize("hours", [None, 1.0])
@pytest.mark.parametrize("now", STRANGE_TIMES, ids=lambda now: f"{type(now).__name__}")
def test_a_strange_time_is_refused_or_read_back(tmp_path, now, hours):
    server = create(tmp_path, timer_hours=hours)
    try:
        attempt = server.begin(PEOPLE, now)
    except InvalidInput:
        attempt = server.begin(PEOPLE, 1.0)
    server = reopen(server)
    assert server.begin(PEOPLE, 1e31).clients == attempt.clients
    server.close()


@pytest.mark.parametrize("reason", [None, 5, ["x"], b"x", TimeoutError("x"), "ü\n\0"])
def test_a_strange_reason_is_refused_or_read_back(tmp_path, reason):
    server = create(tmp_path)
    attempt = server.begin(PEOPLE)
    try:
        server.abandon(attempt, reason)
    except DpftrlError:
        server = reopen(server)
        assert server.begin(PEOPLE).clients == attempt.clients
    else:
        server = reopen(server)
        assert json.loads(json.dumps(reason)) == records(server)[-1]["reason"]
    server.close()


def test_a_reason_that_is_no_unicode_is_refused_in_one_line(tmp_path):
    with create(tmp_path) as server:
        attempt = server.begin(PEOPLE)
        with refused(InvalidInput):
            server.abandon(attempt, "half \ud800")


def test_an_array_whose_name_is_no_unicode_is_refused_in_one_line(tmp_path):
    with refused(InvalidInput):
        create(tmp_path, model={"half \ud800": np.zeros(3)})


def test_an_over_selection_beyond_all_numbers_is_refused_in_one_line(tmp_path):
    with refused(InvalidInput):
        create(tmp_path, small_plan(over_selection=1e308))


def test_a_round_may_ask_everybody(tmp_path):
    plan = small_plan(1, 1, goal=100, over_selection=1.1, population=110)
    with create(tmp_path, plan) as server:
        assert len(server.begin([f"p{i}" for i in range(110)]).clients) == 110


def test_a_round_is_committed_once_whatever_the_threads(tmp_path):
    with create(tmp_path) as server:
        attempt = server.begin(PEOPLE)
        fill(attempt)
        ready, outcome = threading.Barrier(4), []

        def commit() -> None:
            ready.wait()
            try:
                outcome.append(server.commit(attempt).rounds)
            except InvalidInput:
                outcome.append(None)

        threads = [threading.Thread(target=commit) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcome, key=str) == [1, None, None, None]
        assert [record["kind"] for record in records(server)] == ["created", "cohort", "committed"]
        assert one_round(server).rounds == 2


@pytest.mark.parametrize("people", [[], (), iter(()), ["a"], "ab"])
def test_nobody_there_is_no_round(tmp_path, people):
    with create(tmp_path) as server, refused(TooFewClients):
        server.begin(people)


def test_secrets_do_not_show(tmp_path):
    with create(tmp_path) as server:
        attempt = server.begin(PEOPLE)
        fill(attempt)
        key = server.folder.key.read_bytes()
        shown = (
            f"{server!r}{attempt!r}{attempt.reports!r}{server._store._decisions.chain.journal!r}"
        )
        assert key.hex() not in shown
        assert PEOPLE[0] not in shown
        assert isinstance(attempt.reports, Reports)


# --- What the private log says about rounds ------------------------------------------------------


def test_the_private_log_says_when_a_round_ended_and_who_was_available(tmp_path):
    before = time.time()
    with create(tmp_path) as server:
        one_round(server)
        one_round(server, PEOPLE[:40])
        first, second = log(server)
        assert (first["available"], first["eligible"]) == (60, 60)
        assert second["available"] == 40
        assert 37 <= second["eligible"] <= 40  # the three of round 0 rest, if they are among them
        assert before <= first["time"] <= second["time"] <= time.time()
        server.begin(PEOPLE)
        again = reopen(server)
        one_round(again)  # with the cohort of the interrupted round, so nobody was chosen
        assert "eligible" not in log(again)[-1]
        again.close()


def test_too_few_clients_are_noted_once_per_minute(tmp_path, monkeypatch):
    with create(tmp_path) as server:
        for _ in range(5):
            with pytest.raises(TooFewClients):
                server.begin(PEOPLE[:2])
        (entry,) = log(server)
        assert entry["available"] == 2
        assert "2 clients may take part now" in entry["waiting"]
        monkeypatch.setattr("dpftrl.federated.server.WAITING_SECONDS", 0.0)
        with pytest.raises(TooFewClients):
            server.begin(PEOPLE[:1])
        assert log(server)[-1]["available"] == 1
