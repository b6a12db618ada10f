"""Which logs are accepted, and the one-line messages with which all others are refused."""

import gzip
import os
import random

import numpy as np
import plain_log
import polars as pl
import pytest

from dpftrl._internal.client_ids import shown
from dpftrl.accounting.logs import ParticipationLog, observe, open_log
from dpftrl.cli.main import main
from dpftrl.errors import InvalidInput, TooLarge
from dpftrl.mechanisms import BinaryTree

NOISE = ("--noise-multiplier", "1", "--delta", "1e-7")
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
    "blank lines before the header": ("log.csv", "\n\r\nround,client\n0,a\n3,a\n"),
    "quotes and commas": ("log.csv", 'round,client,x\n0,a,"1,2"\n3,"a","say ""x"""\n'),
    "padded ids": ("log.csv", "round,client\n0,007\n3,007\n"),
    "spaces around all ids": ("log.csv", "round,client\n0, a \n3, a \n"),
    "whole floats as ids": ("log.parquet", {"round": [0, 3], "client": [7.0, 7.0]}),
    "the names of keys as values": (
        "log.jsonl",
        '{"round":0,"client":"client","x":"status"}\n{"round":3,"client":"client","status":null}\n',
    ),
    "keys of inner objects": (
        "log.jsonl",
        '{"round":0,"client":"a","x":{"client":"b"}}\n{"round":3,"x":"\\u0063","client":"a"}\n',
    ),
    "whole floats in JSON": ("log.jsonl", '{"round":0,"client":7.0}\n{"round":3,"client":7}\n'),
    "JSON in two packed parts": (
        "log.jsonl.gz",
        gzip.compress(b'{"round":0,"client":7}\n') + gzip.compress(b'{"round":3,"client":7}'),
    ),
    "packed CSV": ("log.csv.gz", gzip.compress(b"round,client\n0,a\n3,a\n")),
    "packed JSON": (
        "log.jsonl.gz",
        gzip.compress(b'{"round":0,"client":7}\n{"round":3,"client":7}'),
    ),
}


@pytest.mark.parametrize(("name", "content"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_accepted_notations_give_one_client_with_two_rounds(tmp_path, name, content):
    observed = observe(put(tmp_path, name, content))
    assert (observed.clients, observed.participations, observed.min_sep) == (1, 2, 3)


SAME_CLIENT = {
    "space before": ("a", " a"),
    "space after": ("a", "a "),
    "no-break space": ("a", "a\u00a0"),
    "zero-width space": ("a", "\u200ba"),
    "two spaces and one": (" a", "  a"),
    "decomposed": ("\u00e9", "e\u0301"),
    "zeros": ("7", "007"),
    "zeros and more zeros": ("07", "007"),
    "plus": ("7", "+7"),
    "decimal": ("7", "7.0"),
    "exponent": ("7", "7e0"),
    "large numbers": ("1e20", "1" + "0" * 20),
}


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(("one", "other"), SAME_CLIENT.values(), ids=SAME_CLIENT.keys())
def test_one_client_written_in_two_ways_is_refused(tmp_path, one, other, ending):
    """If it were counted as two clients, min-sep would be 9 instead of 1."""
    rows = [(0, one, None), (1, other, None), (9, one, None)]
    path = plain_log.write(tmp_path / f"log{ending}", rows)
    with pytest.raises(InvalidInput, match="differ only in how they are written") as refusal:
        observe(path)
    assert f"row 1 has client {shown(one)} and row 2 has client {shown(other)}" in str(
        refusal.value
    )
    assert str(path) in str(refusal.value)
    assert len(str(refusal.value)) < 600
    # The negative control: nothing else about this log is refused.
    assert observe(plain_log.write(path, [rows[0], rows[2]])).min_sep == 9


@pytest.mark.parametrize("partitions", [1, 7])
def test_the_same_client_far_apart_is_found(tmp_path, monkeypatch, partitions):
    monkeypatch.setattr("dpftrl.accounting.logs.reading.ROWS_PER_BATCH", 100)
    lines = [f"{i},{i % 977:05}" for i in range(5000)]
    path = put(tmp_path, "log.csv", "\n".join(["round,client", *lines]))
    size = 5000 // partitions
    with open_log(path, rows_per_partition=size) as log:
        assert log.summary().clients == 977
    lines[4321] = f"4321,{4321 % 977}"
    put(tmp_path, "log.csv", "\n".join(["round,client", *lines]))
    says = rf"row {4321 % 977 + 1} has client '00413' and row 4,322 has client '413'"
    for ask in (ParticipationLog.summary, lambda log: log.worst_pattern(BinaryTree())):
        with (
            open_log(path, rows_per_partition=size) as log,
            pytest.raises(InvalidInput, match=says),
        ):
            ask(log)


@pytest.mark.parametrize(
    "arguments",
    [
        ("observe", "LOG"),
        ("account", "tree", "--log", "LOG", "--rounds", "16", *NOISE),
    ],
    ids=["observe", "account"],
)
def test_commands_refuse_one_client_written_in_two_ways(tmp_path, capsys, monkeypatch, arguments):
    log = tmp_path / "log.csv"
    command = ["dpftrl", *(str(log) if word == "LOG" else word for word in arguments)]
    monkeypatch.setattr("sys.argv", command)
    for second, code in (("a", 0), (" a", 2)):
        log.write_text(f"round,client\n0,a\n8,{second}\n")
        with pytest.raises(SystemExit) as stop:
            main()
        assert (stop.value.code or 0) == code
        errors = capsys.readouterr().err
    assert errors.startswith("dpftrl: ")
    assert errors.count("\n") == 1
    assert "row 1 has client 'a' and row 2 has client ' a'" in errors


DIFFERENT_CLIENTS = {
    "case": ["a", "A"],
    "spaces inside": ["a b", "ab", "a  b"],
    "padded numbers": ["0000", "0001", "0010", "0100", "1000", "10000"],
    "padded numbers of several lengths": ["07", "008", "9"],
    "numbers": ["1", "10", "100", str(2**53), str(2**53 + 1), "1" * 30],
    "hexadecimal": ["0e12", "00e1", "1e05", "12e4", "120e3"],
    "rooms": ["1.1", "1.10", "2.0"],
    "spaces at the ends of all": [" a", " b", "c "],
    "accents": ["e", "é", "è", "E"],
    "wide letters": ["a", "ａ"],  # noqa: RUF001
}


@pytest.mark.parametrize("ending", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize("clients", DIFFERENT_CLIENTS.values(), ids=DIFFERENT_CLIENTS.keys())
def test_different_clients_are_counted_separately(tmp_path, clients, ending):
    rows = [(i, client, None) for i, client in enumerate([*clients, *clients])]
    observed = observe(plain_log.write(tmp_path / f"log{ending}", rows))
    assert (observed.clients, observed.min_sep) == (len(clients), len(clients))


def test_bytes_that_are_text_are_compared_as_text(tmp_path):
    path = put(tmp_path, "log.parquet", {"round": [0, 1], "client": [b"a", b" a"]})
    with pytest.raises(InvalidInput, match="row 1 has client 'a' and row 2 has client ' a'"):
        observe(path)
    values = [b"\x00\x07", b"\x07", b"\x00\x00 ", b"\x00\x00\t", b"\xff ", b"\xff", b"a"]
    path = put(tmp_path, "log.parquet", {"round": range(len(values)), "client": values})
    assert observe(path).clients == len(values)


def test_float_columns_have_one_client_per_number(tmp_path):
    values = [7.0, 0.0, -0.0, 2.0**53 - 1, 0.5, 7.0]
    observed = observe(put(tmp_path, "log.parquet", {"round": range(6), "client": values}))
    assert (observed.clients, observed.participations, observed.min_sep) == (4, 6, 1)


def csv(*lines):
    return "log.csv", "\n".join(["round,client,status", *lines, ""])


def json(line):
    return "log.jsonl", GOOD_JSON + line + "\n" + GOOD_JSON


REFUSED = {
    "unknown ending": ("log.dat", "round,client\n", "must end in one of .csv.*give --format"),
    "text without a delimiter": ("log.txt", "round,client\n", "ends in .txt.*give --delimiter"),
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
    "semicolons": ("log.csv", "round;client\n1;a\n", "no column 'round'.*--delimiter ';'"),
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
    "not JSON": (*json('{"round": 1, "cli'), "line 2 is not one JSON object, got '{\"round"),
    "two objects a line": (*json('{"round":1,"client":2} {}'), "line 2 is not one JSON object"),
    "array": (*json("[1, 2]"), "line 2 is not one JSON object, got '.1, 2.'"),
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
    "stray quote": (*csv('1,"a,', "2,b,", '3,c",'), "row 1: client 'a,.*2,b,.* has a line break"),
    "stray quote in another column": (
        "log.csv",
        'round,client,note\n0,a,\n1,a,"oops\n2,a,x\n3,a,y"\n4,a,\n',
        "5 lines of data and 3 rows, and row 2 has a field with a line break; a stray quote",
    ),
    "stray quote in a status": (*csv('1,a,"counted', '2,b,counted"'), "row 1: a status is"),
    "line break after a round": (*csv('"1', '",a,'), "2 lines of data and 1 rows, and row 1"),
    "line break in a JSON id": (*json('{"round":1,"client":"a\\nb"}'), "row 2: .* has a line br"),
    "line break in a Parquet id": (
        "log.parquet",
        {"round": [1], "client": ["a\r"]},
        "row 1: .*lin",
    ),
    "space before a quote": (
        *csv("1,a,", '2, "a",'),
        "row 2: client .* has a space before its quo",
    ),
    "id of spaces": (*csv("1,a,", "2,  ,"), "row 2: client '.*' has no visible character"),
    "NUL in an id": (*csv("1,a,", "2,a\0,"), "line 3 has a NUL byte.*write the log again"),
    "NUL in a JSON id": (*json('{"round":1,"client":"a\\u0000"}'), "row 2: client .* has a NUL"),
    "NUL in a Parquet id": (
        "log.parquet",
        {"round": [1], "client": ["a\0"]},
        "row 1: .* has a NUL",
    ),
    "NULs at the end": ("log.csv", "round,client\n1,a\n2,b" + "\0" * 9, "line 3 has a NUL byte"),
    "NULs after the end": ("log.csv", "round,client\n1,a\n" + "\0" * 9, "line 3 has a NUL byte"),
    "NULs in another column": ("log.csv", "x,round,client\n\0,1,a\n", "line 2 has a NUL byte"),
    "NULs at the end of JSON": ("log.jsonl", GOOD_JSON * 2 + "\0" * 9, "line 3 has a NUL byte"),
    "packed NULs": (
        "log.csv.gz",
        gzip.compress(b"round,client\n1,a\n2,b\0\0"),
        "line 3 has a NUL byte",
    ),
    "two ids": (
        *json('{"round":1,"client":"a","client":"b"}'),
        "line 2 has the key 'client' 2 times, with 'a' and 'b'; keep one",
    ),
    "two rounds": (*json('{"round":1,"round":2,"client":"a"}'), "line 2 has the key 'round' 2 ti"),
    "two statuses": (
        *json('{"round":1,"client":"a","status":"abandoned","status":"counted"}'),
        "line 2 has the key 'status' 2 times",
    ),
    "a status of null and another": (
        *json('{"round":1,"client":"a","status":null,"status":"abandoned"}'),
        "line 2 has the key 'status' 2 times",
    ),
    "two ids and a blank line": (
        *json('\n{"round":1,"client":"a","client":"b"}'),
        "line 3 has the key 'client' 2 times",
    ),
    "two ids, one with an escape": (
        *json('{"round":1,"client":"a","\\u0063lient":"b"}'),
        "line 2 has the key 'client' 2 times",
    ),
    "two ids that are numbers": (
        *json('{"round": 1, "client" : 1, "client" : 2}'),
        "line 2 has the key 'client' 2 times, with 1 and 2",
    ),
    "large float in JSON": (*json('{"round":1,"client":1e20}'), "line 2: .* of 2.53 or more"),
    "rounded float in JSON": (
        *json('{"round":1,"client":9007199254740993.0}'),
        "line 2: .*2.53 or",
    ),
    "array as an id": (*json('{"round":1,"client":[1]}'), "line 2: a client's id is a text or"),
    "object as an id": (*json('{"round":1,"client":{"a":1}}'), "line 2: a client's id is a text"),
    "large float": (*csv("1,1e+20,"), "row 1: client '1e.20' is a float of 2.53 or more"),
    "large decimal": (*csv("1,9007199254740993.0,"), "row 1: .* is a float of 2.53 or more"),
    "large float in Parquet": (
        "log.parquet",
        {"round": [1, 2], "client": [1.0, 2.0**53 + 2]},
        "row 2: client 9007199254740994.0 is a float of 2.53 or more",
    ),
    "infinite float in Parquet": ("log.parquet", {"round": [1], "client": [np.inf]}, "row 1: cli"),
    "large short float in Parquet": (
        "log.parquet",
        {"round": [1], "client": np.array([2**24 + 2], np.float32)},
        "row 1: client 16777218.0 is a float of 2.24 or more",
    ),
    "not packed": ("log.jsonl.gz", GOOD_JSON, "cannot be read as JSON lines: Not a gzipped"),
}


@pytest.mark.parametrize(("name", "content", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_log_is_refused_in_one_line(tmp_path, name, content, says):
    path = put(tmp_path, name, content)
    with pytest.raises(InvalidInput, match=says) as refusal:
        observe(path)
    assert str(path) in str(refusal.value)
    assert len(str(refusal.value)) < 600


def test_paths_that_are_not_files_are_refused(tmp_path):
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
    monkeypatch.setattr("dpftrl.accounting.logs.reading.ROWS_PER_BATCH", 100)
    lines = [f"{i // 10},c{i % 977}" for i in range(5000)]
    lines[4321] = "432,"
    path = put(tmp_path, "log.csv", "\n".join(["round,client", *lines]))
    with pytest.raises(InvalidInput, match="row 4,322 has no client"):
        observe(path)


def test_a_full_disk_raises_an_error_that_mentions_tmpdir(tmp_path, monkeypatch):
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
    """Damaged values cannot be detected, but rows that polars cannot read must raise an error."""
    monkeypatch.setattr("dpftrl.accounting.logs.reading.ROWS_PER_BATCH", 10)
    path = tmp_path / "damaged.parquet"
    pl.DataFrame({"round": range(99), "client": range(99)}).write_parquet(path, row_group_size=10)
    content, draw = path.read_bytes(), random.Random(1)
    for _ in range(40):
        damaged = bytearray(content)
        for _ in range(3):
            damaged[draw.randrange(len(damaged) // 2)] = draw.randrange(256)  # not the footer
        path.write_bytes(damaged)
        try:
            observed = observe(path)
        except InvalidInput:
            continue
        assert observed.participations + observed.duplicate_rows == 99


def test_a_missing_polars_is_named_with_the_extra_that_brings_it(tmp_path, monkeypatch):
    (log := tmp_path / "log.csv").write_text("round,client\n0,ann\n")
    monkeypatch.setattr("dpftrl.accounting.logs.log.find_spec", lambda _name: None)
    with (
        pytest.raises(InvalidInput, match=r"needs polars: pip install 'dpftrl\[logs\]'"),
        open_log(log),
    ):
        pass
