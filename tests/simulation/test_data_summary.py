"""The private summary of a task: counted by hand, with warnings, and only in the private folder."""

import json

import msgspec
import numpy as np
import pytest

from dpftrl import MinSep, account, mechanism
from dpftrl.errors import InvalidInput
from dpftrl.plan import Fleet, Plan
from dpftrl.simulation.config import Privacy
from dpftrl.simulation.data_summary import DataSummary, noise_to_signal
from dpftrl.simulation.training import make_plan
from dpftrl.tasks import Task, Vocabulary
from dpftrl.tasks.task import Encoder, collect_users
from dpftrl.tasks.vocabulary import cut_lines

TRAIN = [("ann", "dog dog cat"), ("ann", "qwertz"), ("bob", "dog you xyz asdf")]
HELDOUT = [("eve", "dog you dog"), ("eve", "xyz cat")]


def users(texts):
    return collect_users(iter(texts), Encoder(VOCABULARY, cut_lines, 5), 10)


VOCABULARY = Vocabulary(("dog", "cat", "you"))
TASK = Task("jsonl", "tests", VOCABULARY, users(TRAIN), users(HELDOUT))


def plan(noise_multiplier: float = 1.0, rounds: int = 4, goal: int = 10) -> Plan:
    limits = MinSep(rounds, 1)
    promise = account(mechanism("independent"), limits, noise_multiplier, delta=1e-6)
    return Plan(Fleet(population=1000, report_goal=goal), promise)


def test_words_and_the_baseline_are_those_counted_by_hand():
    found = DataSummary.of(TASK, plan(), parameters=100)
    assert (found.people, found.heldout_people, found.vocabulary) == (2, 1, 3)
    assert (found.words, found.heldout_words) == (8, 5)
    assert found.unknown_share == pytest.approx(3 / 8)
    assert found.heldout_unknown_share == pytest.approx(1 / 5)
    assert found.baseline == pytest.approx(2 / 4)  # always "dog"
    assert found.baseline_of_all_words == pytest.approx(2 / 5)
    text = "\n".join(found.lines())
    assert "8 words of 2 people; 37.5% are not among the 3 words" in text
    assert "50.00% of the known held-out words, and for 40.00% of all" in text


def test_noise_to_signal_is_what_drawn_noise_has():
    """With independent noise, the sum of n rounds has n times the variance of one."""
    size, clip_norm, chosen = 4000, 0.7, plan(noise_multiplier=3.0, rounds=6, goal=20)
    draws = np.random.default_rng(0).normal(0.0, 3.0 * clip_norm, (6, size))
    noise = np.linalg.norm(draws.sum(axis=0) / 20)
    signal = 6 * clip_norm  # every client pulls in the same direction in every round
    assert noise_to_signal(chosen, size) == pytest.approx(noise / signal, rel=0.05)


def test_warnings_name_the_setting_to_change():
    few = Vocabulary(("dog",))
    encoder = Encoder(few, cut_lines, 5)
    task = Task(
        "jsonl", "tests", few, *(collect_users(iter(t), encoder, 10) for t in (TRAIN, HELDOUT))
    )
    found = DataSummary.of(task, plan(noise_multiplier=50.0), parameters=10_000)
    unknown, people, heldout, noise = found.warnings()
    assert "62% of the words" in unknown
    assert "data.vocabulary" in unknown
    assert "2 people to train on are too few" in people
    assert "1 held-out people" in heldout
    assert "data.heldout_share" in heldout
    assert noise.startswith("the noise in the final model is 2.5e+02 times as large as")
    assert "may learn little" in noise
    assert f"baseline, {found.baseline:.2%}" in noise
    assert "privacy.report_goal" in noise
    assert "rounds" not in noise  # more rounds need more noise per round


@pytest.mark.parametrize(
    ("people", "heldout", "first_words"),
    [
        (100, 10, []),
        (99, 10, ["99 people to train on are too few"]),
        (100, 9, ["the accuracy on 9 held-out people"]),
    ],
)
def test_few_people_give_a_warning(people, heldout, first_words):
    found = msgspec.structs.replace(
        DataSummary.of(TASK, plan(), parameters=100), people=people, heldout_people=heldout
    )
    warnings = found.warnings()
    assert len(warnings) == len(first_words)
    assert all(map(str.startswith, warnings, first_words))


def test_too_few_people_for_one_round_are_too_few_for_a_model():
    with pytest.raises(
        InvalidInput, match=r"lower the report goal .*\(privacy\.report_goal"
    ) as few:
        make_plan(Privacy(epsilon=8.0), 11)
    assert "11 people to train on are too few for a useful model" in str(few.value)
    with pytest.raises(InvalidInput, match=r"lower the report goal") as many:
        make_plan(Privacy(report_goal=1000, epsilon=8.0), 500)
    assert "too few for a useful model" not in str(many.value)


def test_a_text_without_known_words_has_a_baseline_of_zero():
    strange = users([("ann", "qwertz")])
    found = DataSummary.of(
        Task("jsonl", "tests", VOCABULARY, strange, users(HELDOUT)), plan(), parameters=10
    )
    assert (found.baseline, found.unknown_share) == (0.0, 1.0)


def test_general_english_is_measured_from_public_frequencies():
    pytest.importorskip("wordfreq")
    task = Task(
        "jsonl",
        "tests",
        Vocabulary.english(1000),
        *(
            collect_users(iter(texts), Encoder(Vocabulary.english(1000), cut_lines, 5), 10)
            for texts in (TRAIN, HELDOUT)
        ),
    )
    found = DataSummary.of(task, plan(), parameters=10)
    assert 0.6 < (found.english_share or 0) < 0.9
    assert DataSummary.of(TASK, plan(), parameters=10).english_share is None


def test_the_file_is_for_the_owner_alone(tmp_path):
    found = DataSummary.of(TASK, plan(), parameters=10)
    found.save(tmp_path)
    path = tmp_path / "data_summary.json"
    assert path.stat().st_mode & 0o077 == 0
    assert json.loads(path.read_bytes())["words"] == 8
