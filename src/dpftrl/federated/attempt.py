"""One attempt at a round: the cohort, its reports, and how it ends."""

from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import ReportRefused
from dpftrl.federated.pseudonyms import written
from dpftrl.federated.reports import Reports


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
