"""Tuning: who it may look at, what it tries, and that it finds good settings and continues."""

import json

import numpy as np
import pytest

from dpftrl.errors import InvalidInput
from dpftrl.simulation import read_config
from dpftrl.simulation.config import PRESETS
from dpftrl.tuning import choose_stand_in, search, tune
from dpftrl.tuning.candidates import candidates, with_changes
from dpftrl.tuning.trial import TrialResult

WORDS = [
    *("i", "you", "we", "they", "go", "see", "like", "want"),
    *("the", "a", "dog", "cat", "house", "car", "now", "then"),
]


def write_people(path, seed: int) -> None:
    """People whose every word is followed by the next of the list, three times out of four."""
    draws = np.random.default_rng(seed)
    lines = []
    for person in range(40):
        word = int(draws.integers(16))
        text = []
        for _ in range(40):
            text.append(WORDS[word])
            word = (word + 1) % 16 if draws.random() < 0.75 else int(draws.integers(16))
        lines += [
            json.dumps({"user": f"user {person}", "text": " ".join(text[i : i + 8])})
            for i in range(0, 40, 8)
        ]
    path.write_text("\n".join(lines))


@pytest.fixture
def config(tmp_path):
    write_people(tmp_path / "private.jsonl", 0)
    write_people(tmp_path / "public.jsonl", 1)
    (tmp_path / "words.txt").write_text("\n".join(WORDS))
    return read_config(
        None,
        [
            'task="jsonl"',
            f'data.path="{tmp_path}/private.jsonl"',
            f'data.vocabulary="{tmp_path}/words.txt"',
            'model={name="window",pretraining_steps=0,sizes={embedding=4,words=1,hidden=4}}',
            "privacy={rounds=8,report_goal=4,epsilon=5000.0,delta=1e-3,availability=0.5}",
            "simulation={least_available=0.9,most_available=1.0}",
            "clip_norm=0.001",
        ],
    )


def test_the_private_users_are_refused(config, tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "private.jsonl")
    for public in ("private.jsonl", "link.jsonl"):
        with pytest.raises(InvalidInput, match="--public FILE"):
            choose_stand_in(config, public=tmp_path / public, population=30)
    with pytest.raises(InvalidInput, match="users you train on"):
        choose_stand_in(PRESETS["chitchat"], task="chitchat", population=30)
    with pytest.raises(InvalidInput, match="not a file"):
        choose_stand_in(config, public=tmp_path / "none.jsonl", population=30)


def test_the_default_stand_in_is_another_task():
    names = {task: choose_stand_in(preset, population=10).task for task, preset in PRESETS.items()}
    assert names == {
        "chitchat": "poetry",
        "poetry": "chitchat",
        "jsonl": "chitchat",
        "stackoverflow": "chitchat",
    }


@pytest.mark.parametrize("population", [20, 100])
def test_a_stand_in_has_as_many_clients_as_the_training(population, config, tmp_path):
    stand_in = choose_stand_in(config, public=tmp_path / "public.jsonl", population=population)
    task = stand_in.load(config)
    assert len(task.train) == population
    assert not set(task.train.names) & set(task.heldout.names)


def test_users_are_counted_if_no_population_is_given(config, tmp_path):
    stand_in = choose_stand_in(config, public=tmp_path / "public.jsonl")
    assert 30 <= stand_in.population <= 40


def test_candidates_start_with_the_configuration_and_fit_the_clients():
    config = PRESETS["chitchat"]
    tried = [one for one, _ in zip(candidates(config, 1174, seed=0), range(50), strict=False)]
    assert tried[0] == {}
    assert with_changes(config, {}) == config
    assert len({json.dumps(one) for one in tried}) == 50
    for changes in tried:
        privacy = with_changes(config, changes).privacy
        assert privacy.rounds * privacy.report_goal <= 2 * 120 * 200
        assert privacy.report_goal * 1.15 <= 1174 * 0.8
        assert (privacy.epsilon, privacy.delta) == (config.privacy.epsilon, config.privacy.delta)


@pytest.mark.slow
def test_a_tuning_finds_better_settings_and_continues_after_an_interruption(
    config, tmp_path, monkeypatch
):
    stand_in = choose_stand_in(config, public=tmp_path / "public.jsonl", population=36)
    journal = tmp_path / "trials.jsonl"
    # Updates of the configuration are clipped to next to nothing, so that it learns nothing.
    factors = {"clip_norm": (1000.0,), "server.learning_rate": (1.0, 2.0)}
    monkeypatch.setattr("dpftrl.tuning.candidates.FACTORS", factors)
    options = {"trials": 2, "workers": 1, "minutes": 60}
    choice = tune(config, stand_in, journal, **options)
    assert choice.best.share == 1
    assert choice.best.changes["clip_norm"] == 1.0
    assert choice.best.perplexity < 0.9 * choice.base.perplexity
    assert choice.config.privacy.epsilon == config.privacy.epsilon
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == 1 + len(choice.results)

    # The last line was cut off: what is complete is kept, and the rest is measured again.
    journal.write_text("".join(lines[:-1]) + lines[-1][:10])
    again = tune(config, stand_in, journal, **options)
    assert journal.read_text().splitlines(keepends=True)[: len(lines) - 1] == lines[:-1]
    assert again.best.changes == choice.best.changes
    assert again.best.accuracy == choice.best.accuracy

    with pytest.raises(InvalidInput, match="other settings"):
        tune(config, stand_in, journal, trials=5)


def test_a_file_that_is_no_journal_is_refused(config, tmp_path):
    stand_in = choose_stand_in(config, public=tmp_path / "public.jsonl", population=36)
    (tmp_path / "trials.jsonl").write_text("hello\n")
    with pytest.raises(InvalidInput, match="not the journal of a tuning"):
        tune(config, stand_in, tmp_path / "trials.jsonl")


def test_diverged_and_failed_trials_come_last():
    def result(trial: int, accuracy: float, perplexity: float, failed: str | None = None):
        return TrialResult(trial, {}, 1.0, accuracy, perplexity, 1.0, failed)

    results = [
        result(0, 0.1, float("nan")),
        result(1, 0.2, 50.0),
        result(2, 0.3, 60.0),
        result(3, 0.0, 0.0, "too few clients"),
    ]
    ranking = search._ranking
    assert [one.trial for one in ranking(results, last=False)] == [1, 2, 0]
    assert [one.trial for one in ranking(results, last=True)] == [2, 1, 0]
