"""One trial: a training on stand-in people, with the noise of the private plan, up to some round.

A trial runs in its own process. It is a run of `dpftrl.federated` like any other, so that a later
call continues where an earlier one stopped.
"""

import os
import signal
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, final

import msgspec
from msgspec.structs import replace

from dpftrl.federated import RunFolder, Server, Settings
from dpftrl.simulation.config import Config
from dpftrl.simulation.training import Training, make_plan, starting_arrays
from dpftrl.tuning.candidates import with_changes
from dpftrl.tuning.stand_in import StandIn

# The noise of trials hides nobody's text. A fixed key makes them repeatable.
TRIAL_KEY = 1
# Times that a trial is evaluated.
EVALUATIONS = 8


@final
class TrialResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a trial showed.

    Attributes:
        trial: Number of the trial, from 0; trial 0 has the settings of the configuration.
        changes: The settings that differ from the configuration.
        share: Share of the rounds that were trained.
        accuracy: Accuracy on held-out people of the stand-in; NaN is written as 0.
        perplexity: Perplexity on the same words.
        seconds: Duration of the trial since it was last continued.
        failed: Why the trial could not be run; None if it was.
    """

    trial: int
    changes: dict[str, Any]
    share: float
    accuracy: float
    perplexity: float
    seconds: float
    failed: str | None = None


def prepare_process(cores: "SimpleQueue[int]") -> None:
    """Let this process use one core only, and end quietly on Ctrl-C.

    Parallel trials then do not share cores. A trial that ends in the middle is continued later.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores.get()})


def run_trial(
    config: Config,
    stand_in: StandIn,
    trial: int,
    changes: dict[str, Any],
    share: float,
    folder: Path,
) -> TrialResult:
    """Train a candidate for a share of its rounds, and evaluate it on stand-in people.

    Args:
        config: Configuration of the private training.
        stand_in: The people to train on.
        trial: Number of the trial.
        changes: Settings of the candidate that differ from the configuration.
        share: Share of the rounds to train.
        folder: Folder of the trial. A trial that is there is continued.
    """
    started = time.monotonic()
    candidate = with_changes(config, changes)
    rounds = candidate.privacy.rounds
    # A start model has the vocabulary of the private users, not that of the stand-in.
    model = replace(candidate.model, start=None, other_people=())
    every = max(1, rounds // EVALUATIONS)
    candidate = replace(candidate, model=model, evaluate_every=every)
    last = max(1, round(share * rounds))
    task = stand_in.load(candidate)
    witness = folder / "witness"
    if RunFolder(folder / "run").exists:
        server = Server.resume(folder / "run", state_folder=witness)
    else:
        settings = Settings(
            clip_norm=candidate.clip_norm,
            optimizer=candidate.server,
            seed=candidate.seed,
            snapshot_every=candidate.snapshot_every,
        )
        server = Server.create(
            folder / "run",
            make_plan(candidate.privacy, stand_in.population),
            settings,
            starting_arrays(candidate.model, task, candidate.seed),
            state_folder=witness,
            insecure_test_key=TRIAL_KEY,
        )
    with Training(candidate, task, server, witness) as training:
        training.run(should_stop=lambda: server.rounds >= last)
        result = training.evaluate()
    seconds = time.monotonic() - started
    return TrialResult(trial, changes, share, result.accuracy, result.perplexity, round(seconds, 1))
