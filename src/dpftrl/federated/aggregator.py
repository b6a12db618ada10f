"""An aggregator: clips and adds the reports of a share of a cohort, for the server of a run."""

from typing import Any, Self, final

import numpy as np

from dpftrl.errors import InvalidInput, ReportRefused
from dpftrl.federated.partial_sum import Assignment, PartialSum
from dpftrl.federated.round import Reports, check_attempt


@final
class Aggregator:
    """Takes the reports of a share of a cohort, and hands their exact sum to the server.

    An aggregator is a thread, a process or a machine that the operator trusts like the server: it
    sees updates before noise is added. `Round.share` gives out assignments, and
    `Round.report_partial` takes the sums. Several threads may report to an aggregator at the same
    time.

    Guarantees:
        The guarantees of `Round.report` hold: a client counts once, whether it counts does not
        depend on its update, an update that cannot be used counts as zeros, and no client adds more
        than the clip norm. The sum of the partial sums of a cohort is bit-equal to the sum that the
        server would have computed, however the cohort is split.

    >>> assignment = Assignment(
    ...     run="r",
    ...     attempt=0,
    ...     id="a",
    ...     clients=("ann", "bo"),
    ...     goal=2,
    ...     step=0.5,
    ...     clip_norm=1.0,
    ...     names=("w",),
    ...     shapes=((2,),),
    ... )
    >>> aggregator = Aggregator(assignment)
    >>> aggregator.report("ann", np.array([1.0, 0.0]), attempt=0)
    False
    >>> aggregator.partial_sum()
    PartialSum(1 clients, attempt=0, secret)

    Args:
        assignment: What the server assigned to this aggregator.

    Raises:
        InvalidInput: The assignment makes no sense.
    """

    def __init__(self, assignment: Assignment):
        self.assignment = assignment
        self._keys = {name: key for key, name in enumerate(assignment.clients)}
        if len(self._keys) < len(assignment.clients) or not 0 <= assignment.goal <= len(self._keys):
            raise InvalidInput("an assignment names each client once, and at most these count")
        self._reports = Reports(
            frozenset(self._keys.values()), assignment.goal, assignment.layout, assignment.grid
        )

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> Self:
        """The aggregator of an assignment that was sent as bytes."""
        return cls(Assignment.decoded(data))

    def __repr__(self) -> str:
        return f"Aggregator({self.assignment!r}, {self._reports!r})"

    @property
    def enough(self) -> bool:
        """Whether the goal of the assignment is reached."""
        return self._reports.enough

    def report(self, client: str, update: Any, attempt: int) -> bool:
        """Add the update of a client to the partial sum; as `Round.report`.

        Args:
            client: Name of the client that sent the update.
            update: The client's trained model minus the model that it received, as a flat vector or
                as a dict of arrays by name.
            attempt: Number of the attempt that the update is for, as the client returned it.

        Returns:
            Whether the goal of the assignment is now reached.

        Raises:
            ReportRefused: The report is for another attempt, the client is not in the assignment or
                has already reported, the goal was reached before, or the sum was handed in.
        """
        check_attempt(attempt, self.assignment.attempt)
        key = self._keys.get(client) if type(client) is str else None
        if key is None:
            raise ReportRefused("this client is not in the assignment of this aggregator")
        self._reports.take(key, update)
        return self.enough

    def partial_sum(self) -> PartialSum:
        """End the reports, and return the sum of those that were counted, for the server.

        The call waits for reports that are being added, and further reports are refused. A second
        call returns the same sum: the server adds it once.

        Raises:
            InvalidInput: A thread ended within a report, so the sum may lack it.
        """
        assignment = self.assignment
        total, counted = self._reports.close(), self._reports.counted
        unfit = self._reports.unfit_clients
        return PartialSum(
            run=assignment.run,
            attempt=assignment.attempt,
            id=assignment.id,
            clients=tuple(name for name, key in self._keys.items() if key in counted),
            unfit=tuple(name for name, key in self._keys.items() if key in unfit),
            steps=np.asarray(total.steps, "<i8").data.cast("B").toreadonly(),
        )
