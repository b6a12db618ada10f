"""The figures of a status in words, as the command line prints them and the web page shows them."""

from collections.abc import Iterator
from datetime import datetime
from typing import Final

from dpftrl._internal.formatting import duration, in_full, memory_text, rounded_up
from dpftrl.status.figures import Attempts, Clients, PrivateFigures, PublicFigures

UNKNOWN: Final = "not known"


def unit_of(public: PublicFigures) -> str:
    """What the run counts: rounds, or steps."""
    return "rounds" if public.kind == "federated" else "steps"


def public_rows(public: PublicFigures) -> Iterator[tuple[str, str]]:
    """Names and texts of the figures that may be published."""
    yield "run", public.run
    share = public.rounds / public.rounds_planned
    ended = f"; ended: {public.ended}" if public.ended else ""
    yield unit_of(public), f"{public.rounds:,} of {public.rounds_planned:,} ({share:.0%}){ended}"
    yield "epsilon", _epsilon(public)
    yield "delta", in_full(public.delta)
    noise = f"noise multiplier {public.noise_multiplier:.4g}"
    yield "mechanism", f"{public.mechanism}, {noise}"
    moves = " in the last round; it is adaptive" if public.clip_norm_moves else ""
    yield "clip norm", f"{public.clip_norm:.4g}{moves}"
    if public.kind == "centralized":
        yield "data set", f"{public.population:,} {public.unit}s"
        return
    yield "fleet", f"{public.population:,} clients planned"
    yield (
        "reports",
        f"{public.report_goal:,} per round, from {public.contacts_per_round:,} contacted clients",
    )
    if public.timer_hours is None:
        yield "timers", f"min-sep {public.min_sep:,} rounds"
    else:
        yield "timers", f"{public.timer_hours:g} hours"


def _epsilon(public: PublicFigures) -> str:
    text = f"{rounded_up(public.epsilon)}; {rounded_up(public.epsilon_planned)} planned"
    if public.epsilon_budget is None:
        return text
    text += f"; {public.epsilon / public.epsilon_budget:.0%} of the budget of "
    text += f"{public.epsilon_budget:g}"
    within = public.rounds_within_budget
    return text if within is None else f"{text}, which allows {within:,} rounds"


def private_rows(
    public: PublicFigures, private: PrivateFigures, now: float
) -> Iterator[tuple[str, str]]:
    """Names and texts of the figures for the operator."""
    process = private.process
    running = {True: f"number {process.pid}", False: "none on this machine", None: UNKNOWN}
    yield "process", running[process.running]
    yield "last change", f"{_clock(process.last_change)}, {_ago(process.last_change, now)}"
    if private.attempts is not None:
        yield from _attempt_rows(public, private.attempts)
    if private.clients is not None:
        yield from _client_rows(private.clients, bool(public.ended))
    pace = private.pace
    if pace.seconds_per_round is None:
        yield "pace", UNKNOWN
    else:
        basis = "" if pace.basis == "last rounds" else " (whole run, pauses included)"
        yield "pace", f"{duration(pace.seconds_per_round)} per {unit_of(public)[:-1]}{basis}"
    if pace.last_round is not None:
        yield f"last {unit_of(public)[:-1]}", _ago(pace.last_round, now)
    if not public.ended:
        yield "expected end", _expected_end(private, now)
    disk = private.disk
    per = UNKNOWN if disk.bytes_per_round is None else memory_text(disk.bytes_per_round)
    yield (
        "disk",
        f"{memory_text(disk.free_bytes)} free, {memory_text(disk.bytes_needed)} needed to the end; "
        f"the run has {memory_text(disk.run_bytes)} and grows per {unit_of(public)[:-1]} by {per}",
    )
    yield "permissions", "; ".join(disk.problems) or "fine"
    yield "witness", f"{private.witness.state} ({private.witness.folder})"


def _attempt_rows(public: PublicFigures, attempts: Attempts) -> Iterator[tuple[str, str]]:
    if attempts.open is None:
        yield "open round", "none"
    else:
        open_round = attempts.open
        yield (
            "open round",
            f"attempt {open_round.attempt:,}: {open_round.contacted:,} clients contacted "
            f"{duration(open_round.seconds)} ago; reports so far {UNKNOWN}, of "
            f"{public.report_goal:,} needed",
        )
    yield "attempts", f"{attempts.total:,}, of which {attempts.abandoned:,} were abandoned"
    if attempts.drop_out is None:
        yield "drop-outs", UNKNOWN
    else:
        yield (
            "drop-outs",
            f"{attempts.drop_out:.1%} of {attempts.recent_contacts:,} contacts were not counted in "
            f"the last {attempts.recent:,} attempts; {public.drop_out_planned or 0:.1%} planned",
        )
    yield "unfit updates", UNKNOWN if attempts.unfit is None else f"{attempts.unfit:,}"


def _client_rows(clients: Clients, is_over: bool) -> Iterator[tuple[str, str]]:
    before = f"{clients.rested:,} that were contacted before"
    yield "clients", f"{clients.contacted:,} contacted so far"
    if clients.eligible is None:
        yield "eligible now", f"{UNKNOWN}, because the fleet is larger than planned; {before}"
    else:
        yield (
            "eligible now",
            f"{clients.eligible:,} if the fleet is as planned: {before}, and "
            f"{clients.never_contacted:,} new ones",
        )
    if not is_over:
        following = " ".join(f"{number:,}" for number in clients.eligible_next)
        yield "eligible next", following or UNKNOWN
    if clients.available_at_begin is None:
        yield "last selection", UNKNOWN
    else:
        able = UNKNOWN if clients.eligible_at_begin is None else f"{clients.eligible_at_begin:,}"
        yield (
            "last selection",
            f"{clients.available_at_begin:,} clients were available; eligible of them: {able}",
        )
    still = clients.stand_still
    if is_over:
        return
    if still is None:
        yield "stand-still", UNKNOWN if clients.eligible is None else "none foreseen"
    elif still.observed or not still.rounds_left:
        yield "stand-still", "now"
    else:
        yield "stand-still", f"after {still.round:,} rounds, in {still.rounds_left:,} rounds"


def _expected_end(private: PrivateFigures, now: float) -> str:
    end = private.pace.expected_end
    if end is None:
        return UNKNOWN
    pause = "" if private.process.running else ", if it goes on now"
    return f"{_clock(end)}, in {duration(end - now)}{pause}"


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "minutes")


def _ago(seconds: float, now: float) -> str:
    return f"{duration(max(0.0, now - seconds))} ago"
