"""One attempt at a round: the cohort, its reports, and how it ends."""

from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol, cast, final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput, ReportRefused
from dpftrl.federated.eligibility import written
from dpftrl.federated.layout import Layout
from dpftrl.noise import ExactSum, Grid


@final
class Reports:
    """The sum so far, and whose updates are in it.

    Guarantees:
        Whether a report counts depends on who sent it, for which attempt, and on how many came
        before: never on what is in it. What is unfit counts as an update of zeros. No client adds
        more than the clip norm.

    Attributes:
        goal: Reports that close the round.
        counted: Pseudonyms of the clients in the sum.
        unfit: How many of them sent what cannot be used. Private: never publish it.
    """

    def __init__(self, clients: frozenset[int], goal: int, layout: Layout, grid: Grid):
        self.goal = goal
        self.counted: set[int] = set()
        self.unfit = 0
        self._clients = clients
        self._layout = layout
        self._sum = ExactSum(grid, layout.size)
        self._turn = Lock()

    def __repr__(self) -> str:
        return f"Reports({len(self.counted)} of {self.goal})"

    @property
    def enough(self) -> bool:
        """Whether the round can be closed."""
        return len(self.counted) >= self.goal

    def take(self, client: int, update: Any) -> str | None:
        """Add a report; return what was wrong with it, for the private log, if anything was."""
        with self._turn:
            if client not in self._clients:
                raise ReportRefused("this client is not in the cohort of this round")
            if client in self.counted:
                raise ReportRefused("this client has already reported in this round")
            if self.enough:
                raise ReportRefused("the round is closed: the report goal was reached")
            self.counted.add(client)  # first: whatever happens now, it cannot report again
            why = self._add(update)
            self.unfit += why is not None
        return why

    def sum(self) -> ExactSum:
        """The exact sum; noise is added to it in place."""
        with self._turn:  # the last report may still be on its way in
            return self._sum

    def _add(self, update: Any) -> str | None:
        try:
            parts, why = self._parts(update)
            if why is None:
                self._sum.add(*parts)
        except (InvalidInput, ValueError, TypeError, OverflowError) as error:
            return str(error)
        return why

    def _parts(self, update: Any) -> tuple[list[NDArray[Any]], str | None]:
        """The arrays of an update, in the order of the layout, or why there are none."""
        if isinstance(update, np.ndarray):
            array = cast("NDArray[Any]", update).view(np.ndarray)
            fits = array.shape == (self._layout.size,)
            return ([array], None) if fits else ([], f"a vector of shape {array.shape}")
        if why := self._layout.misfit(update):
            return [], why
        return [update[name].reshape(-1) for name in self._layout.names], None


@final
@dataclass(frozen=True)
class Released:
    """What a committed round gives to the world.

    Attributes:
        rounds: Rounds released so far.
        epsilon: What they guarantee, at the plan's delta.
        model: Named arrays.
    """

    rounds: int
    epsilon: float
    model: dict[str, NDArray[np.float32]]


class Decides(Protocol):
    """What an attempt needs of its server."""

    def commit(self, attempt: "Attempt") -> Released:
        """Close the round."""
        ...

    def abandon(self, attempt: "Attempt", reason: str) -> None:
        """Give the round up."""
        ...

    def log(self, **entry: Any) -> None:
        """Write to the private log."""
        ...


@final
class Attempt:
    """Clients to ask, and a place for what they send.

    Attributes:
        number: Counts attempts; clients send it back, so that a late report is not taken for
            one of this round.
        row: The row of noise it is for: rounds released before it.
        clients: Names of the cohort, as far as they are available.
        reports: What came so far.
    """

    def __init__(
        self, server: Decides, number: int, row: int, names: dict[int, str], reports: Reports
    ):
        self.number = number
        self.row = row
        self.clients = tuple(names.values())
        self.reports = reports
        self._server = server
        self._keys = {name: key for key, name in names.items()}

    def __repr__(self) -> str:
        return f"Attempt(number={self.number}, row={self.row}, {self.reports!r})"

    @property
    def enough(self) -> bool:
        """Whether the report goal is reached."""
        return self.reports.enough

    def report(self, client: str, update: Any, attempt: int) -> bool:
        """Take an update: a flat vector, or a dict of arrays by name.

        It is clipped again, whatever the client says it did; what cannot be used counts as zeros.

        Args:
            client: Who sends it.
            update: The client's model minus the one it was handed.
            attempt: The number of the attempt that it was made for, as the client sent it back.

        Returns:
            Whether the report goal is now reached.

        Raises:
            ReportRefused: It is not for this attempt, not from its cohort, or not the first.
        """
        key = self._keys.get(client) if type(client) is str else None
        known = None if key is None else written(key)
        try:
            why = self._take(key, update, attempt)
        except ReportRefused as error:
            self._server.log(attempt=self.number, client=known, refused=str(error))
            raise
        if why is not None:
            self._server.log(attempt=self.number, client=known, unfit=why)
        return self.enough

    def _take(self, key: int | None, update: Any, attempt: int) -> str | None:
        if type(attempt) is not int or attempt != self.number:
            raise ReportRefused(f"this is attempt {self.number}, the report is for another")
        if key is None:
            raise ReportRefused("this client is not in the cohort of this round")
        return self.reports.take(key, update)

    def commit(self) -> Released:
        """Close the round: noise, optimiser, journal; what it returns may be published."""
        return self._server.commit(self)

    def abandon(self, reason: str) -> None:
        """Give the round up: nothing is released, and its row of noise is for the next attempt.

        Args:
            reason: Why; it goes into the private journal.
        """
        self._server.abandon(self, reason)
