"""Beginning a run, and finding out whether one may go on."""

import contextlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.storage import default_state_folder, flush, read_json, replace_durably
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.federated.eligibility import Pseudonyms, Rules, Timers
from dpftrl.federated.layout import Layout
from dpftrl.federated.settings import RunFile, Settings
from dpftrl.federated.start_model import Start, StartModel
from dpftrl.federated.store.checkpoints import Checkpoint
from dpftrl.federated.store.folder import RunFolder, sha256_of
from dpftrl.federated.store.journal import (
    AnyRecord,
    Cohort,
    Committed,
    Created,
    Journal,
    RunState,
    unpacked,
)
from dpftrl.federated.store.ledger import EMPTY, Ledger
from dpftrl.federated.store.witness import Lock, Witness
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.noise.key import Secret
from dpftrl.plan import Plan, load_plan, save_plan


@final
@dataclass
class OpenRun:
    """All that a server works with."""

    folder: RunFolder
    plan: Plan
    file: RunFile
    start: Start | None
    journal: Journal
    state: RunState
    ledger: Ledger
    timers: Timers
    rules: Rules
    pseudonyms: Pseudonyms
    noise: NoiseStream
    checkpoint: Checkpoint
    witness: Witness
    lock: Lock
    held: ExitStack
    # Least gap and most contacts, over all attempts up to the last round that was committed.
    charged: tuple[int | None, int] = (None, 0)

    @property
    def settings(self) -> Settings:
        """What the run was told."""
        return self.file.settings

    @property
    def layout(self) -> Layout:
        """Names and shapes of the model's arrays."""
        return Layout(self.file.names, self.file.shapes)

    def write(self, record: AnyRecord) -> None:
        """Journal a decision, and let the witness know."""
        self.state.check(record)
        self.lock.check()
        self.witness.check(self.journal.lines, self.journal.mac)
        self.journal.append(record)
        self.state.follow(record)
        self.witness.remember(self.journal.lines, self.journal.mac)

    def charge(self) -> None:
        """A round was committed: what was contacted so far counts."""
        self.charged = (self.timers.least_gap, self.timers.most_contacts)

    def close(self) -> None:
        """Let another process have the run."""
        self.held.close()


def begin_run(
    folder: RunFolder,
    plan: Plan,
    settings: Settings,
    model: Mapping[str, NDArray[Any]] | StartModel,
    state_folder: Path | None,
    insecure_test_key: int | None,
) -> OpenRun:
    """Write everything that a run needs; its journal's first line comes last."""
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
        run = _unread(folder, plan, file, start, key, lock, state_folder)
        held.callback(run.witness.close)
        run.checkpoint = Checkpoint(layout.flat(arrays), settings.optimizer.start(layout.size))
        _write_first(run, key)
        run.held = held.pop_all()
    return run


def _check_others(start: Start, settings: Settings) -> None:
    """Refuse a statement about other people that the labels contradict."""
    for one in start.others:
        if one.population is not None and one.population == settings.population:
            raise InvalidInput(
                f"the people of earlier run {one.name} are stated to be others than those of this "
                f"run, and both runs have the population label {one.population!r}; leave it out of "
                "other_people, or correct the label"
            )


def _write_first(run: OpenRun, key: NoiseKey) -> None:
    folder = run.folder
    folder.write_key(key)
    save_plan(run.plan, folder.plan)
    replace_durably(folder.settings, msgspec.json.format(msgspec.json.encode(run.file)))
    for path in (*folder.root.glob("plan*"), *folder.root.glob("run*"), folder.root):
        flush(path)
    sha256 = run.checkpoint.save(folder.checkpoint(0))
    run.ledger.begin()
    # From here on a missing witness means that somebody took it away.
    run.witness.remember(run.journal.lines, run.journal.mac)
    run.write(
        Created(
            run=run.file.run,
            settings_sha256=sha256_of(folder.settings),
            plan_sha256=sha256_of(folder.plan),
            key_fingerprint=key.fingerprint(),
            checkpoint_sha256=sha256,
        )
    )


def open_run(folder: RunFolder, state_folder: Path | None, trust_folder: bool) -> OpenRun:
    """Check everything, cut off what was not committed, and bring the noise up to date."""
    if not folder.exists:
        raise InvalidInput(f"{folder.root} holds no run; there is no {folder.journal.name} in it")
    with ExitStack() as held:
        lock = Lock(folder.lock)
        held.callback(lock.close)
        key = folder.read_key()
        _check_created(folder, key)
        file = read_json(folder.settings, RunFile, "run")
        start = None if file.start is None else Start.of_content(file.start, folder.settings)
        run = _unread(folder, load_plan(folder.plan), file, start, key, lock, state_folder)
        held.callback(run.witness.close)
        _catch_up(run, key, trust_folder)
        run.held = held.pop_all()
    return run


def _check_created(folder: RunFolder, key: NoiseKey) -> None:
    """Before anything in these files is used: they are what they were when the run began."""
    created = next((record for record, _ in Journal(folder.journal, key).read()), None)
    if not isinstance(created, Created):
        raise UnsafeState(f"{folder.journal} has no first line that belongs to this noise key")
    for path, known in (
        (folder.settings, created.settings_sha256),
        (folder.plan, created.plan_sha256),
    ):
        if sha256_of(path) != known:
            raise UnsafeState(f"{path} is not what it was when the run began")


def _unread(
    folder: RunFolder,
    plan: Plan,
    file: RunFile,
    start: Start | None,
    key: NoiseKey,
    lock: Lock,
    state_folder: Path | None,
) -> OpenRun:
    """A run whose journal has not been read, or has no line yet."""
    settings, limits = file.settings, plan.participation
    settings.check(plan)
    layout = Layout(file.names, file.shapes)
    return OpenRun(
        folder=folder,
        plan=plan,
        file=file,
        start=start,
        journal=Journal(folder.journal, key),
        state=RunState(),
        ledger=Ledger(folder.ledger, settings.hash_clients),
        timers=Timers(),
        rules=Rules(limits.min_sep, limits.max_participations, settings.timer_hours),
        pseudonyms=Pseudonyms(key),
        noise=_noise(plan, file, layout, key),
        checkpoint=Checkpoint(np.empty(0, np.float32), {}),
        witness=Witness(_witnesses(folder, state_folder), file.run),
        lock=lock,
        held=ExitStack(),
    )


def _witnesses(folder: RunFolder, state_folder: Path | None) -> Path:
    place = state_folder or default_state_folder()
    if place.resolve().is_relative_to(folder.root.resolve()):
        raise InvalidInput(
            f"{place} lies in the folder of the run: a witness there would be rolled back with it"
        )
    return place


def _noise(plan: Plan, file: RunFile, layout: Layout, key: NoiseKey) -> NoiseStream:
    clip_norm = file.settings.clip_norm
    return NoiseStream(plan, layout.size, key=key, clip_norm=clip_norm, dtype=file.buffers)


def _catch_up(run: OpenRun, key: NoiseKey, trust_folder: bool) -> None:
    """Read and check first; only then change anything."""
    _read_journal(run, trust_folder)
    run.ledger.resume(*(run.state.ledger or EMPTY))
    folder, state = run.folder, run.state
    folder.check_checkpoints(state.rounds)
    path = folder.checkpoint(state.rounds)
    if not path.exists():
        raise UnsafeState(f"{path} is missing: the model after {state.rounds} rounds")
    run.checkpoint = Checkpoint.load(path, state.checkpoint_sha256)
    run.noise = _restored(run, key)
    run.ledger.cut()
    run.witness.remember(run.journal.lines, run.journal.mac)
    folder.tidy(state.rounds)


def _read_journal(run: OpenRun, trust_folder: bool) -> None:
    seen = run.witness.seen()
    found = seen is not None and seen.lines == 0
    for record, mac in run.journal.read():
        run.state.follow(record)
        if isinstance(record, Cohort):
            run.timers.mark(unpacked(record.clients), record.row)
            run.rules.contact(record.row, record.time)
        elif isinstance(record, Committed):
            run.charge()
        found |= seen is not None and (run.journal.lines, mac) == (seen.lines, seen.mac)
    if seen is None and not trust_folder:
        raise UnsafeState(
            f"the witness of this run is missing, so nobody knows whether {run.folder.root} is its "
            "newest state; bring the witness along, or say that you trust the folder"
        )
    if seen is not None and not found:
        raise UnsafeState(
            f"{run.folder.root} was rolled back or changed: its journal has {run.journal.lines} "
            f"lines, and the witness has seen {seen.lines}; going on could release a round twice"
        )


def _restored(run: OpenRun, key: NoiseKey) -> NoiseStream:
    """The saved buffers, or none if they cannot be used; then what the journal says came after."""
    stream, saved = run.noise, None
    if run.folder.noise.exists():
        # It is a cache: what cannot be used is made again from the journal.
        with contextlib.suppress(InvalidInput):
            saved = NoiseStream.load(run.folder.noise, run.plan, key=key, at_least=0)
    if saved is not None and _belongs(saved, run):
        stream = saved
    for digest in run.state.digests[stream.round :]:
        stream.replay(Secret(bytes.fromhex(digest)))
    return stream


def _belongs(saved: NoiseStream, run: OpenRun) -> bool:
    """Whether saved buffers are those of this run after some of its rounds."""
    if saved.round > run.state.rounds:
        raise UnsafeState(
            f"the saved noise has seen {saved.round} rounds, the journal {run.state.rounds}: the "
            "journal was rolled back"
        )
    digest = saved.last_digest().secret_bytes().hex()
    return saved.round > 0 and digest == run.state.digests[saved.round - 1]
