"""One round of a simulated fleet, through the server that any engine drives."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpftrl.engines.local.population import Population
from dpftrl.errors import TooFewClients
from dpftrl.federated import Attempt, Released, Server

# Simulated hours after which nobody new is expected to become available.
LONGEST_WAIT = 48
# Attempts in a row that came to nothing.
MOST_ABANDONED = 50


class Clients(Protocol):
    """Whatever makes updates out of a model."""

    def updates(
        self, model: NDArray[np.float32], cohort: Sequence[str], round_number: int, /
    ) -> Iterator[tuple[str, Any]]:
        """The update of each client: its model minus the one that it was handed."""
        ...


def next_round(
    server: Server, clients: Clients, population: Population, rounds_per_hour: float
) -> Released:
    """Try until a round is committed.

    Everything depends on the journal and on seeds alone: a resumed run asks the same clients, at
    the same simulated time, and gets the same updates.
    """
    for _ in range(MOST_ABANDONED):
        attempt = _begin(server, population, rounds_per_hour)
        # Late reports would be refused anyway: only those that will count are computed.
        reporting = population.reporting(attempt.clients, attempt.number)[: attempt.reports.goal]
        if len(reporting) < attempt.reports.goal:
            attempt.abandon(f"{len(reporting)} of {attempt.reports.goal} would have reported")
            continue
        return _carry(server, clients, attempt, reporting)
    raise TooFewClients(
        f"{MOST_ABANDONED} attempts in a row had too few reports; ask more clients for each report "
        "wanted (over_selection), or expect fewer drop-outs"
    )


def _begin(server: Server, population: Population, rounds_per_hour: float) -> Attempt:
    last_time = server.clock or 0.0
    now = last_time if server.in_flight else last_time + 1 / rounds_per_hour
    for waited in range(LONGEST_WAIT):
        with contextlib.suppress(TooFewClients):
            return server.begin(population.available(now + waited), now + waited)
    now += LONGEST_WAIT
    return server.begin(population.available(now), now)


def _carry(
    server: Server, clients: Clients, attempt: Attempt, reporting: Sequence[str]
) -> Released:
    for client, update in clients.updates(server.model, reporting, attempt.row):
        attempt.report(client, update, attempt.number)
    return attempt.commit()
