"""How epsilon moves away from the plan: every point against an independent account."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpftrl import BLT, Mechanism, MinSep, account, mechanism
from dpftrl.errors import InvalidInput
from dpftrl.participation import UNCAPPED
from dpftrl.plan import Budget, Fleet, Option, Plan, Question, Walk, candidates, extrapolate

DELTA = 1e-7
SHORT = mechanism("smooth-tree", MinSep(40, 1))  # to 69 rounds, and no further
FLEET = Fleet(
    1000, 50, availability=0.9, over_selection=1.1, timer_days=1.5, rounds_per_day=8
)  # 16 turns, but a timer of 12 rounds


def question(fleet: Fleet, rounds: int, cap: int = UNCAPPED) -> Question:
    return Question(fleet, rounds, Budget(DELTA, epsilon=3.0), cap)


def rival(label: str, made: Mechanism, asked: Question, noise_multiplier: float) -> Option:
    participation = asked.participation()
    promise = account(made, participation, noise_multiplier, DELTA)
    return Option(label, Plan(asked.fleet, promise), made.error_report(participation), 1, {})


def rivals(asked: Question) -> list[Option]:
    made = {
        "blt": mechanism("blt-b100"),
        "tree": mechanism("tree"),
        "bands": mechanism("band-sqrt:5"),
        "short": SHORT,
    }
    return [rival(label, one, asked, 2.0 + i) for i, (label, one) in enumerate(made.items())]


PLANNED = question(FLEET, 30)
RIVALS = rivals(PLANNED)


def equal_noise(one: Option, reference: Option = RIVALS[0]) -> float:
    """The noise multiplier at which a mechanism has the utility of another one."""
    if one is reference:
        return one.plan.noise_multiplier
    rounds = PLANNED.rounds
    rms_noise = reference.plan.noise_multiplier * reference.plan.mechanism.rms_error(rounds)
    return rms_noise / one.plan.mechanism.rms_error(rounds)


@pytest.fixture(scope="module")
def walks() -> dict[str, Walk]:
    return {walk.along: walk for walk in extrapolate(PLANNED, RIVALS)}


def by_hand(fleet: Fleet, goal: int) -> int:
    """Min-sep in whole numbers: 0.9 of the population, 1.1 asked for each report, 12 rounds."""
    assert (fleet.availability, fleet.over_selection) == (0.9, 1.1)
    return min(fleet.population * 9 // (goal * 11), 12)


def test_walks_go_along_report_goal_rounds_and_min_sep(walks):
    assert list(walks) == ["report_goal", "rounds", "min_sep"]
    for walk in walks.values():
        assert walk.places == sorted(set(walk.places))
        assert len(walk.points) >= 6
        for point in walk.points:
            assert list(point.epsilon) == ["blt", "tree", "bands", "short"]


@pytest.mark.parametrize("along", ["report_goal", "rounds", "min_sep"])
def test_epsilon_of_every_point_matches_a_separate_account(walks, along):
    checked = 0
    for point in walks[along].points:
        scale = point.report_goal / 50
        assert point.scale == scale
        for one in RIVALS:
            made, found = one.plan.mechanism, point.epsilon[one.label]
            if one.label == "short" and point.participation.rounds > 69:
                assert found is None
                continue
            again = account(made, point.participation, equal_noise(one) * scale, DELTA)
            assert found == pytest.approx(again.epsilon, rel=1e-9)
            checked += 1
    assert checked > 20


def test_a_walk_changes_only_its_own_setting(walks):
    assert PLANNED.participation() == MinSep(30, 12, 3)
    for point in walks["rounds"].points:
        assert (point.report_goal, point.scale, point.participation.min_sep) == (50, 1.0, 12)
        assert point.participation == MinSep(point.participation.rounds, 12)
    for point in walks["min_sep"].points:
        assert (point.report_goal, point.scale, point.participation.rounds) == (50, 1.0, 30)
        assert point.participation == MinSep(30, point.participation.min_sep)
    for point in walks["report_goal"].points:
        assert point.participation == MinSep(30, by_hand(FLEET, point.report_goal))


def test_every_walk_contains_the_plan_itself(walks):
    for along, here in {"report_goal": 50, "rounds": 30, "min_sep": 12}.items():
        point = walks[along].points[walks[along].places.index(here)]
        assert (point.scale, point.participation) == (1.0, PLANNED.participation())
        assert point.epsilon["blt"] == RIVALS[0].plan.guarantee.epsilon  # the reference
        for one in RIVALS[1:]:
            assert point.epsilon[one.label] != one.plan.guarantee.epsilon


def test_all_mechanisms_have_the_utility_of_the_reference():
    """At equal utility, the order of epsilons is the order of losses: the tree is no bargain."""
    for reference in RIVALS:
        walk = extrapolate(PLANNED, RIVALS, steps=1, reference=reference)[0]
        point = walk.points[walk.places.index(50)]
        assert point.epsilon[reference.label] == reference.plan.guarantee.epsilon
        by_epsilon = sorted(RIVALS, key=lambda one: point.epsilon[one.label])
        assert by_epsilon == sorted(RIVALS, key=lambda one: one.error_report.rms_loss)


def test_walks_reach_eight_times_the_plan_by_default(walks):
    assert (walks["rounds"].places[0], walks["rounds"].places[-1]) == (4, 240)
    assert (walks["min_sep"].places[0], walks["min_sep"].places[-1]) == (2, 96)
    near = extrapolate(PLANNED, RIVALS[:1], steps=3, reach=2)
    assert [walk.places for walk in near] == [[25, 50, 100], [15, 30, 60], [6, 12, 24]]


def test_report_goals_that_the_fleet_cannot_fill_are_dropped():
    small = question(Fleet(100, 50), 20)
    goals, rounds, _ = extrapolate(small, rivals(small)[:1])
    assert max(goals.places) == 100
    assert 50 in goals.places
    assert max(rounds.places) == 160  # the control: the other walks are whole
    everybody = question(Fleet(50, 50), 20)
    goals, _, _ = extrapolate(everybody, rivals(everybody)[:1])
    assert max(goals.places) == 50


@pytest.mark.parametrize("label", ["blt", "tree", "bands"])
def test_epsilon_grows_with_rounds_and_falls_with_min_sep(walks, label):
    by_rounds = [point.epsilon[label] for point in walks["rounds"].points]
    assert by_rounds == sorted(by_rounds)
    assert by_rounds[0] < by_rounds[-1]
    by_separation = [point.epsilon[label] for point in walks["min_sep"].points]
    assert by_separation == sorted(by_separation, reverse=True)
    assert by_separation[0] > by_separation[-1]


def test_epsilon_falls_with_the_report_goal_while_the_timer_fixes_min_sep(walks):
    """Down to min-sep 12 only the noise grows; beyond, the direction is nobody's promise."""
    held = [p for p in walks["report_goal"].points if p.participation.min_sep == 12]
    assert len(held) >= 5
    epsilons = [point.epsilon["blt"] for point in held]
    assert epsilons == sorted(epsilons, reverse=True)
    assert len(set(epsilons)) == len(epsilons)


def test_the_participation_cap_holds_at_every_point():
    capped = question(FLEET, 30, cap=2)
    for walk in extrapolate(capped, rivals(capped)):
        for point in walk.points:
            rounds, min_sep = point.participation.rounds, point.participation.min_sep
            assert point.participation.max_participations == min(2, math.ceil(rounds / min_sep))
            again = account(mechanism("blt-b100"), point.participation, 2.0 * point.scale, DELTA)
            assert point.epsilon["blt"] == again.epsilon
    _, uncapped, _ = extrapolate(question(FLEET, 30), rivals(capped))
    assert max(point.participation.max_participations for point in uncapped.points) > 2


def test_mechanisms_for_a_fixed_number_of_rounds_are_skipped():
    full = rival("full", mechanism("tree-full", PLANNED.participation()), PLANNED, 2.0)
    bands = rival("banded", mechanism("banded:3", PLANNED.participation()), PLANNED, 2.0)
    for walk in extrapolate(PLANNED, [full, RIVALS[0], bands]):
        assert all(list(point.epsilon) == ["blt"] for point in walk.points)


def test_epsilon_is_none_where_the_sensitivity_of_a_tree_is_slow(monkeypatch):
    monkeypatch.setattr(candidates, "QUICK_TREE", 30 * 3)
    _, rounds, _ = extrapolate(PLANNED, RIVALS)
    for point in rounds.points:
        slow = point.participation.rounds * point.participation.max_participations > 90
        assert (point.epsilon["tree"] is None) == slow
        assert point.epsilon["blt"] is not None
    assert {point.epsilon["tree"] is None for point in rounds.points} == {True, False}


def test_without_mechanisms_walks_still_list_the_settings():
    for walk in extrapolate(PLANNED, []):
        assert all(point.epsilon == {} for point in walk.points)
        assert walk.points


@given(
    population=st.integers(1, 5000),
    goal=st.integers(1, 5000),
    rounds=st.integers(1, 60),
    cap=st.integers(1, 9),
    noise_multiplier=st.floats(0.5, 50),
)
def test_walks_of_any_fleet_match_separate_accounts(
    population, goal, rounds, cap, noise_multiplier
):
    asked_of = min(goal, population)
    asked = question(Fleet(population, asked_of), rounds, cap)
    made = BLT([0.9, 0.5], [0.3, 0.2])
    one = rival("blt", made, asked, noise_multiplier)
    goals, by_rounds, by_separation = extrapolate(asked, [one], steps=5)
    assert asked_of in goals.places
    assert rounds in by_rounds.places
    assert asked.fleet.min_sep() in by_separation.places
    for point in goals.points:
        separation = population // point.report_goal
        assert separation >= 1
        scale = point.report_goal / asked_of
        expected = account(made, MinSep(rounds, separation, cap), noise_multiplier * scale, DELTA)
        assert point.epsilon["blt"] == expected.epsilon


@pytest.mark.parametrize(
    "far",
    [
        {"steps": -1},
        {"reach": 0.0},
        {"reach": -2.0},
        {"reach": math.nan},
        {"reach": math.inf},
    ],
    ids=str,
)
def test_invalid_steps_or_reach_are_refused(far):
    with pytest.raises(InvalidInput):
        extrapolate(PLANNED, RIVALS[:1], **far)


def test_walks_with_an_even_number_of_steps_contain_the_plan():
    goals, rounds, min_sep = extrapolate(PLANNED, RIVALS[:1], steps=4)
    assert (50 in goals.places, 30 in rounds.places, 12 in min_sep.places) == (True, True, True)


def test_walks_stop_at_the_largest_number_of_rounds():
    """Eight times as many rounds may be more than there are; what there is, is still shown."""
    asked = question(Fleet(10**18, 1), 10**18 // 4)
    walked = extrapolate(asked, [rival("blt", mechanism("independent"), asked, 2.0)])
    assert max(walked[1].places) <= 10**18
