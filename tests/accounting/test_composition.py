"""Composition of several runs, compared with brute force over all patterns and dp_accounting.

The runs are the blocks of a block-diagonal strategy. A pattern over all runs consists of one
pattern (possibly empty) per run; a common cap limits its total number of rounds.
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
    """Every pattern that a client may have in one run, including none and those cut by a cap."""
    patterns: set[tuple[int, ...]] = {()}
    for pattern in allowed_patterns(clients):
        # A client on a fixed schedule may stop early, or start late.
        patterns |= {pattern[i:j] for i, j in itertools.combinations(range(len(pattern) + 1), 2)}
    return sorted(patterns)


def true_mu(guarantees: list[Guarantee], cap: int | None = None) -> float:
    """Brute force over all patterns of the strategy diag(C_i / noise_multiplier_i).

    Rounding in the buffers of a run moves its block a little further.
    """
    runs = [run for guarantee in guarantees for run in guarantee.runs]
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
    # Blocks do not interact, so the signs of each block are chosen independently.
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
    """The largest squared distance that updates of +1 and -1 in these rounds move the output."""
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
    guarantees = []
    for _ in range(2):
        mech, rounds = draw_case(data, family, 5)
        clients = data.draw(participations(rounds))
        guarantees.append(account(mech, clients, data.draw(st.floats(0.3, 5)), DELTA))
    check(compose(guarantees, DELTA), true_mu(guarantees))
    cap = data.draw(st.integers(1, 6))
    check(compose(guarantees, DELTA, cap), true_mu(guarantees, cap))


@every
@settings(max_examples=8)
@given(data=st.data())
def test_one_run_under_a_cap_is_called_exact_only_where_it_is(family: Family, data):
    mech, rounds = draw_case(data, family, 7)
    guarantee = account(mech, data.draw(participations(rounds)), 1.0, DELTA)
    cap = data.draw(st.integers(1, 5))
    check(compose([guarantee], DELTA, cap), true_mu([guarantee], cap))


EXACT = ["independent", "blt-b100", "blt-b400", "tree", "sqrt", "band-sqrt:2"]


@pytest.mark.parametrize("cap", [None, 1, 2, 3, 4, 9])
@pytest.mark.parametrize(("one", "other"), list(itertools.combinations_with_replacement(EXACT, 2)))
def test_some_pattern_attains_the_composed_mu(one: str, other: str, cap: int | None):
    """If each run's sensitivity is attained by a pattern, so is that of the composition."""
    guarantees = [
        account(dpftrl.mechanism(one), MinSep(5, 2), 1.0, DELTA),
        account(dpftrl.mechanism(other), MinSep(4, 1, 3), 2.5, DELTA),
    ]
    check(compose(guarantees, DELTA, cap), true_mu(guarantees, cap), exact=True)


@pytest.mark.parametrize("cap", [None, 1, 2, 4])
def test_the_composed_mu_of_three_runs_is_the_worst_pattern(cap: int | None):
    guarantees = [
        account(dpftrl.mechanism("blt-b100"), MinSep(4, 2), 1.0, DELTA),
        account(dpftrl.mechanism("tree"), MinSep(3, 1, 2), 1.5, DELTA),
        account(dpftrl.mechanism("independent"), MinSep(3, 1), 0.8, DELTA),
    ]
    check(compose(guarantees, DELTA, cap), true_mu(guarantees, cap), exact=True)


@pytest.mark.parametrize("cap", [None, 1, 2, 3])
def test_the_composed_mu_of_fixed_epochs_is_the_worst_pattern(cap: int | None):
    heavy = dpftrl.Banded([[2.0, 0.1, 0.1, 2.0, 0.1]])
    guarantees = [
        account(heavy, FixedEpochs(5, 2), 1.0, DELTA),
        account(dpftrl.mechanism("tree"), FixedEpochs(5, 1, 3), 1.5, DELTA),
    ]
    check(compose(guarantees, DELTA, cap), true_mu(guarantees, cap))


@pytest.mark.parametrize("cap", [None, 3])
def test_composing_without_the_rounding_of_the_buffers_would_be_noticed(cap: int | None):
    guarantees = [
        account(dpftrl.mechanism("blt-b100"), MinSep(5, 2), 1.0, DELTA),
        account(dpftrl.mechanism("tree"), MinSep(4, 1, 3), 2.5, DELTA),
    ]
    ideal = [
        guarantee_of(
            [Run.of(run.mechanism, run.participation, run.noise_multiplier, "float32")], DELTA
        )
        for guarantee in guarantees
        for run in guarantee.runs
    ]
    truth = true_mu(guarantees, cap)
    check(compose(guarantees, DELTA, cap), truth)
    with pytest.raises(AssertionError):
        check(compose(ideal, DELTA, cap), truth, exact=True)


@pytest.mark.parametrize("cap", [None, 3])
def test_a_composition_one_in_a_hundred_million_too_small_would_be_noticed(cap: int | None):
    guarantees = [
        account(dpftrl.mechanism("blt-b100"), MinSep(5, 2), 1.0, DELTA),
        account(dpftrl.mechanism("tree"), MinSep(4, 1, 3), 2.5, DELTA),
    ]
    composed, truth = compose(guarantees, DELTA, cap), true_mu(guarantees, cap)
    check(composed, truth)
    wrong = Guarantee(composed.runs, composed.mu * (1 - 1e-8), DELTA, ())
    with pytest.raises(AssertionError):
        check(wrong, truth)


@pytest.mark.parametrize("name", ["independent", "blt-b100", "tree"])
def test_a_restart_is_not_a_longer_run(name: str):
    """A client may take part at the end of one run and at the start of the next."""
    mech = dpftrl.mechanism(name)
    guarantees = [account(mech, MinSep(4, 3), 1.0, DELTA) for _ in range(2)]
    truth = true_mu(guarantees)
    as_one = account(mech, MinSep(8, 3, 2), 1.0, DELTA)
    assert as_one.mu < truth * 0.99
    check(compose(guarantees, DELTA), truth, exact=True)


def test_even_uncapped_a_longer_run_may_understate_a_restart():
    """Independent noise: 2 participations per run make 4, but one run of both lengths has 3."""
    mech = dpftrl.mechanism("independent")
    guarantees = [account(mech, MinSep(4, 3), 1.0, DELTA) for _ in range(2)]
    assert account(mech, MinSep(8, 3), 1.0, DELTA).mu == pytest.approx(math.sqrt(3))
    assert true_mu(guarantees) == pytest.approx(2.0)
    assert compose(guarantees, DELTA).mu == pytest.approx(2.0)


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
def test_composition_does_not_depend_on_the_order_of_runs(cap: int | None):
    guarantees = some_promises()
    known = compose(guarantees, DELTA, cap).mu
    for order in itertools.permutations(guarantees):
        assert compose(order, DELTA, cap).mu == pytest.approx(known, rel=1e-14)


def test_composition_does_not_depend_on_the_grouping_of_runs():
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
def test_composing_n_equal_runs_multiplies_mu_by_the_root_of_n(times: int):
    guarantee = some_promises()[0]
    composed = compose([guarantee] * times, 1e-6)
    assert composed.mu == pytest.approx(guarantee.mu * math.sqrt(times), rel=1e-13)
    assert composed.kind == ("exact" if times == 1 else "upper bound")


@pytest.mark.parametrize("which", range(4))
def test_composing_a_single_guarantee_changes_nothing(which: int):
    guarantee = some_promises()[which]
    assert compose([guarantee], guarantee.delta) == guarantee


def test_composing_a_guarantee_for_several_devices_does_not_strengthen_it():
    """Composing must not turn a guarantee for a person into a stronger one for a device."""
    guarantee = some_promises()[0].for_devices(3)
    try:
        composed = compose([guarantee], guarantee.delta)
    except InvalidInput:
        return
    assert composed.mu >= guarantee.mu * (1 - 1e-12)
    assert composed.devices == 3


def test_composition_keeps_the_hypotheses_of_every_run():
    condition = Hypothesis("no test devices", "Devices of the laboratory are left out.", "observed")
    guarantee = some_promises()[0].resting_on(condition)
    assert condition in compose([guarantee], DELTA).hypotheses
    assert condition in compose([guarantee, some_promises()[1]], DELTA, 4).hypotheses


def test_every_participation_is_a_hypothesis():
    a, b, *_ = some_promises()
    for cap in (None, 4):
        texts = [h.text for h in compose([a, b], DELTA, cap).hypotheses]
        assert a.runs[0].hypothesis.text in texts
        assert b.runs[0].hypothesis.text in texts
        assert any("at most 4 rounds" in text for text in texts) == (cap == 4)


@settings(max_examples=20)
@given(noise_multiplier=st.floats(0.5, 20), gap=st.integers(1, 30), rounds=st.integers(1, 60))
def test_mu_grows_with_the_common_cap_and_never_exceeds_the_uncapped_mu(
    noise_multiplier: float, gap: int, rounds: int
):
    guarantees = [
        account(dpftrl.mechanism("blt-b100"), MinSep(rounds, gap), noise_multiplier, DELTA),
        account(dpftrl.mechanism("tree"), MinSep(30, 4), 4.0, DELTA),
    ]
    free = compose(guarantees, DELTA).mu
    capped = [compose(guarantees, DELTA, cap).mu for cap in range(1, 12)]
    assert all(more >= less for less, more in itertools.pairwise(capped))
    assert capped[-1] <= free
    most = sum(guarantee.runs[0].participation.max_participations for guarantee in guarantees)
    assert compose(guarantees, DELTA, most).mu == pytest.approx(free, rel=1e-14)
    alone = [
        account(p.runs[0].mechanism, once(p), p.runs[0].noise_multiplier, DELTA).mu
        for p in guarantees
    ]
    assert capped[0] == pytest.approx(max(alone), rel=1e-14)


def once(guarantee: Guarantee) -> MinSep:
    clients = guarantee.runs[0].participation
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
def test_a_very_large_common_cap_has_no_effect_or_is_refused(cap: int):
    """It must not allocate all memory first."""
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

    guarantees = some_promises()[:2]
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
    for guarantee in guarantees:
        accountant.compose(dp_event(guarantee))
    found = accountant.get_epsilon(DELTA)
    assert found == pytest.approx(compose(guarantees, DELTA).epsilon, abs=1e-5)


def test_the_event_of_a_capped_composition_is_not_below_it():
    capped = compose(some_promises()[:2], DELTA, 3)
    assert pld_epsilon(dp_event(capped), DELTA) >= capped.epsilon - 1e-5


def test_the_event_of_several_devices_is_not_below_the_guarantee():
    people = compose(some_promises()[:2], DELTA).for_devices(3)
    # dp_accounting assumes ideal Gaussians, so the sampler's part of delta is subtracted first.
    assert 0.01 * DELTA < people.sampler_delta < 0.5 * DELTA
    left = DELTA - people.sampler_delta
    assert pld_epsilon(dp_event(people), left) == pytest.approx(people.epsilon, abs=1e-5)
    assert pld_epsilon(dp_event(people), DELTA) < people.epsilon - 1e-3
