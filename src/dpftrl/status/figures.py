"""The figures of a status, as plain values: which may be published, and which may not.

None always means that a figure is not known, or does not exist for this kind of run. Nothing is
guessed.
"""

from typing import Literal, final

import msgspec

WarningKind = Literal[
    "stand-still",
    "budget",
    "epsilon above plan",
    "drop-outs",
    "no round",
    "disk",
    "permissions",
    "witness",
    "test key",
]
WitnessState = Literal["in step", "behind", "missing", "differs"]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """A group of figures."""


@final
class PublicFigures(Figures, frozen=True, kw_only=True):
    """Figures that may be published: none of them depends on what clients did or when.

    Attributes:
        run: The identity of the run.
        kind: Whether clients take part in rounds, or batches of a data set in steps.
        unit: Whose data is protected.
        rounds: Rounds released so far (steps, in a centralized run).
        rounds_planned: Rounds of the plan.
        rounds_within_budget: Rounds until the budget is spent; None without a budget, or if that
            depends on who will be contacted (timers in hours).
        ended: The reason why there is no further round; None if there may be one.
        epsilon: Epsilon of everything released so far, with earlier runs on the same people.
        epsilon_planned: Epsilon after the last planned round.
        epsilon_budget: The budget; None without one.
        delta: The delta at which epsilon is stated.
        mechanism: The name of the mechanism.
        noise_multiplier: Standard deviation of Z divided by the clip norm.
        clip_norm: The clip norm of the last released round; of the first one before that.
        clip_norm_moves: Whether clipping is adaptive. The clip norm then follows from releases.
        population: Number of clients of the plan, or of units in the data set.
        report_goal: Reports per round; None in a centralized run.
        contacts_per_round: Clients that one attempt at a round contacts; None in a centralized run.
        drop_out_planned: Share of the contacted clients whose report the plan does not need.
        min_sep: Smallest difference between two rounds of one client; None with timers in hours,
            and in a centralized run.
        timer_hours: Hours between two contacts of one client; None with timers in rounds.
        test_key: Whether the noise key is a test key: then there is no privacy at all.
    """

    run: str
    kind: Literal["federated", "centralized"]
    unit: Literal["client", "example", "user"]
    rounds: int
    rounds_planned: int
    rounds_within_budget: int | None = None
    ended: str | None
    epsilon: float
    epsilon_planned: float
    epsilon_budget: float | None = None
    delta: float
    mechanism: str
    noise_multiplier: float
    clip_norm: float
    clip_norm_moves: bool
    population: int
    report_goal: int | None = None
    contacts_per_round: int | None = None
    drop_out_planned: float | None = None
    min_sep: int | None = None
    timer_hours: float | None = None
    test_key: bool


@final
class OpenRound(Figures, frozen=True, kw_only=True):
    """A round whose clients were contacted, and which is neither committed nor abandoned.

    The reports so far are in the memory of the server, so they are not known.

    Attributes:
        attempt: Number of the attempt, from 0.
        contacted: Number of clients that were contacted.
        seconds: Seconds since they were contacted.
    """

    attempt: int
    contacted: int
    seconds: float


@final
class Attempts(Figures, frozen=True, kw_only=True):
    """What became of the attempts at rounds.

    Attributes:
        total: Number of attempts so far, including an open one.
        abandoned: Number of attempts that were abandoned.
        recent: Number of attempts that the figures below are about: the last ones that ended.
        recent_abandoned: How many of these were abandoned.
        recent_contacts: Number of clients that these contacted.
        drop_out: Share of these clients whose report was not counted: they did not report, were
            late, or were in an abandoned attempt. None before the first attempt ended.
        unfit: Updates that could not be used and counted as zeros, in the rounds that the private
            log still shows; None without such a log.
        open: The open round; None if there is none.
    """

    total: int
    abandoned: int
    recent: int
    recent_abandoned: int
    recent_contacts: int
    drop_out: float | None
    unfit: int | None
    open: OpenRound | None


@final
class StandStill(Figures, frozen=True, kw_only=True):
    """Too few clients may be contacted, now or in a later round.

    Attributes:
        observed: Whether the server is waiting for clients now. Otherwise this is a forecast.
        round: Number of rounds before the first one that cannot begin.
        rounds_left: Rounds until then; 0 means now.
        seconds_left: Seconds until then, at the current pace; None if the pace is not known.
        eligible: Clients that may be contacted then; None if that is not known.
        reason: The words of the server, if the stand-still is observed.
        ends_by_waiting: Whether time alone ends it. With timers in rounds it does not: only clients
            that were not available, or new ones, do.
    """

    observed: bool
    round: int
    rounds_left: int
    seconds_left: float | None
    eligible: int | None
    reason: str | None
    ends_by_waiting: bool


@final
class Clients(Figures, frozen=True, kw_only=True):
    """Who was contacted, and who may be contacted again.

    Attributes:
        contacted: Number of different clients contacted so far.
        rested: How many of them may be contacted again in the next round.
        never_contacted: The population of the plan minus `contacted`. None if more clients were
            contacted than the plan knows: then the population is not known.
        eligible: The sum of these two: clients that may be contacted in the next round if the
            fleet is as large as planned and everybody is available.
        eligible_next: The same for the rounds after the next, if all goes on as it does.
        available_at_begin: Clients that were available when the last round that ended began, or
            when the server last had too few; None if the private log does not say.
        eligible_at_begin: How many of them could be contacted.
        stand_still: When too few clients may be contacted; None if this is not foreseen, or not
            known.
    """

    contacted: int
    rested: int
    never_contacted: int | None
    eligible: int | None
    eligible_next: tuple[int, ...]
    available_at_begin: int | None
    eligible_at_begin: int | None
    stand_still: StandStill | None


@final
class Pace(Figures, frozen=True, kw_only=True):
    """How fast rounds are released.

    Attributes:
        seconds_per_round: Time from one release to the next; None before the second.
        basis: What this is computed from.
        last_round: Time of the last release, in seconds since 1970; None before the first.
        expected_end: Time of the last release if the run goes on now at this pace; None if that is
            not known, if the run has ended, or if a stand-still comes first.
    """

    seconds_per_round: float | None
    basis: Literal["last rounds", "whole run"] | None
    last_round: float | None
    expected_end: float | None


@final
class Process(Figures, frozen=True, kw_only=True):
    """The process that works on the run.

    Attributes:
        running: Whether a process of this machine holds the lock of the run; None if the system
            does not tell. Processes in other containers are not seen.
        pid: Its process id.
        last_change: Time of the last journal record, in seconds since 1970.
    """

    running: bool | None
    pid: int | None
    last_change: float


@final
class Disk(Figures, frozen=True, kw_only=True):
    """Room for the files of the run.

    Attributes:
        free_bytes: Free bytes on the disk of the run.
        run_bytes: Bytes of the files of the run.
        bytes_per_round: By how much the files grow in each round; None before the first.
        bytes_needed: Bytes that the remaining rounds need, with drafts of checkpoints. Before the
            first round, those of the drafts only.
        problems: Files and folders with a wrong owner or wrong permissions.
    """

    free_bytes: int
    run_bytes: int
    bytes_per_round: float | None
    bytes_needed: int
    problems: tuple[str, ...]


@final
class WitnessFigures(Figures, frozen=True, kw_only=True):
    """The witness of the run.

    Attributes:
        state: `in step`: it knows the last line of the journal, or all but the last. `behind`: it
            is an old copy, or lines were added. `differs`: the folder was rolled back or changed.
        lines_behind: Lines of the journal that it has not seen; None unless it is known.
        folder: The folder where it is looked for.
    """

    state: WitnessState
    lines_behind: int | None
    folder: str


@final
class PrivateFigures(Figures, frozen=True, kw_only=True):
    """Figures for the operator only. They depend on what clients did, and no noise covers them.

    Attributes:
        attempts: Attempts and drop-outs; None in a centralized run.
        clients: Eligible clients; None in a centralized run.
        pace: The pace of rounds. How long rounds take says something about the clients.
        process: The process that works on the run.
        disk: Room for the files, and their permissions.
        witness: The witness.
    """

    attempts: Attempts | None
    clients: Clients | None
    pace: Pace
    process: Process
    disk: Disk
    witness: WitnessFigures


@final
class StatusWarning(Figures, frozen=True, kw_only=True):
    """Something that the operator should look at. Warnings are for the operator only.

    Attributes:
        kind: What it is about.
        text: What is wrong, and what to do.
    """

    kind: WarningKind
    text: str


@final
class Status(Figures, frozen=True, kw_only=True):
    """The state of a run at one moment.

    Attributes:
        folder: The folder of the run.
        time: When the status was read, in seconds since 1970.
        public: Figures that may be published.
        private: Figures for the operator only.
        warnings: What the operator should look at, for the operator only.
    """

    format: Literal["dpftrl status"] = "dpftrl status"
    version: Literal[1] = 1
    folder: str
    time: float
    public: PublicFigures
    private: PrivateFigures
    warnings: tuple[StatusWarning, ...]
