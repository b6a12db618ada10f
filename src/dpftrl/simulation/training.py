"""A complete training in one process: task, plan, clients, server, metrics and statement.

`Training` is the front door: it creates or resumes a run and trains. The functions below it choose
the model to start from (`starting_model`), the plan (`make_plan`) and the data
(`load_training_task`).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from dpftrl import __version__
from dpftrl._internal.deprecation import renamed_argument, warn
from dpftrl._internal.progress import Progress
from dpftrl.accounting import account, calibrate
from dpftrl.auditing.canaries import PUBLIC as CANARIES
from dpftrl.auditing.canaries import CanaryKind, canary_file, check_fixed_clip_norm
from dpftrl.auditing.sentences import sentence_file
from dpftrl.errors import InvalidInput
from dpftrl.federated import Layout, RunFolder, Server, Settings, StartModel
from dpftrl.federated.start_model import DESCRIPTION_FILE
from dpftrl.mechanisms import Mechanism, load_mechanism, mechanism
from dpftrl.models.description import describe
from dpftrl.optimize import optimize_blt
from dpftrl.participation import UNCAPPED, MinSep
from dpftrl.plan import Fleet, Plan
from dpftrl.simulation.canary_clients import open_canaries
from dpftrl.simulation.config import Config, Network, Privacy, config_text, read_run_config
from dpftrl.simulation.data_summary import FEW_PEOPLE, DataSummary
from dpftrl.simulation.jax_clients import JaxClients, LocalTraining
from dpftrl.simulation.loop import Measured, TrainingLoop, TrainingProgress, refuse_other_files
from dpftrl.simulation.metrics import plot_points
from dpftrl.simulation.population import Population
from dpftrl.statement.statement import Statement
from dpftrl.tasks import UNKNOWN, Task, Vocabulary, load_task
from dpftrl.tasks.language_model import (
    Evaluation,
    Lstm,
    Window,
    architecture,
    evaluate,
    language_model,
    pretrain,
    words_to_predict,
)
from dpftrl.tasks.public_english import public_english, why_not_english

Arrays = dict[str, NDArray[np.float32]]
# A progress callback of pre-training, called with the step and its loss.
OnStep = Callable[[int, float], None]

CONFIG, CURVES = "config.toml", "curves.png"
# Default number of buffers of an optimized BLT. A training of fewer rounds has one per round.
BUFFERS = 4
# Weight of the special tokens in the first output bias. They are never targets; the most frequent
# word has weight 1.
SPECIAL_TOKEN_WEIGHT = 1e-5
# Sentences that are made from public frequencies, for tasks without public text.
PUBLIC_SENTENCES = 50_000


@final
class Training:
    """A training that was created with `create` or resumed with `resume`.

    Use it as a context manager: leaving it closes the server.

    Attributes:
        config: Configuration of the training.
        task: The users and their text.
        server: The server of the run.
        summary: Statistics of the text and of the noise, for the operator alone; they are also in
            the folder `private/` of the run, and must not be published.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        server: Server,
        state_folder: Path | None = None,
    ):
        """Use `create` or `resume` instead."""
        local = config.client
        self.config = config
        self.task = task
        self.server = server
        self._model = network(config.model, task)
        training = LocalTraining(
            local.learning_rate, local.batch_size, local.epochs, local.most_batches
        )
        clients = JaxClients(self._model, task.train, training, config.seed)
        population = Population(
            task.train.names,
            config.seed,
            drop_out=config.simulation.drop_out,
            straggler_share=config.simulation.straggler_share,
            least=config.simulation.least_available,
            most=config.simulation.most_available,
        )
        self.summary = DataSummary.of(task, server.plan, server.layout.size)
        self.summary.save(server.folder.private)
        self._loop = TrainingLoop(
            server,
            clients,
            population,
            self._measured,
            every=config.evaluate_every,
            rounds_per_hour=config.simulation.rounds_per_hour,
            state_folder=state_folder,
            canaries=open_canaries(server, self._model, training, config.seed),
        )

    @classmethod
    @renamed_argument("report", "on_progress")
    def create(
        cls,
        config: Config,
        folder: Path,
        *,
        plan: Plan | None = None,
        canaries: int = 0,
        canary_kind: CanaryKind = "gradients",
        state_folder: Path | None = None,
        insecure_test_key: int | None = None,
        on_progress: Progress | None = None,
    ) -> Self:
        """Load the task, make the plan and the first model, and create a run.

        Args:
            config: Configuration of the training.
            folder: Folder for the run's files.
            plan: Plan to use instead of one made from the configuration's [privacy] table.
            canaries: Number of canaries to add, for `dpftrl audit run`; see
                `dpftrl.auditing.canaries`.
            canary_kind: `gradients` for updates in random directions, which a white-box audit
                guesses from all releases; `sentences` for clients that train on unusual sentences,
                which a black-box audit guesses from the last model (`dpftrl.auditing.sentences`).
            state_folder: Folder for the witness.
            insecure_test_key: Seed of a noise key that anybody can guess. For tests only.
            on_progress: Called while the work before the first round goes on.

        Raises:
            InvalidInput: The folder already holds a run, or the settings do not fit together.
        """
        RunFolder(folder).refuse_if_begun()
        refuse_other_files(folder, CONFIG, DESCRIPTION_FILE)
        task = load_training_task(config, on_progress)
        plan = plan or make_plan(config.privacy, len(task.train))
        _check_population(plan, task)
        words_to_predict(task.heldout.sentences, config.evaluate_sentences)
        model = starting_model(config.model, task, config.seed, _on_step(config, on_progress))
        settings = Settings(
            clip_norm=config.clip_norm,
            optimizer=config.server,
            budget=config.privacy.budget,
            timer_hours=config.simulation.timer_hours,
            seed=config.seed,
            snapshot_every=config.snapshot_every,
            population=config.population,
        )
        sizes = architecture(network(config.model, task))
        files = {
            CONFIG: config_text(config).encode(),
            DESCRIPTION_FILE: describe(task, sizes, f"dpftrl {__version__}").content(),
        }
        if canaries:
            _check_canaries(settings)
            files[CANARIES] = (
                _canary_file(canaries, plan, model)
                if canary_kind == "gradients"
                else sentence_file(
                    canaries,
                    plan.participation,
                    sizes,
                    sentence_length=task.train.sentences.shape[1] - 1,
                    copies=config.data.sentences_per_user,
                ).encoded()
            )
        server = Server.create(
            folder,
            plan,
            settings,
            model,
            state_folder=state_folder,
            insecure_test_key=insecure_test_key,
            files=files,
        )
        return cls(config, task, server, state_folder)

    @classmethod
    @renamed_argument("report", "on_progress")
    def resume(
        cls,
        folder: Path,
        *,
        state_folder: Path | None = None,
        trust_folder: bool = False,
        on_progress: Progress | None = None,
    ) -> Self:
        """Resume a run with the configuration in its folder.

        Args:
            folder: Folder with the run's files.
            state_folder: Folder with the witness.
            trust_folder: Resume even if the witness is missing.
            on_progress: Called while the task is loaded.

        Raises:
            InvalidInput: The folder holds no run.
        """
        if not RunFolder(folder).exists:
            raise InvalidInput(f"{folder} holds no run to resume; leave out --resume to create one")
        if not (folder / CONFIG).exists():
            raise InvalidInput(
                f"{folder} holds a run without {CONFIG}: `dpftrl train` did not create it; resume "
                "it with the program that did, for example by calling dpftrl.simulate again"
            )
        config = read_run_config(folder / CONFIG)
        server = Server.resume(folder, state_folder=state_folder, trust_folder=trust_folder)
        try:
            return cls(config, load_training_task(config, on_progress), server, state_folder)
        except BaseException:
            server.close()
            raise

    @classmethod
    def begin(cls, config: Config, folder: Path, **options: Any) -> Self:
        """The old name of `create`."""
        warn("Training.begin", "Training.create")
        return cls.create(config, folder, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()
        self.server.close()

    @renamed_argument("report", "on_round")
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
        try:
            return self._loop.run(on_round, should_stop)
        finally:
            # Beside the public curves, with a line that only the operator may see.
            curves = self.server.folder.private / CURVES
            plot_points(self._loop.points, curves, self.summary.baseline)

    @property
    def statement(self) -> Statement | None:
        """Privacy statement that `run` writes at its end, if any round was released."""
        return self._loop.statement

    def evaluate(self) -> Evaluation:
        """Evaluate the last released model on held-out users."""
        heldout, most = self.task.heldout.sentences, self.config.evaluate_sentences
        return evaluate(self._model, self.server.arrays(), heldout, most)

    def _measured(self) -> Measured:
        result = self.evaluate()
        return Measured(result.accuracy, result.perplexity)


def _check_canaries(settings: Settings) -> None:
    """Refuse settings with which canaries could not be compared with the guarantee."""
    check_fixed_clip_norm(settings.adaptive)
    if settings.timer_hours is not None:
        raise InvalidInput(
            "canaries take part as often as the plan allows, and with timer_hours the guarantee "
            "counts how often clients were contacted; leave out timer_hours or the canaries"
        )


def _canary_file(canaries: int, plan: Plan, model: StartModel | Arrays) -> bytes:
    """The content of `canaries.json`, for random gradient directions."""
    arrays = model.arrays if isinstance(model, StartModel) else model
    size = Layout.of(arrays).size
    return canary_file(canaries, plan, plan.participation, size).encoded()


def network(settings: Network, task: Task) -> Lstm | Window:
    """Return the model for a task's vocabulary."""
    return language_model(settings.name, len(task.vocabulary), **settings.sizes)


@renamed_argument("report", "on_step")
def starting_arrays(
    settings: Network, task: Task, seed: int, on_step: OnStep | None = None
) -> Arrays:
    """Return the arrays of `starting_model`, if no private run trained them.

    Args:
        settings: The model and where it starts from.
        task: Task that the model is for.
        seed: Seed of the parameters.
        on_step: Called with each step of pre-training and its loss.

    Raises:
        InvalidInput: A private run trained the model. The arrays alone do not record that, so a run
            that starts from them would state too small an epsilon.
    """
    model = starting_model(settings, task, seed, on_step)
    if not isinstance(model, StartModel):
        return model
    if model.start.earlier:
        raise InvalidInput(
            f"{settings.start} was trained by a private run, which must be composed with the run "
            "that starts from it; use starting_model, and pass on what it returns"
        )
    return dict(model.arrays)


@renamed_argument("report", "on_step")
def starting_model(
    settings: Network, task: Task, seed: int, on_step: OnStep | None = None
) -> StartModel | Arrays:
    """Return a model from a file, a model pre-trained on public text, or a new one.

    If there is no public text for the task's vocabulary, the model is new (`why_not_pretrained`).

    A model without a file contains nothing from the clients. A file records where its model comes
    from, and a run that starts from it is composed with the private runs that trained it.

    Args:
        settings: The model and where it starts from.
        task: Task that the model is for.
        seed: Seed of the parameters.
        on_step: Called with each step of pre-training and its loss.

    Raises:
        InvalidInput: The file holds another kind of model.
    """
    model = network(settings, task)
    if settings.start is not None:
        start = StartModel.load(settings.start, settings.other_people)
        if mismatch := Layout.of(model.init(seed)).misfit(start.arrays):
            raise InvalidInput(f"{settings.start} is a model of another kind: {mismatch}")
        return start
    if settings.pretraining_steps and why_not_pretrained(settings, task) is None:
        return pretrain(
            model,
            _public_text(task),
            seed,
            steps=settings.pretraining_steps,
            learning_rate=settings.pretraining_rate,
            cooldown=settings.pretraining_cooldown,
            on_step=on_step,
        )
    arrays = dict(model.init(seed))
    arrays["output.bias"] = _zipf_log_frequencies(len(task.vocabulary))
    return arrays


def why_not_pretrained(settings: Network, task: Task) -> str | None:
    """Return why a model starts without pre-training, although the settings ask for it."""
    if settings.start is not None or not settings.pretraining_steps or task.public is not None:
        return None
    return why_not_english(task.vocabulary)


def _public_text(task: Task) -> NDArray[np.int32]:
    """Return the task's public text, or else text made from public English frequencies."""
    if task.public is not None:
        return task.public
    length = task.train.sentences.shape[1] - 1
    return public_english(task.vocabulary, PUBLIC_SENTENCES, length)


def _zipf_log_frequencies(size: int) -> NDArray[np.float32]:
    """Return log frequencies by Zipf's law: vocabularies list the most frequent words first.

    The order of a vocabulary is public, so this uses nothing from the clients.
    """
    share = np.full(size, SPECIAL_TOKEN_WEIGHT)
    share[UNKNOWN + 1 :] = 1 / np.arange(1, size - UNKNOWN)
    return np.log(share / share.sum()).astype(np.float32)


def make_plan(privacy: Privacy, population: int) -> Plan:
    """Return the plan for the [privacy] settings and a number of clients.

    Raises:
        InvalidInput: Both epsilon and noise_multiplier are given, or neither; or there are too few
            clients for one round.
    """
    fleet = Fleet(
        population,
        privacy.report_goal,
        availability=privacy.availability,
        over_selection=privacy.over_selection,
    )
    participation = MinSep(
        privacy.rounds,
        _min_sep(fleet) if privacy.min_sep is None else privacy.min_sep,
        UNCAPPED if privacy.max_participations is None else privacy.max_participations,
    )
    if (privacy.epsilon is None) == (privacy.noise_multiplier is None):
        raise InvalidInput(
            "[privacy] needs either epsilon or noise_multiplier: give exactly one of them"
        )
    chosen = _mechanism(privacy, participation)
    noise_multiplier = privacy.noise_multiplier
    if noise_multiplier is None:
        noise_multiplier = calibrate(chosen, participation, privacy.epsilon or 0.0, privacy.delta)
    return Plan(fleet, account(chosen, participation, noise_multiplier, privacy.delta))


def _min_sep(fleet: Fleet) -> int:
    """Return the min-sep that the population allows."""
    try:
        return fleet.min_sep()
    except InvalidInput as error:
        few = ""
        if fleet.population < FEW_PEOPLE:
            few = (
                f"; {fleet.population:,} people to train on are too few for a useful model, "
                "though: take the text of several hundred people or more"
            )
        raise InvalidInput(f"{error} (privacy.report_goal, privacy.over_selection){few}") from None


def _mechanism(privacy: Privacy, participation: MinSep) -> Mechanism:
    """Return the mechanism that the settings name: optimized, from a file, or by name."""
    if privacy.mechanism == "blt":
        buffers = privacy.buffers or min(BUFFERS, participation.rounds)
        return optimize_blt(participation, buffers, objective="rms").mechanism
    if privacy.mechanism.endswith(".json"):
        return load_mechanism(privacy.mechanism)
    return mechanism(privacy.mechanism, participation)


@renamed_argument("report", "on_progress")
def load_training_task(config: Config, on_progress: Progress | None = None) -> Task:
    """Load the task that a configuration names; `on_progress` is called meanwhile."""
    data = config.data
    vocabulary = None if data.vocabulary is None else Vocabulary.from_file(data.vocabulary)
    return load_task(
        config.task,
        vocabulary_size=None if vocabulary else data.vocabulary_size,
        sentence_length=data.sentence_length,
        sentences_per_user=data.sentences_per_user,
        heldout_share=data.heldout_share,
        most_users=data.most_users,
        path=data.path,
        vocabulary=vocabulary,
        on_progress=on_progress,
    )


def _check_population(plan: Plan, task: Task) -> None:
    """Refuse a plan for more clients than the task has."""
    if plan.fleet.population > len(task.train):
        raise InvalidInput(
            f"the plan is for {plan.fleet.population:,} clients, but {task.name} has only "
            f"{len(task.train):,}; make a plan with --population {len(task.train)}"
        )


def _on_step(config: Config, on_progress: Progress | None) -> OnStep | None:
    """Return a callback that shows the steps of pre-training as progress."""
    if on_progress is None:
        return None
    total = config.model.pretraining_steps

    def on_step(step: int, loss: float) -> None:
        on_progress(step / total, f"training on public text, loss {loss:.2f}")

    return on_step
