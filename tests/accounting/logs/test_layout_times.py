"""Logs with times: no stated gap is larger than the gap of the real rounds."""

from bisect import bisect_right
from itertools import accumulate, pairwise

import polars as pl
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpftrl import MinSep
from dpftrl.accounting.logs import Limits, LogLayout, observe, open_log
from dpftrl.accounting.logs.layout import read_first_time
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import BinaryTree
from dpftrl.participation import FixedEpochs

LENGTH = 100  # seconds
ORIGIN = 1_770_000_000
TIMED = LogLayout(time_column="time", round_length="6h")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("times")


def put(folder, times, clients=None, name="log.csv"):
    clients = clients or ["a"] * len(times)
    lines = [f"{time},{client}" for time, client in zip(times, clients, strict=True)]
    path = folder / name
    path.write_text("\n".join(["time,client", *lines, ""]))
    return path


@settings(max_examples=200)
@given(
    lengths=st.lists(st.sampled_from([LENGTH, LENGTH, 40]), min_size=1, max_size=12),
    contacts=st.lists(
        st.tuples(
            st.sampled_from("ab"), st.integers(0, 11), st.sampled_from([0, 1, 499_999, 999_999])
        ),
        min_size=1,
        max_size=4,
    ),
    ns=st.booleans(),
)
@example(  # counted from the first contact, a is in the rounds 0 and 2; really in 1 and 2
    lengths=[LENGTH] * 4, contacts=[("b", 0, 499_999), ("a", 1, 0), ("a", 2, 999_999)], ns=False
)
def test_gaps_are_never_larger_than_those_of_the_real_rounds(folder, lengths, contacts, ns):
    """Rounds of any lengths up to the stated one; the log shows only when contacts happened."""
    starts = [0, *accumulate(lengths)]
    factor = 10**9
    moments = sorted(
        (starts[row] * factor + share * lengths[row] * factor // 10**6 + share % 1000, who)
        for who, number, share in contacts
        for row in [number % len(lengths)]
    )
    if not ns:
        moments = [(moment // factor * factor, who) for moment, who in moments]
    times = [f"{ORIGIN + moment // factor}.{moment % factor:09}" for moment, _ in moments]
    path = put(folder, times, [who for _, who in moments])
    layout = LogLayout(time_column="time", round_length=LENGTH)
    with open_log(path, layout=layout) as log:
        observed = log.summary()
        bound = (
            log.worst_pattern(BinaryTree(), len(lengths)) if log.rounds <= len(lengths) else None
        )
    real = {
        who: sorted(
            {bisect_right(starts, moment / factor) - 1 for moment, owner in moments if owner == who}
        )
        for _, who in moments
    }
    gaps = [later - sooner for rounds in real.values() for sooner, later in pairwise(rounds)]
    assert all(observed.min_sep <= gap for gap in gaps)
    assert observed.max_participations >= max(map(len, real.values()))
    if sum(map(len, real.values())) < len(moments):  # two contacts of a client in one round
        assert observed.duplicate_rows > 0
    if all(length == LENGTH for length in lengths):
        last = max(rounds[-1] for rounds in real.values())
        first = min(rounds[0] for rounds in real.values())
        assert observed.rounds + observed.unseen_rounds >= last - first + 1
    if bound is not None and not observed.duplicate_rows:
        norms = [BinaryTree().pattern_norm(tuple(p), len(lengths)) for p in real.values()]
        assert bound.value >= max(norms) * (1 - 1e-12)


def test_contacts_in_rounds_next_to_each_other_by_the_clock_can_be_closer_than_a_round(tmp_path):
    """The negative control: the difference of round numbers would be 2, the real gap can be 1."""
    times = ["2026-01-01T00:00:00Z", "2026-01-01T05:00:00Z", "2026-01-01T16:59:59Z"]
    observed = observe(put(tmp_path, times, ["b", "a", "a"]), layout=TIMED)
    assert (observed.rounds, observed.min_sep) == (3, 1)


def test_close_rows_are_reported_unless_the_start_says_that_they_are_in_two_rounds(tmp_path):
    times = ["2026-01-01T05:59:00Z", "2026-01-01T06:01:00Z"]
    path = put(tmp_path, times)
    observed = observe(path, layout=TIMED)
    assert (observed.min_sep, observed.max_participations) == (1, 2)
    assert observed.duplicate_rows == 1
    start = LogLayout(time_column="time", round_length="6h", first_time="2026-01-01T00:00:00Z")
    known = observe(path, layout=start)
    assert (known.rounds, known.min_sep, known.max_participations) == (2, 1, 2)
    assert (known.duplicate_rows, known.unseen_rounds) == (0, 0)


def test_close_rows_in_one_round_are_not_merged(tmp_path):
    """They can be in two rounds, so --repeated-rows must not make one participation of them."""
    path = put(tmp_path, ["2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z"])
    for first_time in (None, "2026-01-01T00:00:00Z"):
        layout = LogLayout(time_column="time", round_length="6h", first_time=first_time)
        observed = observe(path, layout=layout, rounds=9)
        assert (observed.max_participations, observed.duplicate_rows) == (2, 1)
        assert observed.participation == MinSep(9, 1, 2)
    path = put(tmp_path, ["2026-01-01T00:00:00Z"] * 2)
    observed = observe(path, layout=TIMED, rounds=9)
    assert (observed.max_participations, observed.duplicate_rows) == (1, 1)


def test_a_contact_and_its_report_are_one_contact(tmp_path):
    path = tmp_path / "log.csv"
    lines = ["time,client,status"]
    for day in (1, 3, 5):
        lines += [f"2026-01-0{day}T00:00:00Z,a,contacted", f"2026-01-0{day}T00:07:00Z,a,counted"]
    path.write_text("\n".join(lines))
    observed = observe(path, Limits(min_sep=8), layout=TIMED)
    assert (observed.contacts, observed.contacted_min_sep, observed.min_sep) == (3, 8, 8)
    assert observed.broken_clients == observed.duplicate_rows == 0
    (broken,) = observe(path, Limits(min_sep=9), layout=TIMED).broken
    assert broken.rounds == (0, 8)


def test_fixed_epochs_cannot_be_shown_by_times(tmp_path):
    path = put(tmp_path, ["2026-01-01T00:00:00Z", "2026-01-02T01:00:00Z"])
    observed = observe(path, layout=TIMED)
    assert observed.min_sep == 4
    assert observed.within(FixedEpochs(20, 4)) == MinSep(20, 4, 2)
    assert observed.unseen_rounds == 1
    assert observed.participation.rounds == observed.rounds + 1


def test_clocks_that_change_do_not_change_a_gap(tmp_path):
    """In Berlin, 02:30 happens twice on 25 October 2026, and not at all on 29 March."""
    layout = LogLayout(time_column="time", round_length="30min")
    night = ["2026-10-25T02:30:00+02:00", "2026-10-25T02:30:00+01:00"]
    assert observe(put(tmp_path, night), layout=layout).min_sep == 2
    spring = ["2026-03-29T01:30:00+01:00", "2026-03-29T03:30:00+02:00"]
    assert observe(put(tmp_path, spring), layout=layout).min_sep == 2
    local = ["2026-03-29T01:30:00", "2026-03-29T03:30:00"]  # one hour apart, and it looks like two
    with pytest.raises(InvalidInput, match=r"has no time zone.*--time-zone UTC"):
        observe(put(tmp_path, local), layout=layout)


def test_a_leap_second_does_not_make_a_gap_larger(tmp_path):
    layout = LogLayout(time_column="time", round_length=1)
    leap = ["2016-12-31T23:59:59Z", "2016-12-31T23:59:60Z"]
    assert observe(put(tmp_path, leap), layout=layout).min_sep == 1
    after = ["2016-12-31T23:59:59Z", "2017-01-01T00:00:00Z"]  # two seconds apart
    assert observe(put(tmp_path, after), layout=layout).min_sep == 1


SAME = [
    ("2026-01-31T18:00:00Z", "2026-02-01T18:00:00Z"),
    ("2026-01-31t18:00:00.000z", "2026-02-01 18:00:00,0 UTC"),
    ("2026-01-31T18:00:00+00:00", "2026-02-01T20:00:00+02"),
    ("2026-01-31T18:00:00-00:00", "2026-02-01T05:30:00-1230"),
    (" 1769882400 ", "1769968800.0000"),
]


@pytest.mark.parametrize("times", SAME)
def test_times_of_all_notations_are_compared_in_utc(tmp_path, times):
    path = tmp_path / "log.csv"
    path.write_text("client;time\n" + "".join(f"a;{time}\n" for time in times))
    layout = LogLayout(time_column="time", round_length=86_400, delimiter=";")
    assert observe(path, layout=layout).min_sep == 1
    shorter = LogLayout(time_column="time", round_length=86_400.000001, delimiter=";")
    assert observe(path, layout=shorter).duplicate_rows == 1


def test_timestamps_in_parquet(tmp_path):
    day = pl.Series(["2026-01-31T18:00:00", "2026-02-01T18:00:00"]).str.to_datetime()
    layout = LogLayout(time_column="time", round_length="1d")
    utc = LogLayout(time_column="time", round_length="1d", time_zone="UTC")
    for unit in ("ms", "us", "ns"):
        path = tmp_path / f"{unit}.parquet"
        naive = day.dt.cast_time_unit(unit)
        pl.DataFrame({"client": ["a", "a"], "time": naive}).write_parquet(path)
        assert observe(path, layout=utc).min_sep == 1
        with pytest.raises(InvalidInput, match="has no time zone"):
            observe(path, layout=layout)
        zoned = naive.dt.replace_time_zone("America/New_York")
        pl.DataFrame({"client": ["a", "a"], "time": zoned}).write_parquet(path)
        assert observe(path, layout=layout).min_sep == 1
    for numbers in ([1769882400, 1769968800], [1769882400.0, 1769968800.0]):
        pl.DataFrame({"client": ["a", "a"], "time": numbers}).write_parquet(path)
        assert observe(path, layout=layout).min_sep == 1
    for numbers in ([1769882400000, 1769968800000], pl.Series([1.7e9, 1.8e9], dtype=pl.Float32)):
        pl.DataFrame({"client": ["a", "a"], "time": numbers}).write_parquet(path)
        with pytest.raises(InvalidInput, match="a time is written like"):
            observe(path, layout=layout)


def test_parquet_times_in_the_future_are_named(tmp_path):
    path = tmp_path / "future.parquet"
    for times in (
        pl.Series(["2126-12-31T00:00:00"]).str.to_datetime(time_zone="UTC"),
        pl.Series([4950000000.0]),
        pl.Series([4950000000]),
    ):
        pl.DataFrame({"client": ["a"], "time": times}).write_parquet(path)
        with pytest.raises(InvalidInput, match=r"row 1: the time '.*' .*lies in the future"):
            observe(path, layout=TIMED)


def test_rounded_times_lose_a_round_at_the_boundary(tmp_path):
    """Nanoseconds are rounded down, so a duration can be too long by less than 1 microsecond."""
    layout = LogLayout(time_column="time", round_length=1)
    exact = ["1769882400.000000", "1769882402.000000"]
    assert observe(put(tmp_path, exact), layout=layout).min_sep == 2
    longer = ["1769882400.000000900", "1769882402.000000"]  # 0.9 microseconds less than 2 seconds
    assert observe(put(tmp_path, longer), layout=layout).min_sep == 1


REFUSED = {
    "text": (["soon"], "row 1: a time is written like .*got 'soon'"),
    "no time": (["2026-01-01T00:00:00Z", ""], "row 2 has no time"),
    "a date": (["2026-01-01"], "needs the date, and the time of day with its seconds"),
    "no seconds": (["2026-01-01T10:00Z"], "a time is written like"),
    "no such day": (["2026-02-30T00:00:00Z"], "a time is written like"),
    "a strange offset": (["2026-02-01T00:00:00+25:00"], "a time is written like"),
    "the name of a zone": (["2026-02-01T00:00:00 CET"], "a time is written like"),
    "milliseconds": (["1769882400000"], "seconds, not milliseconds"),
    "a date as a number": (["20260131"], "seconds, not milliseconds"),
    "a date and an hour as a number": (
        ["2126013118"],
        r"row 1: the time '2126013118' \(2037-05-15T15:11:58Z as Unix seconds\) lies in the future"
        ".*seconds, not milliseconds",
    ),
    "in the future": (
        ["2026-01-01T00:00:00Z", "2126-12-31T00:00:00Z"],
        "row 2: the time '2126-12-31T00:00:00Z' lies in the future: now it is 2.*Z; check the "
        "clock and the time zone of the log$",
    ),
    "in the future, without a time zone": (["2126-12-31 00:00:00"], "lies in the future"),
    "beyond all calendars": (["9999-12-31T00:00:00Z"], "a time is written like"),
    "negative": (["-1769882400"], "a time is written like"),
    "before 1970": (["1969-01-01T00:00:00Z"], "a time is written like"),
    "exponent": (["1.7e9"], "a time is written like"),
    "infinite": (["inf"], "a time is written like"),
    "mixed with local": (
        ["2026-01-01T00:00:00Z", "2026-01-01T00:00:00"],
        "row 2: .* without a time zone, but the rows before it are in ISO 8601 with a time zone",
    ),
    "mixed with Unix": (
        ["2026-01-01T00:00:00Z", "1769882400"],
        "row 2: .* in Unix seconds, but the rows before",
    ),
}


@pytest.mark.parametrize(("times", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_a_time_is_refused(tmp_path, times, message):
    path = put(tmp_path, times)
    with pytest.raises(InvalidInput, match=message) as refusal:
        observe(path, layout=TIMED)
    assert str(path) in str(refusal.value)


def test_notations_are_not_mixed_across_batches(tmp_path, monkeypatch):
    monkeypatch.setattr("dpftrl.accounting.logs.reading.ROWS_PER_BATCH", 100)
    times = [1769882400 + 60 * i for i in range(5000)]
    times[4321] = "2026-02-01T00:00:00Z"
    clients = [f"c{i}" for i in range(5000)]
    with pytest.raises(InvalidInput, match=r"row 4,322: .* Unix seconds"):
        observe(put(tmp_path, times, clients), layout=TIMED)


def test_partitions_do_not_change_the_summary_of_times(tmp_path):
    times = [1769882400 + 977 * i for i in range(600)]
    path = put(tmp_path, times, [f"c{i % 37}" for i in range(600)])
    with (
        open_log(path, layout=TIMED) as whole,
        open_log(path, layout=TIMED, rows_per_partition=10) as split,
    ):
        assert whole.summary() == split.summary()
        tree = BinaryTree()
        assert whole.worst_pattern(tree) == split.worst_pattern(tree)


def test_options_of_times_that_do_not_fit_are_refused(tmp_path):
    path = put(tmp_path, ["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"])

    def refused(message, rounds=None, first_round=0, **options):
        layout = LogLayout(time_column="time", round_length="6h", **options)
        with pytest.raises(InvalidInput, match=message):
            observe(path, layout=layout, rounds=rounds, first_round=first_round)

    refused("--first-round is for logs with rounds", first_round=1)
    refused("is before --first-time, 2026-01-01T01:00:00Z", first_time="2026-01-01T01:00:00Z")
    refused("--first-time: the time .* has no time zone", first_time="2026-01-01T00:00:00")
    refused("--first-time: a time is written like", first_time="yesterday")
    refused("--first-time takes a time such as", first_time=" ")
    refused("--first-time takes a time such as", first_time="\udcff")
    refused("--first-time must be in whole micros", first_time="2026-01-01T00:00:00.0000001Z")
    refused("has a time zone; leave --time-zone out", time_zone="UTC")
    refused("is in round 4, counted from 0 .* but there are 4 rounds", rounds=4)
    assert observe(path, layout=TIMED, rounds=5).rounds == 5


def test_the_first_time_may_have_another_notation():
    moment = 1769882400 * 10**6
    for first in ("2026-01-31T18:00:00Z", 1769882400, "1769882400", 1769882400.0):
        assert read_first_time(first, None) == read_first_time(first, "UTC") == moment
    assert read_first_time("2026-01-31 18:00:00", "UTC") == moment
