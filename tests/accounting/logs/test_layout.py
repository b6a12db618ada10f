"""Logs as people have them: other names of columns and statuses, other delimiters, pipes."""

import csv
import gzip
import io
import json
import stat
import zlib
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import plain_log
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpftrl.accounting.logs import LogLayout, observe, open_log
from dpftrl.errors import InvalidInput
from dpftrl.federated.store.journal import Cohort, packed
from dpftrl.federated.store.ledger import HEADER, rows_of

START = datetime(2026, 3, 28, 22, 0, tzinfo=UTC)  # clocks in Europe change a few hours later
NAMES = [
    "Smith,",
    ",",
    'a"',
    '"a"',
    'a, "b",',
    "two  words",
    "é😀,",
    "o'neil,",
    "a\\",
    "a;b",
    "王,",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("layouts")


def pipe(monkeypatch, content: bytes):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))


def put(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def timestamp(kind: str, number: int, length: timedelta, delay: timedelta):
    """The time of a row in one of the notations."""
    moment = START + number * length + delay
    match kind:
        case "zoned":
            zone = timezone(timedelta(minutes=(number * 105) % 1560 - 720))
            return moment.astimezone(zone).isoformat()
        case "naive":
            return moment.replace(tzinfo=None).isoformat(sep=" ")
        case "unix":
            return f"{moment.timestamp():.3f}"
    return moment.isoformat().replace("+00:00", "Z")


@st.composite
def spellings(draw: st.DrawFn, rows: list[plain_log.Row]):
    """A log with these rows in any of the supported spellings: its ending, content and layout."""
    names = {
        "client": draw(st.sampled_from(["client", "user id", "^c$", "*", "名,", "round"])),
        "status": draw(st.sampled_from(["status", "outcome", "client"])),
        "when": draw(st.sampled_from(["round", "r;1", "time", "a\\b"])),
    }
    if len({*names.values()}) < 3:
        names = {"client": "c", "status": "s", "when": "w"}
    words = draw(
        st.sampled_from(
            [
                {None: None, "counted": "counted", "contacted": "contacted"},
                {None: "", "counted": "ok", "contacted": "sent, not used"},
                {None: "done", "counted": "1", "contacted": "contacted"},
            ]
        )
    )
    words = {**words, "abandoned": draw(st.sampled_from(["abandoned", "dropped"]))}
    statuses = {
        meaning: [
            word
            for status, word in words.items()
            if (status or "counted") == meaning and word not in (None, "", meaning)
        ]
        for meaning in ("counted", "contacted", "abandoned")
    }
    statuses = {meaning: values for meaning, values in statuses.items() if values}
    kind = draw(st.sampled_from(["round", "zoned", "naive", "unix", "Z"]))
    length = draw(st.sampled_from(["6h", "30min", "1d", 90, timedelta(seconds=1)]))
    seconds = {"6h": 21600, "30min": 1800, "1d": 86400, 90: 90}
    delta = length if isinstance(length, timedelta) else timedelta(seconds=seconds[length])
    delay = delta * draw(st.sampled_from([0, 0.25, 0.5]))
    table = [
        {
            names["when"]: number if kind == "round" else timestamp(kind, number, delta, delay),
            names["client"]: client,
            names["status"]: words[status],
        }
        for number, client, status in rows
    ]
    ending = draw(st.sampled_from([".csv", ".tsv", ".txt", ".csv.gz", ".jsonl", ".parquet"]))
    delimiter = draw(st.sampled_from([";", "|", "\t"])) if ending in (".txt", ".csv") else None
    when = {"round_column": names["when"]}
    if kind != "round":
        when = {
            "time_column": names["when"],
            "round_length": length,
            "first_time": START.isoformat(),
            "time_zone": "UTC" if kind == "naive" else None,
        }
    layout = LogLayout(
        client_column=names["client"],
        status_column=names["status"],
        statuses=statuses,
        delimiter="\\t" if delimiter == "\t" else delimiter,
        **when,
    )
    if ending == ".jsonl":
        ascii_only = draw(st.booleans())
        text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in table)
        return ending, text.encode(), layout
    if ending == ".parquet":
        content = io.BytesIO()
        pl.DataFrame(table, strict=False, infer_schema_length=None).write_parquet(content)
        return ending, content.getvalue(), layout
    written = io.StringIO()
    between = delimiter or ("\t" if ending == ".tsv" else ",")
    quoting = draw(st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]))
    writer = csv.DictWriter(written, list(table[0]), delimiter=between, quoting=quoting)
    writer.writeheader()
    writer.writerows(table)
    text = written.getvalue().encode()
    return ending, gzip.compress(text) if ending == ".csv.gz" else text, layout


@settings(max_examples=150)
@given(data=st.data(), clients=st.sampled_from([["a", "b"], NAMES]))
def test_every_spelling_of_a_log_gives_the_same_summary(folder, data, clients):
    row = st.tuples(
        st.integers(0, 20), st.sampled_from(clients), st.sampled_from(plain_log.STATUSES)
    )
    rows = data.draw(st.lists(row, min_size=1, max_size=20))
    ending, content, layout = data.draw(spellings(rows))
    path = put(folder, f"log{ending}", content)
    expected = observe(plain_log.write(folder / "plain.csv", rows))
    observed = observe(path, layout=layout)
    assert observed.from_times == (layout.time_column is not None)
    assert replace(observed, from_times=False) == expected
    with pytest.MonkeyPatch.context() as patch:
        pipe(patch, content)
        kind = {".jsonl": "json", ".parquet": "parquet"}.get(ending, "csv")
        between = "\t" if ending == ".tsv" else layout.delimiter
        piped = replace(layout, format=kind, delimiter=between)
        assert observe("-", layout=piped) == observed


@pytest.mark.parametrize("ending", plain_log.FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_names_are_kept_as_they_are(tmp_path, name, ending):
    rows = [(0, name, None), (3, name, "counted"), (1, "z", None)]
    with open_log(plain_log.write(tmp_path / f"log{ending}", rows)) as log:
        observed = log.summary()
        ids = {client for contacts in log._contacts("") for client in contacts.ids}
    assert (observed.clients, observed.min_sep, ids) == (2, 3, {name, "z"})


LOG = "when;user;outcome\n1;a;ok\n5;a;done\n2;b;sent\n"
NAMED = LogLayout(
    client_column="user",
    round_column="when",
    status_column="outcome",
    statuses={"counted": ["ok", "done"], "contacted": ["sent"]},
    delimiter=";",
)


def test_columns_statuses_and_delimiter_can_be_named(tmp_path):
    observed = observe(put(tmp_path, "log.csv", LOG), layout=NAMED)
    assert (observed.clients, observed.contacted_clients, observed.min_sep) == (1, 2, 4)


@pytest.mark.parametrize(
    ("content", "changes", "message"),
    [
        (
            LOG + "3;a;OK\n",
            {},
            r"row 4: .*'ok' \(counted\), .*'sent' \(contacted\).*got 'OK'.*--st",
        ),
        (LOG, {"status_column": "status"}, "no column 'status'.*--status-column says"),
        (LOG, {"client_column": "client"}, "no column 'client'.*--client-column says"),
        (LOG, {"round_column": None}, "no column 'round'.*--round-column.*--time-column"),
        (LOG, {"delimiter": None}, "no column 'when'.*--delimiter ';'"),
        (LOG, {"delimiter": "|"}, "no column 'when'.*--delimiter ';'"),
        (LOG.replace(";", "\t"), {"delimiter": None}, r"--delimiter '.t'"),
        (LOG.replace(";", "#"), {"delimiter": None}, "--delimiter says what is between"),
        (LOG.replace(";", ","), {"delimiter": ";"}, "no column 'when'.*--delimiter ','"),
        (LOG.replace("outcome", "user"), {}, "two columns 'user'|no column 'outcome'"),
        (LOG, {"format": "json"}, "is CSV by its ending, but --format is json"),
    ],
)
def test_a_log_that_does_not_fit_its_layout_is_refused(tmp_path, content, changes, message):
    with pytest.raises(InvalidInput, match=message):
        observe(put(tmp_path, "log.csv", content), layout=replace(NAMED, **changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"client_column": "x", "round_column": "x"}, "--round-column and --client-column are bot"),
        ({"client_column": "status"}, "--client-column and --status-column are both 'status'"),
        ({"client_column": ""}, "--client-column takes the name of a column"),
        ({"client_column": "\udcff"}, "--client-column takes the name of a column"),
        ({"round_column": "x", "time_column": "y"}, "--round-column or --time-column, not both"),
        ({"time_column": "t"}, "--time-column needs --round-length"),
        ({"round_length": "6h"}, "--round-length is for logs with times"),
        ({"first_time": "2026-01-01T00:00:00Z"}, "--first-time is for logs with times"),
        ({"time_zone": "UTC"}, "--time-zone is for logs with times"),
        ({"time_column": "t", "round_length": 9, "time_zone": "Europe/Berlin"}, "can only be UTC"),
        ({"statuses": {"used": ["ok"]}}, "maps values to counted, contacted, abandoned, got 'used"),
        ({"statuses": {"counted": ["ok"], "contacted": ["ok"]}}, "'ok' to counted and to contact"),
        ({"statuses": {"contacted": [""]}}, "an empty status always means counted"),
        ({"statuses": {"contacted": []}}, "an empty status always means counted"),
        ({"statuses": {"contacted": ["counted"]}}, "can only be mapped to counted"),
        ({"statuses": {"contacted": ["\udcff"]}}, "values of printable characters"),
        ({"delimiter": ";;"}, "--delimiter takes one character"),
        ({"delimiter": '"'}, "--delimiter takes one character"),
        ({"delimiter": "\n"}, "--delimiter takes one character"),
        ({"delimiter": "e"}, "--delimiter takes one character"),
        ({"delimiter": "、"}, "--delimiter takes one character"),
        ({"delimiter": ""}, "--delimiter takes one character"),
        ({"format": "xml"}, "csv, json, parquet, got 'xml'"),
    ],
)
def test_wrong_layouts_are_refused(options, message):
    with pytest.raises(InvalidInput, match=message):
        LogLayout(**options)


@pytest.mark.parametrize(
    "length", ["", "6 weeks", "6m", "-1h", "0", "0h", "1e3", "nan", "inf", -5, 0.0000001, "6H"]
)
def test_wrong_round_lengths_are_refused(length):
    with pytest.raises(InvalidInput, match="--round-length"):
        LogLayout(time_column="t", round_length=length)


def test_a_word_of_ours_can_be_mapped_to_counted_only(tmp_path):
    """The safe direction: more rows count, and epsilon is not smaller."""
    path = put(tmp_path, "log.csv", "round,client,status\n0,a,contacted\n3,a,abandoned\n")
    assert observe(path).participations == 0
    layout = LogLayout(statuses={"counted": ["contacted", "abandoned"]})
    assert observe(path, layout=layout).min_sep == 3


@pytest.mark.parametrize("name", ["log.jsonl", "log.parquet"])
def test_a_delimiter_is_for_csv(tmp_path, name):
    path = plain_log.write(tmp_path / name, [(0, "a", None)])
    with pytest.raises(InvalidInput, match="--delimiter is for CSV"):
        observe(path, layout=LogLayout(delimiter=";"))


def test_another_ending_needs_a_format(tmp_path):
    path = put(tmp_path, "log.dat", "round,client\n0,a\n3,a\n")
    with pytest.raises(InvalidInput, match="give --format"):
        observe(path)
    assert observe(path, layout=LogLayout(format="csv")).min_sep == 3


def test_json_keys_that_are_named_are_checked_like_ours(tmp_path):
    layout = LogLayout(client_column="user_id", round_column="r", status_column="s")
    good = '{"r":0,"user_id":"a","s":"counted"}\n'
    for line, message in {
        '{"r":1,"user_id":"a","user_id":"b"}': "line 2 has the key 'user_id' 2 times",
        '{"r":1,"user_id":"a","user\\u005fid":"b"}': "line 2 has the key 'user_id' 2 times",
        '{"r":1,"r":2,"user_id":"a"}': "line 2 has the key 'r' 2 times",
        '{"r":1,"user_id":1e20}': "line 2: .* of 2.53 or more",
        '{"r":1,"user_id":[1]}': "line 2: a client's id is a text or",
        '{"r":1,"client":"a"}': "row 2 has no client",
    }.items():
        with pytest.raises(InvalidInput, match=message):
            observe(put(tmp_path, "log.jsonl", good + line + "\n"), layout=layout)
    path = put(tmp_path, "log.jsonl", '{"r":0,"user_id":"a"}\n' * 2)
    with pytest.raises(InvalidInput, match=r"no line has the key 's'.*--status-column"):
        observe(path, layout=layout)


def test_standard_input_needs_a_format_and_a_pipe(monkeypatch):
    pipe(monkeypatch, b"round,client\n0,a\n")
    with pytest.raises(InvalidInput, match="standard input needs --format"):
        observe("-")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    with pytest.raises(InvalidInput, match="is a terminal"):
        observe("-", layout=LogLayout(format="csv"))
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(InvalidInput, match="there is no standard input"):
        observe("-", layout=LogLayout(format="csv"))


def test_standard_input_is_copied_to_a_private_file_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pipe(monkeypatch, b"round,client\n0,a\n3,a\n")
    with open_log("-", layout=LogLayout(format="csv")) as log:
        (folder,) = tmp_path.iterdir()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert log.summary().min_sep == 3
    assert not list(tmp_path.iterdir())


REFUSED_PIPES = {
    "bomb": (gzip.compress(b"round,client\n" + b"0,a\n" * 30_000_000, 9), "decompresses to more"),
    "zlib": (zlib.compress(b"round,client\n0,a\n"), "is compressed; decompress it"),
    "empty": (b"", "is empty"),
    "bad row": (b"round,client\nx,a\n", "standard input: row 1: a round is a whole number"),
    "NUL": (b"round,client\n0,a\0\n", "standard input: line 2 has a NUL byte"),
    "two ids": (b"round,client\n0,a\n1, a\n", "standard input: row 1 has client 'a' and row 2"),
}


@pytest.mark.parametrize(("content", "message"), REFUSED_PIPES.values(), ids=REFUSED_PIPES.keys())
def test_standard_input_is_checked_like_a_file(monkeypatch, content, message):
    pipe(monkeypatch, content)
    with pytest.raises(InvalidInput, match=message) as refusal:
        observe("-", layout=LogLayout(format="csv"))
    assert "standard input" in str(refusal.value)
    assert "/" not in str(refusal.value)


def test_the_ledger_of_a_run_keeps_names_as_they_are(tmp_path):
    keys = packed(np.arange(len(NAMES), dtype=np.uint64))
    everybody = np.ones(len(NAMES), np.bool_)
    cohorts = [Cohort(i, row, keys, None, tuple(NAMES), len(NAMES)) for i, row in enumerate((0, 3))]
    rows = [rows_of(cohort, everybody) for cohort in cohorts]
    (tmp_path / "ledger.csv").write_bytes(HEADER.encode() + b"".join(rows))
    with open_log(tmp_path / "ledger.csv") as log:
        observed = log.summary()
        ids = {client for contacts in log._contacts("") for client in contacts.ids}
    assert (observed.clients, observed.min_sep, ids) == (len(NAMES), 3, {*NAMES})
