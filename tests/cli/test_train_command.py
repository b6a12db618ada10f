"""`dpftrl train`, `verify` and `export`, on a small file of sentences."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from command_line import answer, refused_in_one_line, run
from safetensors.numpy import load_file, save_file

from dpftrl.errors import InvalidInput
from dpftrl.federated import StartModel
from dpftrl.simulation import load_training_task, starting_arrays, starting_model
from dpftrl.simulation.config import PRESETS, config_text, read_config
from dpftrl.verify import Check, Verdict

WORDS = [
    "i",
    "you",
    "we",
    "they",
    "see",
    "know",
    "like",
    "want",
    "the",
    "a",
    "dog",
    "cat",
    "house",
    "car",
    "now",
    "then",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """People who write, and how to train on them."""
    root = tmp_path_factory.mktemp("people")
    draws = np.random.default_rng(0)
    lines = [
        json.dumps({"user": f"user {i}", "text": " ".join(draws.choice(WORDS, 6))})
        for i in range(40)
        for _ in range(5)
    ]
    (root / "people.jsonl").write_text("\n".join(lines))
    (root / "words.txt").write_text("\n".join(WORDS))
    (root / "small.toml").write_text(
        f"""
task = "jsonl"
evaluate_every = 2
[data]
path = "{root}/people.jsonl"
vocabulary = "{root}/words.txt"
heldout_share = 0.2
[model]
name = "window"
pretraining_steps = 0
sizes = {{ embedding = 4, hidden = 4 }}
[client]
learning_rate = 0.5
[privacy]
rounds = 4
report_goal = 4
epsilon = 30.0
delta = 1e-3
availability = 0.5
[simulation]
least_available = 0.9
most_available = 1.0
"""
    )
    return root


@pytest.fixture
def train(tmp_path, monkeypatch):
    """The command, with a run and a witness of its own."""
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "state"))

    def trained(*arguments: object) -> str:
        code, output, _ = run("train", *arguments, "--out", tmp_path / "run")
        assert code == 0
        return output

    return trained


def test_a_run_from_beginning_to_end(train, folder, tmp_path):
    output = train(folder / "small.toml")
    assert "round 4/4" in output
    assert "epsilon 30" in output
    run_folder = tmp_path / "run"
    for name in ("config.toml", "metrics.jsonl", "guarantee.json", "curves.png"):
        assert (run_folder / name).stat().st_size > 0
    assert list((run_folder / "events").iterdir())
    points = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [point["round"] for point in points] == [0, 1, 2, 3, 4]
    assert [("accuracy" in point) for point in points] == [True, False, True, False, True]
    assert points[-1]["epsilon"] == pytest.approx(30, rel=1e-6)
    assert "curves.png" in (run_folder / "statement.md").read_text()
    assert "data:image/png;base64," in (run_folder / "statement.html").read_text()
    code, table, _ = run("verify", run_folder)
    assert code == 0, table
    status = answer("status", run_folder)
    assert (status["public"]["rounds"], status["warnings"]) == (4, [])
    assert status["public"]["epsilon"] == points[-1]["epsilon"]
    assert status["private"]["clients"]["available_at_begin"] > 4

    model = tmp_path / "model.safetensors"
    exported = answer("export", run_folder, model)
    assert (exported["rounds"], float(exported["epsilon"])) == ("4", points[-1]["epsilon"])
    names = sorted(load_file(model))
    assert names == json.loads((run_folder / "run.json").read_text())["names"]
    secret = (run_folder / "private" / "noise.key").read_bytes()
    assert secret not in model.read_bytes()


def test_nobodys_name_is_in_the_folder(train, folder, tmp_path):
    train(folder / "small.toml")
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file():
            assert b"user 1" not in path.read_bytes(), path


def basis_of(statement: Path, name: str) -> set[str]:
    rows = json.loads(statement.read_bytes())["hypotheses"]
    return {row["basis"] for row in rows if row["name"] == name}


def test_a_statement_at_the_end_of_a_training_has_evidence(train, folder, tmp_path):
    train(folder / "small.toml")
    statement = tmp_path / "run" / "statement.json"
    assert json.loads(statement.read_bytes())["verification"]["verified"] is True
    assert basis_of(statement, "participation") == {"enforced"}


@pytest.mark.usefixtures("train")
def test_a_training_whose_run_does_not_verify_says_so(folder, tmp_path, monkeypatch):
    def failing(run: Path, *_: object, **__: object) -> Verdict:
        return Verdict(run.name, (Check("ledger", "failed", "rows are missing"),), 4, None, None)

    monkeypatch.setattr("dpftrl.statement.from_files.verify_run", failing)
    code, _, message = run("train", folder / "small.toml", "--out", tmp_path / "run")
    assert code == 1
    assert "failed verification" in message
    assert basis_of(tmp_path / "run" / "statement.json", "clipping") == {"claimed"}


def test_arrays_alone_of_a_private_model_are_refused(train, folder, tmp_path):
    train(folder / "small.toml")
    model = tmp_path / "model.safetensors"
    answer("export", tmp_path / "run", model)
    config = read_config(folder / "small.toml", [f'model.start="{model}"'])
    task = load_training_task(config)
    with pytest.raises(InvalidInput, match="use starting_model"):
        starting_arrays(config.model, task, 0)
    start = starting_model(config.model, task, 0)
    assert isinstance(start, StartModel)
    assert len(start.start.earlier) == 1
    save_file(load_file(model), model)  # without its metadata: of unknown origin
    assert sorted(starting_arrays(config.model, task, 0)) == sorted(start.arrays)


@pytest.mark.usefixtures("train")
def test_trainings_that_start_from_each_other_compose(folder, tmp_path):
    """Each alone has epsilon 30; what is stated grows, in every file and line."""
    start: list[object] = []
    stated, runs = [], []
    for number in range(3):
        out = tmp_path / str(number)
        label = ["--set", f'population="people {number}"']
        code, output, _ = run("train", folder / "small.toml", *label, *start, "--out", out)
        assert code == 0
        epsilon = json.loads((out / "guarantee.json").read_bytes())["epsilon"]
        twin = json.loads((out / "statement.json").read_bytes())
        points = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert twin["epsilon"] == points[-1]["epsilon"] == epsilon
        assert points[0]["epsilon"] == pytest.approx(stated[-1] if stated else 0.0)
        assert [
            one["run"] for one in (twin["start"] or {"earlier_runs": []})["earlier_runs"]
        ] == runs
        assert output.count("on the same people: composed") == number
        assert run("verify", out)[0] == 0
        model = tmp_path / f"{number}.safetensors"
        assert float(answer("export", out, model)["epsilon"]) == epsilon
        start = ["--set", f'model.start="{model}"']
        runs.append(twin["run"])
        stated.append(epsilon)
    assert stated[0] == pytest.approx(30, rel=1e-6)
    assert stated[2] > stated[1] * 1.2 > stated[0] * 1.5


def test_other_people_are_named_explicitly(train, folder, tmp_path):
    train(folder / "small.toml", "--set", 'population="first"')
    model = tmp_path / "model.safetensors"
    answer("export", tmp_path / "run", model)
    start = ["train", folder / "small.toml", "--set", f'model.start="{model}"']
    others = ["--set", 'model.other_people=["first"]']
    out = tmp_path / "other"
    why = refused_in_one_line(*start, "--set", 'model.other_people=["x"]', "--out", out)
    assert "other_people names 'x'" in why
    why = refused_in_one_line(*start, *others, "--set", 'population="first"', "--out", out)
    assert "both runs have the population label 'first'" in why
    assert not out.exists()
    code, output, _ = run(*start, *others, "--set", 'population="second"', "--out", out)
    assert code == 0
    assert "on other people, as you state: not composed" in output
    twin = json.loads((out / "statement.json").read_bytes())
    assert twin["epsilon"] == pytest.approx(30, rel=1e-6)
    assert basis_of(out / "statement.json", "other people") == {"claimed"}


def test_an_interrupted_chain_resumes_with_the_composition(train, folder, tmp_path):
    train(folder / "small.toml")
    model = tmp_path / "model.safetensors"
    answer("export", tmp_path / "run", model)
    out = tmp_path / "second"
    budget = ["--set", "privacy.budget=40.0"]  # for both together: it ends before the last round
    start = ["--set", f'model.start="{model}"', *budget]
    code, output, _ = run("train", folder / "small.toml", *start, "--out", out)
    assert code == 0
    assert "the earlier runs spent" in output
    model.unlink()
    code, output, _ = run("train", "--out", out, "--resume")
    assert code == 0
    assert "on the same people: composed" in output
    epsilon = json.loads((out / "guarantee.json").read_bytes())["epsilon"]
    assert 30 < epsilon <= 40


def test_other_people_without_a_start_model_are_refused(folder, tmp_path):
    others = ["--set", 'model.other_people=["first"]', "--out", tmp_path / "run"]
    assert "no start model" in refused_in_one_line("train", folder / "small.toml", *others)


def test_a_finished_run_has_nothing_to_resume(train, folder):
    train(folder / "small.toml")
    assert "all 4 rounds are done" in train("--resume")


def test_an_existing_run_is_not_overwritten(train, folder, tmp_path):
    train(folder / "small.toml")
    why = refused_in_one_line("train", folder / "small.toml", "--out", tmp_path / "run")
    assert "resume it with --resume, or choose another folder with --out" in why


def test_the_budget_ends_a_run(train, folder):
    output = train(folder / "small.toml", "--set", "privacy.budget=25.0")
    assert "the budget is spent" in output
    assert "round 4/4" not in output


@pytest.fixture
def plan(tmp_path) -> Path:
    path = tmp_path / "plan.json"
    small = ["--population", "30", "--report-goal", "4", "--rounds", "3", "--delta", "1e-3"]
    assert run("plan", *small, "--epsilon", "20", "--out", path)[0] == 0
    return path


def test_a_plan_takes_the_place_of_the_privacy_settings(train, folder, plan):
    data = ["--set", 'task="jsonl"', "--set", f'data.path="{folder}/people.jsonl"']
    words = ["--set", f'data.vocabulary="{folder}/words.txt"', "--set", "data.heldout_share=0.2"]
    sizes = ["--set", "model.sizes={embedding=4,hidden=4}"]
    calm = ["--set", "simulation.least_available=1.0", "--set", "simulation.most_available=1.0"]
    output = json.loads(train(plan, *data, *words, *sizes, *calm, "--json"))
    assert output["rounds"] == 3
    assert output["epsilon"] == pytest.approx(20, rel=1e-6)


@pytest.mark.parametrize("change", ["privacy.epsilon=4.0", "privacy={rounds=5}"])
def test_what_a_plan_decides_cannot_be_set(change, folder, plan, tmp_path):
    data = ["--set", 'task="jsonl"', "--set", f'data.path="{folder}/people.jsonl"']
    why = refused_in_one_line("train", plan, *data, "--set", change, "--out", tmp_path / "run")
    assert "the plan decides that already" in why
    assert not (tmp_path / "run").exists()


def test_a_plan_leaves_the_budget_open(plan):
    shown = answer("train", plan, "--set", "privacy.budget=4.0", "--show-config")
    assert shown["privacy"]["budget"] == 4


def test_the_clip_norm_is_an_option():
    def shown(*arguments):
        return answer("train", *arguments, "--show-config")["clip_norm"]

    assert shown("--clip-norm", "adaptive") == "adaptive"
    assert shown("--clip-norm", "0.25") == 0.25
    options = shown("--clip-norm", "adaptive", "--set", "clip_norm.start=2.0")
    assert (options["start"], options["quantile"]) == (2.0, 0.5)
    for wrong in ("median", "nan", "-1"):
        assert "clip" in refused_in_one_line("train", "--clip-norm", wrong)


def test_a_plan_for_more_people_than_there_are_is_refused(folder, tmp_path):
    plan = tmp_path / "plan.json"
    big = ["--population", "4M", "--report-goal", "4", "--rounds", "3", "--delta", "1e-3"]
    assert run("plan", *big, "--epsilon", "20", "--out", plan)[0] == 0
    data = ["--set", 'task="jsonl"', "--set", f'data.path="{folder}/people.jsonl"']
    assert "4,000,000 clients" in refused_in_one_line(
        "train", plan, *data, "--out", tmp_path / "run"
    )


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_an_interrupted_run_ends_in_the_same_bits(train, folder, tmp_path, number):
    """Ctrl-C or SIGTERM after the first rounds, then --resume: the same model as without."""
    whole = ["train", folder / "small.toml", "--set", "privacy.rounds=12", "--insecure-test-key=5"]
    assert run(*whole, "--out", tmp_path / "whole")[0] == 0
    process = subprocess.Popen(
        [sys.executable, "-m", "dpftrl", *map(str, whole), "--out", str(tmp_path / "run")],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    journal = tmp_path / "run" / "private" / "journal.jsonl"
    while process.poll() is None and not (
        journal.exists() and b"committed" in journal.read_bytes()
    ):
        time.sleep(0.01)
    process.send_signal(number)
    _, output = process.communicate(timeout=60)
    assert process.returncode in (0, 130)  # 0 if it was done before the signal came
    if process.returncode == 130:
        assert "finishing this round" in output
        assert all((tmp_path / "run" / name).exists() for name in ("statement.md", "curves.png"))
    train("--resume")
    both = [
        tmp_path / name / "private/checkpoints/00000012.safetensors" for name in ("whole", "run")
    ]
    assert both[0].read_bytes() == both[1].read_bytes()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--set", "privacy.rounds"], "TOML"),
        (["--set", "privacy.round=3"], "there is no setting privacy.round; did you mean privacy."),
        (["--set", "privacy.rounds=0"], "rounds"),
        (["--set", 'task="novels"'], "tasks are"),
        (["--set", "model.sizes={depth=3}"], "depth"),
        (["--set", "privacy.epsilon=-1"], "epsilon"),
        (["--set", "server={nesterov=true,momentum=0.0}"], "nesterov"),
        (["--resume", "--set", "seed=1"], "--resume"),
        (["missing.toml"], "missing.toml"),
        (["missing.json"], "missing.json"),
    ],
)
def test_errors_are_reported_in_one_line(arguments, reason, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "state"))
    first = [] if "json" in arguments[0] or "toml" in arguments[0] else [folder / "small.toml"]
    first = [] if "--resume" in arguments else first
    assert reason in refused_in_one_line("train", *first, *arguments, "--out", tmp_path / "run")


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        (["--epsilon", "8"], "--set privacy.epsilon=8 "),
        (["--epsilon=8"], "--set privacy.epsilon=8 "),
        (["--rounds"], "--set privacy.rounds=VALUE "),
        (["--data-path", "my file.jsonl"], """--set 'data.path="my file.jsonl"' """),
        (["--task", "jsonl"], """--set 'task="jsonl"' """),
        (
            ["--learning-rate", "0.5"],
            "--set client.learning_rate=0.5 or --set server.learning_rate=0.5 or --set clip_norm.",
        ),
    ],
)
@pytest.mark.parametrize("command", ["train", "tune"])
def test_a_setting_that_is_given_as_an_option_is_explained(command, option, hint):
    why = refused_in_one_line(command, *option)
    assert f"No such option: {option[0].partition('=')[0]}; a setting is written {hint}" in why


def test_an_unknown_option_that_is_no_setting_keeps_its_message():
    assert "Did you mean '--out'?" in refused_in_one_line("train", "--outt", "x")


@pytest.mark.parametrize(
    "change",
    [
        "client.learning_rate=nan",
        "client.learning_rate=-1",
        "client.batch_size=0",
        "client.epochs=0",
        "client.most_batches=0",
        "simulation.drop_out=nan",
        "simulation.drop_out=1",
        "simulation.least_available=2",
        "simulation.most_available=0.5",
        "simulation.rounds_per_hour=0",
        "simulation.rounds_per_hour=1e-320",
        "simulation.timer_hours=0",
        "server.learning_rate=nan",
        "data.heldout_share=0",
        "evaluate_every=0",
        "evaluate_sentences=0",
        "snapshot_every=0",
        "seed=-1",
        "seed=18446744073709551616",
        "clip_norm=inf",
        "privacy.delta=nan",
    ],
)
def test_a_bad_setting_leaves_nothing_behind(change, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "state"))
    whole = ["train", folder / "small.toml", "--set", change, "--out", tmp_path / "run"]
    setting = change.partition("=")[0].rpartition(".")[2]
    assert setting in refused_in_one_line(*whole)
    assert not list(tmp_path.iterdir())


def test_held_out_people_without_a_known_word_leave_nothing_behind(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "state"))
    (tmp_path / "words.txt").write_text("zebra")
    words = f'data.vocabulary="{tmp_path}/words.txt"'
    why = refused_in_one_line(
        "train", folder / "small.toml", "--set", words, "--out", tmp_path / "run"
    )
    assert "no known word" in why
    assert not (tmp_path / "run").exists()


def test_epsilon_is_rounded_up(train, folder, tmp_path):
    output = train(folder / "small.toml", "--set", "privacy.epsilon=29.12341")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    actual = {point["round"]: point["epsilon"] for point in map(json.loads, lines)}
    live = re.findall(r"round (\d)/4 .* epsilon (\S+) ", output)
    assert [float(shown) >= actual[int(number)] for number, shown in live] == [True, True]
    promised, spent = (float(shown) for shown in re.findall(r"epsilon (\S+) at delta", output))
    assert min(promised, spent) >= actual[4]
    assert max(promised, spent) <= actual[4] * 1.001


def test_three_rounds_need_no_setting_of_the_buffers(train, folder):
    assert "round 3/3" in train(
        folder / "small.toml", "--set", "privacy.rounds=3", "--set", "evaluate_every=3"
    )


def test_a_line_that_is_not_json_is_named(folder, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"user": "ann", "text": "hello"}\nfoo\n')
    data = f'data.path="{tmp_path}/bad.jsonl"'
    why = refused_in_one_line(
        "train", folder / "small.toml", "--set", data, "--out", tmp_path / "run"
    )
    assert f"line 2 of {tmp_path}/bad.jsonl is not JSON" in why


def test_a_task_without_its_file_says_which_setting_is_missing(tmp_path):
    why = refused_in_one_line("train", "--set", 'task="jsonl"', "--out", tmp_path / "run")
    assert "data.path" in why


def test_settings_are_shown_as_json():
    shown = answer("train", "--show-config", "--set", "privacy.rounds=7")
    assert shown["privacy"]["rounds"] == 7
    assert shown["data"]["path"] is None


@pytest.mark.parametrize("task", PRESETS)
def test_what_is_shown_reads_back(task, tmp_path):
    _, shown, _ = run("train", "--set", f'task="{task}"', "--show-config")
    path = tmp_path / "all.toml"
    path.write_text(shown)
    assert read_config(path) == PRESETS[task]
    assert config_text(PRESETS[task]) == shown
