"""Who is asked: never too early, never too often, and nobody more readily than another."""

import contextlib
import io
import random
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from small_runs import (
    PEOPLE,
    contacts,
    create,
    fill,
    least_gap,
    ledger,
    log,
    most_contacts,
    one_round,
    records,
    reopen,
    small_plan,
    written_ledger,
)

from dpftrl._internal.client_ids import canonical_id, why_unfit
from dpftrl.accounting.logs import Limits, observe
from dpftrl.cli.main import main
from dpftrl.errors import InvalidInput, RunOver, TooFewClients
from dpftrl.federated import Server
from dpftrl.federated.eligibility import Rules, Timers, choose
from dpftrl.federated.pseudonyms import Pseudonyms, written
from dpftrl.noise import NoiseKey
from dpftrl.participation import UNCAPPED
from dpftrl.verify import verify_run


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


# --- Rules and choice alone, for thousands of rounds ---------------------------------------------


def long_history(min_sep: int, cap: int, attempts: int) -> dict[int, list[int]]:
    """Contacts of each client where people come and go, and a third of the attempts fail."""
    dice = np.random.default_rng(min_sep * 100 + min(cap, 99))
    rules, timers = Rules(min_sep, cap, None), Timers()
    everybody = dice.integers(0, 2**64, 150, dtype=np.uint64)
    row, found = 0, {int(key): [] for key in everybody}
    for attempt in range(attempts):
        there = np.unique(dice.choice(everybody, dice.integers(1, 300)))
        eligible = there[rules.allowed(timers.seen(there), row, None)]
        assert np.array_equal(eligible, np.unique(eligible))
        assert np.isin(eligible, there).all()
        # Nobody is kept away without a reason either.
        assert set(eligible.tolist()) == {
            key
            for key in set(there.tolist())
            if len(found[key]) < cap and (not found[key] or row - found[key][-1] >= min_sep)
        }
        try:
            chosen = choose(eligible, size=5, seed=0, attempt=attempt)
        except TooFewClients:
            row += 1  # as if others had come
            continue
        assert len(chosen) == 5
        timers.mark(chosen, row)
        for key in chosen.tolist():
            found[key].append(row)
        row += int(dice.random() < 2 / 3)
    return found


@pytest.mark.parametrize(
    ("min_sep", "cap"), [(1, UNCAPPED), (2, UNCAPPED), (7, 60), (20, UNCAPPED), (20, 3), (50, 1)]
)
def test_no_contact_comes_too_early_or_too_often_in_thousands_of_attempts(min_sep, cap):
    found = long_history(min_sep, cap, 700)
    named = {str(key): rows for key, rows in found.items()}
    assert most_contacts(named) <= cap
    gap = least_gap(named)
    if cap == 1:
        assert gap is None
    else:
        # Exactly min-sep happens: the rule is not stricter than what was promised.
        assert gap == min_sep


def test_a_rule_that_is_off_by_one_would_be_seen():
    """The negative control of the test above."""
    assert least_gap({"a": [0, 7, 13]}) == 6
    found = long_history(6, UNCAPPED, 300)
    assert least_gap({str(key): rows for key, rows in found.items()}) == 6


def drawn(size: int, eligible: int, attempts: int) -> Counter[int]:
    keys = np.arange(eligible, dtype=np.uint64)
    times: Counter[int] = Counter()
    for attempt in range(attempts):
        chosen = choose(keys, size, seed=5, attempt=attempt)
        assert len(set(chosen.tolist())) == size
        times.update(chosen.tolist())
    return times


def how_even(times: Counter[int], size: int, eligible: int, attempts: int) -> float:
    """The p-value of a chi-square test; draws without replacement vary less, by a known factor."""
    expected = attempts * size / eligible
    statistic = sum((times[key] - expected) ** 2 for key in range(eligible)) / expected
    return float(stats.chi2.sf(statistic * (eligible - 1) / (eligible - size), eligible - 1))


def test_every_client_is_as_likely_as_any_other():
    attempts = 4_000
    times = drawn(7, 40, attempts)
    assert 1e-4 < how_even(times, 7, 40, attempts) < 1 - 1e-4
    # Had one client in eight been asked a seventh more often, it would show.
    for key in range(0, 40, 8):
        times[key] = round(times[key] * 1.15)
    assert how_even(times, 7, 40, attempts) < 1e-4


def test_pairs_of_clients_are_even_too():
    pairs: Counter[tuple[int, int]] = Counter()
    keys = np.arange(6, dtype=np.uint64)
    for attempt in range(3_000):
        first, second = choose(keys, 2, seed=1, attempt=attempt).tolist()
        pairs[first, second] += 1
    assert len(pairs) == 15
    assert stats.chisquare(list(pairs.values())).pvalue > 1e-4


def test_the_choice_depends_on_seed_and_attempt():
    keys = np.arange(1_000, dtype=np.uint64)
    chosen = [
        tuple(choose(keys, 10, seed=seed, attempt=attempt).tolist())
        for seed in (0, 1, 2**32, 2**63 - 1)
        for attempt in range(4)
    ]
    assert len(set(chosen)) == len(chosen)


def test_seeds_of_64_bits_are_told_apart():
    keys = np.arange(1_000, dtype=np.uint64)
    seeds = (2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1)
    chosen = {tuple(choose(keys, 10, seed=seed, attempt=0).tolist()) for seed in seeds}
    assert len(chosen) == len(seeds)


# --- The server: what its ledger says ------------------------------------------------------------


def hectic_run(place: Path, seed: int = 0, **more) -> Server:
    """People come and go, do not report, attempts are given up, and the server is restarted."""
    dice = random.Random(seed)
    plan = small_plan(40, 5, 6, goal=3, over_selection=1.5, population=60)
    server = create(place, plan, seed=seed, snapshot_every=9, **more)
    now = 0.0
    while not server.ended():
        people = dice.sample(PEOPLE, dice.randint(20, 60))
        people += dice.choices(people, k=10)
        now += dice.random()
        try:
            attempt = server.begin(people, now if "timer_hours" in more else None)
        except TooFewClients:
            now += 5.0
            continue
        assert set(attempt.clients) <= set(people)
        if dice.random() < 0.1:
            server = reopen(server)
            again = server.begin(PEOPLE, now if "timer_hours" in more else None)
            assert (again.clients, again.attempt) == (attempt.clients, attempt.attempt)
            attempt = again
        if dice.random() < 0.2:
            server.abandon(attempt, "nobody answers")
            continue
        for client in dice.sample(attempt.clients, len(attempt.clients)):
            if attempt.report(client, np.ones(5), attempt.attempt):
                break
        server.commit(attempt)
        if dice.random() < 0.1:
            server = reopen(server)
    return server


def exit_code(*arguments: object) -> int:
    """Of a command, in this process."""
    with (
        patch.object(sys, "argv", ["dpftrl", *map(str, arguments)]),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        pytest.raises(SystemExit) as stop,
    ):
        main()
    return int(stop.value.code or 0)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_hectic_run_keeps_to_min_sep_and_cap(tmp_path, seed):
    server = hectic_run(tmp_path, seed)
    found = contacts(server)
    assert least_gap(found) >= 5
    assert most_contacts(found) <= 6
    seen = observe(written_ledger(server), Limits(min_sep=5, max_participations=6))
    assert seen.broken_clients == 0
    assert seen.duplicate_rows == 0
    assert seen.contacted_min_sep == least_gap(found)
    assert seen.contacts == sum(map(len, found.values()))
    assert (seen.rounds, seen.empty_rounds) == (40, 0)
    # One more would have been too much to ask of it: the ledger's closest contacts are that close.
    closer = observe(written_ledger(server), Limits(min_sep=least_gap(found) + 1))
    assert closer.broken_clients > 0
    for limit, code in ((least_gap(found), 0), (least_gap(found) + 1, 1)):
        assert exit_code("observe", written_ledger(server), "--min-sep", limit) == code
    statuses = Counter(status for _, _, status in ledger(server))
    assert statuses["counted"] == 3 * 40
    assert statuses["contacted"] > 0
    assert statuses["abandoned"] > 0
    timers = server._store.eligibility.timers
    assert (timers.exposure.min_gap, timers.exposure.max_contacts) == (
        least_gap(found),
        most_contacts(found),
    )
    server.close()


def test_after_resuming_the_timers_are_what_the_ledger_says(tmp_path):
    server = hectic_run(tmp_path)
    before = server._store.eligibility.timers
    server = reopen(server)
    after = server._store.eligibility.timers
    keys = server._store.eligibility.pseudonyms.keys(PEOPLE)
    assert after.last(keys).tolist() == before.last(keys).tolist()
    assert after.contacts(keys).tolist() == before.contacts(keys).tolist()
    assert (after.exposure.min_gap, after.exposure.max_contacts) == (
        before.exposure.min_gap,
        before.exposure.max_contacts,
    )
    server.close()


@pytest.mark.parametrize("min_sep", [1, 2, 3])
def test_a_client_comes_back_after_min_sep_rounds_and_not_one_earlier(tmp_path, min_sep):
    plan = small_plan(3 * min_sep, min_sep, goal=1, population=min_sep)
    server = create(tmp_path, plan)
    names = [f"p{i}" for i in range(min_sep)]
    order = []
    for _ in range(3 * min_sep):
        one_round(server, names)
        order.append(ledger(server)[-1][1])
        with pytest.raises((TooFewClients, RunOver)):  # the last one cannot come at once
            server = _begin_only_the_last(server, names, order, min_sep)
    # As few people as can be: they have to take turns, exactly.
    assert order == order[:min_sep] * 3
    server.close()


def _begin_only_the_last(server: Server, names: list[str], order: list[str], min_sep: int):
    if min_sep == 1:
        raise TooFewClients("anybody may come in every round")
    keys = {
        written(key): name
        for name in names
        for key in [server._store.eligibility.pseudonyms.key(name)]
    }
    server.begin([keys[client] for client in order[-(min_sep - 1) :]])
    return server


def test_the_cap_ends_a_clients_turns(tmp_path):
    plan = small_plan(20, 1, 2, goal=1, population=60)
    server = create(tmp_path, plan)
    one_round(server, ["a"])
    one_round(server, ["a"])
    with pytest.raises(TooFewClients):
        server.begin(["a"])
    server = reopen(server)
    with pytest.raises(TooFewClients):
        server.begin(["a"])
    server.close()


def test_duplicates_and_the_order_of_the_available_change_nothing(tmp_path):
    chosen = []
    for i, people in enumerate(
        (PEOPLE, PEOPLE[::-1], PEOPLE * 3, sorted(PEOPLE * 2, key=lambda name: hash(name) % 7))
    ):
        with create(tmp_path / str(i)) as server:
            chosen.append(server.begin(people).clients)
    assert len(set(chosen)) == 1
    assert len(set(chosen[0])) == len(chosen[0]) == 3


def test_one_client_under_many_entries_does_not_make_a_cohort(tmp_path):
    with create(tmp_path) as server, pytest.raises(TooFewClients):
        server.begin(["a"] * 50 + ["b"] * 50)


def test_too_few_clients_means_that_nobody_was_contacted(tmp_path):
    server = create(tmp_path)
    before = server.folder.journal.read_bytes()
    with pytest.raises(TooFewClients):
        server.begin(["a", "b"])
    assert server.folder.journal.read_bytes() == before
    assert len(server.begin(["a", "b", "c"]).clients) == 3
    server.close()


def test_who_was_contacted_and_not_counted_has_had_the_turn(tmp_path):
    plan = small_plan(10, 3, goal=2, over_selection=2.0, population=60)
    server = create(tmp_path, plan)
    people = ["a", "b", "c", "d"]
    attempt = server.begin(people)
    fill(attempt)
    server.commit(attempt)
    assert Counter(status for _, _, status in ledger(server)) == {"counted": 2, "contacted": 2}
    with pytest.raises(TooFewClients):
        server.begin(people)
    server = reopen(server)
    with pytest.raises(TooFewClients):
        server.begin(people)
    server.close()


def test_an_abandoned_attempt_keeps_the_row_and_its_clients_wait(tmp_path):
    plan = small_plan(10, 3, goal=2, population=60)
    server = create(tmp_path, plan)
    first = server.begin(["a", "b"])
    first.report("a", np.ones(5), first.attempt)
    server.abandon(first, "too slow")
    assert (server.rounds, server.epsilon) == (0, 0.0)
    assert not server.model.any()
    with pytest.raises(TooFewClients):
        server.begin(["a", "b"])
    second = server.begin(["a", "b", "c", "d"])
    assert (second.attempt, second.number) == (1, 0)
    assert set(second.clients) == {"c", "d"}
    fill(second)
    server.commit(second)
    # From row 0 to row 2 is too soon, to row 3 is not.
    one_round(server, ["e", "f"])
    with pytest.raises(TooFewClients):
        server.begin(["a", "b", "c", "d"])
    one_round(server, ["g", "h"])
    assert set(server.begin(["a", "b"]).clients) == {"a", "b"}
    server.close()


def test_an_open_round_is_the_same_after_a_restart(tmp_path):
    plan = small_plan(20, 4, goal=3, over_selection=2.0)
    server = create(tmp_path, plan)
    asked = server.begin(PEOPLE)
    lines = len(records(server))
    server = reopen(server)
    # Two of the six are gone; others who are there now are not asked in their place.
    there = [*asked.clients[2:], *(name for name in PEOPLE if name not in asked.clients)]
    again = server.begin(there)
    assert again.clients == asked.clients[2:]
    assert (again.attempt, again.number) == (asked.attempt, asked.number)
    assert len(records(server)) == lines  # nothing was decided anew
    for client in again.clients[:3]:
        again.report(client, np.ones(5), again.attempt)
    server.commit(again)
    # Those who were gone had their turn all the same.
    assert {client for client, rows in contacts(server).items() if rows == [0]} == {
        written(server._store.eligibility.pseudonyms.key(name)) for name in asked.clients
    }
    server.close()


# --- Timers by time ------------------------------------------------------------------------------


def test_hours_are_kept_to_also_after_a_restart(tmp_path):
    plan = small_plan(30, 5, goal=1, population=60)
    server = create(tmp_path, plan, timer_hours=10.0)
    one_round(server, ["a"], now=100.0)
    for now in (100.0, 105.0, 109.999):
        with pytest.raises(TooFewClients):
            server.begin(["a"], now)
    server = reopen(server)
    with pytest.raises(TooFewClients):
        server.begin(["a"], 109.999)
    one_round(server, ["a"], now=110.0)  # a gap of one round, far below the plan's min-sep
    server = reopen(server)
    with pytest.raises(TooFewClients):
        server.begin(["a"], 119.0)
    server.close()


def test_a_row_that_took_two_attempts_makes_its_clients_wait_from_the_later(tmp_path):
    server = create(tmp_path, small_plan(30, 5, goal=1, population=60), timer_hours=10.0)
    server.abandon(server.begin(["a"], 0.0), "no answer")
    one_round(server, ["b"], now=5.0)
    for server_now in (10.0, 14.9):
        with pytest.raises(TooFewClients):
            server.begin(["a", "b"], server_now)
    assert set(server.begin(["a", "b"], 15.0).clients) <= {"a", "b"}
    server.close()


def test_nobody_comes_twice_for_one_row_however_long_it_takes(tmp_path):
    server = create(tmp_path, small_plan(30, 5, goal=1, population=60), timer_hours=1.0)
    server.abandon(server.begin(["a"], 0.0), "no answer")
    with pytest.raises(TooFewClients):
        server.begin(["a"], 1e6)
    server.close()


@pytest.mark.parametrize("now", [None, float("nan"), float("inf"), float("-inf")])
def test_timers_by_time_need_a_clock(tmp_path, now):
    with create(tmp_path, timer_hours=1.0) as server:
        before = server.folder.journal.read_bytes()
        with pytest.raises(InvalidInput, match=r"clock|hours"):
            server.begin(PEOPLE, now)
        assert server.folder.journal.read_bytes() == before
        assert server.begin(PEOPLE, 0.0).clients


@pytest.mark.parametrize("restart", [False, True])
def test_a_clock_that_jumps_ahead_and_is_set_back_does_not_block_a_run(tmp_path, restart):
    """It stands still once, and goes on from there: nobody returns early by the correct clock."""
    server = create(tmp_path, timer_hours=2.0)
    one_round(server, PEOPLE[:30], now=10.0)
    one_round(server, PEOPLE[:30], now=5_000.0)  # wrong
    before = {name for record in cohorts(server)[1:] for name in record}
    if restart:
        server = reopen(server)
    one_round(server, PEOPLE[:30], now=11.0)  # right again: 5,000 on the clock of the run
    assert server.clock == 5_000.0
    one_round(server, PEOPLE[:30], now=12.5)
    assert server.clock == 5_001.5
    after = [name for record in cohorts(server)[2:] for name in record]
    assert not before & set(after)  # two hours have not passed for them
    one_round(server, PEOPLE[:30], now=13.0)
    assert server.clock == 5_002.0
    times = [record["time"] for record in records(server) if record["kind"] == "cohort"]
    assert times == sorted(times)
    server.close()
    verdict = verify_run(tmp_path / "run", tmp_path / "state")
    assert all(check.outcome != "failed" for check in verdict.checks)


def cohorts(server: Server) -> list[list[str]]:
    """The pseudonyms of each cohort."""
    clients = [record["clients"] for record in records(server) if record["kind"] == "cohort"]
    return [[text[i : i + 16] for i in range(0, len(text), 16)] for text in clients]


def test_by_time_the_guarantee_is_what_was_observed(tmp_path):
    server = hectic_run(tmp_path, seed=3, timer_hours=2.0)
    found = contacts(server)
    gap, most = least_gap(found), most_contacts(found)
    assert 1 <= gap < 5  # below the plan's min-sep: that is not enforced here
    for one in (server, server := reopen(server)):
        promise = one.guarantee()
        run = promise.runs[0].participation
        assert (run.rounds, run.min_sep, run.max_participations) == (40, gap, most)
        assert promise.hypotheses[0].name == "participation"
        assert promise.hypotheses[0].basis == "observed"
    _check_hours(server, 2.0)
    server.close()


def _check_hours(server: Server, hours: float) -> None:
    """By the journal's times: no two contacts of one client are closer."""
    last: dict[str, float] = {}
    for record in records(server):
        if record["kind"] == "cohort":
            text = record["clients"]
            for client in (text[i : i + 16] for i in range(0, len(text), 16)):
                assert record["time"] - last.get(client, -np.inf) >= hours
                last[client] = record["time"]


def test_by_rounds_the_guarantee_is_enforced(tmp_path):
    with create(tmp_path) as server:
        one_round(server)
        named = {hypothesis.name: hypothesis for hypothesis in server.guarantee().hypotheses}
        assert named["participation"].basis == "enforced"
        assert named["clipping"].basis == "enforced"
        assert named["zero-out"].basis == "assumed"  # who is offered to it, the server cannot see
        assert named["identity"].basis == "assumed"
        assert "NOTHING IS PRIVATE" in named["secrecy"].text


# --- Names ---------------------------------------------------------------------------------------

STRANGE = (
    "a,b",
    'say "x"',
    '"',
    '""',
    "two words",
    "Two words",
    "a\u200db",
    "ünï — 漢字 🙂",
    "東京\u3000太郎",
    "x²",
    "x2",
    "c0123456789abcdef",
    "cffffffffffffffff",
    "0",
    "007",
    "00010",
    "-7",
    "1e5",
    "0e12",
    "0e13",
    "1.1",
    "1.10",
    "null",
    "NaN",
    "None",
    "#comment",
    "'; drop table",
    "round,client,status",
    "../../etc/passwd",
    "x" * 5_000,
)


@pytest.mark.parametrize("hashed", [True, False])
def test_strange_names_survive_a_restart(tmp_path, hashed):
    plan = small_plan(10, 8, goal=3, over_selection=1.5, population=60)
    server = create(tmp_path, plan, hash_clients=hashed)
    server.abandon(server.begin(STRANGE), "first")
    while True:
        try:
            one_round(server, STRANGE)
        except TooFewClients:
            break
    before, keys = (
        server._store.eligibility.timers,
        server._store.eligibility.pseudonyms.keys(STRANGE),
    )
    assert (before.last(keys) >= 0).sum() == len(before) > 20
    server = reopen(server)
    after = server._store.eligibility.timers
    assert after.last(keys).tolist() == before.last(keys).tolist()
    assert after.contacts(keys).tolist() == before.contacts(keys).tolist()
    with pytest.raises(TooFewClients):
        server.begin(STRANGE)
    found = contacts(server)
    if not hashed:
        assert set(found) <= set(STRANGE)
    seen = observe(written_ledger(server))
    assert seen.contacted_clients == len(found)
    assert seen.contacts == sum(map(len, found.values()))
    server.close()


names_of_any_kind = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
    .map(canonical_id)
    .filter(lambda name: why_unfit(name) is None),
    min_size=6,
    max_size=12,
    unique=True,
)


@given(names=names_of_any_kind)
@settings(max_examples=12)
def test_any_names_survive_a_restart(tmp_path_factory, names):
    plan = small_plan(10, 2, goal=2, over_selection=1.5, population=60)
    server = create(tmp_path_factory.mktemp("names"), plan, hash_clients=False)
    one_round(server, names)
    one_round(server, names)
    keys, before = (
        server._store.eligibility.pseudonyms.keys(names),
        server._store.eligibility.timers,
    )
    server = reopen(server)
    assert server._store.eligibility.timers.last(keys).tolist() == before.last(keys).tolist()
    found = contacts(server)
    assert set(found) <= set(names)
    assert observe(written_ledger(server)).contacted_clients == len(found)
    server.close()


UNCLEAR = {
    " a": "'a'",
    "a ": "'a'",
    "\t": "no visible character",
    "a\u00a0": "'a'",
    "a\u00a0b": "'a b'",
    "\ufeffa": "'a'",
    "a\u200bb": "'ab'",
    "\ufeff": "no visible character",
    "e\u0301": r"'\\xe9'",
    "+7": "'7'",
    "7.0": "'7'",
    "7e+0": "'7'",
    "-07": "'-7'",
    "7".zfill(65): "'7'",
    "1e+20": "2.53 or more",
    "two\nlines": "line break",
    "end\r": "line break",
    "a\0": "NUL",
}


@pytest.mark.parametrize(("name", "says"), UNCLEAR.items(), ids=map(ascii, UNCLEAR))
def test_a_name_that_could_be_another_is_refused(tmp_path, name, says):
    with create(tmp_path) as server:
        before = server.folder.journal.read_bytes()
        with pytest.raises(InvalidInput, match=f"client name .*{says}"):
            server.begin([*PEOPLE, name])
        assert server.folder.journal.read_bytes() == before
        assert server.begin(PEOPLE).clients


SPELLINGS = [("7", "007"), ("007", "7"), ("07", "007"), ("1e5", "100000"), ("0100000", "1E5")]


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_two_spellings_of_a_number_are_refused_in_one_call(tmp_path, one, other, hashed):
    with create(tmp_path, small_plan(goal=1), hash_clients=hashed) as server:
        before = server.folder.journal.read_bytes()
        with pytest.raises(InvalidInput, match="differ only in how they are written") as refusal:
            server.begin([one, other])
        assert repr(one) in str(refusal.value)
        assert repr(other) in str(refusal.value)
        assert server.folder.journal.read_bytes() == before
        assert server.begin([one]).clients == (one,)


@pytest.mark.parametrize("hashed", [True, False])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_two_spellings_of_a_number_are_refused_in_two_rounds(tmp_path, one, other, restart, hashed):
    server = create(tmp_path, small_plan(goal=1, min_sep=1), hash_clients=hashed)
    one_round(server, [one])
    if restart:
        server = reopen(server)
    one_round(server, ["another"])
    before = server.folder.journal.read_bytes()
    says = rf"{other!r} and {one!r}, who was contacted before, differ only in how they are written"
    with pytest.raises(InvalidInput, match=says):
        server.begin([other])
    assert server.folder.journal.read_bytes() == before
    one_round(server, [one])  # under its own name it may return
    server.close()


def test_names_that_were_available_only_are_not_bound_to_a_spelling(tmp_path):
    """Whoever was never contacted has no timer that could be lost."""
    with create(tmp_path, small_plan(goal=1, min_sep=1)) as server:
        first = server.begin(["7", "8"])
        fill(first)
        server.commit(first)
        (contacted,) = first.clients
        other = {"7": "8", "8": "7"}[contacted]
        one_round(server, [other.zfill(3)])
        with pytest.raises(InvalidInput, match="contacted before"):
            server.begin([contacted.zfill(3)])


FLEETS = {
    "padded": [f"{i:04}" for i in range(9_970, 10_030)],
    "several lengths": [f"{i:0{2 + i % 3}}" for i in range(60)],
    "node ids": [str(2**63 + 12_345 * i) for i in range(60)],
    "hexadecimal": [f"{i:x}" for i in range(0x1C0, 0x1FC)],
    "upper and lower case": [f"{c}{i}" for c in "aA" for i in range(30)],
    "spaces inside": [f"device {i:03}" for i in range(60)],
    "decomposable letters": [f"Gerät {i}" for i in range(60)],
}


@pytest.mark.parametrize("fleet", FLEETS.values(), ids=FLEETS.keys())
def test_an_honest_fleet_is_let_pass_in_all_rounds(tmp_path, fleet):
    server = create(tmp_path, hash_clients=False)
    while not server.ended():
        one_round(server, fleet)
        server = reopen(server)
    assert observe(written_ledger(server)).participations == 60
    server.close()


def test_an_unclear_name_is_refused_whenever_it_comes(tmp_path):
    with create(tmp_path, small_plan(goal=1, min_sep=1)) as server:
        for _ in range(3):
            with pytest.raises(InvalidInput, match="client name"):
                server.begin(["a", " b"])
            one_round(server, ["a"])


@pytest.mark.parametrize("name", [" a", "two\nlines", "7.0", "e\u0301"])
def test_a_name_of_an_older_run_stays_as_it_was(tmp_path, monkeypatch, name):
    """A client with a new name has no timer, so that the run must go on with the old one."""
    server = create(tmp_path, small_plan(goal=1, min_sep=2))
    with monkeypatch.context() as older:
        older.setattr("dpftrl.federated.eligibility.refuse_unclear", lambda *_: None)
        one_round(server, [name])
    server = reopen(server)
    one_round(server, ["another", name])
    one_round(server, [name])
    assert sorted(map(len, contacts(server).values())) == [1, 2]
    for unclear in ("b ", "7.00"):
        with pytest.raises(InvalidInput, match="client name"):
            server.begin([name, unclear])
    server.close()


def test_an_interrupted_round_of_an_older_run_goes_on(tmp_path, monkeypatch):
    server = create(tmp_path, small_plan(goal=2))
    with monkeypatch.context() as older:
        older.setattr("dpftrl.federated.eligibility.refuse_unclear", lambda *_: None)
        asked = server.begin([" a", "b"])
    server = reopen(server)
    again = server.begin([" a", "b", " c"])
    assert again.clients == asked.clients
    fill(again)
    server.commit(again)
    server.close()


def test_a_statement_refuses_a_ledger_with_two_spellings(tmp_path, monkeypatch):
    for second, code in (("8", 0), ("007", 2)):
        place = tmp_path / second
        server = create(place, small_plan(goal=1, min_sep=1), hash_clients=False)
        one_round(server, ["7"])
        with monkeypatch.context() as older:
            older.setattr("dpftrl.federated.eligibility.refuse_renamed", lambda *_: None)
            one_round(server, [second])
        server.close()
        run = server.folder.root
        command = ("statement", run / "plan.json", "--run", run, "--state-folder", place / "state")
        assert exit_code(*command) == code


def test_hashed_names_are_in_no_file(tmp_path):
    people = [f"Zaphod-{i}-Ω" for i in range(20)]
    server = create(tmp_path, small_plan(5, 2, goal=3, over_selection=1.5, population=60))
    attempt = server.begin(people)
    first, second, *_ = attempt.clients
    outsider = next(name for name in people if name not in attempt.clients)
    attempt.report(first, np.full(5, np.nan), attempt.attempt)
    for client, number in ((first, 0), (outsider, 0), ("a stranger, Zaphod", 0), (second, 7)):
        with pytest.raises(ValueError, match=r"attempt|cohort|already"):
            attempt.report(client, np.ones(5), number)
    server.abandon(attempt, "test")
    one_round(server, people)
    server = reopen(server)
    one_round(server, people)
    server.close()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 8
    for path in files:
        content = path.read_bytes()
        assert b"Zaphod" not in content, path
        assert "Ω".encode() not in content, path
        assert b"\\u03a9" not in content.lower(), path
    entries = log(server)
    assert [entry.get("client") for entry in entries[:5]] == [
        written(server._store.eligibility.pseudonyms.key(name)) if name else None
        for name in (first, first, None, None, second)
    ]


def test_pseudonyms_need_the_key():
    one, other = (Pseudonyms(NoiseKey.insecure_for_tests(seed)) for seed in (1, 2))
    assert one.key("ann") == one.key("ann")
    assert one.key("ann") != other.key("ann")
    assert one.key("ann") != one.key("Ann")
    assert written(one.key("ann")) not in repr(one)


@pytest.mark.parametrize("name", ["", None, 7, b"ann", ["ann"]])
def test_what_is_no_name_is_refused(tmp_path, name):
    with create(tmp_path) as server:
        before = server.folder.journal.read_bytes()
        with pytest.raises((InvalidInput, TypeError)):
            server.begin([*PEOPLE, name])
        assert server.folder.journal.read_bytes() == before
        assert server.begin(PEOPLE).clients


@pytest.mark.parametrize("hashed", [True, False])
def test_a_name_that_is_no_unicode_does_not_stop_a_run(tmp_path, hashed):
    """JSON can carry half a surrogate pair, so that a client can bring it along."""
    with create(tmp_path, hash_clients=hashed) as server:
        try:
            server.begin(["half \ud800", "b", "c"])
        except InvalidInput:
            assert server.begin(["a", "b", "c"]).clients
