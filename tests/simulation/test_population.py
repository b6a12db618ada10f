"""The simulated population, and clients that call a Python function.

Shares are as given, and earlier calls have no effect.
"""

import numpy as np
import pytest

from dpftrl.errors import InvalidInput
from dpftrl.simulation.population import Population, PythonClients

NAMES = [f"client {i}" for i in range(20_000)]
FLEET = Population(NAMES, seed=3)
MODEL = {"b": np.zeros(2, np.float32), "a": np.zeros((2, 2), np.float32)}
START = np.arange(6, dtype=np.float32)


def near(share: float, of: int) -> float:
    """Return five standard deviations of a share."""
    return 5 * np.sqrt(share * (1 - share) / of) + 1e-12


def test_available_clients_do_not_depend_on_earlier_calls():
    again = Population(NAMES, seed=3)
    late, early = again.available(50.9), again.available(7.0)
    assert FLEET.available(7.0) == early
    assert FLEET.available(50.2) == late
    assert FLEET.available(7.0) != FLEET.available(8.0)
    assert Population(NAMES, seed=4).available(7.0) != early


def test_a_client_does_not_depend_on_the_other_clients():
    few = Population(NAMES[5:100][::-1], seed=3)
    assert set(few.available(5)) == set(FLEET.available(5)) & set(NAMES[5:100])
    slower = {name: time for time, name in FLEET.arrivals(NAMES[:50], 9)}
    assert all(slower[name] == time for time, name in FLEET.arrivals(NAMES[20:30][::-1], 9))


def test_more_clients_are_available_by_night():
    by_hour = np.array([len(FLEET.indices(hour)) for hour in range(48)]) / len(NAMES)
    assert abs(int(by_hour[:24].argmax()) - 2) <= 1
    assert by_hour[2] > by_hour[14] + 0.25
    # The next day has the same smooth curve, with other random numbers.
    assert np.abs(by_hour[:24] - by_hour[24:]).max() < 2 * near(0.5, len(NAMES))
    assert np.abs(np.diff(by_hour)).max() < 0.1
    assert abs(by_hour.mean() - 0.5) < near(0.5, 48 * len(NAMES)) + 1e-3


def test_shares_of_one_and_zero_are_exact():
    assert Population(NAMES, 0, least=1, most=1).available(3) == NAMES
    assert Population(NAMES, 0, least=0, most=0).available(3) == []
    assert len(Population(NAMES, 0, drop_out=0).reporting(NAMES, 1)) == len(NAMES)
    assert Population(NAMES, 0, drop_out=1).reporting(NAMES, 1) == []


def test_arrivals_are_in_order_and_drop_outs_last():
    arrivals = FLEET.arrivals(NAMES, attempt=2)
    times = [time for time, _ in arrivals if time is not None]
    assert times == sorted(times)
    assert all(time is None for time, _ in arrivals[len(times) :])
    assert sorted(name for _, name in arrivals) == sorted(NAMES)
    assert abs(len(times) / len(NAMES) - 0.95) < near(0.05, len(NAMES))
    assert FLEET.reporting(NAMES, 2) == [name for _, name in arrivals[: len(times)]]
    assert FLEET.reporting(NAMES, 3) != FLEET.reporting(NAMES, 2)


def test_the_share_of_stragglers_is_as_given():
    slow, fast = (Population(NAMES, 0, drop_out=0, straggler_share=s) for s in (1, 0))
    mixed = Population(NAMES, 0, drop_out=0, straggler_share=0.3)
    quick = {name: time for time, name in fast.arrivals(NAMES, 0)}
    for time, name in slow.arrivals(NAMES, 0):
        assert time - 20 == pytest.approx(10 * (quick[name] - 20))
    late = sum(time != quick[name] for time, name in mixed.arrivals(NAMES, 0))
    assert abs(late / len(NAMES) - 0.3) < near(0.3, len(NAMES))


def test_draws_of_one_client_are_independent():
    available = [set(FLEET.indices(hour).tolist()) for hour in (10, 11, 12)]
    shares = [len(indices) / len(NAMES) for indices in available]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        both = len(available[one] & available[other]) / len(NAMES)
        # Hours share only the clients' time zones, which cause a small correlation.
        assert abs(both - shares[one] * shares[other]) < 0.03


def test_names_can_be_computed_on_demand():
    class Numbers:
        def __len__(self):
            return 1000

        def __getitem__(self, index):
            if not 0 <= index < 1000:
                raise IndexError(index)
            return f"device-{index}"

    fleet = Population(Numbers(), seed=0)
    assert len(fleet) == 1000
    assert fleet.available(1) == Population([f"device-{i}" for i in range(1000)], 0).available(1)


@pytest.mark.parametrize(
    "wrong", [{"drop_out": float("nan")}, {"straggler_share": -0.1}, {"least": 0.9}, {"most": 1.1}]
)
def test_shares_are_checked(wrong):
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Population(NAMES[:3], 0, **wrong)


def test_seeds_and_hours_are_checked():
    with pytest.raises(InvalidInput, match="seed"):
        Population(NAMES[:3], -1)
    with pytest.raises(InvalidInput, match="hours"):
        FLEET.available(float("nan"))


def test_updates_are_differences_in_sorted_order():
    calls = []

    def train(model, client, round_number):
        calls.append((client, round_number))
        # Changed in place on purpose: the function gets its own copy.
        model["a"] *= 2
        return {"b": model["b"].astype(np.float64) - 1, "a": model["a"]}

    updates = list(PythonClients(train, MODEL).updates(START, ["ann", "bob"], 4))
    assert calls == [("ann", 4), ("bob", 4)]
    assert [name for name, _ in updates] == ["ann", "bob"]
    for _, update in updates:
        assert update.dtype == np.float32
        np.testing.assert_array_equal(update, [0, 1, 2, 3, -1, -1])
    np.testing.assert_array_equal(START, np.arange(6))


def test_nan_is_passed_on_to_the_server():
    def train(model, _client, _round):
        return {name: array * np.float32("nan") for name, array in model.items()}

    ((_, update),) = PythonClients(train, MODEL).updates(START, ["ann"], 0)
    assert np.isnan(update).all()


def test_arrays_that_do_not_fit_are_refused():
    def train(model, _client, _round):
        return {"a": model["a"]}

    with pytest.raises(InvalidInput, match="training 'ann' does not fit: got 1 arrays"):
        list(PythonClients(train, MODEL).updates(START, ["ann"], 0))
    with pytest.raises(InvalidInput, match="must have 6 numbers"):
        list(PythonClients(train, MODEL).updates(START[:4], ["ann"], 0))
