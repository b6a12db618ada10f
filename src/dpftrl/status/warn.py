"""When a status warns its operator. The rules in `deploy/alerts.yml` have the same limits."""

from collections.abc import Iterator
from typing import Final

from dpftrl._internal.formatting import duration, memory_text, rounded_up
from dpftrl.status.figures import (
    Clients,
    PrivateFigures,
    PublicFigures,
    StandStill,
    StatusWarning,
    WitnessState,
)

BUDGET_SHARE: Final = 0.8  # of the budget
DROP_OUT_MARGIN: Final = 0.05  # percentage points above the plan
ROUNDING: Final = 1e-9  # of two computations of the same epsilon
QUIET_ROUNDS: Final = 5  # round lengths without a release
QUIET_SECONDS: Final = 60.0  # rounds may be short, and a server may be stopped for a moment

WITNESS: Final[dict[WitnessState, str]] = {
    "behind": "the witness has not seen the last {lines} lines of the journal: it is an old copy, "
    "or lines were added; the run does not resume with it",
    "missing": "there is no witness in {folder}: a run does not resume without it; name its folder "
    "(--state-folder)",
    "differs": "the journal does not have the line that the witness has seen: the folder was "
    "rolled back or changed; do not resume it, and run `dpftrl verify`",
}


def warnings_of(
    public: PublicFigures, private: PrivateFigures, now: float
) -> Iterator[StatusWarning]:
    """Yield what the operator should look at.

    Args:
        public: The public figures.
        private: The private figures.
        now: The current time, in seconds since 1970.
    """
    if public.test_key:
        yield StatusWarning(
            kind="test key", text="the noise key is one for tests: there is no privacy at all"
        )
    if not public.ended:
        yield from _stand_still(public, private.clients)
        yield from _budget(public)
        yield from _drop_outs(public, private)
        yield from _no_round(private, now)
    if not public.epsilon <= public.epsilon_planned * (1 + ROUNDING):
        yield StatusWarning(
            kind="epsilon above plan",
            text=f"epsilon is {rounded_up(public.epsilon)}, above the "
            f"{rounded_up(public.epsilon_planned)} of the plan: clients returned sooner than "
            "planned; fewer rounds, or longer timers, keep the plan",
        )
    disk = private.disk
    if not disk.free_bytes >= disk.bytes_needed:
        yield StatusWarning(
            kind="disk",
            text=f"{memory_text(disk.free_bytes)} are free, and the rounds to come need "
            f"{memory_text(disk.bytes_needed)}; make room before the disk is full",
        )
    for problem in disk.problems:
        yield StatusWarning(kind="permissions", text=problem)
    witness = private.witness
    if witness.state in WITNESS:
        text = WITNESS[witness.state].format(lines=witness.lines_behind, folder=witness.folder)
        yield StatusWarning(kind="witness", text=text)


def _stand_still(public: PublicFigures, clients: Clients | None) -> Iterator[StatusWarning]:
    still = None if clients is None else clients.stand_still
    if still is not None:
        text = f"{_too_few(still, public.contacts_per_round)}; {_remedy(still)}"
        yield StatusWarning(kind="stand-still", text=text)


def _too_few(still: StandStill, needed: int | None) -> str:
    eligible = "too few" if still.eligible is None else f"{still.eligible:,}"
    clients = f"{eligible} clients may be contacted, and a round contacts {needed:,}"
    if still.observed:
        return f"the server waits for clients: {still.reason}"
    if not still.rounds_left:
        return f"the next round cannot begin: {clients}, if the fleet is as planned"
    seconds = still.seconds_left
    when = "" if seconds is None else f", in about {duration(seconds)}"
    return (
        f"the run will stand still after {still.round:,} rounds{when}: {clients} then, if the "
        "fleet is as planned"
    )


def _remedy(still: StandStill) -> str:
    if still.ends_by_waiting:
        return "it ends by itself when the timers of enough clients have run out"
    return (
        "waiting does not end it, because timers count rounds; let clients take part that were "
        "not available, or close rounds as empty (Server.close_empty_round)"
    )


def _budget(public: PublicFigures) -> Iterator[StatusWarning]:
    budget, within = public.epsilon_budget, public.rounds_within_budget
    if budget is None or public.epsilon < BUDGET_SHARE * budget:
        return
    left = "" if within is None else f"; it allows {within:,} of {public.rounds_planned:,} rounds"
    yield StatusWarning(
        kind="budget",
        text=f"{public.epsilon / budget:.0%} of the budget of epsilon {budget:g} are spent{left}",
    )


def _drop_outs(public: PublicFigures, private: PrivateFigures) -> Iterator[StatusWarning]:
    attempts, planned = private.attempts, public.drop_out_planned
    if attempts is None or planned is None or attempts.drop_out is None:
        return
    if attempts.drop_out > planned + DROP_OUT_MARGIN:
        yield StatusWarning(
            kind="drop-outs",
            text=f"{attempts.drop_out:.0%} of the clients contacted lately were not counted, and "
            f"{planned:.0%} were planned: {attempts.recent_abandoned:,} of the last "
            f"{attempts.recent:,} attempts were abandoned; contact more clients per report "
            "(over_selection) in the next plan, or give clients more time",
        )


def _no_round(private: PrivateFigures, now: float) -> Iterator[StatusWarning]:
    pace = private.pace
    if pace.seconds_per_round is None or pace.last_round is None:
        return
    silence = now - pace.last_round
    if silence > max(QUIET_ROUNDS * pace.seconds_per_round, QUIET_SECONDS):
        server = private.process.running
        doing = "no process works on the run; resume it" if server is False else "look at its log"
        yield StatusWarning(
            kind="no round",
            text=f"no round for {duration(silence)}, and a round takes "
            f"{duration(pace.seconds_per_round)}; {doing}",
        )
