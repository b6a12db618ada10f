"""DP-FTRL as a Flower strategy."""

import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing, contextmanager
from logging import INFO, WARNING
from random import Random
from secrets import token_hex
from typing import Final, final

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore import log

from dpftrl._internal.formatting import rounded_up
from dpftrl.errors import InvalidInput, ReportRefused, RunOver, TooFewClients, UnsafeState
from dpftrl.federated import Round, Server, Settings, StartModel
from dpftrl.flower.identity import identity_of, named_nodes
from dpftrl.flower.in_process import InProcessGrid
from dpftrl.flower.messages import (
    ARRAYS,
    CONFIG,
    OURS,
    Instruction,
    arrays_of,
    attempt_of,
    nonce_of,
    record_of,
    refusal_of,
    update_of,
)
from dpftrl.flower.replies import replies_to
from dpftrl.flower.run import Model, Patience, Place, RunClock
from dpftrl.plan import Plan

POLL_SECONDS: Final = 1.0
# Between two lines in the log that say what is being waited for.
SAY_SECONDS: Final = 300.0


def begin_when_enough(
    server: Server, clock: RunClock, grid: Grid, seconds: float
) -> tuple[dict[str, int], Round]:
    """The nodes by name, and the round that contacts some of them.

    Args:
        server: The run.
        clock: The time that timers go by.
        grid: What knows the nodes.
        seconds: How long to wait.

    Raises:
        TooFewClients: The time is over.
        RunOver: There is no further round.
    """
    if isinstance(grid, InProcessGrid) and server.settings.timer_hours is None:
        seconds = 0.0  # simulated nodes are all there already: waiting makes no more of them
    say = time.monotonic()
    deadline = say + seconds
    while True:
        nodes = named_nodes(grid, server.settings.identity)
        is_last = time.monotonic() >= deadline
        try:
            return nodes, _begin(server, clock, list(nodes), is_last)
        except TooFewClients as error:
            if is_last:
                raise
            if time.monotonic() >= say:
                left = deadline - time.monotonic()
                log(INFO, "Waiting for nodes, for %.0f s more at most: %s", left, error)
                say += SAY_SECONDS
        time.sleep(POLL_SECONDS)


def _begin(server: Server, clock: RunClock, names: list[str], is_last: bool) -> Round:
    goal = server.plan.fleet.report_goal
    if server.in_flight and not is_last and server.contacted_before(names) < goal:
        raise TooFewClients("too few of an interrupted round's nodes are online again")
    by_time = server.settings.timer_hours is not None
    return server.begin(names, clock.hours() if by_time else None)


def collect(current: Round, asked: Mapping[str, str], replies: Iterable[Message]) -> dict[str, int]:
    """Hand each reply to the round at once, until there are enough.

    Args:
        current: The round that the replies are for.
        asked: The name of each node that was asked, by the nonce that only it was told.
        replies: As they come.

    Returns:
        How many nodes refused, by reason.
    """
    refusals: Counter[str] = Counter()
    for reply in replies:
        if not reply.has_content():
            refusals.update(filter(None, [refusal_of(reply)]))
            continue
        name = asked.get(nonce_of(reply), "")
        try:
            if current.report(name, update_of(reply), attempt_of(reply)):
                break
        except ReportRefused as error:
            log(WARNING, "A report was refused: %s", error)
    return dict(refusals)


def complain(refusals: dict[str, int], asked: int) -> None:
    """If all nodes refuse for the same reason, trying again will not help."""
    for why, count in refusals.items():
        if count == asked:
            raise InvalidInput(f"every node that was asked refuses: {why}")
        log(WARNING, "Some nodes refuse: %s", why)


Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


@final
class DpFtrl(Strategy):
    """Correlated noise, enforced participation, and a run that survives crashes.

    Nodes run a ClientApp with `client_mod`. Cohort, clipping, sum, noise, journal and ledger are
    those of `dpftrl.federated.Server`: this class carries models to nodes and updates back, and
    calls it a drop-out when nothing comes. The same call on the same folder resumes a run.

    Args:
        plan: Mechanism, noise, fleet, and the guarantee that they have together.
        settings: Clip norm, server optimiser and so on.
        folder: Where the run's files go; never into Flower's own folders, which are cleaned up.
        patience: How long to wait, and for what.
        require_auth: Refuse a SuperLink that does not authenticate its SuperNodes.
        state_folder: Where the witness goes, outside the folder.
        trust_folder: Go on although the witness is missing.
        insecure_test_key: Seed of a noise key that anybody can guess. For tests alone.
    """

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        folder: str | os.PathLike[str],
        *,
        patience: Patience | None = None,
        require_auth: bool = False,
        state_folder: str | os.PathLike[str] | None = None,
        trust_folder: bool = False,
        insecure_test_key: int | None = None,
    ):
        settings.check(plan)
        self._plan = plan
        self._settings = settings
        self._patience = patience or Patience()
        self._require_auth = require_auth
        self._place = Place(
            folder, state_folder, trust_folder, insecure_test_key, self._patience.lock
        )
        self._open: tuple[Server, RunClock] | None = None
        self._open_round: Round | None = None
        self._asked: dict[str, str] = {}

    def start(  # pyright: ignore[reportIncompatibleMethodOverride]  # the plan knows the rounds
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | StartModel,
        *,
        train_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Train until the plan's rounds or the budget are used up.

        Args:
            grid: What reaches the nodes.
            initial_arrays: The model to start from; a run that goes on has its own, of this shape.
                A model from a file goes through `StartModel.load`, so that private runs behind it
                are composed with this one.
            train_config: Goes to the nodes with the model, as `config`.
            evaluate_fn: Is told the number of rounds and the model: at the beginning, and after
                every round. It must not look at the data of clients.
        """
        config, result = train_config or ConfigRecord(), Result()
        is_file = isinstance(initial_arrays, StartModel)
        model = initial_arrays if is_file else arrays_of(initial_arrays)
        with self._opened(grid, model) as server:
            self.summary()
            result.arrays = record_of(server.arrays())
            _evaluate(result, server.rounds, evaluate_fn)
            try:
                while True:
                    result.arrays = self._next_round(server, result.arrays, config, grid)
                    _evaluate(result, server.rounds, evaluate_fn)
            except RunOver as over:
                log(INFO, "The run is over: %s", over)
        return result

    @contextmanager
    def _opened(self, grid: Grid, model: Model) -> Generator[Server]:
        identity = identity_of(grid)
        if self._require_auth and identity != "registered":
            raise InvalidInput(
                "authentication is required, and this SuperLink has no TLS, or lets anybody in; "
                "start it with TLS and --enable-supernode-auth, and register each node's key"
            )
        with self._place.open(self._plan, self._settings, model, identity) as server:
            if self._require_auth and server.settings.identity != "registered":
                raise InvalidInput(
                    "authentication is required, and this run began without it: begin another"
                )
            self._open = server, RunClock(server.clock)
            try:
                yield server
            finally:
                self._open = self._open_round = None
                self._asked = {}

    def _next_round(
        self, server: Server, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> ArrayRecord:
        for failed in range(1, self._patience.attempts + 1):
            number = server.rounds + 1
            messages = self.configure_train(number, arrays, config, grid)
            with closing(replies_to(grid, list(messages), self._patience.replies)) as replies:
                released, _ = self.aggregate_train(number, replies)
            if released is not None:
                return released
            time.sleep(self._patience.before_attempt(failed))
        raise TooFewClients(
            f"{self._patience.attempts} attempts in a row had too few reports; ask more nodes for "
            "each report wanted (over_selection), or look at what the nodes log"
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Choose the cohort, as soon as enough nodes are there, and write to it."""
        server, clock = self._running()
        if server.settings.identity == "registered" and identity_of(grid) != "registered":
            raise UnsafeState(
                "the SuperLink lets anybody in by now, and the run promised otherwise"
            )
        nodes, current = begin_when_enough(server, clock, grid, self._patience.nodes)
        rounds = self._plan.participation.rounds
        log(INFO, "[ROUND %s/%s] attempt %s", server_round, rounds, current.attempt)
        told = ConfigRecord({**config, "server-round": server_round})
        # The arrays are one record for all: Flower then sends and keeps them once.
        names = list(current.clients)
        # In an order of its own each time: the first to be heard must not always be the same.
        Random(current.attempt).shuffle(names)
        self._open_round, self._asked = current, {token_hex(16): name for name in names}
        group, ttl = f"{server.run_id}-{current.attempt}", self._patience.replies
        return [
            Message(
                RecordDict({ARRAYS: arrays, CONFIG: told, OURS: self._instruction(current, nonce)}),
                nodes[name],
                MessageType.TRAIN,
                ttl=ttl,
                group_id=group,
            )
            for nonce, name in self._asked.items()
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up replies until there are enough, and release the round; else abandon it."""
        del server_round
        current, self._open_round = self._open_round, None
        if current is None:
            raise InvalidInput("no round was begun: configure_train comes before aggregate_train")
        refusals = collect(current, self._asked, replies)
        server, _ = self._running()
        if current.enough:
            released = server.commit(current)
            log(INFO, "Released; epsilon is %s so far", rounded_up(released.epsilon))
            return record_of(released.model), None
        server.abandon(current, "too few reports")
        log(WARNING, "Too few reports: nothing is released, and the row of noise is tried again")
        complain(refusals, len(self._asked))
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Nobody is asked: what nodes say of their data would not be protected by any noise."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """There is nothing to aggregate."""
        del server_round, replies
        return None

    def summary(self) -> None:
        """Log what the run is."""
        plan, promised = self._plan, self._plan.guarantee
        log(INFO, "DP-FTRL: %s, noise multiplier %.4g", plan.mechanism, plan.noise_multiplier)
        epsilon = rounded_up(promised.epsilon)
        log(INFO, "Promised: epsilon %s at delta %g", epsilon, promised.delta)
        if self._open is not None:
            server, _ = self._open
            if server.start is not None and server.start.composed:
                together = rounded_up(server.planned.epsilon)
                log(INFO, "With the earlier runs behind the start model: epsilon %s", together)
            identity = server.settings.identity
            log(INFO, "Nodes are %s; rounds released before: %s", identity, server.rounds)

    def _instruction(self, current: Round, nonce: str) -> ConfigRecord:
        told = Instruction(
            run=self._running()[0].run_id,
            attempt=current.attempt,
            row=current.number,
            rounds=self._plan.participation.rounds,
            clip_norm=self._settings.clip_norm,
            min_sep=self._plan.participation.min_sep,
            timer_hours=self._settings.timer_hours or 0.0,
            nonce=nonce,
        )
        return told.record()

    def _running(self) -> tuple[Server, RunClock]:
        if self._open is None:
            raise InvalidInput("no run is open: this strategy works through its start()")
        return self._open


def _evaluate(result: Result, rounds: int, evaluate_fn: Evaluate | None) -> None:
    found = evaluate_fn(rounds, result.arrays) if evaluate_fn else None
    if found is not None:
        log(INFO, "Evaluated after %s rounds: %s", rounds, found)
        result.evaluate_metrics_serverapp[rounds] = found
