"""The forecast of eligible clients against the rules of the server, client by client."""

import itertools
import random

import numpy as np
import pytest

from dpftrl.federated.eligibility import Rules, Timers
from dpftrl.status.forecast import Contacts, Rest


class Fleet:
    """A fleet whose rounds are played with the timers and the rules of the server."""

    def __init__(self, population: int, size: int, rules: Rules, seed: int):
        self.keys = np.arange(population, dtype=np.uint64)
        self.timers = Timers()
        self.size = size
        self.row = 0
        self.times: list[float] = []
        self.rules = rules
        self.random = random.Random(seed)

    def eligible(self, hours: float | None = None) -> list[int]:
        allowed = self.rules.allowed(self.timers.seen(self.keys), self.row, hours)
        return self.keys[allowed].tolist()

    def contact(self, hours: float | None = None) -> None:
        chosen = sorted(self.random.sample(self.eligible(hours), self.size))
        self.rules.contact(self.row, hours)
        self.timers.mark(np.array(chosen, np.uint64), self.row)
        self.times[self.row :] = [hours or 0.0]

    def contacts(self, cap: int, rest: Rest) -> Contacts:
        return Contacts(*self.timers.entries(), cap, self.row, rest)

    def fresh(self) -> int:
        return len(self.keys) - len(self.timers)

    def played(self, rounds: int, hours_per_round: float | None = None, now: float = 0.0):
        """The eligible clients of the next rounds, up to a stand-still."""
        found = list[int]()
        for ahead in range(rounds):
            hours = None if hours_per_round is None else now + ahead * hours_per_round
            found.append(len(self.eligible(hours)))
            if found[-1] < self.size:
                break
            self.contact(hours)
            self.row += 1
        return found


def after_some_rounds(
    population: int, size: int, min_sep: int, cap: int, past: int, abandoned: int, seed: int
) -> Fleet | None:
    """A fleet after some rounds, with some abandoned attempts; None if it came to a stand-still."""
    fleet = Fleet(population, size, Rules(min_sep, cap, None), seed)
    extra = [fleet.random.randrange(past + 1) for _ in range(abandoned)]
    for row in range(past + 1):
        for _ in range(extra.count(row) + (row < past)):
            if len(fleet.eligible()) < size:
                return None
            fleet.contact()
        fleet.row += row < past
    return fleet


# Population, clients per attempt, min-sep, rounds of the whole run.
SHAPES = [(40, 5, 4, 30), (23, 3, 7, 25), (12, 3, 4, 20), (30, 30, 1, 9), (17, 4, 3, 12)]


@pytest.mark.parametrize(("population", "size", "min_sep", "rounds"), SHAPES)
@pytest.mark.parametrize("abandoned", [0, 1, 4])
def test_a_forecast_with_timers_in_rounds_is_exact(population, size, min_sep, rounds, abandoned):
    cap, checked, still, missed = -(-rounds // min_sep), 0, 0, 0
    for past, seed in itertools.product((0, 1, min_sep, min_sep + 3), range(3)):
        fleet = after_some_rounds(population, size, min_sep, cap, past, abandoned, seed)
        if fleet is None:
            continue
        contacts = fleet.contacts(cap, Rest(min_sep))
        assert contacts.rested() + fleet.fresh() == len(fleet.eligible())
        left = rounds - past
        forecast = contacts.eligible(fleet.fresh(), size, size, left)
        wrong = fleet.contacts(cap, Rest(min_sep + 1)).eligible(fleet.fresh(), size, size, left)
        played = fleet.played(left)
        # Clients reach the cap only in the last rounds, where nobody could come again anyway: but
        # attempts that were abandoned use up contacts too, so that later rounds may have fewer.
        exact = played if not abandoned else played[:min_sep]
        assert np.allclose(forecast[: len(exact)], exact)
        if not abandoned:
            assert len(forecast) == len(played)
        checked += 1
        still += played[-1] < size
        missed += not np.array_equal(wrong, forecast)
    assert checked or abandoned
    assert still == 0 or abandoned
    assert missed or abandoned  # the control: a rule that is one round longer gives other numbers


@pytest.mark.parametrize("cap", [1, 2, 3])
def test_clients_that_reach_their_cap_do_not_return(cap):
    population, size, min_sep, rounds = 60, 5, 4, 60
    fleet = Fleet(population, size, Rules(min_sep, cap, None), 1)
    for _ in range(3):
        fleet.contact()
        fleet.row += 1
    forecast = fleet.contacts(cap, Rest(min_sep)).eligible(fleet.fresh(), size, size, rounds)
    played = fleet.played(rounds)
    assert np.allclose(forecast[:min_sep], played[:min_sep])
    # All contacts of all clients together do not last longer.
    most = (population * cap) // size - 3
    assert len(forecast) <= most + 1
    assert abs(len(forecast) - len(played)) <= 2
    if cap == 1:
        assert forecast == played
        assert len(played) == most + 1


def test_a_cap_makes_an_expected_number_of_clients_leave():
    """Beyond min-sep rounds, the forecast is close to the mean of many fleets."""
    population, size, min_sep, cap, rounds = 50, 6, 3, 2, 14
    means = np.zeros(rounds)
    for seed in range(200):
        fleet = Fleet(population, size, Rules(min_sep, cap, None), seed)
        if not seed:
            forecast = fleet.contacts(cap, Rest(min_sep)).eligible(population, size, size, rounds)
        means += np.array(fleet.played(rounds)) / 200
    assert np.allclose(forecast, means, atol=0.35)
    assert forecast[-1] < means[3] - 5  # it falls


@pytest.mark.parametrize("hours_per_round", [1.0, 0.375, 7.0])
@pytest.mark.parametrize("timer", [6.0, 5.5, 24.0])
def test_a_forecast_with_timers_in_hours_is_exact(timer, hours_per_round):
    size, cap, rounds = 4, 99, 25
    for seed, past in itertools.product(range(2), (1, 5, 12)):
        fleet = Fleet(100, size, Rules(1, cap, timer), seed)
        for _ in range(past):
            fleet.contact(fleet.row * hours_per_round)
            fleet.row += 1
        now = past * hours_per_round
        rest = Rest(1, timer, fleet.times, now, hours_per_round)
        contacts = fleet.contacts(cap, rest)
        assert contacts.rested() + fleet.fresh() == len(fleet.eligible(now))
        forecast = contacts.eligible(fleet.fresh(), size, size, rounds)
        assert np.allclose(forecast, fleet.played(rounds, hours_per_round, now))


def test_without_a_pace_only_the_next_round_is_known():
    fleet = Fleet(10, 3, Rules(1, 99, 6.0), 1)
    fleet.contact(0.0)
    fleet.row = 1
    contacts = fleet.contacts(99, Rest(1, 6.0, fleet.times, 5.0, None))
    assert contacts.rested() == 0
    assert contacts.eligible(7, 3, 3, 1) == [7]


def test_more_contacts_per_round_bring_a_stand_still_forward():
    fleet = Fleet(12, 3, Rules(4, 99, None), 1)
    contacts = fleet.contacts(99, Rest(4))
    assert contacts.eligible(12, 3, 3, 50) == [12, 9, 6, 3] + [3] * 46
    assert contacts.eligible(12, 4.5, 3, 50) == [12, 7.5, 3, 0]
