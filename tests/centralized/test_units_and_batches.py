"""Units name one owner per example; batches are a function of the key and the step."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_training_runs import plan_in_order

from dpftrl import mechanism
from dpftrl.accounting.amplification import believe_sampled
from dpftrl.centralized import Units
from dpftrl.centralized.batches import Batches
from dpftrl.errors import InvalidInput
from dpftrl.noise import NoiseKey
from dpftrl.plan import Dataset, DatasetPlan
from dpftrl.sampler import Sampler

KEY = NoiseKey.insecure_for_tests(11)


def sampled_plan(dataset: Dataset, name: str) -> DatasetPlan:
    """A plan whose guarantee is claimed, not computed: batches do not depend on it."""
    drawn = dataset.sampling(name, 2)
    chosen = mechanism("independent", dataset.in_order)
    believed = believe_sampled(chosen, drawn, 3.0, 7.0, 1e-6, failure=0.0)
    return DatasetPlan(name, believed, dataset)


# --- Units ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "owners",
    [
        ["ann", ["ann", "bo"], "bo"],
        [("ann", "bo"), "ann", "bo"],
        [1, {1, 2}, 3],
        [1, frozenset([1, 2]), 3],
        [1, np.array([1, 2]), 3],
        np.array([[1, 2], [3, 4], [5, 6]]),
        torch.tensor([[1, 2], [3, 4], [5, 6]]),
    ],
)
def test_several_owners_of_an_example_are_refused(owners):
    with pytest.raises(InvalidInput, match="several owners"):
        Units(3, owners)


@pytest.mark.parametrize("value", [1.0, None, True, np.float64(2), np.bool_(True), b"ann"])
def test_owners_that_are_neither_numbers_nor_strings_are_refused(value):
    with pytest.raises(InvalidInput, match="whole numbers or strings"):
        Units(3, [value, value, value])


def test_numbers_and_strings_together_are_refused():
    with pytest.raises(InvalidInput, match="all strings"):
        Units(2, [1, "1"])


@pytest.mark.parametrize("length", [0, 2, 4])
def test_a_wrong_number_of_owners_is_refused(length):
    with pytest.raises(InvalidInput, match="name the user of each example"):
        Units(3, ["ann"] * length)


@pytest.mark.parametrize("examples", [0, -1, 2.5, True])
def test_a_wrong_number_of_examples_is_refused(examples):
    with pytest.raises(InvalidInput, match="number of examples"):
        Units(examples)


def test_examples_per_unit_needs_users():
    with pytest.raises(InvalidInput, match="examples_per_unit needs units"):
        Units(3, examples_per_unit=2)
    with pytest.raises(InvalidInput, match="examples_per_unit"):
        Units(2, [1, 2], examples_per_unit=0)


def test_owners_as_list_array_and_tensor_are_the_same_units():
    values = [7, -3, 7, 9, -3]
    kinds = [values, tuple(values), np.array(values), torch.tensor(values), np.array(values, "i1")]
    assert len({Units(5, one).fingerprint() for one in kinds}) == 1
    assert {Units(5, one).count for one in kinds} == {3}


def test_every_example_is_in_exactly_its_own_unit():
    owners = ["bo", "ann", "bo", "cy", "ann", "bo"]
    units = Units(6, owners)
    groups = [units.examples_of(unit).tolist() for unit in range(units.count)]
    assert sorted(np.concatenate(groups).tolist()) == list(range(6))
    assert all(len({owners[i] for i in group}) == 1 for group in groups)
    assert all(group == sorted(group) for group in groups)


@pytest.mark.parametrize(
    "owners",
    [
        [2**63, 2**63 + 1, -1],  # no 64-bit type holds all of them
        [2**70, 2**70 + 1, 5],
        ["ann", "ann\0", "bo"],
        ["ann", "ann ", "Ann"],
    ],
)
def test_different_names_are_different_users(owners):
    assert Units(3, owners).count == 3


def test_the_fingerprint_tells_other_assignments_apart():
    first = Units(4, ["a", "a", "b", "b"])
    assert first.fingerprint() == Units(4, ["c", "c", "d", "d"]).fingerprint()
    others = [["a", "b", "a", "b"], ["a", "a", "a", "b"], ["a", "a", "b", "c"], list("bbaa")]
    assert first.fingerprint() not in {Units(4, one).fingerprint() for one in others[:3]}
    assert Units(4).fingerprint() == ""


# --- Batches without sampling --------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 4), st.integers(0, 5))
def test_every_epoch_has_every_unit_once_in_the_same_order(size, batch_size, epochs, seed):
    dataset = Dataset(size, min(size, batch_size), epochs)
    batches = Batches(plan_in_order(dataset), Units(size), NoiseKey.insecure_for_tests(seed))
    by_step = [batches.batch(step) for step in range(dataset.steps)]
    per_epoch = dataset.steps_per_epoch
    for epoch in range(epochs):
        parts = by_step[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(np.concatenate([one.examples for one in parts])) == list(range(size))
        for part, first in zip(parts, by_step, strict=False):
            np.testing.assert_array_equal(part.examples, first.examples)
    assert all(one.counts is None for one in by_step)
    assert {one.units for one in by_step[: per_epoch - 1]} <= {dataset.batch_size}
    last = size - (per_epoch - 1) * dataset.batch_size
    assert by_step[per_epoch - 1].units == last > 0  # a partial batch is never dropped
    assert max(one.units for one in by_step) <= batches.largest


def test_another_key_gives_another_order_and_the_same_key_the_same():
    dataset = Dataset(50, 10, 2)
    plan = plan_in_order(dataset)
    orders = [
        tuple(Batches(plan, Units(50), NoiseKey.insecure_for_tests(seed)).batch(0).examples)
        for seed in (1, 1, 2, 3)
    ]
    assert len(set(orders)) == 3


def test_the_first_batch_is_a_uniform_choice():
    """Every unit is in the first batch of about the same number of keys."""
    dataset, seen = Dataset(12, 3, 1), Counter[int]()
    plan = plan_in_order(dataset)
    for seed in range(400):
        key = NoiseKey.insecure_for_tests(seed)
        seen.update(Batches(plan, Units(12), key).batch(0).examples.tolist())
    assert len(seen) == 12
    deviation = (400 * 3 / 12 * 0.75) ** 0.5
    assert all(abs(count - 100) < 5 * deviation for count in seen.values())


# --- Sampled batches -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["poisson", "cyclic-poisson", "balls-in-bins"])
@pytest.mark.parametrize("most", [None, 9])
def test_sampled_batches_are_those_of_the_sampler(name, most):
    dataset = Dataset(40, 8, 3, most)
    plan = sampled_plan(dataset, name)
    batches = Batches(plan, Units(40), KEY)
    sampler = Sampler(plan.guarantee.sampling, KEY)
    for step in range(dataset.steps):
        np.testing.assert_array_equal(batches.batch(step).examples, sampler.batch(step))
        assert batches.batch(step).units <= batches.largest
    with pytest.raises(InvalidInput, match="after the last planned step"):
        batches.batch(dataset.steps)


def test_empty_sampled_batches_have_the_right_types():
    dataset = Dataset(20, 1, 3)
    plan = sampled_plan(dataset, "poisson")
    for units in (Units(20), Units(40, [n // 2 for n in range(40)])):
        batches = Batches(plan, units, KEY)
        empty = [one for one in map(batches.batch, range(dataset.steps)) if not len(one.examples)]
        assert empty
        assert all(one.examples.dtype == np.int64 and one.units == 0 for one in empty)


# --- Users ---------------------------------------------------------------------------------------

OWNERS = [n % 7 for n in range(30)] + [99] * 10 + [3] * 5 + [1000]


@pytest.mark.parametrize("most", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("name", ["none", "poisson", "balls-in-bins"])
def test_rows_of_users_are_ordered_by_user_and_limited(most, name):
    owners = np.array(OWNERS)
    units = Units(len(owners), OWNERS, examples_per_unit=most)
    dataset = Dataset(units.count, 4, 5)
    plan = plan_in_order(dataset) if name == "none" else sampled_plan(dataset, name)
    batches, again = Batches(plan, units, KEY), Batches(plan, units, KEY)
    example_level = Batches(plan, Units(units.count), KEY)
    for step in range(dataset.steps):
        batch = batches.batch(step)
        chosen = example_level.batch(step).examples
        assert batch.counts.dtype == batch.examples.dtype == np.int64
        assert batch.counts.sum() == len(batch.examples)
        assert batch.units == len(chosen)
        parts = np.split(batch.examples, np.cumsum(batch.counts)[:-1]) if batch.units else []
        for unit, part in zip(chosen.tolist(), parts, strict=True):
            own = units.examples_of(unit)
            assert len(part) == min(most, len(own))
            assert len(set(part.tolist())) == len(part)
            assert set(part.tolist()) <= set(own.tolist())
        repeated = again.batch(step)
        np.testing.assert_array_equal(batch.examples, repeated.examples)
        np.testing.assert_array_equal(batch.counts, repeated.counts)


def test_a_user_with_many_examples_gets_others_in_other_steps():
    units = Units(40, [0] * 20 + [1] * 20, examples_per_unit=3)
    dataset = Dataset(2, 1, 30)
    batches = Batches(plan_in_order(dataset), units, KEY)
    drawn = [tuple(batches.batch(step).examples.tolist()) for step in range(dataset.steps)]
    assert len(set(drawn)) > dataset.steps - 4
    used = Counter(i for one in drawn for i in one)
    assert len(used) > 35  # of 40: all examples of a user have a chance
    assert max(used.values()) < 20  # of 30 epochs
    # Two users that are in the same step do not get the same places.
    both = Batches(plan_in_order(Dataset(2, 2, 30)), units, KEY)
    places = [np.sort(both.batch(step).examples) for step in range(30)]
    assert any(set(one[:3]) != set(one[3:] - 20) for one in places)


def test_units_take_part_no_more_often_than_the_guarantee_assumes():
    """Without sampling, two participations of a user are exactly an epoch apart."""
    units = Units(len(OWNERS), OWNERS, examples_per_unit=2)
    dataset = Dataset(units.count, 4, 4)
    plan = plan_in_order(dataset)
    batches = Batches(plan, units, KEY)
    seen: dict[int, list[int]] = {}
    for step in range(dataset.steps):
        batch = batches.batch(step)
        for user in {OWNERS[i] for i in batch.examples}:
            seen.setdefault(user, []).append(step)
    assert len(seen) == units.count
    for steps in seen.values():
        assert np.diff(steps).tolist() == [dataset.steps_per_epoch] * (dataset.epochs - 1)
