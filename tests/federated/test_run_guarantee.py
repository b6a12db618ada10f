"""The budget: a run ends before the round that would pass it, and says what it has spent."""

import pytest
from small_runs import (
    DELTA,
    PEOPLE,
    contacts,
    create,
    fill,
    least_gap,
    most_contacts,
    one_round,
    records,
    reopen,
    small_plan,
)

from dpftrl import MinSep, account
from dpftrl.accounting import load_guarantee
from dpftrl.errors import RunOver
from dpftrl.plan import Plan


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


def spent(plan: Plan, rounds: int) -> float:
    limits = MinSep(rounds, plan.participation.min_sep, plan.participation.max_participations)
    return account(plan.mechanism, limits, plan.noise_multiplier, DELTA).epsilon


@pytest.mark.parametrize(
    "name", ["blt-b400", "tree", "independent", "band-sqrt:4", "smooth-tree", "banded:4"]
)
def test_after_each_round_epsilon_is_that_of_so_many_rounds(tmp_path, name):
    plan = small_plan(9, 4, noise_multiplier=2.0, name=name)
    server = create(tmp_path, plan)
    for rounds in range(1, 10):
        released = one_round(server)
        expected = spent(plan, rounds)
        assert released.epsilon == server.epsilon == server.guarantee().epsilon == expected
        assert records(server)[-1]["epsilon"] == expected
        assert load_guarantee(server.folder.guarantee).epsilon == expected
        if rounds % 4 == 0:
            server = reopen(server)
            assert server.epsilon == expected
    assert server.epsilon == plan.guarantee.epsilon
    with pytest.raises(RunOver, match="all 9 rounds"):
        server.begin(PEOPLE)
    server.close()


@pytest.mark.parametrize("above", [0.0, 1e-9, 0.5])
def test_a_run_stops_before_the_round_that_would_pass_the_budget(tmp_path, above):
    plan = small_plan(20, 4, noise_multiplier=2.0)
    budget = spent(plan, 7) * (1 + above * 0.01)
    assert budget < spent(plan, 8)
    server = create(tmp_path, plan, budget=budget)
    for _ in range(7):
        assert server.ended() is None
        assert one_round(server).epsilon <= budget
    for _ in range(2):
        said = server.ended()
        assert said is not None
        assert "budget" in said
        before = server.folder.journal.read_bytes()
        with pytest.raises(RunOver, match="budget"):
            server.begin(PEOPLE)
        assert server.folder.journal.read_bytes() == before
        server = reopen(server)
    assert server.rounds == 7
    server.close()


def test_a_hair_less_and_the_round_is_not_made(tmp_path):
    plan = small_plan(20, 4, noise_multiplier=2.0)
    with create(tmp_path, plan, budget=spent(plan, 7) * (1 - 1e-12)) as server:
        for _ in range(6):
            one_round(server)
        with pytest.raises(RunOver):
            server.begin(PEOPLE)


def test_a_budget_for_no_round_at_all(tmp_path):
    plan = small_plan(noise_multiplier=1.0)
    with create(tmp_path, plan, budget=0.01) as server:
        assert server.ended()
        with pytest.raises(RunOver):
            server.begin(PEOPLE)
        assert len(records(server)) == 1


def test_attempts_that_fail_spend_nothing(tmp_path):
    plan = small_plan(20, 4, noise_multiplier=2.0)
    with create(tmp_path, plan, budget=spent(plan, 2)) as server:
        for _ in range(4):
            server.abandon(server.begin(PEOPLE), "no answer")
        assert server.epsilon == 0.0
        one_round(server)
        assert server.epsilon == spent(plan, 1)
        server.abandon(server.begin(PEOPLE), "no answer")
        one_round(server)
        assert server.ended()


def test_a_round_that_was_begun_within_the_budget_may_be_finished_after_a_restart(tmp_path):
    plan = small_plan(20, 4, noise_multiplier=2.0)
    server = create(tmp_path, plan, budget=spent(plan, 3))
    one_round(server)
    one_round(server)
    server.begin(PEOPLE)
    server = reopen(server)
    attempt = server.begin(PEOPLE)
    fill(attempt)
    assert server.commit(attempt).epsilon == spent(plan, 3)
    with pytest.raises(RunOver):
        server.begin(PEOPLE)
    server.close()


# --- By time, where the cohort decides -----------------------------------------------------------


def by_time(plan: Plan, rounds: int, found: dict[str, list[int]]) -> float:
    """What the ledger's contacts cost, whatever was planned."""
    limits = MinSep(rounds, least_gap(found) or rounds, max(1, most_contacts(found)))
    return account(plan.mechanism, limits, plan.noise_multiplier, DELTA).epsilon


def test_by_time_epsilon_is_what_the_ledger_costs(tmp_path):
    plan = small_plan(12, 6, 4, goal=2, noise_multiplier=2.0)
    server = create(tmp_path, plan, timer_hours=1.0)
    for row in range(12):
        # Few people and a clock that runs fast: some come back early.
        released = one_round(server, PEOPLE[: 6 + 3 * row], now=10.0 * row)
        found = contacts(server)
        assert released.epsilon == by_time(plan, row + 1, found)
        if row % 5 == 4:
            server = reopen(server)
            assert server.epsilon == server.guarantee().epsilon == released.epsilon
    assert least_gap(contacts(server)) < 6
    assert server.epsilon > plan.guarantee.epsilon  # the plan's min-sep was not kept
    server.close()


def test_by_time_the_cohort_decides_whether_the_budget_is_passed(tmp_path):
    """People who come back make the round dearer; others may still come."""
    plan = small_plan(10, 5, goal=2, noise_multiplier=2.0)
    first, others = ["a", "b"], ["c", "d"]
    fresh = {"a": [0], "b": [0], "c": [1], "d": [1]}
    again = {"a": [0, 1], "b": [0, 1]}
    dear, cheap = by_time(plan, 2, again), by_time(plan, 2, fresh)
    assert cheap < dear
    server = create(tmp_path, plan, timer_hours=1.0, budget=(cheap + dear) / 2)
    one_round(server, first, now=0.0)
    for _ in range(2):
        assert server.ended() is None  # that shows at `begin` alone
        with pytest.raises(RunOver, match="budget"):
            server.begin(first, 5.0)
        server = reopen(server)
    assert one_round(server, others, now=5.0).epsilon == cheap
    server.close()


def test_by_time_the_budget_is_never_passed(tmp_path):
    plan = small_plan(20, 4, goal=2, noise_multiplier=2.0)
    budget = spent(plan, 9)
    server = create(tmp_path, plan, timer_hours=2.0, budget=budget)
    now = 0.0
    for attempt in range(20):
        now += 1.0
        try:
            begun = server.begin(PEOPLE[:12], now)
        except RunOver:
            break
        if attempt % 5 == 2:
            server.abandon(begun, "no answer")
        else:
            fill(begun)
            assert server.commit(begun).epsilon <= budget
        if server.rounds:
            assert server.guarantee().epsilon <= budget
        if attempt % 3 == 0:
            server = reopen(server)
    else:
        pytest.fail("the budget was never spent")
    assert 0 < server.rounds < 20
    assert by_time(plan, server.rounds, contacts(server)) == server.guarantee().epsilon <= budget
    server.close()


def test_by_time_a_cap_holds_as_well(tmp_path):
    plan = small_plan(10, 5, 2, goal=1, noise_multiplier=2.0)
    with create(tmp_path, plan, timer_hours=1.0) as server:
        one_round(server, ["a"], now=0.0)
        one_round(server, ["a"], now=1.0)
        with pytest.raises(ValueError, match="may take part"):
            server.begin(["a"], 100.0)


def test_by_time_an_attempt_that_failed_does_not_make_files_disagree(tmp_path):
    plan = small_plan(20, 5, goal=2, noise_multiplier=2.0)
    server = create(tmp_path, plan, timer_hours=1.0)
    for row, people in enumerate((["a", "b"], ["c", "d"], ["e", "f"])):
        one_round(server, people, now=float(row))
    server.abandon(server.begin(["e", "f"], 5.0), "no answer")
    server = reopen(server)
    said, journalled = server.guarantee().epsilon, records(server)[-3]["epsilon"]
    server.close()
    assert load_guarantee(server.folder.guarantee).epsilon == said == server.epsilon == journalled


def test_resuming_leaves_a_guarantee_file_that_is_right(tmp_path):
    """Nothing has changed, so there is nothing to write and to flush to the disk."""
    server = create(tmp_path, small_plan(9, 4, noise_multiplier=2.0))
    one_round(server)
    before = server.folder.guarantee.stat()
    reopen(server).close()
    after = server.folder.guarantee.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("change", ["missing", "smaller epsilon", "truncated", "link"])
def test_resuming_replaces_a_guarantee_file_that_is_wrong(tmp_path, change):
    server = create(tmp_path, small_plan(9, 4, noise_multiplier=2.0))
    one_round(server)
    path = server.folder.guarantee
    right = path.read_bytes()
    if change == "missing":
        path.unlink()
    elif change == "smaller epsilon":
        path.write_bytes(right.replace(b'"epsilon": ', b'"epsilon": 0'))
    elif change == "truncated":
        path.write_bytes(right[:-1])
    else:  # a link to the same content, which somebody could change later
        path.rename(tmp_path / "elsewhere.json")
        path.symlink_to(tmp_path / "elsewhere.json")
    assert path.is_symlink() or not path.exists() or path.read_bytes() != right
    reopen(server).close()
    assert path.read_bytes() == right
    assert not path.is_symlink()
