"""The round, with no engine in it: the paper's Algorithm 1 as a small state machine.

Choose the cohort, hand out the model, take clipped updates until the report goal, add correlated
noise, step the server's optimiser, commit, release. Whoever drives it (one process, Flower, your
own code) only carries models to clients and updates back.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any, Self, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.checks import as_float
from dpftrl._internal.storage import replace_file
from dpftrl.accounting import Guarantee, save_guarantee
from dpftrl.errors import InvalidInput, RunOver, UnsafeState
from dpftrl.federated.eligibility import choose, refuse_unclear, written
from dpftrl.federated.layout import Layout
from dpftrl.federated.round import Attempt, Released, Reports
from dpftrl.federated.run_guarantee import Promise
from dpftrl.federated.settings import Settings, cohort_size
from dpftrl.federated.start_model import PROVENANCE, Start, StartModel, provenance_metadata
from dpftrl.federated.store.checkpoints import Checkpoint
from dpftrl.federated.store.folder import RunFolder
from dpftrl.federated.store.journal import Abandoned, AnyRecord, Cohort, Committed, packed, unpacked
from dpftrl.federated.store.ledger import Status
from dpftrl.federated.store.run_store import OpenRun, begin_run, open_run
from dpftrl.noise import Grid
from dpftrl.plan import Plan

Keys = NDArray[np.uint64]


@final
class Server:
    """A run that one process works on.

    Guarantees:
        A round's model can be had only after {model, optimiser, row, digest, ledger} are on the
        disk together. A process that is killed at any instant resumes to the same bits if it gets
        the same updates; whatever it gets, no row of noise covers two sums. A state that is older
        than what was journalled, changed or in use elsewhere is refused.

    >>> import tempfile
    >>> from dpftrl import MinSep, account, mechanism
    >>> from dpftrl.federated import Settings
    >>> from dpftrl.plan import Fleet, Plan
    >>> promise = account(mechanism("blt-b400"), MinSep(4, 2), sigma=1.0, delta=1e-6)
    >>> plan = Plan(Fleet(population=4, report_goal=2), promise)
    >>> people = ["ann", "bo", "cy", "di"]
    >>> model = {"weights": np.zeros(3)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run, place = f"{folder}/run", f"{folder}/state"
    ...     settings = Settings(clip_norm=1.0)
    ...     with Server.create(run, plan, settings, model, state_folder=place) as server:
    ...         attempt = server.begin(people)
    ...         for client in attempt.clients:
    ...             is_last = attempt.report(client, np.ones(3), attempt.number)
    ...         released = attempt.commit()
    >>> released.rounds, released.model["weights"].shape
    (1, (3,))
    """

    def __init__(self, run: OpenRun):
        """Use `create` or `open`."""
        self._run = run
        self._current: Attempt | None = None
        self._usable = True
        self._process = os.getpid()
        self._turn = Lock()
        file = run.file
        self._promise = Promise(run.plan, run.settings, file.test_key, file.buffers, run.start)
        self._grid = Grid.for_noise(run.plan.sigma, run.settings.clip_norm)

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
    ) -> Self:
        """Begin a run.

        Args:
            folder: Where its files go.
            plan: Mechanism, noise, fleet and the guarantee that they have together.
            settings: All else.
            model: Named arrays to start from, which must not depend on the clients' data. A model
                from a file goes through `StartModel.load`: if a private run made it, the guarantee
                of this run is composed with that of the earlier one.
            state_folder: Where the witness goes, outside the run's folder; by default
                $DPFTRL_STATE, or the user's state folder.
            insecure_test_key: Seed of a noise key that anybody can guess. For tests alone.
        """
        run = begin_run(
            RunFolder(Path(folder)), plan, settings, model, _path(state_folder), insecure_test_key
        )
        return cls(run)

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        state_folder: str | os.PathLike[str] | None = None,
        trust_folder: bool = False,
    ) -> Self:
        """Go on with a run.

        Args:
            folder: Where its files are.
            state_folder: Where its witness is.
            trust_folder: Go on although the witness is missing: you know that this folder is the
                newest there is, and that no copy of it was run.
        """
        server = cls(open_run(RunFolder(Path(folder)), _path(state_folder), trust_folder))
        try:
            if server.rounds:
                server._publish(server.guarantee())
        except BaseException:
            server.close()
            raise
        return server

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Server({self._run.folder.root}, {self.rounds} rounds)"

    def close(self) -> None:
        """Let another process have the run."""
        self._usable = False
        self._run.close()

    @property
    def plan(self) -> Plan:
        """What the run promised."""
        return self._run.plan

    @property
    def settings(self) -> Settings:
        """What it was told."""
        return self._run.settings

    @property
    def run(self) -> str:
        """The identity of the run, which may be published."""
        return self._run.file.run

    @property
    def layout(self) -> Layout:
        """Names and shapes of the model's arrays."""
        return self._run.layout

    @property
    def folder(self) -> RunFolder:
        """Where its files are."""
        return self._run.folder

    @property
    def rounds(self) -> int:
        """Rounds released so far."""
        return self._run.state.rounds

    @property
    def epsilon(self) -> float:
        """What they and the earlier runs on the same people guarantee, at the plan's delta."""
        return self._run.state.epsilon if self.rounds else self._promise.epsilon_before

    @property
    def start(self) -> Start | None:
        """The model file that the run started from, if it was one."""
        return self._run.start

    @property
    def planned(self) -> Guarantee:
        """What the run will guarantee after its last round, composed with the earlier runs."""
        return self._promise.planned

    @property
    def in_flight(self) -> bool:
        """Whether a cohort was contacted whose round is neither committed nor abandoned."""
        return self._run.state.pending is not None

    def asked_before(self, available: Sequence[str]) -> int:
        """How many of these were contacted for the round in flight."""
        if self._run.state.pending is None:
            return 0
        asked = set(unpacked(self._run.state.pending.clients).tolist())
        return len(asked & {self._run.pseudonyms.key(name) for name in available})

    @property
    def clock(self) -> float | None:
        """When the last cohort was contacted, in hours, if that was told."""
        return self._run.state.clock

    @property
    def model(self) -> NDArray[np.float32]:
        """The released model, as one vector that cannot be written to."""
        view = self._run.checkpoint.model.view()
        view.flags.writeable = False
        return view

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """The released model, by name."""
        return self.layout.arrays(self.model)

    def export(self, path: str | os.PathLike[str]) -> dict[str, str]:
        """Write the released model to a .safetensors file, which is meant to be shared.

        Its metadata says how many rounds the model was trained, what they guarantee, and which
        private runs are behind it, so that a later run can compose them. It says nothing about who
        took part, and holds no noise and no key.

        Returns:
            The metadata without the runs.
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
        history = self._promise.history(self.run, self.rounds, *self._run.charged)
        metadata = {**summary, PROVENANCE: provenance_metadata(history)}
        replace_file(target, save(self.arrays(), metadata))
        return summary

    def guarantee(self) -> Guarantee:
        """What everything released so far guarantees, with the earlier runs on the same people."""
        if not self.rounds:
            raise InvalidInput("nothing has been released yet, so there is nothing to guarantee")
        return self._promise.after(self.rounds, *self._run.charged)

    def ended(self) -> str | None:
        """Why there is no further round, if there is none; a budget by time shows at `begin`."""
        if self.rounds >= self.plan.participation.rounds:
            return f"all {self.rounds:,} rounds are done"
        if self.settings.timer_hours is None:
            return self._promise.over_budget(self.rounds + 1, None, 0)
        return None

    def begin(self, available: Sequence[str], now: float | None = None) -> Attempt:
        """Choose the cohort of the next round, or the cohort of a round that was interrupted again.

        Args:
            available: Names of the clients that can be asked now. A client must have the same name
                in all rounds; names that differ only in how they are written are refused.
            now: The time in hours, where timers go by time.

        Raises:
            InvalidInput: A name could be another spelling of another client's name.
            RunOver: There is no further round.
            TooFewClients: Nobody was contacted; more must become available.
        """
        with self._turn:
            return self._begin(available, now)

    def _begin(self, available: Sequence[str], now: float | None) -> Attempt:
        self._check_usable()
        if self._current is not None:
            raise InvalidInput("a round is open: commit or abandon it before the next")
        run = self._run
        if run.state.pending is None and (reason := self.ended()):
            raise RunOver(reason)
        now = None if now is None else _hours(now)
        by_key = {run.pseudonyms.key(name): name for name in available}
        if run.state.pending is None:
            refuse_unclear(by_key, run.timers)
            keys = np.fromiter(by_key, np.uint64, len(by_key))
            chosen = self._chosen(keys, now)
            run.pseudonyms.refuse_renamed([by_key[int(key)] for key in chosen], run.timers)
            self._contact(chosen, by_key, now)
        return self._attempt(by_key)

    def _chosen(self, keys: Keys, now: float | None) -> Keys:
        run, size = self._run, cohort_size(self.plan)
        eligible = run.rules.eligible(run.timers, keys, self.rounds, now)
        chosen = choose(eligible, size, run.settings.seed, run.state.attempts)
        after = run.timers.after(chosen, self.rounds)
        if reason := self._promise.over_budget(self.rounds + 1, *after):
            raise RunOver(reason)
        return chosen

    def _contact(self, chosen: Keys, by_key: dict[int, str], now: float | None) -> None:
        run = self._run
        names = None if run.settings.hash_clients else tuple(by_key[int(key)] for key in chosen)
        run.rules.contact(self.rounds, now)
        self._usable = False  # until their timers are set: nobody may be asked a second time
        self._journal(Cohort(run.state.attempts, self.rounds, packed(chosen), now, names))
        run.timers.mark(chosen, self.rounds)
        self._usable = True

    def _attempt(self, by_key: dict[int, str]) -> Attempt:
        pending = self._pending()
        clients = frozenset(unpacked(pending.clients).tolist())
        names = {key: by_key[key] for key in sorted(clients) if key in by_key}
        goal = self.plan.fleet.report_goal
        reports = Reports(clients, goal, self.layout, self._grid)
        self._current = Attempt(self, pending.attempt, pending.row, names, reports)
        return self._current

    def commit(self, attempt: Attempt) -> Released:
        """Add the noise, step the optimiser, make it durable; see `Attempt.commit`."""
        with self._turn:
            return self._close(attempt)

    def _close(self, attempt: Attempt) -> Released:
        self._check_current(attempt)
        if not attempt.enough:
            raise InvalidInput(f"{attempt!r} has too few reports to commit; abandon it")
        self._usable = False  # until all of it is done: half a round is nothing to go on from
        total = attempt.reports.sum()
        self._run.noise.add_to(total)
        mean = self._grid.values(total.steps, divisor=self.plan.fleet.report_goal)
        self._run.checkpoint = self._commit(attempt, self._stepped(mean))
        self._usable, self._current = True, None
        self.log(attempt=attempt.number, row=attempt.row, unfit=attempt.reports.unfit)
        self._after_commit()
        return Released(self.rounds, self.epsilon, self.arrays())

    def _stepped(self, mean: NDArray[np.float64]) -> Checkpoint:
        old, rounds = self._run.checkpoint, self.plan.participation.rounds
        with np.errstate(over="ignore", invalid="ignore"):  # a model may diverge: that is released
            stepped = self.settings.optimizer.step(
                old.model, mean, old.optimizer, self.rounds, rounds
            )
        return Checkpoint(*stepped)

    def _commit(self, attempt: Attempt, after: Checkpoint) -> Checkpoint:
        run, rounds = self._run, self.rounds + 1
        sha256 = after.save(run.folder.checkpoint(rounds))
        run.ledger.append(attempt.row, self._statuses(attempt.reports.counted, "contacted"))
        guarantee = self._promise.after(rounds, run.timers.least_gap, run.timers.most_contacts)
        self._publish(guarantee)  # before the round is real: what is said is never too little
        self._journal(
            Committed(
                attempt=attempt.number,
                row=attempt.row,
                reports=len(attempt.reports.counted),
                digest=run.noise.last_digest().secret_bytes().hex(),
                checkpoint_sha256=sha256,
                ledger_bytes=run.ledger.bytes,
                ledger_sha256=run.ledger.sha256,
                epsilon=guarantee.epsilon,
            )
        )
        run.charge()
        return after

    def abandon(self, attempt: Attempt, reason: str) -> None:
        """Release nothing; see `Attempt.abandon`."""
        with self._turn:
            self._give_up(attempt, reason)

    def _give_up(self, attempt: Attempt, reason: str) -> None:
        self._check_current(attempt)
        if not isinstance(reason, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInput(f"the reason is a text, got {type(reason).__name__}")
        run = self._run
        self._usable = False
        run.ledger.append(attempt.row, self._statuses(set(), "abandoned"))
        ledger = (run.ledger.bytes, run.ledger.sha256)
        self._journal(Abandoned(attempt.number, attempt.row, reason, *ledger))
        self._usable, self._current = True, None

    def log(self, **entry: Any) -> None:
        """Write to the private log, which is never to be published."""
        self.folder.note(entry)

    def _statuses(self, counted: set[int], otherwise: Status) -> Iterator[tuple[str, Status]]:
        pending = self._pending()
        keys = [int(key) for key in unpacked(pending.clients)]
        names = pending.names or tuple(map(written, keys))
        for key, name in zip(keys, names, strict=True):
            yield name, "counted" if key in counted else otherwise

    def _journal(self, record: AnyRecord) -> None:
        usable, self._usable = self._usable, False  # a failure between the lines ends this server
        self._run.write(record)
        self._usable = usable

    def _after_commit(self) -> None:
        run = self._run
        if self.rounds % run.settings.snapshot_every == 0:
            try:
                run.noise.save(run.folder.noise)
            except InvalidInput as error:  # it can be made again; the round is committed
                self.log(row=self.rounds, snapshot=str(error))
        run.folder.tidy(self.rounds)

    def _publish(self, guarantee: Guarantee) -> None:
        save_guarantee(guarantee, self.folder.guarantee)

    def _pending(self) -> Cohort:
        if self._run.state.pending is None:
            raise UnsafeState("no round is open")
        return self._run.state.pending

    def _check_current(self, attempt: Attempt) -> None:
        self._check_usable()
        if attempt is not self._current:
            raise InvalidInput(f"{attempt!r} is not the round that is open")

    def _check_usable(self) -> None:
        if os.getpid() != self._process:  # the lock on the run does not tell copies apart
            raise UnsafeState(
                f"this is a copy, by fork, of the server of process {self._process}: two of them "
                "would release a round twice; go on there, or open the run again when it has ended"
            )
        if not self._usable:
            raise UnsafeState(
                "this server was closed, or stopped within a round; open the run again to go on"
            )


def _hours(now: float) -> float:
    is_number = isinstance(now, int | float) and not isinstance(now, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_number or not math.isfinite(as_float(now)):
        raise InvalidInput(f"the time is a finite number of hours, got {type(now).__name__}")
    return float(now)


def _path(folder: str | os.PathLike[str] | None) -> Path | None:
    return None if folder is None else Path(folder)
