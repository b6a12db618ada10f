"""An attempt begins when enough nodes are online and rested."""

import time
from logging import INFO
from typing import Final

from flwr.serverapp import Grid
from flwr.supercore import log

from dpftrl.engines.flower.identity import named_nodes
from dpftrl.engines.flower.in_process import InProcessGrid
from dpftrl.engines.flower.run_clock import RunClock
from dpftrl.errors import TooFewClients
from dpftrl.federated import Attempt, Server

POLL_SECONDS: Final = 1.0
# Between two lines in the log that say what is being waited for.
SAY_SECONDS: Final = 300.0


def begin_when_enough(
    server: Server, clock: RunClock, grid: Grid, seconds: float
) -> tuple[dict[str, int], Attempt]:
    """The nodes by name, and the attempt that asks some of them.

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


def _begin(server: Server, clock: RunClock, names: list[str], is_last: bool) -> Attempt:
    goal = server.plan.fleet.report_goal
    if server.in_flight and not is_last and server.asked_before(names) < goal:
        raise TooFewClients("too few of an interrupted round's nodes are online again")
    by_time = server.settings.timer_hours is not None
    return server.begin(names, clock.hours() if by_time else None)
