"""The bound on what rounding in the buffers does, against streams in exact arithmetic.

Two adjacent inputs explain one release by rows of Z that differ by C u, and by what rounding adds.
That addition is measured and compared with 2 u r `rounding_gain`, u the relative rounding and r the
largest row of Z.
"""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import dpftrl
from conformance import EVERY, Family, draw_case
from dpftrl import BLT, BinaryTree, GeneralBLT, Mechanism
from dpftrl.errors import InvalidInput
from rounded_streams import (
    Arithmetic,
    Moved,
    Rounding,
    exact,
    float32,
    float64,
    off_by,
    rounding_shift,
    to_bits,
)

STORING = ("blt", "blt-above-one", "blt-presets", "gblt", "tree")
storing = pytest.mark.parametrize("family", [f for f in EVERY if f.name in STORING], ids=str)
other = pytest.mark.parametrize("family", [f for f in EVERY if f.name not in STORING], ids=str)

# Coarse rounding that is still so fine that its square is negligible.
BITS = 30
UNIT = Fraction(1, 2**BITS)


def bound(mechanism: Mechanism, rounds: int, moved: Moved, unit: float) -> float:
    return 2 * unit * moved.largest * mechanism.rounding_gain(rounds)


def random_signs(seed: int) -> Rounding:
    """Off by the whole unit every time, up or down at random."""
    random = np.random.default_rng(seed)
    return lambda x: x * (1 + (UNIT if random.random() < 0.5 else -UNIT))


def roundings(seed: int) -> dict[str, tuple[Arithmetic, Arithmetic]]:
    """Where the streams of the two inputs round."""
    nearest = Arithmetic(buffer=to_bits(BITS))
    return {
        "to the nearest": (nearest, nearest),
        "apart": (Arithmetic(buffer=off_by(UNIT)), Arithmetic(buffer=off_by(-UNIT))),
        "at random": (
            Arithmetic(buffer=random_signs(seed)),
            Arithmetic(buffer=random_signs(seed + 1)),
        ),
    }


def case(seed: int, rounds: int) -> tuple[list[Fraction], list[Fraction]]:
    """Rows of Z up to 10, of one sign, of alternating signs or any; and a difference of inputs."""
    random = np.random.default_rng(seed)
    many = 3 * rounds + 8  # a tree has fewer than two nodes a round
    signs = [np.ones(many), (-1.0) ** np.arange(many), random.choice([-1.0, 1.0], many)][seed % 3]
    sizes = np.full(many, 10.0) if seed % 2 else random.integers(0, 10 * 2**8, many) / 2**8
    difference = random.integers(-1, 2, rounds)
    return [Fraction(z) for z in (signs * sizes).tolist()], [Fraction(int(x)) for x in difference]


def moved_by(mechanism: Mechanism, rounds: int, seed: int, rounding: str = "apart") -> Moved:
    rows, difference = case(seed, rounds)
    return rounding_shift(mechanism, rows.__getitem__, difference, roundings(seed)[rounding])


# --- The bound holds ---------------------------------------------------------------------------


@storing
@settings(max_examples=40)
@given(data=st.data())
def test_rounding_never_shifts_z_by_more_than_the_bound(family: Family, data):
    mechanism, rounds = draw_case(data, family, 24)
    seed = data.draw(st.integers(0, 2**20), label="seed")
    rounding = data.draw(st.sampled_from(["to the nearest", "apart", "at random"]))
    moved = moved_by(mechanism, rounds, seed, rounding)
    assert moved.shift <= bound(mechanism, rounds, moved, float(UNIT))


@storing
@settings(max_examples=10)
@given(data=st.data())
def test_rounding_to_float64_never_shifts_z_by_more_than_the_bound(family: Family, data):
    mechanism, rounds = draw_case(data, family, 24)
    rows, difference = case(data.draw(st.integers(0, 2**20), label="seed"), rounds)
    real = Arithmetic(buffer=float64)
    moved = rounding_shift(mechanism, rows.__getitem__, difference, (real, real))
    assert moved.shift <= bound(mechanism, rounds, moved, 2.0**-53)


@storing
@settings(max_examples=10)
@given(data=st.data())
def test_without_rounding_of_buffers_the_shift_is_negligible(family: Family, data):
    mechanism, rounds = draw_case(data, family, 16)
    rows, difference = case(data.draw(st.integers(0, 2**20), label="seed"), rounds)
    none = Arithmetic(buffer=exact)
    moved = rounding_shift(mechanism, rows.__getitem__, difference, (none, none))
    # The weights of a step are float64 numbers, and rounded where they are sums or products.
    assert moved.shift <= bound(mechanism, rounds, moved, 2.0**-53)
    if isinstance(mechanism, BLT):
        assert moved.shift == 0


# --- The bound is not vacuous, and the test can fail -------------------------------------------

EXAMPLES = {
    "blt-b100": dpftrl.mechanism("blt-b100"),
    "blt-b400": dpftrl.mechanism("blt-b400"),
    "blt-above-one": BLT([0.9, 0.2], [0.7, 0.35]),
    "gblt": GeneralBLT([0.9, 0.5], [0.2, 0.05]),
    "gblt-pair": GeneralBLT([0.9, 0.5 + 0.1j], [0.2, 0.05]),
    "tree": BinaryTree(),
}
examples = pytest.mark.parametrize("name", EXAMPLES)
# How far above what these rows of Z attain the bound may be.
SLACK = {"blt": 4.0, "gblt": 6.0, "tree": 25.0}


def worst_of(mechanism: Mechanism, rounds: int) -> tuple[float, float]:
    """The largest shift found, and the bound for it."""
    found = [moved_by(mechanism, rounds, seed) for seed in range(6)]
    worst = max(found, key=lambda moved: moved.shift / moved.largest)
    return worst.shift, bound(mechanism, rounds, worst, float(UNIT))


@examples
def test_worst_case_rounding_comes_close_to_the_bound(name: str):
    mechanism = EXAMPLES[name]
    shift, most = worst_of(mechanism, rounds=48)
    assert most / SLACK[mechanism.family] <= shift <= most


@examples
def test_a_bound_fifty_times_smaller_would_be_exceeded(name: str):
    shift, most = worst_of(EXAMPLES[name], rounds=48)
    assert shift > most / 50


@examples
def test_float32_buffers_exceed_the_bound_for_float64(name: str):
    mechanism = EXAMPLES[name]
    rows, difference = case(5, 32)
    for kept, within in ((float64, True), (float32, False)):
        stored = Arithmetic(buffer=float64, stored=kept)
        moved = rounding_shift(mechanism, rows.__getitem__, difference, (stored, stored))
        assert (moved.shift <= bound(mechanism, 32, moved, 2.0**-53)) is within


# --- Families that round nothing ---------------------------------------------------------------


@other
@settings(max_examples=5)
@given(data=st.data())
def test_a_family_that_stores_rows_has_no_gain(family: Family, data):
    """`tests/noise` checks on the real stream that the buffers are those rows."""
    mechanism, rounds = draw_case(data, family, 24)
    assert mechanism.rounding_gain(rounds) == 0


@storing
@given(data=st.data())
def test_the_gain_grows_at_least_as_the_root_of_the_rounds(family: Family, data):
    """A guarantee covers 2^40 / rounds coordinates: no smaller gain may make mu fall."""
    mechanism, rounds = draw_case(data, family, 200)
    gain, next_gain = mechanism.rounding_gain(rounds), mechanism.rounding_gain(rounds + 1)
    assert 0 <= gain < math.inf
    assert gain / math.sqrt(rounds) <= next_gain / math.sqrt(rounds + 1) * (1 + 1e-12)
    assert mechanism.rounding_gain(1) == 0


# --- Large scales that cancel ------------------------------------------------------------------


@pytest.mark.parametrize("scale", [2e4, 1e8, 1e15])
def test_scales_that_cancel_each_other_are_refused(scale: float):
    """C is close to that of one buffer with scale 0.1, but rounding would show in the noise."""
    with pytest.raises(InvalidInput, match="cancel"):
        GeneralBLT([0.9, 0.9 - 1 / scale], [scale, 0.1 - scale])


@given(digits=st.floats(1.5, 4), decay=st.floats(0.5, 0.95), part=st.floats(0.05, 0.3))
def test_the_rounding_gain_is_large_for_scales_that_cancel(
    digits: float, decay: float, part: float
):
    scale = 10.0**digits / 2
    plain = GeneralBLT([decay], [part])
    try:
        cancelling = GeneralBLT([decay, decay], [scale, part - scale])
    except InvalidInput:  # rounding takes its slowest decay past 1
        assume(False)
        raise
    assert cancelling.rounding_gain(100) > scale * plain.rounding_gain(100)
