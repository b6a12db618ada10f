"""The server of a run: the paper's Algorithm 1, without communication with clients.

In each round, the server chooses the cohort, gives out the model, clips and sums updates until the
report goal is reached, adds correlated noise, applies the server optimizer, commits the round, and
releases the model. The calling code (`dpftrl.simulation`, `dpftrl.flower` or your own) has the loop
over rounds: it sends models to clients and passes their updates to the server.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Float32Vector, Layout
from dpftrl._internal.checks import as_float
from dpftrl._internal.deprecation import warn
from dpftrl._internal.storage import replace_file
from dpftrl.accounting import Guarantee
from dpftrl.clipping import ExactSum
from dpftrl.errors import InvalidInput, RunOver, TooFewClients
from dpftrl.federated.eligibility import Exposure, Shortage
from dpftrl.federated.optimizers import State
from dpftrl.federated.pseudonyms import Population
from dpftrl.federated.round import Released, Reports, Round
from dpftrl.federated.run_guarantee import RunGuarantee
from dpftrl.federated.settings import Settings
from dpftrl.federated.start_model import PROVENANCE, Start, StartModel, provenance_metadata
from dpftrl.federated.store.run_folder import RunFolder
from dpftrl.federated.store.run_store import RunStore
from dpftrl.plan import Plan

# Seconds between two entries in the private log that say that there are too few clients.
WAITING_SECONDS: Final = 60.0


@final
class Server:
    """A run, opened by one process: it begins, commits and abandons rounds, or closes them empty.

    Guarantees:
        The model of a round is returned only when the model, the state of the optimizer, the row of
        noise, the digest of the sum and who was counted are on the disk. A run whose process was
        killed at any moment can be resumed; with the same updates it gives the same bits, and with
        any updates no row of noise is used for two different sums. Files that are older than the
        last journal record, that were changed, or that another server uses are refused.

    >>> import tempfile
    >>> from dpftrl import MinSep, account, mechanism
    >>> from dpftrl.federated import Settings
    >>> from dpftrl.plan import Fleet, Plan
    >>> promise = account(mechanism("blt-b400"), MinSep(4, 2), noise_multiplier=1.0, delta=1e-6)
    >>> plan = Plan(Fleet(population=4, report_goal=2), promise)
    >>> people = ["ann", "bo", "cy", "di"]
    >>> model = {"weights": np.zeros(3)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run, place = f"{folder}/run", f"{folder}/state"
    ...     settings = Settings(clip_norm=1.0)
    ...     with Server.create(run, plan, settings, model, state_folder=place) as server:
    ...         current = server.begin(people)
    ...         for client in current.clients:
    ...             goal_reached = current.report(client, np.ones(3), current.attempt)
    ...         released = server.commit(current)
    >>> released.rounds, released.model["weights"].shape
    (1, (3,))
    """

    def __init__(self, store: RunStore):
        """Call `create` or `resume` instead."""
        self._store = store
        self._open_round: Round | None = None
        self._lock = Lock()
        file = store.file
        self._guarantee = RunGuarantee(store.plan, store.settings, file.test_key, store.start)
        self._grid = store.settings.grid(store.plan)
        self._moving = store.moving_clip_norm()  # None for a fixed clip norm
        self._planned_rounds = store.plan.participation.rounds
        # For the private log: what the last `begin` knew about the clients, and when an entry said
        # that there were too few.
        self._availability: dict[str, int] = {}
        self._waiting_noted = -math.inf

    @classmethod
    def create(
        cls,
        folder: str | os.PathLike[str],
        plan: Plan,
        settings: Settings,
        model: Mapping[str, NDArray[Any]] | StartModel,
        *,
        state_folder: str | os.PathLike[str] | None = None,
        insecure_test_key: int | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> Self:
        """Create a run.

        Args:
            folder: Folder for the files of the run.
            plan: Mechanism, noise and fleet of the run, and the guarantee that follows from them.
            settings: All settings of the server that are not in the plan.
            model: Named arrays to start from, which must not depend on the clients' data. Load a
                model from a file with `StartModel.load`: if a private run trained the model, the
                guarantee of this run is composed with the guarantee of that earlier run.
            state_folder: Folder for the witness, outside the folder of the run; by default
                $DPFTRL_STATE, or the user's state folder.
            insecure_test_key: Seed of a noise key that anybody can guess. For tests only.
            files: Content of further files, by name, to write into the folder, such as a
                configuration. They are sealed: a run whose files were changed is refused.
        """
        return cls(
            RunStore.create(
                RunFolder(Path(folder)),
                plan,
                settings,
                model,
                _path(state_folder),
                insecure_test_key,
                files or {},
            )
        )

    @classmethod
    def resume(
        cls,
        folder: str | os.PathLike[str],
        *,
        state_folder: str | os.PathLike[str] | None = None,
        trust_folder: bool = False,
    ) -> Self:
        """Resume a run from its files.

        Args:
            folder: Folder with the files of the run.
            state_folder: Folder with the witness of the run; the default is that of `create`.
            trust_folder: Resume even if the witness is missing. Use this only if you know that the
                folder is the newest state of the run, and that no copy of it was resumed.
        """
        store = RunStore.resume(RunFolder(Path(folder)), _path(state_folder), trust_folder)
        server = cls(store)
        try:
            if store.state.empty is not None:  # closing the round was interrupted
                server._release_empty()
            elif server.rounds:
                store.publish(server.guarantee())
        except BaseException:
            server.close()
            raise
        return server

    @classmethod
    def open(cls, folder: str | os.PathLike[str], **options: Any) -> Self:
        """The old name of `resume`."""
        warn("Server.open", "Server.resume")
        return cls.resume(folder, **options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Server({self._store.folder.root}, {self.rounds} rounds)"

    def close(self) -> None:
        """Close the run, so that another process can resume it."""
        self._store.close()

    @property
    def plan(self) -> Plan:
        """The plan of the run, with the promised guarantee."""
        return self._store.plan

    @property
    def clip_norm(self) -> float:
        """The clip norm of the open round, or of the next one. It may be published."""
        moving = self._moving
        return self._grid.clip_norm if moving is None else moving.state.clip_norm

    @property
    def client_clip_norm(self) -> float:
        """The norm to which a client may clip its update before it sends it.

        With adaptive clipping this is twice the clip norm: the server must see which updates are
        longer than the clip norm, and clips all of them itself.
        """
        return self.clip_norm if self._moving is None else 2 * self.clip_norm

    @property
    def settings(self) -> Settings:
        """The settings of the run."""
        return self._store.settings

    @property
    def run_id(self) -> str:
        """The identity of the run, which may be published."""
        return self._store.file.run

    @property
    def layout(self) -> Layout:
        """The names and shapes of the model's arrays."""
        return self._store.layout

    @property
    def folder(self) -> RunFolder:
        """The paths of the files of the run."""
        return self._store.folder

    @property
    def rounds(self) -> int:
        """Number of rounds released so far."""
        return self._store.state.rounds

    @property
    def epsilon(self) -> float:
        """Epsilon so far at the plan's delta, including earlier runs on the same people."""
        return self._store.state.epsilon if self.rounds else self._guarantee.epsilon_before

    @property
    def start(self) -> Start | None:
        """The model file that the run started from; None if it started from arrays."""
        return self._store.start

    @property
    def planned(self) -> Guarantee:
        """The guarantee after the last planned round, composed with the earlier runs."""
        return self._guarantee.planned

    @property
    def in_flight(self) -> bool:
        """Whether the last contacted cohort belongs to a round that has not ended yet."""
        return self._store.state.pending is not None

    def contacted_before(self, available: Iterable[str] | Population) -> int:
        """The number of available clients that were contacted for the round in flight."""
        if self._store.state.pending is None:
            return 0
        return len(self._available(available).names_of(self._store.state.pending.keys()))

    @property
    def clock(self) -> float | None:
        """The time of the last contact, in hours; None if `begin` was not given a time."""
        return self._store.state.clock

    @property
    def model(self) -> NDArray[np.float32]:
        """The last released model, as one read-only vector."""
        view = self._store.checkpoint.model.view()
        view.flags.writeable = False
        return view

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """The arrays of the last released model, by name."""
        return self.layout.arrays(self.model)

    def export(self, path: str | os.PathLike[str]) -> dict[str, str]:
        """Write the last released model to a .safetensors file, which is meant to be shared.

        The metadata of the file contains the number of rounds, epsilon, delta, and all private runs
        that trained the model, so that a later run can compose its guarantee with theirs. The file
        does not show who took part, and contains no noise and no key.

        Returns:
            The metadata without the private runs.
        """
        target = Path(path)
        if target.suffix != ".safetensors":
            raise InvalidInput(f"a model ends in .safetensors, got {str(target)!r}")
        if not self.rounds:
            root = self.folder.root
            raise InvalidInput(f"{root} has released nothing yet; train at least one round")
        from safetensors.numpy import save

        guarantee = self.guarantee()
        summary = {
            "rounds": str(self.rounds),
            "epsilon": repr(guarantee.epsilon),
            "delta": repr(guarantee.delta),
        }
        history = self._guarantee.history(self.run_id, self.rounds, self._store.exposure)
        metadata = {**summary, PROVENANCE: provenance_metadata(history)}
        replace_file(target, save(self.arrays(), metadata))
        return summary

    def guarantee(self) -> Guarantee:
        """The guarantee of all released rounds, composed with earlier runs on the same people."""
        if not self.rounds:
            raise InvalidInput("nothing has been released yet, so there is nothing to guarantee")
        return self._guarantee.after(self.rounds, self._store.exposure)

    def ended(self) -> str | None:
        """The reason why there is no further round, or None if there may be one.

        With timers in hours, whether the next round fits into the budget depends on its cohort. The
        budget is then checked by `begin`.
        """
        if self.rounds >= self._planned_rounds:
            return f"all {self.rounds:,} rounds are done"
        if self.settings.timer_hours is None and self.settings.budget is not None:
            return self._guarantee.over_budget(self.rounds + 1, Exposure())
        return None

    def population(self, names: Iterable[str]) -> Population:
        """Check and hash the names of many clients once, for all rounds that begin with them.

        With millions of clients, `begin` spends most of its time on their names. A population
        belongs to this server, and cannot be used after the run is resumed.

        Args:
            names: Names of all clients that may be available; `Population.select` says in each
                round who is. A client must have the same name in all rounds.

        Raises:
            InvalidInput: A name could be another spelling of another client's name.
        """
        with self._lock:
            return self._store.eligibility.population(names)

    def begin(self, available: Iterable[str] | Population, now: float | None = None) -> Round:
        """Open the next round: choose its cohort, or take the cohort of an interrupted round.

        Args:
            available: Names of the clients that can be contacted now, or a `population` of them. A
                client must have the same name in all rounds; names that differ only in how they
                are written are refused.
            now: The current time in hours. It is required if the timers count hours.

        Raises:
            InvalidInput: A name could be another spelling of another client's name.
            RunOver: There is no further round.
            TooFewClients: Too few clients may be contacted now, and nobody was contacted.
        """
        try:
            return self._begin(available, now)
        except TooFewClients as error:
            if time.monotonic() - self._waiting_noted >= WAITING_SECONDS:
                self._waiting_noted = time.monotonic()
                self.log(waiting=str(error), time=time.time(), **self._availability)
            raise

    def _begin(self, available: Iterable[str] | Population, now: float | None) -> Round:
        with self._lock:
            store = self._store
            store.check_usable()
            if self._open_round is not None:
                raise InvalidInput("a round is open: commit or abandon it before the next")
            if store.state.pending is None and (reason := self.ended()):
                raise RunOver(reason)
            now = None if now is None else _hours(now)
            pending, rounds = store.state.pending, store.state.rounds
            people = self._available(available, check=pending is None)
            self._availability = {"available": len(people)}
            if pending is None:
                chosen = store.eligibility.choose(people, rounds, store.state.attempts, now)
                self._availability["eligible"] = chosen.eligible
                if store.settings.budget is not None:
                    self._check_budget(rounds + 1, chosen.exposure)
                pending = store.contact(chosen)
                keys, names = chosen.keys, chosen.names
            else:
                keys = pending.keys()
                names = people.names_of(keys)
            clients, goal = frozenset(keys.tolist()), store.plan.fleet.report_goal
            joint = None if self._moving is None else self._moving.joint
            reports = Reports(clients, goal, store.layout, self._grid, joint)
            self._open_round = Round(
                pending.row,
                pending.attempt,
                names,
                reports,
                store.folder.note,
                store.file.run,
                store.settings.aggregators,
            )
            return self._open_round

    def _available(
        self, available: Iterable[str] | Population, *, check: bool = False
    ) -> Population:
        """The available clients as a population of this server."""
        eligibility = self._store.eligibility
        if not isinstance(available, Population):
            return eligibility.population(available, check=check)
        if available.owner is not eligibility:
            raise InvalidInput(
                "this population was made by another server; make one with server.population(names)"
            )
        return available

    def _check_budget(self, rounds: int, exposure: Exposure) -> None:
        if reason := self._guarantee.over_budget(rounds, exposure):
            raise RunOver(reason)

    def commit(
        self, open_round: Round, on_mean: Callable[[NDArray[np.float64]], None] | None = None
    ) -> Released:
        """Close a round: add the noise, apply the server optimizer, and write the result to disk.

        Args:
            open_round: The round, as `begin` returned it.
            on_mean: Called with the noisy mean of the round when it is on the disk. The guarantee
                covers it. Audits use it.

        Returns:
            The released model, which may be published.
        """
        with self._lock:
            self._check_open(open_round)
            reports = open_round.reports
            mean = self._release(reports)
            self._open_round = None
            unfit = len(reports.unfit_clients)
            attempt, row = open_round.attempt, open_round.number
            entry = {"attempt": attempt, "row": row, "unfit": unfit, "time": time.time()}
            self._waiting_noted = -math.inf
            self._store.tidy({**entry, **self._availability})
            if on_mean is not None:
                on_mean(mean)
            return Released(self.rounds, self.epsilon, self.arrays())

    def _release(self, reports: Reports | None) -> NDArray[np.float64]:
        """Add the noise to a round's sum, step, and write the result to the disk.

        Args:
            reports: The reports of the round; None for an empty round, whose sum is zero.

        Returns:
            The noisy mean.
        """
        store, moving = self._store, self._moving
        if reports is not None:
            total = reports.sum()
        else:
            joint = None if moving is None else moving.joint
            total = ExactSum(self._grid, self.layout.size, joint)
        counted: set[int] = set() if reports is None else reports.counted
        with store.all_or_nothing():
            store.noise.add_to(total)
            if moving is None:
                mean, clipping = self._grid.values(total.steps, store.plan.fleet.report_goal), None
            else:
                mean, clipping = moving.release(total)
            exposure = store.eligibility.timers.exposure
            guarantee = self._guarantee.after(store.state.rounds + 1, exposure)
            store.commit(counted, clipping, *self._stepped(mean), guarantee)
            if moving is not None and clipping is not None:
                moving.follow(clipping)
        return mean

    def _stepped(self, mean: NDArray[np.float64]) -> tuple[Float32Vector, State]:
        """The model and the state of the optimizer after a step with a round's noisy mean."""
        old = self._store.checkpoint
        with np.errstate(over="ignore", invalid="ignore"):  # a model that diverges is released too
            return self.settings.optimizer.step(
                old.model, mean, old.optimizer, self.rounds, self._planned_rounds
            )

    def abandon(self, open_round: Round, reason: str) -> None:
        """Close a round without a release. The next round uses the same row of noise.

        Args:
            open_round: The round, as `begin` returned it.
            reason: The reason, for the private journal.
        """
        with self._lock:
            self._check_open(open_round)
            if not isinstance(reason, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidInput(f"the reason is a text, got {type(reason).__name__}")
            self._store.abandon(reason, open_round.enough)
            self._open_round = None

    def shortage(
        self, available: Iterable[str] | Population, now: float | None = None
    ) -> Shortage | None:
        """Why a new cohort cannot be chosen among these clients; None if it can.

        Args:
            available: Names of the clients that can be contacted now.
            now: The current time in hours. It is required if the timers count hours.
        """
        with self._lock:
            people = self._available(available)
            return self._store.eligibility.shortage(people, self.rounds, now)

    def close_empty_round(
        self, available: Iterable[str] | Population, reason: str, now: float | None = None
    ) -> Released:
        """Close the next round as one in which nobody took part, and release its noise.

        Use this if a run cannot go on: every client that is left was contacted for this round
        already, or too few rounds before it. The round counts as one of the plan's rounds. Its sum
        is zero. Its row of noise is released and applied to the model like any other, because the
        noise of later rounds cancels part of it.

        Args:
            available: Names of the clients that can be contacted now.
            reason: Why nobody can take part, for the private journal.
            now: The current time in hours. It is required if the timers count hours.

        Returns:
            The released model.

        Raises:
            InvalidInput: An attempt at this round is open, was interrupted, or had all its reports
                when it was abandoned; or enough clients may be contacted to begin a round.
            RunOver: There is no further round.

        Guarantees:
            Nobody's privacy is spent: for every client, the sum of this round is the same with and
            without its updates. The server allows it only if too few of the available clients may
            be contacted, which depends on who is available and who was contacted, never on the
            content of an update. The decision is on the disk before anything is released, and from
            then on nobody is contacted for this row, whatever happens to the process.
        """
        with self._lock:
            store = self._store
            store.check_usable()
            if not isinstance(reason, str):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidInput(f"the reason is a text, got {type(reason).__name__}")
            if self._open_round is not None or store.state.pending is not None:
                raise InvalidInput(
                    "an attempt at this round has not ended, and its reports may still come: begin "
                    "it, if it was interrupted, and abandon it before you close the round as empty"
                )
            if over := self.ended():
                raise RunOver(over)
            if store.state.goal_reached:
                raise InvalidInput(
                    "an attempt at this round had all its reports and was abandoned: clients were "
                    "available, so this is not a round in which nobody could take part"
                )
            now = None if now is None else _hours(now)
            people = self._available(available)
            if store.eligibility.shortage(people, store.state.rounds, now) is None:
                raise InvalidInput(
                    "enough of the available clients may be contacted: begin a round instead"
                )
            self._check_budget(store.state.rounds + 1, store.eligibility.timers.exposure)
            store.close_empty(reason)
            return self._release_empty()

    def _release_empty(self) -> Released:
        """Release the noise of a round that was closed as empty."""
        row = self.rounds
        self._release(None)
        self._store.tidy({"row": row, "empty": True, "time": time.time()})
        return Released(self.rounds, self.epsilon, self.arrays())

    def log(self, **entry: Any) -> None:
        """Write an entry to the private log, which must never be published."""
        self._store.folder.note(entry)

    def _check_open(self, open_round: Round) -> None:
        if open_round is not self._open_round:
            raise InvalidInput(f"{open_round!r} is not the round that is open")


def _hours(now: float) -> float:
    is_number = isinstance(now, int | float) and not isinstance(now, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_number or not math.isfinite(as_float(now)):
        raise InvalidInput(f"the time is a finite number of hours, got {type(now).__name__}")
    return float(now)


def _path(folder: str | os.PathLike[str] | None) -> Path | None:
    return None if folder is None else Path(folder)
