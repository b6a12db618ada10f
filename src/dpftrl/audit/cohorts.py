"""The cohorts of a run against what its plan and its settings allow."""

import numpy as np

from dpftrl.audit.contacts import Contacts, check_hours_between, check_rounds_between
from dpftrl.audit.files import Told
from dpftrl.audit.journal import Attempt, Journal
from dpftrl.audit.patterns import Limits
from dpftrl.audit.records import Committed
from dpftrl.errors import UnsafeState


def check_cohorts(journal: Journal, told: Told) -> str:
    """Refuse cohorts, reports and rows that the plan has no room for."""
    planned = told.promise.stream.participation.rounds
    if len(journal.commits) > planned:
        raise UnsafeState(f"{len(journal.commits)} rounds were released, and {planned} planned")
    for attempt in journal.attempts:
        if why := _misfit(attempt, told):
            raise UnsafeState(f"attempt {attempt.cohort.attempt}: {why}")
    goal = told.fleet.report_goal
    return f"{goal:,} to {told.cohort_size:,} clients contacted, {goal:,} reports in every sum"


def _misfit(attempt: Attempt, told: Told) -> str | None:
    cohort, end, goal = attempt.cohort, attempt.end, told.fleet.report_goal
    by_time, hashed = told.settings.timer_hours is not None, told.settings.hash_clients
    if not goal <= len(attempt.clients) <= told.cohort_size:
        return f"{len(attempt.clients)} clients, not {goal} to {told.cohort_size}"
    if isinstance(end, Committed) and end.reports != goal:
        return f"{end.reports} reports in the sum, and the report goal is {goal}"
    if by_time and cohort.time is None:
        return "no time, and timers go by time"
    if (cohort.names is None) != hashed:
        return "names where the run hashes them, or none where it does not"
    return None


def check_timers(journal: Journal, contacts: Contacts, told: Told) -> str:
    """Refuse a client that came back too early, for an attempt that was released or not."""
    hours = told.settings.timer_hours
    if hours is None:
        return check_rounds_between(contacts, told.promise.stream.participation.min_sep)
    check_rounds_between(contacts, 1)
    times = [attempt.cohort.time for attempt in journal.attempts]
    return check_hours_between(contacts, np.array(times, dtype=np.float64), hours)


def limits_of(journal: Journal, contacts: Contacts, told: Told) -> tuple[Limits, Limits]:
    """What guarantees are stated for: at the last release, and by now.

    Where timers go by rounds the server enforces the plan, and both are the same. Where they go by
    time, it is what was observed, of everyone who was contacted.
    """
    rounds, planned = len(journal.commits), told.promise.stream.participation
    if told.settings.timer_hours is None:
        limits = Limits(rounds, planned.min_sep, planned.max_participations)
        return limits, limits
    last = max(
        number
        for number, attempt in enumerate(journal.attempts)
        if isinstance(attempt.end, Committed)
    )
    return _observed(rounds, contacts.kept(contacts.attempts <= last)), _observed(rounds, contacts)


def _observed(rounds: int, contacts: Contacts) -> Limits:
    return Limits(rounds, contacts.least_gap() or rounds, max(1, contacts.most()))
