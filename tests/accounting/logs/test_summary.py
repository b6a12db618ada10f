"""Summaries of logs, compared with plain Python, for every format and any partitions."""

import dataclasses
from collections import Counter

import numpy as np
import plain_log
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpftrl import MinSep
from dpftrl.accounting.logs import Limits, Observed, observe, open_log
from dpftrl.accounting.logs.summary import MOST_BINS, Histogram
from dpftrl.errors import InvalidInput


def comparable(observed: Observed) -> dict[str, object]:
    """The fields that the oracle computes too."""
    return {
        name: value
        for name, value in dataclasses.asdict(observed).items()
        if name not in ("first_round", "duplicate_example", "limits") and "broken" not in name
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


@pytest.mark.parametrize("ending", plain_log.FORMATS)
@settings(max_examples=30)
@given(rows=plain_log.logs())
def test_every_format_agrees_with_plain_python(folder, ending, rows):
    path = plain_log.write(folder / f"log{ending}", rows)
    assert comparable(observe(path)) == plain_log.expected(rows)


@pytest.mark.parametrize("ending", plain_log.FORMATS)
@settings(max_examples=15)
@given(rows=plain_log.logs(), limit=st.integers(1, 9), cap=st.integers(1, 5))
def test_the_summary_does_not_depend_on_the_partitions(folder, ending, rows, limit, cap):
    path = plain_log.write(folder / f"log{ending}", rows)
    limits = Limits(limit, cap)
    with open_log(path) as whole, open_log(path, rows_per_partition=1) as split:
        assert len(split._partitions) > 1
        assert whole.summary(limits) == split.summary(limits)


@given(rows=plain_log.logs())
def test_without_a_status_column_all_rows_are_counted(folder, rows):
    path = plain_log.write(folder / "log.csv", rows, with_status=False)
    assert comparable(observe(path)) == plain_log.expected([(t, who, None) for t, who, _ in rows])


@given(rows=plain_log.logs(), data=st.data())
def test_dropping_a_counted_row_changes_the_summary(folder, rows, data):
    counted = [row for row in rows if row[2] in (None, "counted")]
    if not counted:
        return
    when, who, _ = data.draw(st.sampled_from(counted))
    fewer = [row for row in rows if row[:2] != (when, who)]
    # Somebody else, so that neither log is empty and both have the same rounds.
    anchor = (plain_log.expected(rows)["rounds"] - 1, "somebody else", None)
    before, after = (
        observe(plain_log.write(folder / "log.parquet", [*log_rows, anchor]))
        for log_rows in (rows, fewer)
    )
    assert before.participations == after.participations + 1
    assert before != after


def test_the_gap_is_the_difference_of_rounds(folder):
    path = plain_log.write(folder / "log.csv", [(3, "a", None), (7, "a", None), (9, "b", None)])
    observed = observe(path)
    assert (observed.rounds, observed.min_sep, observed.max_participations) == (10, 4, 2)
    assert observed.participation == MinSep(10, 4, 2)
    kept, broken = observe(path, Limits(min_sep=4)), observe(path, Limits(min_sep=5))
    assert (kept.broken_clients, kept.broken) == (0, ())
    assert (broken.broken_clients, broken.broken[0].rounds) == (1, (3, 7))


def test_a_log_without_counted_rows_has_a_summary(folder):
    path = plain_log.write(folder / "log.csv", [(3, "a", "contacted"), (3, "b", "abandoned")])
    observed = observe(path)
    assert (observed.clients, observed.participations, observed.max_participations) == (0, 0, 0)
    assert (observed.rounds, observed.empty_rounds, observed.min_sep) == (4, 4, 4)
    assert observed.contacted_clients == 2
    assert observed.participation == MinSep.once(4)


def test_contacts_count_for_eligibility_and_not_for_accounting(folder):
    rows = [(0, "a", "counted"), (2, "a", "contacted"), (8, "a", "counted"), (8, "a", "contacted")]
    observed = observe(plain_log.write(folder / "log.jsonl", rows), Limits(5, 2))
    assert (observed.min_sep, observed.contacted_min_sep) == (8, 2)
    assert (observed.participations, observed.contacts, observed.duplicate_rows) == (2, 3, 0)
    close, many = observed.broken
    assert (close.limit, close.rounds, close.counted) == ("min_sep", (0, 2), False)
    assert (many.limit, many.count, many.counted) == ("max_participations", 3, False)
    assert (observed.broken_clients, observed.broken_counted_clients) == (1, 0)


def test_duplicates_are_counted_once_and_shown(folder):
    rows = [(4, "a", None)] * 3 + [(4, "b", "counted")] * 2 + [(5, "b", "contacted")] * 2
    observed = observe(plain_log.write(folder / "log.csv", rows))
    assert (observed.participations, observed.duplicate_rows) == (2, 3)
    example = observed.duplicate_example
    assert example is not None
    assert (example.client, example.round, example.rows) == ("a", 4, 3)


@given(
    rows=plain_log.logs(), least=st.integers(1, 12), most=st.integers(1, 6), first=st.integers(0, 2)
)
def test_broken_limits_agree_with_plain_python(folder, rows, least, most, first):
    shifted = [(when + first, who, status) for when, who, status in rows]
    path = plain_log.write(folder / "log.parquet", shifted)
    observed = observe(path, Limits(least, most), first_round=first)
    counted, contacted = plain_log.patterns(shifted), plain_log.patterns(shifted, False)

    def breaks(pattern: list[int]) -> set[str]:
        close = any(gap < least for gap in plain_log.differences(pattern))
        many = len(pattern) > most
        return set(["min_sep"] * close + ["max_participations"] * many)

    wanted = {
        (who, limit): limit in breaks(counted.get(who, []))
        for who, pattern in contacted.items()
        for limit in breaks(pattern)
    }
    assert {(b.client, b.limit): b.counted for b in observed.broken} == wanted
    assert observed.broken_clients == len({who for who, _ in wanted})
    assert observed.broken_counted_clients == len(
        {who for (who, _), true in wanted.items() if true}
    )
    for one in observed.broken:
        pattern = (counted if one.counted else contacted)[one.client]
        if one.rounds is None:
            assert one.count == len(pattern)
        else:
            assert one.rounds[1] - one.rounds[0] == min(plain_log.differences(pattern))
            assert set(one.rounds) <= set(pattern)


def test_at_most_twenty_broken_limits_are_listed_and_all_are_counted(folder):
    rows = [(when, f"c{who:03}", None) for who in range(100) for when in (0, 1 + who % 50, 150)]
    path = plain_log.write(folder / "log.csv", rows)
    observed = observe(path, Limits(min_sep=60))
    assert (observed.broken_clients, len(observed.broken)) == (100, 20)
    assert [one.client for one in observed.broken[:4]] == ["c000", "c050", "c001", "c051"]
    both = Counter(one.limit for one in observe(path, Limits(60, 2)).broken)
    assert both == {"min_sep": 10, "max_participations": 10}


def test_rounds_may_count_from_one_and_be_stated(folder):
    path = plain_log.write(folder / "log.csv", [(1, "a", None), (4, "a", None)])
    observed = observe(path, first_round=1)
    assert (observed.rounds, observed.min_sep, observed.first_round, observed.empty_rounds) == (
        4,
        3,
        1,
        2,
    )
    stated = observe(path, first_round=1, rounds=10)
    assert (stated.rounds, stated.empty_rounds) == (10, 8)
    with pytest.raises(InvalidInput, match=r"row 2: the last of 3 rounds .* is 3, got 4"):
        observe(path, first_round=1, rounds=3)
    with pytest.raises(InvalidInput, match="row 1: rounds count from 2"):
        observe(path, first_round=2)


@pytest.mark.parametrize("name", ["rounds", "first_round"])
@pytest.mark.parametrize("value", [-1, 10**19, 1.5])
def test_impossible_rounds_are_refused(folder, name, value):
    path = plain_log.write(folder / "log.csv", [(1, "a", None)])
    with pytest.raises(InvalidInput, match=f"^{name} must be"):
        observe(path, **{name: value})


def test_huge_rounds_do_not_overflow(folder):
    rows = [(10**18 - 1, who, None) for who in "ab"] + [(0, "a", None)]
    observed = observe(plain_log.write(folder / "log.jsonl", rows))
    assert (observed.rounds, observed.min_sep) == (10**18, 10**18 - 1)


def test_many_distinct_gaps_become_ranges(folder):
    rows = [(when, who, None) for who in range(200) for when in (0, 300 + who)]
    gaps = observe(plain_log.write(folder / "log.csv", rows)).gaps
    assert len(gaps) <= MOST_BINS
    assert (gaps[0].low, gaps[-1].high) == (300, 499)
    assert sum(each.number for each in gaps) == 200
    assert {each.high - each.low for each in gaps} == {4}


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=300), st.integers(1, 299))
def test_a_histogram_gathered_in_pieces_is_that_of_the_whole(values, cut):
    whole, pieces = Histogram(), Histogram()
    whole.add(np.array(values))
    for piece in (values[:cut], values[cut:]):
        pieces.add(np.array(piece, dtype=np.int64))
    assert whole.bins() == pieces.bins()
    assert len(whole.bins()) <= MOST_BINS
    for each in whole.bins():
        assert each.number == sum(each.low <= value <= each.high for value in values)


def test_progress_is_reported(folder):
    calls = []
    path = plain_log.write(folder / "log.csv", [(1, "a", None)])
    observe(path, on_progress=lambda done, message: calls.append((done, message)))
    assert calls == [(None, "1 rows read"), (0.0, "counting")]


def test_a_large_log_leaves_nothing_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / "log.parquet"
    number = np.arange(9000)
    pl.DataFrame({"round": number // 300, "client": number % 700}).write_parquet(path)
    with open_log(path, rows_per_partition=1000) as log:
        assert (log.summary().participations, log.summary().clients) == (9000, 700)
        assert list(tmp_path.iterdir()) == [path]
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=15)
@given(rows=plain_log.logs())
def test_ids_with_the_same_hash_are_different_clients(folder, rows):
    path = plain_log.write(folder / "log.parquet", rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl.Series, "hash", lambda ids: ids.str.len_bytes().cast(pl.UInt64) % 2)
        assert comparable(observe(path)) == plain_log.expected(rows)
