"""The trainings behind the accuracies: run once, resumed, and averaged."""

from dataclasses import replace
from functools import partial

import pytest

from dpftrl._internal.progress import ignore_progress
from dpftrl.paper.accuracy import PRINTED, privacy_utility_curves
from dpftrl.paper.trainings import (
    FULL,
    QUICK,
    Look,
    Trained,
    all_settings,
    averaged,
    deviation,
    trainings,
    tunings,
)
from dpftrl.simulation import read_config
from dpftrl.workload import Workload

TINY = replace(QUICK, mechanisms=("BLT(d=2, k=6)",))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """One for all, so that a training is not repeated here either."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPFTRL_CACHE", str(folder))
        yield folder / "trainings"


class Stop(Exception):
    """The interruption of a training."""


def test_an_interrupted_training_is_resumed_and_its_result_cached(cache):
    for when in ("preparing", "round 9,"):
        with pytest.raises(Stop):
            list(trainings(TINY, partial(_interrupt, when)))
        assert not list(cache.glob("training-*.json"))
    messages = []

    def on_progress(_fraction, message):
        messages.append(message)

    (trained,) = trainings(TINY, on_progress)
    assert not any("round 9," in message for message in messages)  # that one was committed
    assert any("round 10," in message for message in messages)
    rounds = [look.round for look in trained.looks]
    assert rounds == list(range(0, TINY.rounds + 1, 2))
    assert trained.looks[-1].epsilon == pytest.approx(8.0, rel=1e-9)
    assert trained.looks[-1].epsilon <= 8.0
    # Only the numbers stay, and they are not computed again.
    assert [path.suffix for path in cache.glob("training-*")] == [".json"]
    messages.clear()
    assert list(trainings(TINY, on_progress)) == [trained]
    assert messages == []


def _interrupt(when, _fraction, message):
    if when in message:
        raise Stop


def test_tuning_has_a_seed_of_its_own_and_the_recipe_uses_what_was_tried():
    ((rate, tuned),) = tunings(replace(TINY, rounds=4, min_sep=1), ignore_progress)
    assert rate == 1.0
    assert tuned.seed not in range(FULL.seeds)
    tried = dict(FULL.tried)
    assert all(rate in tried[epsilon] for epsilon, rate in FULL.rates)
    assert FULL.tuned_on in FULL.mechanisms


def test_the_recipe_of_the_paper_has_its_six_participations():
    assert FULL.participation.max_participations == 6
    assert FULL.report_goal * FULL.min_sep <= FULL.clients  # nobody is contacted too early
    assert tuple(PRINTED) == FULL.mechanisms


def test_averages_use_only_the_rounds_around_the_middle():
    looks = [Look(r, 1.0, accuracy=float(r), perplexity=1.0) for r in range(0, 101, 5)]
    one = Trained("BandMF", 2.0, 0, 1.0, 1.0, looks)
    assert averaged(one, 50, "accuracy") == 50.0
    assert [look.round for look in one.around(50, 10)] == [40, 45, 50, 55, 60]
    assert averaged(one, 90, "accuracy") == 90.0
    assert deviation([1.0]) == 0.0


def test_the_privacy_spent_grows_along_a_curve():
    rows = privacy_utility_curves(TINY, ignore_progress).rows
    spent = [row["rho"] for row in rows]
    assert spent == sorted(spent)
    assert 0 < spent[-1] < 100


def test_recipes_do_not_follow_the_defaults_of_a_training():
    # The settings that the stored results were measured with.
    config = read_config(None, all_settings(FULL))
    assert config.clip_norm == 0.3
    assert config.data.vocabulary_size == 1000
    assert config.model.sizes == {"embedding": 16, "words": 3, "hidden": 16}
    assert (config.model.name, config.model.pretraining_steps) == ("window", 0)
    assert (config.client.epochs, config.client.batch_size) == (1, 16)
    assert (config.client.learning_rate, config.client.most_batches) == (1.0, None)
    rates = Workload.with_schedule(config.server.schedule, 4).rates(4)
    assert (config.server.momentum, config.server.nesterov, *rates) == (0.9, False, 1, 1, 1, 1)
