"""The worst pattern of a log, compared with brute force over the patterns of all clients."""

import plain_log
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpftrl
from dpftrl import MinSep
from dpftrl.accounting.logs import log as log_module
from dpftrl.accounting.logs import open_log
from dpftrl.accounting.logs import worst_pattern as worst_pattern_module
from dpftrl.errors import InvalidInput, RoundsExceeded

NAMES = ["blt-b400", "tree", "band-sqrt:4", "banded:4", "inv-sqrt:3", "smooth-tree", "tree-full"]
ROUNDS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(params=["gram", "bounds"])
def algorithm(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "bounds":
            patch.setattr(log_module, "GRAM_LIMIT", 0)
        yield request.param


def make(name):
    return dpftrl.mechanism(name, MinSep(ROUNDS, 5))


def brute_force(mechanism, rows, rounds=ROUNDS):
    patterns = plain_log.patterns(rows).values()
    return max((mechanism.pattern_norm(pattern, rounds) for pattern in patterns), default=0.0)


def ask(folder, rows, mechanism, rounds=ROUNDS, **options):
    path = plain_log.write(folder / "log.parquet", rows)
    with open_log(path, **options) as log:
        return log.worst_pattern(mechanism, rounds)


@pytest.mark.usefixtures("algorithm")
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(rows=plain_log.logs(ROUNDS), rows_per_partition=st.sampled_from([5, 10**6]))
def test_both_ways_find_the_worst_client(folder, name, rows, rows_per_partition):
    mechanism = make(name)
    worst = ask(folder, rows, mechanism, rows_per_partition=rows_per_partition)
    assert worst.kind == "exact"
    assert worst.value == pytest.approx(brute_force(mechanism, rows), rel=1e-12)
    if worst.client is not None:
        assert list(worst.pattern) == plain_log.patterns(rows)[worst.client]
        assert mechanism.pattern_norm(worst.pattern, ROUNDS) == pytest.approx(worst.value)


@pytest.mark.parametrize("norms", [1, 3])
@pytest.mark.parametrize("bounds", [1, 2, 100])
@settings(max_examples=20)
@given(rows=plain_log.logs(ROUNDS), name=st.sampled_from(NAMES))
def test_with_limited_work_the_result_is_an_upper_bound(folder, norms, bounds, rows, name):
    mechanism = make(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module, "GRAM_LIMIT", 0)
        patch.setattr(worst_pattern_module, "MOST_NORMS", norms)
        patch.setattr(worst_pattern_module, "FEWEST_NORMS", 1)
        patch.setattr(worst_pattern_module, "MOST_BOUNDS", bounds)
        worst = ask(folder, rows, mechanism)
    truth = brute_force(mechanism, rows)
    assert worst.value >= truth * (1 - 1e-12)
    if worst.kind == "exact":
        assert worst.value == pytest.approx(truth, rel=1e-9)
    expected = plain_log.expected(rows)
    limits = MinSep(ROUNDS, expected["min_sep"], max(1, expected["max_participations"]))
    assert worst.value <= mechanism.sensitivity(limits).value * (1 + 1e-9)


def test_a_result_from_limited_work_is_called_an_upper_bound(folder, monkeypatch):
    monkeypatch.setattr(log_module, "GRAM_LIMIT", 0)
    monkeypatch.setattr(worst_pattern_module, "MOST_NORMS", 2)
    monkeypatch.setattr(worst_pattern_module, "FEWEST_NORMS", 1)
    rows = [(when, str(who), None) for who in range(9) for when in (who, who + 10, who + 21)]
    blt = make("blt-b400")
    worst = ask(folder, rows, blt)
    assert worst.kind == "upper bound"
    assert worst.value == blt.sensitivity(MinSep(ROUNDS, 10, 3)).value
    assert blt.pattern_norm(worst.pattern, ROUNDS) <= brute_force(blt, rows) < worst.value


def test_groups_that_were_not_evaluated_are_bounded(folder, monkeypatch):
    """The group with the largest bound holds one harmless client; the worst is in the next."""
    monkeypatch.setattr(log_module, "GRAM_LIMIT", 0)
    monkeypatch.setattr(worst_pattern_module, "MOST_NORMS", 1)
    monkeypatch.setattr(worst_pattern_module, "FEWEST_NORMS", 1)
    rows = [(when, "harmless", None) for when in (10, 11, 18, 24, 29)]
    rows += [(when, "worst", None) for when in (0, 6, 13, 19, 25)]
    blt = make("blt-b400")
    worst = ask(folder, rows, blt)
    assert (worst.kind, worst.client) == ("upper bound", "harmless")
    assert worst.value == blt.sensitivity(MinSep(ROUNDS, 6, 5)).value > brute_force(blt, rows)


def test_fewer_but_closer_participations_can_be_worse(folder, monkeypatch):
    monkeypatch.setattr(log_module, "GRAM_LIMIT", 0)
    rows = [(when, "often", None) for when in (0, 10, 20)]
    rows += [(when, "close", None) for when in (5, 6)]
    worst = ask(folder, rows, make("banded:4"))
    assert (worst.kind, worst.client) == ("exact", "close")


def test_the_search_stops_when_no_bound_is_above_the_largest_norm(folder, monkeypatch):
    """No client can be worse than the first one, whose pattern attains its bound."""
    monkeypatch.setattr(log_module, "GRAM_LIMIT", 0)
    rows = [(when, "0", None) for when in (0, 10, 20)] + [(when, "1", None) for when in (1, 12)]
    norms = []
    blt = make("blt-b400")
    plain = type(blt)._pattern_norm
    monkeypatch.setattr(
        type(blt), "_pattern_norm", lambda *given: norms.append(given) or plain(*given)
    )
    worst = ask(folder, rows, blt)
    assert (worst.kind, worst.client, len(norms)) == ("exact", "0", 1)
    assert worst.value == pytest.approx(blt.sensitivity(MinSep(ROUNDS, 10, 3)).value)


@pytest.mark.usefixtures("algorithm")
def test_the_worst_pattern_is_tighter_than_the_sensitivity_of_gap_and_count(folder):
    rows = [(0, "close", None), (1, "close", None)]
    rows += [(when, "often", None) for when in range(0, ROUNDS, 6)]
    for name in ("blt-b400", "tree"):
        mechanism, expected = make(name), plain_log.expected(rows)
        limits = MinSep(ROUNDS, expected["min_sep"], expected["max_participations"])
        assert ask(folder, rows, mechanism).value < 0.8 * mechanism.sensitivity(limits).value


@pytest.mark.usefixtures("algorithm")
def test_moving_a_participation_changes_the_answer(folder):
    rows = [(0, "a", None), (4, "a", None), (8, "b", None)]
    closer = [(0, "a", None), (3, "a", None), (8, "b", None)]
    blt = make("blt-b400")
    assert ask(folder, closer, blt).value > ask(folder, rows, blt).value * (1 + 1e-6)
    assert ask(folder, rows[1:], blt).value < ask(folder, rows, blt).value


@pytest.mark.usefixtures("algorithm")
def test_clients_that_were_only_contacted_do_not_count(folder):
    rows = [(0, "a", None), *((when, "b", "contacted") for when in range(ROUNDS))]
    assert ask(folder, rows, make("tree")).client == "a"
    nobody = ask(folder, rows[1:], make("tree"))
    assert (nobody.value, nobody.kind, nobody.pattern, nobody.client) == (0.0, "exact", (), None)


def test_dense_and_sparse_sums_agree_for_clients_in_nearly_every_round(folder, monkeypatch):
    rows = [(when, str(who), None) for who in range(5) for when in range(ROUNDS) if when % 7 != who]
    mechanism = make("banded:4")
    by_products = ask(folder, rows, mechanism)
    monkeypatch.setattr(worst_pattern_module, "DENSE_SHARE", 0)
    monkeypatch.setattr(worst_pattern_module, "CHUNK", 1)
    by_entries = ask(folder, rows, mechanism)
    assert by_products.value == pytest.approx(by_entries.value, rel=1e-14)
    assert by_products.value == pytest.approx(brute_force(mechanism, rows), rel=1e-14)


@pytest.mark.usefixtures("algorithm")
def test_mixed_signs_are_taken_in_absolute_value(folder):
    mechanism = dpftrl.mechanism("gblt:0.5@0.9,0.2@-0.8")
    rows = [(when, "a", None) for when in (0, 1, 5, 6, 20)]
    worst = ask(folder, rows, mechanism)
    assert worst.value == pytest.approx(brute_force(mechanism, rows), rel=1e-12)


def test_a_tree_built_for_more_rounds_is_bounded(folder, algorithm):
    """For a tree built for more rounds, `pattern_norm` is itself an upper bound."""
    mechanism = dpftrl.mechanism("tree-full", MinSep(64, 5))
    rows = [(when, "a", None) for when in (0, 9, 19)]
    worst = ask(folder, rows, mechanism)
    assert worst.value == pytest.approx(brute_force(mechanism, rows), rel=1e-12)
    assert worst.kind == ("upper bound" if algorithm == "gram" else "exact")


def test_rounds_outside_the_log_or_the_mechanism_are_refused(folder):
    with pytest.raises(InvalidInput, match="the log has 10 rounds, got rounds 9"):
        ask(folder, [(9, "a", None)], make("tree"), 9)
    with pytest.raises(RoundsExceeded):
        ask(folder, [(9, "a", None)], make("banded:4"), ROUNDS + 1)
