"""Small trainings of a language model with canary sentences."""

import json
from pathlib import Path

import numpy as np
import pytest
from canary_runs import divide_noise

from dpftrl.auditing.canaries import CanaryKind
from dpftrl.simulation.config import Config, read_config
from dpftrl.simulation.training import Training

WORDS = [f"{first}{second}" for first in "bdfgklmnprst" for second in ("a", "e", "i", "o", "u")]
CANARIES = 120


def config(root: Path, epsilon: float, rounds: int) -> Config:
    """People who write sentences of few words; every client may take part in every round."""
    draws = np.random.default_rng(0)
    lines = [
        json.dumps({"user": f"user {i}", "text": " ".join(draws.choice(WORDS[:20], 6))})
        for i in range(24)
        for _ in range(4)
    ]
    (root / "people.jsonl").write_text("\n".join(lines))
    (root / "words.txt").write_text("\n".join(WORDS))
    (root / "small.toml").write_text(
        f"""
task = "jsonl"
evaluate_every = 100
clip_norm = 2.0
[data]
path = "{root}/people.jsonl"
vocabulary = "{root}/words.txt"
heldout_share = 0.2
sentences_per_user = 16
[model]
name = "window"
pretraining_steps = 0
sizes = {{ embedding = 16, words = 2, hidden = 48 }}
[client]
learning_rate = 1.0
batch_size = 4
[server]
learning_rate = 0.3
momentum = 0.0
[privacy]
mechanism = "blt-b400"
rounds = {rounds}
report_goal = 4
min_sep = 1
epsilon = {epsilon}
delta = 1e-3
over_selection = 1.0
[simulation]
drop_out = 0.0
least_available = 1.0
most_available = 1.0
"""
    )
    return read_config(root / "small.toml")


def create(
    root: Path,
    *,
    epsilon: float = 8.0,
    rounds: int = 12,
    canaries: int = CANARIES,
    kind: CanaryKind = "sentences",
) -> Training:
    root.mkdir(exist_ok=True)
    settings = config(root, epsilon, rounds)
    return Training.create(
        settings, root / "run", canaries=canaries, canary_kind=kind, state_folder=root / "state"
    )


def trained(root: Path, **options) -> Path:
    """The folder of a finished run."""
    with create(root, **options) as training:
        training.run()
    return root / "run"


def trained_with_hardly_any_noise(root: Path, **options) -> Path:
    """The folder of a run whose noise was divided by 1,000, which no option can do."""
    with pytest.MonkeyPatch.context() as patch:
        divide_noise(patch, 1000)
        return trained(root, **options)
