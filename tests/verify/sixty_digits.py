"""The numbers of a guarantee at 60 digits, by definition and brute force, with mpmath.

Nothing here is shared with the library or with `dpftrl.verify.rigorous`: strategies are written out
as matrices, every pattern is tried, the decays of an inverse BLT are eigenvalues, the sampler's
part of delta is an integral over an angle, and epsilon is found by a bracketing solver.
"""

from collections.abc import Sequence
from functools import cache

from mpmath import mp, mpc, mpf

from dpftrl import Mechanism
from dpftrl.participation import Participation

DIGITS = 75
MARGIN = mpf(1.0005)
Matrix = list[list[mpf]]


def coefficients(mech: Mechanism, rounds: int) -> list[mpf] | None:
    """The first column of C from the definition of the family; None if C is not Toeplitz."""
    given = mech.parameters()
    match mech.family:
        case "independent":
            return [mpf(1)]
        case "blt":
            pairs = [(mpf(q), mpf(w)) for q, w in zip(given["theta"], given["omega"], strict=True)]
            return [mpf(1)] + [sum(w * q**i for q, w in pairs) for i in range(rounds - 1)]
        case "gblt":
            terms = [
                (mpc(*q), mpc(*w), 1 if q[1] == 0 else 2)
                for q, w in zip(given["theta"], given["omega"], strict=True)
            ]
            later = [sum(n * (w * q**i).real for q, w, n in terms) for i in range(rounds - 1)]
            return [mpf(1), *later]
        case "sqrt":
            kept = min(rounds, given["bands"] or rounds)
            return [mp.binomial(mpf(-1) / 2, i) * (-1) ** i for i in range(kept)]
        case "toeplitz":
            return [mpf(c) for c in given["coefficients"][:rounds]]
        case "banded-inverse":
            inverse = [mpf(c) for c in given["inverse_coefficients"]]
            column = mp.matrix(rounds, 1)
            column[0] = 1
            lower = mp.matrix(rounds, rounds)
            for i in range(rounds):
                for j in range(max(0, i - len(inverse) + 1), i + 1):
                    lower[i, j] = inverse[i - j]
            return list(mp.lu_solve(lower, column))
    return None


def strategy_columns(mech: Mechanism, participation: Participation) -> list[list[mpf]]:
    """The columns of the matrix whose sensitivity the mechanism states.

    That is C, or the Toeplitz matrix of the smallest non-increasing sequence above |c|, if columns
    of one client overlap. (For a BLT whose scales sum to more than 1, it is always the latter.)
    """
    rounds = participation.rounds
    c = coefficients(mech, rounds)
    if c is not None:
        apart = len(c) <= participation.min_sep or participation.max_participations == 1
        if mech.family == "blt" and sum(map(mpf, mech.parameters()["omega"])) > 1:
            first = sum(map(mpf, mech.parameters()["omega"]))
            c, apart = [first, *c[1:]], False
        if not apart:
            c = [max(abs(later) for later in c[i:]) for i in range(len(c))]
        return [
            [mpf(0)] * start + (c + [mpf(0)] * rounds)[: rounds - start] for start in range(rounds)
        ]
    if mech.family == "banded":
        entries = mech.parameters()["columns"]
        columns = [[mpf(0)] * rounds for _ in range(rounds)]
        for p, band in enumerate(entries):
            for j in range(rounds - p):
                columns[j][j + p] = mpf(float(band[j]))
        return columns
    tree = tree_rows(mech, rounds)
    return [[mpf(row[t]) for row in tree] for t in range(rounds)]


def tree_rows(mech: Mechanism, rounds: int) -> list[list[int]]:
    """Rows of zeros and ones: the blocks of a binary tree, or the nodes in use of a smooth one."""
    if mech.family in ("tree", "tree-full"):
        sizes = [2**level for level in range(rounds.bit_length())]
        starts = [(s, size) for size in sizes for s in range(0, rounds, size) if s + size <= rounds]
        return [[int(start <= t < start + size) for t in range(rounds)] for start, size in starts]
    height = mech.parameters()["height"]
    balanced = [leaf for leaf in range(2**height) if leaf.bit_count() == height // 2]
    used = {
        (leaf >> digit) - 1 << digit | digit << height
        for leaf in balanced[1 : rounds + 1]
        for digit in range(height)
        if leaf >> digit & 1
    }
    rows = []
    for node in sorted(used):
        digit, prefix = node >> height, (node & (2**height - 1)) >> (node >> height)
        rows.append([int(leaf >> digit == prefix) for leaf in balanced[:rounds]])
    return rows


def sensitivity(mech: Mechanism, participation: Participation, patterns=None) -> mpf:
    """The largest root of the sum of |G| over the pairs of a pattern, over all patterns."""
    columns = strategy_columns(mech, participation)
    gram: dict[tuple[int, int], mpf] = {}

    def size(i: int, j: int) -> mpf:
        if (i, j) not in gram:
            gram[i, j] = abs(mp.fdot(columns[i], columns[j]))
        return gram[i, j]

    return max(
        mp.sqrt(sum(size(i, j) * (1 if i == j else 2) for i in p for j in p if i <= j))
        for p in (participation.patterns() if patterns is None else patterns)
    )


def rounding_gain(mech: Mechanism, rounds: int) -> mpf:
    """The gain of the theorem on rounding in the noise buffers."""
    given = mech.parameters()
    if rounds == 1:
        return mpf(0)
    if mech.family == "blt":
        return _blt_gain(given["theta"], given["omega"], rounds)
    if mech.family == "gblt":
        return _general_gain(given["theta"], given["omega"], rounds)
    if mech.family == "tree" and given["refine"]:
        return _tree_gain(rounds)
    return mpf(0)


def _blt_gain(theta: Sequence[float], omega: Sequence[float], rounds: int) -> mpf:
    merged: dict[float, mpf] = {}
    for decay, scale in zip(theta, omega, strict=True):
        if scale:
            merged[1 - decay] = merged.get(1 - decay, mpf(0)) + mpf(scale)
    poles = [(1 - mpf(rate), scale) for rate, scale in merged.items()]
    # The decays of the inverse are the eigenvalues of diag(theta) minus a matrix of rank one.
    roots = [mp.sqrt(scale) for _, scale in poles]
    feedback = mp.matrix(len(poles), len(poles))
    for i, (decay, _) in enumerate(poles):
        feedback[i, i] = decay
        for j in range(len(poles)):
            feedback[i, j] -= roots[i] * roots[j]
    zeros = list(mp.eigsy(feedback, eigvals_only=True))
    gain = mpf(0)
    for j, (decay, scale) in enumerate(poles):
        content = mpf(0)
        for k, zero in enumerate(zeros):
            above = mp.fprod(zero - q for m, (q, _) in enumerate(poles) if m != j)
            below = mp.fprod(zero - other for m, other in enumerate(zeros) if m != k)
            content += abs(above / below) * mp.fsum(abs(zero) ** i for i in range(rounds))
        gain += scale * mp.fsum(abs(decay) ** i for i in range(rounds - 1)) * content
    return mp.sqrt(rounds) * gain * MARGIN


def _general_gain(theta, omega, rounds: int) -> mpf:
    blocks = [(q, w) for q, w in zip(theta, omega, strict=True)]
    size = sum(1 if q[1] == 0 else 2 for q, _ in blocks)
    system, inlet, outlet = mp.matrix(size, size), mp.matrix(size, 1), mp.matrix(size, 1)
    place = 0
    for q, w in blocks:
        inlet[place], system[place, place] = 1, q[0]
        if q[1] == 0:
            outlet[place] = w[0]
            place += 1
        else:
            system[place + 1, place + 1] = q[0]
            system[place, place + 1], system[place + 1, place] = -mpf(q[1]), q[1]
            outlet[place], outlet[place + 1] = 2 * mpf(w[0]), -2 * mpf(w[1])
            place += 2
    feedback = system - inlet * outlet.T

    def absolute_sum(matrix, vector, terms: int) -> list[mpf]:
        total = [mpf(0)] * size
        for _ in range(terms):
            total = [t + abs(vector[i]) for i, t in enumerate(total)]
            vector = matrix * vector
        return total

    content = absolute_sum(feedback, inlet, rounds)
    kept = absolute_sum(system.T, outlet, rounds - 1)
    of_noise = 1 + sum(abs(outlet[i]) * content[i] for i in range(size))
    errors = [
        (size + 1)
        * (sum(abs(feedback[i, j]) * content[j] for j in range(size)) + inlet[i] * (1 + of_noise))
        for i in range(size)
    ]
    return mp.sqrt(rounds) * sum(k * e for k, e in zip(kept, errors, strict=True)) * MARGIN


def _tree_gain(rounds: int) -> mpf:
    def own(level: int) -> mpf:
        return 1 / (2 - mpf(2) ** -level)

    sizes, errors, squares = [mpf(1)], [mpf(0)], mpf(0)
    for level in range(1, rounds.bit_length()):
        sizes.append(own(level) + (1 - own(level)) * 2 * sizes[-1])
        merged = sum(errors)
        squares += mpf(rounds) / 2**level * (merged / own(level)) ** 2
        errors.append(merged + (2 * level + 1) * (2 * sizes[-1] + sum(sizes[:-1])))
    return mp.sqrt(squares) * MARGIN


def mu(mech: Mechanism, participation: Participation, noise_multiplier: float, patterns=None):
    """Mu with the rounding of buffers: the m that solves m = ideal + share (r + m)."""
    ideal = sensitivity(mech, participation, patterns) / mpf(noise_multiplier)
    rounds = participation.rounds
    share = 2 * mpf(2) ** -53 * mp.sqrt(mpf(2) ** 40 / rounds) * rounding_gain(mech, rounds)
    return (ideal + share * mp.sqrt(2 * 77 * mp.ln(2))) / (1 - share)


@cache
def sampler_delta(mu_: mpf) -> mpf:
    """The sampler's part of delta, for a mu below the radius: Marcum's Q over an angle.

    The integrand is smooth and periodic, so that equally spaced points converge exponentially.
    """
    radius = mp.sqrt(2 * 76 * mp.ln(2))
    ratio = mu_ / radius
    half = 50 + int(85 / -mp.log(ratio))  # points on the half circle; ratio^(2 half) is the error
    points, total = 2 * half, mpf(0)
    for i in range(half + 1):  # from -pi / 2 to pi / 2; the other half circle has the same values
        sine = mp.sin(mp.pi * (mpf(i) / half - mpf(1) / 2))
        spread = 1 + 2 * ratio * sine + ratio**2
        term = (1 + ratio * sine) / spread * mp.exp(-(radius**2) / 2 * spread)
        total += term if i in (0, half) else 2 * term
    layers = mu_ * radius * mp.sqrt(mpf(2) ** 39) * mpf(2) ** -76
    return total / points + layers


def gaussian_delta(epsilon: mpf, mu_: mpf) -> mpf:
    """The delta of two Gaussians at distance mu."""
    return mp.ncdf(mu_ / 2 - epsilon / mu_) - mp.exp(epsilon) * mp.ncdf(-mu_ / 2 - epsilon / mu_)


def epsilon(mu_: mpf, delta: float, near: float) -> mpf:
    """The smallest epsilon at a delta, near a known value."""
    left = mpf(delta) / 2
    if mu_ < 10:
        left = max(mpf(delta) - sampler_delta(mu_), left)
    if gaussian_delta(mpf(0), mu_) <= left:
        return mpf(0)
    bracket = (mpf(near) * (1 - mpf(10) ** -6), mpf(near) * (1 + mpf(10) ** -6))
    return mp.findroot(
        lambda e: mp.log(gaussian_delta(e, mu_) / left), bracket, solver="anderson", tol=1e-130
    )
