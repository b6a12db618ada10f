"""The guarantee of a centralized run, in words and as a file."""

from typing import Literal, final

import msgspec

from dpftrl.accounting import SampledGuarantee
from dpftrl.accounting.amplification import CERTIFICATE
from dpftrl.accounting.guarantee import KEYSTREAM, SECRECY, Basis, Hypothesis
from dpftrl.adaptive_clipping import AdaptiveClipping
from dpftrl.centralized.settings import RunFile
from dpftrl.mechanisms.registry import MechanismFile
from dpftrl.participation import Adjacency, CyclicPoisson
from dpftrl.plan import Dataset, DatasetPlan, SamplingName

RANKS = Hypothesis(
    "ranks",
    "All ranks run the same code on the same data set, and nobody else reads or changes what they "
    "send to each other.",
)
TEST_KEY = Hypothesis(
    "test key",
    "The noise key is a test key that anybody can guess: there is no privacy at all.",
)


class HypothesisFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A condition that the guarantee needs."""

    name: str
    text: str
    basis: Basis


@final
class GuaranteeFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of `guarantee.json`: what everything released so far guarantees.

    Attributes:
        run: The identity of the run.
        unit: Whose data is protected: one example, or all examples of one user.
        adjacency: Which data sets are neighbors.
        dataset: Number of units, planned batch size and epochs.
        sampling: How batches are drawn.
        groups: For cyclic Poisson sampling, the number of groups.
        mechanism: The mechanism that correlates the noise.
        noise_multiplier: Standard deviation of Z divided by the clip norm.
        clip_norm: The norm to which every unit's gradient is clipped, or the options of adaptive
            clipping.
        steps: Number of steps that epsilon covers: all that were released so far, and at most those
            up to the next checkpoint.
        epsilon: An upper bound on epsilon of these steps. With sampling it is the planned epsilon,
            also before the last step.
        delta: The delta at which epsilon is stated.
        failure: The probability that a certificate behind epsilon is wrong.
        hypotheses: The conditions that the guarantee needs.
    """

    format: Literal["dpftrl centralized guarantee"] = "dpftrl centralized guarantee"
    version: Literal[1] = 1
    run: str
    unit: Literal["example", "user"]
    adjacency: Adjacency
    dataset: Dataset
    sampling: SamplingName
    groups: int | None
    mechanism: MechanismFile
    noise_multiplier: float
    clip_norm: float | AdaptiveClipping
    steps: int
    epsilon: float
    delta: float
    failure: float
    hypotheses: tuple[HypothesisFile, ...]


def epsilon_after(plan: DatasetPlan, steps: int) -> float:
    """Epsilon of the first steps of a run, or an upper bound; 0 before the first.

    With sampling it is the planned epsilon: to compute less is slow, and may need new certificates.
    """
    if not steps:
        return 0.0
    if isinstance(plan.guarantee, SampledGuarantee) or steps == plan.dataset.steps:
        return plan.guarantee.epsilon
    return min(plan.guarantee.epsilon, plan.after(steps).epsilon)


def guarantee_file(
    plan: DatasetPlan, file: RunFile, steps: int, mechanism: MechanismFile
) -> GuaranteeFile:
    """The guarantee of the first steps of a run."""
    promised = plan.guarantee
    drawn = promised.sampling if isinstance(promised, SampledGuarantee) else None
    return GuaranteeFile(
        run=file.run,
        unit=file.settings.unit,
        adjacency="zero-out" if drawn is None else drawn.adjacency,
        dataset=plan.dataset,
        sampling=plan.sampling,
        groups=drawn.groups if isinstance(drawn, CyclicPoisson) else None,
        mechanism=mechanism,
        noise_multiplier=plan.noise_multiplier,
        clip_norm=file.settings.clip_norm,
        steps=steps,
        epsilon=epsilon_after(plan, steps),
        delta=promised.delta,
        failure=plan.failure,
        hypotheses=tuple(
            HypothesisFile(one.name, one.text, one.basis) for one in hypotheses(plan, file)
        ),
    )


def hypotheses(plan: DatasetPlan, file: RunFile) -> tuple[Hypothesis, ...]:
    """The conditions that the guarantee of a run needs, and which of them the code enforces."""
    settings, unit = file.settings, file.settings.unit
    dataset = plan.dataset
    if plan.sampling == "none":
        order = Hypothesis(
            "participation",
            f"Every {unit} takes part once in every {dataset.steps_per_epoch:,} steps, always at "
            "the same place: all epochs use the same shuffled order.",
            "enforced",
        )
    else:
        order = Hypothesis(
            "sampling",
            f"Batches are drawn by {plan.sampling} sampling with the secret key of the run.",
            "enforced",
        )
    conditions = [
        order,
        Hypothesis("clipping", settings.clipping, "enforced"),
        Hypothesis(
            "batch size",
            f"Sums are divided by the planned batch size, {dataset.batch_size:,}, and never by the "
            "actual size of a batch.",
            "enforced",
        ),
        Hypothesis(
            "steps",
            f"There are at most {dataset.steps:,} steps; a further one is refused. If the number "
            "of steps was chosen by looking at the run, the guarantee of all planned steps holds.",
            "enforced",
        ),
        Hypothesis(
            "data set",
            f"The number of {unit}s, {dataset.size:,}, is public, and the data set is the same in "
            "all steps.",
        ),
        Hypothesis(
            "batches",
            "Every step is given the rows that the loader yielded for it, and their shape does not "
            "depend on who else is in the batch.",
        ),
        Hypothesis("independence", _independence(unit, settings.framework)),
        Hypothesis(
            "other outputs",
            "Nothing else that depends on the data set is published: no losses, no accuracy on the "
            "data set, no choice of settings, of checkpoints or of the time to stop by them.",
        ),
        Hypothesis(
            "start",
            "The model before the first step does not depend on the data set, or is public.",
        ),
        KEYSTREAM,
        SECRECY if plan.sampling == "none" else _secret_batches(),
    ]
    if unit == "user":
        conditions.append(
            Hypothesis(
                "users",
                "Every example belongs to one user, and all examples of a user have the same name.",
            )
        )
    if settings.is_sharded:
        conditions.append(RANKS)
    if plan.failure:
        conditions.append(CERTIFICATE)
    if file.test_key:
        conditions.append(TEST_KEY)
    return tuple(conditions)


def _independence(unit: str, framework: str) -> str:
    text = f"The gradient of one {unit} does not depend on the data of another {unit}."
    if framework == "jax":
        return f"{text} It is computed from its own rows alone, by a function without side effects."
    return (
        f"{text} Layers that mix examples are refused, and two gradients are checked at the first "
        "step; code of the model or of the loss that mixes them at other times is not noticed."
    )


def _secret_batches() -> Hypothesis:
    return Hypothesis(
        SECRECY.name,
        "The key, the noise state and the batches stay secret, and no row of noise covers two "
        "different sums.",
    )
