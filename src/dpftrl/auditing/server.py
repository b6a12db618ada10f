"""Audit of the federated server: one client attacks a whole run, from its updates to the models.

An audit of a mechanism attacks the noise stream alone. This audit goes through the doors that real
clients and attackers have: names, reports and released models, with the run closed and resumed in
the middle. One client, the target, behaves badly in one of several ways. All other updates are
known, as to an attacker who knows all other clients. What the released models show beyond that is
the target's effect plus noise.

**The bound.** Let r_t be the noisy sum of round t minus the sum that the other clients explain, in
units of the clip norm. Coordinate 0 belongs to the target and coordinate 1 to the others; all other
coordinates contain only noise. They give the covariance S of the noise between rounds. If the noise
is Gaussian, the best attack on a shift s of the rounds separates the two cases by
sqrt(s^T S^-1 s) standard deviations, and mu of a true claim is at least that. The shift is measured
with noise and S from finitely many coordinates: with confidence 1 - failure,

    mu >= sqrt(s^T S^-1 s * q / N) - sqrt(p)

where q is the quantile of a chi-square variable with N - n + 1 degrees of freedom, p that of one
with 2 n, for n rounds and N coordinates of noise (Wishart's theorem). A run with little noise makes
the second term small next to mu. No mechanism needs to be known: the bound is the same for all
linear combinations of rounds.

**The noise itself** must not depend on the target: a Gaussian mechanism shifts its noise and does
nothing else to it. A second run, in which the target sends zeros, has noise to compare with. If a
round's variance differs between the runs (an F test, with confidence 1 - failure for all rounds
together), an attacker sees it in every coordinate of a model, whatever the noise multiplier. In the
second run, every coordinate is noise: none may have far less of it than the others.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, cast, final

import numpy as np
from scipy.special import fdtri, gammainccinv, gammaincinv

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl.accounting import account
from dpftrl.errors import ReportRefused, TooFewClients
from dpftrl.federated import Round, Server, Settings
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import Participation
from dpftrl.plan import Fleet, Plan

GOAL: Final = 3  # reports per round
CLIP_NORM: Final = 1.0
COORDINATES: Final = 4_000  # of noise; their covariance is then known to a few percent
LARGE: Final = 1_000.0  # the target's update, in clip norms, before it is clipped
DELTA: Final = 1e-6
TARGET: Final = "target"

# Reports the target's update to a round, in one way or another.
Behavior = Callable[[Round], None]


@final
@dataclass(frozen=True)
class ServerAudit:
    """The result of one audit.

    Attributes:
        behavior: What the target did.
        mu: The mu that the run states in its guarantee.
        mu_lower_bound: The mu that the attack proves, if the noise is Gaussian.
        confidence: The probability that the lower bound holds.
        noise_is_wrong: Whether the noise depends on what the target sends, or a coordinate has
            almost none.
        participations: The rounds in which the target was contacted.
    """

    behavior: str
    mu: float
    mu_lower_bound: float
    confidence: float
    noise_is_wrong: bool
    participations: tuple[int, ...]

    @property
    def exceeds_claim(self) -> bool:
        """Whether the claim is false, at the stated confidence."""
        return self.noise_is_wrong or not self.mu_lower_bound <= self.mu


def _update(position: int, size: float) -> Vector:
    update = np.zeros(COORDINATES + 2)
    update[position] = size
    return update


def _send(open_round: Round, client: str, update: Vector) -> None:
    open_round.report(client, update, open_round.attempt)


def _send_zeros(open_round: Round) -> None:
    _send(open_round, TARGET, _update(0, 0.0))


def _send_large(open_round: Round) -> None:
    _send(open_round, TARGET, _update(0, LARGE * CLIP_NORM))


def _send_twice(open_round: Round) -> None:
    for _ in range(2):
        try:
            _send(open_round, TARGET, _update(0, CLIP_NORM))
        except ReportRefused:
            return


def _send_nan(open_round: Round) -> None:
    _send(open_round, TARGET, _update(0, math.nan))


BEHAVIORS: Final[dict[str, Behavior]] = {
    "sends an update that is too large": _send_large,
    "reports twice": _send_twice,
    "sends NaN": _send_nan,
}


def audit_server(
    folder: Path,
    mechanism: Mechanism,
    participation: Participation,
    noise_multiplier: float,
    behavior: str,
    failure: float = 1e-5,
) -> ServerAudit:
    """Run a small federated training with one bad client, and bound mu from what it releases.

    Args:
        folder: A folder for the run and its witness. The run stays there, for `dpftrl verify`.
        mechanism: The mechanism that correlates the noise.
        participation: The rounds in which one client may take part.
        noise_multiplier: Standard deviation of Z over the clip norm. Choose a small one, such as
            0.02, so that mu is large and can be measured with a single run.
        behavior: What the target does; a name in `BEHAVIORS`.
        failure: The probability that the lower bound is wrong.

    Guarantees:
        If the server is right, `exceeds_claim` has a probability of at most `failure`.
    """
    fleet = Fleet(population=100 * GOAL, report_goal=GOAL)
    plan = Plan(fleet, account(mechanism, participation, noise_multiplier, DELTA))
    attacked = _attacked_run(folder, plan, BEHAVIORS[behavior])
    with_zeros = _attacked_run(folder / "zeros", plan, _send_zeros)
    return ServerAudit(
        behavior,
        attacked.mu,
        mu_lower_bound(attacked.rows, failure / 2),
        1 - failure,
        noise_differs(attacked.rows[:, 2:], with_zeros.rows[:, 2:], failure / 4)
        or has_bare_coordinate(with_zeros.rows, failure / 4),
        attacked.taken_part,
    )


class _AttackedRun(NamedTuple):
    """A run with a bad client.

    Attributes:
        rows: What the other clients do not explain of each round's sum, in clip norms.
        mu: The mu that the run states.
        taken_part: The rounds in which the target was contacted.
    """

    rows: Matrix
    mu: float
    taken_part: tuple[int, ...]


def _attacked_run(folder: Path, plan: Plan, behave: Behavior) -> _AttackedRun:
    participation, place = plan.participation, (folder / "run", folder / "state")
    start = {"w": np.zeros(COORDINATES + 2)}
    server = Server.create(
        place[0], plan, Settings(clip_norm=CLIP_NORM), start, state_folder=place[1]
    )
    rows, taken_part = list[Vector](), list[int]()
    for number in range(participation.rounds):
        if number == participation.rounds // 2:
            server.close()
            server = Server.resume(place[0], state_folder=place[1])
        before = server.model.astype(np.float64)
        is_in = _run_round(server, number, behave)
        taken_part += [number] if is_in else []
        row = (server.model.astype(np.float64) - before) * (GOAL / CLIP_NORM)
        row[1] -= GOAL - 1 if is_in else GOAL  # what the other clients explain
        rows.append(row)
    mu = server.guarantee().mu
    server.close()
    return _AttackedRun(np.array(rows), mu, tuple(taken_part))


def _run_round(server: Server, number: int, behave: Behavior) -> bool:
    """Run one round, with the target if the server accepts it, and return whether it did."""
    others = [f"client {number} {i}" for i in range(GOAL)]
    try:
        open_round = server.begin([TARGET, *others[1:]])
    except TooFewClients:
        open_round = server.begin(others)
    is_in = TARGET in open_round.clients
    if is_in:
        behave(open_round)
    for name in others:
        if name in open_round.clients and not open_round.enough:
            _send(open_round, name, _update(1, CLIP_NORM))
    server.commit(open_round)
    return is_in


def noise_differs(noise: Matrix, other: Matrix, failure: float) -> bool:
    """Test whether two runs have different noise: one row per round, one column per coordinate.

    Returns:
        Whether the variance of some round differs; wrong with a probability of at most `failure`.
    """
    ratios = np.sum(noise**2, axis=1) / np.sum(other**2, axis=1)
    degrees = noise.shape[1]
    largest = 1 / float(fdtri(degrees, degrees, failure / (2 * len(noise))))
    return not bool(np.all((ratios <= largest) & (ratios >= 1 / largest)))


def has_bare_coordinate(noise: Matrix, failure: float) -> bool:
    """Test whether a coordinate has far less noise than the others, in all rounds together.

    The squared length of a coordinate's noise, in standard deviations of independent directions, is
    a chi-square variable with one degree of freedom per round. The covariance comes from all
    coordinates, to a few percent, which half of the threshold leaves room for.
    """
    rounds, coordinates = noise.shape
    try:
        factor = cast("Matrix", np.linalg.cholesky(noise @ noise.T / coordinates))
        whitened = cast("Matrix", np.linalg.solve(factor, noise))
    except np.linalg.LinAlgError:  # some combination of rounds has no noise at all
        return True
    smallest = float(np.min((whitened**2).sum(axis=0)))
    return not smallest >= float(gammaincinv(rounds / 2, failure / coordinates))


def mu_lower_bound(rows: Matrix, failure: float) -> float:
    """Bound mu from below, from one row per round; see the top of this module.

    Args:
        rows: What is left of each round's sum, in clip norms: the target's and the others'
            coordinate first, then coordinates with noise alone.
        failure: The probability that the bound is wrong.
    """
    shifts, noise = rows[:, :2], rows[:, 2:]
    rounds, coordinates = noise.shape
    covariance = noise @ noise.T / coordinates
    try:
        whitened = cast("Matrix", np.linalg.solve(covariance, shifts))
    except np.linalg.LinAlgError:  # some combination of rounds has no noise at all
        return math.inf
    square = float((shifts * whitened).sum())
    if not square >= 0:
        return math.inf
    spread = 2 * float(gammaincinv((coordinates - rounds + 1) / 2, failure / 2)) / coordinates
    noise_of_shift = 2 * float(gammainccinv(rounds, failure / 2))
    return max(0.0, math.sqrt(square * spread) - math.sqrt(noise_of_shift))
