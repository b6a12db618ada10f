"""Requests for a plan: what is left open is chosen, what is wrong is refused by name."""

import math
from typing import Any

import pytest

from dpftrl.errors import InvalidInput
from dpftrl.plan import DatasetPlanRequest, Fleet, FleetPlanRequest, plan_request
from dpftrl.plan.request import UNENFORCED

BASE: dict[str, Any] = {"population": 3_000_000, "delta": 1e-10, "epsilon": 4.0}
TIMED = {**BASE, "timer_days": 3.0, "rounds_per_day": 120.0}


def resolved(**fields: Any):
    return FleetPlanRequest(**fields).resolve()


def test_rounds_come_from_days_and_rounds_per_day():
    one = resolved(**BASE, days=14.0, rounds_per_day=120.0)
    assert (one.question.rounds, one.days) == (1680, 14.0)
    assert [choice.name for choice in one.choices] == ["rounds", "report_goal"]
    assert resolved(**BASE, days=0.1, rounds_per_day=30.0).question.rounds == 3  # not 2.9999...
    assert resolved(**BASE, days=0.99, rounds_per_day=3.0).question.rounds == 2


def test_days_come_from_rounds():
    assert resolved(**BASE, rounds=240, rounds_per_day=120.0, report_goal=10).days == 2
    assert resolved(**BASE, rounds=240, days=2.0, report_goal=10).days == 2
    assert resolved(**BASE, rounds=240, report_goal=10).days is None


def noise_per_report(goal: int, fleet: Fleet, rounds: int) -> float:
    """The noise of independent rounds at equal epsilon, over the reports: a simple oracle."""
    k = math.ceil(rounds / fleet.with_report_goal(goal).min_sep())
    return math.sqrt(k) / goal


@pytest.mark.parametrize(
    ("population", "availability", "over_selection", "timer_days", "rounds"),
    [(97, 1.0, 1.0, 2.0, 30), (60, 0.9, 1.3, 1.0, 24), (50, 0.5, 1.0, 4.0, 20), (31, 1, 1, 9, 10)],
)
def test_the_report_goal_has_the_least_noise_of_all_that_the_timer_allows(
    population, availability, over_selection, timer_days, rounds
):
    given = {"population": population, "availability": availability}
    given |= {"over_selection": over_selection, "timer_days": timer_days, "rounds_per_day": 4.0}
    one = resolved(**given, rounds=rounds, delta=1e-6, epsilon=2.0)
    fleet = one.question.fleet
    needed = min(rounds, int(4 * timer_days))
    allowed = [
        goal
        for goal in range(1, population + 1)
        if population * availability >= goal * over_selection * needed * (1 - 1e-12)
    ]
    best = min(allowed, key=lambda goal: noise_per_report(goal, fleet, rounds))
    assert fleet.report_goal == best == max(allowed)
    assert fleet.rotation() >= needed


def test_without_a_timer_no_client_takes_part_twice_and_one_more_report_would_change_that():
    one = resolved(**BASE, rounds=2000)
    assert one.question.fleet.report_goal == 1500
    assert one.question.participation().max_participations == 1
    more = resolved(**BASE, rounds=2000, report_goal=1501)
    assert more.question.participation().max_participations == 2


def test_a_given_min_sep_sets_the_report_goal():
    one = resolved(**BASE, rounds=2000, min_sep=400)
    assert one.question.fleet.report_goal == 7500
    assert one.question.participation().min_sep == 400
    longer = resolved(**BASE, rounds=2000, min_sep=4000)
    assert longer.question.fleet.report_goal == 1500
    assert longer.question.participation().max_participations == 1


@pytest.mark.parametrize(
    ("fields", "binding", "words"),
    [
        ({**BASE, "report_goal": 4644}, "fleet", "Min-sep 645 assumes strict rotation. Nothing"),
        ({**TIMED, "report_goal": 7751}, "timer", "Min-sep 360 comes from the timer; strict"),
        ({**TIMED, "report_goal": 7751}, "timer", "would give 387."),
        ({**TIMED, "report_goal": 10_000}, "fleet", "strict rotation repeats after 300 rounds"),
        ({**BASE, "report_goal": 4644, "min_sep": 300}, "min_sep", f"was given. {UNENFORCED}"),
        ({**TIMED, "report_goal": 4644, "min_sep": 300}, "min_sep", "The timer enforces it."),
        ({**TIMED, "report_goal": 4644, "min_sep": 400}, "min_sep", UNENFORCED),
        ({**BASE, "report_goal": 100}, "fleet", f"at most once in 2,000 rounds. {UNENFORCED}"),
        (
            {**BASE, "report_goal": 100, "timer_days": 20.0, "rounds_per_day": 100.0},
            "timer",
            "at most once in 2,000 rounds. The timer enforces it.",
        ),
    ],
)
def test_what_binds_is_named(fields, binding, words):
    one = resolved(**fields, rounds=2000)
    assert one.binding == binding
    assert words in one.binding_text


@pytest.mark.parametrize(("delta", "warned"), [(1e-6, True), (3.4e-7, True), (3.3e-7, False)])
def test_a_large_delta_is_warned_about(delta, warned):
    one = resolved(**{**BASE, "delta": delta}, rounds=100)
    assert bool(one.warnings) == warned
    sized = DatasetPlanRequest(
        size=3_000_000, batch_size=100, epochs=1, epsilon=1.0, delta=delta, sampling="none"
    )
    assert bool(sized.warnings) == warned


WRONG = {
    "population": [0, -1, 2.5, True, None, "many"],
    "delta": [0, 1, math.nan, -1e-3, "small"],
    "epsilon": [0, -1.0, math.inf, math.nan],
    "report_goal": [0, 2.5, 3_000_001],
    "rounds": [0, -5],
    "days": [0.0, math.nan, -1.0],
    "rounds_per_day": [0.0, math.inf],
    "timer_days": [0.0, math.nan],
    "min_sep": [0, 1501],
    "availability": [0.0, 1.5, math.nan],
    "over_selection": [0.5, math.nan],
    "devices": [0, -2],
    "parameters": [0],
    "buffers": [0],
    "max_participations": [0],
    "objective": ["mean"],
    "effort": ["some"],
    "extrapolate": ["yes"],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG.items() for value in values]
)
def test_a_wrong_field_is_named(field, value):
    content = {"kind": "fleet", **BASE, "rounds": 100, field: value}
    if field in {"days"}:
        del content["rounds"]
        content["rounds_per_day"] = 10.0
    elif field == "timer_days":
        content["rounds_per_day"] = 10.0
    elif field == "min_sep":
        content |= {"report_goal": 2000, "rounds": 2000}
    words = {"report_goal": "report.goal|contacts"}.get(field, field)
    with pytest.raises(InvalidInput, match=words):
        plan_request(content).resolve()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"kind": "fleet", "population": 5}, "delta"),
        ({"kind": "fleet", **BASE}, "rounds is missing: give rounds, or days and rounds_per_day"),
        ({"kind": "fleet", **BASE, "days": 4.0}, "rounds is missing"),
        ({"kind": "fleet", **BASE, "rounds": 5, "timer_days": 4.0}, "timer_days needs rounds_per"),
        ({"kind": "fleet", **BASE, "rounds": 5, "max_min_sep": 4}, "max_min_sep needs min_sep"),
        ({"kind": "fleet", **BASE, "rounds": 5, "min_sep": 4, "max_min_sep": 3}, "max_min_sep"),
        ({"kind": "fleet", **BASE, "rounds": 10**7}, "population"),
        ({"kind": "fleet", **BASE, "wishes": 5}, "wishes"),
        ({"kind": "fleets", **BASE}, "kind"),
        ({"kind": "dataset", "size": 5}, "batch_size"),
    ],
)
def test_a_missing_or_contradicting_field_is_named(content, words):
    with pytest.raises(InvalidInput, match=words):
        plan_request(content).resolve()
