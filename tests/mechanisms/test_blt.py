"""Closed forms of BLTs against plain recursions, in float64 and in fifty digits."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from conformance import blts
from dpftrl import BLT, FixedEpochs, MinSep, mechanism
from dpftrl.errors import InvalidInput

# --- Oracles -----------------------------------------------------------------------------------


def dense_coefficients(theta, omega, rounds: int) -> np.ndarray:
    """c_0 = 1 and c_i = sum_j omega_j theta_j^(i-1), a power at a time."""
    c = [1.0]
    powers = np.ones(len(theta))
    for _ in range(rounds - 1):
        c.append(float(np.dot(omega, powers)))
        powers = powers * np.array(theta)
    return np.array(c)


def dense_prefix(c: np.ndarray) -> np.ndarray:
    """B = A C^-1 has the coefficients of ones / c: forward substitution."""
    b = np.zeros(len(c))
    backwards = c[::-1].copy()
    for i in range(len(c)):
        b[i] = 1.0 - backwards[len(c) - 1 - i : len(c) - 1] @ b[:i]
    return b


def dense_shifts(c: np.ndarray, min_sep: int, most: int) -> np.ndarray:
    total = np.zeros(len(c))
    for k in range(most):
        if k * min_sep < len(c):
            total[k * min_sep :] += c[: len(c) - k * min_sep]
    return total


def dense_loss(mech: BLT, participation) -> tuple[float, float, float]:
    """Max error, RMS error and sensitivity, with one number a round."""
    c = dense_coefficients(mech.theta, mech.omega, participation.rounds)
    squares = np.cumsum(dense_prefix(c) ** 2)
    shifts = dense_shifts(c, participation.min_sep, participation.max_participations)
    return math.sqrt(squares[-1]), math.sqrt(squares.mean()), float(np.linalg.norm(shifts))


def digits_loss(mech: BLT, participation) -> tuple:
    """The same in fifty digits, by running the buffers."""
    with mpmath.workdps(50):
        theta = [mpmath.mpf(x) for x in mech.theta]
        omega = [mpmath.mpf(x) for x in mech.omega]
        rounds, gap = participation.rounds, participation.min_sep
        buffers = [mpmath.mpf(0)] * len(theta)
        running = weighted = mpmath.mpf(0)
        powers, c = [mpmath.mpf(1)] * len(theta), [mpmath.mpf(1)]
        for i in range(rounds):
            b = 1 - sum(w * x for w, x in zip(omega, buffers, strict=True))
            buffers = [q * x + b for q, x in zip(theta, buffers, strict=True)]
            running += b * b
            weighted += (rounds - i) * b * b
            c.append(sum(w * x for w, x in zip(omega, powers, strict=True)))
            powers = [q * x for q, x in zip(theta, powers, strict=True)]
        moved = mpmath.mpf(0)
        for t in range(rounds):
            starts = range(0, min(t, (participation.max_participations - 1) * gap) + 1, gap)
            moved += sum(c[t - start] for start in starts) ** 2
        return mpmath.sqrt(running), mpmath.sqrt(weighted / rounds), mpmath.sqrt(moved)


def check_loss(mech: BLT, participation, wanted, rel: float) -> None:
    found = mech.error_report(participation)
    assert found.max_error == pytest.approx(float(wanted[0]), rel=rel)
    assert found.rms_error == pytest.approx(float(wanted[1]), rel=rel)
    assert found.sensitivity.lower_bound == pytest.approx(float(wanted[2]), rel=rel)


# --- Closed forms ------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    mech=blts(),
    rounds=st.one_of(st.integers(1, 60), st.integers(61, 1000)),
    gap=st.integers(1, 400),
    most=st.integers(1, 50),
    kind=st.sampled_from([MinSep, FixedEpochs]),
)
def test_closed_forms_are_the_dense_computation(mech, rounds, gap, most, kind):
    participation = kind(rounds, gap, most)
    assert mech.sensitivity(participation).kind == "exact"
    check_loss(mech, participation, dense_loss(mech, participation), rel=1e-9)


@settings(max_examples=8)
@given(mech=blts(), gap=st.integers(1, 2000), most=st.integers(1, 100))
def test_closed_forms_are_the_dense_computation_at_4096_rounds(mech, gap, most):
    participation = MinSep(4096, gap, most)
    check_loss(mech, participation, dense_loss(mech, participation), rel=1e-9)


@given(mech=blts(above_one=True), rounds=st.integers(1, 200), gap=st.integers(1, 50))
def test_scales_that_sum_to_more_than_one_get_a_bound(mech, rounds, gap):
    participation = MinSep(rounds, gap)
    wanted = dense_loss(mech, participation)
    check_loss(mech, participation, wanted, rel=1e-9)
    found = mech.sensitivity(participation)
    c = dense_coefficients(mech.theta, mech.omega, rounds)
    majorant = np.maximum.accumulate(c[::-1])[::-1]
    most = participation.max_participations
    bound = float(np.linalg.norm(dense_shifts(majorant, gap, most)))
    assert wanted[2] * (1 - 1e-12) <= found.value
    # With one round c_1 plays no part, so that either number is a bound.
    assert found.value == pytest.approx(bound, rel=1e-9) or rounds == 1


NASTY = {
    "one buffer": BLT([0.5], [0.5]),
    "close to one": BLT([1 - 1e-13], [1e-7]),
    "one and nearly one": BLT([1.0, 1 - 1e-13, 0.3], [1e-5, 1e-3, 0.2]),
    "never decays": BLT([1.0], [1.0]),
    "nearly coinciding": BLT([0.9, 0.9 + 1e-11, 0.9 - 1e-11, 0.2], [0.1, 0.2, 0.05, 0.1]),
    "one bit apart": BLT([0.75, math.nextafter(0.75, 1)], [0.1, 0.2]),
    "one bit apart and close to one": BLT([1 - 2**-53, 1 - 2**-52], [0.1, 0.2]),
    "coinciding": BLT([0.9, 0.9, 0.9, 0.2, 0.2], [0.1, 0.2, 0.05, 0.1, 0.1]),
    "idle buffers": BLT([0.9, 0.5, 0.1], [0.0, 0.3, 0.0]),
    "all idle": BLT([0.9, 0.5], [0.0, 0.0]),
    "only the last round": BLT([0.0], [1.0]),
    "negative inverse decay": BLT([0.3], [0.9]),
    "inverse decay close to -1": BLT([1e-3, 0.0], [0.5, 0.4999]),
    # 1 - theta_hat^2 = 1e-8 cannot be had by subtracting numbers near 2 from one another.
    "inverse decay within 1e-8 of -1": BLT([1.08e-8], [1.0]),
    "inverse decay within 1e-6 of -1": BLT([1e-6], [1.0]),
    "inverse decay within 1e-12 of -1": BLT([1e-12], [1.0]),
    "tiny scales": BLT([0.99, 0.5, 0.0], [1e-300, 1e-40, 1e-17]),
    "decays below the rounding of one": BLT([0.0, 1e-18, 1e-300], [0.2, 0.3, 0.1]),
    "decays that differ below the rounding of one": BLT([0.1, 0.1 + 1.4e-17], [0.2, 0.3]),
    "eight buffers": BLT(
        [1 - 10.0**-k for k in range(1, 9)], [0.3, 0.2, 0.1, 0.05, 0.03, 0.01, 1e-3, 1e-4]
    ),
    "b = 100 of the appendix": mechanism("blt-b100"),
    "b = 400 of the appendix": mechanism("blt-b400"),
}


@pytest.mark.parametrize("name", NASTY)
def test_closed_forms_keep_ten_digits_where_floats_are_hard(name: str):
    for participation in (MinSep(300, 7, 20), MinSep(64, 1), MinSep(1, 1)):
        wanted = digits_loss(NASTY[name], participation)
        check_loss(NASTY[name], participation, wanted, rel=1e-10)


@pytest.mark.parametrize("name", NASTY)
def test_coefficients_keep_ten_digits_where_floats_are_hard(name: str):
    mech = NASTY[name]
    with mpmath.workdps(50):
        theta, omega = map(mpmath.mpf, mech.theta), [mpmath.mpf(x) for x in mech.omega]
        theta = list(theta)
        buffers, wanted = [mpmath.mpf(0)] * len(theta), []
        for i in range(40):  # C^-1 applied to the first unit vector
            noise = (1 if i == 0 else 0) - sum(w * x for w, x in zip(omega, buffers, strict=True))
            buffers = [q * x + noise for q, x in zip(theta, buffers, strict=True)]
            wanted.append(noise)
    inverse = [float(x) for x in wanted]
    np.testing.assert_allclose(mech.inverse_coefficients(40), inverse, rtol=1e-10, atol=1e-14)
    np.testing.assert_allclose(
        mech.prefix_coefficients(40), [float(sum(wanted[: i + 1])) for i in range(40)], atol=1e-13
    )


def test_a_digit_lost_would_be_noticed():
    """The control: a decay that is wrong in its tenth digit does not pass."""
    participation = MinSep(300, 7, 20)
    wrong = BLT([0.9 + 1e-9, 0.5], [0.2, 0.2])
    wanted = digits_loss(BLT([0.9, 0.5], [0.2, 0.2]), participation)
    with pytest.raises(AssertionError):
        check_loss(wrong, participation, wanted, rel=1e-10)


# --- A thousand million rounds ----------------------------------------------------------------


def far_sensitivity(mech: BLT, participation):
    """Segment by segment, in sixty digits: within one the shifts add up to d exponentials."""
    theta, omega = [mpmath.mpf(q) for q in mech.theta], [mpmath.mpf(w) for w in mech.omega]
    rounds, gap = participation.rounds, participation.min_sep
    most = participation.max_participations
    carried = [mpmath.mpf(0)] * len(theta)  # what earlier shifts add to round s * gap, by buffer
    total = mpmath.mpf(0)
    long = gap - 1, rounds - (most - 1) * gap - 1
    powers = {length: [q**length for q in theta] for length in long}
    pairs = [(i, j) for i in range(len(theta)) for j in range(len(theta))]

    def series(i: int, j: int, terms: int):
        q = theta[i] * theta[j]
        return mpmath.mpf(terms) if q == 1 else (1 - q**terms) / (1 - q)

    sums = {length: {(i, j): series(i, j, length) for i, j in pairs} for length in long}
    for s in range(most):
        length = gap - 1 if s < most - 1 else rounds - (most - 1) * gap - 1
        total += (1 + sum(carried)) ** 2
        start = [x * q + w for x, q, w in zip(carried, theta, omega, strict=True)]
        total += sum(start[i] * start[j] * sums[length][i, j] for i, j in pairs)
        carried = [x * q for x, q in zip(start, powers[length], strict=True)]
    return mpmath.sqrt(total)


def far_errors(mech: BLT, rounds: int):
    """b_i is a sum of d + 1 exponentials, whose weights follow from its first d + 1 values."""
    theta, omega = [mpmath.mpf(q) for q in mech.theta], [mpmath.mpf(w) for w in mech.omega]
    size = len(theta)
    matrix = mpmath.matrix(size, size)
    for i in range(size):
        for j in range(size):
            matrix[i, j] = (theta[i] if i == j else 0) - mpmath.sqrt(omega[i] * omega[j])
    decays = [mpmath.mpf(1), *mpmath.eigsy(matrix, eigvals_only=True)]
    first, buffers = [], [mpmath.mpf(0)] * size
    for _ in decays:
        first.append(1 - sum(w * x for w, x in zip(omega, buffers, strict=True)))
        buffers = [q * x + first[-1] for q, x in zip(theta, buffers, strict=True)]
    vandermonde = mpmath.matrix([[q**i for q in decays] for i in range(size + 1)])
    weights = mpmath.lu_solve(vandermonde, mpmath.matrix(first))
    last = average = mpmath.mpf(0)
    for i, p in enumerate(decays):
        for j, q in enumerate(decays):
            x, weight = p * q, weights[i] * weights[j]
            if x == 1:
                plain, sloped = mpmath.mpf(rounds), mpmath.mpf(rounds) * (rounds + 1) / 2
            else:
                plain = (1 - x**rounds) / (1 - x)
                sloped = (rounds - x * plain) / (1 - x)
            last += weight * plain
            average += weight * sloped
    return mpmath.sqrt(last), mpmath.sqrt(average / rounds)


FAR = {
    "b = 400 of the appendix": mechanism("blt-b400"),
    "b = 1000 of the appendix": mechanism("blt-b1000"),
    "nearly coinciding": BLT([0.999, 0.999 + 1e-11, 0.2], [0.001, 0.002, 0.3]),
    "never decays": BLT([1.0, 0.9], [1e-6, 0.3]),
    "negative inverse decay": BLT([0.999999, 0.1], [1e-4, 0.8]),
    "slow": BLT([1 - 1e-13, 1 - 1e-9, 1 - 1e-5], [1e-9, 1e-5, 1e-2]),
}


@pytest.mark.parametrize("most", [1, 2, 37, 1000])
@pytest.mark.parametrize("name", FAR)
def test_sensitivity_at_a_thousand_million_rounds(name: str, most: int):
    with mpmath.workdps(60):
        for gap in (10**6, 999_983, 10**9 // most):
            participation = MinSep(10**9, gap, most)
            wanted = far_sensitivity(FAR[name], participation)
            assert FAR[name].sensitivity(participation).value == pytest.approx(
                float(wanted), rel=1e-9
            )


@pytest.mark.parametrize("rounds", [10**3, 10**6, 10**9])
@pytest.mark.parametrize("name", FAR)
def test_errors_at_a_thousand_million_rounds(name: str, rounds: int):
    with mpmath.workdps(100):
        last, average = far_errors(FAR[name], rounds)
    assert FAR[name].max_error(rounds) == pytest.approx(float(last), rel=1e-9)
    assert FAR[name].rms_error(rounds) == pytest.approx(float(average), rel=1e-9)


@pytest.mark.parametrize("name", FAR)
def test_oracles_for_many_rounds_agree_with_dense_oracles(name: str):
    participation = MinSep(200, 9, 11)
    near = digits_loss(FAR[name], participation)
    with mpmath.workdps(100):
        far = (*far_errors(FAR[name], 200), far_sensitivity(FAR[name], participation))
        assert all(abs(a / b - 1) < 1e-30 for a, b in zip(near, far, strict=True))


# --- Values printed elsewhere ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "participation", "max_loss", "rms_loss", "sensitivity", "rel"),
    [
        ("blt-b100", MinSep(2000, 100, 10), 18.847, 15.248, 7.68614, 3e-5),
        ("blt-b400", MinSep(4000, 400, 5), 10.67219, 9.74017, 4.88313, 1e-6),
        ("blt-b1000", MinSep(4000, 1000, 2), 5.68435, 5.33955, 2.83343, 2e-6),
    ],
)
def test_the_appendix_has_the_values_of_independent_implementations(
    name, participation, max_loss, rms_loss, sensitivity, rel
):
    """To the digits printed, and so within 1e-5."""
    loss = mechanism(name).error_report(participation)
    assert loss.max_loss == pytest.approx(max_loss, rel=rel)
    assert loss.rms_loss == pytest.approx(rms_loss, rel=rel)
    assert loss.sensitivity.value == pytest.approx(sensitivity, abs=5e-6)
    assert loss.sensitivity.kind == "exact"
    check_loss(mechanism(name), participation, dense_loss(mechanism(name), participation), 1e-9)


def test_a_negative_inverse_decay_has_the_smaller_loss_for_a_small_min_sep():
    """At (100, 2, 50) one buffer reaches RMS 36.639 with theta_hat = -0.76, and 38.085 at best
    with a positive one."""
    participation = MinSep(100, 2, 50)
    decays = np.linspace(0.001, 0.2, 60)
    negative = min(
        BLT.from_decays([q], [-0.76]).error_report(participation).rms_loss for q in decays
    )
    assert negative == pytest.approx(36.639, abs=0.05)
    assert negative < 38.085


# --- The inverse -------------------------------------------------------------------------------


@st.composite
def separate_blts(draw) -> BLT:
    """Decays apart enough, and scales large enough, for numpy's eigenvalues to be an oracle."""
    theta = sorted(draw(st.sets(st.integers(0, 1000), min_size=1, max_size=8)), reverse=True)
    raw = np.array([draw(st.integers(1, 100)) for _ in theta], dtype=float)
    return BLT([q / 1000 for q in theta], (raw / raw.sum() * draw(st.floats(0.1, 1))).tolist())


@given(mech=separate_blts())
def test_inverse_decays_are_eigenvalues_and_interlace(mech):
    roots = np.sqrt(mech.omega)
    wanted = np.linalg.eigvalsh(np.diag(mech.theta) - np.outer(roots, roots))[::-1]
    theta_hat, omega_hat = mech.inverse_parameters()
    np.testing.assert_allclose(theta_hat, wanted, atol=1e-13)
    chain = np.ravel(list(zip(mech.theta, theta_hat, strict=True)))
    assert np.all(np.diff(chain) < 0)
    assert np.all(omega_hat < 0)
    # The traces of C and of its inverse: sum(theta) - sum(theta_hat) = sum(omega).
    assert sum(mech.theta) - sum(theta_hat) == pytest.approx(sum(mech.omega), rel=1e-12)


@given(mech=separate_blts())
def test_the_inverse_parameters_make_the_inverse(mech):
    theta_hat, omega_hat = mech.inverse_parameters()
    c_hat = dense_coefficients(theta_hat, omega_hat, 30)
    c = dense_coefficients(mech.theta, mech.omega, 30)
    np.testing.assert_allclose(np.convolve(c, c_hat)[:30], np.eye(1, 30)[0], atol=1e-12)


@given(mech=separate_blts())
def test_from_decays_gives_back_the_blt(mech):
    theta_hat, _ = mech.inverse_parameters()
    back = BLT.from_decays(mech.theta, theta_hat)
    assert back.theta == mech.theta
    np.testing.assert_allclose(back.omega, mech.omega, rtol=1e-7, atol=1e-13)


@given(
    steps=st.lists(st.floats(1e-4, 1), min_size=2, max_size=16).filter(lambda s: len(s) % 2 == 0),
    top=st.floats(0.01, 1),
)
@example(steps=[1e-4, 1.0], top=1.0)
def test_from_decays_keeps_the_decays_it_was_given(steps, top):
    chain = top - np.cumsum([0.0, *steps[1:]]) / sum(steps) * top
    assume(np.all(np.diff(chain) < 0))
    theta, theta_hat = chain[::2], chain[1::2]
    mech = BLT.from_decays(theta, theta_hat)
    np.testing.assert_allclose(mech.inverse_parameters()[0], theta_hat, atol=1e-11)
    with mpmath.workdps(50):
        for i, q in enumerate(map(mpmath.mpf, theta)):
            above = mpmath.fprod(q - mpmath.mpf(p) for p in theta_hat)
            below = mpmath.fprod(q - mpmath.mpf(p) for j, p in enumerate(theta) if j != i)
            assert mech.omega[i] == pytest.approx(float(above / below), rel=1e-12)


@pytest.mark.parametrize(
    ("theta", "theta_hat"),
    [
        ([0.5], [0.5]),
        ([0.5], [0.6]),
        ([0.9, 0.9], [0.8, 0.1]),
        ([0.9, 0.5], [0.7, 0.6]),
        ([0.5, 0.9], [0.8, 0.1]),
        ([0.9, 0.5], [0.7]),
        ([0.9], [0.7, 0.5]),
        ([0.9], []),
        ([], []),
        ([0.9], [float("nan")]),
        ([1.1], [0.5]),
        ([0.9], [-1.5]),
        (["0.9"], [0.5]),
        (None, [0.5]),
    ],
)
def test_decays_that_do_not_interlace_are_refused(theta, theta_hat):
    with pytest.raises(InvalidInput):
        BLT.from_decays(theta, theta_hat)


# --- Sanity ------------------------------------------------------------------------------------


@given(
    mech=blts(), rounds=st.integers(1, 10**6), gap=st.integers(1, 10**6), most=st.integers(1, 99)
)
def test_sensitivity_grows_with_participations_and_falls_with_separation(mech, rounds, gap, most):
    here = mech.sensitivity(MinSep(rounds, gap, most)).value
    assert here <= mech.sensitivity(MinSep(rounds, gap, most + 1)).value * (1 + 1e-12)
    assert here >= mech.sensitivity(MinSep(rounds, gap + 1, most)).value * (1 - 1e-12)
    assert here <= mech.sensitivity(MinSep(rounds + 1, gap, most)).value * (1 + 1e-12)


@given(mech=blts(), rounds=st.integers(1, 10**12))
def test_errors_grow_with_rounds_and_stay_in_order(mech, rounds):
    assert mech.max_error(rounds) <= mech.max_error(rounds + 1) * (1 + 1e-12)
    assert mech.rms_error(rounds) <= mech.max_error(rounds) * (1 + 1e-12)
    assert mech.max_error(1) == pytest.approx(1, rel=1e-12)
    assert mech.rms_error(1) == pytest.approx(1, rel=1e-12)


@given(mech=blts(), seed=st.integers(0, 2**32))
def test_the_order_of_the_buffers_does_not_matter(mech, seed):
    # At a sum of 1 the last bit, and with it the limit, depends on the order of adding.
    assume(math.fsum(mech.omega) < 1 - 1e-14)
    order = np.random.default_rng(seed).permutation(mech.buffers)
    other = BLT([mech.theta[i] for i in order], [mech.omega[i] for i in order])
    participation = MinSep(500, 13, 20)
    one, two = mech.error_report(participation), other.error_report(participation)
    assert one.max_loss == pytest.approx(two.max_loss, rel=1e-12)
    assert one.rms_loss == pytest.approx(two.rms_loss, rel=1e-12)


@pytest.mark.parametrize(
    ("theta", "omega"),
    [
        ([], []),
        ([0.5], []),
        ([0.5, 0.4], [0.5]),
        ([1.5], [0.1]),
        ([-0.1], [0.1]),
        ([0.5], [-0.1]),
        ([0.5], [1.6]),
        ([float("nan")], [0.1]),
        ([0.5], [float("nan")]),
        ([0.5], [float("inf")]),
        ("0.5", [0.1]),
        (["0.5"], [0.1]),
        ([True], [0.1]),
        ([None], [0.1]),
        (0.5, [0.1]),
        ([[0.5]], [0.1]),
        ([1j], [0.1]),
        ([10**400], [0.1]),
        ({0.5: 1}, [0.1]),
        (np.array([[0.5]]), [0.1]),
        (np.array(0.5), [0.1]),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_invalid_blt_parameters_are_refused(theta, omega):
    with pytest.raises(InvalidInput) as refused:
        BLT(theta, omega)
    assert "\n" not in str(refused.value)
