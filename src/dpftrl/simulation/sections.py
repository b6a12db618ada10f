"""The settings of a training, one class per table of the TOML file; checked on construction."""

from typing import Literal, final

import msgspec

from dpftrl._internal.checks import as_float, positive_number, whole_number
from dpftrl.errors import InvalidInput
from dpftrl.federated import Optimizer, Sgd
from dpftrl.federated.start_model import check_label


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One table of the configuration file."""

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
    """Table [data]: which text to use, and how much of it.

    Attributes:
        path: File to read, for tasks that need one.
        vocabulary: File of public words, one per line. By default, the task's own public
            vocabulary.
        vocabulary_size: Number of words in the task's own vocabulary.
        sentence_length: Words per sentence.
        sentences_per_user: Largest number of sentences per user; the first ones are kept.
        heldout_share: Share of the users that are used for evaluation only.
        most_users: Largest number of users to train on.
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
                f"heldout_share must be above 0 and below 1, got {self.heldout_share!r}: the model "
                "is evaluated on held-out users"
            )


@final
class Network(Section, frozen=True):
    """Table [model]: the model and where it starts from.

    Attributes:
        name: `lstm` or `window`.
        sizes: Sizes of the layers. A size that is not given has the model's default.
        start: A .safetensors model to start from. By default, the model is freshly initialized or
            pre-trained on public text. If `dpftrl export` wrote the file, the private runs that
            trained the model are composed with this one.
        other_people: Earlier runs of the start model, by run id or population label, whose people
            are others than those of this run. They are not composed. This is your statement:
            nobody can check it, and the privacy statement says so.
        pretraining_steps: Steps of non-private training on the task's public text, before the first
            round.
        pretraining_rate: Learning rate of the pre-training.
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
                f"other_people names {self.other_people[0]!r:.60} as an earlier run, but there is "
                "no start model: give model.start as well, or leave other_people out"
            )


@final
class Local(Section, frozen=True):
    """Table [client]: local training of a client, which is plain SGD on its own sentences.

    Attributes:
        epochs: Passes over the client's sentences.
        batch_size: Sentences per batch.
        learning_rate: Learning rate of SGD.
        most_batches: Largest number of batches per client and round.
    """

    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 1.0
    most_batches: int | None = None

    def __post_init__(self) -> None:
        self._check_whole("epochs", "batch_size", "most_batches")
        self._check_positive("learning_rate")


@final
class Privacy(Section, frozen=True):
    """Table [privacy]: the guarantee, the noise, and who can take part.

    Attributes:
        rounds: Number of training rounds.
        report_goal: Number of reports that close a round.
        over_selection: Clients contacted per report needed.
        availability: Share of the clients that can be contacted at all. It only affects the default
            of `min_sep`.
        mechanism: `blt`, which is optimized for this run; or a name that `dpftrl mechanisms` lists;
            or a .json file.
        buffers: Buffers of the optimized BLT. By default 4, or the number of rounds if smaller.
        min_sep: Rounds from one contact of a client to its next. By default, as many as the number
            of clients allows.
        max_participations: Largest number of contacts per client.
        epsilon: Target epsilon of this run alone, which the noise is calibrated to.
        noise_multiplier: Noise multiplier, instead of `epsilon`.
        delta: Delta of the guarantee.
        budget: The run stops before epsilon exceeds this value. Earlier runs that are composed with
            this one count. A run with a target epsilon and no earlier runs stays within it anyway.
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
    """Table [simulation]: how the simulated clients behave.

    Attributes:
        drop_out: Share of the contacted clients that never report.
        straggler_share: Share of the other clients that report late.
        least_available: Share of clients that are available by day.
        most_available: Share of clients that are available by night.
        rounds_per_hour: Rounds per hour of the simulated clock.
        timer_hours: Hours from one contact of a client to its next, instead of `min_sep` rounds.
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
                "no client would ever report: most_available must be above 0 and drop_out below 1, "
                f"got {self.most_available!r} and {self.drop_out!r}"
            )
        self._check_positive("rounds_per_hour", "timer_hours")
        positive_number("the hours per round, 1 / rounds_per_hour,", 1 / self.rounds_per_hour)


@final
class Config(Section, frozen=True):
    """The complete configuration of a training.

    Attributes:
        task: chitchat, poetry, stackoverflow or jsonl.
        population: Label for the people of this run. It is published with the model.
        seed: Seed of everything except the noise.
        clip_norm: Largest L2 norm of a client's update; larger updates are scaled down.
        evaluate_every: Rounds between two evaluations on held-out users.
        evaluate_sentences: Largest number of held-out sentences per evaluation.
        snapshot_every: Rounds between two saved noise states.
        data: Which text to use.
        model: The model and where it starts from.
        client: Local training of a client.
        server: Optimizer of the server.
        privacy: The guarantee and the noise.
        simulation: How the simulated clients behave.
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
