"""The conformance table of all mechanisms, and oracles that share no code with the library.

`EVERY` has one entry per family or variant. Each entry draws a random mechanism that supports a
given number of rounds.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.strategies import DataObject, SearchStrategy
from numpy.typing import NDArray

import dpftrl
from dpftrl import FixedEpochs, Mechanism, MinSep, Participation

Matrix = NDArray[np.float64]

# --- Mechanisms --------------------------------------------------------------------------------


class Family(NamedTuple):
    """One entry of the table.

    Attributes:
        name: The name of the test case.
        supporting: From a number of rounds to a strategy that draws a mechanism supporting them.
        unbounded: Whether the mechanism has no last round.
    """

    name: str
    supporting: Callable[[int], SearchStrategy[Mechanism]]
    unbounded: bool = True

    def __str__(self) -> str:
        return self.name


def floats(low: float, high: float) -> SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, allow_subnormal=False)


# Optimizers return decays within 1e-13 of 1, and there closed forms lose digits.
DECAYS = st.one_of(
    floats(0, 1),
    floats(0, 13).map(lambda digits: 1 - 10.0**-digits),
    st.sampled_from([0.0, 1.0]),
)


@st.composite
def decays(draw: st.DrawFn, most: int = 8) -> list[float]:
    """Decays of 1 to `most` buffers, some of which are equal or nearly equal."""
    theta = draw(st.lists(DECAYS, min_size=1, max_size=most))
    for i in range(1, len(theta)):
        shift = draw(st.sampled_from([None, None, 0.0, 1e-11, -1e-11]))
        if shift is not None:
            theta[i] = min(1.0, max(0.0, theta[i - 1] + shift))
    return theta


@st.composite
def blts(draw: st.DrawFn, above_one: bool = False) -> dpftrl.BLT:
    """BLTs whose output scales sum to at most 1, or to a little more if `above_one`."""
    theta = draw(decays())
    scale = st.one_of(floats(1e-9, 1), st.just(0.0))
    raw = np.array(draw(st.lists(scale, min_size=len(theta), max_size=len(theta))))
    if not raw.any():
        return dpftrl.BLT(theta, raw.tolist())
    raw /= raw.sum()
    if above_one:
        # The noise stays bounded up to sum(omega / (1 + theta)) = 1.
        limit = 1 / (raw / (1 + np.array(theta))).sum()
        assume(limit > 1 + 1e-6)
        total = 1 + draw(floats(0.01, 1)) * min(0.1, limit - 1) * (1 - 1e-9)
    else:
        total = draw(st.one_of(floats(0, 1), st.just(1.0)))
    omega = raw * total
    if not above_one and omega.sum() > 1:
        omega *= 1 - 1e-15
    return dpftrl.BLT(theta, omega.tolist())


def presets(_rounds: int) -> SearchStrategy[Mechanism]:
    names = ["blt-b100", "blt-b400", "blt-b1000"]
    return st.sampled_from(names).map(dpftrl.mechanism)


@st.composite
def toeplitz(draw: st.DrawFn, monotone: bool) -> dpftrl.Toeplitz:
    first = draw(floats(0.1, 2))
    shares = draw(st.lists(floats(0, 1 if monotone else 1.5), max_size=7))
    c = [first]
    for share in shares:
        c.append((c[-1] if monotone else first) * share)
    return dpftrl.Toeplitz(c)


@st.composite
def banded(draw: st.DrawFn, rounds: int, low: float) -> dpftrl.Banded:
    """General bands for `rounds` rounds or a few more, with entries from `low` to 1."""
    built_for = rounds + draw(st.integers(0, 3))
    bands = draw(st.integers(1, min(built_for, 6)))
    # Draw a seed, not single entries: hundreds of draws per matrix would not help hypothesis.
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    columns = random.uniform(low, 1.0, (bands, built_for))
    columns[0] = random.uniform(0.5, 1.5, built_for)
    columns[np.add.outer(np.arange(bands), np.arange(built_for)) >= built_for] = 0.0
    return dpftrl.Banded(columns)


@st.composite
def normalised_bands(draw: st.DrawFn, rounds: int) -> dpftrl.Banded:
    built_for = rounds + draw(st.integers(0, 3))
    return dpftrl.Banded.square_root(draw(st.integers(1, built_for + 2)), built_for)


def banded_inverses(_rounds: int) -> SearchStrategy[Mechanism]:
    tail = st.lists(floats(-1, 1), max_size=5)
    return st.builds(lambda c, rest: dpftrl.BandedInverse([c, *rest]), floats(0.5, 2), tail)


def smooth_trees(rounds: int) -> SearchStrategy[Mechanism]:
    lowest = dpftrl.SmoothTree.for_rounds(rounds)
    return st.sampled_from([lowest, dpftrl.SmoothTree(lowest.height + 2)])


@st.composite
def general_blts(draw: st.DrawFn) -> dpftrl.GeneralBLT:
    """Decays anywhere in the disc, and scales small enough for the noise to stay bounded."""
    theta, omega = [], []
    for _ in range(draw(st.integers(1, 3))):
        size, turn = draw(floats(0, 1)), draw(st.sampled_from([0.0, 0.3, 1.5, 3.0]))
        theta.append(complex(size * np.cos(turn), size * np.sin(turn)))
        wave = draw(floats(-0.1, 0.1)) if theta[-1].imag else 0.0
        omega.append(complex(draw(floats(-0.1, 0.1)), wave))
    try:
        return dpftrl.GeneralBLT(theta, omega)
    except dpftrl.DpftrlError:
        assume(False)
        raise


EVERY = [
    Family("independent", lambda _: st.just(dpftrl.Independent())),
    Family("blt", lambda _: blts()),
    Family("blt-above-one", lambda _: blts(above_one=True)),
    Family("blt-presets", presets),
    Family("gblt", lambda _: general_blts()),
    Family("sqrt", lambda _: st.just(dpftrl.SquareRoot())),
    Family("band-sqrt", lambda _: st.integers(1, 12).map(dpftrl.SquareRoot)),
    Family("toeplitz-monotone", lambda _: toeplitz(monotone=True)),
    Family("toeplitz-any", lambda _: toeplitz(monotone=False)),
    Family("banded-normalised", normalised_bands, unbounded=False),
    Family("banded-positive", lambda n: banded(n, 0.0), unbounded=False),
    Family("banded-mixed-sign", lambda n: banded(n, -1.0), unbounded=False),
    Family("inv-sqrt", lambda _: st.integers(1, 8).map(dpftrl.BandedInverse.square_root)),
    Family("banded-inverse-mixed-sign", banded_inverses),
    Family("lambda", lambda _: floats(0, 1).map(dpftrl.BandedInverse.one_parameter)),
    Family("tree", lambda _: st.just(dpftrl.BinaryTree())),
    Family("tree-vanilla", lambda _: st.just(dpftrl.BinaryTree(refine=False))),
    Family(
        "tree-full",
        lambda n: st.integers(n, n + 5).map(dpftrl.FullTree),
        unbounded=False,
    ),
    Family("smooth-tree", smooth_trees, unbounded=False),
]


def draw_case(data: DataObject, family: Family, most_rounds: int) -> tuple[Mechanism, int]:
    """Draw a mechanism and a number of rounds that it supports."""
    rounds = data.draw(st.integers(1, most_rounds), label="rounds")
    return data.draw(family.supporting(rounds), label="mechanism"), rounds


class Altered:
    """A mechanism with some methods replaced, for negative controls: the laws must notice it."""

    def __init__(self, original: Mechanism, **replaced: Callable[..., Any]):
        self._original = original
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


# --- Oracles -----------------------------------------------------------------------------------


@st.composite
def participations(draw: st.DrawFn, rounds: int) -> Participation:
    kind = draw(st.sampled_from([MinSep, FixedEpochs]))
    min_sep = draw(st.integers(1, rounds + 1))
    return kind(rounds, min_sep, draw(st.integers(1, rounds)))


@functools.cache
def allowed_patterns(participation: Participation) -> tuple[tuple[int, ...], ...]:
    """Every allowed pattern, listed without the library."""
    rounds, gap = participation.rounds, participation.min_sep
    most = participation.max_participations
    if isinstance(participation, FixedEpochs):
        return tuple(tuple(range(start, rounds, gap))[:most] for start in range(rounds))
    patterns = []
    for size in range(1, most + 1):
        # Removing gap - 1 rounds after each chosen round turns gaps into plain combinations.
        squeezed = rounds - (size - 1) * (gap - 1)
        patterns += [
            tuple(chosen + i * (gap - 1) for i, chosen in enumerate(choice))
            for choice in itertools.combinations(range(squeezed), size)
        ]
    return tuple(patterns)


@functools.lru_cache(maxsize=64)
def signed_patterns(participation: Participation) -> NDArray[np.int8]:
    """One row per pattern and choice of signs; the first sign is +1 without loss of generality."""
    rows = []
    for pattern in allowed_patterns(participation):
        for signs in itertools.product([1, -1], repeat=len(pattern) - 1):
            row = np.zeros(participation.rounds, dtype=np.int8)
            row[list(pattern)] = (1, *signs)
            rows.append(row)
    return np.array(rows)


class Truth(NamedTuple):
    """A lower and an upper bound on the true sensitivity; equal if no Gram entry is negative."""

    attained: float
    bound: float


def true_sensitivity(strategy: Matrix, participation: Participation) -> Truth:
    """The sensitivity by brute force over all patterns, and all signs where signs matter."""
    gram = strategy.T @ strategy
    positive = bool(np.all(gram >= 0))
    sums = [
        float(np.abs(gram[np.ix_(pattern, pattern)]).sum())
        for pattern in allowed_patterns(participation)
    ]
    bound = max(sums) ** 0.5
    if positive:
        return Truth(bound, bound)
    moved = strategy @ signed_patterns(participation).T
    return Truth(float((moved**2).sum(axis=0).max()) ** 0.5, bound)


def row_norms_of_prefix_sums(decoder: Matrix) -> NDArray[np.float64]:
    """Standard deviations of the noise on prefix sums: row norms of A D."""
    prefix = np.tril(np.ones((len(decoder), len(decoder))))
    return np.sqrt(((prefix @ decoder) ** 2).sum(axis=1))
