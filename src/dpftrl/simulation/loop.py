"""The loop over rounds that every simulated training shares, with metrics, curves and statement."""

import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from dpftrl.errors import InvalidInput, RunOver
from dpftrl.federated import Server
from dpftrl.simulation.metrics import Metrics, Point
from dpftrl.simulation.population import AuditCanaries, Clients, Population, next_round
from dpftrl.statement.from_files import statement_of_files
from dpftrl.statement.statement import Statement, save_statement

# Files of a run that would replace files of a user, besides those that the trainings add.
FILES_OF_A_RUN = (
    *("plan.json", "run.json", "guarantee.json", "metrics.jsonl", "events", "curves.png"),
    *("statement.md", "statement.html", "statement.json"),
)


@final
@dataclass(frozen=True)
class Measured:
    """What an evaluation of a released model found, which `metrics.jsonl` will hold.

    Attributes:
        accuracy: Share of the held-out users' words that a language model predicts.
        perplexity: Perplexity of a language model.
        evaluation: Other metrics, by name; all of them are finite.
    """

    accuracy: float | None = None
    perplexity: float | None = None
    evaluation: Mapping[str, float] = field(default_factory=dict[str, float])


@final
@dataclass(frozen=True)
class TrainingProgress:
    """The progress of a training.

    Attributes:
        point: Metrics of the last round.
        rounds: Number of planned rounds.
        reports: Reports per round.
        accuracy: The last accuracy that was measured; NaN for models that have none.
        seconds_left: Estimated time to the end, at the current speed.
        evaluation: The last other metrics that were measured, by name.
    """

    point: Point
    rounds: int
    reports: int
    accuracy: float
    seconds_left: float
    evaluation: Mapping[str, float] = field(default_factory=dict[str, float])


@final
class TrainingLoop:
    """Trains round by round, and writes the metrics and the statement of a run.

    Attributes:
        points: The metrics so far, one point per round.
        statement: The privacy statement that `run` writes at its end, if any round was released.

    Args:
        server: The server of the run.
        clients: Computes the updates.
        population: Decides who is available and who reports.
        measure: Evaluates the last released model; None to evaluate nothing.
        every: Rounds between two evaluations.
        rounds_per_hour: Speed of the simulated clock.
        state_folder: Folder with the witness of the run.
        canaries: The canaries of an audit, which are added to the sums.
    """

    def __init__(
        self,
        server: Server,
        clients: Clients,
        population: Population,
        measure: Callable[[], Measured] | None,
        *,
        every: int,
        rounds_per_hour: float = 1.0,
        state_folder: Path | None = None,
        canaries: AuditCanaries | None = None,
    ):
        self.statement: Statement | None = None
        self._server = server
        self._clients = clients
        self._population = population
        self._evaluate = measure
        self._every = every
        self._rounds_per_hour = rounds_per_hour
        self._state_folder = state_folder
        self._canaries = canaries
        self._metrics = Metrics(server.folder.root, server.rounds)
        self.points = self._metrics.points

    def run(
        self,
        on_round: Callable[[TrainingProgress], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> str | None:
        """Train until the rounds or the privacy budget are used up, or `should_stop` returns True.

        Args:
            on_round: Called after every round.
            should_stop: Called before every round.

        Returns:
            The reason why there is no further round; None if `should_stop` ended the training.
        """
        started, first = time.monotonic(), self._server.rounds
        if self._metrics.last < first:
            self._measure()
        with self._finishing():
            while not should_stop():
                try:
                    next_round(
                        self._server,
                        self._clients,
                        self._population,
                        self._rounds_per_hour,
                        self._canaries,
                    )
                except RunOver as reason:
                    return str(reason)
                self._measure()
                seconds_per_round = (time.monotonic() - started) / (self._server.rounds - first)
                on_round(self._progress(seconds_per_round))
        return self._server.ended()

    def close(self) -> None:
        """Close the files that a loop keeps open which did not run."""
        self._metrics.close_events()

    def _measure(self) -> None:
        """Record the metrics of a committed round; evaluate the model every few rounds."""
        server = self._server
        measured = Measured()
        if self._evaluate and (server.rounds % self._every == 0 or server.ended()):
            measured = self._evaluate()
        self._metrics.add(
            Point(
                server.rounds,
                server.epsilon,
                measured.accuracy,
                measured.perplexity,
                dict(measured.evaluation),
                clip_norm=None if server.settings.adaptive is None else server.clip_norm,
            )
        )

    def _progress(self, seconds_per_round: float) -> TrainingProgress:
        server = self._server
        rounds = server.plan.participation.rounds
        accuracies = (p.accuracy for p in reversed(self.points) if p.accuracy is not None)
        evaluations = (p.evaluation for p in reversed(self.points) if p.evaluation)
        return TrainingProgress(
            self.points[-1],
            rounds,
            server.plan.fleet.report_goal,
            accuracy=next(accuracies, math.nan),
            seconds_left=(rounds - server.rounds) * seconds_per_round,
            evaluation=next(evaluations, dict[str, float]()),
        )

    @contextmanager
    def _finishing(self) -> Generator[None]:
        """Write the curves and the statement at the end, also after an error or Ctrl-C."""
        try:
            yield
        except BaseException as error:
            try:
                self._finish()
            except Exception as reason:  # the first error is what happened to the training
                error.add_note(f"the curves and the statement could not be written: {reason}")
            raise
        self._finish()

    def _finish(self) -> None:
        self._metrics.close()
        folder = self._server.folder
        if self._server.rounds:
            self.statement = statement_of_files(
                folder.plan, folder.root, state_folder=self._state_folder
            )
            save_statement(self.statement, folder.root / "statement")


def refuse_other_files(folder: Path, *more: str) -> None:
    """Refuse a folder with files of the user that a new run would replace.

    What a run leaves that could not be created has its private folder beside it.

    Args:
        folder: The folder for the new run.
        more: Names of further files that the training writes.
    """
    if (folder / "private").exists():
        return
    if present := [name for name in (*more, *FILES_OF_A_RUN) if (folder / name).exists()]:
        raise InvalidInput(
            f"{folder} holds {present[0]}, which a new run would replace; choose an empty folder"
        )
