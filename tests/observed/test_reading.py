"""What is accepted as a log, and how everything else is refused: one line that teaches."""

import gzip
import os
import random

import polars as pl
import pytest

from dpftrl.errors import InvalidInput, TooLarge
from dpftrl.observed import observe, open_log

GOOD_JSON = '{"round": 1, "client": "a"}\n'


def put(folder, name, content):
    path = folder / name
    if isinstance(content, dict):
        pl.DataFrame(content, strict=False).write_parquet(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


ACCEPTED = {
    "whole floats": ("log.csv", "round,client\n0,a\n3.0,a\n"),
    "exponents": ("log.csv", "round,client\n0,a\n3e0,a\n"),
    "spaces around rounds": ("log.csv", "round,client\n 0,a\n3 ,a\n"),
    "other columns, any order": ("log.csv", "loss,client,x,round\n0.5,a,,0\n,a,1,3\n"),
    "no last line break": ("log.csv", "round,client\n0,a\n3,a"),
    "windows": ("log.csv", "round,client\r\n0,a\r\n3,a\r\n"),
    "byte order mark": ("log.csv", "\ufeffround,client\n0,a\n3,a\n"),
    "quotes": ("log.csv", '"round","client"\n"0","a"\n"3","a"\n'),
    "empty status": ("log.csv", 'round,client,status\n0,a,\n3,a,""\n'),
    "upper case ending": ("LOG.CSV", "round,client\n0,a\n3,a\n"),
    "brackets in the name": ("log[1]*.csv", "round,client\n0,a\n3,a\n"),
    "brackets in the name of JSON": (
        "log[1]*.jsonl",
        '{"round":0,"client":"a"}\n{"round":3,"client":"a"}\n',
    ),
    "mixed JSON": (
        "log.jsonl",
        '{"round":0,"client":7,"x":[1]}\n\n{"client":"7","round":"3","status":null}\n',
    ),
    "floats in JSON": ("log.ndjson", '{"round":0.0,"client":7}\n{"round":3.0,"client":7}'),
    "ints in Parquet": ("log.parquet", {"round": [0, 3], "client": [7, 7]}),
    "floats in Parquet": ("log.parquet", {"round": [0.0, 3.0], "client": ["a", "a"]}),
    "text in Parquet": ("log.parquet", {"round": ["0", "3"], "client": ["a", "a"]}),
    "bytes in Parquet": ("log.parquet", {"round": [0, 3], "client": [b"\xff\x00", b"\xff\x00"]}),
    "packed CSV": ("log.csv.gz", gzip.compress(b"round,client\n0,a\n3,a\n")),
    "packed JSON": (
        "log.jsonl.gz",
        gzip.compress(b'{"round":0,"client":7}\n{"round":3,"client":7}'),
    ),
}


@pytest.mark.parametrize(("name", "content"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_one_client_twice(tmp_path, name, content):
    found = observe(put(tmp_path, name, content))
    assert (found.clients, found.participations, found.min_sep) == (1, 2, 3)


def test_ids_are_compared_to_the_letter(tmp_path):
    path = put(tmp_path, "log.csv", "round,client\n0,a\n1,A\n2, a\n3,a \n4,0\n5,00\n")
    assert observe(path).clients == 6


def csv(*lines):
    return "log.csv", "\n".join(["round,client,status", *lines, ""])


def json(line):
    return "log.jsonl", GOOD_JSON + line + "\n" + GOOD_JSON


REFUSED = {
    "unknown ending": ("log.txt", "round,client\n", "must end in one of .csv"),
    "no bytes": ("log.csv", "", "is empty"),
    "no bytes of JSON": ("log.jsonl", "", "is empty"),
    "no bytes of Parquet": ("log.parquet", "", "is empty"),
    "only blank lines": ("log.csv", "\n\n", "cannot be read as CSV"),
    "only blank lines of JSON": ("log.jsonl", "\n \n", "holds no participation"),
    "header only": ("log.csv", "round,client\n", "holds no participation"),
    "no rows": ("log.parquet", {"round": [], "client": []}, "holds no participation"),
    "no round": ("log.csv", "when,client\n1,a\n", "no column 'round'; its columns are 'when', 'c"),
    "no client": ("log.jsonl", '{"round":1,"who":2}\n', "no column 'client'; .* 'round', 'who'"),
    "no client in Parquet": ("log.parquet", {"round": [1]}, "no column 'client'"),
    "two clients": ("log.csv", "round,client,client\n1,a,b\n", "two columns 'client'"),
    "semicolons": ("log.csv", "round;client\n1;a\n", "no column 'round'"),
    "text": (*csv("1,a,", "x,b,"), "row 2: a round is a whole number, got 'x'"),
    "fraction": (*csv("2.5,a,"), "row 1: a round is a whole number, got '2.5'"),
    "not a number": (*csv("nan,a,"), "whole number, got 'nan'"),
    "infinite": (*csv("inf,a,"), "whole number, got 'inf'"),
    "no round in a row": (*csv("1,a,", ",a,"), "row 2 has no round"),
    "blank line": (*csv("1,a,", "", "2,a,"), "row 2 has no round .a blank line"),
    "negative": (*csv("-1,a,"), "row 1: rounds count from 0 .*got -1"),
    "too large": (*csv("1000000000000000000,a,"), "row 1: the last of"),
    "larger than any integer": (*csv("99999999999999999999999,a,"), "whole number, got '9999"),
    "float that is not exact": (*csv("9007199254740994.0,a,"), "whole number"),
    "no id": (*csv("1,a,", "1,,"), "row 2 has no client"),
    "empty id": (*csv('1,"",'), "row 1 has no client"),
    "short row": (*csv("1"), "row 1 has no client"),
    "long row": (*csv("1,a,,x"), "cannot be read as CSV: found more fields"),
    "status": (*csv("1,a,counted", "1,b,droped"), "row 2: a status is .*got 'droped'"),
    "open quote": (*csv('1,"a,', "2,b,"), "cannot be read as CSV"),
    "not UTF-8": ("log.csv", b"round,client\n1,\xff\xfe\n", "cannot be read as CSV: invalid utf-8"),
    "UTF-16": ("log.csv", "round,client\n1,a\n".encode("utf-16"), "no column 'round'"),
    "binary": ("log.csv", random.Random(1).randbytes(999), "log.csv "),
    "binary JSON": ("log.jsonl", random.Random(2).randbytes(999), "line 1 is not"),
    "not JSON": (*json('{"round": 1, "cli'), "line 2 is not one JSON object a line, got '{\"round"),
    "two objects a line": (*json('{"round":1,"client":2} {}'), "line 2 is not one JSON object"),
    "array": (*json("[1, 2]"), "line 2 is not one JSON object a line, got '.1, 2.'"),
    "array of all": ("log.json", f"[{GOOD_JSON}]", "line 1 is not one JSON object"),
    "text in JSON": (*json('{"round":"x","client":2}'), "row 2: a round is a whole number"),
    "true": (*json('{"round":true,"client":2}'), "row 2: a round is a whole number, got 'true'"),
    "null": (*json('{"round":null,"client":2}'), "row 2 has no round"),
    "no id in JSON": (*json('{"round":1,"client":null}'), "row 2 has no client"),
    "id left out": (*json('{"round":1}'), "row 2 has no client"),
    "status that is a number": (*json('{"round":1,"client":2,"status":1}'), "got '1'"),
    "no round in Parquet": ("log.parquet", {"round": [1, None], "client": ["a", "b"]}, "row 2 has"),
    "fraction in Parquet": ("log.parquet", {"round": [1, 1.5], "client": ["a", "b"]}, "got 1.5"),
    "boolean in Parquet": ("log.parquet", {"round": [True], "client": ["a"]}, "got True"),
    "no id in Parquet": ("log.parquet", {"round": [1], "client": [None]}, "row 1 has no client"),
    "list in Parquet": ("log.parquet", {"round": [1], "client": [[1, 2]]}, "cannot be read"),
    "binary Parquet": ("log.parquet", random.Random(3).randbytes(999), "cannot be read as Parquet"),
    "cut packed CSV": ("log.csv.gz", gzip.compress(b"round,client\n1,a\n")[:-9], "cannot be read"),
    "not packed": ("log.jsonl.gz", GOOD_JSON, "cannot be read as JSON lines: Not a gzipped"),
}


@pytest.mark.parametrize(("name", "content", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_log_is_refused_in_one_line(tmp_path, name, content, says):
    path = put(tmp_path, name, content)
    with pytest.raises(InvalidInput, match=says) as refusal:
        observe(path)
    assert str(path) in str(refusal.value)
    assert len(str(refusal.value)) < 600


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.csv")
    for path, says in {
        tmp_path / "nowhere.csv": "No such file",
        tmp_path: "is a folder",
        tmp_path / "pipe.csv": "is not a file",
        "bad\0name.csv": "null byte",
    }.items():
        with pytest.raises(InvalidInput, match=says):
            observe(path)


def test_a_cut_parquet_is_refused(tmp_path):
    whole = put(tmp_path, "whole.parquet", {"round": range(99), "client": range(99)}).read_bytes()
    for length in range(1, len(whole), 97):
        with pytest.raises(InvalidInput, match="cannot be read as Parquet"):
            observe(put(tmp_path, "cut.parquet", whole[:length]))


def test_a_bad_row_far_down_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("dpftrl.observed.reading.ROWS_PER_BATCH", 100)
    lines = [f"{i // 10},c{i % 977}" for i in range(5000)]
    lines[4321] = "432,"
    path = put(tmp_path, "log.csv", "\n".join(["round,client", *lines]))
    with pytest.raises(InvalidInput, match="row 4,322 has no client"):
        observe(path)


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    class Full:
        def write(self, _):
            raise OSError(28, "No space left on device")

        def close(self): ...

    monkeypatch.setattr("tempfile.TemporaryFile", Full)
    path = put(tmp_path, "log.csv", "round,client\n1,a\n2,b\n")
    with (
        pytest.raises(TooLarge, match=r"No space left on device.*TMPDIR"),
        open_log(path, rows_per_partition=1),
    ):
        pass


def test_a_damaged_parquet_never_loses_rows_silently(tmp_path, monkeypatch):
    """Values may change without a trace, but what polars gives up on must not be left out."""
    monkeypatch.setattr("dpftrl.observed.reading.ROWS_PER_BATCH", 10)
    path = tmp_path / "damaged.parquet"
    pl.DataFrame({"round": range(99), "client": range(99)}).write_parquet(path, row_group_size=10)
    content, draw = path.read_bytes(), random.Random(1)
    for _ in range(40):
        damaged = bytearray(content)
        for _ in range(3):
            damaged[draw.randrange(len(damaged) // 2)] = draw.randrange(256)  # not the footer
        path.write_bytes(damaged)
        try:
            found = observe(path)
        except InvalidInput:
            continue
        assert found.participations + found.duplicate_rows == 99
