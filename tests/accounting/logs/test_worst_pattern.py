"""The worst client that was really there, against trying every client's pattern."""

import plain_log
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpftrl
from dpftrl import MinSep
from dpftrl.accounting.logs import log as log_module
from dpftrl.accounting.logs import open_log
from dpftrl.accounting.logs import worst_pattern as best_first
from dpftrl.accounting.logs import worst_pattern as gram
from dpftrl.errors import InvalidInput, RoundsExceeded

NAMES = ["blt-b400", "tree", "band-sqrt:4", "banded:4", "inv-sqrt:3", "smooth-tree", "tree-full"]
ROUNDS = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(params=["gram", "best first"])
def path_taken(request):
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "best first":
            patch.setattr(log_module, "GRAM_LIMIT", 0)
        yield request.param


def made(name):
    return dpftrl.mechanism(name, MinSep(ROUNDS, 5))


def brute_force(mechanism, rows, rounds=ROUNDS):
    patterns = plain_log.patterns(rows).values()
    return max((mechanism.pattern_norm(pattern, rounds) for pattern in patterns), default=0.0)


def ask(folder, rows, mechanism, rounds=ROUNDS, **options):
    path = plain_log.write(folder / "log.parquet", rows)
    with open_log(path, **options) as log:
        return log.worst_pattern(mechanism, rounds)


@pytest.mark.usefixtures("path_taken")
@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(rows=plain_log.logs(ROUNDS), rows_per_partition=st.sampled_from([5, 10**6]))
def test_both_ways_find_the_worst_client(folder, name, rows, rows_per_partition):
    mechanism = made(name)
    found = ask(folder, rows, mechanism, rows_per_partition=rows_per_partition)
    assert found.kind == "exact"
    assert found.value == pytest.approx(brute_force(mechanism, rows), rel=1e-12)
    if found.client is not None:
        assert list(found.pattern) == plain_log.patterns(rows)[found.client]
        assert mechanism.pattern_norm(found.pattern, ROUNDS) == pytest.approx(found.value)


@pytest.mark.parametrize("norms", [1, 3])
@pytest.mark.parametrize("bounds", [1, 2, 100])
@settings(max_examples=20)
@given(rows=plain_log.logs(ROUNDS), name=st.sampled_from(NAMES))
def test_with_little_work_it_is_a_bound(folder, norms, bounds, rows, name):
    mechanism = made(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module, "GRAM_LIMIT", 0)
        patch.setattr(best_first, "MOST_NORMS", norms)
        patch.setattr(best_first, "FEWEST_NORMS", 1)
        patch.setattr(best_first, "MOST_BOUNDS", bounds)
        found = ask(folder, rows, mechanism)
    truth = brute_force(mechanism, rows)
    assert found.value >= truth * (1 - 1e-12)
    if found.kind == "exact":
        assert found.value == pytest.approx(truth, rel=1e-9)
    expected = plain_log.expected(rows)
    limits = MinSep(ROUNDS, expected["min_sep"], max(1, expected["max_participations"]))
    assert found.value <= mechanism.sensitivity(limits).value * (1 + 1e-9)


def test_too_little_work_says_so(folder, monkeypatch):
    monkeypatch.setattr(log_module, "GRAM_LIMIT", 0)
    monkeypatch.setattr(best_first, "MOST_NORMS", 2)
    monkeypatch.setattr(best_first, "FEWEST_NORMS", 1)
    rows = [(when, str(who), None) for who in range(9) for when in (who, who + 10, who + 21)]
    blt = made("blt-b400")
    found = ask(folder, rows, blt)
    assert found.kind == "upper bound"
    assert found.value == blt.sensitivity(MinSep(ROUNDS, 10, 3)).value
    assert blt.pattern_norm(found.pattern, ROUNDS) <= brute_force(blt, rows) < found.value


def test_what_was_not_opened_is_bounded(folder, monkeypatch):
    """The group with the largest bound holds one harmless client; the worst is in the next."""
    monkeypatch.setattr(log_module, "GRAM_LIMIT", 0)
    monkeypatch.setattr(best_first, "MOST_NORMS", 1)
    monkeypatch.setattr(best_first, "FEWEST_NORMS", 1)
    rows = [(when, "harmless", None) for when in (10, 11, 18, 24, 29)]
    rows += [(when, "worst", None) for when in (0, 6, 13, 19, 25)]
    blt = made("blt-b400")
    found = ask(folder, rows, blt)
    assert (found.kind, found.client) == ("upper bound", "harmless")
    assert found.value == blt.sensitivity(MinSep(ROUNDS, 6, 5)).value > brute_force(blt, rows)


def test_fewer_but_closer_participations_can_be_worse(folder, monkeypatch):
    monkeypatch.setattr(log_module, "GRAM_LIMIT", 0)
    rows = [(when, "often", None) for when in (0, 10, 20)]
    rows += [(when, "close", None) for when in (5, 6)]
    found = ask(folder, rows, made("banded:4"))
    assert (found.kind, found.client) == ("exact", "close")


def test_it_stops_early_when_no_bound_is_left(folder, monkeypatch):
    """Nobody can be worse than the first client, whose pattern attains its bound."""
    monkeypatch.setattr(log_module, "GRAM_LIMIT", 0)
    rows = [(when, "0", None) for when in (0, 10, 20)] + [(when, "1", None) for when in (1, 12)]
    norms = []
    blt = made("blt-b400")
    plain = type(blt)._pattern_norm
    monkeypatch.setattr(
        type(blt), "_pattern_norm", lambda *given: norms.append(given) or plain(*given)
    )
    found = ask(folder, rows, blt)
    assert (found.kind, found.client, len(norms)) == ("exact", "0", 1)
    assert found.value == pytest.approx(blt.sensitivity(MinSep(ROUNDS, 10, 3)).value)


@pytest.mark.usefixtures("path_taken")
def test_it_is_tighter_than_the_sensitivity_of_gap_and_count(folder):
    rows = [(0, "close", None), (1, "close", None)]
    rows += [(when, "often", None) for when in range(0, ROUNDS, 6)]
    for name in ("blt-b400", "tree"):
        mechanism, said = made(name), plain_log.expected(rows)
        limits = MinSep(ROUNDS, said["min_sep"], said["max_participations"])
        assert ask(folder, rows, mechanism).value < 0.8 * mechanism.sensitivity(limits).value


@pytest.mark.usefixtures("path_taken")
def test_moving_a_participation_changes_the_answer(folder):
    rows = [(0, "a", None), (4, "a", None), (8, "b", None)]
    closer = [(0, "a", None), (3, "a", None), (8, "b", None)]
    blt = made("blt-b400")
    assert ask(folder, closer, blt).value > ask(folder, rows, blt).value * (1 + 1e-6)
    assert ask(folder, rows[1:], blt).value < ask(folder, rows, blt).value


@pytest.mark.usefixtures("path_taken")
def test_those_only_contacted_move_nothing(folder):
    rows = [(0, "a", None), *((when, "b", "contacted") for when in range(ROUNDS))]
    assert ask(folder, rows, made("tree")).client == "a"
    nobody = ask(folder, rows[1:], made("tree"))
    assert (nobody.value, nobody.kind, nobody.pattern, nobody.client) == (0.0, "exact", (), None)


def test_clients_in_nearly_every_round(folder, monkeypatch):
    rows = [(when, str(who), None) for who in range(5) for when in range(ROUNDS) if when % 7 != who]
    mechanism = made("banded:4")
    by_products = ask(folder, rows, mechanism)
    monkeypatch.setattr(gram, "DENSE_SHARE", 0)
    monkeypatch.setattr(gram, "CHUNK", 1)
    by_entries = ask(folder, rows, mechanism)
    assert by_products.value == pytest.approx(by_entries.value, rel=1e-14)
    assert by_products.value == pytest.approx(brute_force(mechanism, rows), rel=1e-14)


@pytest.mark.usefixtures("path_taken")
def test_mixed_signs_are_taken_in_absolute_value(folder):
    mechanism = dpftrl.mechanism("gblt:0.5@0.9,0.2@-0.8")
    rows = [(when, "a", None) for when in (0, 1, 5, 6, 20)]
    found = ask(folder, rows, mechanism)
    assert found.value == pytest.approx(brute_force(mechanism, rows), rel=1e-12)


def test_a_tree_that_was_to_be_larger_is_bounded(folder, path_taken):
    """Of a tree built for more rounds `pattern_norm` is itself a bound."""
    mechanism = dpftrl.mechanism("tree-full", MinSep(64, 5))
    rows = [(when, "a", None) for when in (0, 9, 19)]
    found = ask(folder, rows, mechanism)
    assert found.value == pytest.approx(brute_force(mechanism, rows), rel=1e-12)
    assert found.kind == ("upper bound" if path_taken == "gram" else "exact")


def test_rounds_must_fit(folder):
    with pytest.raises(InvalidInput, match="the log has 10 rounds, got rounds 9"):
        ask(folder, [(9, "a", None)], made("tree"), 9)
    with pytest.raises(RoundsExceeded):
        ask(folder, [(9, "a", None)], made("banded:4"), ROUNDS + 1)
