"""The settings of a run, which are fixed when the run is created."""

import math
from typing import Literal, cast, final

import msgspec

from dpftrl._internal.checks import positive_number, whole_number
from dpftrl.accounting.guarantee import BufferType
from dpftrl.adaptive_clipping import AdaptiveClipping, ClipNorm, check_clip_norm
from dpftrl.errors import InvalidInput
from dpftrl.federated.optimizers import Optimizer, Sgd
from dpftrl.federated.start_model import StartContent, check_label
from dpftrl.noise import Grid
from dpftrl.participation import MinSep
from dpftrl.plan import Plan


@final
class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of the server that are not part of the plan.

    Attributes:
        clip_norm: Every update is clipped to this L2 norm by the server, whatever the client did.
            `"adaptive"`, or an `AdaptiveClipping` with its options: the norm follows a quantile of
            the norms of the updates.
        optimizer: The server optimizer, which turns the noisy mean into a step of the model.
        budget: The run stops before epsilon, at the plan's delta, would exceed this value. Epsilon
            includes the earlier runs that are composed with this one.
        timer_hours: Hours that a client waits between two contacts, whatever the number of rounds;
            min-sep is then observed. None: a client waits for the plan's min-sep in rounds, and
            min-sep is enforced.
        seed: Seed of the random choice of cohorts.
        snapshot_every: Rounds between two snapshots of the noise buffers. A resumed run recomputes
            the noise of the rounds after the last snapshot only.
        hash_clients: Write keyed hashes of the clients' names into files instead of the names.
        identity: How clients are known by their names. `stated`: the caller of the server vouches
            for the names. `registered`: each client signs its messages with a key that was
            registered beforehand. `unregistered`: a client gets a new name when it restarts.
        aggregators: Accept partial sums of aggregators, which clip and add updates for the server.
            The guarantee then rests on them too.
        population: Your label for the people of this run, such as "es-ES keyboards". It is recorded
            and published with the model; nothing is derived from it.
    """

    clip_norm: ClipNorm
    optimizer: Optimizer = Sgd()
    budget: float | None = None
    timer_hours: float | None = None
    seed: int = 0
    snapshot_every: int = 20
    hash_clients: bool = True
    identity: Literal["stated", "registered", "unregistered"] = "stated"
    aggregators: bool = False
    population: str | None = None

    def __post_init__(self) -> None:
        if self.clip_norm == "adaptive":  # so that the options are sealed with the settings
            msgspec.structs.force_setattr(self, "clip_norm", AdaptiveClipping())

    @property
    def adaptive(self) -> AdaptiveClipping | None:
        """The options of adaptive clipping, or None for a fixed clip norm."""
        return self.clip_norm if isinstance(self.clip_norm, AdaptiveClipping) else None

    def grid(self, plan: Plan) -> Grid:
        """The grid of the sums. Its clip norm bounds what one client adds to a sum."""
        if isinstance(self.clip_norm, AdaptiveClipping):
            return self.clip_norm.grid(plan.noise_multiplier)
        return Grid.for_noise(plan.noise_multiplier, cast("float", self.clip_norm))

    def check(self, plan: Plan) -> None:
        """Refuse settings that do not fit the plan, or that could not be read back from a file."""
        self._check_types()
        check_clip_norm(self.clip_norm)
        if self.adaptive is not None and self.aggregators:
            raise InvalidInput(
                "adaptive clipping does not work with aggregators: they clip to a fixed norm; set "
                "clip_norm to a number, or leave out aggregators"
            )
        if self.budget is not None:
            positive_number("budget", self.budget)
        if self.timer_hours is not None:
            positive_number("timer_hours", self.timer_hours)
        if self.population is not None:
            check_label(self.population)
        if whole_number("seed", self.seed, at_least=0) >= 2**64:
            raise InvalidInput(f"seed must fit into 64 bits, got {self.seed}")
        whole_number("snapshot_every", self.snapshot_every)
        if not isinstance(plan.participation, MinSep):
            raise InvalidInput(
                "a server can enforce min-sep, not fixed epochs; plan for MinSep(rounds, min_sep)"
            )
        plan.mechanism.check_rounds(plan.participation.rounds)
        self.optimizer.check(plan.participation.rounds)
        grid = self.grid(plan)
        if plan.fleet.report_goal > grid.most_updates:
            raise InvalidInput(
                f"with so little noise a sum holds {grid.most_updates:,} updates, and the report "
                f"goal is {plan.fleet.report_goal:,}"
            )
        self._check_fleet(plan)

    def _check_types(self) -> None:
        try:
            msgspec.convert(msgspec.to_builtins(self), Settings)
        except (msgspec.ValidationError, TypeError) as error:
            raise InvalidInput(f"the settings make no sense: {error}") from None

    def _check_fleet(self, plan: Plan) -> None:
        """Refuse a fleet that is too small for min-sep even in strict rotation."""
        fleet, min_sep = plan.fleet, plan.participation.min_sep
        if self.timer_hours is None and min_sep * cohort_size(plan) > fleet.population:
            if plan.participation.rounds <= fleet.population // cohort_size(plan):
                return
            raise InvalidInput(
                f"{fleet.population:,} clients are too few: each round contacts "
                f"{cohort_size(plan):,}, and nobody may return for {min_sep:,} rounds; plan for a "
                "smaller min-sep or a smaller report goal"
            )


class RunFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of `run.json`.

    Attributes:
        run: The identity of the run.
        settings: The settings of the run.
        names: Names of the arrays of the model.
        shapes: Shapes of these arrays, in the same order.
        test_key: Whether the noise key is a test key, which anybody can guess.
        buffers: Number type of the noise buffers. Files of version 1 do not have this field; their
            buffers were float32.
        start: The model file that the run started from; None if it started from arrays. Files of
            version 1 do not have this field.
    """

    format: Literal["dpftrl run"] = "dpftrl run"
    version: Literal[1, 2] = 2
    run: str
    settings: Settings
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    test_key: bool
    buffers: BufferType = "float32"
    start: StartContent | None = None


def cohort_size(plan: Plan) -> int:
    """The number of clients that a round contacts."""
    asked = plan.fleet.report_goal * plan.fleet.over_selection
    if not asked - 1e-9 <= plan.fleet.population:
        raise InvalidInput(
            f"a round would contact {asked:,.0f} clients, and there are "
            f"{plan.fleet.population:,}; lower the report goal or the over-selection"
        )
    return math.ceil(asked - 1e-9)
