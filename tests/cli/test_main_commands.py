"""Every command: what it prints, in JSON and for people, and how mistakes are reported."""

import json
import subprocess
import sys

import pytest

import dpftrl
from dpftrl.cli.main import main

SETTING = ["--rounds", "2052", "--min-sep", "342"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Run a command line in this process; return its exit code, output and error output."""

    def run_command(*arguments: str):
        monkeypatch.setattr(sys, "argv", ["dpftrl", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        captured = capsys.readouterr()
        return stop.value.code, captured.out, captured.err

    return run_command


def test_help_is_a_short_manual(run):
    code, out, _ = run("--help")
    assert code == 0
    for word in ("mechanisms", "loss", "compare", "show", "--json", "Exit codes"):
        assert word in out


@pytest.mark.parametrize("command", ["mechanisms", "loss", "compare", "show"])
def test_every_command_explains_itself_and_has_json(run, command):
    code, out, _ = run(command, "--help")
    assert code == 0
    assert "--json" in out


def test_loss_has_the_promised_keys(run):
    code, out, err = run("loss", "sqrt", *SETTING, "--json")
    answer = json.loads(out)
    assert (code, err) == (0, "")
    assert answer["max_loss"] == pytest.approx(11.401, abs=5e-4)
    assert answer["rms_loss"] == pytest.approx(10.870, abs=5e-4)
    assert answer["sensitivity_kind"] == "exact"
    assert answer["max_loss"] == pytest.approx(answer["max_error"] * answer["sensitivity"])
    assert answer["rms_loss"] == pytest.approx(answer["rms_error"] * answer["sensitivity"])


def test_loss_says_when_the_sensitivity_is_a_bound(run):
    arguments = ["loss", "toeplitz:1,0,0.5", "--rounds", "50", "--min-sep", "1"]
    _, out, _ = run(*arguments, "--json")
    assert json.loads(out)["sensitivity_kind"] == "upper bound"
    _, out, _ = run(*arguments)
    assert "upper bound" in out
    assert "≤" in out


def test_rounds_between_is_one_less_than_min_sep(run):
    _, between, _ = run("loss", "tree", "--rounds", "2350", "--rounds-between", "437", "--json")
    _, apart, _ = run("loss", "tree", "--rounds", "2350", "--min-sep", "438", "--json")
    assert between == apart


def test_numbers_as_people_write_them(run):
    _, out, _ = run("loss", "blt-b400", "--rounds", "1e9", "--min-sep", "1_000k", "--json")
    answer = json.loads(out)
    assert (answer["rounds"], answer["min_sep"]) == (10**9, 10**6)
    assert answer["max_participations"] == 1000


def test_fixed_epochs_are_never_more_sensitive(run):
    setting = ["--rounds", "24", "--min-sep", "3", "--json"]
    _, fixed, _ = run("loss", "tree", *setting, "--fixed-epochs")
    _, free, _ = run("loss", "tree", *setting)
    assert json.loads(fixed)["sensitivity"] < json.loads(free)["sensitivity"]


def test_compare_sorts_by_the_chosen_loss(run):
    for sort in ("rms", "max"):
        _, out, _ = run("compare", *SETTING, "--sort", sort, "--json")
        losses = [row[f"{sort}_loss"] for row in json.loads(out)["mechanisms"]]
        assert losses == sorted(losses)
        assert len(losses) >= 10


def test_compare_lists_what_it_left_out_and_why(run):
    code, out, err = run("compare", "sqrt", "independent", "--rounds", "1e9", "--min-sep", "1e6")
    assert code == 0
    assert "independent" in out
    assert "left out: sqrt" in err


def test_compare_draws(run, tmp_path):
    for ending in ("png", "svg"):
        picture = tmp_path / f"compare.{ending}"
        code, _, err = run(
            "compare",
            "tree",
            "blt-b400",
            "--rounds",
            "100",
            "--min-sep",
            "10",
            "--plot",
            str(picture),
        )
        assert code == 0
        assert str(picture) in err
        assert picture.stat().st_size > 10_000


def test_files_are_mechanisms_like_any_other(run, tmp_path):
    for name in ("blt-b400", "banded:3", "tree-full"):
        path = tmp_path / "saved.json"
        wanted = dpftrl.MinSep(20, 5)
        dpftrl.save_mechanism(dpftrl.mechanism(name, wanted), path)
        setting = ["--rounds", "20", "--min-sep", "5", "--json"]
        _, from_file, _ = run("loss", str(path), *setting)
        _, by_name, _ = run("loss", name, *setting)
        assert from_file == by_name


def test_show_draws_a_file(run, tmp_path):
    path, picture = tmp_path / "b.json", tmp_path / "b.png"
    dpftrl.save_mechanism(dpftrl.mechanism("blt-b1000"), path)
    code, out, _ = run("show", str(path), "--plot", str(picture))
    assert code == 0
    assert "0.9973412136664378" in out
    assert "█" in out
    assert picture.exists()
    _, out, _ = run("show", str(path), "--rounds", "5", "--json")
    assert len(json.loads(out)["strategy_coefficients"]) == 5


@pytest.mark.parametrize("name", ["tree", "smooth-tree", "tree-full", "banded:4", "independent"])
def test_show_draws_every_kind(run, name):
    code, out, _ = run("show", name, "--rounds", "12")
    assert code == 0
    assert "memory" in out


def test_mechanisms_lists_memory_and_support(run):
    _, out, _ = run("mechanisms", "--json")
    rows = {row["name"]: row for row in json.loads(out)["mechanisms"]}
    assert rows["tree"]["memory"] == 11
    assert rows["blt-b400"]["memory"] == 4
    assert rows["blt-b400"]["rounds_supported"] is None
    assert rows["tree-full"]["rounds_supported"] == 2048
    _, out, _ = run("mechanisms")
    assert "smooth-tree" in out


MISTAKES = {
    "no rounds": ["loss", "tree", "--rounds", "0", "--min-sep", "1"],
    "min-sep below 1": ["loss", "tree", "--rounds", "9", "--min-sep", "0"],
    "negative min-sep": ["loss", "tree", "--rounds", "9", "--min-sep", "-3"],
    "not a number": ["loss", "tree", "--rounds", "nan", "--min-sep", "1"],
    "infinite": ["loss", "tree", "--rounds", "inf", "--min-sep", "1"],
    "not whole": ["loss", "tree", "--rounds", "2.5", "--min-sep", "1"],
    "empty": ["loss", "tree", "--rounds", "", "--min-sep", "1"],
    "no separation": ["loss", "tree", "--rounds", "9"],
    "both separations": [
        "loss",
        "tree",
        "--rounds",
        "9",
        "--min-sep",
        "2",
        "--rounds-between",
        "1",
    ],
    "no participation": [
        *("loss", "tree", "--rounds", "9", "--min-sep", "2", "--max-participations", "0")
    ],
    "near miss": ["loss", "band-sqr:3", *SETTING],
    "no near miss": ["loss", "qqqqqq", *SETTING],
    "bands": ["loss", "band-sqrt:x", *SETTING],
    "zero bands": ["loss", "band-sqrt:0", *SETTING],
    "negative coefficient": ["loss", "toeplitz:1,-0.5", *SETTING],
    "NaN coefficient": ["loss", "toeplitz:1,nan", *SETTING],
    "no coefficients": ["loss", "toeplitz", *SETTING],
    "growing inverse": ["loss", "toeplitz:1,3", *SETTING],
    "growing strategy": ["loss", "banded-inverse:1,-3", *SETTING],
    "lambda above 1": ["loss", "lambda:1.01", *SETTING],
    "two lambdas": ["loss", "lambda:0.5,0.6", *SETTING],
    "parameter too many": ["loss", "tree:4", *SETTING],
    "missing file": ["loss", "nowhere.json", *SETTING],
    "too many rounds": ["loss", "sqrt", "--rounds", "1e12", "--min-sep", "1"],
    "min-sep of a list": ["mechanisms", "--min-sep", "0"],
    "plot ending": ["compare", "tree", "--plot", "x.gif", *SETTING],
    "plot folder": ["compare", "tree", "--plot", "/no/such/folder/x.png", *SETTING],
    "unknown command": ["lose", "tree"],
    "unknown option": ["loss", "tree", "--round", "9"],
    "missing argument": ["loss"],
}


@pytest.mark.parametrize("arguments", MISTAKES.values(), ids=MISTAKES.keys())
def test_an_error_is_one_line_and_exit_code_2(run, arguments):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dpftrl: ")
    assert err.count("\n") == 1


BAD_BLT = {
    "theta above 1": '{"theta": [1.0000001], "omega": [0.1]}',
    "negative omega": '{"theta": [0.5], "omega": [-0.1]}',
    "huge": '{"theta": [1e999], "omega": [0.1]}',
    "uneven": '{"theta": [0.5, 0.4], "omega": [0.1]}',
    "text": '{"theta": "0.5", "omega": [0.1]}',
}


@pytest.mark.parametrize("parameters", BAD_BLT.values(), ids=BAD_BLT.keys())
def test_a_bad_file_is_one_line_and_exit_code_2(run, tmp_path, parameters):
    path = tmp_path / "bad.json"
    path.write_text(
        '{"format": "dpftrl mechanism", "version": 1, "family": "blt", "parameters": '
        + parameters
        + "}"
    )
    code, out, err = run("loss", str(path), *SETTING)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_misspelled_command_gets_a_suggestion(run):
    assert "band-sqrt" in run("loss", "band-sqr:3", *SETTING)[2]


def test_output_for_a_pipe_has_no_colour_and_closes_quietly():
    command = [sys.executable, "-m", "dpftrl", "mechanisms"]
    printed = subprocess.run(command, capture_output=True, check=True)
    assert b"\x1b" not in printed.stdout
    closed = subprocess.run(
        f"{sys.executable} -m dpftrl mechanisms --json | head -1",
        shell=True,
        capture_output=True,
        check=True,
    )
    assert closed.stderr == b""


def test_importing_the_library_is_light():
    heavy = "{'jax', 'matplotlib', 'scipy', 'click', 'rich', 'numba', 'safetensors'}"
    code = f"import sys, dpftrl; print({heavy} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert loaded.stdout.strip() == b"set()"


def test_the_public_api_is_complete():
    assert all(hasattr(dpftrl, name) for name in dpftrl.__all__)
    assert {"MinSep", "BLT", "mechanism", "load_mechanism"} <= set(dpftrl.__all__)


TARGET = ["--rounds", "60", "--min-sep", "12"]


def test_optimize_blt_has_the_promised_keys(run, tmp_path):
    saved = tmp_path / "best.json"
    code, out, err = run(
        "optimize",
        "blt",
        *TARGET,
        "--buffers",
        "2",
        "--objective",
        "rms",
        "--json",
        "--out",
        str(saved),
    )
    answer = json.loads(out)
    assert code == 0
    assert str(saved) in err
    assert {"theta", "omega", "max_loss", "rms_loss", "sensitivity", "seconds"} <= answer.keys()
    assert answer["ratio_to_best_toeplitz"] >= 1 - 1e-6
    assert dpftrl.load_mechanism(saved) == dpftrl.BLT(answer["theta"], answer["omega"])
    _, again, _ = run("loss", str(saved), *TARGET, "--json")
    assert json.loads(again)["rms_loss"] == answer["rms_loss"]


def test_optimize_over_ranges_prints_the_regrets(run):
    ranges = ["--rounds", "40..80", "--min-sep", "8..16", "--buffers", "2"]
    _, out, _ = run("optimize", "blt", *ranges, "--json")
    answer = json.loads(out)
    assert answer["worst_regret"] == max(row["regret"] for row in answer["regrets"])
    assert {row["rounds"] for row in answer["regrets"]} >= {40, 80}
    _, out, _ = run("optimize", "blt", *ranges)
    assert f"{answer['worst_regret']:.4f}" in out


@pytest.mark.parametrize(
    "family",
    [
        ["gblt", "--buffers", "2"],
        ["band-toeplitz", "--bands", "6"],
        ["bandmf", "--bands", "6"],
        ["band-inverse", "--bands", "3"],
    ],
    ids=lambda f: f[0],
)
def test_optimizers_share_options_and_keys(run, tmp_path, monkeypatch, family):
    monkeypatch.setenv("DPFTRL_CACHE", str(tmp_path))
    saved = tmp_path / "found.json"
    code, out, _ = run("optimize", *family, *TARGET, "--json", "--out", str(saved))
    answer = json.loads(out)
    assert code == 0
    assert answer["rms_loss"] <= answer["max_loss"]
    _, again, _ = run("loss", str(saved), *TARGET, "--json")
    assert json.loads(again)["rms_loss"] == pytest.approx(answer["rms_loss"], rel=1e-12)
    code, out, _ = run("optimize", *family, *TARGET)
    assert code == 0
    assert "gradient" in out


@pytest.mark.parametrize("family", [["blt", "--buffers", "2"], ["bandmf", "--bands", "6"]])
def test_optimize_for_a_cool_down_with_momentum(run, tmp_path, monkeypatch, family):
    monkeypatch.setenv("DPFTRL_CACHE", str(tmp_path))
    server = ["--momentum", "0.9", "--schedule", "cooldown:last-quarter:0.05"]
    _, plain, _ = run("optimize", *family, *TARGET, "--json")
    code, out, _ = run("optimize", *family, *TARGET, *server, "--json")
    assert code == 0
    assert json.loads(out)["rms_loss"] > json.loads(plain)["rms_loss"]


IMPOSSIBLE = {
    "no buffers": ["blt", *TARGET, "--buffers", "0"],
    "more buffers than rounds": ["blt", "--rounds", "4", "--min-sep", "2", "--buffers", "5"],
    "buffers that are no number": ["blt", *TARGET, "--buffers", "some"],
    "no such objective": ["blt", *TARGET, "--objective", "mean"],
    "upside down": ["blt", "--rounds", "400..100", "--min-sep", "10"],
    "no bandmf for max": ["bandmf", *TARGET, "--bands", "4", "--objective", "max"],
    "range of bands": ["bandmf", "--rounds", "40..80", "--min-sep", "10", "--bands", "4"],
    "more bands than rounds": ["band-toeplitz", *TARGET, "--bands", "61"],
    "no bands": ["band-inverse", *TARGET, "--bands", "0"],
    "momentum": ["blt", *TARGET, "--momentum", "1"],
    "schedule": ["blt", *TARGET, "--schedule", "warmup"],
    "short schedule": ["blt", *TARGET, "--schedule", "1,0.5"],
    "wrong ending": ["blt", *TARGET, "--out", "best.txt"],
    "no such family": ["tree", *TARGET],
}


@pytest.mark.parametrize("arguments", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_an_impossible_optimisation_is_one_line_and_exit_code_2(run, arguments):
    code, out, err = run("optimize", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dpftrl: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "command", [["account", "--noise-multiplier", "5"], ["calibrate", "--epsilon", "2"]]
)
def test_noise_that_outgrows_float64_has_no_guarantee(run, command):
    limits = ["--rounds", "150", "--min-sep", "50", "--delta", "1e-8"]
    code, out, err = run(command[0], "toeplitz:1,1.5", *command[1:], *limits)
    assert (code, out) == (2, "")
    assert "float64 would lose Z" in err
