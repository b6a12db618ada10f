"""The files of a run on the disk, and the only code that changes them.

`RunStore.create` writes the files of a new run, and `RunStore.resume` reads and checks the files of
an existing run. After that, only four steps change a run: clients are contacted, a round is
committed, a round is abandoned, or a round is closed as empty. Each step is written to the journal
before the server acts on it.
"""

import contextlib
import hashlib
import os
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, final

import msgspec
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from dpftrl._internal.arrays import Float32Vector, Layout
from dpftrl._internal.storage import read_json, replace_file, sha256_of
from dpftrl.accounting import Guarantee, save_guarantee
from dpftrl.adaptive_clipping import ClippedRound, MovingClipNorm
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.federated.eligibility import Chosen, Eligibility, Exposure, Rules
from dpftrl.federated.optimizers import State as OptimizerState
from dpftrl.federated.settings import RunFile, Settings, cohort_size
from dpftrl.federated.start_model import Start, StartModel
from dpftrl.federated.store.journal import (
    VERSION,
    Abandoned,
    AnyRecord,
    Cohort,
    Committed,
    Created,
    Decisions,
    Empty,
    RunState,
    packed,
    packed_as_digits,
    packed_mask,
)
from dpftrl.federated.store.ledger import EMPTY, Ledger, rows_of
from dpftrl.federated.store.run_folder import Checkpoint, RunFolder
from dpftrl.federated.store.snapshot import load_snapshot, save_snapshot
from dpftrl.journal import START, Chain, Journal, Lock, Witness, digest_of, witness_folder
from dpftrl.mechanisms import Mechanism
from dpftrl.mechanisms.registry import MechanismFile
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.plan import Plan, load_plan, save_plan

# A snapshot is saved when replaying the journal after the last one would take as long as to replay
# so many contacts, or this share of all clients that were contacted: so saving stays cheap too.
FEWEST_CONTACTS: Final = 100_000
SHARE_OF_CLIENTS: Final = 8
CONTACTS_PER_ATTEMPT: Final = 100  # to replay an attempt takes as long as so many of its contacts


@final
@dataclass
class RunStore:
    """A run that this process has opened: its files, and the state that was read from them.

    Guarantees:
        If a step fails before its end, the store refuses every further step, and the run must be
        resumed from its files. So no step builds on an earlier step that is incomplete.

    Attributes:
        folder: The paths of the files of the run.
        plan: Mechanism, noise, fleet and guarantee.
        file: The content of `run.json`.
        start: The model file that the run started from; None if it started from arrays.
        settings: The settings of the run, from `run.json`.
        layout: Names and shapes of the model's arrays.
        state: The current state of the run, computed from its journal.
        eligibility: Who was contacted when, and who may be contacted again.
        noise: The noise stream, after the last committed round.
        checkpoint: The model and the state of the optimizer after the last committed round.
        exposure: How closely and how often clients were contacted up to the last committed round.
    """

    folder: RunFolder
    plan: Plan
    file: RunFile
    start: Start | None
    eligibility: Eligibility
    noise: NoiseStream
    checkpoint: Checkpoint
    exposure: Exposure
    _key: NoiseKey
    _decisions: Decisions
    _ledger: Ledger | None  # only if the journal has version 1
    _unsaved: int  # work that the journal lines after the last snapshot would take, in contacts
    _held: ExitStack

    def __post_init__(self) -> None:
        self.settings = self.file.settings
        self.layout = Layout(self.file.names, self.file.shapes)
        self.state = self._decisions.state
        self._process = os.getpid()
        self._poisoned = False
        self._mechanisms: dict[Mechanism, MechanismFile] = {}  # those in guarantee.json

    @classmethod
    def create(
        cls,
        folder: RunFolder,
        plan: Plan,
        settings: Settings,
        model: Mapping[str, NDArray[Any]] | StartModel,
        state_folder: Path | None,
        insecure_test_key: int | None,
        files: Mapping[str, bytes],
    ) -> Self:
        """Write the files of a new run; the first line of the journal is written last."""
        plan = plan.covering_rounding()
        settings.check(plan)
        start = model.start if isinstance(model, StartModel) else None
        arrays = model.arrays if isinstance(model, StartModel) else model
        if start is not None:
            _check_others(start, settings)
        layout = Layout.of(arrays)
        is_test = insecure_test_key is not None
        key = NoiseKey.insecure_for_tests(insecure_test_key) if is_test else NoiseKey.generate()
        folder.make()
        with ExitStack() as held:
            lock = Lock(folder.lock)
            held.callback(lock.close)
            folder.refuse_if_begun()
            file = RunFile(
                run=os.urandom(16).hex(),
                settings=settings,
                names=layout.names,
                shapes=layout.shapes,
                test_key=is_test,
                buffers="float64",
                start=None if start is None else start.content(folder.settings),
            )
            decisions = _decisions(folder, file, key, lock, state_folder, held)
            noise = _noise(plan, file, layout, key)
            checkpoint = Checkpoint(layout.flat(arrays), settings.optimizer.start(layout.size))
            _write_first(folder, plan, file, key, checkpoint, decisions, files)
            eligibility = eligibility_of(plan, settings, key)
            parts = (eligibility, noise, checkpoint, Exposure(), key, decisions, None, 0)
            return cls(folder, plan, file, start, *parts, held.pop_all())

    @classmethod
    def resume(cls, folder: RunFolder, state_folder: Path | None, trust_folder: bool) -> Self:
        """Check all files, restore state and noise, and remove what was not journalled."""
        if not folder.exists:
            raise InvalidInput(
                f"{folder.root} holds no run; there is no {folder.journal.name} in it"
            )
        with ExitStack() as held:
            folder.check_owner()
            lock = Lock(folder.lock)
            held.callback(lock.close)
            key = folder.read_key()
            check_created(folder, key)
            file = read_json(folder.settings, RunFile, "run")
            start = None if file.start is None else Start.of_content(file.start, folder.settings)
            plan, settings = load_plan(folder.plan), file.settings
            settings.check(plan)
            layout = Layout(file.names, file.shapes)
            noise = _noise(plan, file, layout, key)
            decisions = _decisions(folder, file, key, lock, state_folder, held)
            eligibility = eligibility_of(plan, settings, key)
            exposure, unsaved = _read_journal(
                decisions, folder, eligibility, key, file.run, trust_folder
            )
            state = decisions.state
            # Everything is read and checked first; only then is anything changed.
            ledger = None
            if state.created is not None and state.created.version == 1:
                ledger = Ledger(folder.ledger)
                ledger.resume(*(state.ledger or EMPTY))
            checkpoint = _last_checkpoint(folder, state)
            noise = _restored(noise, folder, plan, state, key)
            if ledger is not None:
                ledger.cut()
            decisions.chain.resume()
            folder.tidy(state.rounds)
            parts = (eligibility, noise, checkpoint, exposure, key, decisions, ledger, unsaved)
            return cls(folder, plan, file, start, *parts, held.pop_all())

    def close(self) -> None:
        """Release the locks, so that another process can resume the run."""
        self._poisoned = True
        self._held.close()

    def check_usable(self) -> None:
        """Raise an error in a forked copy, after `close`, or after a step that failed."""
        if os.getpid() != self._process:  # forked copies share the lock of the run
            raise UnsafeState(
                f"this is a copy, by fork, of the server of process {self._process}: two of them "
                "would release a round twice; go on there, or resume the run when it has ended"
            )
        if self._poisoned:
            raise UnsafeState(
                "this server was closed, or stopped within a round; resume the run to go on"
            )

    @contextmanager
    def all_or_nothing(self) -> Generator[None]:
        """Run a block of code; if it raises, the store refuses every further step."""
        self.check_usable()
        self._poisoned = True
        yield
        self._poisoned = False

    def pending(self) -> Cohort:
        """The cohort of the round that is open."""
        if self.state.pending is None:
            raise UnsafeState("no round is open")
        return self.state.pending

    def moving_clip_norm(self) -> MovingClipNorm | None:
        """The clip norm after the committed rounds; None if it is fixed."""
        options, last = self.settings.adaptive, self.state.clipping
        if options is None:
            return None
        if last is None and self.state.rounds:
            raise UnsafeState("the journal has no clip norm for a round of adaptive clipping")
        grid, goal = self.settings.grid(self.plan), self.plan.fleet.report_goal
        return MovingClipNorm(options, grid, goal, last)

    def contact(self, chosen: Chosen) -> Cohort:
        """Journal that the clients of a cohort are about to be contacted, and start their timers.

        Returns:
            The record that was appended to the journal.
        """
        row = self.state.rounds
        kept = None if self.settings.hash_clients else tuple(chosen.names.values())
        with self.all_or_nothing():
            if self._ledger is None:
                clients, size = packed(chosen.keys), len(chosen.keys)
            else:
                clients, size = packed_as_digits(chosen.keys), UNSET
            record = Cohort(self.state.attempts, row, clients, chosen.time, kept, size)
            self._decisions.append(record)
            self.eligibility.contact(chosen.keys, row, chosen.time)
            self._unsaved += _replay_work(len(chosen.keys))
        return record

    def commit(
        self,
        counted: set[int],
        clipping: ClippedRound | None,
        model: Float32Vector,
        optimizer: OptimizerState,
        guarantee: Guarantee,
    ) -> None:
        """Write a committed round to the disk. After this call its model may be released.

        Call this within `all_or_nothing`, after the noise of the round was added.

        Args:
            counted: Pseudonyms of the clients whose updates are in the sum; none if the round is
                closed as empty.
            clipping: The clip norm and the noisy bits, with adaptive clipping.
            model: The model after the round, as one flat vector.
            optimizer: The state of the server optimizer after the round.
            guarantee: The guarantee of all released rounds, including this one.
        """
        current = self.state.empty or self.pending()
        after = Checkpoint(model, optimizer)
        sha256 = after.save(self.folder.checkpoint(self.state.rounds + 1))
        is_counted = current.mask_of(counted)
        packed_counted: str | UnsetType = packed_mask(is_counted)
        if self._ledger is not None:
            if isinstance(current, Cohort):
                self._ledger.append(rows_of(current, is_counted))
            packed_counted = UNSET
        in_ledger = _position(self._ledger)
        # Written before the round is journalled, so that its epsilon is never too small.
        save_guarantee(guarantee, self.folder.guarantee, self._mechanisms)
        self._decisions.append(
            Committed(
                attempt=current.attempt,
                row=current.row,
                reports=len(counted),
                digest=msgspec.Raw(self.noise.last_digest().json_string()),
                checkpoint_sha256=sha256,
                epsilon=guarantee.epsilon,
                counted=packed_counted,
                **in_ledger,
                clipping=clipping,
            )
        )
        self.checkpoint, self.exposure = after, self.eligibility.timers.exposure

    def abandon(self, reason: str, goal_reached: bool) -> None:
        """Journal that the open round is abandoned; the next round uses its row of noise.

        Args:
            reason: Why the round is abandoned.
            goal_reached: Whether the round had all its reports.
        """
        with self.all_or_nothing():
            pending = self.pending()
            if self._ledger is not None:
                self._ledger.append(rows_of(pending, None))
            self._decisions.append(
                Abandoned(
                    pending.attempt,
                    pending.row,
                    reason,
                    goal_reached=goal_reached,
                    **_position(self._ledger),
                )
            )

    def close_empty(self, reason: str) -> None:
        """Journal that nobody takes part in the next round; `commit` completes it."""
        with self.all_or_nothing():
            self._decisions.append(Empty(self.state.attempts, self.state.rounds, reason))

    def publish(self, guarantee: Guarantee) -> None:
        """Write `guarantee.json`, unless the last commit has written the same content."""
        save_guarantee(guarantee, self.folder.guarantee, self._mechanisms, keep_same=True)

    def tidy(self, entry: dict[str, Any]) -> None:
        """Write an entry to the private log, save noise and state if it is time, and clean up."""
        rounds = self.state.rounds
        self.folder.note(entry)
        if rounds % self.settings.snapshot_every == 0:
            try:
                self.noise.save(self.folder.noise)
            except InvalidInput as error:  # not fatal: the noise can be recomputed
                self.folder.note({"row": rounds, "snapshot": str(error)})
        self.folder.tidy(rounds)
        if (
            self._unsaved >= FEWEST_CONTACTS
            and self._unsaved >= len(self.eligibility.timers) // SHARE_OF_CLIENTS
        ):
            self._save_snapshot()

    def _save_snapshot(self) -> None:
        journal = self._decisions.chain.journal
        path, parts = self.folder.snapshot, (self.state, self.eligibility, self.exposure)
        try:
            save_snapshot(path, self._key, journal, *parts)
            self._unsaved = 0
        except InvalidInput as error:  # not fatal: the journal can be replayed
            self.folder.note({"row": self.state.rounds, "snapshot": str(error)})


def _position(ledger: Ledger | None) -> dict[str, Any]:
    """What a record of a journal of version 1 says about the ledger; nothing in version 2."""
    if ledger is None:
        return {}
    return {"ledger_bytes": ledger.bytes, "ledger_sha256": ledger.sha256}


def _replay_work(contacts: int) -> int:
    """The work to replay an attempt, in contacts."""
    return contacts + CONTACTS_PER_ATTEMPT


def _decisions(
    folder: RunFolder,
    file: RunFile,
    key: NoiseKey,
    lock: Lock,
    state_folder: Path | None,
    held: ExitStack,
) -> Decisions:
    """A journal that has not been read yet, with its witness; `held` closes the witness."""
    witness = Witness(witness_folder(folder.root, state_folder), file.run)
    held.callback(witness.close)
    return Decisions(Chain(_journal(folder, key), witness, lock), RunState())


def _journal(folder: RunFolder, key: NoiseKey) -> Journal[AnyRecord]:
    return Journal(folder.journal, key, AnyRecord)


def eligibility_of(plan: Plan, settings: Settings, key: NoiseKey) -> Eligibility:
    """The eligibility of a run in which nobody was contacted yet."""
    limits = plan.participation
    rules = Rules(limits.min_sep, limits.max_participations, settings.timer_hours)
    return Eligibility(key, rules, cohort_size(plan), settings.seed, plan.fleet.population)


def _check_others(start: Start, settings: Settings) -> None:
    """Refuse a statement that people are others if both runs have the same population label."""
    for one in start.others:
        if one.population is not None and one.population == settings.population:
            raise InvalidInput(
                f"the people of earlier run {one.name} are stated to be others than those of this "
                f"run, and both runs have the population label {one.population!r}; leave it out of "
                "other_people, or correct the label"
            )


def _write_first(
    folder: RunFolder,
    plan: Plan,
    file: RunFile,
    key: NoiseKey,
    checkpoint: Checkpoint,
    decisions: Decisions,
    files: Mapping[str, bytes],
) -> None:
    folder.write_key(key)
    save_plan(plan, folder.plan)
    replace_file(folder.settings, msgspec.json.format(msgspec.json.encode(file)), private=True)
    for name, content in files.items():
        replace_file(folder.root / name, content)
    sha256 = checkpoint.save(folder.checkpoint(0))
    decisions.chain.begin()
    decisions.append(
        Created(
            run=file.run,
            settings_sha256=sha256_of(folder.settings),
            plan_sha256=sha256_of(folder.plan),
            key_fingerprint=key.fingerprint(),
            checkpoint_sha256=sha256,
            files={name: hashlib.sha256(files[name]).hexdigest() for name in sorted(files)},
            version=VERSION,
        )
    )


def check_created(folder: RunFolder, key: NoiseKey) -> None:
    """Check, before it is used, that no file sealed in the first journal record was changed.

    These files are `run.json`, `plan.json` and the further files of `Server.create`.
    """
    created = next((record for record, _ in _journal(folder, key).read()), None)
    if not isinstance(created, Created):
        raise UnsafeState(f"{folder.journal} has no first line that belongs to this noise key")
    for path, known in (
        (folder.settings, created.settings_sha256),
        (folder.plan, created.plan_sha256),
        *((folder.root / name, sha256) for name, sha256 in created.files.items()),
    ):
        if sha256_of(path) != known:
            raise UnsafeState(f"{path} is not what it was when the run began")


def released_model(folder: RunFolder) -> tuple[int, Float32Vector]:
    """The number of committed rounds, and the model after them, read without changing anything.

    Raises:
        UnsafeState: The journal, a sealed file or the checkpoint was changed.
    """
    key, state = folder.read_key(), RunState()
    check_created(folder, key)
    for record, _ in _journal(folder, key).read():
        if record is not None:
            state.follow(record)
    return state.rounds, _last_checkpoint(folder, state).model


def _noise(plan: Plan, file: RunFile, layout: Layout, key: NoiseKey) -> NoiseStream:
    if file.buffers != plan.buffers:
        raise UnsafeState(
            f"the run has noise buffers in {file.buffers}, its plan is for {plan.buffers}"
        )
    settings = file.settings
    size = layout.size + (settings.adaptive is not None)  # one coordinate for the bits
    return NoiseStream(plan, size, key=key, clip_norm=settings.grid(plan).clip_norm)


def _read_journal(
    decisions: Decisions,
    folder: RunFolder,
    eligibility: Eligibility,
    key: NoiseKey,
    run: str,
    trust_folder: bool,
) -> tuple[Exposure, int]:
    """Check the whole journal, and replay its lines after the snapshot, or all of them.

    Returns:
        The exposure up to the last committed round, and the work that the replay took.
    """
    state = decisions.state
    snapshot = load_snapshot(folder.snapshot, key, run, state, eligibility)
    exposure, after, work = Exposure(), (0, START), 0
    if snapshot is not None:
        exposure, after = snapshot.exposure, snapshot.line
    for record in decisions.chain.read(folder.root, trust_folder, after):
        state.follow(record)
        if isinstance(record, Cohort):
            keys = record.keys()
            eligibility.contact(keys, record.row, record.time)
            work += _replay_work(len(keys))
        elif isinstance(record, Committed):
            exposure = eligibility.timers.exposure
    return exposure, work


def _last_checkpoint(folder: RunFolder, state: RunState) -> Checkpoint:
    folder.check_checkpoints(state.rounds)
    path = folder.checkpoint(state.rounds)
    if not path.exists():
        raise UnsafeState(f"{path} is missing: the model after {state.rounds} rounds")
    return Checkpoint.load(path, state.checkpoint_sha256)


def _restored(
    fresh: NoiseStream, folder: RunFolder, plan: Plan, state: RunState, key: NoiseKey
) -> NoiseStream:
    """The noise stream after the last committed round.

    The stream starts from the saved buffers, or from `fresh` if they cannot be used. Then the later
    rounds of the journal are replayed.
    """
    stream, saved = fresh, None
    if folder.noise.exists():
        # The file is only a cache: without it, the buffers are recomputed from the journal.
        with contextlib.suppress(InvalidInput):
            saved = NoiseStream.load(folder.noise, plan, key=key, at_least=0)
    if saved is not None and _belongs(saved, state):
        stream = saved
    for digest in state.digests[stream.round :]:
        stream.replay(digest_of(digest))
    return stream


def _belongs(saved: NoiseStream, state: RunState) -> bool:
    """Whether the saved buffers belong to this run, after one of its rounds."""
    if saved.round > state.rounds:
        raise UnsafeState(
            f"the saved noise has seen {saved.round} rounds, the journal {state.rounds}: the "
            "journal was rolled back"
        )
    return saved.round > 0 and saved.last_digest() == digest_of(state.digests[saved.round - 1])
