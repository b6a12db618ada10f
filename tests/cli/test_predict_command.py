"""`dpftrl predict`, `dpftrl export` with a model card, and what `dpftrl train` says in private."""

import io
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import answer, refused_in_one_line, run
from safetensors.numpy import load_file

from dpftrl.federated import RunFolder

pytest.importorskip("equinox")

KNOWN = ["i", "you", "we", "they", "see", "know", "like", "want", "the", "a", "dog", "cat"]
UNKNOWN = ["house", "car", "now", "then"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A finished run on a text whose vocabulary misses a quarter of the words; the text is gone."""
    root = tmp_path_factory.mktemp("predict")
    os.environ["DPFTRL_STATE"] = str(root / "state")
    draws = np.random.default_rng(0)
    lines = [
        json.dumps({"user": f"user {i}", "text": " ".join(draws.choice(KNOWN + UNKNOWN, 6))})
        for i in range(40)
        for _ in range(5)
    ]
    (root / "people.jsonl").write_text("\n".join(lines))
    (root / "words.txt").write_text("\n".join(KNOWN))
    settings = [
        *('task="jsonl"', f'data.path="{root}/people.jsonl"', "data.heldout_share=0.2"),
        *(f'data.vocabulary="{root}/words.txt"', "model.sizes={embedding=4,hidden=4}"),
        *("model.pretraining_steps=0", "privacy.rounds=2", "privacy.report_goal=4"),
        *("privacy.epsilon=9.0", "privacy.delta=1e-3", "privacy.availability=0.5"),
        *("simulation.least_available=1.0", "simulation.most_available=1.0"),
    ]
    changes = [part for setting in settings for part in ("--set", setting)]
    code, output, errors = run("train", *changes, "--out", root / "run")
    assert code == 0, errors
    (root / "output.txt").write_text(output)
    (root / "errors.txt").write_text(errors)
    (root / "people.jsonl").unlink()
    assert run("export", root / "run", root / "hub")[0] == 0
    yield root
    del os.environ["DPFTRL_STATE"]


def test_the_operator_sees_where_the_training_stands(place):
    output = (place / "output.txt").read_text()
    summary = json.loads((place / "run" / "private" / "data_summary.json").read_bytes())
    assert f"{summary['words']:,} words of {summary['people']} people" in output
    assert 0.15 < summary["unknown_share"] < 0.35
    assert "always guessing the most common word would be right for" in output
    assert "with unknown words counted as wrong, accuracy" in output
    assert (place / "run" / "private" / "curves.png").stat().st_size > 0
    # 32 people are too few, even for this small model.
    assert summary["noise_to_signal"] > 0.5
    errors = (place / "errors.txt").read_text()
    assert f"warning: {summary['people']} people to train on are too few" in errors
    assert "warning: the noise in the final model is" in errors
    assert (place / "run" / "private" / "curves.png").stat().st_mode & 0o077 == 0
    assert run("verify", place / "run")[0] == 0


def test_nothing_private_is_in_the_files_that_may_be_published(place):
    """Neither the numbers of the summary, nor the words that are not in the vocabulary."""
    summary = json.loads((place / "run" / "private" / "data_summary.json").read_bytes())
    secrets = [str(summary[name]) for name in ("unknown_share", "baseline", "noise_to_signal")]
    secrets += ["unknown_share", "baseline", "noise_to_signal", "accuracy_of_all", *UNKNOWN]
    public = [
        path
        for folder in ("run", "hub")
        for path in (place / folder).rglob("*")
        if path.is_file() and "private" not in path.parts
    ]
    assert {"metrics.jsonl", "statement.html", "README.md", "model.safetensors"} <= {
        path.name for path in public
    }
    for path in public:
        content = path.read_bytes().lower()
        for secret in secrets[:-4]:
            assert secret.encode() not in content, (path, secret)
        if path.suffix in (".json", ".safetensors", ".jsonl"):
            for word in secrets[-4:]:
                assert f'"{word}"'.encode() not in content, (path, word)
    points = [json.loads(line) for line in (place / "run/metrics.jsonl").read_text().splitlines()]
    assert {name for point in points for name in point} <= {
        *("round", "epsilon", "accuracy", "perplexity"),
    }


def test_next_words_are_printed_with_probabilities(place):
    code, output, errors = run("predict", place / "hub", "see you", "--top", 3)
    assert (code, errors) == (0, "")
    lines = [line.split() for line in output.splitlines()]
    assert len(lines) == 3
    assert all(word in KNOWN and share.endswith("%") for word, share in lines)
    found = answer("predict", place / "hub" / "model.safetensors", "see you house", "--top", 99)
    assert found["unknown_words"] == ["house"]
    assert sorted(one["word"] for one in found["predictions"]) == sorted(KNOWN)
    assert sum(one["probability"] for one in found["predictions"]) == pytest.approx(1)
    assert found["epsilon"] == pytest.approx(9, rel=1e-6)
    _, _, errors = run("predict", place / "hub", "car")
    assert errors == "not in the vocabulary: car\n"


def test_lines_of_a_pipe_are_texts_one_by_one(place, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("see you\n\nthe"))
    code, output, _ = run("predict", place / "hub", "--top", "2", "--json")
    assert code == 0
    assert [json.loads(line)["text"] for line in output.splitlines()] == ["see you", "", "the"]


def test_a_prompt_ends_with_ctrl_d(place, monkeypatch):
    terminal = io.StringIO("see you\n")
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stdin", terminal)
    code, output, errors = run("predict", place / "hub", "--top", "2")
    assert code == 0
    assert output.startswith("ReleasedModel(window, ")
    assert len(output.splitlines()) == 3
    assert errors == "> > \n"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["missing.safetensors", "a"], "missing.safetensors"),
        (["{run}/plan.json", "a"], "is not a model"),
        (["{run}", "a"], "model.safetensors"),
        (["{hub}", "a", "--top", "0"], "--top"),
    ],
)
def test_what_cannot_predict_is_refused_in_one_line(place, arguments, reason):
    names = {"run": place / "run", "hub": place / "hub"}
    assert reason in refused_in_one_line("predict", *(a.format(**names) for a in arguments))


def test_a_folder_gets_the_model_and_its_card(place, tmp_path):
    assert sorted(path.name for path in (place / "hub").iterdir()) == [
        "README.md",
        "model.safetensors",
    ]
    card = (place / "hub" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: dpftrl\n")
    assert "## Privacy statement" in card
    assert "Attention" not in card
    assert "people.jsonl" not in card
    again = answer("export", place / "run", place / "hub")  # its own files may be replaced
    assert again["card"] == str(place / "hub" / "README.md")
    assert again["verified"]
    alone = answer("export", place / "run", tmp_path / "m.safetensors", "--card", tmp_path / "c.md")
    assert alone["card"] == str(tmp_path / "c.md")
    assert load_file(alone["model"]).keys() == load_file(again["model"]).keys()


def test_the_python_example_of_the_page_runs(place, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "using_models.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    monkeypatch.chdir(place / "hub")
    exec(compile(example, "using_models.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_the_folder_of_a_run_is_refused_with_the_command_for_its_model(place):
    message = refused_in_one_line("predict", place / "run", "see")
    export = f"dpftrl export {place / 'run'} model.safetensors"
    assert f"{place / 'run'} is a run; write its model first: {export}" in message


def test_files_of_the_user_are_not_replaced_by_an_export(place, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    assert "README.md exists" in refused_in_one_line("export", place / "run", tmp_path)
    export = ("export", place / "run")
    assert "ends in .safetensors" in refused_in_one_line(*export, tmp_path / "m.bin")
    assert "is a file" in refused_in_one_line(*export, place / "run" / "private" / "lock")
    nowhere = tmp_path / "no" / "where"
    assert "there is no folder" in refused_in_one_line("export", place / "run", nowhere)
    assert "holds no run" in refused_in_one_line("export", tmp_path, tmp_path / "new")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_run_of_a_program_is_not_resumed_by_train(tmp_path):
    (tmp_path / "private").mkdir()
    RunFolder(tmp_path).journal.write_text("")
    assert "dpftrl.simulate" in refused_in_one_line("train", "--resume", "--out", tmp_path)


def test_the_folder_of_a_centralized_run_is_refused(tmp_path):
    (tmp_path / "run.json").write_text('{"format": "dpftrl centralized run"}')
    message = refused_in_one_line("predict", tmp_path, "see")
    assert "load the model with the program that trained it" in message
