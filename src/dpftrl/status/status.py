"""`read_status`: compute the status of a run from what its files say.

The figures of a federated run and those of a centralized run are computed side by side here; both
end in one `Status`.
"""

import math
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final, cast, final

from dpftrl.adaptive_clipping import ClipNorm, ClippedRound, adaptive
from dpftrl.centralized.guarantee import epsilon_after
from dpftrl.errors import InvalidInput
from dpftrl.federated.eligibility import Exposure
from dpftrl.federated.settings import cohort_size
from dpftrl.status.figures import (
    Attempts,
    Clients,
    OpenRound,
    Pace,
    PrivateFigures,
    Process,
    PublicFigures,
    StandStill,
    Status,
    WitnessFigures,
)
from dpftrl.status.forecast import Contacts, Rest
from dpftrl.status.health import disk_of, process_of
from dpftrl.status.reading import (
    Attempt,
    CentralizedReading,
    CentralizedRun,
    FederatedReading,
    FederatedRun,
    LogEntry,
    WitnessReading,
    open_run,
    steadily,
)
from dpftrl.status.warn import warnings_of

PathLike = str | os.PathLike[str]

RECENT: Final = 50  # attempts or rounds that "recent" figures are about
NEXT_ROUNDS: Final = 10  # rounds whose eligible clients are listed
SECONDS_PER_HOUR: Final = 3600.0
# A clock that is within this many hours of the times of the files is taken for a real clock.
REAL_CLOCK_HOURS: Final = 24.0
COPIED_SECONDS: Final = 1e-3  # rounds that seem to be shorter are those of files that were copied
BYTES_PER_NUMBER: Final = 8  # of the noise buffers


def read_status(
    folder: PathLike,
    *,
    state_folder: PathLike | None = None,
    now: float | None = None,
    free_bytes: int | None = None,
) -> Status:
    """Read the status of a run. Nothing is locked or written, and a server may be training.

    Args:
        folder: The folder of a federated or a centralized run.
        state_folder: Folder with the witness of the run; by default $DPFTRL_STATE, or the user's
            state folder.
        now: The current time in seconds since 1970; None asks the system.
        free_bytes: Free bytes on the disk of the run; None asks the system.

    Raises:
        InvalidInput: The folder holds no run that this user can read.
        UnsafeState: The files were changed or damaged.
    """
    return StatusReader(folder, state_folder=state_folder).read(now=now, free_bytes=free_bytes)


@final
class StatusReader:
    """Reads the status of one run again and again.

    The journal is read again only when it has changed.

    Args:
        folder: The folder of the run.
        state_folder: Folder with the witness of the run.

    Raises:
        InvalidInput: The folder holds no run that this user can read.
    """

    def __init__(self, folder: PathLike, *, state_folder: PathLike | None = None):
        self._root = Path(folder)
        self._state_folder = None if state_folder is None else Path(state_folder)
        try:
            self._figures = steadily(lambda: _figures_for(open_run(self._root)))
        except OSError as error:
            raise _unreadable(error, self._root) from None

    def read(self, *, now: float | None = None, free_bytes: int | None = None) -> Status:
        """Read the status; the arguments are those of `read_status`."""
        time_now = time.time() if now is None else now
        try:
            public, private = steadily(
                lambda: self._figures.read(self._state_folder, time_now, free_bytes)
            )
        except OSError as error:
            raise _unreadable(error, self._root) from None
        warnings = tuple(warnings_of(public, private, time_now))
        return Status(
            folder=str(self._root), time=time_now, public=public, private=private, warnings=warnings
        )


def _unreadable(error: OSError, root: Path) -> InvalidInput:
    return InvalidInput(f"{error.filename or root} cannot be read: {error.strerror}")


def _figures_for(run: FederatedRun | CentralizedRun) -> "_Federated | _Centralized":
    return _Federated(run) if isinstance(run, FederatedRun) else _Centralized(run)


Stamp = tuple[tuple[int, int, int] | None, ...]


def _stamp(files: Sequence[Path]) -> Stamp:
    """What changes when one of the files is written, replaced or removed."""
    found = list[tuple[int, int, int] | None]()
    for path in files:
        try:
            status = path.stat()
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
        except FileNotFoundError:
            found.append(None)
    return tuple(found)


@final
class _Federated:
    """The figures of a run with clients."""

    def __init__(self, run: FederatedRun):
        self._run = run
        self._known: tuple[Stamp, FederatedReading] | None = None
        self._planned = run.guarantee.planned.epsilon
        self._within_budget = self._rounds_within_budget()

    def _rounds_within_budget(self) -> int | None:
        """The number of rounds that the budget allows; None if that is not known in advance."""
        settings, rounds = self._run.file.settings, self._run.plan.participation.rounds
        if settings.budget is None or settings.timer_hours is not None:
            return None
        if self._run.guarantee.over_budget(rounds, Exposure()) is None:
            return rounds
        low, high = 0, rounds  # epsilon does not fall from one round to the next
        while low < high:
            middle = (low + high + 1) // 2
            if self._run.guarantee.over_budget(middle, Exposure()) is None:
                low = middle
            else:
                high = middle - 1
        return low

    def read(
        self, state_folder: Path | None, now: float, free_bytes: int | None
    ) -> tuple[PublicFigures, PrivateFigures]:
        folder, plan = self._run.folder, self._run.plan
        process = process_of(folder.lock, folder.journal)
        stamp = _stamp(self._run.files(state_folder))
        if self._known is None or self._known[0] != stamp:
            self._known = stamp, self._run.read(state_folder)
        reading = self._known[1]
        public = self._public(reading)
        rounds = public.rounds
        rounds_left = 0 if public.ended else _last_round(public) - rounds
        files = (folder.settings, folder.checkpoint(rounds))
        pace = _pace(reading.log, rounds, *files)
        clients = self._clients(reading, public, pace, process, now)
        standing = clients.stand_still is not None
        size = sum(_product(shape) for shape in self._run.file.shapes)
        noise = plan.mechanism.memory(public.rounds_planned) * size * BYTES_PER_NUMBER
        return public, PrivateFigures(
            attempts=_attempts(reading, process, now),
            clients=clients,
            pace=_with_end(pace, 0 if standing else rounds_left, now),
            process=process,
            disk=disk_of(
                folder.root, rounds, None if public.ended else rounds_left, noise, free_bytes
            ),
            witness=_witness(reading.witness, process),
        )

    def _public(self, reading: FederatedReading) -> PublicFigures:
        plan, settings, state = self._run.plan, self._run.file.settings, reading.state
        limits, fleet, contacted = plan.participation, plan.fleet, cohort_size(plan)
        ended = None
        if state.rounds >= limits.rounds:
            ended = f"all {state.rounds:,} rounds are done"
        elif self._within_budget is not None and state.rounds >= self._within_budget:
            ended = self._run.guarantee.over_budget(state.rounds + 1, Exposure())
        return PublicFigures(
            run=self._run.file.run,
            kind="federated",
            unit="client",
            rounds=state.rounds,
            rounds_planned=limits.rounds,
            rounds_within_budget=self._within_budget,
            ended=ended,
            epsilon=state.epsilon if state.rounds else self._run.guarantee.epsilon_before,
            epsilon_planned=self._planned,
            epsilon_budget=settings.budget,
            delta=plan.guarantee.delta,
            mechanism=plan.mechanism.name,
            noise_multiplier=plan.noise_multiplier,
            clip_norm=_clip_norm(settings.clip_norm, state.clipping),
            clip_norm_moves=settings.adaptive is not None,
            population=fleet.population,
            report_goal=fleet.report_goal,
            contacts_per_round=contacted,
            drop_out_planned=1 - fleet.report_goal / contacted,
            min_sep=limits.min_sep if settings.timer_hours is None else None,
            timer_hours=settings.timer_hours,
            test_key=self._run.file.test_key,
        )

    def _clients(
        self,
        reading: FederatedReading,
        public: PublicFigures,
        pace: Pace,
        process: Process,
        now: float,
    ) -> Clients:
        """Who may be contacted in the next round, and in those after it."""
        state, needed = reading.state, cohort_size(self._run.plan)
        # A round in flight is taken to be committed.
        next_round = state.rounds + (state.pending is not None)
        rest = self._rest(reading, process, now)
        last, count = reading.timers.entries()
        cap = self._run.plan.participation.max_participations
        contacts = Contacts(last, count, cap, next_round, rest)
        fresh = public.population - len(last)
        rested, eligible, forecast = contacts.rested(), None, list[float]()
        if fresh >= 0 and not public.ended:
            is_paced = rest.hours is None or rest.hours_per_round is not None
            rounds = max(0, _last_round(public) - next_round) if is_paced else 1
            per_round = _contacts_per_round(_recent(reading.attempts), needed)
            forecast = contacts.eligible(fresh, per_round, needed, rounds)
        if fresh >= 0:
            eligible = rested + fresh
        begin = reading.log[-1] if reading.log else None
        return Clients(
            contacted=len(last),
            rested=rested,
            never_contacted=fresh if fresh >= 0 else None,
            eligible=eligible,
            eligible_next=tuple(map(round, forecast[1 : NEXT_ROUNDS + 1])),
            available_at_begin=begin.available if begin else None,
            eligible_at_begin=begin.eligible if begin else None,
            stand_still=_waiting(reading.log, process, state.rounds, rest)
            or _foreseen(forecast, needed, next_round, rest, pace),
        )

    def _rest(self, reading: FederatedReading, process: Process, now: float) -> Rest:
        """How long clients rest, and at what time the next round is on the clock of the run."""
        hours, fleet = self._run.file.settings.timer_hours, self._run.plan.fleet
        if hours is None:
            return Rest(self._run.plan.participation.min_sep)
        # The last attempt at a round counts. Rounds for which nobody was contacted have no time.
        by_row = {attempt.row: attempt.time or 0.0 for attempt in reading.attempts}
        times = [by_row.get(row, -math.inf) for row in range(max(by_row, default=-1) + 1)]
        steps = [
            (by_row[later] - by_row[earlier]) / (later - earlier)
            for earlier, later in pairwise(by_row)
        ]
        pace = median(steps[-RECENT:]) if steps else None
        if not pace and fleet.rounds_per_day is not None:
            pace = 24 / fleet.rounds_per_day
        clock = reading.state.clock or 0.0
        is_real = abs(process.last_change / SECONDS_PER_HOUR - clock) < REAL_CLOCK_HOURS
        due = clock + (pace or 0.0) if times else clock
        return Rest(
            1, hours, times, max(due, now / SECONDS_PER_HOUR) if is_real else due, pace or None
        )


@final
class _Centralized:
    """The figures of a run on a data set."""

    def __init__(self, run: CentralizedRun):
        self._run = run
        self._known: tuple[Stamp, CentralizedReading] | None = None

    def read(
        self, state_folder: Path | None, now: float, free_bytes: int | None
    ) -> tuple[PublicFigures, PrivateFigures]:
        folder, plan, file = self._run.folder, self._run.plan, self._run.file
        process = process_of(folder.lock, folder.journal)
        stamp = _stamp(self._run.files(state_folder))
        if self._known is None or self._known[0] != stamp:
            self._known = stamp, self._run.read(state_folder)
        reading = self._known[1]
        steps, planned = len(reading.state.digests), plan.dataset.steps
        is_over = reading.state.saved >= planned
        last_clipping = reading.state.clippings[-1] if reading.state.clippings else None
        public = PublicFigures(
            run=file.run,
            kind="centralized",
            unit=file.settings.unit,
            rounds=steps,
            rounds_planned=planned,
            ended=f"all {planned:,} steps are done" if is_over else None,
            epsilon=epsilon_after(plan, steps),
            epsilon_planned=plan.guarantee.epsilon,
            delta=plan.guarantee.delta,
            mechanism=plan.mechanism.name,
            noise_multiplier=plan.noise_multiplier,
            clip_norm=_clip_norm(file.settings.clip_norm, last_clipping),
            clip_norm_moves=file.settings.adaptive is not None,
            population=plan.dataset.size,
            test_key=file.test_key,
        )
        pace = _pace([], steps, folder.settings, folder.journal)
        noise = plan.mechanism.memory(planned) * file.settings.size * BYTES_PER_NUMBER
        return public, PrivateFigures(
            attempts=None,
            clients=None,
            pace=_with_end(pace, 0 if is_over else planned - steps, now),
            process=process,
            disk=disk_of(
                folder.root, steps, None if is_over else planned - steps, noise, free_bytes
            ),
            witness=_witness(reading.witness, process),
        )


def _clip_norm(clip_norm: ClipNorm, last: ClippedRound | None) -> float:
    """The clip norm of the last round, or of the first one if none was released."""
    if last is not None:
        return last.state.clip_norm
    options = adaptive(clip_norm)
    return cast("float", clip_norm) if options is None else options.start


def _last_round(public: PublicFigures) -> int:
    """The number of rounds after which the run ends: all planned, or those that fit the budget."""
    within = public.rounds_within_budget
    return public.rounds_planned if within is None else min(within, public.rounds_planned)


def _product(shape: Sequence[int]) -> int:
    product = 1
    for length in shape:
        product *= length
    return product


def _recent(attempts: Sequence[Attempt]) -> list[Attempt]:
    """The last attempts that ended."""
    return [attempt for attempt in attempts if attempt.counted is not None][-RECENT:]


def _contacts_per_round(recent: Sequence[Attempt], needed: int) -> float:
    """Clients that a committed round contacts on average, with the abandoned attempts at it."""
    committed = sum(bool(attempt.counted) for attempt in recent)
    return sum(attempt.contacted for attempt in recent) / committed if committed else needed


def _attempts(reading: FederatedReading, process: Process, now: float) -> Attempts:
    recent = _recent(reading.attempts)
    contacts = sum(attempt.contacted for attempt in recent)
    counted = sum(attempt.counted or 0 for attempt in recent)
    pending = reading.state.pending
    rounds = [entry for entry in reading.log if entry.row is not None]
    return Attempts(
        total=reading.state.attempts,
        abandoned=sum(attempt.counted == 0 for attempt in reading.attempts),
        recent=len(recent),
        recent_abandoned=sum(attempt.counted == 0 for attempt in recent),
        recent_contacts=contacts,
        drop_out=1 - counted / contacts if contacts else None,
        unfit=sum(entry.unfit for entry in rounds) if rounds else None,
        open=None
        if pending is None
        else OpenRound(
            attempt=pending.attempt,
            contacted=reading.attempts[-1].contacted,
            seconds=max(0.0, now - process.last_change),
        ),
    )


def _pace(log: Sequence[LogEntry], rounds: int, created: Path, last: Path) -> Pace:
    """The pace of rounds, by the private log, or else by the times of two files.

    Args:
        log: The private log.
        rounds: Number of rounds released.
        created: A file that was written when the run was created.
        last: A file that was written with the last round.
    """
    if not rounds:
        return Pace(seconds_per_round=None, basis=None, last_round=None, expected_end=None)
    times = {entry.row: entry.time for entry in log if entry.row is not None}
    lengths = [times[row] - times[row - 1] for row in times if row - 1 in times][-RECENT:]
    last_round = times.get(rounds - 1) or last.stat().st_mtime
    seconds, basis = None, None
    if lengths:
        seconds, basis = max(0.0, median(lengths)), "last rounds"
    elif rounds > 1:
        mean = (last_round - created.stat().st_mtime) / rounds
        if mean > COPIED_SECONDS:
            seconds, basis = mean, "whole run"
    return Pace(seconds_per_round=seconds, basis=basis, last_round=last_round, expected_end=None)


def _with_end(pace: Pace, rounds_left: int, now: float) -> Pace:
    """The pace, with the expected end if that many rounds are left."""
    seconds = pace.seconds_per_round
    end = now + rounds_left * seconds if seconds is not None and rounds_left else None
    return Pace(
        seconds_per_round=seconds, basis=pace.basis, last_round=pace.last_round, expected_end=end
    )


def _waiting(
    log: Sequence[LogEntry], process: Process, rounds: int, rest: Rest
) -> StandStill | None:
    """A stand-still that the server has met, and nothing was journalled since."""
    entry = log[-1] if log else None
    if entry is None or entry.waiting is None or entry.time < process.last_change:
        return None
    return StandStill(
        observed=True,
        round=rounds,
        rounds_left=0,
        seconds_left=0.0,
        eligible=entry.eligible,
        reason=entry.waiting,
        ends_by_waiting=rest.hours is not None,
    )


def _foreseen(
    forecast: Sequence[float], needed: int, next_round: int, rest: Rest, pace: Pace
) -> StandStill | None:
    """The stand-still at the end of a forecast, if there is one."""
    if not forecast or round(forecast[-1]) >= needed:
        return None
    rounds_left = len(forecast) - 1
    seconds = pace.seconds_per_round
    return StandStill(
        observed=False,
        round=next_round + rounds_left,
        rounds_left=rounds_left,
        seconds_left=0.0 if not rounds_left else None if seconds is None else rounds_left * seconds,
        eligible=round(forecast[-1]),
        reason=None,
        ends_by_waiting=rest.hours is not None,
    )


def _witness(reading: WitnessReading, process: Process) -> WitnessFigures:
    behind = reading.lines_behind
    if not reading.exists:
        state = "missing"
    elif behind is None:
        state = "differs"
    else:
        # A server that trains may have written further lines while the journal was read.
        state = "in step" if behind <= 1 or process.running else "behind"
    return WitnessFigures(state=state, lines_behind=behind, folder=str(reading.folder))
