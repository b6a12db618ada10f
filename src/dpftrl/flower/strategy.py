"""`DpFtrl`, a Flower strategy that runs DP-FTRL with correlated noise."""

import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from logging import INFO, WARNING
from random import Random
from secrets import token_hex
from typing import Any, Final, NamedTuple, final

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from dpftrl._internal.formatting import rounded_up
from dpftrl.errors import InvalidInput, ReportRefused, RunOver, TooFewClients, UnsafeState
from dpftrl.federated import Round, Server, Settings, StartModel
from dpftrl.federated.metrics import MetricsFile, Point, finite_numbers_of
from dpftrl.flower._flwr_internals import log
from dpftrl.flower.in_process import InProcessGrid
from dpftrl.flower.messages import (
    ARRAYS,
    CONFIG,
    OURS,
    Instruction,
    arrays_of,
    attempt_of,
    failure_of,
    is_marked,
    nonce_of,
    record_of,
    refusal_of,
    update_of,
)
from dpftrl.flower.replies import replies_to
from dpftrl.flower.run import (
    Model,
    NodeIdentity,
    Patience,
    RunClock,
    RunLocation,
    named_nodes,
)
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
        close_empty_rounds: If the run stands still, because the nodes that are online were
            contacted for this round already or too few rounds before it, close the round as one in
            which nobody took part (`Server.close_empty_round`). It costs a round and no privacy. By
            default the strategy waits for other nodes, and then fails. After `patience.attempts`
            failed attempts in a row, restarts included, no further round is closed.
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
        close_empty_rounds: bool = False,
        state_folder: str | os.PathLike[str] | None = None,
        trust_folder: bool = False,
        insecure_test_key: int | None = None,
    ):
        settings.check(plan)
        self._plan = plan
        self._settings = settings
        self._patience = patience or Patience()
        self._require_auth = require_auth
        self._close_empty_rounds = close_empty_rounds
        self._location = RunLocation(
            folder, state_folder, trust_folder, insecure_test_key, self._patience.lock
        )
        self._open: _OpenRun | None = None
        self._open_round: Round | None = None
        self._contacted: dict[str, str] = {}  # node names by nonce
        self._attempts: list[int] = []  # contacted nodes of each attempt at the round

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
            Flower's result, with the last released model. `train_metrics_clientapp` has, for each
            round of this call, `epsilon` so far, `reports` (updates in the sum), `drop-outs`
            (contacted nodes whose update is not in the sum) and `attempts`. The same numbers are
            added to the metrics of `evaluate_fn`.

        Raises:
            InvalidInput: The folder holds another run, all contacted nodes refuse for the same
                reason, or nodes reply without `client_mod`.
            TooFewClients: Too few nodes are online, or too many attempts in a row failed.
        """
        config, result = train_config or ConfigRecord(), Result()
        is_file = isinstance(initial_arrays, StartModel)
        model = initial_arrays if is_file else arrays_of(initial_arrays)
        with self._opened(grid, model) as server:
            self.summary()
            result.arrays = record_of(server.arrays())
            file = MetricsFile(server.folder.root, server.rounds)
            _measure(result, server, file, evaluate_fn, {"epsilon": server.epsilon})
            try:
                while True:
                    result.arrays, metrics = self._next_round(server, result.arrays, config, grid)
                    result.train_metrics_clientapp[server.rounds] = metrics
                    _measure(result, server, file, evaluate_fn, metrics)
            except RunOver as reason:
                log(INFO, "The run is over: %s", reason)
        return result

    @contextmanager
    def _opened(self, grid: Grid, model: Model) -> Generator[Server]:
        """Create or resume the run, and close it at the end."""
        nodes = NodeIdentity(grid)
        identity = nodes.current()
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
            self._open = _OpenRun(server, RunClock(server.clock), nodes)
            try:
                yield server
            finally:
                self._open = self._open_round = None
                self._contacted, self._attempts = {}, []

    def _next_round(
        self, server: Server, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Repeat attempts until one is committed; return the released model and its metrics."""
        for failed in range(1, self._patience.attempts + 1):
            number = server.rounds + 1
            try:
                messages = self.configure_train(number, arrays, config, grid)
            except Standstill as standstill:
                return self._closed_empty(standstill)
            with closing(replies_to(grid, list(messages), self._patience.replies)) as replies:
                released, metrics = self.aggregate_train(number, replies)
            if released is not None and metrics is not None:
                return released, metrics
            time.sleep(self._patience.before_attempt(failed))
        raise TooFewClients(
            f"{self._patience.attempts} attempts in a row had too few reports; contact more nodes "
            "per report (over_selection), or look into the logs of the nodes"
        )

    def _closed_empty(self, standstill: "Standstill") -> tuple[ArrayRecord, MetricRecord]:
        """Close the next round as one in which nobody took part.

        Raises:
            TooFewClients: As many attempts as `patience` allows had too few reports, without a
                round that had enough. Nodes that never reply would use up all rounds.
        """
        server, now = self._running().server, self._running().now()
        if server.failed_attempts >= self._patience.attempts:
            raise TooFewClients(
                f"{server.failed_attempts:,} attempts in a row had too few reports, so no further "
                "round is closed as one in which nobody took part: nodes are online, and do not "
                "reply in time; look into their logs, and go on with a larger Patience.replies, or "
                "with a larger Patience.attempts when they reply again"
            ) from standstill
        log(WARNING, "Nobody takes part in round %s: %s", server.rounds + 1, standstill)
        reason = "the available clients were contacted already"
        released = server.close_empty_round(standstill.names, reason, now)
        return record_of(released.model), self._metrics(released.epsilon, reports=0)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Select the cohort as soon as enough nodes are online; return the messages to it."""
        run = self._running()
        server = run.server
        if server.settings.identity == "registered" and run.nodes.current() != "registered":
            raise UnsafeState(
                "the SuperLink now accepts any node, but the run promises registered nodes"
            )
        nodes, current = begin_when_enough(run, grid, self._patience, self._close_empty_rounds)
        rounds = self._plan.participation.rounds
        log(INFO, "[ROUND %s/%s] attempt %s", server_round, rounds, current.attempt)
        app_config = ConfigRecord({**config, "server-round": server_round})
        names = list(current.clients)
        # Each attempt has a different order, so that the first reply does not always come from the
        # same node.
        Random(current.attempt).shuffle(names)
        self._open_round = current
        self._contacted = {token_hex(16): name for name in names}  # nonces of 128 bits
        self._attempts.append(len(names))
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
        server = self._running().server
        refusals = collect(current, self._contacted, replies, is_proven=server.rounds > 0)
        if current.enough:
            released = server.commit(current)
            log(INFO, "Released; epsilon is %s so far", rounded_up(released.epsilon))
            reports = server.plan.fleet.report_goal
            return record_of(released.model), self._metrics(released.epsilon, reports)
        server.abandon(current, "too few reports")
        log(
            WARNING,
            "Too few reports: nothing is released, and the next attempt uses the same noise row",
        )
        check_refusals(refusals, len(self._contacted))
        return None, None

    def _metrics(self, epsilon: float, reports: int) -> MetricRecord:
        """Return the metrics of a round that ended now, and start counting for the next."""
        attempts, self._attempts = self._attempts, []
        return MetricRecord(
            {
                "epsilon": epsilon,
                "reports": reports,
                "drop-outs": sum(attempts) - reports,
                "attempts": len(attempts),
            }
        )

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
            server = self._open.server
            if server.start is not None and server.start.composed:
                together = rounded_up(server.planned.epsilon)
                log(INFO, "With the earlier runs of the start model: epsilon %s", together)
            identity = server.settings.identity
            log(INFO, "Nodes are %s; rounds released so far: %s", identity, server.rounds)

    def _instruction(self, current: Round, nonce: str) -> ConfigRecord:
        instruction = Instruction(
            run=self._running().server.run_id,
            attempt=current.attempt,
            row=current.number,
            rounds=self._plan.participation.rounds,
            clip_norm=self._running()[0].client_clip_norm,
            min_sep=self._plan.participation.min_sep,
            timer_hours=self._settings.timer_hours or 0.0,
            nonce=nonce,
        )
        return instruction.record()

    def _running(self) -> "_OpenRun":
        """Return the open run."""
        if self._open is None:
            raise InvalidInput("no run is open: call start(), which opens it")
        return self._open


class _OpenRun(NamedTuple):
    """A run that is open: its server, its clock, and how its nodes are identified."""

    server: Server
    clock: RunClock
    nodes: NodeIdentity

    def now(self) -> float | None:
        """Return the time in hours; None if the timers of the run count rounds."""
        return None if self.server.settings.timer_hours is None else self.clock.hours()


def _measure(
    result: Result,
    server: Server,
    file: MetricsFile,
    evaluate_fn: Evaluate | None,
    own: Mapping[str, Any],
) -> None:
    """Evaluate the released model, if that is asked for, and write the metrics of the round.

    Our own metrics are kept in the result only: drop-outs must not be in a file to be published.
    """
    rounds = server.rounds
    metrics = evaluate_fn(rounds, result.arrays) if evaluate_fn else None
    if file.last < rounds:
        evaluation = {} if metrics is None else finite_numbers_of(metrics)
        file.add(Point(rounds, server.epsilon, evaluation=evaluation))
    if metrics is not None:
        metrics = MetricRecord({**own, **metrics})
        log(INFO, "Evaluated after %s rounds: %s", rounds, metrics)
        result.evaluate_metrics_serverapp[rounds] = metrics


class Standstill(TooFewClients):
    """The nodes that are online would be enough, but only for a later round.

    Attributes:
        names: Names of the nodes that are online.
    """

    def __init__(self, message: str, names: Sequence[str]):
        super().__init__(message)
        self.names = names


def begin_when_enough(
    run: _OpenRun, grid: Grid, patience: Patience, close_empty_rounds: bool = False
) -> tuple[dict[str, int], Round]:
    """Wait until enough nodes may be contacted, then start a round.

    After a restart, the nodes of the interrupted attempt are contacted again. If fewer than the
    report goal come back, the attempt is abandoned as soon as others can take their place.

    Args:
        run: The open run.
        grid: Grid that knows the nodes.
        patience: Longest times to wait.
        close_empty_rounds: Whether to raise `Standstill` as soon as it is certain.

    Returns:
        The ids of the online nodes by name, and the round, which contacts at least as many of them
        as its report goal.

    Raises:
        Standstill: The round can only be closed as empty.
        TooFewClients: There were not enough nodes within this time.
        RunOver: The plan's rounds or the privacy budget are used up.
    """
    server = run.server
    longest, interrupted = patience.nodes, patience.interrupted
    if isinstance(grid, InProcessGrid):  # all simulated nodes are online: waiting adds none
        interrupted = 0.0
        longest = 0.0 if server.settings.timer_hours is None else longest
    start = next_log = time.monotonic()
    while True:
        nodes = named_nodes(grid, server.settings.identity)
        waited = time.monotonic() - start
        is_last = waited >= longest
        try:
            is_patient = waited < min(interrupted, longest)
            return nodes, _begin(run, list(nodes), is_patient, is_last, close_empty_rounds)
        except TooFewClients as error:
            if is_last or isinstance(error, Standstill):
                raise
            if time.monotonic() >= next_log:
                log(INFO, "Waiting for nodes, at most %.0f s more: %s", longest - waited, error)
                next_log += LOG_SECONDS
        time.sleep(POLL_SECONDS)


def _begin(
    run: _OpenRun, names: list[str], is_patient: bool, is_last: bool, close_empty_rounds: bool
) -> Round:
    """Start a round that contacts at least as many clients as its report goal.

    Args:
        run: The open run.
        names: Names of the nodes that are online.
        is_patient: Whether to wait for the nodes of an interrupted attempt.
        is_last: Whether there is no time left to wait.
        close_empty_rounds: Whether to raise `Standstill` as soon as it is certain.
    """
    server, now, goal = run.server, run.now(), run.server.plan.fleet.report_goal
    if server.in_flight:
        if (back := server.contacted_before(names)) >= goal:
            return server.begin(names, now)
        text = f"{back} of the nodes of the interrupted attempt are online, the goal is {goal}"
        if is_patient:
            raise TooFewClients(text)
        shortage = server.shortage(names, now)
        is_hopeless = close_empty_rounds and is_last and shortage and shortage.is_standstill
        if shortage is not None and not is_hopeless:
            raise TooFewClients(f"{text}; to replace it: {shortage}")
        log(WARNING, "The interrupted attempt is abandoned: %s", text)
        server.abandon(server.begin(names, now), "too few of its clients came back")
    try:
        return server.begin(names, now)
    except TooFewClients:
        shortage = server.shortage(names, now)
        if shortage is None:  # a timer in hours has just ended
            raise
        is_certain = shortage.is_permanent or is_last
        if close_empty_rounds and shortage.is_standstill and is_certain:
            raise Standstill(str(shortage), names) from None
        raise TooFewClients(str(shortage)) from None


def collect(
    current: Round, contacted: Mapping[str, str], replies: Iterable[Message], is_proven: bool = True
) -> dict[str, int]:
    """Pass each reply to the round as it arrives, until the round has enough reports.

    Args:
        current: The round that the replies are for.
        contacted: Name of each contacted node, by the nonce that was sent to this node only.
        replies: The replies, in the order of arrival.
        is_proven: Whether nodes of this run have replied through `client_mod` before.

    Returns:
        Number of nodes that refused or failed, by reason.

    Raises:
        InvalidInput: The first reply of the run comes without `client_mod`. All nodes run the same
            app, so no node has it. The round stays open: when the app is corrected, the same nodes
            are contacted again, and nobody has lost a contact.
    """
    refusals: Counter[str] = Counter()
    for reply in replies:
        is_proven = is_proven or is_marked(reply)
        if not reply.has_content():
            refusals.update(filter(None, [refusal_of(reply) or failure_of(reply)]))
            continue
        if not is_marked(reply):
            if not is_proven:
                raise InvalidInput(
                    "a node replied without client_mod, so its update is not clipped and its "
                    "contact not recorded: put it on the ClientApp, ClientApp(mods=[client_mod()]),"
                    " and start again; the same nodes are then contacted again"
                )
            log(WARNING, "A reply without client_mod counts as a drop-out")
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
