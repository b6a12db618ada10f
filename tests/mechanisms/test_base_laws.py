"""Laws that every mechanism must obey, each with a negative control that breaks it."""

import copy
import math
import pickle
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpftrl
from conformance import (
    EVERY,
    Altered,
    Family,
    allowed_patterns,
    draw_case,
    participations,
    row_norms_of_prefix_sums,
    true_sensitivity,
)
from dpftrl import DpftrlError, FixedEpochs, MinSep, Sensitivity
from dpftrl.errors import InvalidInput, RoundsExceeded

every = pytest.mark.parametrize("family", EVERY, ids=str)
COORDINATES = 3


class Source:
    """A source of the rows of a fixed Z that records which rows were requested."""

    def __init__(self, rounds: int, seed: int = 0):
        # More than the nodes of any tree with so few rounds.
        self.z = np.random.default_rng(seed).standard_normal((20 * rounds + 200, COORDINATES))
        self.asked: list[int] = []

    def __call__(self, row: int) -> np.ndarray:
        assert row >= 0
        self.asked.append(row)
        return self.z[row].copy()


def stream(mechanism, rounds: int, source):
    """All the noise, and the state after every round."""
    state = mechanism.init(COORDINATES)
    noise, states = [], [state]
    for _ in range(rounds):
        row, state = mechanism.step(state, source)
        noise.append(row)
        states.append(state)
    return np.array(noise), states


# --- (a) Streams -------------------------------------------------------------------------------


def check_stream_is_decoder(mechanism, rounds: int) -> None:
    source = Source(rounds)
    noise, states = stream(mechanism, rounds, source)
    decoder = mechanism.decoder(rounds)
    columns = decoder.shape[1]
    assert decoder.shape[0] == rounds
    assert sorted(source.asked) == list(range(columns))
    assert states[-1].next_row == columns
    assert [state.round for state in states] == list(range(rounds + 1))
    size = np.abs(decoder) @ np.abs(source.z[:columns])
    assert np.all(np.abs(noise - decoder @ source.z[:columns]) <= 1e-9 * (1 + size))


@every
@given(data=st.data())
def test_streamed_noise_is_the_decoder_times_z(family: Family, data):
    check_stream_is_decoder(*draw_case(data, family, 24))


@every
@given(data=st.data())
def test_the_decoder_of_fewer_rounds_is_a_part_of_that_of_more(family: Family, data):
    mechanism, rounds = draw_case(data, family, 20)
    fewer = data.draw(st.integers(1, rounds))
    whole, part = mechanism.decoder(rounds), mechanism.decoder(fewer)
    scale = 1 + np.abs(whole).max()
    np.testing.assert_allclose(whole[:fewer, : part.shape[1]], part, atol=1e-9 * scale)
    np.testing.assert_allclose(whole[:fewer, part.shape[1] :], 0, atol=1e-9 * scale)


@every
@given(data=st.data())
def test_streams_keep_no_more_vectors_than_they_say(family: Family, data):
    mechanism, rounds = draw_case(data, family, 24)
    check_memory(mechanism, rounds)


def check_memory(mechanism, rounds: int) -> None:
    _, states = stream(mechanism, rounds, Source(rounds))
    kept = max(len(state.buffers) for state in states[:-1])
    said = mechanism.memory(rounds)
    assert kept <= said
    # A tree's digits are all ones only at one less than a power of two: it says ceil(log2 n).
    spare = 1 if mechanism.family == "tree" and rounds & (rounds - 1) else 0
    assert said <= kept + spare


@every
@given(data=st.data())
def test_a_step_changes_neither_the_state_nor_what_was_returned(family: Family, data):
    """A state can be saved, and a step repeated after a crash, with the same bits."""
    mechanism, rounds = draw_case(data, family, 12)
    source = Source(rounds)
    _, states = stream(mechanism, rounds, source)
    before = states[rounds - 1]
    held = copy.deepcopy(before)
    first, after = mechanism.step(before, source)
    wanted, following = first.copy(), copy.deepcopy(after)
    first += 1.0  # a caller may add the noise in place
    second, again = mechanism.step(before, source)
    assert np.array_equal(second, wanted)
    for one, other in ((before, held), (after, following), (again, following)):
        assert (one.round, one.next_row) == (other.round, other.next_row)
        assert np.array_equal(one.buffers, other.buffers)


@every
@given(data=st.data())
def test_coordinates_do_not_mix(family: Family, data):
    mechanism, rounds = draw_case(data, family, 10)
    source = Source(rounds)
    whole, _ = stream(mechanism, rounds, source)
    state = mechanism.init(1)
    for row in whole:
        noise, state = mechanism.step(state, lambda i: source.z[i, 1:2])
        np.testing.assert_allclose(noise, row[1:2], rtol=1e-12, atol=1e-12 * np.abs(whole).max())


def test_a_stream_with_the_wrong_decay_is_noticed():
    right = dpftrl.BLT([0.9, 0.5], [0.2, 0.3])
    wrong = dpftrl.BLT([0.9 + 1e-7, 0.5], [0.2, 0.3])
    check_stream_is_decoder(right, 20)
    with pytest.raises(AssertionError):
        check_stream_is_decoder(Altered(right, step=wrong.step), 20)


def test_a_stream_that_uses_a_row_twice_or_skips_one_is_noticed():
    whole = dpftrl.Independent()

    def step_by(stride):
        def step(state, rows):
            noise, after = whole.step(state, rows)
            return noise, after._replace(next_row=after.round * stride)

        return step

    for stride in (0, 2):
        with pytest.raises(AssertionError):
            check_stream_is_decoder(Altered(whole, step=step_by(stride)), 5)


def test_a_memory_that_is_too_small_or_too_large_is_noticed():
    whole = dpftrl.Toeplitz([1.0, 0.5, 0.25])
    check_memory(whole, 8)
    for said in (1, 3):
        with pytest.raises(AssertionError):
            check_memory(Altered(whole, memory=lambda _, said=said: said), 8)


# --- (b) Factorisation -------------------------------------------------------------------------


def check_decoder_inverts_strategy(mechanism, rounds: int) -> None:
    decoder, strategy = mechanism.decoder(rounds), mechanism.strategy(rounds)
    assert strategy.shape == decoder.shape[::-1]
    size = np.abs(decoder) @ np.abs(strategy)
    assert np.all(np.abs(decoder @ strategy - np.eye(rounds)) <= 1e-10 * (1 + size))


@every
@given(data=st.data())
def test_the_decoder_inverts_the_strategy(family: Family, data):
    check_decoder_inverts_strategy(*draw_case(data, family, 40))


def test_a_decoder_of_another_mechanism_is_noticed():
    right, wrong = dpftrl.SquareRoot(), dpftrl.SquareRoot(bands=9)
    check_decoder_inverts_strategy(right, 10)
    with pytest.raises(AssertionError):
        check_decoder_inverts_strategy(Altered(right, decoder=wrong.decoder), 10)


# --- (c) Sensitivity ---------------------------------------------------------------------------


def check_sensitivity(mechanism, participation) -> None:
    found = mechanism.sensitivity(participation)
    strategy = mechanism.strategy(participation.rounds)
    attained, bound = true_sensitivity(strategy, participation)
    assert type(found.value) is float
    assert type(found.lower_bound) is float
    assert found.value >= attained * (1 - 1e-12)
    assert found.lower_bound <= bound * (1 + 1e-12)
    assert found.lower_bound <= found.value
    if found.kind == "exact":
        assert found.value == found.lower_bound
        assert found.value <= bound * (1 + 1e-9)
    else:
        assert found.lower_bound < found.value
    if found.pattern is not None:
        assert set(found.pattern) in [set(p) for p in allowed_patterns(participation)]
        moved = np.linalg.norm(strategy[:, list(found.pattern)].sum(axis=1))
        assert found.lower_bound == pytest.approx(moved, rel=1e-9)


@every
@given(data=st.data())
def test_sensitivity_is_never_below_the_truth_and_exact_where_it_says_so(family: Family, data):
    mechanism, rounds = draw_case(data, family, 9)
    check_sensitivity(mechanism, data.draw(participations(rounds)))


# Theorems say that these are exact, so an upper bound would be a regression.
ALWAYS_EXACT = [
    "independent",
    "blt-b400",
    "blt-presets",
    "sqrt",
    "band-sqrt",
    "toeplitz-monotone",
    "inv-sqrt",
    "lambda",
    "tree",
    "tree-vanilla",
    "smooth-tree",
    "banded-normalised",
    "banded-positive",
]


@pytest.mark.parametrize("family", [f for f in EVERY if f.name in ALWAYS_EXACT], ids=str)
@given(data=st.data())
def test_sensitivity_is_exact_where_a_theorem_or_brute_force_makes_it_so(family: Family, data):
    mechanism, rounds = draw_case(data, family, 9)
    participation = data.draw(participations(rounds))
    found = mechanism.sensitivity(participation)
    truth = true_sensitivity(mechanism.strategy(rounds), participation)
    assert found.kind == "exact"
    assert found.value == pytest.approx(truth.bound, rel=1e-9)


@every
@given(data=st.data())
def test_pattern_norm_is_at_least_what_the_columns_add_up_to(family: Family, data):
    mechanism, rounds = draw_case(data, family, 9)
    participation = data.draw(participations(rounds))
    pattern = data.draw(st.sampled_from(allowed_patterns(participation)))
    strategy = mechanism.strategy(rounds)
    columns = strategy[:, list(pattern)]
    moved = float(np.linalg.norm(columns.sum(axis=1)))
    found = mechanism.pattern_norm(pattern, rounds)
    flips = np.random.default_rng(0).choice([-1, 1], (9, len(pattern)))
    signed = np.linalg.norm(columns @ flips.T, axis=0)
    assert found >= max(moved, *signed) * (1 - 1e-12)
    # A full tree that is stopped early is bounded by the whole one.
    if np.all(strategy >= 0) and mechanism.rounds in (None, rounds):
        assert found == pytest.approx(moved, rel=1e-9)


@every
@settings(max_examples=3)
@given(data=st.data())
def test_a_pattern_with_rounds_outside_the_run_is_refused(family: Family, data):
    """Ignoring such a round, or moving it, would understate the sensitivity."""
    mechanism, rounds = draw_case(data, family, 9)
    for pattern in ((rounds,), (0, rounds + 3), (-1,)):
        with pytest.raises(DpftrlError):
            mechanism.pattern_norm(pattern, rounds)


@every
@given(data=st.data())
def test_sensitivity_grows_with_the_allowed_patterns(family: Family, data):
    mechanism, rounds = draw_case(data, family, 9)
    gap, most = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    allowed = mechanism.sensitivity(MinSep(rounds, gap, most))
    for less in (MinSep(rounds, gap + 1, most), MinSep(rounds, gap, max(1, most - 1))):
        found = mechanism.sensitivity(less)
        assert found.lower_bound <= allowed.value * (1 + 1e-12)
    epochs = mechanism.sensitivity(FixedEpochs(rounds, gap, most))
    assert epochs.lower_bound <= allowed.value * (1 + 1e-12)


def test_a_sensitivity_of_the_greedy_pattern_alone_is_noticed():
    """For trees the earliest pattern is not the worst: its squared norm stays below 88."""
    tree, participation = dpftrl.BinaryTree(), MinSep(24, 3, 8)
    check_sensitivity(tree, participation)
    greedy = tree.pattern_norm(participation.earliest(), 24)
    assert greedy**2 < 87.5
    assert tree.sensitivity(participation).value ** 2 == pytest.approx(88)
    for claimed in (Sensitivity.exact(greedy), Sensitivity(math.sqrt(87), greedy)):
        with pytest.raises(AssertionError):
            check_sensitivity(Altered(tree, sensitivity=lambda _, c=claimed: c), participation)


@pytest.mark.parametrize(
    "name", ["independent", "blt-b400", "sqrt", "band-sqrt:5", "tree", "tree-full"]
)
def test_a_min_sep_that_is_off_by_one_is_noticed(name: str):
    participation, wrong = MinSep(8, 2), MinSep(8, 3)
    whole = dpftrl.mechanism(name, participation)
    check_sensitivity(whole, participation)
    off = Altered(whole, sensitivity=lambda _: whole.sensitivity(wrong))
    with pytest.raises(AssertionError):
        check_sensitivity(off, participation)


def test_a_claim_of_exactness_that_is_too_high_is_noticed():
    whole, participation = dpftrl.SquareRoot(), MinSep(8, 2)
    high = Sensitivity.exact(whole.sensitivity(participation).value * (1 + 1e-8))
    with pytest.raises(AssertionError):
        check_sensitivity(Altered(whole, sensitivity=lambda _: high), participation)


# --- (d) Errors and losses ---------------------------------------------------------------------


def check_errors(mechanism, rounds: int) -> None:
    wanted = row_norms_of_prefix_sums(mechanism.decoder(rounds))
    np.testing.assert_allclose(mechanism.error_curve(rounds), wanted, rtol=1e-8)
    assert mechanism.max_error(rounds) == pytest.approx(wanted.max(), rel=1e-8)
    rms = math.sqrt((wanted**2).mean())
    assert mechanism.rms_error(rounds) == pytest.approx(rms, rel=1e-8)


@every
@given(data=st.data())
def test_errors_are_row_norms_of_prefix_sums_of_the_decoder(family: Family, data):
    check_errors(*draw_case(data, family, 20))


@every
@settings(max_examples=3)
@given(data=st.data(), rounds=st.sampled_from([128, 257, 400]))
def test_errors_hold_at_hundreds_of_rounds(family: Family, data, rounds):
    """Enough rounds for algorithms that work in blocks to need several blocks."""
    check_errors(data.draw(family.supporting(rounds)), rounds)


@every
@given(data=st.data())
def test_losses_are_errors_times_sensitivity(family: Family, data):
    mechanism, rounds = draw_case(data, family, 9)
    participation = data.draw(participations(rounds))
    loss, curve = mechanism.error_report(participation), mechanism.error_curve(rounds)
    sensitivity = mechanism.sensitivity(participation).value
    assert loss.sensitivity.value == sensitivity
    assert loss.max_loss == pytest.approx(max(curve) * sensitivity, rel=1e-9)
    assert loss.rms_loss == pytest.approx(math.sqrt(np.mean(curve**2)) * sensitivity, rel=1e-9)
    assert loss.rms_loss <= loss.max_loss * (1 + 1e-12)


@pytest.mark.parametrize("method", ["error_curve", "max_error", "rms_error"])
def test_an_error_that_is_off_is_noticed(method: str):
    for name in ("tree", "tree-vanilla", "blt-b100", "independent"):
        whole = dpftrl.mechanism(name)
        check_errors(whole, 15)
        # The error after one round less, which is what an index that is off by one would give.
        late = {method: lambda n, w=whole: getattr(w, method)(n - 1)}
        with pytest.raises(AssertionError):
            check_errors(Altered(whole, **late), 15)


# --- (e) Files and printing --------------------------------------------------------------------


def check_round_trip(mechanism, load, path) -> None:
    dpftrl.save_mechanism(mechanism, path)
    back = load(path)
    assert type(back) is type(mechanism)
    assert back == mechanism
    assert hash(back) == hash(mechanism)
    assert repr(back) == repr(mechanism)
    assert str(back) == str(mechanism)


@every
@given(data=st.data())
def test_files_give_back_an_equal_value(family: Family, data, tmp_path_factory):
    mechanism, _ = draw_case(data, family, 12)
    check_round_trip(mechanism, dpftrl.load_mechanism, tmp_path_factory.mktemp("a") / "m.json")


def test_a_file_that_loses_the_last_bit_is_noticed(tmp_path):
    whole = dpftrl.BLT([0.1], [0.3])
    rounded = dpftrl.BLT([0.1], [np.nextafter(0.3, 1)])
    with pytest.raises(AssertionError):
        check_round_trip(whole, lambda _: rounded, tmp_path / "m.json")


@every
@given(data=st.data())
def test_copies_are_equal_values(family: Family, data):
    mechanism, rounds = draw_case(data, family, 12)
    mechanism.error_report(MinSep(rounds, 1))  # cached results are not part of the value
    for other in (copy.deepcopy(mechanism), pickle.loads(pickle.dumps(mechanism))):
        assert other == mechanism
        assert hash(other) == hash(mechanism)


@every
@given(data=st.data())
def test_printing_is_one_short_line(family: Family, data):
    mechanism, _ = draw_case(data, family, 12)
    assert str(mechanism) == mechanism.name
    assert mechanism.name
    assert len(str(mechanism).splitlines()) == len(repr(mechanism).splitlines()) == 1
    assert repr(mechanism).startswith(type(mechanism).__name__ + "(")
    assert len(repr(mechanism)) < 500


# --- (f) The last round ------------------------------------------------------------------------


def check_refuses_more_rounds(mechanism) -> None:
    last = mechanism.rounds
    _, states = stream(mechanism, last, Source(last))
    for refused in (
        lambda: mechanism.step(states[-1], Source(last)),
        lambda: mechanism.error_report(MinSep(last + 1, 1)),
        lambda: mechanism.sensitivity(MinSep(last + 1, 2)),
        lambda: mechanism.sensitivity(FixedEpochs(last + 1, 2)),
        lambda: mechanism.pattern_norm((0,), last + 1),
        lambda: mechanism.error_curve(last + 1),
        lambda: mechanism.max_error(last + 1),
        lambda: mechanism.rms_error(last + 1),
        lambda: mechanism.memory(last + 1),
        lambda: mechanism.strategy(last + 1),
        lambda: mechanism.decoder(last + 1),
    ):
        with pytest.raises(RoundsExceeded) as error:
            refused()
        assert str(last) in str(error.value)
    mechanism.error_report(MinSep(last, 1))  # the last round itself is allowed


@pytest.mark.parametrize("family", [f for f in EVERY if not f.unbounded], ids=str)
@given(data=st.data())
def test_rounds_past_the_last_are_refused(family: Family, data):
    mechanism, _ = draw_case(data, family, 9)
    check_refuses_more_rounds(mechanism)


@pytest.mark.parametrize("family", [f for f in EVERY if f.unbounded], ids=str)
@given(data=st.data())
def test_unbounded_mechanisms_have_no_last_round(family: Family, data):
    mechanism, _ = draw_case(data, family, 9)
    assert mechanism.rounds is None
    _, states = stream(mechanism, 130, Source(130))
    assert states[-1].round == 130
    assert len(mechanism.error_curve(130)) == 130


def test_noise_that_repeats_after_the_last_round_is_noticed():
    whole = dpftrl.FullTree(4)

    def step(state, rows):
        return whole.step(whole.init(COORDINATES) if state.round >= 4 else state, rows)

    check_refuses_more_rounds(whole)
    with pytest.raises(pytest.fail.Exception):
        check_refuses_more_rounds(Altered(whole, step=step))


NO_ROUNDS = [0, -1, 2.0, float("nan"), True, "3", None]
COUNTED = ["error_curve", "max_error", "rms_error", "memory", "strategy", "decoder"]


@every
@pytest.mark.parametrize("method", COUNTED)
@settings(max_examples=3)
@given(data=st.data())
def test_invalid_numbers_of_rounds_are_refused(family: Family, method: str, data):
    mechanism, _ = draw_case(data, family, 5)
    for bad in NO_ROUNDS:
        with pytest.raises(InvalidInput) as error:
            getattr(mechanism, method)(bad)
        assert repr(bad) in str(error.value)


# --- (g) Values --------------------------------------------------------------------------------


def check_immutable(mechanism) -> None:
    for name in [*(field.name for field in fields(mechanism)), "brand_new"]:
        with pytest.raises(FrozenInstanceError):
            setattr(mechanism, name, 1)
        with pytest.raises(FrozenInstanceError):
            delattr(mechanism, name)
    held = (getattr(mechanism, field.name) for field in fields(mechanism))
    for array in (value for value in held if isinstance(value, np.ndarray)):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0.0


@every
@given(data=st.data())
def test_mechanisms_are_immutable_values(family: Family, data):
    mechanism, rounds = draw_case(data, family, 9)
    before, printed = hash(mechanism), repr(mechanism)
    mechanism.error_report(MinSep(rounds, 1))
    stream(mechanism, rounds, Source(rounds))
    check_immutable(mechanism)
    assert (hash(mechanism), repr(mechanism)) == (before, printed)
    assert len({mechanism, copy.deepcopy(mechanism)}) == 1


@every
@given(data=st.data())
def test_what_a_mechanism_returns_can_be_changed_without_changing_it(family: Family, data):
    mechanism, rounds = draw_case(data, family, 9)
    for method in ("strategy", "decoder", "error_curve"):
        made = getattr(mechanism, method)(rounds)
        wanted = made.copy()
        made += 1.0
        assert np.array_equal(getattr(mechanism, method)(rounds), wanted)


def test_a_value_that_can_be_changed_is_noticed():
    class Open(dpftrl.BLT):
        def __setattr__(self, name, value):
            object.__setattr__(self, name, value)

    with pytest.raises(pytest.fail.Exception):
        check_immutable(Open([0.5], [0.5]))
