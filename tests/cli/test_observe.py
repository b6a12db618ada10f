"""`dpftrl observe`: tables, JSON, warnings and exit codes."""

import io
import json
from functools import partial

import command_line
import pytest

LOG = """round,client,status
0,ann,counted
0,bob,contacted
3,ann,counted
4,bob,
5,cyd,abandoned
"""


@pytest.fixture
def run():
    """Run `dpftrl observe` in this process; return its exit code, output and error output."""
    return partial(command_line.run, "observe")


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(LOG)
    return path


def test_json_has_the_promised_keys(run, log):
    code, out, err = run(log, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out) == {
        "rounds": 6,
        "first_round": 0,
        "empty_rounds": 3,
        "clients": 2,
        "participations": 3,
        "min_sep": 3,
        "max_participations": 2,
        "gaps": [{"from": 3, "to": 3, "number": 1}],
        "counts": [
            {"from": 1, "to": 1, "number": 1},
            {"from": 2, "to": 2, "number": 1},
        ],
        "contacted_clients": 3,
        "contacts": 5,
        "contacted_min_sep": 3,
        "duplicate_rows": 0,
        "duplicate_example": None,
    }


def test_the_table_has_headings_and_readable_numbers(run, log):
    code, out, err = run(log)
    assert (code, err) == (0, "")
    for words in ("log.csv: observed participation", "6 (0 to 5)", "participations", "min-sep"):
        assert words in out
    assert "\x1b" not in out


def test_kept_limits_give_exit_code_0(run, log):
    code, out, err = run(log, "--min-sep", 3, "--max-participations", 2, "--json")
    answer = json.loads(out)
    assert (code, err, answer["broken"], answer["broken_clients"]) == (0, "", [], 0)
    assert answer["limits"] == {"min_sep": 3, "max_participations": 2}


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        (("--min-sep", 3), "min-sep 3"),
        (("--max-participations", 2), "max participations 2"),
        (("--min-sep", 3, "--max-participations", 2), "min-sep 3, max participations 2"),
        (("--min-sep", 4), None),
        ((), None),
    ],
)
def test_kept_limits_are_printed(run, log, limits, kept):
    _, out, _ = run(log, *limits)
    assert ("limits kept" in out) == (kept is not None)
    if kept is not None:
        assert out.endswith(f" clients: {kept}\n")


def test_a_broken_limit_gives_exit_code_1_and_the_table(run, log):
    code, out, err = run(log, "--min-sep", 4, "--max-participations", 1, "--json")
    assert code == 1
    answer = json.loads(out)
    assert answer["broken"] == [
        {"client": "ann", "limit": "min_sep", "rounds": [0, 3], "counted": True},
        {"client": "ann", "limit": "max_participations", "count": 2, "counted": True},
        {"client": "bob", "limit": "max_participations", "count": 2, "counted": False},
    ]
    assert (answer["broken_clients"], answer["broken_counted_clients"]) == (2, 1)
    assert err == (
        "limits broken: 2 client(s), of which 1 in released sums; use the observed guarantee "
        "(dpftrl account --log), not the promised one\n"
    )
    code, out, _ = run(log, "--max-participations", 1)
    assert code == 1
    assert "no, contacted only" in out
    assert "2 participations" in out


@pytest.mark.parametrize("how", [["--json"], []])
def test_duplicates_are_a_warning(run, log, how):
    log.write_text(LOG + "3,ann,counted\n3,ann,\n")
    code, out, err = run(log, *how)
    assert code == 0
    assert err.startswith("warning: 2 counted row(s) repeat a client and round, such as client ann")
    assert err.count("\n") == 1
    if how:
        answer = json.loads(out)
        assert answer["duplicate_rows"] == 2
        assert answer["duplicate_example"] == {"client": "ann", "round": 3, "rows": 3}
        assert answer["participations"] == 3


def test_logs_that_count_from_one(run, log):
    _, out, _ = run(log, "--rounds", "1k", "--json")
    assert json.loads(out)["rounds"] == 1000
    code, _, err = run(log, "--first-round", 1)
    assert code == 2
    assert "rounds count from 1" in err
    log.write_text(LOG.replace("\n0,", "\n1,"))
    _, out, _ = run(log, "--first-round", 1, "--json")
    answer = json.loads(out)
    assert (answer["rounds"], answer["first_round"]) == (5, 1)


def test_control_characters_in_client_ids_are_escaped(run, log):
    log.write_text('round,client\n0,[red]x\n1,[red]x\n0,"a\x1b[1m\x07b"\n1,"a\x1b[1m\x07b"\n')
    _, out, _ = run(log, "--min-sep", 2)
    assert "[red]x" in out
    assert r"'a\x1b[1m\x07b'" in out
    assert "\x1b" not in out


MISTAKES = {
    "no file": ["nowhere.csv"],
    "a folder": ["."],
    "no rounds": ["LOG", "--rounds", "0"],
    "too few rounds": ["LOG", "--rounds", "5"],
    "no min-sep": ["LOG", "--min-sep", "0"],
    "no participations": ["LOG", "--max-participations", "0"],
    "before the first": ["LOG", "--first-round", "-1"],
    "not a number": ["LOG", "--min-sep", "many"],
    "no log": [],
}


@pytest.mark.parametrize("arguments", MISTAKES.values(), ids=MISTAKES.keys())
def test_an_error_is_one_line_and_exit_code_2(run, log, arguments):
    code, out, err = run(*(str(log) if word == "LOG" else word for word in arguments))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dpftrl: ")


OWN = "when;user id;outcome\n1;ann,;ok\n5;ann,;done\n2;bob;sent\n"
NAMED = (
    *("--client-column", "user id", "--round-column", "when", "--status-column", "outcome"),
    *("--status", "counted=ok,done", "--status", "contacted=sent", "--delimiter", ";"),
)
TIMES = "client,time\na,2026-01-01T00:00:00Z\nb,2026-01-01T06:00:00Z\na,2026-01-03T01:00:00Z\n"
TIMED = ("--time-column", "time", "--round-length", "6h")
TREE = ("tree", "--rounds", "16", "--noise-multiplier", "1", "--delta", "1e-7")


def pipe(monkeypatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


@pytest.mark.parametrize("ending", ["csv", "txt", "tsv"])
def test_a_log_with_its_own_names(run, tmp_path, ending):
    path = tmp_path / f"log.{ending}"
    path.write_text(OWN)
    code, out, err = run(path, *NAMED, "--json")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert (answer["clients"], answer["contacted_clients"], answer["min_sep"]) == (1, 2, 4)
    _, out, _ = command_line.run("account", *TREE, "--log", path, *NAMED, "--json")
    assert json.loads(out)["observed"] == answer | {"rounds": 16, "empty_rounds": 14}
    path.write_text(OWN.replace(";", "\t"))
    assert run(path, *NAMED[:-1], r"\t", "--json")[1] == run(path, *NAMED[:-1], "tab", "--json")[1]


def test_values_of_statuses_with_a_comma_are_quoted(run, tmp_path):
    path = tmp_path / "log.csv"
    path.write_text('round,client,status\n0,a,"ok, fine"\n1,a,lost\n')
    _, out, _ = run(
        path, "--status", 'counted="ok, fine", x', "--status", "contacted=lost", "--json"
    )
    assert json.loads(out)["participations"] == 1


def test_a_log_from_standard_input(run, monkeypatch):
    pipe(monkeypatch, LOG)
    code, out, err = run("-", "--format", "csv")
    assert (code, err) == (0, "")
    assert "standard input: observed participation" in out
    pipe(monkeypatch, LOG)
    code, out, _ = command_line.run("account", *TREE, "--log", "-", "--format", "csv", "--json")
    assert (code, json.loads(out)["observed"]["min_sep"]) == (0, 3)
    pipe(monkeypatch, LOG + "3,ann,counted\n")
    err = command_line.refused_in_one_line("account", *TREE, "--log", "-", "--format", "csv")
    assert err.startswith("dpftrl: standard input: client ann is counted 2 times in round 3;")


def test_a_log_with_times(run, tmp_path):
    path = tmp_path / "log.csv"
    path.write_text(TIMES)
    code, out, err = run(path, *TIMED)
    assert (code, err) == (0, "")
    assert "at least 8" in out
    _, out, _ = run(path, *TIMED, "--json")
    answer = json.loads(out)
    assert (answer["min_sep"], answer["from_times"], answer["unseen_rounds"]) == (8, True, 1)
    _, out, _ = run(path, *TIMED, "--first-time", "2025-12-31T23:00:00-01:00", "--json")
    assert json.loads(out)["unseen_rounds"] == 0


def test_account_takes_no_pattern_from_times(tmp_path):
    """The worst client is the bound for the gap and the count, and nothing is tighter than that."""
    path = tmp_path / "log.csv"
    path.write_text(TIMES)
    answer = command_line.answer("account", *TREE, "--log", path, *TIMED)
    assert answer["worst_pattern"]["sensitivity"] == answer["sensitivity"]
    assert answer["worst_pattern"]["client"] is None
    assert answer["min_sep"] == 8
    stated = command_line.answer(
        *("account", *TREE, "--min-sep", 8, "--max-participations", 2),
    )
    assert answer["epsilon"] == stated["epsilon"]


def test_account_refuses_close_times_until_the_start_is_stated(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("client,time\na,2026-01-01T05:00:00Z\na,2026-01-01T07:00:00Z\n")
    call = ("account", *TREE, "--log", path, *TIMED)
    assert "--first-time, the start of the first round" in command_line.refused_in_one_line(*call)
    known = command_line.answer(*call, "--first-time", "2026-01-01T00:00:00Z")
    assert (known["min_sep"], known["max_participations"]) == (1, 2)
    repeated = command_line.answer(*call, "--repeated-rows")
    assert repeated["epsilon"] == known["epsilon"]
    err = command_line.refused_in_one_line(*call, "--first-time", "2026-01-01T02:00:00Z")
    assert "is counted 2 times in round 0; the guarantee" in err


def test_a_plan_is_not_broken_by_the_unknown_start_of_rounds(tmp_path):
    """16 rounds are planned and seen. A 17th is possible, but the plan says that there is none."""
    path, plan = tmp_path / "log.csv", tmp_path / "guarantee.json"
    command_line.answer("account", *TREE, "--min-sep", 4, "--out", plan)
    lines = [f"c{i % 5},{1769882400 + 21600 * i}" for i in range(16)]
    path.write_text("\n".join(["client,time", *lines]))
    code, out, _ = command_line.run("account", plan, "--log", path, *TIMED, "--json")
    assert (code, json.loads(out)["rounds"], json.loads(out)["min_sep"]) == (0, 16, 5)
    path.write_text("\n".join(["client,time", *lines, f"c1,{1769882400 + 21600 * 16}"]))
    code, out, _ = command_line.run("account", plan, "--log", path, *TIMED, "--json")
    assert (code, json.loads(out)["rounds"]) == (1, 18)


def test_a_statement_can_be_made_of_what_account_saved(tmp_path):
    path, saved = tmp_path / "log.csv", tmp_path / "observed.json"
    path.write_text(OWN)
    answer = command_line.answer("account", *TREE, "--log", path, *NAMED, "--out", saved)
    code, out, _ = command_line.run("statement", saved, "--out", tmp_path / "s", "--json")
    assert code == 0
    assert str(answer["epsilon"]) in out


WRONG = {
    "wrong delimiter": (["OWN"], "--delimiter ';'"),
    "no such column": (["LOG", "--client-column", "user"], "--client-column says which one"),
    "unlisted status": (["OWN", *NAMED[:8], "--delimiter", ";"], "got 'sent'; --status says what"),
    "no equals sign": (["LOG", "--status", "ok"], "such as counted=ok,done, got 'ok'"),
    "no meaning": (["LOG", "--status", "fine=ok"], "maps values to counted, contacted, abandoned"),
    "no value": (["LOG", "--status", "contacted="], "an empty status always means counted"),
    "rounds and times": (["LOG", *TIMED, "--round-column", "round"], "not both"),
    "no length": (["LOG", "--time-column", "time"], "--time-column needs --round-length"),
    "no times": (["LOG", "--round-length", "6h"], "give --time-column too"),
    "no time column": (["LOG", *TIMED], "has no column 'time'"),
    "local time": (["LOG", *TIMED, "--time-zone", "Europe/Paris"], "--time-zone can only be UTC"),
    "first round": (["LOG", *TIMED, "--first-round", "1"], "--first-round is for logs with rounds"),
    "no format": (["-"], "standard input needs --format"),
    "unknown format": (["-", "--format", "xml"], "csv, json, parquet, got 'xml'"),
    "other format": (["LOG", "--format", "json"], "is CSV by its ending"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("command", ["observe", "account"])
def test_wrong_options_of_a_log_are_refused_in_one_line(tmp_path, command, arguments, message):
    files = {"LOG": tmp_path / "log.csv", "OWN": tmp_path / "own.csv"}
    files["LOG"].write_text(LOG)
    files["OWN"].write_text(OWN)
    words = [str(files.get(word, word)) for word in arguments]
    start = ["observe"] if command == "observe" else ["account", *TREE, "--log"]
    assert message in command_line.refused_in_one_line(*start, *words)


def test_options_of_a_log_need_a_log():
    for words in (["--client-column", "x"], ["--status", "counted=x"], ["--format", "csv"]):
        err = command_line.refused_in_one_line("account", *TREE, "--min-sep", 4, *words)
        assert "describe a log: give --log" in err


@pytest.mark.parametrize("command", ["observe", "account"])
def test_help_explains_every_option_of_a_log_once(command):
    _, out, _ = command_line.run(command, "--help")
    options = out.partition("Options:")[2].splitlines()
    lines = [line.split()[0] for line in options if line.startswith("  --")]
    columns = ["--client-column", "--round-column", "--status-column", "--status"]
    times = ["--time-column", "--round-length", "--first-time", "--time-zone"]
    expected = [*columns, *times, "--delimiter", "--format"]
    start = lines.index("--client-column")
    assert lines[start : start + len(expected)] == expected


def test_training_on_users_with_commas_and_quotes_in_their_names(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "state"))
    names = [f"{name}{i}{end}" for i, name in enumerate(["Smith", "é", 'a"b'] * 8) for end in ',"']
    lines = [json.dumps({"user": name, "text": "hello you all"}) for name in names]
    (tmp_path / "people.jsonl").write_text("\n".join(lines))
    (tmp_path / "words.txt").write_text("hello\nyou\nall\n")
    (tmp_path / "small.toml").write_text(
        f"""
task = "jsonl"
[data]
path = "{tmp_path}/people.jsonl"
vocabulary = "{tmp_path}/words.txt"
heldout_share = 0.2
[model]
name = "window"
pretraining_steps = 0
sizes = {{ embedding = 2, hidden = 2 }}
[privacy]
rounds = 2
report_goal = 4
epsilon = 30.0
delta = 1e-3
availability = 0.5
[simulation]
least_available = 0.9
most_available = 1.0
"""
    )
    code, _, err = command_line.run("train", tmp_path / "small.toml", "--out", tmp_path / "run")
    assert (code, err.count("refused")) == (0, 0)
    assert command_line.answer("observe", tmp_path / "run")["participations"] >= 8
    assert command_line.run("verify", tmp_path / "run")[0] == 0
