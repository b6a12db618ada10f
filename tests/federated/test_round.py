"""What clients can send, and how little of it matters: a clipped share of the sum, or nothing."""

import contextlib
import sys
import threading
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import PEOPLE, SIZE, create, ledger, log, one_round, records, small_plan, sum_of

from dpftrl._internal.arrays import Layout
from dpftrl.errors import InvalidInput, ReportRefused
from dpftrl.federated.pseudonyms import written
from dpftrl.federated.round import Reports
from dpftrl.noise import Grid

CLIP = 0.7
HONEST = np.array([0.3, -0.2, 0.1, 0.0, 0.25])
LAYOUT = Layout(("a", "b"), ((2,), (3, 1)))


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


class Sub(np.ndarray):
    """A subclass with no idea of its own."""


def broadcast(value: float) -> np.ndarray:
    return np.broadcast_to(np.float64(value), (SIZE,))


def read_only(value: float) -> np.ndarray:
    array = np.full(SIZE, value)
    array.flags.writeable = False
    return array


def dict_of(value: float, dtype: type = np.float64, **more: object) -> dict[str, object]:
    return {"a": np.full(2, value, dtype), "b": np.full((3, 1), value, dtype), **more}


# What may be used: it is clipped.
USABLE = {
    "ones": np.ones(SIZE),
    "float32": np.ones(SIZE, np.float32),
    "short": np.full(SIZE, 1e-3),
    "1e38 in float32": np.full(SIZE, 1e38, np.float32),
    "1e150": np.full(SIZE, 1e150),
    "one huge": np.array([1e150, 1, 1, 1, 1]),
    "denormals": np.full(SIZE, 5e-324),
    "denormals in float32": np.full(SIZE, 1e-45, np.float32),
    "minus zero": np.full(SIZE, -0.0),
    "read-only": read_only(3.0),
    "every other": np.ones(2 * SIZE)[::2],
    "reversed": np.arange(SIZE, dtype=float)[::-1],
    "broadcast": broadcast(2.0),
    "a subclass": np.ones(SIZE).view(Sub),
    "masked": np.ma.masked_array(np.full(SIZE, 9.0), mask=[1, 0, 0, 0, 1]),
    "a dict": dict_of(5.0),
    "a dict of both kinds": {"a": np.ones(2, np.float32), "b": np.ones((3, 1))},
    "a dict, other order": {"b": np.ones((3, 1)), "a": np.ones(2)},
    "a dict in Fortran order": {"a": np.ones(2), "b": np.ones((3, 1), order="F")},
    "a dict of masked ones": {
        "a": np.ma.masked_array(np.ones(2), mask=[1, 0]),
        "b": np.ma.masked_array(np.ones((3, 1)), mask=True),
    },
}

# What may not: it counts as zeros.
UNFIT = {
    "NaN": np.full(SIZE, np.nan),
    "one NaN": np.array([1, 1, np.nan, 1, 1.0]),
    "infinity": np.full(SIZE, np.inf),
    "both infinities": np.array([np.inf, -np.inf, 0, 0, 0]),
    "1e300": np.full(SIZE, 1e300),
    "one 1e300": np.array([1e300, 0, 0, 0, 0]),
    "largest": np.full(SIZE, sys.float_info.max),
    "NaN in float32": np.full(SIZE, np.nan, np.float32),
    "too long": np.ones(SIZE + 1),
    "too short": np.ones(SIZE - 1),
    "empty": np.ones(0),
    "no dimension": np.array(1.0),
    "a column": np.ones((SIZE, 1)),
    "a row": np.ones((1, SIZE)),
    "a matrix": np.ones((1, SIZE)).view(np.matrix),
    "whole numbers": np.ones(SIZE, np.int64),
    "float16": np.ones(SIZE, np.float16),
    "long double": np.ones(SIZE, np.longdouble),
    "complex": np.ones(SIZE, complex),
    "booleans": np.ones(SIZE, bool),
    "bytes the other way round": np.ones(SIZE, ">f8" if sys.byteorder == "little" else "<f8"),
    "objects": np.array([1.0] * SIZE, object),
    "objects that are not numbers": np.array([None, "x", [], {}, 1], object),
    "texts": np.array(["1"] * SIZE),
    "dates": np.zeros(SIZE, "datetime64[s]"),
    "records": np.zeros(SIZE, [("x", float)]),
    "None": None,
    "a text": "1,1,1,1,1",
    "bytes": bytes(8 * SIZE),
    "a number": 1.0,
    "a list": [1.0] * SIZE,
    "a tuple of arrays": (np.ones(2), np.ones(3)),
    "a set": {1.0},
    "a function": len,
    "a dict of lists": {"a": [1, 1], "b": [[1], [1], [1]]},
    "a dict of dicts": {"a": {"a": np.ones(2)}, "b": {"b": np.ones((3, 1))}},
    "no names": {},
    "a name missing": {"a": np.ones(2)},
    "a name too many": dict_of(1.0, c=np.ones(1)),
    "another name": {"a": np.ones(2), "c": np.ones((3, 1))},
    "names that are not texts": {0: np.ones(2), 1: np.ones((3, 1))},
    "a dict of wrong shapes": {"a": np.ones(2), "b": np.ones(3)},
    "a dict of None": {"a": None, "b": None},
    "a dict of whole numbers": dict_of(1.0, int),
    "a dict with NaN": dict_of(float("nan")),
    "a dict with 1e300": dict_of(1e300),
    "a dict of objects": dict_of(1.0, object),
    "squares that overflow only together": {
        "a": np.full(2, 9e153),
        "b": np.full((3, 1), 7e153),
    },
    "a dict with an infinity": {"a": np.array([1, np.inf]), "b": np.ones((3, 1))},
}


def reports(goal: int = 3, clients: int = 4) -> Reports:
    grid = Grid.for_noise(1.0, CLIP)
    return Reports(frozenset(range(clients)), goal, LAYOUT, grid)


def steps(taken: Reports) -> list[int]:
    return [int(step) for step in taken._sum.steps]


def squared_share(before: list[int], after: list[int]) -> Fraction:
    """The squared norm of what one report changed, exactly."""
    step = Fraction(Grid.for_noise(1.0, CLIP).step)
    return sum((b - a) ** 2 for a, b in zip(before, after, strict=True)) * step**2


@pytest.mark.parametrize("kind", USABLE)
def test_what_can_be_used_adds_no_more_than_the_clip_norm(kind):
    taken = reports()
    assert taken.take(0, HONEST) is None
    before = steps(taken)
    assert taken.take(1, USABLE[kind]) is None
    assert squared_share(before, steps(taken)) <= Fraction(CLIP) ** 2
    assert (taken.counted, taken.unfit) == ({0, 1}, 0)


@pytest.mark.parametrize("kind", UNFIT)
def test_what_is_unfit_counts_as_zeros(kind):
    taken = reports()
    taken.take(0, HONEST)
    before = steps(taken)
    why = taken.take(1, UNFIT[kind])
    assert isinstance(why, str)
    assert why
    assert steps(taken) == before
    assert (taken.counted, taken.unfit, taken.enough) == ({0, 1}, 1, False)
    taken.take(2, UNFIT[kind])
    assert taken.enough


def test_the_exact_share_would_show_one_step_too_many():
    """The negative control: at the clip norm there is no room for a coordinate more."""
    taken = reports()
    before = steps(taken)
    taken.take(0, np.array([10.0, 0, 0, 0, 0]))
    after = steps(taken)
    assert squared_share(before, after) <= Fraction(CLIP) ** 2
    after[0] += 2
    assert squared_share(before, after) > Fraction(CLIP) ** 2


def test_an_update_is_not_changed():
    update = np.full(SIZE, 3.0)
    reports().take(0, update)
    assert (update == 3.0).all()


@given(
    update=st.lists(
        st.floats(width=64) | st.sampled_from([0.7, 0.35, 1e154, 1e-162, 2.0**-24]),
        min_size=SIZE,
        max_size=SIZE,
    )
)
@settings(max_examples=200)
def test_whatever_floats_come_the_share_is_at_most_the_clip_norm(update):
    taken = reports()
    taken.take(0, HONEST)
    before = steps(taken)
    taken.take(1, np.array(update))
    assert squared_share(before, steps(taken)) <= Fraction(CLIP) ** 2
    assert len(taken.counted) == 2


@pytest.mark.parametrize("small", [1e-8, 0.99e-8, 1.05e-8, 2.0**-27, 3e-9])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_squares_that_get_lost_in_a_sum_do_not_make_room_for_more(small, dtype):
    """Next to a large square small ones vanish, thousands of them; the slack covers that."""
    size = 20_000
    update = np.full(size, small * CLIP, dtype)
    update[::1_000] = CLIP / 4
    update[0] = CLIP
    taken = Reports(frozenset([0]), 1, Layout(("w",), ((size,),)), Grid.for_noise(1e-6, CLIP))
    taken.take(0, update)
    squared = sum(step**2 for step in steps(taken)) * Fraction(Grid.for_noise(1e-6, CLIP).step) ** 2
    assert Fraction(CLIP) ** 2 * (1 - Fraction(1, 10**6)) < squared <= Fraction(CLIP) ** 2


@given(kinds=st.permutations(["ones", "1e38 in float32", "NaN", "None", "a dict", "1e300"]))
def test_the_sum_does_not_depend_on_the_order(kinds):
    one, other = reports(6, 6), reports(6, 6)
    for client, kind in enumerate(sorted(kinds)):
        one.take(client, {**USABLE, **UNFIT}[kind])
    for client, kind in enumerate(kinds):
        other.take(client, {**USABLE, **UNFIT}[kind])
    assert steps(one) == steps(other)
    assert one.unfit == other.unfit == 3


def test_a_round_closes_by_the_number_of_reports_alone(tmp_path):
    closing = []
    for place, kinds in enumerate(
        (["NaN"] * 3, ["ones"] * 3, ["None", "1e300", "ones"], ["a dict of dicts", "short", "NaN"])
    ):
        with create(tmp_path / str(place), small_plan(goal=3, over_selection=2.0)) as server:
            attempt = server.begin(PEOPLE)
            said = [
                attempt.report(client, {**USABLE, **UNFIT}[kind], attempt.attempt)
                for client, kind in zip(attempt.clients, kinds, strict=False)
            ]
            assert server.commit(attempt).rounds == 1
            statuses = [record["kind"] for record in records(server)]
            public = (repr(ledger(server)), server.folder.guarantee.read_bytes())
            closing.append((said, statuses, public))
    assert all(one == closing[0] for one in closing)
    assert closing[0][0] == [False, False, True]


# --- What is refused -----------------------------------------------------------------------------


def check_nothing_happened(server, attempt, before, client: str, update, number) -> None:
    with pytest.raises(ReportRefused) as refused:
        attempt.report(client, update, number)
    assert "\n" not in str(refused.value)
    assert sum_of(server, attempt) == before
    assert len(attempt.reports.counted) == 1


REFUSED_NUMBERS = (
    *(1, -1, 2**64, 10**4000, -(10**30), True, False, 0.5, float("nan"), float("inf")),
    *("0", "", None, b"0", [0], (0,), {}, "x" * 100_000, object(), 0j + 1),
)


@pytest.mark.parametrize("number", REFUSED_NUMBERS, ids=lambda value: f"{type(value).__name__}")
def test_a_report_for_another_attempt_counts_nothing(tmp_path, number):
    with create(tmp_path) as server:
        attempt = server.begin(PEOPLE)
        attempt.report(attempt.clients[0], HONEST, attempt.attempt)
        before = sum_of(server, attempt)
        check_nothing_happened(server, attempt, before, attempt.clients[1], HONEST, number)
        assert "refused" in log(server)[-1]
        assert len(server.folder.log.read_bytes()) < 1_000


@pytest.mark.parametrize("number", [10**5_000, np.array([0, 1])], ids=["huge", "array"])
def test_a_report_whose_attempt_cannot_be_compared_or_shown_counts_nothing(tmp_path, number):
    with create(tmp_path) as server:
        attempt = server.begin(PEOPLE)
        attempt.report(attempt.clients[0], HONEST, attempt.attempt)
        before = sum_of(server, attempt)
        check_nothing_happened(server, attempt, before, attempt.clients[1], HONEST, number)


@pytest.mark.parametrize("number", [0.0, np.int64(0)], ids=["float", "numpy"])
def test_a_number_that_is_nearly_this_attempts_does_no_harm(tmp_path, number):
    """Carriers of messages may turn whole numbers into others: taken or refused, once at most."""
    with create(tmp_path) as server:
        attempt = server.begin(PEOPLE)
        for _ in range(2):
            try:
                attempt.report(attempt.clients[0], HONEST, number)
            except ReportRefused:
                continue
        assert len(attempt.reports.counted) <= 1


def test_who_may_not_report_counts_nothing(tmp_path):
    with create(tmp_path, small_plan(goal=3, over_selection=1.5)) as server:
        attempt = server.begin(PEOPLE)
        first = attempt.clients[0]
        attempt.report(first, HONEST, attempt.attempt)
        before = sum_of(server, attempt)
        outsider = next(name for name in PEOPLE if name not in attempt.clients)
        pseudonym = written(server._store.eligibility.pseudonyms.key(attempt.clients[1]))
        for client in (first, outsider, "", "nobody", pseudonym, attempt.clients[1] + " ", None, 7):
            check_nothing_happened(server, attempt, before, client, HONEST, attempt.attempt)
        # The second report of a client counts nothing whatever the first one was.
        attempt.report(attempt.clients[1], UNFIT["NaN"], attempt.attempt)
        with pytest.raises(ReportRefused, match="already"):
            attempt.report(attempt.clients[1], HONEST, attempt.attempt)
        assert sum_of(server, attempt) == before
        # After the goal nobody counts, though they were asked.
        assert attempt.report(attempt.clients[2], HONEST, attempt.attempt)
        before = sum_of(server, attempt)
        with pytest.raises(ReportRefused, match="closed"):
            attempt.report(attempt.clients[3], HONEST, attempt.attempt)
        assert sum_of(server, attempt) == before
        server.commit(attempt)
        assert records(server)[-1]["reports"] == 3


@pytest.mark.parametrize("client", [["person 1"], {}, np.zeros(2)], ids=["list", "dict", "array"])
def test_a_name_that_is_none_counts_nothing(tmp_path, client):
    with create(tmp_path) as server:
        attempt = server.begin(PEOPLE)
        attempt.report(attempt.clients[0], HONEST, attempt.attempt)
        before = sum_of(server, attempt)
        check_nothing_happened(server, attempt, before, client, HONEST, attempt.attempt)


def test_a_late_report_for_an_abandoned_attempt_is_refused(tmp_path):
    with create(tmp_path) as server:
        late = server.begin(PEOPLE)
        server.abandon(late, "too slow")
        attempt = server.begin(PEOPLE)
        for client in (late.clients[0], attempt.clients[0]):
            with pytest.raises(ReportRefused, match="attempt 1"):
                attempt.report(client, HONEST, late.attempt)
        with pytest.raises(ReportRefused, match="cohort"):
            attempt.report(late.clients[0], HONEST, attempt.attempt)


def test_what_was_wrong_is_in_the_private_log_alone(tmp_path):
    with create(tmp_path) as server:
        one_round(server)
        quiet = {path.name for path in server.folder.root.iterdir()}
        attempt = server.begin(PEOPLE)
        for client in attempt.clients:
            attempt.report(client, UNFIT["NaN"], attempt.attempt)
        with pytest.raises(ReportRefused):
            attempt.report("nobody", HONEST, attempt.attempt)
        server.commit(attempt)
        said = [entry for entry in log(server) if "client" in entry]
        assert [entry["client"] for entry in said] == [
            *(
                written(server._store.eligibility.pseudonyms.key(client))
                for client in attempt.clients
            ),
            None,
        ]
        assert server.folder.log.stat().st_mode & 0o777 == 0o600
        assert {path.name for path in server.folder.root.iterdir()} == quiet
        assert not any("unfit" in record for record in records(server))


def test_a_log_that_cannot_be_written_stops_no_round(tmp_path):
    with create(tmp_path) as server:
        server.folder.log.mkdir()
        released = one_round(server, update=lambda *_: None)
        assert released.rounds == 1


# --- Several threads -----------------------------------------------------------------------------


def test_a_client_that_reports_from_several_threads_counts_once():
    """Engines that speak to clients at the same time may hand over what they say as it comes."""
    size = 1_000_000
    layout = Layout(("w",), ((size,),))
    taken = Reports(frozenset(range(10)), 10, layout, Grid.for_noise(1.0, CLIP))
    update, outcome, ready = np.ones(size), [], threading.Barrier(4)

    def report() -> None:
        ready.wait()
        try:
            taken.take(0, update)
            outcome.append("taken")
        except ReportRefused:
            outcome.append("refused")

    threads = [threading.Thread(target=report) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcome) == ["refused"] * 3 + ["taken"]
    norm = np.linalg.norm(Grid.for_noise(1.0, CLIP).values(taken._sum.steps))
    assert norm <= CLIP * (1 + 1e-9)


def test_a_report_that_fails_in_a_new_way_still_counts(monkeypatch):
    """Out of memory, say: whether a report counts must not depend on what is in it."""
    taken = reports()

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("dpftrl.noise.ExactSum.add", full)
    with contextlib.suppress(MemoryError):
        taken.take(0, HONEST)
    assert taken.counted == {0}


def test_reports_from_many_threads_are_all_in_the_sum():
    size, clients = 200_000, 8
    layout, grid = Layout(("w",), ((size,),)), Grid.for_noise(1.0, CLIP)
    one, many = (Reports(frozenset(range(clients)), clients, layout, grid) for _ in range(2))
    updates = [np.full(size, 1e-4 * (client + 1)) for client in range(clients)]
    for client, update in enumerate(updates):
        one.take(client, update)
    threads = [
        threading.Thread(target=many.take, args=(client, update))
        for client, update in enumerate(updates)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(one._sum.steps, many._sum.steps)
    assert one.counted == many.counted


def test_the_report_goal_is_never_passed_whatever_the_threads():
    size, clients, goal = 100_000, 12, 3
    grid = Grid.for_noise(1.0, CLIP)
    taken = Reports(frozenset(range(clients)), goal, Layout(("w",), ((size,),)), grid)
    outcome: list[str] = []
    ready = threading.Barrier(clients)

    def report(client: int) -> None:
        ready.wait()
        try:
            taken.take(client, np.ones(size))
            outcome.append("taken")
        except ReportRefused:
            outcome.append("refused")

    threads = [threading.Thread(target=report, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcome.count("taken") == len(taken.counted) == goal


@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=10),
    kinds=st.lists(st.sampled_from(["ones", "float32", "NaN", "a dict", "None"]), min_size=10),
)
@settings(max_examples=25, deadline=None)
def test_reports_from_any_number_of_threads_give_the_same_sum(owners, kinds):
    everything = {**USABLE, **UNFIT}
    clients = len(owners)
    one, many = (reports(clients, clients) for _ in range(2))
    for client in range(clients):
        one.take(client, everything[kinds[client]])

    def report(me: int) -> None:
        for client, owner in enumerate(owners):
            if owner == me:
                many.take(client, everything[kinds[client]])

    threads = [threading.Thread(target=report, args=(me,)) for me in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(one.sum().steps, many.sum().steps)
    assert (one.counted, one.unfit) == (many.counted, many.unfit)


class InterruptedAgain:
    """A condition at which a second Ctrl-C arrives."""

    def __enter__(self):
        raise KeyboardInterrupt

    def __exit__(self, *_: object):
        raise AssertionError


def test_the_sum_is_refused_after_a_thread_that_ended_within_a_report(monkeypatch):
    """Whether its update is in the sum is not known: the round must be abandoned."""
    taken = reports(goal=2)
    taken.take(0, HONEST)
    changed = taken._changed

    def interrupted(*_: object) -> None:
        taken._changed = InterruptedAgain()
        raise KeyboardInterrupt

    def report() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            taken.take(1, HONEST)

    monkeypatch.setattr("dpftrl.noise.ExactSum.add", interrupted)
    reporting = threading.Thread(target=report)
    reporting.start()
    reporting.join()
    taken._changed = changed
    assert taken.enough
    with pytest.raises(InvalidInput, match="thread ended while it added a report"):
        taken.sum()


@pytest.mark.parametrize("order", ["C", "F"])
def test_every_number_goes_where_the_layout_has_it(order):
    layout, grid = Layout(("a", "b"), ((2, 3), (2,))), Grid(2.0**-20, 2.0)
    update = {"b": np.array([0.1, -0.2]), "a": np.arange(6.0).reshape(2, 3) / 10}
    taken = Reports(frozenset({0}), 1, layout, grid)
    given = {name: np.array(array, order=order) for name, array in update.items()}
    assert taken.take(0, given) is None
    assert np.allclose(grid.values(taken._sum.steps), layout.flat(update), rtol=0, atol=2**-19)
