"""Enclosures contain the 60-digit value, are narrow, and end below the published epsilon."""

import json
import math

import numpy as np
import pytest
import sixty_digits
from mpmath import mp, mpf
from recorded_runs import failed, record_run, warned

from dpftrl import MinSep, account, mechanism
from dpftrl.accounting import Run, guarantee_of
from dpftrl.errors import DpftrlError, InvalidInput, TooLarge
from dpftrl.mechanisms import (
    BLT,
    Banded,
    BandedInverse,
    BinaryTree,
    FullTree,
    GeneralBLT,
    Independent,
    SmoothTree,
    SquareRoot,
    Toeplitz,
)
from dpftrl.participation import FixedEpochs
from dpftrl.plan import Fleet, Plan
from dpftrl.verify.rigorous import NoiseStream, enclose, numbers
from dpftrl.verify.rigorous import check as rigorous_check
from dpftrl.verify.verdict import Check

pytest.importorskip("flint")

FAMILIES = (
    "blt",
    "gblt",
    "sqrt",
    "band-sqrt",
    "toeplitz",
    "banded-inverse",
    "banded",
    "tree",
    "tree-vanilla",
    "tree-full",
    "smooth-tree",
    "independent",
)
MOST_WIDTH = 1e-12
FEW_PATTERNS = 250  # so many are tried at 60 digits in a few milliseconds


def random_mechanism(family, rounds, rng):
    match family:
        case "blt":
            size = int(rng.integers(1, 5))
            decays = 1 - 10 ** rng.uniform(-6, -0.01, size)
            scales = rng.dirichlet(np.ones(size)) * rng.choice([1.0, rng.random(), 1.2])
            return BLT(decays.tolist(), scales.tolist())
        case "gblt":
            size = int(rng.integers(1, 4))
            decays = [complex(*rng.uniform(0, 0.7, 2)) for _ in range(size)]
            return GeneralBLT(decays, [complex(*rng.normal(0, 0.1, 2)) for _ in range(size)])
        case "sqrt":
            return SquareRoot()
        case "band-sqrt":
            return SquareRoot(int(rng.integers(1, rounds + 1)))
        case "toeplitz":
            later = rng.random(int(rng.integers(1, 8)))
            return Toeplitz([1.0, *(np.sort(later)[::-1] if rng.random() < 0.5 else later)])
        case "banded-inverse":
            return BandedInverse([1.0, *(-rng.uniform(-0.1, 0.3, int(rng.integers(1, 5))))])
        case "banded":
            columns = rng.normal(0, 0.5, (int(rng.integers(1, rounds + 1)), rounds))
            columns[0] = 1.0
            columns[np.add.outer(np.arange(len(columns)), np.arange(rounds)) >= rounds] = 0.0
            return Banded(columns if rng.random() < 0.5 else np.abs(columns))
        case "tree-full":
            return FullTree(rounds)
        case "smooth-tree":
            return SmoothTree.for_rounds(rounds)
        case "independent":
            return Independent()
    return BinaryTree(refine=family == "tree")


def random_setting(index):
    """A mechanism, a participation, a noise multiplier, a delta, and the patterns to try."""
    rng = np.random.default_rng((2026, index))
    family = FAMILIES[index % len(FAMILIES)]
    while True:
        # Every third Toeplitz strategy is long: its earliest pattern is the worst, by a theorem.
        is_long = index % 3 == 0 and family in ("blt", "gblt", "sqrt", "band-sqrt", "toeplitz")
        rounds = int(rng.integers(1, 200 if is_long else 14))
        kind = FixedEpochs if rng.random() < 0.25 else MinSep
        participation = kind(rounds, int(rng.integers(1, rounds + 1)), int(rng.integers(1, 7)))
        if not is_long and participation.pattern_count() > FEW_PATTERNS:
            continue
        patterns = [participation.earliest()] if is_long else None
        noise, delta = 10 ** rng.uniform(-0.5, 2.5), 10 ** rng.uniform(-14, -0.3)
        try:
            mech = random_mechanism(family, rounds, rng)
            guarantee = account(mech, participation, noise_multiplier=noise, delta=delta)
        except DpftrlError:
            continue  # refused, such as noise that grows without bound
        return mech, participation, noise, delta, patterns, guarantee


# The first 30 settings of 300 run in every suite; the others take minutes.
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))]
)
def test_enclosures_at_300_random_settings(part):
    with mp.workdps(sixty_digits.DIGITS):
        for index in range(part * 30, part * 30 + 30):
            mech, participation, noise, delta, patterns, guarantee = random_setting(index)
            found = enclose([NoiseStream(mech, participation, noise)], delta, guarantee.epsilon)
            sensitivity = sixty_digits.sensitivity(mech, participation, patterns)
            mu = sixty_digits.mu(mech, participation, noise, patterns)
            epsilon = sixty_digits.epsilon(mu, delta, guarantee.epsilon)
            where = f"{index}: {mech!r}, {participation}, noise {noise}, delta {delta}"
            for enclosure, exact in (
                (found.sensitivities[0], sensitivity),
                (found.mu, mu),
                (found.epsilon, epsilon),
            ):
                assert mpf(enclosure.low) <= exact <= mpf(enclosure.high), where
                assert enclosure.relative_width <= MOST_WIDTH, where
            assert found.epsilon.high <= guarantee.epsilon, where
            assert found.delta.high <= guarantee.total_delta, where
            if mu < 10:
                total = sixty_digits.gaussian_delta(mpf(guarantee.epsilon), mu)
                total += sixty_digits.sampler_delta(mu)
                assert mpf(found.delta.low) <= total <= mpf(found.delta.high), where


@pytest.mark.parametrize(
    ("name", "participation"),
    [
        ("blt-b400", MinSep(10**9, 400, 20)),
        ("blt-b400", MinSep(2052, 342)),
        ("sqrt", MinSep(20_000, 500)),
        ("banded:64", MinSep(1000, 40, 6)),
        ("tree", MinSep(2052, 342)),
        ("tree-full", MinSep(1000, 100, 3)),
        ("smooth-tree", MinSep(2000, 1500)),
        ("inv-sqrt:16", MinSep(2052, 342)),
        ("gblt:0.9@0.2,0.5+0.1j@0.05", MinSep(2052, 342)),
    ],
)
def test_published_epsilon_is_not_below_the_enclosure_at_real_sizes(name, participation):
    mech = mechanism(name, participation)
    guarantee = account(mech, participation, noise_multiplier=8.0, delta=1e-8)
    found = enclose([NoiseStream(mech, participation, 8.0)], 1e-8, guarantee.epsilon)
    assert found.epsilon.relative_width <= MOST_WIDTH
    assert found.epsilon.high <= guarantee.epsilon <= found.epsilon.high * (1 + 1e-3)
    (sensitivity,) = found.sensitivities
    assert math.isclose(sensitivity.high, guarantee.runs[0].sensitivity.value, rel_tol=1e-12)


def test_cancelling_scales_of_a_general_blt_do_not_widen_the_enclosure():
    mech = GeneralBLT([0.9, 0.899999], [1000.0, -999.9])
    participation = MinSep(300, 40)
    guarantee = account(mech, participation, noise_multiplier=50.0, delta=1e-6)
    found = enclose([NoiseStream(mech, participation, 50.0)], 1e-6, guarantee.epsilon)
    assert found.epsilon.relative_width <= MOST_WIDTH
    assert found.epsilon.high <= guarantee.epsilon


# Decays, scales and rounds at which large scales cancel: powers of the feedback matrix, computed by
# doubling, would lose digits of the gain there.
CANCELLING = [
    ([0.9, 0.899999], [1000.0, -999.9], 300),
    ([0.9520582470002353, 0.95205835132011], [-525.1947579345288, 525.2103759671621], 256),
    ([0.9998177286220011, 0.9998180594028354], [-142.75429209429416, 143.19203479040775], 1024),
]


@pytest.mark.parametrize(("decays", "scales", "rounds"), CANCELLING)
def test_the_gain_of_rounding_keeps_its_digits_where_scales_cancel(decays, scales, rounds):
    mech = GeneralBLT(decays, scales)
    with mp.workdps(sixty_digits.DIGITS):
        exact = sixty_digits.rounding_gain(mech, rounds) / sixty_digits.MARGIN
        share = mech.rounding_gain(rounds) / (exact * mpf("1.001"))
    assert abs(share - 1) < 1e-6


def test_streams_and_devices_compose_by_their_squares():
    streams = [
        NoiseStream(mechanism("blt-b400"), MinSep(100, 20), 6.0),
        NoiseStream(mechanism("tree"), MinSep(64, 16), 9.0),
    ]
    runs = [Run.of(*stream[:3]) for stream in streams]
    guarantee = guarantee_of(runs, 1e-7).for_devices(2)
    found = enclose(streams, 1e-7, guarantee.epsilon, devices=2)
    assert found.mu.relative_width <= MOST_WIDTH
    assert math.isclose(found.mu.high, guarantee.mu, rel_tol=1e-8)
    assert found.epsilon.high <= guarantee.epsilon <= found.epsilon.high * (1 + 1e-6)


def test_version_1_has_neither_rounding_nor_the_sampler():
    run = Run.of(mechanism("blt-b400"), MinSep(100, 20), 6.0, "float32")
    guarantee = guarantee_of([run], 1e-7)
    stream = NoiseStream(run.mechanism, run.participation, 6.0, "float32")
    found = enclose([stream], 1e-7, guarantee.epsilon)
    assert found.epsilon.high <= guarantee.epsilon <= found.epsilon.high * (1 + 1e-11)


def test_too_small_an_epsilon_is_below_the_enclosure():
    """The negative control: numbers that are wrong in the 12th digit are recognized."""
    mech, participation = mechanism("sqrt"), MinSep(100, 20)
    guarantee = account(mech, participation, noise_multiplier=6.0, delta=1e-7)
    found = enclose([NoiseStream(mech, participation, 6.0)], 1e-7, guarantee.epsilon)
    assert guarantee.epsilon * (1 - 4e-12) < found.epsilon.low
    more_noise = enclose([NoiseStream(mech, participation, 6.0 * (1 + 1e-11))], 1e-7, 1.0)
    assert more_noise.epsilon.high < found.epsilon.low


def test_an_enclosure_needs_possible_numbers():
    stream = NoiseStream(mechanism("blt-b400"), MinSep(100, 20), 6.0)
    for streams, delta, epsilon in (([], 1e-6, 1.0), ([stream], 1.0, 1.0), ([stream], 0.1, -1.0)):
        with pytest.raises(InvalidInput, match="an enclosure needs"):
            enclose(streams, delta, epsilon)


def test_what_would_take_too_long_is_refused():
    mech = SquareRoot()
    with pytest.raises(TooLarge, match="interval arithmetic would take"):
        enclose([NoiseStream(mech, MinSep(10_000_000, 1000), 6.0)], 1e-6, 1.0)


def test_without_python_flint_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(numbers, "is_installed", lambda: False)
    stream = NoiseStream(mechanism("blt-b400"), MinSep(100, 20), 6.0)
    with pytest.raises(InvalidInput, match=r"pip install 'dpftrl\[audit\]'"):
        enclose([stream], 1e-6, 1.0)


def test_verify_encloses_the_epsilon_of_a_run(tmp_path):
    verdict = record_run(tmp_path, 5).verify()
    (check,) = (check for check in verdict.checks if check.name == "rigorous")
    assert check.outcome == "passed"
    assert "by interval arithmetic, at most the stated" in check.text


def test_verify_fails_for_an_epsilon_that_is_too_small_by_less_than_its_other_checks_see(tmp_path):
    clients = MinSep(6, 2)
    plan = Plan(Fleet(population=24, report_goal=3), account(mechanism("sqrt"), clients, 2.0, 1e-6))
    run = record_run(tmp_path, 5, plan)
    path = run.folder / "guarantee.json"
    content = json.loads(path.read_text())
    content["epsilon"] *= 1 - 1e-11
    path.write_text(json.dumps(content))
    failures = failed(run.verify())
    assert set(failures) == {"rigorous"}
    assert "is not above all numbers that the true one can be" in failures["rigorous"]


def test_verify_without_python_flint_says_what_to_install_and_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(rigorous_check, "is_installed", lambda: False)
    verdict = record_run(tmp_path, 2).verify()
    (check,) = (check for check in verdict.checks if check.name == "rigorous")
    assert check == Check("rigorous", "skipped", "not checked rigorously: install dpftrl[audit]")
    assert verdict.passed
    assert warned(verdict) == {}


def test_a_computation_that_takes_too_long_is_skipped():
    stream = NoiseStream(SquareRoot(), MinSep(10_000_000, 1000), 6.0)
    check = rigorous_check.check_epsilon([stream], 1e-6, 1.0)
    assert isinstance(check, Check)
    assert check.outcome == "skipped"
    assert check.text.startswith("not checked rigorously: interval arithmetic would take")
