"""An open round: its cohort, and the sum of the reports that have arrived."""

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from secrets import token_hex
from threading import Condition, Thread, current_thread
from typing import Any, Final, cast, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Layout
from dpftrl._internal.checks import whole_number
from dpftrl.clipping import ExactSum, Grid, JointClip
from dpftrl.errors import InvalidInput, ReportRefused
from dpftrl.federated.partial_sum import Assignment, PartialSum
from dpftrl.federated.pseudonyms import written

# Seconds between two looks at whether a thread that adds a report has died.
POLL_SECONDS: Final = 1.0


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
        layout: Names and shapes of the arrays of an update.
        grid: The grid on which updates are summed.
        counted: Pseudonyms of the clients whose updates are in the sum.
        unfit_clients: Pseudonyms of the counted clients whose update could not be used. Never
            publish them.
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
        self.unfit_clients: set[int] = set()
        self.clients = clients
        self.layout = layout
        self.grid = grid
        size = layout.size + (joint is not None)
        self._sum = ExactSum.of(grid, np.zeros(size, np.int64), 0, joint)
        self._changed = Condition()
        # The threads that are adding a report, which is counted already.
        self._adding: dict[object, Thread] = {}
        self._is_closed = False
        self._partials: dict[str, frozenset[int]] = {}  # clients of the partial sums, by their id

    def __repr__(self) -> str:
        return f"Reports({len(self.counted)} of {self.goal})"

    @property
    def enough(self) -> bool:
        """Whether the report goal is reached."""
        return len(self.counted) >= self.goal

    @property
    def unfit(self) -> int:
        """Number of counted clients whose update could not be used. Never publish it."""
        return len(self.unfit_clients)

    def take(self, client: int, update: Any) -> str | None:
        """Count a report. Return None, or for the private log why the update cannot be used.

        Several threads may report at the same time, and all cores work.
        """
        with self._counting([client], "this client"):
            why = self._add(update)
            if why is not None:
                self.unfit_clients.add(client)
        return why

    def take_partial(self, partial: PartialSum, keys: Mapping[str, int]) -> None:
        """Count the clients of a partial sum, and add it. A sum that is sent again is not added.

        Args:
            partial: The partial sum.
            keys: Pseudonyms of the clients of the cohort, by name.

        Raises:
            ReportRefused: The partial sum does not fit this round, or what was counted before.
        """
        clients = frozenset(keys[name] for name in partial.clients if name in keys)
        if len(clients) < len(partial.clients):
            raise ReportRefused("a partial sum names a client twice, or one outside of the cohort")
        if not set(partial.unfit) <= set(partial.clients):
            raise ReportRefused("a partial sum calls an update unfit that is not in it")
        try:
            self._sum.check_steps(partial.sum(), len(clients))
            with self._counting(clients, "a client of the partial sum", partial.id):
                self._sum.add_steps(partial.sum(), len(clients))
                self.unfit_clients.update(keys[name] for name in partial.unfit)
        except InvalidInput as error:
            raise ReportRefused(f"a partial sum cannot be right: {error}") from None
        except _AddedBefore:
            return

    def add_canaries(self, steps: memoryview, canaries: int) -> None:
        """Add the updates of canaries of an audit, which count as nobody's report.

        Args:
            steps: Their sum, in steps of the grid; the caller vouches that each was clipped.
            canaries: Number of updates in it.
        """
        self._sum.check_steps(steps, canaries)
        self._sum.add_steps(steps, canaries)

    def sum(self) -> ExactSum:
        """The exact sum, for adding noise in place; waits for reports that are being added.

        Raises:
            InvalidInput: The report goal is not reached, or a thread ended within a report.
        """
        if not self.enough:
            raise InvalidInput(
                f"{len(self.counted):,} of {self.goal:,} reports are too few to commit; "
                "abandon the round"
            )
        return self.close()

    def close(self) -> ExactSum:
        """Refuse further reports, wait for those that are being added, and return the sum.

        Raises:
            InvalidInput: A thread ended within a report.
        """
        with self._changed:
            self._is_closed = True
            while any(map(_is_running, self._adding.values())):
                self._changed.wait(POLL_SECONDS)
            if self._adding:
                raise InvalidInput(
                    "a thread ended while it added a report, so the sum may lack a report that was "
                    "counted; abandon the round"
                )
            return self._sum

    @contextmanager
    def _counting(
        self, clients: Collection[int], who: str, partial_id: str | None = None
    ) -> Generator[None]:
        """Count clients, before their updates are added; until the end, `close` waits."""
        ticket = object()
        try:
            with self._changed:
                self._check_not_added(partial_id, clients)
                self._check_may_report(clients, who)
                if partial_id is not None:
                    self._partials[partial_id] = frozenset(clients)
                self._adding[ticket] = current_thread()
                self.counted.update(clients)  # before adding, so that no client can report twice
            yield
        finally:
            with self._changed:
                self._adding.pop(ticket, None)
                self._changed.notify_all()

    def _check_not_added(self, partial_id: str | None, clients: Collection[int]) -> None:
        before = None if partial_id is None else self._partials.get(partial_id)
        if before is None:
            return
        if before != clients:
            raise ReportRefused("another partial sum of this assignment was added before")
        raise _AddedBefore

    def _check_may_report(self, clients: Collection[int], who: str) -> None:
        if not self.clients.issuperset(clients):
            raise ReportRefused(f"{who} is not in the cohort of this round")
        if not self.counted.isdisjoint(clients):
            raise ReportRefused(f"{who} has already reported in this round")
        if self.enough:
            raise ReportRefused("the round is closed: the report goal was reached")
        if self._is_closed:
            raise ReportRefused("the round is closed: its sum was handed in")
        if len(clients) > self.goal - len(self.counted):
            raise ReportRefused(
                f"the round needs {self.goal - len(self.counted):,} more reports, and these are "
                f"{len(clients):,}"
            )

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
            fits = array.shape == (self.layout.size,)
            return ([array], None) if fits else ([], f"a vector of shape {array.shape}")
        if why := self.layout.misfit(update):
            return [], why
        return [update[name].reshape(-1) for name in self.layout.names], None


def check_attempt(given: Any, current: int) -> None:
    """Refuse a report that is for another attempt than the current one."""
    if type(given) is not int or given != current:
        raise ReportRefused(f"this is attempt {current}, the report is for another")


class _AddedBefore(Exception):
    """A partial sum is in the sum already."""


def _is_running(thread: Thread) -> bool:
    """Whether a thread can still finish what it adds; the calling thread cannot."""
    return thread.is_alive() and thread is not current_thread()


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
        run_id: str,
        aggregators: bool,
    ):
        self.number = number
        self.attempt = attempt
        self.reports = reports
        self._log = log
        self._run_id = run_id
        self._aggregators = aggregators
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

    def share(self, clients: Sequence[str], goal: int | None = None) -> Assignment:
        """Assign clients of the cohort to an aggregator, which clips and adds their updates.

        The server remembers nothing about an assignment. If an aggregator is lost, only its reports
        are lost, and its clients can be assigned again or can report to the server: of two sums
        that count the same client, the second is refused.

        Args:
            clients: Names of the clients whose reports the aggregator takes.
            goal: Largest number of reports that it counts, by default all. A partial sum of more
                reports than the round still needs is refused, so give the assignments goals that
                add up to the report goal.

        Raises:
            InvalidInput: The run was created without aggregators, or a client is not in the cohort.
        """
        self._check_aggregators()
        names, reports = tuple(clients), self.reports
        if len(set(names) & set(self._keys)) < len(names):
            raise InvalidInput("a share names clients of the cohort, each once")
        most = len(names) if goal is None else whole_number("goal", goal, at_least=0)
        return Assignment(
            run=self._run_id,
            attempt=self.attempt,
            id=token_hex(16),
            clients=names,
            goal=min(most, len(names)),
            step=reports.grid.step,
            clip_norm=reports.grid.clip_norm,
            names=reports.layout.names,
            shapes=reports.layout.shapes,
        )

    def report_partial(self, partial: PartialSum) -> bool:
        """Add the sum of an aggregator: all of its clients count, or none.

        A partial sum that is sent again is not added again.

        Args:
            partial: The partial sum of an assignment of this round. Assignments that were given out
                before a server was resumed are valid too.

        Returns:
            Whether the report goal is now reached.

        Raises:
            InvalidInput: The run was created without aggregators.
            ReportRefused: The sum is for another run or attempt, has the wrong size, has a norm
                that clipped updates cannot have, counts a client that is not in the cohort or is
                counted already, or counts more clients than the round needs.

        Guarantees:
            The server cannot see whether the aggregator clipped each update. That, and that the
            aggregator keeps the sum secret, is a hypothesis of the guarantee of the run.
        """
        self._check_aggregators()
        try:
            self._check_for_this_attempt(partial)
            self.reports.take_partial(partial, self._keys)
        except ReportRefused as error:
            self._note(None, refused=str(error))
            raise
        for name in partial.unfit:
            self._note(self._keys[name], unfit="its aggregator could not use it")
        return self.enough

    def _check_for_this_attempt(self, partial: PartialSum) -> None:
        if not isinstance(partial, PartialSum):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInput(f"expected a PartialSum, got {type(partial).__name__}")
        if (partial.run, partial.attempt) != (self._run_id, self.attempt):
            raise ReportRefused(
                f"this is attempt {self.attempt} of run {self._run_id}, the partial sum is for "
                "another"
            )

    def _check_aggregators(self) -> None:
        if not self._aggregators:
            raise InvalidInput(
                "this run has no aggregators: they are a hypothesis of its guarantee, so create "
                "the run with Settings(aggregators=True)"
            )

    def _take(self, key: int | None, update: Any, attempt: int) -> str | None:
        check_attempt(attempt, self.attempt)
        if key is None:
            raise ReportRefused("this client is not in the cohort of this round")
        return self.reports.take(key, update)

    def _note(self, key: int | None, **what: str) -> None:
        known = None if key is None else written(key)
        self._log({"attempt": self.attempt, "client": known, **what})
