"""A whole training in one process: task, clients, server, metrics and statement."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.storage import replace_file
from dpftrl.accounting import account, calibrate
from dpftrl.errors import InvalidInput, RunOver
from dpftrl.federated import Layout, RunFolder, Server, Settings, StartModel
from dpftrl.mechanisms import Mechanism, load_mechanism, mechanism
from dpftrl.optimize import optimize_blt
from dpftrl.participation import UNCAPPED, MinSep
from dpftrl.plan import Fleet, Plan
from dpftrl.simulation.config import config_text, read_config
from dpftrl.simulation.jax_clients import JaxClients, LocalTraining
from dpftrl.simulation.metrics import Metrics, Point
from dpftrl.simulation.population import Clients, Population, next_round
from dpftrl.simulation.sections import Config, Network, Privacy
from dpftrl.statement.files import statement_of_files
from dpftrl.statement.statement import Statement, save_statement
from dpftrl.tasks import UNKNOWN, Report, Task, Vocabulary, load_task
from dpftrl.tasks.evaluation import Evaluation, evaluate, words_to_predict
from dpftrl.tasks.language_model import Lstm, Window, language_model
from dpftrl.tasks.pretraining import pretrain

Arrays = dict[str, NDArray[np.float32]]
# Called with the step and the loss.
OnStep = Callable[[int, float], None]

# What is never a target hardly counts.
NEVER = 1e-5


def network(settings: Network, task: Task) -> Lstm | Window:
    """The model for a task's vocabulary."""
    return language_model(settings.name, len(task.vocabulary), **settings.sizes)


def starting_arrays(
    settings: Network, task: Task, seed: int, report: OnStep | None = None
) -> Arrays:
    """The arrays of `starting_model`, where no private run is behind them.

    Raises:
        InvalidInput: A private run made the model. Arrays alone would not say so, and a run that
            starts from them would state too small an epsilon.
    """
    model = starting_model(settings, task, seed, report)
    if not isinstance(model, StartModel):
        return model
    if model.start.earlier:
        raise InvalidInput(
            f"{settings.start} was made by a private run, which must be composed with what starts "
            "from it; use starting_model, and hand over what it returns"
        )
    return dict(model.arrays)


def starting_model(
    settings: Network, task: Task, seed: int, report: OnStep | None = None
) -> StartModel | Arrays:
    """A model from a file, one trained on the task's public text, or a fresh one.

    Arrays without a file hold nothing from the clients. A file says where its model comes from, and
    a run that starts from it is composed with the private runs behind it.
    """
    model = network(settings, task)
    if settings.start is not None:
        start = StartModel.load(settings.start, settings.other_people)
        if why := Layout.of(model.init(seed)).misfit(start.arrays):
            raise InvalidInput(f"{settings.start} is a model of another kind: {why}")
        return start
    if settings.pretraining_steps:
        if task.public is None:
            raise InvalidInput(f"{task.name} has no public text to train on beforehand")
        steps, rate = settings.pretraining_steps, settings.pretraining_rate
        return pretrain(model, task.public, seed, steps=steps, learning_rate=rate, report=report)
    arrays = dict(model.init(seed))
    arrays["output.bias"] = _by_rank(len(task.vocabulary))
    return arrays


def _by_rank(size: int) -> NDArray[np.float32]:
    """Zipf's law: vocabularies list the most frequent words first, which is public."""
    share = np.full(size, NEVER)
    share[UNKNOWN + 1 :] = 1 / np.arange(1, size - UNKNOWN)
    return np.log(share / share.sum()).astype(np.float32)


# Of a BLT, if nobody says otherwise; in a training of fewer rounds, one for each.
BUFFERS = 4


def make_plan(privacy: Privacy, population: int) -> Plan:
    """The plan for a number of clients; only a plan can train."""
    fleet = Fleet(
        population,
        privacy.report_goal,
        availability=privacy.availability,
        over_selection=privacy.over_selection,
    )
    clients = MinSep(
        privacy.rounds,
        fleet.min_sep() if privacy.min_sep is None else privacy.min_sep,
        UNCAPPED if privacy.max_participations is None else privacy.max_participations,
    )
    if (privacy.epsilon is None) == (privacy.noise_multiplier is None):
        raise InvalidInput("[privacy] takes epsilon or noise_multiplier: give one of them")
    chosen = _mechanism(privacy, clients)
    noise_multiplier = privacy.noise_multiplier
    if noise_multiplier is None:
        noise_multiplier = calibrate(chosen, clients, privacy.epsilon or 0.0, privacy.delta)
    return Plan(fleet, account(chosen, clients, noise_multiplier, privacy.delta))


def _mechanism(privacy: Privacy, clients: MinSep) -> Mechanism:
    if privacy.mechanism == "blt":
        buffers = privacy.buffers or min(BUFFERS, clients.rounds)
        return optimize_blt(clients, buffers, objective="rms").mechanism
    if privacy.mechanism.endswith(".json"):
        return load_mechanism(privacy.mechanism)
    return mechanism(privacy.mechanism, clients)


CONFIG = "config.toml"


@final
@dataclass(frozen=True)
class Progress:
    """How far a training is.

    Attributes:
        point: The last round.
        rounds: Rounds planned.
        reports: Clients in a round.
        accuracy: The last that was measured.
        seconds_left: At the present pace.
    """

    point: Point
    rounds: int
    reports: int
    accuracy: float
    seconds_left: float


@final
class Training:
    """A training that is ready to go on.

    Attributes:
        config: What was asked for.
        task: The people and their text.
        server: The run.
        statement: The privacy statement that `run` wrote when it ended, if any round was released.
    """

    def __init__(
        self, config: Config, task: Task, server: Server, state_folder: Path | None = None
    ):
        """Use `begin` or `resume`."""
        local = config.client
        self.config = config
        self.task = task
        self.server = server
        self.statement: Statement | None = None
        self._state_folder = state_folder
        self._model = network(config.model, task)
        training = LocalTraining(
            local.learning_rate, local.batch_size, local.epochs, local.most_batches
        )
        self._clients: Clients = JaxClients(self._model, task.train, training, config.seed)
        self._population = Population(
            task.train.names,
            config.seed,
            drop_out=config.simulation.drop_out,
            straggler_share=config.simulation.straggler_share,
            least=config.simulation.least_available,
            most=config.simulation.most_available,
        )
        self._metrics = Metrics(server.folder.root, server.rounds)

    @classmethod
    def begin(
        cls,
        config: Config,
        folder: Path,
        *,
        plan: Plan | None = None,
        state_folder: Path | None = None,
        insecure_test_key: int | None = None,
        report: Report | None = None,
    ) -> Self:
        """Load the task, make the plan and the first model, and begin a run.

        Args:
            config: What was asked for.
            folder: Where the run goes.
            plan: Instead of the one that the config's [privacy] makes.
            state_folder: Where the witness goes.
            insecure_test_key: Seed of a noise key that anybody can guess. For tests alone.
            report: Is told what is being done before the first round.
        """
        RunFolder(folder).refuse_if_begun()
        task = load_training_task(config, report)
        plan = plan or make_plan(config.privacy, len(task.train))
        _check_population(plan, task)
        words_to_predict(task.heldout.sentences, config.evaluate_sentences)
        first = starting_model(config.model, task, config.seed, _steps(config, report))
        settings = Settings(
            clip_norm=config.clip_norm,
            optimizer=config.server,
            budget=config.privacy.budget,
            timer_hours=config.simulation.timer_hours,
            seed=config.seed,
            snapshot_every=config.snapshot_every,
            population=config.population,
        )
        server = Server.create(
            folder,
            plan,
            settings,
            first,
            state_folder=state_folder,
            insecure_test_key=insecure_test_key,
        )
        replace_file(folder / CONFIG, config_text(config).encode())
        return cls(config, task, server, state_folder)

    @classmethod
    def resume(
        cls,
        folder: Path,
        *,
        state_folder: Path | None = None,
        trust_folder: bool = False,
        report: Report | None = None,
    ) -> Self:
        """Go on with a run, as its own config says."""
        if not RunFolder(folder).exists:
            raise InvalidInput(f"{folder} holds no run to resume; leave --resume away to begin one")
        config = read_config(folder / CONFIG)
        server = Server.resume(folder, state_folder=state_folder, trust_folder=trust_folder)
        try:
            return cls(config, load_training_task(config, report), server, state_folder)
        except BaseException:
            server.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()

    def run(
        self,
        report: Callable[[Progress], None] = lambda _: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> str | None:
        """Train until the rounds or the budget are used up, or somebody wants to stop.

        Returns:
            Why there is no further round; None if it was asked to stop before.
        """
        started, first = time.monotonic(), self.server.rounds
        if self._metrics.last < first:
            self._measure()
        with self._wound_up():
            while not should_stop():
                try:
                    rate = self.config.simulation.rounds_per_hour
                    next_round(self.server, self._clients, self._population, rate)
                except RunOver as over:
                    return str(over)
                self._measure()
                pace = (time.monotonic() - started) / (self.server.rounds - first)
                report(self._progress(pace))
        return self.server.ended()

    def evaluate(self) -> Evaluation:
        """How the released model does on held-out people."""
        heldout, most = self.task.heldout.sentences, self.config.evaluate_sentences
        return evaluate(self._model, self.server.arrays(), heldout, most)

    def _measure(self) -> None:
        """Note a committed round, and every now and then how good the model is."""
        server, every = self.server, self.config.evaluate_every
        point = Point(server.rounds, server.epsilon)
        if server.rounds % every == 0 or server.ended():
            found = self.evaluate()
            point = Point(server.rounds, server.epsilon, found.accuracy, found.perplexity)
        self._metrics.add(point)

    def _progress(self, pace: float) -> Progress:
        server, points = self.server, self._metrics.points
        rounds = server.plan.participation.rounds
        measured = [point.accuracy for point in points if point.accuracy is not None]
        left = (rounds - server.rounds) * pace
        return Progress(points[-1], rounds, server.plan.fleet.report_goal, measured[-1], left)

    @contextmanager
    def _wound_up(self) -> Generator[None]:
        """However it ends, curves and statement say how far it came."""
        try:
            yield
        finally:
            self._metrics.close()
            folder = self.server.folder
            if self.server.rounds:
                self.statement = statement_of_files(
                    folder.plan, folder.root, state_folder=self._state_folder
                )
                save_statement(self.statement, folder.root / "statement")


def load_training_task(config: Config, report: Report | None = None) -> Task:
    """The task that a config names."""
    data = config.data
    given = None if data.vocabulary is None else Vocabulary.from_file(data.vocabulary)
    return load_task(
        config.task,
        vocabulary_size=None if given else data.vocabulary_size,
        sentence_length=data.sentence_length,
        sentences_per_user=data.sentences_per_user,
        heldout_share=data.heldout_share,
        most_users=data.most_users,
        path=data.path,
        vocabulary=given,
        report=report,
    )


def _check_population(plan: Plan, task: Task) -> None:
    if plan.fleet.population > len(task.train):
        raise InvalidInput(
            f"the plan is for {plan.fleet.population:,} clients, and {task.name} has "
            f"{len(task.train):,}; plan for these: --population {len(task.train)}"
        )


def _steps(config: Config, report: Report | None) -> Callable[[int, float], None] | None:
    if report is None:
        return None
    total = config.model.pretraining_steps

    def told(step: int, loss: float) -> None:
        report(step / total, f"training on public text, loss {loss:.2f}")

    return told
