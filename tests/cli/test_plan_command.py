"""`dpftrl plan`: the table, the JSON, pictures, saved plans, and every mistake."""

import contextlib
import io
import json
import math
import re
import subprocess
import sys
from decimal import Decimal
from unittest.mock import patch

import pytest
from command_line import answer, refused_in_one_line, run

from dpftrl import MinSep, account
from dpftrl._internal.formatting import rounded_up
from dpftrl.cli import plan as plan_module
from dpftrl.cli.main import main
from dpftrl.optimize import optimize_blt
from dpftrl.plan import Fleet, candidates, load_plan

BASE = {
    "--population": "57",
    "--report-goal": "10",
    "--availability": "0.9",
    "--rounds": "12",
    "--delta": "1e-6",
    "--epsilon": "2.5",
    "--buffers": "1",
}
LABELS = ["blt", "blt-robust", "blt-b400", "tree", "tree-full", "band-toeplitz", "bandmf"]
SCENARIOS = ["min_sep_half", "min_sep_double", "rounds_half", "rounds_double"]
PARTICIPATION = MinSep(12, 5)


@pytest.fixture(scope="module", autouse=True)
def quickly(tmp_path_factory):
    """Without the user's cache, and without the robust BLT, which takes longest."""
    plain = optimize_blt(PARTICIPATION, 1, "rms")
    with pytest.MonkeyPatch.context() as change:
        change.setenv("DPFTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        change.setattr(candidates, "optimize_robust_blt", lambda *_: plain)
        yield


def line(given: dict[str, str] | None = None, without: tuple[str, ...] = ()) -> list[str]:
    """The command, with some options of the base line changed."""
    chosen = {name: value for name, value in BASE.items() if name not in without} | (given or {})
    return ["plan", *(part for pair in chosen.items() for part in pair)]


@pytest.fixture(scope="module")
def printed():
    return answer(*line())


@pytest.fixture(scope="module")
def tables():
    code, out, err = run(*line(), "--extrapolate")
    assert (code, err) == (0, "")
    return out


def rows(table: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in text.strip()[1:-1].split("│")]
        for text in table.splitlines()
        if text.strip().startswith("│")
    ]
    return {first.removesuffix(" *"): rest for first, *rest in cells}


def test_json_has_the_promised_keys(printed):
    assert (printed["population"], printed["report_goal"], printed["availability"]) == (57, 10, 0.9)
    assert (printed["rounds"], printed["min_sep"], printed["max_participations"]) == (12, 5, 3)
    assert (printed["delta"], printed["parameters"], printed["timer_rounds"]) == (1e-6, 10**6, None)
    assert [row["name"] for row in printed["mechanisms"]] == LABELS
    assert printed["left_out"] == []
    for row in printed["mechanisms"]:
        assert 2.5 * (1 - 1e-6) <= row["epsilon"] <= 2.5
        assert row["rho"] == row["mu"] ** 2 / 2
        ideal = row["sensitivity"] / row["noise_multiplier"]
        assert ideal <= row["mu"] <= ideal * (1 + 1e-6)  # rounding in the noise buffers
        assert list(row["epsilon_if"]) == SCENARIOS
        assert row["rms_loss"] <= row["max_loss"]
    walks = printed["extrapolation"]
    assert list(walks) == ["report_goal", "rounds", "min_sep"]
    at_the_plan = [point for point in walks["rounds"] if point["rounds"] == 12]
    (chosen,) = [row for row in printed["mechanisms"] if row["recommended"]]
    assert chosen["name"] == printed["recommended"]["name"]
    assert at_the_plan[0]["epsilon"][chosen["name"]] == chosen["epsilon"]
    assert (at_the_plan[0]["noise_scale"], at_the_plan[0]["min_sep"]) == (1, 5)


def test_the_table_says_the_same_and_never_less(printed, tables):
    above, _, below = tables.partition("epsilon at delta")
    shown, otherwise = rows(above), rows(below.partition("epsilon by")[0])
    for row in printed["mechanisms"]:
        noise_multiplier, rho, epsilon, rms, most, _ = shown[row["name"]]
        planned, *scenarios = otherwise[row["name"]]
        assert planned == epsilon.removeprefix("≤ ")
        pairs = [(noise_multiplier, row["noise_multiplier"]), (rho, row["rho"])]
        pairs += [(epsilon.removeprefix("≤ "), row["epsilon"])]
        pairs += list(zip(scenarios, row["epsilon_if"].values(), strict=True))
        for cell, number in pairs:
            if number is None:
                assert cell == "-"
            else:
                assert Decimal(repr(number)) <= Decimal(cell) <= Decimal(repr(number * 1.001))
        assert float(rms) == pytest.approx(row["rms_loss"], rel=1e-3)
        assert float(most) == pytest.approx(row["max_loss"], rel=1e-3)
    assert shown["blt-b400"][5] == "32 MB"


def test_the_table_is_plain_and_whole(tables):
    assert "\x1b" not in tables
    assert "…" not in tables
    assert "12 rounds, min-sep 5, at most 3 participation(s)" in tables
    assert "epsilon at delta 1e-06" in tables


def test_extrapolate_prints_every_point_and_never_less(printed, tables):
    for along in ("report goal", "rounds", "min sep"):
        _, _, table = tables.partition(f"epsilon by {along}\n")
        points = printed["extrapolation"][along.replace(" ", "_")]
        lines = [text for text in table.splitlines() if text.strip().startswith("│")]
        for point, text in zip(points, lines, strict=False):
            goal, _, rounds, min_sep, cap, *epsilons = text.strip()[1:-1].split("│")
            assert (int(goal), int(rounds), int(min_sep), int(cap)) == (
                *(point["report_goal"], point["rounds"], point["min_sep"]),
                point["max_participations"],
            )
            for cell, number in zip(epsilons, point["epsilon"].values(), strict=True):
                assert Decimal(cell.strip()) >= Decimal(repr(number))


def test_the_fleet_decides_min_sep():
    given = {"--population": "4.21k", "--report-goal": "100", "--availability": "0.5"}
    timer = {"--timer-days": "1.1", "--rounds-per-day": "10"}
    slow = answer(*line({**given, "--over-selection": "1.3"}))
    assert slow["min_sep"] == Fleet(4210, 100, 0.5, 1.3).min_sep() == 16
    timed = answer(*line({**given, **timer}))
    assert (timed["min_sep"], timed["timer_rounds"]) == (11, 11)


def test_a_noise_multiplier_is_that_of_the_blt():
    given = {"--noise-multiplier": "3.7", "--max-participations": "2", "--parameters": "6.5k"}
    printed = answer(*line(given, without=("--epsilon",)), "--objective", "max")
    blt, *others = printed["mechanisms"]
    assert blt["noise_multiplier"] == 3.7
    assert (printed["max_participations"], printed["parameters"], printed["objective"]) == (
        *(2, 6500),
        "max",
    )
    noise = [  # RmsError times sigma
        row["rms_loss"] / row["sensitivity"] * row["noise_multiplier"]
        for row in printed["mechanisms"]
    ]
    assert noise == pytest.approx([noise[0]] * len(noise), rel=1e-9)
    assert {row["memory_bytes"] % (6500 * 8) for row in others} == {0}


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_plot_draws(tmp_path, ending):
    picture = tmp_path / f"plan.{ending}"
    code, out, _ = run(*line(), "--plot", picture)
    assert code == 0
    assert "mechanism" in out
    start = {"png": b"\x89PNG", "svg": b"<?xml"}[ending]
    assert picture.read_bytes().startswith(start)
    assert picture.stat().st_size > 10_000
    if ending == "svg":
        assert b"report goal" in picture.read_bytes()


@pytest.mark.parametrize("name", ["plan.gif", "plan", "no/such/folder/plan.png", "plan.PNG.txt"])
def test_a_plot_that_cannot_be_is_refused_before_anything_is_written(tmp_path, name):
    saved = tmp_path / "plan.json"
    refused_in_one_line(*line(), "--plot", tmp_path / name, "--out", saved)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("label", [None, "blt", "tree-full", "band-toeplitz", "bandmf"])
def test_the_chosen_row_is_saved(printed, tmp_path, label):
    path = tmp_path / "plan.json"
    code, _, err = run(*line(), "--out", path, *([] if label is None else ["--choose", label]))
    assert code == 0
    best = printed["recommended"]["name"]
    which = "recommended" if label in (None, best) else "chosen"
    assert f"saved: {path}: {label or best}, the {which} row\n" in err
    plan = load_plan(path)
    (row,) = [
        row
        for row in printed["mechanisms"]
        if row["name"] == (label or printed["recommended"]["name"])
    ]
    assert plan.noise_multiplier == row["noise_multiplier"]
    assert plan.guarantee.epsilon == row["epsilon"]
    assert plan.participation == PARTICIPATION
    assert plan.fleet == Fleet(57, 10, 0.9)
    assert plan.guarantee == account(plan.mechanism, PARTICIPATION, plan.noise_multiplier, 1e-6)


@pytest.mark.parametrize("label", ["sqrt", "BLT", "", "blt ", "[bold]blt[/bold]"])
def test_an_unknown_choice_is_refused_and_nothing_written(tmp_path, label):
    picture = tmp_path / "plan.png"
    message = refused_in_one_line(
        *line(), "--choose", label, "--out", tmp_path / "plan.json", "--plot", picture
    )
    assert "band-toeplitz" in message
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_choice_is_refused_even_if_nothing_is_saved():
    assert "blt-robust" in refused_in_one_line(*line(), "--choose", "sqrt")


def test_a_choice_without_a_file_is_refused():
    assert "--out" in refused_in_one_line(*line(), "--choose", "tree")


def test_the_help_text_shows_the_defaults():
    _, manual, _ = run("plan", "--help")
    words = " ".join(manual.split())
    for option, default in {
        "availability": "1.0",
        "over-selection": "1.0",
        "parameters": "1M",
        "buffers": "the fewest that are nearly as good as more",
        "objective": "rms",
        "choose": "the recommended row",
        "rounds": "--days x --rounds-per-day",
        "report-goal": "the largest that costs no privacy",
    }.items():
        assert re.search(rf" --{option} [^-]*(--out [^-]*)?\[default: {default}\]", words)
    assert "Save one row as a plan" in words


@pytest.mark.parametrize(("delta", "warned"), [("0.1", 1), ("0.018", 1), ("0.017", 0)])
def test_a_delta_above_one_over_population_gives_a_warning(delta, warned):
    code, out, err = run(*line({"--delta": delta}), "--json")
    assert (code, err.count("\n")) == (0, warned)
    assert err.startswith("warning: delta") == bool(warned)
    assert json.loads(out)["mechanisms"]


def test_a_row_that_was_left_out_cannot_be_chosen(monkeypatch, tmp_path):
    monkeypatch.setattr(candidates, "QUICK_BANDMF", 11)
    chosen = ("--choose", "bandmf", "--out", tmp_path / "plan.json")
    refused_in_one_line(*line(), *chosen)
    assert list(tmp_path.iterdir()) == []
    printed = answer(*line())
    assert [row["name"] for row in printed["left_out"]] == ["bandmf"]
    assert "--with-bandmf" in printed["left_out"][0]["note"]
    _, table, _ = run(*line())
    assert "bandmf: left out" in table
    code, _, _ = run(*line(), "--with-bandmf", *chosen)
    assert code == 0
    assert load_plan(tmp_path / "plan.json").mechanism.rounds == 12


def test_a_plan_that_cannot_be_saved_is_refused_before_anything_is_computed(tmp_path):
    with patch.object(plan_module, "solve_fleet") as computed:
        for name in ("plan.txt", "plan", "no/such/folder/plan.json", "."):
            refused_in_one_line(*line(), "--out", tmp_path / name)
    assert not computed.called
    assert list(tmp_path.iterdir()) == []


WIDE = {
    "little rho": line({"--epsilon": "0.03", "--delta": "1e-10", "--report-goal": "50"}),
    "much rho": line({"--noise-multiplier": "1e-5"}, without=("--epsilon",)),
    "much noise": line({"--noise-multiplier": "12345.6789123"}, without=("--epsilon",)),
    "a large model": line({"--parameters": "1e15"}),
}


@pytest.mark.parametrize("arguments", WIDE.values(), ids=WIDE.keys())
def test_wide_numbers_are_shown_whole(arguments):
    """Half a number is worse than none: 2.449e... may be anything."""
    code, table, _ = run(*arguments)
    assert code == 0
    assert "…" not in table
    shown = rows(table)
    assert set(shown) >= set(LABELS)
    assert all(re.fullmatch(r"[-0-9.e]+", cell) for cell in shown["blt"][:3])


class Terminal(io.StringIO):
    """Somebody is looking."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 80, 100, 200])
def test_numbers_are_whole_on_a_terminal_too(monkeypatch, printed, columns):
    """Eighty columns are what most terminals open with."""
    for name, value in {"COLUMNS": str(columns), "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Terminal()
    with (
        patch.object(sys, "argv", ["dpftrl", *line()]),
        contextlib.redirect_stdout(screen),
        pytest.raises(SystemExit),
    ):
        main()
    assert "\x1b[" in screen.getvalue()  # the control: it was taken for a terminal
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert "…" not in shown
    words = shown.split()
    for row in printed["mechanisms"]:
        assert row["name"] in words
        for key in ("noise_multiplier", "rho", "epsilon"):
            assert rounded_up(row[key]) in words


NEVER = ["-1", "nan", "inf", "-inf", "1e400", "text", ""]
COUNTS = [*NEVER, "0", "2.5", "1e9999999", "2e18"]
BAD_VALUES = {
    **dict.fromkeys(["--population", "--report-goal", "--rounds", "--parameters"], COUNTS),
    "--max-participations": COUNTS,
    "--delta": [*NEVER, "0", "1", "2", "1e-400"],
    "--epsilon": [*NEVER, "0", "1e-400"],
    "--noise-multiplier": [*NEVER, "0", "1e-400"],
    "--availability": [*NEVER, "0", "1.0001"],
    "--over-selection": [*NEVER, "0", "0.99"],
    "--timer-days": [*NEVER, "0", "0.01"],
    "--rounds-per-day": [*NEVER, "0", "0.01"],
    "--buffers": [*NEVER, "0", "1.5"],
    "--objective": ["", "mean", "RMS", "0"],
    "--days": [*NEVER, "0", "0.01"],
    "--min-sep": [*COUNTS, ":4", "2:", "1:2:3"],
    "--devices": COUNTS,
}


@pytest.mark.parametrize(
    ("option", "value"),
    [(option, value) for option, values in BAD_VALUES.items() for value in values],
)
def test_a_bad_value_is_one_line_and_exit_code_2(option, value):
    others = {
        "--timer-days": {"--rounds-per-day": "3"},
        "--rounds-per-day": {"--timer-days": "3"},
        "--days": {"--rounds-per-day": "3"},
    }
    without = {"--noise-multiplier": ("--epsilon",), "--days": ("--rounds",)}.get(option, ())
    refused_in_one_line(*line({**others.get(option, {}), option: value}, without))


PAIRS = {
    **{f"no {name}": line(without=(name,)) for name in ("--population", "--rounds", "--delta")},
    "neither budget": line(without=("--epsilon",)),
    "both budgets": line({"--noise-multiplier": "3"}),
    "a timer alone": line({"--timer-days": "3"}),
    "rounds per day without days": line({"--rounds-per-day": "3"}, without=("--rounds",)),
    "rounds, days and rounds per day": line({"--rounds-per-day": "3", "--days": "4"}),
    "a min-sep above the rotation": line({"--min-sep": "6"}),
    "a range that falls": line({"--min-sep": "5:4"}),
    "a goal above the population": line({"--report-goal": "58"}),
    "a goal above those available": line({"--report-goal": "55"}),
    "over-selected": line({"--report-goal": "50", "--over-selection": "1.2"}),
    "a mechanism": ["blt", *line()],
    "an unknown option": line({"--min-gap": "4"}),
    "a value for a flag": [*line(), "--with-bandmf", "yes"],
}


@pytest.mark.parametrize("arguments", PAIRS.values(), ids=PAIRS.keys())
def test_contradicting_or_missing_options_are_refused_in_one_line(arguments):
    refused_in_one_line(*arguments)


MANY = {"--population": "1e18", "--report-goal": "1", "--delta": "1e-20"}
EXTREME = {
    "most epsilon": line({"--epsilon": "1e308"}),
    "least epsilon": line({"--epsilon": "1e-320"}),
    "least delta": line({"--delta": "1e-320"}),
    "a trace of noise": line({"--noise-multiplier": "1e-200"}, without=("--epsilon",)),
    "a sea of noise": line({"--noise-multiplier": "1e300"}, without=("--epsilon",)),
    "subnormal noise": line({"--noise-multiplier": "1e-320"}, without=("--epsilon",)),
    "most devices": line(MANY),
    "most rounds": line({**MANY, "--rounds": "1e18"}),
    "many rounds": line({**MANY, "--rounds": "2e17"}),
}


@pytest.mark.parametrize("arguments", EXTREME.values(), ids=EXTREME.keys())
@pytest.mark.parametrize("form", ["--json", "--extrapolate"])
def test_extreme_values_are_answered_or_refused(arguments, form):
    code, out, err = run(*arguments, form)
    if code == 0:
        assert err == ""
        if form == "--json":
            for row in json.loads(out)["mechanisms"]:
                assert 0 <= row["epsilon"] < math.inf  # JSON has no infinity, only null
                assert 0 <= row["rho"] < math.inf
    else:
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("dpftrl: ")


def test_as_many_rounds_as_there_can_be_still_have_a_plan():
    """A surprise that cannot be accounted for is no reason to leave a mechanism out."""
    printed = answer(*EXTREME["most rounds"])
    assert printed["mechanisms"]


def test_the_example_of_the_help_text_runs_through_the_real_entry_point(tmp_path):
    saved = tmp_path / "plan.json"
    arguments = ["--population", "4.21M", "--report-goal", "6500", "--rounds", "2000"]
    arguments += ["--delta", "1e-10", "--epsilon", "4", "--out", str(saved), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "dpftrl", "plan", *arguments], capture_output=True, check=False
    )
    assert done.returncode == 0
    lines = [line for line in done.stderr.decode().splitlines() if line[:8] != "planning"]
    assert len(lines) == 1  # and others if it took long
    assert lines[0].startswith(f"saved: {saved}: ")
    assert b"\x1b" not in done.stdout
    printed = json.loads(done.stdout)
    assert (printed["min_sep"], printed["max_participations"]) == (647, 4)
    assert [row["name"] for row in printed["left_out"]] == ["bandmf"]
    by_name = {row["name"]: row for row in printed["mechanisms"]}
    assert list(by_name) == LABELS[:-1]
    for row in by_name.values():
        assert 4 * (1 - 1e-6) <= row["epsilon"] <= 4
    assert by_name["blt"]["rms_loss"] <= by_name["blt-robust"]["rms_loss"]
    assert by_name["blt-robust"]["rms_loss"] <= by_name["blt-b400"]["rms_loss"]
    assert by_name["blt"]["rms_loss"] < by_name["tree-full"]["rms_loss"]
    assert by_name["tree-full"]["epsilon_if"]["rounds_double"] is None
    assert [len(walk) for walk in printed["extrapolation"].values()] == [13, 13, 13]
    plan = load_plan(saved)
    assert plan.noise_multiplier == by_name["blt"]["noise_multiplier"]
    again = account(plan.mechanism, MinSep(2000, 647), plan.noise_multiplier, 1e-10)
    assert again.epsilon == by_name["blt"]["epsilon"]
