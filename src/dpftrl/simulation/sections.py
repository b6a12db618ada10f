"""What a training can be told, table by table; what makes no sense is refused on construction."""

from typing import Literal, final

import msgspec

from dpftrl._internal.checks import as_float, positive_number, whole_number
from dpftrl.errors import InvalidInput
from dpftrl.federated import Optimizer, Sgd
from dpftrl.federated.start_model import check_label


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file."""

    def _check_whole(self, *names: str, at_least: int = 1) -> None:
        for name in names:
            if (value := getattr(self, name)) is not None:
                whole_number(name, value, at_least)

    def _check_positive(self, *names: str) -> None:
        for name in names:
            if (value := getattr(self, name)) is not None:
                positive_number(name, value)


@final
class Data(Section, frozen=True):
    """Which text, and how much of it.

    Attributes:
        path: The file to read, for tasks that need one.
        vocabulary: A file of public words, one a line; else the task's own public vocabulary.
        vocabulary_size: Words of the task's own vocabulary.
        sentence_length: Words of a sentence.
        sentences_per_user: The first so many of each user.
        heldout_share: Share of the users that are only evaluated on.
        most_users: Users to train on at most.
    """

    path: str | None = None
    vocabulary: str | None = None
    vocabulary_size: int | None = None
    sentence_length: int | None = None
    sentences_per_user: int = 256
    heldout_share: float = 0.1
    most_users: int | None = None

    def __post_init__(self) -> None:
        self._check_whole("vocabulary_size", "sentence_length", "sentences_per_user", "most_users")
        if not 0 < as_float(self.heldout_share) < 1:
            raise InvalidInput(
                f"heldout_share must be above 0 and below 1, got {self.heldout_share!r}: somebody "
                "must be held out, to see how good the model is"
            )


@final
class Network(Section, frozen=True):
    """The model.

    Attributes:
        name: `lstm` or `window`.
        sizes: Of its layers; those not given take its defaults.
        start: A .safetensors model to start from; else fresh, or pre-trained on public text. If
            `dpftrl export` wrote it, the private runs behind it are composed with this one.
        other_people: Runs behind the start model, by identity or population label, whose people
            are others than those of this run: they are not composed. You state this; nobody can
            check it, and the privacy statement says so.
        pretraining_steps: Steps of plain training on the task's public text, before anything else.
        pretraining_rate: Their learning rate.
    """

    name: Literal["lstm", "window"] = "window"
    sizes: dict[str, int] = {}
    start: str | None = None
    other_people: tuple[str, ...] = ()
    pretraining_steps: int = 0
    pretraining_rate: float = 1e-3

    def __post_init__(self) -> None:
        self._check_whole("pretraining_steps", at_least=0)
        self._check_positive("pretraining_rate")
        if self.other_people and self.start is None:
            raise InvalidInput(
                f"other_people names {self.other_people[0]!r:.60} as an earlier run, and there is "
                "no start model: give model.start as well, or leave other_people out"
            )


@final
class Local(Section, frozen=True):
    """What a client does: plain SGD on its own sentences."""

    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 1.0
    most_batches: int | None = None

    def __post_init__(self) -> None:
        self._check_whole("epochs", "batch_size", "most_batches")
        self._check_positive("learning_rate")


@final
class Privacy(Section, frozen=True):
    """How private, and with what noise.

    Attributes:
        rounds: Rounds of training.
        report_goal: Reports that close a round.
        over_selection: Clients asked for each report wanted.
        availability: Share of the clients that can be asked at all; it only enters min-sep.
        mechanism: `blt` is optimised for the run; or a name that `dpftrl mechanisms` lists, or a
            .json file.
        buffers: Of an optimised BLT; else 4, or as many as there are rounds.
        min_sep: Rounds from one participation of a client to its next; else as many as the
            number of clients allows.
        max_participations: Of one client.
        epsilon: Calibrate the noise of this run, by itself, to this.
        noise_multiplier: Or take this noise.
        delta: Where epsilon is stated.
        budget: Stop before epsilon passes this, earlier runs included that are composed with this
            one. A calibrated run without earlier runs stays below by itself.
    """

    rounds: int = 60
    report_goal: int = 100
    over_selection: float = 1.15
    availability: float = 0.8
    mechanism: str = "blt"
    buffers: int | None = None
    min_sep: int | None = None
    max_participations: int | None = None
    epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-4
    budget: float | None = None

    def __post_init__(self) -> None:
        self._check_whole("rounds", "report_goal", "buffers", "min_sep", "max_participations")
        self._check_positive("epsilon", "noise_multiplier", "budget")


@final
class Simulation(Section, frozen=True):
    """How the simulated clients behave.

    Attributes:
        drop_out: Share of the contacted that never report.
        straggler_share: Share of the others that report late.
        least_available: Share that can be asked by day.
        most_available: Share that can be asked by night.
        rounds_per_hour: How fast rounds follow each other on the simulated clock.
        timer_hours: Clients wait for so many hours instead of for min-sep rounds.
    """

    drop_out: float = 0.05
    straggler_share: float = 0.1
    least_available: float = 0.5
    most_available: float = 0.9
    rounds_per_hour: float = 5.0
    timer_hours: float | None = None

    def __post_init__(self) -> None:
        for name in ("drop_out", "straggler_share", "least_available", "most_available"):
            if not 0 <= as_float(getattr(self, name)) <= 1:
                raise InvalidInput(f"{name} must be from 0 to 1, got {getattr(self, name)!r}")
        if not self.least_available <= self.most_available:
            raise InvalidInput(
                "least_available must not be above most_available, got "
                f"{self.least_available!r} and {self.most_available!r}"
            )
        if not (self.most_available > 0 and self.drop_out < 1):
            raise InvalidInput(
                "nobody would ever report: most_available must be above 0 and drop_out below 1, "
                f"got {self.most_available!r} and {self.drop_out!r}"
            )
        self._check_positive("rounds_per_hour", "timer_hours")
        positive_number("the hours of a round, 1 / rounds_per_hour,", 1 / self.rounds_per_hour)


@final
class Config(Section, frozen=True):
    """A whole training.

    Attributes:
        task: chitchat, poetry, stackoverflow or jsonl.
        population: What you call the people of this run; it is published with the model.
        seed: Decides everything but the noise.
        clip_norm: L2 norm of an update.
        evaluate_every: Rounds between two looks at the held-out users.
        evaluate_sentences: How many of their sentences are looked at.
        snapshot_every: Rounds between two saved noise states.
    """

    task: str = "chitchat"
    population: str | None = None
    seed: int = 0
    clip_norm: float = 0.5
    evaluate_every: int = 5
    evaluate_sentences: int = 4_000
    snapshot_every: int = 20
    data: Data = Data()
    model: Network = Network()
    client: Local = Local()
    server: Optimizer = Sgd(learning_rate=1.0, momentum=0.9)
    privacy: Privacy = Privacy(epsilon=8.0)
    simulation: Simulation = Simulation()

    def __post_init__(self) -> None:
        if self.population is not None:
            check_label(self.population)
        self._check_whole("seed", at_least=0)
        if not self.seed < 2**64:
            raise InvalidInput(f"seed must fit into 64 bits, got {self.seed}")
        self._check_positive("clip_norm")
        self._check_whole("evaluate_every", "evaluate_sentences", "snapshot_every")
