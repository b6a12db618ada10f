"""`dpftrl tune`: what it refuses, and what it writes."""

import json

import command_line
import numpy as np
import pytest

from dpftrl.cli.tune import tuned_text
from dpftrl.simulation.config import PRESETS, read_config
from dpftrl.tuning import Choice, StandIn
from dpftrl.tuning.candidates import with_changes
from dpftrl.tuning.trial import TrialResult

WORDS = [
    *("i", "you", "we", "they", "go", "see", "like", "want"),
    *("the", "a", "dog", "cat", "house", "car", "now", "then"),
]


def test_private_text_is_refused_in_one_line():
    why = command_line.refused_in_one_line("tune", "--stand-in", "chitchat", "--population", "9")
    assert "--public FILE" in why
    assert "guarantee" in why


def test_a_config_of_somebody_is_not_overwritten(tmp_path):
    (tmp_path / "mine.toml").write_text("seed = 1\n")
    why = command_line.refused_in_one_line("tune", "--out", tmp_path / "mine.toml")
    assert "--force" in why


def test_the_config_gives_reasons_and_can_be_read_back(tmp_path):
    config = PRESETS["chitchat"]
    changes = {"clip_norm": 0.25, "privacy.rounds": 240}
    best = TrialResult(1, changes, 1.0, 0.2, 90.0, 3.0)
    base = TrialResult(0, {}, 1.0, 0.15, 95.0, 3.0)
    choice = Choice(
        with_changes(config, changes), best, base, (base, best), StandIn("poetry", None, 1174)
    )
    text = tuned_text(choice, config)
    assert "clip_norm: 0.5 -> 0.25; best with 0.5: 15.00%" in text
    assert "client.learning_rate stays at" in text
    assert "poetry" in text
    (tmp_path / "tuned.toml").write_text(text)
    assert read_config(tmp_path / "tuned.toml") == choice.config


@pytest.mark.slow
def test_a_tuning_writes_a_config_that_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "state"))
    for seed, name in enumerate(("private", "public")):
        draws = np.random.default_rng(seed)
        lines = [
            json.dumps({"user": f"user {i}", "text": " ".join(draws.choice(WORDS, 6))})
            for i in range(40)
            for _ in range(5)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "words.txt").write_text("\n".join(WORDS))
    settings = [
        'task="jsonl"',
        f'data.path="{tmp_path}/private.jsonl"',
        f'data.vocabulary="{tmp_path}/words.txt"',
        'model={name="window",pretraining_steps=0,sizes={embedding=4,words=1,hidden=4}}',
        "privacy={rounds=4,report_goal=4,epsilon=30.0,delta=1e-3,availability=0.5}",
        "simulation={least_available=0.9,most_available=1.0}",
    ]
    changes = [part for setting in settings for part in ("--set", setting)]
    options = ["--public", tmp_path / "public.jsonl", "--minutes", "0.3", "--trials", "3"]
    out = tmp_path / "tuned.toml"
    shown = command_line.answer("tune", *changes, *options, "--workers", "1", "--out", out)
    assert shown["config"] == str(out)
    code, _, _ = command_line.run("train", out, "--out", tmp_path / "run")
    assert code == 0
