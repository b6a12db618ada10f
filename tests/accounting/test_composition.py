"""Several runs on the same people: against every pattern over all of them, and another accountant.

A restart is a block of its own in a block-diagonal strategy, and a pattern over all runs is any
pattern of each (none among them); a common cap limits their number.
"""

import itertools
import math
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rounded_mu import with_rounding
from scipy.linalg import block_diag

import dpftrl
from conformance import EVERY, Family, allowed_patterns, draw_case, participations
from dpftrl import DpftrlError, FixedEpochs, Mechanism, MinSep, Participation
from dpftrl.accounting import (
    Guarantee,
    Hypothesis,
    Run,
    account,
    compose,
    dp_event,
    epsilon_of,
    guarantee_of,
)
from dpftrl.errors import InvalidInput

every = pytest.mark.parametrize("family", EVERY, ids=str)
DELTA = 1e-7


def within(clients: Participation) -> list[tuple[int, ...]]:
    """Every pattern that a device may have in one run: none, and such as end early for a cap."""
    found: set[tuple[int, ...]] = {()}
    for pattern in allowed_patterns(clients):
        # A fixed schedule may stop short, or be joined late.
        found |= {pattern[i:j] for i, j in itertools.combinations(range(len(pattern) + 1), 2)}
    return sorted(found)


def true_mu(promises: list[Guarantee], cap: int | None = None) -> float:
    """Every pattern over all the runs, in the block-diagonal strategy diag(C_i / sigma_i).

    Rounding in the buffers of a run moves its block a little further.
    """
    runs = [run for promise in promises for run in promise.runs]
    blocks = [
        run.mechanism.strategy(run.participation.rounds) / run.noise_multiplier for run in runs
    ]
    strategy = block_diag(*blocks)
    gram = strategy.T @ strategy
    starts = [0, *itertools.accumulate(run.participation.rounds for run in runs)]
    patterns = [
        [tuple(start + t for t in pattern) for pattern in within(run.participation)]
        for start, run in zip(starts, runs, strict=False)
    ]
    # Blocks do not interact, so that each may choose its signs for itself.
    moved = {
        part: with_rounding(worst_signs(gram, part) ** 0.5, run.mechanism, run.participation.rounds)
        for run, parts in zip(runs, patterns, strict=True)
        for part in parts
        if part
    }
    return math.sqrt(
        max(
            sum(moved[part] ** 2 for part in parts if part)
            for parts in itertools.product(*patterns)
            if cap is None or sum(map(len, parts)) <= cap
        )
    )


def worst_signs(gram: np.ndarray, pattern: tuple[int, ...]) -> float:
    """The most that updates of +1 and -1 in these rounds move the output by, squared."""
    signs = np.array(list(itertools.product([1.0, -1.0], repeat=len(pattern))))
    return float(((signs @ gram[np.ix_(pattern, pattern)]) * signs).sum(axis=1).max())


def check(composed: Guarantee, truth: float, exact: bool = False) -> None:
    assert composed.mu >= truth * (1 - 1e-9)
    if exact or composed.kind == "exact":
        assert composed.mu == pytest.approx(truth, rel=1e-9)
    assert composed.epsilon >= epsilon_of(DELTA, truth * (1 - 1e-9))
    assert composed.total_delta >= DELTA


# --- Brute force -------------------------------------------------------------------------------


@every
@settings(max_examples=10)
@given(data=st.data())
def test_no_pattern_over_two_runs_passes_the_composed_mu(family: Family, data):
    promises = []
    for _ in range(2):
        mech, rounds = draw_case(data, family, 5)
        clients = data.draw(participations(rounds))
        promises.append(account(mech, clients, data.draw(st.floats(0.3, 5)), DELTA))
    check(compose(promises, DELTA), true_mu(promises))
    cap = data.draw(st.integers(1, 6))
    check(compose(promises, DELTA, cap), true_mu(promises, cap))


@every
@settings(max_examples=8)
@given(data=st.data())
def test_one_run_under_a_cap_is_called_exact_only_where_it_is(family: Family, data):
    mech, rounds = draw_case(data, family, 7)
    promise = account(mech, data.draw(participations(rounds)), 1.0, DELTA)
    cap = data.draw(st.integers(1, 5))
    check(compose([promise], DELTA, cap), true_mu([promise], cap))


EXACT = ["independent", "blt-b100", "blt-b400", "tree", "sqrt", "band-sqrt:2"]


@pytest.mark.parametrize("cap", [None, 1, 2, 3, 4, 9])
@pytest.mark.parametrize(("one", "other"), list(itertools.combinations_with_replacement(EXACT, 2)))
def test_some_pattern_attains_the_composed_mu(one: str, other: str, cap: int | None):
    """Where each run's own sensitivity is attained, so is the composition's: it is no looser."""
    promises = [
        account(dpftrl.mechanism(one), MinSep(5, 2), 1.0, DELTA),
        account(dpftrl.mechanism(other), MinSep(4, 1, 3), 2.5, DELTA),
    ]
    check(compose(promises, DELTA, cap), true_mu(promises, cap), exact=True)


@pytest.mark.parametrize("cap", [None, 1, 2, 4])
def test_three_runs(cap: int | None):
    promises = [
        account(dpftrl.mechanism("blt-b100"), MinSep(4, 2), 1.0, DELTA),
        account(dpftrl.mechanism("tree"), MinSep(3, 1, 2), 1.5, DELTA),
        account(dpftrl.mechanism("independent"), MinSep(3, 1), 0.8, DELTA),
    ]
    check(compose(promises, DELTA, cap), true_mu(promises, cap), exact=True)


@pytest.mark.parametrize("cap", [None, 1, 2, 3])
def test_runs_on_a_fixed_schedule(cap: int | None):
    heavy = dpftrl.Banded([[2.0, 0.1, 0.1, 2.0, 0.1]])
    promises = [
        account(heavy, FixedEpochs(5, 2), 1.0, DELTA),
        account(dpftrl.mechanism("tree"), FixedEpochs(5, 1, 3), 1.5, DELTA),
    ]
    check(compose(promises, DELTA, cap), true_mu(promises, cap))


@pytest.mark.parametrize("cap", [None, 3])
def test_composing_without_the_rounding_of_the_buffers_would_be_noticed(cap: int | None):
    promises = [
        account(dpftrl.mechanism("blt-b100"), MinSep(5, 2), 1.0, DELTA),
        account(dpftrl.mechanism("tree"), MinSep(4, 1, 3), 2.5, DELTA),
    ]
    ideal = [
        guarantee_of(
            [Run.of(run.mechanism, run.participation, run.noise_multiplier, "float32")], DELTA
        )
        for promise in promises
        for run in promise.runs
    ]
    truth = true_mu(promises, cap)
    check(compose(promises, DELTA, cap), truth)
    with pytest.raises(AssertionError):
        check(compose(ideal, DELTA, cap), truth, exact=True)


@pytest.mark.parametrize("cap", [None, 3])
def test_a_composition_one_in_a_hundred_million_too_small_would_be_noticed(cap: int | None):
    promises = [
        account(dpftrl.mechanism("blt-b100"), MinSep(5, 2), 1.0, DELTA),
        account(dpftrl.mechanism("tree"), MinSep(4, 1, 3), 2.5, DELTA),
    ]
    composed, truth = compose(promises, DELTA, cap), true_mu(promises, cap)
    check(composed, truth)
    wrong = Guarantee(composed.runs, composed.mu * (1 - 1e-8), DELTA, ())
    with pytest.raises(AssertionError):
        check(wrong, truth)


@pytest.mark.parametrize("name", ["independent", "blt-b100", "tree"])
def test_a_restart_is_not_a_longer_run(name: str):
    """The pattern 0, b, 2b, ... of one long run misses those who end one run and start the next."""
    mech = dpftrl.mechanism(name)
    promises = [account(mech, MinSep(4, 3), 1.0, DELTA) for _ in range(2)]
    truth = true_mu(promises)
    as_one = account(mech, MinSep(8, 3, 2), 1.0, DELTA)
    assert as_one.mu < truth * 0.99
    check(compose(promises, DELTA), truth, exact=True)


def test_even_uncapped_a_longer_run_may_understate_a_restart():
    """Independent noise: two participations in each of two runs, three in one of both lengths."""
    mech = dpftrl.mechanism("independent")
    promises = [account(mech, MinSep(4, 3), 1.0, DELTA) for _ in range(2)]
    assert account(mech, MinSep(8, 3), 1.0, DELTA).mu == pytest.approx(math.sqrt(3))
    assert true_mu(promises) == pytest.approx(2.0)
    assert compose(promises, DELTA).mu == pytest.approx(2.0)


# --- Algebra -----------------------------------------------------------------------------------

CLIENTS = MinSep(2000, 400, 5)


def some_promises() -> list[Guarantee]:
    return [
        account(dpftrl.mechanism("blt-b400"), CLIENTS, 8.0, 1e-6),
        account(dpftrl.mechanism("tree"), MinSep(700, 150), 6.0, 1e-7),
        account(dpftrl.mechanism("independent"), MinSep(300, 10, 4), 3.0, 1e-8),
        account(dpftrl.mechanism("banded:9", MinSep(40, 5)), FixedEpochs(40, 8), 2.0, 1e-9),
    ]


@pytest.mark.parametrize("cap", [None, 3, 7])
def test_order_does_not_matter(cap: int | None):
    promises = some_promises()
    known = compose(promises, DELTA, cap).mu
    for order in itertools.permutations(promises):
        assert compose(order, DELTA, cap).mu == pytest.approx(known, rel=1e-14)


def test_grouping_does_not_matter():
    a, b, c, d = some_promises()
    together = compose([a, b, c, d], DELTA)
    for grouped in (
        compose([compose([a, b], 0.1), compose([c, d], 0.2)], DELTA),
        compose([a, compose([b, compose([c, d], 0.1)], 0.2)], DELTA),
    ):
        assert grouped.mu == pytest.approx(together.mu, rel=1e-14)
        assert grouped.runs == together.runs
    assert together.mu == pytest.approx(math.sqrt(sum(p.mu**2 for p in (a, b, c, d))), rel=1e-14)
    assert together == guarantee_of([run for p in (a, b, c, d) for run in p.runs], DELTA)


@pytest.mark.parametrize("times", [1, 2, 5, 30])
def test_composing_so_many_times_is_the_root_of_so_many(times: int):
    promise = some_promises()[0]
    composed = compose([promise] * times, 1e-6)
    assert composed.mu == pytest.approx(promise.mu * math.sqrt(times), rel=1e-13)
    assert composed.kind == ("exact" if times == 1 else "upper bound")


@pytest.mark.parametrize("which", range(4))
def test_one_alone_is_unchanged(which: int):
    promise = some_promises()[which]
    assert compose([promise], promise.delta) == promise


def test_one_alone_for_several_devices_is_no_stronger_than_before():
    """Composing must not turn a promise to people into a smaller one to devices."""
    promise = some_promises()[0].for_devices(3)
    try:
        composed = compose([promise], promise.delta)
    except InvalidInput:
        return
    assert composed.mu >= promise.mu * (1 - 1e-12)
    assert composed.devices == 3


def test_what_a_run_rests_on_is_not_forgotten():
    condition = Hypothesis("no test devices", "Devices of the laboratory are left out.", "observed")
    promise = some_promises()[0].resting_on(condition)
    assert condition in compose([promise], DELTA).hypotheses
    assert condition in compose([promise, some_promises()[1]], DELTA, 4).hypotheses


def test_every_participation_is_a_hypothesis():
    a, b, *_ = some_promises()
    for cap in (None, 4):
        texts = [h.text for h in compose([a, b], DELTA, cap).hypotheses]
        assert a.runs[0].hypothesis.text in texts
        assert b.runs[0].hypothesis.text in texts
        assert any("at most 4 rounds" in text for text in texts) == (cap == 4)


@settings(max_examples=20)
@given(noise_multiplier=st.floats(0.5, 20), gap=st.integers(1, 30), rounds=st.integers(1, 60))
def test_a_common_cap_only_helps_and_more_of_it_helps_less(
    noise_multiplier: float, gap: int, rounds: int
):
    promises = [
        account(dpftrl.mechanism("blt-b100"), MinSep(rounds, gap), noise_multiplier, DELTA),
        account(dpftrl.mechanism("tree"), MinSep(30, 4), 4.0, DELTA),
    ]
    free = compose(promises, DELTA).mu
    capped = [compose(promises, DELTA, cap).mu for cap in range(1, 12)]
    assert all(more >= less for less, more in itertools.pairwise(capped))
    assert capped[-1] <= free
    most = sum(promise.runs[0].participation.max_participations for promise in promises)
    assert compose(promises, DELTA, most).mu == pytest.approx(free, rel=1e-14)
    alone = [
        account(p.runs[0].mechanism, once(p), p.runs[0].noise_multiplier, DELTA).mu
        for p in promises
    ]
    assert capped[0] == pytest.approx(max(alone), rel=1e-14)


def once(promise: Guarantee) -> MinSep:
    clients = promise.runs[0].participation
    return MinSep(clients.rounds, clients.min_sep, 1)


def test_a_cap_on_a_single_run_is_that_run_with_the_cap():
    mech: Mechanism = dpftrl.mechanism("blt-b400")
    capped = compose([account(mech, CLIENTS, 8.0, DELTA)], DELTA, 2)
    assert capped.mu == account(mech, MinSep(2000, 400, 2), 8.0, DELTA).mu
    assert capped.common_cap == 2


# --- What is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -1, 1.5, math.nan, "2", True], ids=repr)
def test_a_wrong_cap_is_refused(wrong: Any):
    with pytest.raises(InvalidInput):
        compose(some_promises(), DELTA, wrong)


@pytest.mark.parametrize("wrong", [0.0, 1.0, -1.0, math.nan, math.inf], ids=repr)
def test_a_wrong_delta_is_refused(wrong: float):
    with pytest.raises(InvalidInput):
        compose(some_promises(), wrong)


def test_composing_nothing_is_refused():
    with pytest.raises(InvalidInput):
        compose([], DELTA)
    with pytest.raises(InvalidInput):
        compose(iter(()), DELTA, 3)


@pytest.mark.parametrize("cap", [10**6, 10**18, sys.maxsize, 10**30])
def test_a_vast_cap_is_no_cap_or_refused(cap: int):
    """Without taking all the memory first."""
    try:
        composed = compose(some_promises()[:2], DELTA, cap)
    except DpftrlError:
        return
    assert composed.mu == pytest.approx(compose(some_promises()[:2], DELTA).mu, rel=1e-14)


# --- Another accountant ------------------------------------------------------------------------


def pld_epsilon(event: Any, delta: float, relation: str = "REPLACE_SPECIAL") -> float:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant(dp_accounting.NeighboringRelation[relation])
    return accountant.compose(event).get_epsilon(delta)


@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "ADD_OR_REMOVE_ONE"])
def test_a_pld_accountant_agrees(relation: str):
    composed = compose(some_promises()[:3], DELTA)
    found = pld_epsilon(dp_event(composed), DELTA, relation)
    assert found == pytest.approx(composed.epsilon, abs=1e-5)
    fewer = compose(some_promises()[:2], DELTA)
    assert found != pytest.approx(fewer.epsilon, abs=1e-3)


def test_events_compose_in_their_accountant_as_they_do_here():
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    promises = some_promises()[:2]
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    for promise in promises:
        accountant.compose(dp_event(promise))
    found = accountant.get_epsilon(DELTA)
    assert found == pytest.approx(compose(promises, DELTA).epsilon, abs=1e-5)


def test_the_event_of_a_capped_composition_is_not_below_it():
    capped = compose(some_promises()[:2], DELTA, 3)
    assert pld_epsilon(dp_event(capped), DELTA) >= capped.epsilon - 1e-5


def test_the_event_of_several_devices_is_not_below_the_guarantee():
    people = compose(some_promises()[:2], DELTA).for_devices(3)
    # Their accountant knows of ideal Gaussians alone: the sampler's part of delta comes off first.
    assert 0.01 * DELTA < people.sampler_delta < 0.5 * DELTA
    left = DELTA - people.sampler_delta
    assert pld_epsilon(dp_event(people), left) == pytest.approx(people.epsilon, abs=1e-5)
    assert pld_epsilon(dp_event(people), DELTA) < people.epsilon - 1e-3
