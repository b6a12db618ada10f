"""Partial sums: however a cohort is split between aggregators, the model has the same bits."""

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from aggregator_process import update_of
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import PEOPLE, SIZE, create, log, one_round, reopen, small_plan

from dpftrl.accounting import load_guarantee
from dpftrl.errors import InvalidInput, ReportRefused
from dpftrl.federated import Aggregator, Assignment, PartialSum, Round, Server
from dpftrl.statement.from_files import statement_of_files
from dpftrl.verify import verify_run

PROCESS = Path(__file__).parent / "aggregator_process.py"
GOAL = 4


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


def run_with_aggregators(place: Path, goal: int = GOAL, **more: float) -> Server:
    return create(place, small_plan(goal=goal, **more), aggregators=True)


def aggregated(current: Round, clients: Sequence[str]) -> PartialSum:
    """The partial sum of these clients, over the encodings that a network would carry."""
    aggregator = Aggregator.of(current.share(clients).encoded())
    for client in clients:
        aggregator.report(client, update_of(client, current.number), current.attempt)
    return PartialSum.decoded(aggregator.partial_sum().encoded())


def partitions(items: tuple[str, ...]) -> Iterator[list[tuple[str, ...]]]:
    """All ways to split items into groups."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = tuple(item for item in rest if item not in others)
            yield from ([(first, *others), *groups] for groups in partitions(left))


def plain_model(place: Path, goal: int = GOAL) -> bytes:
    """The model of the same round without aggregators."""
    with create(place, small_plan(goal=goal)) as server:
        return one_round(server, PEOPLE, update_of).model["w"].tobytes()


def test_every_split_of_a_cohort_gives_the_same_model(tmp_path):
    expected = plain_model(tmp_path / "plain")
    with run_with_aggregators(tmp_path / "look") as server:
        cohort = server.begin(PEOPLE).clients
    splits = list(partitions(cohort))
    assert len(splits) == 15
    for number, split in enumerate(splits):
        with run_with_aggregators(tmp_path / str(number)) as server:
            current = server.begin(PEOPLE)
            assert current.clients == cohort
            said = [current.report_partial(aggregated(current, group)) for group in split]
            assert said == [False] * (len(split) - 1) + [True]
            assert server.commit(current).model["w"].tobytes() == expected
        with run_with_aggregators(tmp_path / f"{number} and reports") as server:
            current = server.begin(PEOPLE)
            for client in split[0]:  # some report to the server itself
                current.report(client, update_of(client, 0), current.attempt)
            for group in reversed(split[1:]):
                current.report_partial(aggregated(current, group))
            assert server.commit(current).model["w"].tobytes() == expected


def test_a_lost_update_gives_another_model(tmp_path):
    """The control: an update that an aggregator counts and does not add."""
    with run_with_aggregators(tmp_path / "lost") as server:
        current = server.begin(PEOPLE)
        aggregator = Aggregator(current.share(current.clients))
        for client in current.clients[1:]:
            aggregator.report(client, update_of(client, 0), current.attempt)
        aggregator.report(current.clients[0], None, current.attempt)  # counts as zeros
        current.report_partial(aggregator.partial_sum())
        lost = server.commit(current).model["w"].tobytes()
    assert lost != plain_model(tmp_path / "plain")


@given(
    owners=st.lists(st.integers(0, 3), min_size=GOAL, max_size=GOAL),
    kinds=st.lists(
        st.sampled_from(["normal", "huge", "NaN", "None"]), min_size=GOAL, max_size=GOAL
    ),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=25, deadline=None)
def test_any_split_gives_the_same_sum_as_one_plain_loop(tmp_path_factory, owners, kinds, seed):
    random = np.random.default_rng(seed)
    updates = {
        "normal": random.normal(size=SIZE),
        "huge": random.normal(size=SIZE) * 1e30,
        "NaN": np.full(SIZE, np.nan),
        "None": None,
    }
    with run_with_aggregators(tmp_path_factory.mktemp("split")) as server:
        current = server.begin(PEOPLE)
        names = current.clients
        for client, kind in zip(names, kinds, strict=True):
            current.report(client, updates[kind], current.attempt)
        expected, unfit = current.reports.sum().steps.copy(), current.reports.unfit
        server.abandon(current, "only its sum was wanted")
        again = server.begin(PEOPLE)
        kind_of = dict(zip(again.clients, kinds, strict=True))
        for owner in dict.fromkeys(owners):
            mine = [name for name, one in zip(again.clients, owners, strict=True) if one == owner]
            aggregator = Aggregator(again.share(mine))
            threads = [
                threading.Thread(
                    target=aggregator.report, args=(name, updates[kind_of[name]], again.attempt)
                )
                for name in mine
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            again.report_partial(aggregator.partial_sum())
        assert np.array_equal(again.reports.sum().steps, expected)
        assert again.reports.unfit == unfit


# --- What the server refuses ---------------------------------------------------------------------


def changed(partial: PartialSum, **fields: object) -> PartialSum:
    return msgspec.structs.replace(partial, **fields)


def steps_of(*values: int) -> memoryview:
    return memoryview(np.array(values, "<i8").tobytes())


def most_steps(current: Round) -> int:
    """The clip norm, in steps."""
    return int(current.reports.grid.clip_norm / current.reports.grid.step)


REFUSED = {
    "another run": (lambda p, _: changed(p, run="0" * 32), "another"),
    "another attempt": (lambda p, _: changed(p, attempt=1), "another"),
    "a client twice": (lambda p, _: changed(p, clients=(*p.clients, p.clients[0])), "twice"),
    "an outsider": (lambda p, _: changed(p, clients=(*p.clients, "nobody")), "outside"),
    "a counted client": (
        lambda p, current: changed(p, clients=(p.clients[0], current.clients[0])),
        "already reported",
    ),
    "more clients than are needed": (
        lambda p, current: changed(p, clients=current.clients[1:]),
        "needs 3 more reports, and these are 4",
    ),
    "an unfit stranger": (lambda p, current: changed(p, unfit=(current.clients[3],)), "unfit"),
    "too few coordinates": (lambda p, _: changed(p, steps=p.steps[:-8]), "5 coordinates"),
    "too many coordinates": (
        lambda p, _: changed(p, steps=memoryview(bytes(p.steps) + bytes(8))),
        "5 coordinates",
    ),
    "half a number": (lambda p, _: changed(p, steps=p.steps[:-4]), "8 bytes"),
    "an update too many in the sum": (
        lambda p, current: changed(p, steps=steps_of(3 * most_steps(current), 0, 0, 0, 0)),
        "norm is too large for a sum of 2",
    ),
    "a norm that is slightly too large": (
        lambda p, current: changed(
            p, steps=steps_of(int(2 * most_steps(current) * (1 + 1e-7)), 0, 0, 0, 0)
        ),
        "norm is too large",
    ),
    "the largest whole numbers": (
        lambda p, _: changed(p, steps=steps_of(*[2**63 - 1] * SIZE)),
        "norm is too large",
    ),
    "the smallest whole numbers": (
        lambda p, _: changed(p, steps=steps_of(*[-(2**63)] * SIZE)),
        "norm is too large",
    ),
    "clients without a sum": (
        lambda p, _: changed(p, clients=(), steps=steps_of(1, 0, 0, 0, 0)),
        "norm is too large for a sum of 0",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_partial_sum_that_cannot_be_right_counts_nothing(tmp_path, kind):
    change, match = REFUSED[kind]
    with run_with_aggregators(tmp_path, over_selection=1.25) as server:
        current = server.begin(PEOPLE)
        first, *clients = current.clients
        current.report(first, update_of(first, 0), current.attempt)
        before = current.reports._sum.steps.tolist()
        partial = aggregated(current, clients[:2])
        with pytest.raises(ReportRefused, match=match):
            current.report_partial(change(partial, current))
        assert current.reports._sum.steps.tolist() == before
        assert len(current.reports.counted) == 1
        assert match.split()[0] in log(server)[-1]["refused"]
        # What was refused does not stand in the way of the right sum.
        current.report_partial(partial)
        assert len(current.reports.counted) == 3
        assert not current.enough


def test_a_sum_at_the_largest_norm_is_taken(tmp_path):
    with run_with_aggregators(tmp_path) as server:
        current = server.begin(PEOPLE)
        partial = aggregated(current, current.clients)
        largest = steps_of(GOAL * most_steps(current), 0, 0, 0, 0)
        assert current.report_partial(changed(partial, steps=largest))


def test_a_partial_sum_that_is_sent_again_is_added_once(tmp_path):
    with run_with_aggregators(tmp_path) as server:
        current = server.begin(PEOPLE)
        partial = aggregated(current, current.clients[:2])
        assert not current.report_partial(partial)
        once = current.reports._sum.steps.tolist()
        threads = [
            threading.Thread(target=current.report_partial, args=(partial,)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert current.reports._sum.steps.tolist() == once
        other = changed(partial, clients=current.clients[2:])
        with pytest.raises(ReportRefused, match="another partial sum of this assignment"):
            current.report_partial(other)
        rest = aggregated(current, current.clients[2:])
        assert current.report_partial(rest)
        assert current.report_partial(partial), "also after the goal was reached"
        server.commit(current)


def test_of_two_sums_that_count_the_same_client_the_second_is_refused(tmp_path):
    """As when the clients of an aggregator that seemed lost were assigned again."""
    with run_with_aggregators(tmp_path) as server:
        current = server.begin(PEOPLE)
        slow, fast = (aggregated(current, current.clients[:2]) for _ in range(2))
        current.report_partial(fast)
        before = current.reports._sum.steps.tolist()
        with pytest.raises(ReportRefused, match="already reported"):
            current.report_partial(slow)
        with pytest.raises(ReportRefused, match="already reported"):
            current.report(current.clients[1], update_of(current.clients[1], 0), current.attempt)
        assert current.reports._sum.steps.tolist() == before


def test_a_run_that_was_created_without_aggregators_refuses_them(tmp_path):
    with run_with_aggregators(tmp_path / "with") as server:
        current = server.begin(PEOPLE)
        partial = aggregated(current, current.clients)
    with create(tmp_path / "without", small_plan(goal=GOAL)) as server:
        current = server.begin(PEOPLE)
        for refuse in (
            lambda: current.share(current.clients),
            lambda: current.report_partial(partial),
        ):
            with pytest.raises(InvalidInput, match=r"Settings\(aggregators=True\)"):
                refuse()
        assert not current.reports.counted


# --- The aggregator ------------------------------------------------------------------------------


def test_an_aggregator_refuses_what_a_round_refuses(tmp_path):
    with run_with_aggregators(tmp_path) as server:
        current = server.begin(PEOPLE)
        first, second, third, _ = current.clients
        aggregator = Aggregator(current.share([first, second, third], goal=2))
        update, attempt = update_of(first, 0), current.attempt
        assert not aggregator.report(first, update, attempt)
        for client, number, match in (
            (first, attempt, "already reported"),
            (second, attempt + 1, "for another"),
            (second, True, "for another"),
            ("nobody", attempt, "not in the assignment"),
            (None, attempt, "not in the assignment"),
        ):
            with pytest.raises(ReportRefused, match=match):
                aggregator.report(client, update, number)
        assert aggregator.report(second, None, attempt)
        with pytest.raises(ReportRefused, match="goal was reached"):
            aggregator.report(third, update, attempt)
        partial = aggregator.partial_sum()
        assert (partial.clients, partial.unfit) == ((first, second), (second,))
        assert bytes(aggregator.partial_sum().steps) == bytes(partial.steps)
        current.report_partial(partial)
        assert log(server)[-1]["unfit"]
        assert current.reports.unfit == 1


def test_an_aggregator_that_has_handed_in_its_sum_takes_no_further_report(tmp_path):
    with run_with_aggregators(tmp_path) as server:
        current = server.begin(PEOPLE)
        aggregator = Aggregator(current.share(current.clients))
        empty = aggregator.partial_sum()
        with pytest.raises(ReportRefused, match="handed in"):
            aggregator.report(current.clients[0], update_of(current.clients[0], 0), current.attempt)
        assert empty.clients == ()
        assert not any(empty.steps)
        assert not current.report_partial(empty)


def test_a_share_names_clients_of_the_cohort_once(tmp_path):
    with run_with_aggregators(tmp_path) as server:
        current = server.begin(PEOPLE)
        first = current.clients[0]
        for wrong in ([first, first], ["nobody"], [first, "nobody"]):
            with pytest.raises(InvalidInput, match="each once"):
                current.share(wrong)
        with pytest.raises(InvalidInput, match="goal"):
            current.share([first], goal=-1)
        assignment = current.share([first], goal=7)
        assert assignment.goal == 1
        with pytest.raises(InvalidInput, match="each client once"):
            Aggregator(msgspec.structs.replace(assignment, clients=(first, first)))


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"format": "dpftrl run"}', bytes(100)])
def test_data_that_is_no_message_is_refused(data):
    for kind in (Assignment, PartialSum):
        with pytest.raises(InvalidInput, match="this is not"):
            kind.decoded(data)


def test_a_partial_sum_in_memory_that_others_can_change_is_copied(tmp_path):
    with run_with_aggregators(tmp_path) as server:
        current = server.begin(PEOPLE)
        data = bytearray(aggregated(current, current.clients).encoded())
        partial = PartialSum.decoded(data)
        before = bytes(partial.steps)
        data[:] = bytes(len(data))
        assert bytes(partial.steps) == before
        assert any(before)


# --- Processes -----------------------------------------------------------------------------------


def start_process(row: int, *more: str) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    command = [sys.executable, str(PROCESS), str(row), *more]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe)


def test_an_aggregator_that_is_killed_costs_its_share_only(tmp_path):
    expected = plain_model(tmp_path / "plain")
    with run_with_aggregators(tmp_path / "run") as server:
        current = server.begin(PEOPLE)
        first, second = current.clients[:2], current.clients[2:]
        lost, kept = start_process(0, "hang"), start_process(0)
        for process, share in ((lost, first), (kept, second)):
            assert process.stdin is not None
            process.stdin.write(current.share(share).encoded())
            process.stdin.close()
            process.stdin = None
        assert lost.stderr is not None
        assert lost.stderr.readline() == b"reported\n"
        lost.kill()  # in the middle of its share
        data, _ = lost.communicate()
        assert lost.returncode < 0
        with pytest.raises(InvalidInput, match="not a partial sum"):
            PartialSum.decoded(data)
        data, _ = kept.communicate(timeout=60)
        assert kept.returncode == 0
        assert not current.report_partial(PartialSum.decoded(data))
        assert len(current.reports.counted) == 2
        again = start_process(0)
        data, _ = again.communicate(current.share(first).encoded(), timeout=60)
        assert current.report_partial(PartialSum.decoded(data))
        assert server.commit(current).model["w"].tobytes() == expected


def test_a_partial_sum_from_before_the_server_was_resumed_is_taken(tmp_path):
    expected = plain_model(tmp_path / "plain")
    server = run_with_aggregators(tmp_path / "run")
    current = server.begin(PEOPLE)
    early, late = current.clients[:2], current.clients[2:]
    partial = aggregated(current, early)
    current.report_partial(partial)  # lost with the server
    server = reopen(server)
    current = server.begin(PEOPLE)
    assert not current.report_partial(partial)
    assert current.report_partial(aggregated(current, late))
    assert server.commit(current).model["w"].tobytes() == expected
    server.close()


# --- The guarantee -------------------------------------------------------------------------------


def bases(path: Path) -> dict[str, str]:
    return {one.name: one.basis for one in load_guarantee(path).hypotheses}


def test_the_guarantee_names_aggregators_after_every_round_and_resuming(tmp_path):
    server = run_with_aggregators(tmp_path)
    one_round(server, PEOPLE, update_of)  # the setting counts, not whether they were used
    for _ in range(2):
        stated = bases(server.folder.guarantee)
        assert (stated["aggregators"], stated["clipping"]) == ("assumed", "assumed")
        server = reopen(server)
        current = server.begin(PEOPLE)
        current.report_partial(aggregated(current, current.clients))
        server.commit(current)
    server.close()
    assert verify_run(tmp_path / "run", tmp_path / "state").passed
    run = tmp_path / "run"
    statement = statement_of_files(run / "plan.json", run, state_folder=tmp_path / "state")
    assert "through aggregators" in statement.markdown()
    assert "keeps updates and sums secret" in statement.markdown()


def test_without_aggregators_the_guarantee_does_not_name_them(tmp_path):
    with create(tmp_path) as server:
        one_round(server)
        stated = bases(server.folder.guarantee)
        assert "aggregators" not in stated
        assert stated["clipping"] == "enforced"
        run = server.folder.root
    statement = statement_of_files(run / "plan.json", run, state_folder=tmp_path / "state")
    assert "ggregator" not in statement.markdown()


@pytest.mark.parametrize("aggregators", [True, False])
def test_verify_notices_a_guarantee_that_is_wrong_about_aggregators(tmp_path, aggregators):
    runs = {}
    for kind in (True, False):
        with create(tmp_path / str(kind), aggregators=kind) as server:
            one_round(server)
            runs[kind] = server.folder.guarantee
    run, other = runs[aggregators], runs[not aggregators]
    content = json.loads(run.read_text())
    content["hypotheses"] = json.loads(other.read_text())["hypotheses"]
    assert verify_run(run.parent, run.parent.parent / "state").passed
    run.write_text(json.dumps(content))
    assert not verify_run(run.parent, run.parent.parent / "state").passed
