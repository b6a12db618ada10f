"""`DpFtrl`, a Flower strategy that runs DP-FTRL with correlated noise."""

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
from dpftrl.flower.run import Model, Patience, RunClock, RunLocation, identity_of, named_nodes
from dpftrl.plan import Plan

# Seconds between two requests for the list of nodes that are online.
POLL_SECONDS: Final = 1.0
# Seconds between two log lines while the strategy waits for nodes.
LOG_SECONDS: Final = 300.0

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


@final
class DpFtrl(Strategy):
    """A strategy with correlated noise, enforced participation, and runs that survive crashes.

    Nodes run a ClientApp with `client_mod`. `dpftrl.federated.Server` selects the cohort, clips,
    sums, adds noise, and keeps the journal and the ledger. This class sends models to nodes and
    receives their updates. A node that does not reply counts as a drop-out. The same call on the
    same folder resumes a run.

    Args:
        plan: Mechanism, noise multiplier, fleet, and the guarantee that follows from them.
        settings: Clip norm, server optimizer and other settings of the server.
        folder: Folder for the run's files. Do not use Flower's own folders: Flower deletes files
            there.
        patience: How long to wait for nodes, replies and other servers.
        require_auth: Refuse a SuperLink that does not authenticate its SuperNodes.
        state_folder: Folder for the witness, outside of `folder`.
        trust_folder: Resume even if the witness is missing.
        insecure_test_key: Seed of a noise key that anybody can guess. For tests only.
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
        self._location = RunLocation(
            folder, state_folder, trust_folder, insecure_test_key, self._patience.lock
        )
        self._open: tuple[Server, RunClock] | None = None
        self._open_round: Round | None = None
        self._contacted: dict[str, str] = {}  # node names by nonce

    def start(  # pyright: ignore[reportIncompatibleMethodOverride]  # the plan knows the rounds
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | StartModel,
        *,
        train_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Train until the plan's rounds or the privacy budget are used up.

        Args:
            grid: Grid that reaches the nodes.
            initial_arrays: Model to start from. A resumed run continues from its own model, which
                must have the same shapes. Load a model from a file with `StartModel.load`, so that
                earlier private runs that trained it are composed with this one.
            train_config: Configuration that is sent to the nodes with the model, as `config`.
            evaluate_fn: Called with the number of released rounds and the model, at the start and
                after every round. It must not use the data of clients.

        Returns:
            Flower's result, with the last released model.

        Raises:
            InvalidInput: The folder holds another run, or all contacted nodes refuse for the same
                reason.
            TooFewClients: Too few nodes are online, or too many attempts in a row failed.
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
            except RunOver as reason:
                log(INFO, "The run is over: %s", reason)
        return result

    @contextmanager
    def _opened(self, grid: Grid, model: Model) -> Generator[Server]:
        """Create or resume the run, and close it at the end."""
        identity = identity_of(grid)
        if self._require_auth and identity != "registered":
            raise InvalidInput(
                "authentication is required, but this SuperLink has no TLS, or accepts any node; "
                "start it with TLS and --enable-supernode-auth, and register each node's key"
            )
        with self._location.open(self._plan, self._settings, model, identity) as server:
            if self._require_auth and server.settings.identity != "registered":
                raise InvalidInput(
                    "authentication is required, but this run was created without it; start another"
                )
            self._open = server, RunClock(server.clock)
            try:
                yield server
            finally:
                self._open = self._open_round = None
                self._contacted = {}

    def _next_round(
        self, server: Server, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> ArrayRecord:
        """Repeat attempts until one is committed; return the released model."""
        for failed in range(1, self._patience.attempts + 1):
            number = server.rounds + 1
            messages = self.configure_train(number, arrays, config, grid)
            with closing(replies_to(grid, list(messages), self._patience.replies)) as replies:
                released, _ = self.aggregate_train(number, replies)
            if released is not None:
                return released
            time.sleep(self._patience.before_attempt(failed))
        raise TooFewClients(
            f"{self._patience.attempts} attempts in a row had too few reports; contact more nodes "
            "per report (over_selection), or look into the logs of the nodes"
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Select the cohort as soon as enough nodes are online; return the messages to it."""
        server, clock = self._running()
        if server.settings.identity == "registered" and identity_of(grid) != "registered":
            raise UnsafeState(
                "the SuperLink now accepts any node, but the run promises registered nodes"
            )
        nodes, current = begin_when_enough(server, clock, grid, self._patience.nodes)
        rounds = self._plan.participation.rounds
        log(INFO, "[ROUND %s/%s] attempt %s", server_round, rounds, current.attempt)
        app_config = ConfigRecord({**config, "server-round": server_round})
        names = list(current.clients)
        # Each attempt has a different order, so that the first reply does not always come from the
        # same node.
        Random(current.attempt).shuffle(names)
        self._open_round = current
        self._contacted = {token_hex(16): name for name in names}  # nonces of 128 bits
        group, ttl = f"{server.run_id}-{current.attempt}", self._patience.replies
        # All messages share one array record, so that Flower sends and stores the model once.
        return [
            Message(
                RecordDict(
                    {ARRAYS: arrays, CONFIG: app_config, OURS: self._instruction(current, nonce)}
                ),
                nodes[name],
                MessageType.TRAIN,
                ttl=ttl,
                group_id=group,
            )
            for nonce, name in self._contacted.items()
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add up reports and commit the round once there are enough; otherwise abandon it."""
        del server_round
        current, self._open_round = self._open_round, None
        if current is None:
            raise InvalidInput("no round is open: call configure_train before aggregate_train")
        refusals = collect(current, self._contacted, replies)
        server, _ = self._running()
        if current.enough:
            released = server.commit(current)
            log(INFO, "Released; epsilon is %s so far", rounded_up(released.epsilon))
            return record_of(released.model), None
        server.abandon(current, "too few reports")
        log(
            WARNING,
            "Too few reports: nothing is released, and the next attempt uses the same noise row",
        )
        check_refusals(refusals, len(self._contacted))
        return None, None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: no noise would protect metrics that nodes compute on their data."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return None: nodes do not evaluate."""
        del server_round, replies
        return None

    def summary(self) -> None:
        """Log the mechanism, the noise and the promised guarantee of the run."""
        plan, promised = self._plan, self._plan.guarantee
        log(INFO, "DP-FTRL: %s, noise multiplier %.4g", plan.mechanism, plan.noise_multiplier)
        epsilon = rounded_up(promised.epsilon)
        log(INFO, "Promised: epsilon %s at delta %g", epsilon, promised.delta)
        if self._open is not None:
            server, _ = self._open
            if server.start is not None and server.start.composed:
                together = rounded_up(server.planned.epsilon)
                log(INFO, "With the earlier runs of the start model: epsilon %s", together)
            identity = server.settings.identity
            log(INFO, "Nodes are %s; rounds released so far: %s", identity, server.rounds)

    def _instruction(self, current: Round, nonce: str) -> ConfigRecord:
        instruction = Instruction(
            run=self._running()[0].run_id,
            attempt=current.attempt,
            row=current.number,
            rounds=self._plan.participation.rounds,
            clip_norm=self._running()[0].client_clip_norm,
            min_sep=self._plan.participation.min_sep,
            timer_hours=self._settings.timer_hours or 0.0,
            nonce=nonce,
        )
        return instruction.record()

    def _running(self) -> tuple[Server, RunClock]:
        """Return the server and the clock of the open run."""
        if self._open is None:
            raise InvalidInput("no run is open: call start(), which opens it")
        return self._open


def _evaluate(result: Result, rounds: int, evaluate_fn: Evaluate | None) -> None:
    """Call `evaluate_fn`, if there is one, and keep its metrics in the result."""
    metrics = evaluate_fn(rounds, result.arrays) if evaluate_fn else None
    if metrics is not None:
        log(INFO, "Evaluated after %s rounds: %s", rounds, metrics)
        result.evaluate_metrics_serverapp[rounds] = metrics


def begin_when_enough(
    server: Server, clock: RunClock, grid: Grid, seconds: float
) -> tuple[dict[str, int], Round]:
    """Wait until enough nodes may be contacted, then start a round.

    Args:
        server: The server of the run.
        clock: Clock for contact timers in hours.
        grid: Grid that knows the nodes.
        seconds: Longest time to wait for nodes, in seconds.

    Returns:
        The ids of the online nodes by name, and the round, which contacts some of them.

    Raises:
        TooFewClients: There were not enough nodes within this time.
        RunOver: The plan's rounds or the privacy budget are used up.
    """
    if isinstance(grid, InProcessGrid) and server.settings.timer_hours is None:
        seconds = 0.0  # all simulated nodes are online already: waiting would not add any
    next_log = time.monotonic()
    deadline = next_log + seconds
    while True:
        nodes = named_nodes(grid, server.settings.identity)
        is_last = time.monotonic() >= deadline
        try:
            return nodes, _begin(server, clock, list(nodes), is_last)
        except TooFewClients as error:
            if is_last:
                raise
            if time.monotonic() >= next_log:
                seconds_left = deadline - time.monotonic()
                log(INFO, "Waiting for nodes, at most %.0f s more: %s", seconds_left, error)
                next_log += LOG_SECONDS
        time.sleep(POLL_SECONDS)


def _begin(server: Server, clock: RunClock, names: list[str], is_last: bool) -> Round:
    """Start a round.

    An interrupted round waits until enough of its own nodes are online again, unless `is_last`.
    """
    goal = server.plan.fleet.report_goal
    if server.in_flight and not is_last and server.contacted_before(names) < goal:
        raise TooFewClients("too few nodes of the interrupted round are online again")
    uses_hours = server.settings.timer_hours is not None
    return server.begin(names, clock.hours() if uses_hours else None)


def collect(
    current: Round, contacted: Mapping[str, str], replies: Iterable[Message]
) -> dict[str, int]:
    """Pass each reply to the round as it arrives, until the round has enough reports.

    Args:
        current: The round that the replies are for.
        contacted: Name of each contacted node, by the nonce that was sent to this node only.
        replies: The replies, in the order of arrival.

    Returns:
        Number of nodes that refused, by reason.
    """
    refusals: Counter[str] = Counter()
    for reply in replies:
        if not reply.has_content():
            refusals.update(filter(None, [refusal_of(reply)]))
            continue
        name = contacted.get(nonce_of(reply), "")
        try:
            if current.report(name, update_of(reply), attempt_of(reply)):
                break
        except ReportRefused as error:
            log(WARNING, "A report was refused: %s", error)
    return dict(refusals)


def check_refusals(refusals: dict[str, int], contacted: int) -> None:
    """Log why nodes refused.

    Raises:
        InvalidInput: All contacted nodes refused for the same reason: a retry would not help.
    """
    for reason, count in refusals.items():
        if count == contacted:
            raise InvalidInput(f"every contacted node refuses: {reason}")
        log(WARNING, "Some nodes refuse: %s", reason)
