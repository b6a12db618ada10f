"""Rounds that are closed as rounds in which nobody took part."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from small_runs import PEOPLE, create, fill, ledger, one_round, records, reopen, small_plan

from dpftrl.errors import InvalidInput, RunOver, UnsafeState
from dpftrl.federated import Adam, Server, Sgd
from dpftrl.federated.eligibility import Shortage
from dpftrl.federated.store.journal import (
    Abandoned,
    Cohort,
    Committed,
    Created,
    Empty,
    RunState,
    packed,
    packed_as_digits,
    packed_mask,
)
from dpftrl.federated.store.run_store import RunStore
from dpftrl.statement.from_files import statement_of_files
from dpftrl.verify import journal as verified
from dpftrl.verify import verify_run

TOO_FEW = PEOPLE[:2]


def ones(_client: str, _row: int) -> np.ndarray:
    return np.ones(5)


def close(server: Server, available: Any = TOO_FEW, **options: Any) -> Any:
    return server.close_empty_round(available, "nobody is left", **options)


def check(server: Server) -> Any:
    """Verify the run; return the verdict."""
    server.close()
    root = server.folder.root
    verdict = verify_run(root, root.parent / "state")
    assert verdict.passed, verdict.checks
    return verdict


@pytest.mark.parametrize("optimizer", [Sgd(momentum=0.9), Adam()])
@pytest.mark.parametrize("name", ["blt-b400", "tree", "banded:3"])
def test_an_empty_round_is_a_round_of_zeros(tmp_path: Path, name: str, optimizer: Any) -> None:
    """The oracle is a run in which everybody reports zeros in that round: the same bits."""
    models = []
    for is_empty in (True, False):
        plan = small_plan(rounds=6, name=name)
        with create(tmp_path / str(is_empty), plan, optimizer=optimizer) as server:
            one_round(server, update=ones)
            released = close(server) if is_empty else one_round(server)
            assert released.rounds == server.rounds == 2
            models.append([released.model["w"], one_round(server, update=ones).model["w"]])
            assert 0 < released.epsilon <= server.epsilon
            check(server)
    assert np.array_equal(*models)
    assert not np.array_equal(*models[0]), "the noise of the round is applied to the model"


def test_an_empty_round_is_journalled_and_contacts_nobody(tmp_path: Path) -> None:
    with create(tmp_path) as server:
        one_round(server)
        attempt = server.begin(PEOPLE)
        server.abandon(attempt, "too few reports")
        rows = ledger(server)
        close(server)
        assert ledger(server) == rows
        assert [one["kind"] for one in records(server)] == [
            *("created", "cohort", "committed", "cohort", "abandoned", "empty", "committed")
        ]
        *_, empty, committed = records(server)
        assert empty == {"kind": "empty", "attempt": 2, "row": 1, "reason": "nobody is left"}
        assert (committed["attempt"], committed["row"], committed["reports"]) == (2, 1, 0)
        after = server.begin(PEOPLE)
        assert (after.number, after.attempt) == (2, 3)
        verdict = check(server)
    assert (verdict.rounds, verdict.empty_rounds) == (2, 1)


def test_a_run_with_empty_rounds_resumes_to_the_same_bits(tmp_path: Path) -> None:
    with create(tmp_path, snapshot_every=2) as server:
        for number in range(5):
            one_round(server, update=ones) if number % 2 else close(server)
        model = server.model.copy()
        with reopen(server) as again:
            assert np.array_equal(model, again.model)
            assert again.rounds == 5
            one_round(again, update=ones)
            check(again)


def test_min_sep_counts_empty_rounds(tmp_path: Path) -> None:
    people, plan = PEOPLE[:3], small_plan(min_sep=3, population=9)
    with create(tmp_path, plan) as server:
        one_round(server, people)
        for row in (1, 2):
            shortage = server.shortage(people)
            assert shortage == Shortage(row, 3, 3, 0, 3 - row, 6)
            assert shortage.is_standstill
            assert not shortage.is_permanent
            close(server, people)
        assert server.shortage(people) is None
        assert one_round(server, people).rounds == 4
        check(server)


def test_a_standstill_of_the_whole_population_is_permanent(tmp_path: Path) -> None:
    people = PEOPLE[:7]
    with create(tmp_path, small_plan(min_sep=2, population=7)) as server:
        for _ in range(2):
            server.abandon(server.begin(people), "too few reports")
        shortage = server.shortage(people)
        assert shortage == Shortage(0, 3, 7, 1, 2, 1)
        assert shortage.is_permanent
        assert "close 2 round(s)" in str(shortage)
        more = [*people, *PEOPLE[7:9]]
        assert server.shortage(more) is None, "registering clients ends it"


def test_absent_or_capped_clients_are_no_standstill(tmp_path: Path) -> None:
    with create(tmp_path, small_plan(min_sep=1, cap=1)) as server:
        one_round(server, PEOPLE[:3])
        for people in (PEOPLE[:3], PEOPLE[3:5], []):
            shortage = server.shortage(people)
            assert shortage is not None
            assert shortage.rows is None, "no later round would help"
            assert "wait for more clients, or until" in str(shortage)


def test_hours_that_must_pass_are_no_standstill(tmp_path: Path) -> None:
    people = PEOPLE[:3]
    with create(tmp_path, small_plan(min_sep=1), timer_hours=5.0) as server:
        one_round(server, people, now=0.0)
        shortage = server.shortage(people, 1.0)
        assert shortage is not None
        assert shortage.rows == 0
        server.abandon(server.begin(people, 6.0), "too few reports")
        shortage = server.shortage(people, 12.0)
        assert shortage is not None
        assert shortage.rows == 1, "contacted for this very round"
        close(server, people, now=12.0)
        one_round(server, people, now=13.0)
        check(server)


def test_a_round_in_which_somebody_may_take_part_is_not_closed(tmp_path: Path) -> None:
    with create(tmp_path) as server:
        with pytest.raises(InvalidInput, match="begin a round instead"):
            close(server, PEOPLE[:3])
        attempt = server.begin(PEOPLE)
        with pytest.raises(InvalidInput, match="has not ended"):
            close(server)
        with reopen(server) as again:
            with pytest.raises(InvalidInput, match="has not ended"):
                close(again)
            attempt = again.begin(PEOPLE)
            attempt.report(attempt.clients[0], np.ones(5), attempt.attempt)
            again.abandon(attempt, "too few reports")
            with pytest.raises(InvalidInput, match="the reason is a text"):
                again.close_empty_round([], None)  # pyright: ignore[reportArgumentType]
            assert close(again).rounds == 1


def test_a_round_that_had_its_reports_is_never_closed_as_empty(tmp_path: Path) -> None:
    """Somebody may have looked at the updates before abandoning it."""
    with create(tmp_path) as server:
        attempt = server.begin(PEOPLE)
        fill(attempt)
        server.abandon(attempt, "I do not like these updates")
        with pytest.raises(InvalidInput, match="had all its reports"):
            close(server)
        with reopen(server) as again:
            again.abandon(again.begin(PEOPLE), "too few reports")
            with pytest.raises(InvalidInput, match="had all its reports"):
                close(again)
            one_round(again)
            close(again)  # the next row is another matter
            check(again)


def test_empty_rounds_use_up_rounds_and_budget(tmp_path: Path) -> None:
    with create(tmp_path / "rounds", small_plan(rounds=2)) as server:
        close(server, [])
        close(server, [])
        with pytest.raises(RunOver, match="all 2 rounds"):
            close(server, [])
        check(server)
    plan = small_plan(rounds=20, min_sep=1)
    with create(tmp_path / "budget", plan, budget=plan.guarantee.epsilon / 2) as server:
        while server.ended() is None:
            close(server, [])
        with pytest.raises(RunOver, match="budget"):
            close(server, [])
        assert 0 < server.rounds < 20
        assert server.epsilon <= plan.guarantee.epsilon / 2


def test_nobody_is_contacted_for_a_row_that_was_decided_to_be_empty(tmp_path: Path) -> None:
    """The process died between the decision and the release; the row stays closed."""
    with create(tmp_path) as server:
        server._store.close_empty("nobody is left")
    root, state = server.folder.root, tmp_path / "state"
    assert verify_run(root, state).passed
    store = RunStore.resume(server.folder, state, False)
    chosen = store.eligibility.choose(store.eligibility.population(PEOPLE), 0, 1, None)
    with pytest.raises(UnsafeState, match="makes no sense"):
        store.contact(chosen)
    store.close()
    with Server.resume(root, state_folder=state) as again:
        assert again.rounds == 1
        assert again.begin(PEOPLE).number == 1
        check(again)


CREATED = Created("0" * 32, "0" * 64, "0" * 64, "0" * 16, "0" * 64)
HEADER = len("round,client,status\n")


class Records:
    """Records of one row, as a journal of version 1 or 2 has them."""

    def __init__(self, version: int):
        self.created = msgspec.structs.replace(CREATED, version=version)
        self._has_ledger = version == 1
        keys = np.array([1, 2], np.uint64)
        if self._has_ledger:
            self.cohort = Cohort(0, 0, packed_as_digits(keys))
        else:
            self.cohort = Cohort(0, 0, packed(keys), size=2)

    def committed(self, attempt: int, reports: int, ledger_bytes: int = HEADER) -> Committed:
        counted = packed_mask(np.ones(reports, np.bool_))
        return Committed(
            attempt=attempt,
            row=0,
            reports=reports,
            digest=msgspec.Raw(json.dumps("0" * 32).encode()),
            checkpoint_sha256="0" * 64,
            epsilon=1.0,
            **(self._ledger(ledger_bytes) if self._has_ledger else {"counted": counted}),
        )

    def abandoned(self, goal_reached: bool) -> Abandoned:
        ledger = self._ledger(100) if self._has_ledger else {}
        return Abandoned(0, 0, "too few", goal_reached=goal_reached, **ledger)

    def _ledger(self, length: int) -> dict[str, Any]:
        return {"ledger_bytes": length, "ledger_sha256": "0" * 64}

    def histories(self) -> list[tuple[list[Any], bool]]:
        """Sequences of records, and whether a journal may have them."""
        cohort, committed, abandoned = self.cohort, self.committed, self.abandoned
        return [
            ([Empty(0, 0, "nobody"), committed(0, 0)], True),
            ([cohort, abandoned(False), Empty(1, 0, "nobody"), committed(1, 0, 100)], True),
            ([cohort, abandoned(True), Empty(1, 0, "nobody")], False),
            ([cohort, Empty(1, 0, "nobody")], False),
            ([Empty(0, 0, "nobody"), committed(0, 2)], False),
            ([Empty(0, 0, "nobody"), abandoned(False)], False),
            ([Empty(0, 0, "nobody"), cohort], False),
            ([Empty(0, 1, "nobody")], False),
            ([Empty(1, 0, "nobody")], False),
        ]


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("number", range(9))
def test_which_records_may_follow(version: int, number: int) -> None:
    """The server and `verify`, which share no code, agree."""
    some = Records(version)
    history, is_fine = some.histories()[number]

    def server_accepts() -> bool:
        state = RunState()
        try:
            for record in (some.created, *history):
                state.follow(record)
        except UnsafeState:
            return False
        return True

    def verify_accepts() -> bool:
        state = verified._History()
        try:
            for record in (some.created, *history):
                line = msgspec.json.encode(record)
                state.append(verified.RECORD_DECODER.decode(line))
        except InvalidInput:
            return False
        return True

    assert server_accepts() == verify_accepts() == is_fine


def test_verify_refuses_an_empty_round_with_rows_in_the_ledger() -> None:
    some, state = Records(1), verified._History()
    for record in (some.created, Empty(0, 0, "nobody")):
        state.append(verified.RECORD_DECODER.decode(msgspec.json.encode(record)))
    with pytest.raises(InvalidInput, match="ledger"):
        state.append(verified.RECORD_DECODER.decode(msgspec.json.encode(some.committed(0, 0, 99))))


def test_the_statement_says_that_rounds_were_empty(tmp_path: Path) -> None:
    with create(tmp_path, small_plan(rounds=4)) as server:
        one_round(server)
        one_round(server)
        close(server)
    root = server.folder.root
    text = statement_of_files(root / "plan.json", root, state_folder=tmp_path / "state").markdown()
    assert "In 1 of the 3 rounds nobody took part" in " ".join(text.split())
