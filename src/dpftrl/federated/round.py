"""An open round: its cohort, and the sum of the reports that have arrived."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Layout
from dpftrl.clipping import ExactSum, Grid, JointClip
from dpftrl.errors import InvalidInput, ReportRefused
from dpftrl.federated.eligibility import written


@final
class Reports:
    """The sum of the updates so far, and the clients whose updates are in the sum.

    Guarantees:
        Whether a report counts depends on its sender, its attempt and the number of reports before
        it, never on its content. An update that cannot be used counts as an update of zeros. No
        client adds more than the clip norm. In adaptive clipping, an update that cannot be used
        adds zero to the bits too.

    Attributes:
        clients: Pseudonyms of the cohort.
        goal: The report goal.
        counted: Pseudonyms of the clients whose updates are in the sum.
        unfit: Number of counted clients whose update could not be used. Never publish this number.
    """

    def __init__(
        self,
        clients: frozenset[int],
        goal: int,
        layout: Layout,
        grid: Grid,
        joint: JointClip | None = None,
    ):
        self.goal = goal
        self.counted: set[int] = set()
        self.unfit = 0
        self.clients = clients
        self._layout = layout
        self._sum = ExactSum(grid, layout.size, joint)
        self._lock = Lock()

    def __repr__(self) -> str:
        return f"Reports({len(self.counted)} of {self.goal})"

    @property
    def enough(self) -> bool:
        """Whether the report goal is reached."""
        return len(self.counted) >= self.goal

    def take(self, client: int, update: Any) -> str | None:
        """Count a report. Return None, or for the private log why the update cannot be used."""
        with self._lock:
            if client not in self.clients:
                raise ReportRefused("this client is not in the cohort of this round")
            if client in self.counted:
                raise ReportRefused("this client has already reported in this round")
            if self.enough:
                raise ReportRefused("the round is closed: the report goal was reached")
            self.counted.add(client)  # before adding, so that no client can report twice
            why = self._add(update)
            self.unfit += why is not None
        return why

    def sum(self) -> ExactSum:
        """The exact sum, for adding noise in place; raises if the report goal is not reached."""
        with self._lock:  # another thread may still be adding the last report
            if not self.enough:
                raise InvalidInput(
                    f"{len(self.counted):,} of {self.goal:,} reports are too few to commit; "
                    "abandon the round"
                )
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
        """The arrays of an update in the order of the layout, and None or why it cannot be used."""
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
    """The result of a committed round, which may be published.

    Attributes:
        rounds: Number of rounds released so far.
        epsilon: Epsilon of all released rounds, at the delta of the plan.
        model: The arrays of the model, by name.
    """

    rounds: int
    epsilon: float
    model: dict[str, NDArray[np.float32]]


@final
class Round:
    """An open round: the clients to contact, and the reports that they have sent.

    `Server.begin` opens a round; `Server.commit` or `Server.abandon` closes it.

    Attributes:
        number: Number of rounds released before this one, which is also its row of noise.
        attempt: Number of the attempt. Clients return it with their update, so that a late report
            for an earlier attempt is recognized.
        clients: Names of the clients in the cohort that are available.
        reports: The reports so far.
    """

    def __init__(
        self,
        number: int,
        attempt: int,
        names: Mapping[int, str],
        reports: Reports,
        log: Callable[[dict[str, Any]], None],
    ):
        self.number = number
        self.attempt = attempt
        self.reports = reports
        self._log = log
        self._keys = {names[key]: key for key in sorted(reports.clients) if key in names}
        self.clients = tuple(self._keys)

    def __repr__(self) -> str:
        return f"Round(number={self.number}, attempt={self.attempt}, {self.reports!r})"

    @property
    def enough(self) -> bool:
        """Whether the report goal is reached."""
        return self.reports.enough

    def report(self, client: str, update: Any, attempt: int) -> bool:
        """Add the update of a client to the sum.

        The server clips the update even if the client has already clipped it. An update that cannot
        be used counts as zeros.

        Args:
            client: Name of the client that sent the update.
            update: The client's trained model minus the model that it received, as a flat vector or
                as a dict of arrays by name.
            attempt: Number of the attempt that the update is for, as the client returned it.

        Returns:
            Whether the report goal is now reached.

        Raises:
            ReportRefused: The report is for another attempt, the client is not in the cohort or has
                already reported, or the report goal was reached before.
        """
        key = self._keys.get(client) if type(client) is str else None
        try:
            unfit = self._take(key, update, attempt)
        except ReportRefused as error:
            self._note(key, refused=str(error))
            raise
        if unfit is not None:
            self._note(key, unfit=unfit)
        return self.enough

    def _take(self, key: int | None, update: Any, attempt: int) -> str | None:
        if type(attempt) is not int or attempt != self.attempt:
            raise ReportRefused(f"this is attempt {self.attempt}, the report is for another")
        if key is None:
            raise ReportRefused("this client is not in the cohort of this round")
        return self.reports.take(key, update)

    def _note(self, key: int | None, **what: str) -> None:
        known = None if key is None else written(key)
        self._log({"attempt": self.attempt, "client": known, **what})
