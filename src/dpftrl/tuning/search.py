"""Successive halving within a budget of minutes, with a journal that a later call continues.

Every candidate is trained for a quarter of its rounds. The better half goes on to half of the
rounds, and the better half of those to the end. Each of these three stages has a third of the time.
"""

import math
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, final

import msgspec

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl._internal.progress import Progress, ignore_progress
from dpftrl._internal.storage import read_file
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.simulation.config import Config
from dpftrl.tuning.candidates import candidates, with_changes
from dpftrl.tuning.stand_in import StandIn
from dpftrl.tuning.trial import TrialResult, prepare_process, run_trial

# Share of the rounds that is trained in each stage.
STAGES: Final = (0.25, 0.5, 1.0)
# Share of a stage's trials that go on to the next stage.
KEPT: Final = 0.5


@final
class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """First line of the journal: what was searched. A journal is continued only by the same."""

    config: Config
    stand_in: str
    population: int
    trials: int
    seed: int
    format: str = "dpftrl tuning 1"


@final
@dataclass(frozen=True)
class Choice:
    """The result of a tuning.

    Attributes:
        config: The chosen configuration.
        best: The trial that it comes from.
        base: The trial with the settings of the given configuration, as far as it was trained.
        results: All results, in the order in which they were measured.
        stand_in: The text that the trials were run on.
    """

    config: Config
    best: TrialResult
    base: TrialResult
    results: tuple[TrialResult, ...]
    stand_in: StandIn


def tune(
    config: Config,
    stand_in: StandIn,
    journal: Path,
    *,
    minutes: float = 10.0,
    trials: int = 16,
    workers: int | None = None,
    seed: int = 0,
    on_progress: Progress | None = None,
) -> Choice:
    """Choose clip norm, learning rates, report goal, rounds and model size by trials.

    Guarantees:
        Nothing is computed from the text of the private users: trials are trained and evaluated on
        the stand-in. Epsilon and delta of the configuration are not changed.

    Args:
        config: Configuration of the private training.
        stand_in: The text that trials are run on.
        journal: File of all results. A tuning that was interrupted continues from it.
        minutes: Time budget. The best trial is trained to the end even if that takes longer.
        trials: Largest number of candidates.
        workers: Parallel processes. By default, one per core.
        seed: Seed of the candidates.
        on_progress: Called while trials are running.

    Raises:
        InvalidInput: The journal belongs to another tuning, or no candidate can be trained.
    """
    positive_number("minutes", minutes)
    whole_number("trials", trials)
    header = Header(config, stand_in.title, stand_in.population, trials, seed)
    results = _open_journal(journal, header)
    folder = journal.with_name(journal.name + ".trials")
    proposals = list(islice(candidates(config, stand_in.population, seed), trials))
    report = on_progress or ignore_progress
    with _Pool(config, stand_in, folder, workers) as pool:
        survivors, ranking = list(range(len(proposals))), list[TrialResult]()
        for stage, share in enumerate(STAGES):
            done = {result.trial: result for result in results if result.share == share}
            deadline = time.monotonic() + 60 * minutes / len(STAGES)
            left = [trial for trial in survivors if trial not in done]
            for result in pool.run([(trial, proposals[trial]) for trial in left], share, deadline):
                done[result.trial] = result
                results.append(result)
                _append(journal, result)
                fraction = (stage + len(done) / max(1, len(survivors))) / len(STAGES)
                report(min(1.0, fraction), _line(result, [*done.values()]))
            ranking = _ranking([*done.values()], last=share == STAGES[-1])
            if not ranking:
                raise InvalidInput(f"no trial could be run: {_first_failure([*done.values()])}")
            survivors = [result.trial for result in ranking[: math.ceil(KEPT * len(ranking))]]
    best = ranking[0]
    base = [result for result in results if result.trial == 0][-1]
    shutil.rmtree(folder, ignore_errors=True)
    return Choice(with_changes(config, best.changes), best, base, tuple(results), stand_in)


class _Pool:
    """Processes that run trials, one per core."""

    def __init__(self, config: Config, stand_in: StandIn, folder: Path, workers: int | None):
        # Processes are spawned: JAX does not survive a fork.
        context = multiprocessing.get_context("spawn")
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
        self._workers = whole_number("workers", workers or len(cores))
        queue = context.SimpleQueue()
        for worker in range(self._workers):
            queue.put(cores[worker % len(cores)])
        self._pool = ProcessPoolExecutor(
            self._workers, mp_context=context, initializer=prepare_process, initargs=(queue,)
        )
        self._trial: Callable[..., TrialResult] = _Trial(config, stand_in, folder)

    def __enter__(self) -> "_Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(
        self, chosen: Sequence[tuple[int, dict[str, Any]]], share: float, deadline: float
    ) -> Iterator[TrialResult]:
        """Yield results as they come. No trial starts after the deadline, except the first."""
        waiting, running = list(chosen), set[Future[TrialResult]]()
        first = True
        while waiting or running:
            in_time = first or time.monotonic() < deadline
            while waiting and in_time and len(running) < self._workers:
                trial, changes = waiting.pop(0)
                running.add(self._pool.submit(self._trial, trial, changes, share))
                first = False
            if not running:
                return
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                yield future.result()


@dataclass(frozen=True)
class _Trial:
    """A function that runs one trial; it is sent to another process."""

    config: Config
    stand_in: StandIn
    folder: Path

    def __call__(self, trial: int, changes: dict[str, Any], share: float) -> TrialResult:
        try:
            folder = self.folder / str(trial)
            return run_trial(self.config, self.stand_in, trial, changes, share, folder)
        except DpftrlError as error:
            # For example: too few clients for this report goal.
            return TrialResult(trial, changes, share, 0.0, 0.0, 0.0, str(error))


def _ranking(results: Sequence[TrialResult], *, last: bool) -> list[TrialResult]:
    """Return the results of a stage, the best first.

    Perplexity varies less than accuracy between trainings, so it decides who goes on. What decides
    at the end is accuracy.
    """
    trained = [result for result in results if result.failed is None]

    def key(result: TrialResult) -> tuple[float, int]:
        score = -result.accuracy if last else result.perplexity
        return (math.inf if math.isnan(score) else score, result.trial)

    return sorted(trained, key=key)


def _first_failure(results: Sequence[TrialResult]) -> str:
    return next((result.failed for result in results if result.failed), "there was no time")


def _line(result: TrialResult, stage: Sequence[TrialResult]) -> str:
    best = max(one.accuracy for one in stage)
    return (
        f"trial {result.trial}, {result.share:.0%} of its rounds: accuracy {result.accuracy:.2%}; "
        f"best of this stage {best:.2%}"
    )


def _open_journal(path: Path, header: Header) -> list[TrialResult]:
    """Create the journal, or return the results that it holds; refuse that of another tuning."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.encode(header) + b"\n")
        return []
    lines = read_file(path).split(b"\n")
    # What follows the last line end is a line that an interruption cut off.
    if lines.pop():
        path.write_bytes(b"".join(line + b"\n" for line in lines))
    try:
        same = msgspec.json.decode(lines[0], type=Header) == header
        results = [msgspec.json.decode(line, type=TrialResult) for line in lines[1:]]
    except (IndexError, msgspec.MsgspecError):
        raise InvalidInput(f"{path} is not the journal of a tuning; choose another --out") from None
    if not same:
        raise InvalidInput(
            f"{path} is the journal of a tuning with other settings; choose another --out, or "
            "delete that file to start again"
        )
    return results


def _append(path: Path, result: TrialResult) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")
