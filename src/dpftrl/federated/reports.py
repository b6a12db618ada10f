"""What arrives from the clients of one attempt: checked, clipped and added up at once."""

from threading import Lock
from typing import Any, cast, final

import numpy as np
from numpy.typing import NDArray

from dpftrl.errors import InvalidInput, ReportRefused
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
