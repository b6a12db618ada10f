"""The audit of a finished run: guess the coins of its canaries from what was released.

For canaries with random gradients, the attack is white-box. It knows the data of everybody else, as
the guarantee allows. It scores each canary by the log-likelihood ratio of the released noisy means:
what the worst client of the guarantee would have to fear. It guesses that a canary was included if
its score is positive. For canary sentences, the attack is black-box: it sees the released model
alone (`dpftrl.auditing.sentences`). Two tests use the number of correct guesses:

* *General*: the test of `dpftrl.auditing.one_run`. It assumes nothing but the claimed trade-off
  curve, and needs many canaries and errors far from correct to reject it.
* *Independent noise*: the claim also says that the noise of different coordinates is independent.
  The directions of canaries are orthogonal, so that given all that was released, the coins are
  independent, and each is guessed correctly with a probability of at most Phi(mu / 2). The correct
  guesses are then at most binomial, which is a far sharper test of the noise. It does not apply to
  sentences, whose updates are not orthogonal.

Both hold for adaptive training: given what was released before, the updates of clients are fixed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from dpftrl._internal.arrays import Vector
from dpftrl._internal.checks import fraction
from dpftrl._internal.storage import read_json
from dpftrl.accounting import Guarantee, epsilon_of, guarantee_of, load_guarantee
from dpftrl.accounting.amplification import SampledGuarantee
from dpftrl.adaptive_clipping import ClipNorm
from dpftrl.auditing.canaries import (
    PUBLIC,
    SEEN,
    CanaryFile,
    CanaryKind,
    Directions,
    SecretFile,
    canary_kind,
    read_secrets,
    read_seen,
)
from dpftrl.auditing.lower_bounds import at_least, ratio
from dpftrl.auditing.one_run import Guesses, gaussian_inverse, mu_lower_bound, p_value
from dpftrl.auditing.sentences import guess_extremes, read_sentence_file, sentence_scores
from dpftrl.auditing.worst_updates import information
from dpftrl.centralized.settings import RunFile as CentralizedRunFile
from dpftrl.errors import InvalidInput
from dpftrl.federated.settings import RunFile
from dpftrl.plan import load_dataset_plan, load_plan
from dpftrl.verify.centralized_files import is_centralized

# The confidence of run audits, and the most that the test for independent noise takes of it.
DEFAULT_CONFIDENCE: Final = 0.95
INDEPENDENT_FAILURE: Final = 1e-5


@final
@dataclass(frozen=True)
class RunClaim:
    """What a run claims, and what its noise was planned to be.

    Attributes:
        guarantee: The guarantee of the released rounds, of this run alone.
        clip_norm: The clip norm.
        divisor: Number by which sums are divided: report goal, or planned batch size.
    """

    guarantee: Guarantee
    clip_norm: float
    divisor: float


@final
@dataclass(frozen=True)
class RunAudit:
    """What an attack on the canaries of a run has shown, beside the claim.

    Attributes:
        claim: The guarantee that is audited.
        guesses: Canaries, guesses, and correct guesses.
        mu_general: Mu is at least this, by the general test.
        mu_independent: Mu is at least this, if noise is independent as claimed; None for sentences.
        p_value: The largest probability of so many correct guesses under the claimed curve, by the
            general test.
        confidence: The probability that both lower bounds hold.
        rounds: Number of rounds whose release the attack has seen.
        kind: Whether canaries are random gradients or sentences.
        scores: The score of each canary: its log-likelihood ratio, or by how much the loss of its
            sentence fell, compared with the median sentence.
        included: Whether each canary was included.
    """

    claim: Guarantee
    guesses: Guesses
    mu_general: float
    mu_independent: float | None
    p_value: float
    confidence: float
    rounds: int
    kind: CanaryKind
    scores: Vector
    included: NDArray[np.bool_]

    @property
    def mu_lower_bound(self) -> float:
        """The larger one of the lower bounds on mu."""
        return max(self.mu_general, self.mu_independent or 0.0)

    @property
    def lower_bound(self) -> float:
        """The epsilon of `mu_lower_bound`, at the delta of the claim."""
        return _epsilon(self.claim.delta, self.mu_lower_bound)

    @property
    def ratio(self) -> float:
        """The lower bound over the claimed epsilon."""
        return ratio(self.lower_bound, self.claim.epsilon)

    @property
    def exceeds_claim(self) -> bool:
        """Whether the attack has disproved the claim."""
        return not self.mu_lower_bound <= self.claim.mu

    def as_json(self) -> dict[str, Any]:
        """The audit as a JSON object."""
        return {
            "epsilon": self.claim.epsilon,
            "delta": self.claim.delta,
            "lower_bound": self.lower_bound,
            "ratio": self.ratio,
            "mu": self.claim.mu,
            "mu_lower_bound": self.mu_lower_bound,
            "mu_general": self.mu_general,
            "epsilon_general": _epsilon(self.claim.delta, self.mu_general),
            **self._independent(),
            "p_value": self.p_value,
            "confidence": self.confidence,
            "exceeds_claim": self.exceeds_claim,
            "rounds": self.rounds,
            "canary_kind": self.kind,
            **self.guesses._asdict(),
            "included": int(self.included.sum()),
        }

    def _independent(self) -> dict[str, float]:
        if self.mu_independent is None:
            return {}
        epsilon = _epsilon(self.claim.delta, self.mu_independent)
        return {"mu_independent": self.mu_independent, "epsilon_independent": epsilon}


def audit_run(folder: Path, *, confidence: float = DEFAULT_CONFIDENCE) -> RunAudit:
    """Audit a federated or a centralized run that was trained with canaries.

    Args:
        folder: Folder of the run, with its private files.
        confidence: The probability that the lower bounds hold.

    Raises:
        InvalidInput: The folder holds no run, or one without canaries.
    """
    if not (folder / "private").is_dir() or not (folder / "plan.json").exists():
        raise InvalidInput(f"{folder} is not the folder of a run with its private files")
    kind = canary_kind(folder)
    if kind is None:
        raise InvalidInput(
            f"{folder} has no canaries to guess; train with canaries, or audit its mechanism: "
            f"dpftrl audit mechanism {folder}"
        )
    if kind == "sentences":
        return audit_sentences(folder, confidence=confidence)
    _seen(folder)  # refuses a run that cannot be audited
    return audit_canaries(folder, _claim(folder), confidence=confidence)


def _claim(folder: Path) -> RunClaim:
    """What the run in a folder claims."""
    if is_centralized(folder):
        file = read_json(folder / "run.json", CentralizedRunFile, "run")
        plan = load_dataset_plan(folder / "plan.json")
        _, steps = _seen(folder)
        guarantee = plan.after(steps)
        if isinstance(guarantee, SampledGuarantee):
            raise InvalidInput(
                f"{folder} has secret random batches, and its canaries cannot be audited; audit "
                "its mechanism instead: dpftrl audit mechanism --dataset"
            )
        return RunClaim(guarantee, plan_clip_norm(file.settings.clip_norm), plan.dataset.batch_size)
    file = read_json(folder / "run.json", RunFile, "run")
    guarantee = load_guarantee(folder / "guarantee.json")
    own = guarantee_of(guarantee.runs[-1:], guarantee.delta)  # without earlier runs
    plan = load_plan(folder / "plan.json")
    return RunClaim(own, plan_clip_norm(file.settings.clip_norm), plan.fleet.report_goal)


def plan_clip_norm(clip_norm: ClipNorm) -> float:
    """The clip norm as a number; canaries need a fixed one."""
    if not isinstance(clip_norm, float):
        raise InvalidInput("canaries cannot be audited in a run with adaptive clipping")
    return clip_norm


def _seen(folder: Path) -> tuple[Vector, int]:
    if not (folder / SEEN).exists():
        raise InvalidInput(f"{folder} has released nothing yet; train at least one round")
    return read_seen(folder / SEEN)


def audit_canaries(
    folder: Path, claim: RunClaim, *, confidence: float = DEFAULT_CONFIDENCE
) -> RunAudit:
    """Guess the coins of a run's canaries, and compare what that shows with the claim.

    Args:
        folder: Folder of the run, with its private files.
        claim: What the run claims.
        confidence: The probability that the lower bounds hold.

    Raises:
        InvalidInput: The run has no canaries, or has released nothing.
    """
    failure = 1 - fraction("confidence", confidence)
    seen, rounds = _seen(folder)
    file = read_json(folder / PUBLIC, CanaryFile, "canaries")
    secret = read_secrets(folder)
    scores = canary_scores(file, secret, seen, claim)
    included = secret.included(file.canaries)
    correct = int(np.count_nonzero((scores > 0) == included))
    guesses = Guesses(file.canaries, file.canaries, correct)
    sharp = min(INDEPENDENT_FAILURE, failure / 2)
    guarantee = claim.guarantee
    return RunAudit(
        claim=guarantee,
        guesses=guesses,
        mu_general=mu_lower_bound(guesses, failure - sharp),
        mu_independent=independent_mu(guesses, sharp),
        p_value=p_value(guesses, gaussian_inverse(guarantee.mu)),
        confidence=confidence,
        rounds=rounds,
        kind="gradients",
        scores=scores,
        included=included,
    )


def audit_sentences(folder: Path, *, confidence: float = DEFAULT_CONFIDENCE) -> RunAudit:
    """Guess the coins of a run's canary sentences from the model that it released.

    Args:
        folder: Folder of the run, with its private files.
        confidence: The probability that the lower bound holds.

    Raises:
        InvalidInput: The run has released nothing, or JAX is not installed.
        UnsafeState: A sealed file or the model was changed.
    """
    failure = 1 - fraction("confidence", confidence)
    file, secret = read_sentence_file(folder), read_secrets(folder)
    rounds, scores = sentence_scores(folder, file, secret)
    included = secret.included(file.canaries)
    guesses, guarantee = guess_extremes(scores, included), _claim(folder).guarantee
    return RunAudit(
        claim=guarantee,
        guesses=guesses,
        mu_general=mu_lower_bound(guesses, failure),
        mu_independent=None,
        p_value=p_value(guesses, gaussian_inverse(guarantee.mu)),
        confidence=confidence,
        rounds=rounds,
        kind="sentences",
        scores=scores,
        included=included,
    )


def canary_scores(file: CanaryFile, secret: SecretFile, seen: Vector, claim: RunClaim) -> Vector:
    """The log-likelihood ratio of every canary."""
    run = claim.guarantee.runs[-1]
    updates = file.updates_by_round
    directions = Directions(file.canaries, file.size, secret.generator())
    products = directions.products(seen) * (claim.divisor / claim.clip_norm)
    shown = information(run.mechanism, file.rounds)
    mean = float(updates @ shown @ updates)
    return (products - mean / 2) / run.noise_multiplier**2


def independent_mu(guesses: Guesses, failure: float) -> float:
    """The lower bound on mu if all coins are guessed, and correct guesses are independent.

    A coin is guessed correctly with a probability of at most Phi(mu / 2).

    >>> round(independent_mu(Guesses(1000, 1000, 841), failure=1e-5), 2)
    1.59
    """
    if guesses.guesses != guesses.canaries:
        raise InvalidInput("the test for independent noise needs a guess about every canary")
    rate = at_least(np.array([float(guesses.correct)]), guesses.guesses, failure)[0]
    return max(0.0, 2 * float(ndtri(rate)))


def _epsilon(delta: float, mu: float) -> float:
    return epsilon_of(delta, mu) if mu > 0 else 0.0
