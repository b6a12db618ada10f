"""Verification of a centralized run: a training on a data set in one place.

The files are those that `dpftrl.centralized` writes. Each step is in the journal before the model
changes, so all steps in the journal count as released. `guarantee.json` is written with every
checkpoint, and before the first step after it, for all steps up to the next one. So it covers at
least the steps of the last recorded checkpoint, and at most those up to the next one.

Epsilon is recomputed in a way that depends on the sampling: one Gaussian for `none`, composed
privacy losses for `poisson` and `cyclic-poisson`, and a Monte Carlo estimate of delta for
`balls-in-bins`. For sampled batches, the guarantee of all planned steps is stated from the first
step on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, final

import msgspec
import numpy as np

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl._internal.storage import read_json
from dpftrl.errors import DpftrlError, InvalidInput, UnsafeState
from dpftrl.mechanisms.registry import MechanismFile, mechanism_from
from dpftrl.participation import FixedEpochs
from dpftrl.verify import rigorous
from dpftrl.verify.check_guarantee import check_epsilon
from dpftrl.verify.clip_norms import AdaptiveRun, check_clip_norms, grid_step
from dpftrl.verify.epsilon import MOST_DRAWS, MuRange
from dpftrl.verify.journal import (
    DIGEST,
    Clipping,
    Count,
    Created,
    Record,
    Sha256,
    fingerprint,
    read_key,
    read_lines,
)
from dpftrl.verify.rigorous import NoiseStream
from dpftrl.verify.run_files import (
    AdaptiveContent,
    HypothesisContent,
    check_digest,
    check_modes,
    witness_checks,
)
from dpftrl.verify.sampled_epsilon import (
    DeltaEstimate,
    estimate_bins_delta,
    overflow_probability,
    poisson_epsilon,
)
from dpftrl.verify.sensitivity import ROUNDING, SensitivityBounds
from dpftrl.verify.strategy_matrix import MOST_ROUNDS, Strategy
from dpftrl.verify.verdict import Check, Verdict, run_check

FORMAT: Final = "dpftrl centralized run"
PLAN_FORMAT: Final = "dpftrl dataset plan"
# A claimed epsilon of Poisson sampling may be smaller than the recomputed one by this share. Both
# are upper bounds that exceed the true value by about 1e-5 of it; where delta is very small, the
# rounding errors of the Fourier transforms are larger.
POISSON_TOLERANCE: Final = 1e-3
# An estimate of delta whose standard error is a larger share of delta than this decides nothing.
MOST_STANDARD_ERROR: Final = 0.15
MOST_FAILURE: Final = 1e-6  # a certificate that fails with a larger probability is a warning
STEPS_PER_DEVIATION: Final = 2**34  # of the grid of sums, at least
JAX_STEP: Final = 2.0**-24  # the step of the grid of sums in JAX, with adaptive clipping
MOST_HEADER: Final = 100_000_000  # bytes of the header of a safetensors file, by its format
CANARIES: Final = "canaries.json"  # says that artificial participants were added for an audit
MOST_BINS: Final = 4096  # the Gram matrix of more bins would not fit into memory
# The name of the check of epsilon if it rests on an estimate: nothing is recomputed exactly.
ESTIMATE: Final = "epsilon estimate"

Sampling = Literal["none", "poisson", "cyclic-poisson", "balls-in-bins"]


def is_centralized(root: Path) -> bool:
    """Return whether a folder holds a centralized run, by `run.json` or else by `plan.json`."""
    for name, known in (("run.json", FORMAT), ("plan.json", PLAN_FORMAT)):
        try:
            return read_json(root / name, _Header, "run").format == known
        except DpftrlError:
            continue
    return False


class _Header(msgspec.Struct):
    """The field that all JSON files of dpftrl have."""

    format: str


# --- Files ----------------------------------------------------------------------------------------


class SettingsContent(msgspec.Struct, frozen=True):
    """The settings of a run, in `run.json`."""

    clip_norm: float | AdaptiveContent
    unit: Literal["example", "user"]
    examples: int
    examples_per_unit: int
    units_sha256: str
    size: int
    commit_every: int
    clipping: str
    framework: str
    sharded: bool = False


class RunFile(msgspec.Struct, frozen=True):
    """The content of `run.json`."""

    format: Literal["dpftrl centralized run"]
    version: Literal[1]
    run: str
    settings: SettingsContent
    test_key: bool


class DatasetContent(msgspec.Struct, frozen=True):
    """The data set: the number of units, the planned batch size and the epochs."""

    size: int
    batch_size: int
    epochs: int
    max_batch_size: int | None

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches that hold every unit about once."""
        return -(-self.size // self.batch_size)

    @property
    def steps(self) -> int:
        """The planned number of steps."""
        return self.epochs * self.steps_per_epoch


class PlanFile(msgspec.Struct, frozen=True):
    """The content of `plan.json`."""

    format: Literal["dpftrl dataset plan"]
    version: Literal[1]
    dataset: DatasetContent
    sampling: Sampling
    groups: int | None
    mechanism: MechanismFile
    noise_multiplier: float
    epsilon: float
    delta: float
    failure: float

    def check(self) -> None:
        """Check that the numbers are possible.

        Raises:
            InvalidInput: One of them is not.
        """
        data, groups, is_cyclic = self.dataset, self.groups, self.sampling == "cyclic-poisson"
        largest = data.max_batch_size
        for what, is_possible in (
            ("the batch size", 1 <= data.batch_size <= data.size),
            ("the number of epochs", data.epochs >= 1),
            ("the largest batch", largest is None or largest >= data.batch_size),
            ("the number of groups", is_cyclic == (groups is not None)),
            ("the number of groups", 1 <= (groups or 1) <= data.size // data.batch_size),
            ("the noise multiplier", 0 < self.noise_multiplier < math.inf),
            ("epsilon", 0 <= self.epsilon < math.inf),
            ("delta", 0 < self.delta < 1),
            ("the failure probability", 0 <= self.failure < 1),
        ):
            if not is_possible:
                raise InvalidInput(f"{what} in plan.json is impossible")


class GuaranteeFile(msgspec.Struct, frozen=True):
    """The content of `guarantee.json`."""

    format: Literal["dpftrl centralized guarantee"]
    version: Literal[1]
    run: str
    unit: str
    adjacency: str
    dataset: DatasetContent
    sampling: str
    groups: int | None
    mechanism: MechanismFile
    noise_multiplier: float
    clip_norm: float | AdaptiveContent
    steps: int
    epsilon: float
    delta: float
    failure: float
    hypotheses: tuple[HypothesisContent, ...]


@final
class CentralizedFiles:
    """What `run.json` and `plan.json` of a centralized run say.

    Attributes:
        run: The content of `run.json`.
        plan: The content of `plan.json`.
        mechanism: The mechanism that correlates the noise.

    Raises:
        InvalidInput: A file cannot be read, or holds impossible numbers.
    """

    def __init__(self, folder: Path):
        self.run = read_json(folder / "run.json", RunFile, "centralized run")
        self.plan = read_json(folder / "plan.json", PlanFile, "dataset plan")
        self.plan.check()
        self.mechanism = mechanism_from(self.plan.mechanism, folder / "plan.json")

    def __repr__(self) -> str:
        return f"CentralizedFiles({self.run.run}, {self.plan.sampling})"

    def check_units(self) -> None:
        """Check that the units of `run.json` are those that the plan counts.

        Raises:
            UnsafeState: They are not.
        """
        settings, units = self.run.settings, self.plan.dataset.size
        if settings.unit == "example":
            fits = settings.examples == units and settings.examples_per_unit == 1
            fits = fits and settings.units_sha256 == ""
        else:
            fits = settings.examples >= units and settings.examples_per_unit >= 1
            fits = fits and settings.units_sha256 != ""
        if not fits:
            raise UnsafeState(
                f"run.json describes {settings.examples:,} examples, of which up to "
                f"{settings.examples_per_unit:,} per {settings.unit} take part in a step; the plan "
                f"is for {units:,} {settings.unit}s, and an owner of each example is recorded for "
                "users only"
            )
        norm = settings.clip_norm
        first = norm.start if isinstance(norm, AdaptiveContent) else norm
        if not (0 < first < math.inf and settings.commit_every >= 1):
            raise UnsafeState(
                "the clip norm must be positive and finite, and there must be at least 1 step "
                f"between checkpoints, got {first} and {settings.commit_every}"
            )
        if isinstance(norm, AdaptiveContent) != ("clip norm of its step" in settings.clipping):
            raise UnsafeState("the text about clipping in run.json does not fit the clip norm")

    def next_checkpoint(self, steps: int) -> int:
        """Return the number of steps at the first planned checkpoint after `steps`."""
        every = self.run.settings.commit_every
        return min((steps // every + 1) * every, self.plan.dataset.steps)


# --- Journal --------------------------------------------------------------------------------------


@final
class Step(Record, frozen=True, tag="step"):
    """The noise of a step was fixed, before the model changed."""

    step: Count
    digest: msgspec.Raw  # 16 bytes in hexadecimal; tracebacks would show the content of a string
    clipping: Clipping | None = None


@final
class Saved(Record, frozen=True, tag="saved"):
    """A checkpoint was written after this number of steps."""

    steps: Count
    checkpoint_sha256: Sha256
    epsilon: Annotated[float, msgspec.Meta(ge=0)]


STEP_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Created | Step | Saved)


@final
@dataclass(frozen=True, eq=False)
class StepJournal:
    """The content of the journal of a centralized run.

    Attributes:
        created: The first record.
        steps: The number of steps.
        saves: The records of checkpoints, in order.
        macs: The MAC of each complete line, in hexadecimal.
        torn: Whether the file ends with an incomplete line.
        clipped: The records of the steps that have a clip norm that moves.
    """

    created: Created
    steps: int
    saves: tuple[Saved, ...]
    macs: tuple[str, ...]
    torn: bool
    clipped: tuple[Step, ...] = ()

    @property
    def saved_steps(self) -> int:
        """The number of steps before the last recorded checkpoint."""
        return self.saves[-1].steps if self.saves else 0


def read_step_journal(path: Path, key: memoryview) -> StepJournal:
    """Read a journal and check every line.

    Args:
        path: The journal file.
        key: The noise key of the run.

    Raises:
        InvalidInput: The file cannot be read.
        UnsafeState: A line was changed, or a record cannot follow the records before it.
    """
    history = _History()
    lines = read_lines(path, key, STEP_DECODER, history.append)
    if history.created is None:
        raise UnsafeState("the journal has no complete line")
    saves, clipped, count = tuple(history.saves), tuple(history.clipped), len(history.digests)
    return StepJournal(history.created, count, saves, lines.macs, lines.torn, clipped)


@final
class _History:
    """The records read so far, and the rules for which record may come next."""

    def __init__(self) -> None:
        self.created: Created | None = None
        self.digests: set[bytes] = set()
        self.clipped: list[Step] = []
        self.saves: list[Saved] = []

    def append(self, record: Created | Step | Saved) -> None:
        """Add the next record.

        Raises:
            InvalidInput: The record cannot follow the records before it.
        """
        if isinstance(record, Created):
            if self.created is not None:
                raise InvalidInput("the run was already created; only the first line may create it")
            self.created = record
        elif self.created is None:
            raise InvalidInput("the first line does not create the run")
        elif isinstance(record, Step):
            self._add_step(record)
        else:
            self._add_saved(record)

    def _add_step(self, record: Step) -> None:
        if record.step != len(self.digests):
            raise InvalidInput(f"expected step {len(self.digests)}, got step {record.step}")
        if not DIGEST.fullmatch(bytes(record.digest)):
            raise InvalidInput("the digest of a step must be 32 hexadecimal digits")
        # A digest covers the sum of its step and the digest of the step before.
        if bytes(record.digest) in self.digests:
            raise InvalidInput("two steps have the same digest, so the same noise")
        self.digests.add(bytes(record.digest))
        if record.clipping is not None:
            self.clipped.append(record)

    def _add_saved(self, record: Saved) -> None:
        before = self.saves[-1].steps if self.saves else 0
        if not before < record.steps <= len(self.digests):
            raise InvalidInput(
                f"a checkpoint after {record.steps} steps, when there were {len(self.digests)}, "
                f"and the checkpoint before was after {before}"
            )
        self.saves.append(record)


def _shards_of(path: Path) -> dict[str, str]:
    """The shards that the main file of a checkpoint lists, and their SHA-256; empty for a whole."""
    try:
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), MOST_HEADER))
        content = msgspec.json.decode(header, type=_TensorsHeader)
        return msgspec.json.decode(content.metadata.get("shards", "{}"), type=dict[str, Sha256])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}  # its digest was right, so the run wrote it so


class _TensorsHeader(msgspec.Struct):
    """The part of the header of a safetensors file that is not about tensors."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict[str, str])


def check_checkpoints(folder: Path, journal: StepJournal) -> str:
    """Compare the digest of every kept checkpoint with the journal.

    Raises:
        UnsafeState: The last checkpoint is missing, or a checkpoint differs from the journal.
    """
    digests = {0: journal.created.checkpoint_sha256}
    digests |= {saved.steps: saved.checkpoint_sha256 for saved in journal.saves}
    paths = {path.stem: path for path in folder.glob("*.safetensors") if path.name[0] != "."}
    last = journal.saved_steps
    if f"{last:08d}" not in paths:
        raise UnsafeState(f"the checkpoint after {last} steps is missing")
    checked = 0
    for steps, sha256 in digests.items():
        if (path := paths.pop(f"{steps:08d}", None)) is not None:
            when = f"it was written after {steps} steps" if steps else "the run was created"
            check_digest(path, sha256, when)
            checked += 1
            for name, known in _shards_of(path).items():
                shard = paths.pop(name.removesuffix(".safetensors"), None)
                if shard is None:
                    raise UnsafeState(
                        f"{name} is missing: a shard of the model after {steps} steps"
                    )
                check_digest(shard, known, when)
    # A checkpoint is written before its journal line. A process that was killed in between leaves
    # one that no record names; resuming the run removes it.
    for name in list(paths):
        if name[:8].isdigit() and last < int(name[:8]) <= journal.steps:
            del paths[name]
    if paths:
        raise UnsafeState(f"{sorted(paths)[0]}.safetensors belongs to no step of the journal")
    return f"{checked} checkpoint(s), the last after {last:,} steps, unchanged since then"


# --- Hypotheses -----------------------------------------------------------------------------------


def expected_hypotheses(files: CentralizedFiles) -> tuple[HypothesisContent, ...]:
    """Return the hypotheses that the guarantee of a run must state, word by word."""
    run, plan = files.run, files.plan
    unit, data = run.settings.unit, plan.dataset
    if plan.sampling == "none":
        batches = HypothesisContent(
            "participation",
            f"Every {unit} takes part once in every {data.steps_per_epoch:,} steps, always at the "
            "same place: all epochs use the same shuffled order.",
            "enforced",
        )
        secret = "The noise key and the noise state stay secret,"
    else:
        batches = HypothesisContent(
            "sampling",
            f"Batches are drawn by {plan.sampling} sampling with the secret key of the run.",
            "enforced",
        )
        secret = "The key, the noise state and the batches stay secret,"
    enforced = (
        batches,
        HypothesisContent("clipping", run.settings.clipping, "enforced"),
        HypothesisContent(
            "batch size",
            f"Sums are divided by the planned batch size, {data.batch_size:,}, and never by the "
            "actual size of a batch.",
            "enforced",
        ),
        HypothesisContent(
            "steps",
            f"There are at most {data.steps:,} steps; a further one is refused. If the number of "
            "steps was chosen by looking at the run, the guarantee of all planned steps holds.",
            "enforced",
        ),
    )
    alone = "It is computed from its own rows alone, by a function without side effects."
    compared = (
        "Layers that mix examples are refused, and two gradients are checked at the first step; "
        "code of the model or of the loss that mixes them at other times is not noticed."
    )
    assumed = {
        "data set": f"The number of {unit}s, {data.size:,}, is public, and the data set is the "
        "same in all steps.",
        "batches": "Every step is given the rows that the loader yielded for it, and their shape "
        "does not depend on who else is in the batch.",
        "independence": f"The gradient of one {unit} does not depend on the data of another "
        f"{unit}. {alone if run.settings.framework == 'jax' else compared}",
        "other outputs": "Nothing else that depends on the data set is published: no losses, no "
        "accuracy on the data set, no choice of settings, of checkpoints or of the time to stop by "
        "them.",
        "start": "The model before the first step does not depend on the data set, or is public.",
        "keystream": "The noise comes from a keyed pseudo-random keystream that nobody without its "
        "key can tell from random bits: the guarantee is computational.",
        "secrecy": f"{secret} and no row of noise covers two different sums.",
    }
    if unit == "user":
        assumed["users"] = (
            "Every example belongs to one user, and all examples of a user have the same name."
        )
    if run.settings.sharded:
        assumed["ranks"] = (
            "All ranks run the same code on the same data set, and nobody else reads or changes "
            "what they send to each other."
        )
    if plan.failure:
        assumed["certificate"] = (
            "The certificate from random samples, on which epsilon rests, is right; `failure` "
            "bounds the probability that it is not."
        )
    if run.test_key:
        assumed["test key"] = (
            "The noise key is a test key that anybody can guess: there is no privacy at all."
        )
    rest = (HypothesisContent(name, text, "assumed") for name, text in assumed.items())
    return (*enforced, *rest)


def check_hypotheses(stated: tuple[HypothesisContent, ...], files: CentralizedFiles) -> str:
    """Check that a guarantee states the hypotheses of this run, and nothing else.

    Raises:
        UnsafeState: A hypothesis is missing, was added, or has another text or basis.
    """
    expected = expected_hypotheses(files)
    if stated == expected:
        return f"all {len(stated)} hypotheses are those of such a run, word by word"
    names, expected_names = [one.name for one in stated], [one.name for one in expected]
    for name in (*expected_names, *names):
        if names.count(name) != expected_names.count(name):
            raise UnsafeState(
                f"guarantee.json must state the hypothesis {name!r:.40} "
                f"{expected_names.count(name)} time(s), and states it {names.count(name)} time(s)"
            )
    by_name = {one.name: one for one in stated}
    for one in expected:
        if by_name[one.name].basis != one.basis:
            raise UnsafeState(
                f"the hypothesis {one.name!r} is {one.basis}, and guarantee.json says that it is "
                f"{by_name[one.name].basis}"
            )
        if by_name[one.name].text != one.text:
            raise UnsafeState(
                f"the text of the hypothesis {one.name!r} in guarantee.json was changed; for this "
                f"run it is: {one.text}"
            )
    raise UnsafeState("the hypotheses in guarantee.json are in another order")


# --- Epsilon --------------------------------------------------------------------------------------


class StatedRange(NamedTuple):
    """The smallest and the largest epsilon that a correct file may state.

    Attributes:
        least: The smallest one.
        most: The largest one.
        note: What was not recomputed independently; empty if nothing.
    """

    least: float
    most: float
    note: str = ""


@final
class InOrder:
    """Epsilon without sampling: every unit takes part once per epoch, at a fixed place."""

    def __init__(self, files: CentralizedFiles):
        self._files = files
        self._spacing = files.plan.dataset.steps_per_epoch
        self.range = lru_cache(self._range)

    def __repr__(self) -> str:
        return f"InOrder({self._files})"

    def _range(self, steps: int) -> StatedRange:
        """Return which epsilon a correct file may state for the first steps."""
        mechanism, scale = self._files.mechanism, self._files.plan.noise_multiplier
        strategy = Strategy(mechanism, steps)
        epochs = -(-steps // self._spacing)
        claimable = mechanism.sensitivity(FixedEpochs(steps, self._spacing, epochs)).value
        bounds = self._bounds(strategy)
        # Loose bounds around the library's value neither confirm nor refute it.
        is_settled = bounds is not None and not (
            bounds.attained * (1 - ROUNDING) <= claimable < bounds.bound * (1 - ROUNDING)
        )
        value = bounds.bound if bounds is not None and is_settled else claimable
        mu = MuRange(strategy.least_mu(value / scale), strategy.most_mu(claimable / scale))
        least, most = mu.epsilons(self._files.plan.delta, is_v1=False)
        note = "the library's own sensitivity was used, as there is no independent one"
        return StatedRange(least, most, "" if is_settled else note)

    def _bounds(self, strategy: Strategy) -> SensitivityBounds | None:
        """Bound how far a unit can move the release, at clip norm 1; None if C is too large."""
        if strategy.is_small:
            starts = range(min(self._spacing, strategy.rounds))
            norms = [
                _pattern_bounds(strategy.gram[start :: self._spacing, start :: self._spacing])
                for start in starts
            ]
            attained = max(norm.attained for norm in norms)
            return SensitivityBounds(attained, max(norm.bound for norm in norms))
        column = strategy.mechanism.first_column(strategy.rounds)
        if column is None or not np.all(column >= 0):
            return None
        # Later starts have the same sequence, cut off earlier.
        norm = float(np.linalg.norm(_repeated(column, self._spacing)))
        return SensitivityBounds(norm, norm)

    def noise_stream(self, steps: int) -> NoiseStream:
        """Return the noise stream of the first steps, for interval arithmetic."""
        steps = min(steps, self._files.plan.dataset.steps)
        participation = FixedEpochs(steps, self._spacing, -(-steps // self._spacing))
        return NoiseStream(self._files.mechanism, participation, self._files.plan.noise_multiplier)

    def check(self, claimed: float, steps: int, source: str) -> str | Check:
        """Check an epsilon that a file states for the first steps.

        Raises:
            UnsafeState: It is too small, or larger than the library's own value.
        """
        allowed = self.range(steps)
        text = check_epsilon(claimed, allowed.least, allowed.most, source)
        return Check("epsilon", "warning", f"{text}; {allowed.note}") if allowed.note else text


def _pattern_bounds(gram: Matrix) -> SensitivityBounds:
    """Bound the norm of a sum of columns of C with coefficients of at most 1, by their Gram matrix.

    The coefficients are vectors: the gradients of a unit in the steps of its pattern.
    """
    return SensitivityBounds(
        math.sqrt(max(float(gram.sum()), 0.0)), math.sqrt(float(np.abs(gram).sum()))
    )


def _repeated(column: Vector, spacing: int) -> Vector:
    """Return the sum of a Toeplitz matrix's columns 0, spacing, 2 spacing, ..."""
    total = np.zeros(len(column))
    for start in range(0, len(column), spacing):
        total[start:] += column[: len(column) - start]
    return total


@final
class Sampled:
    """Epsilon of secret random batches, for all planned steps."""

    def __init__(self, files: CentralizedFiles):
        self._files = files

    def __repr__(self) -> str:
        return f"Sampled({self._files})"

    def check_strategy(self) -> str:
        """Check that the sampling covers the strategy.

        Raises:
            UnsafeState: The strategy has too many bands, or negative entries.
        """
        plan, mechanism = self._files.plan, self._files.mechanism
        column, strategy = self._column, self._strategy
        if plan.sampling == "balls-in-bins":
            entries = column if column is not None else strategy
            if not np.all(entries >= 0):
                raise UnsafeState(
                    f"{mechanism.name} has negative entries, which balls-in-bins sampling does not "
                    "cover"
                )
            return f"no entry of {mechanism.name} is negative, as balls-in-bins sampling needs"
        groups = plan.groups or 1
        if column is not None:
            is_covered = not column[groups:].any()
        else:
            rows, columns = strategy.shape
            is_covered = rows == columns and not (
                np.tril(strategy, -groups).any() or np.triu(strategy, 1).any()
            )
        if not is_covered:
            raise UnsafeState(
                f"{mechanism.name} has more than {groups:,} band(s), and {plan.sampling} sampling "
                f"with {groups:,} group(s) covers at most as many: two steps of one unit could "
                "share noise"
            )
        return f"{mechanism.name} has at most {groups:,} band(s), as {plan.sampling} sampling needs"

    @cached_property
    def _column(self) -> Vector | None:
        return self._files.mechanism.first_column(self._files.plan.dataset.steps)

    @cached_property
    def _strategy(self) -> Matrix:
        """C as a dense matrix, if it is not given by its first column."""
        steps = self._files.plan.dataset.steps
        if steps > MOST_ROUNDS:
            raise InvalidInput(
                f"a strategy of {steps:,} steps is too large for a dense matrix, and "
                f"{self._files.mechanism.name} is not given by one column: epsilon cannot be "
                "recomputed"
            )
        return self._files.mechanism.strategy(steps)

    @property
    def _ideal_delta(self) -> float:
        """What is left of delta if batches may be cut, at the epsilon of the plan."""
        plan = self._files.plan
        data = plan.dataset
        if data.max_batch_size is None:
            return plan.delta
        groups, bins = plan.groups or 1, data.steps_per_epoch
        if plan.sampling == "balls-in-bins":
            cut = overflow_probability(
                data.size, 1 / bins, min(bins, data.steps), data.max_batch_size
            )
        else:
            trials = -(-data.size // groups)
            cut = overflow_probability(trials, self._probability, data.steps, data.max_batch_size)
        left = plan.delta - (1 + math.exp(min(plan.epsilon, 700.0))) * cut  # exp(710) overflows
        if not left > 0:
            raise UnsafeState(
                f"batches are cut with probability {cut:.2g}, which leaves nothing of delta "
                f"{plan.delta:g} at epsilon {plan.epsilon:.6g}"
            )
        return left

    @property
    def _probability(self) -> float:
        """The probability that a unit is in a batch of its group."""
        data = self._files.plan.dataset
        return min(1.0, data.batch_size * (self._files.plan.groups or 1) / data.size)

    def check_poisson(self) -> str:
        """Recompute epsilon of all planned steps, for Poisson or cyclic Poisson sampling.

        Raises:
            UnsafeState: The plan's epsilon is too small.
        """
        self.check_strategy()
        plan, column = self._files.plan, self._column
        squares = np.sum((self._strategy if column is None else column[:, None]) ** 2, axis=0)
        norm = math.sqrt(float(squares.max()))
        blocks = -(-plan.dataset.steps // (plan.groups or 1))
        claimed = plan.epsilon
        recomputed = poisson_epsilon(
            plan.noise_multiplier / norm, self._probability, blocks, self._ideal_delta
        )
        if not claimed >= recomputed * (1 - POISSON_TOLERANCE):
            raise UnsafeState(
                f"the plan states epsilon {claimed:.7g}, less than recomputed: {recomputed:.7g}"
            )
        return (
            f"the plan states epsilon {claimed:.6g} for all planned steps; recomputed: "
            f"{recomputed:.6g}, to {POISSON_TOLERANCE:.1%}"
        )

    def check_bins(self) -> str | Check:
        """Estimate delta at the plan's epsilon, for balls-in-bins sampling.

        Raises:
            UnsafeState: Delta is larger than stated, by more than 4 standard errors.
        """
        plan = self._files.plan
        self.check_strategy()
        bins = plan.dataset.steps_per_epoch
        if bins > MOST_BINS:
            raise InvalidInput(
                f"delta is estimated for at most {MOST_BINS:,} bins, and there are {bins:,}: "
                "epsilon cannot be recomputed"
            )
        gram = bins_gram(self._strategy if self._column is None else self._column, bins)
        allowed = self._ideal_delta
        estimates = estimate_bins_delta(gram, plan.noise_multiplier, plan.epsilon)
        text = "; ".join(
            f"{direction}: {_words(estimate)}"
            for direction, estimate in zip(
                ("with against without a unit", "without against with"), estimates, strict=True
            )
        )
        text = (
            f"delta at the plan's epsilon {plan.epsilon:.6g}, estimated from "
            f"{estimates[0].samples:,} samples per direction (no certificate): {text}; "
            f"stated: {plan.delta:.3g}"
        )
        # A NaN fails.
        if not all(estimate.least <= allowed for estimate in estimates):
            raise UnsafeState(f"epsilon is too small: {text}")
        error = max(estimate.standard_error for estimate in estimates)
        is_seen = any(estimate.value > 0 for estimate in estimates)  # some sample had a weight
        if not (is_seen and error <= MOST_STANDARD_ERROR * allowed):
            return Check(ESTIMATE, "warning", f"too imprecise to decide: {text}")
        return text


def _words(estimate: DeltaEstimate) -> str:
    return f"{estimate.value:.3g} with standard error {estimate.standard_error:.2g}"


def bins_gram(strategy: Vector | Matrix, bins: int) -> Matrix:
    """Return the inner products of the m_i: m_i is the sum of the columns i, i + bins, ... of C.

    Args:
        strategy: C, or the first column of a lower-triangular Toeplitz matrix C.
        bins: The number of bins.
    """
    steps = strategy.shape[-1]
    if strategy.ndim == 2:
        sums = np.stack([strategy[:, start::bins].sum(axis=1) for start in range(bins)], axis=1)
        return sums.T @ sums
    # m_i is m_0, moved down by i steps and cut off at the last step. So the product of m_i and m_j
    # is that of m_(i-1) and m_(j-1), less what the last step cuts off.
    sequence = _repeated(strategy, bins)
    used = min(bins, steps)  # later bins have no step
    gram = np.zeros((bins, bins))
    gram[0, :used] = [sequence[lag:] @ sequence[: steps - lag] for lag in range(used)]
    for i in range(1, used):
        cut_off = sequence[steps - i] * sequence[steps - np.arange(i, used)]
        gram[i, i:used] = gram[i - 1, i - 1 : used - 1] - cut_off
    return np.triu(gram) + np.triu(gram, 1).T


# --- Verification ---------------------------------------------------------------------------------


@final
class CentralizedVerification:
    """The state of one verification: the files read so far, and the results of the checks.

    A file that could not be read, or failed its check, is None.

    Args:
        root: The folder of the run.
        witness_folder: The folder of the run's witness; None to leave it out.
    """

    def __init__(self, root: Path, witness_folder: Path | None):
        self.root = root
        self.witness_folder = witness_folder
        self.checks: list[Check] = []
        self.journal: StepJournal | None = None
        self.files: CentralizedFiles | None = None
        self.epsilon: float | None = None

    def __repr__(self) -> str:
        return f"CentralizedVerification({self.root})"

    def verdict(self) -> Verdict:
        """Run all checks and return their results."""
        self._check("file modes", lambda: check_modes(self.root / "private"))
        self._check("journal", self._read_journal)
        if self.journal is None:
            text = "not checked, because the journal cannot be trusted"
            self.checks.append(Check("everything else", "warning", text))
        else:
            self._check_other_files(self.journal)
        journal, files = self.journal, self.files
        return Verdict(
            run_id=journal.created.run if journal else None,
            checks=tuple(self.checks),
            rounds=journal.steps if journal else 0,
            epsilon=self.epsilon,
            delta=files.plan.delta if files else None,
        )

    def _check(self, name: str, check: Callable[[], str | Check]) -> None:
        self.checks.append(run_check(name, check))

    def _read_journal(self) -> str:
        key = read_key(self.root / "private" / "noise.key")
        journal = read_step_journal(self.root / "private" / "journal.jsonl", key)
        if journal.created.key_fingerprint != fingerprint(key):
            raise UnsafeState("the noise key is not the key that the run was created with")
        self.journal = journal
        return (
            f"{len(journal.macs):,} lines, all unchanged: {journal.steps:,} steps, all different, "
            f"and {len(journal.saves):,} checkpoints"
        )

    def _check_other_files(self, journal: StepJournal) -> None:
        """Run the checks that compare other files with the journal."""
        self.checks += witness_checks(journal, self.witness_folder, self.root)
        self._check("settings and plan", lambda: self._read_files(journal))
        checkpoints = self.root / "private" / "checkpoints"
        self._check("checkpoints", lambda: check_checkpoints(checkpoints, journal))
        if self.files is None:
            text = "not checked, because the settings or the plan cannot be trusted"
            self.checks.append(Check("guarantee", "warning", text))
            return
        files = self.files
        self._check("steps", lambda: _check_steps(journal, files))
        if isinstance(files.run.settings.clip_norm, AdaptiveContent) or journal.clipped:
            key = read_key(self.root / "private" / "noise.key")
            self._check("clip norms", lambda: check_clip_norms(_adaptive(journal, files), key))
        self._check("noise", lambda: _check_noise(files))
        if files.plan.sampling == "none":
            self._check_in_order(journal, files)
        else:
            self._check_sampled(journal, files)
        if files.plan.failure or files.plan.sampling == "balls-in-bins":
            self._check("certificate", lambda: _check_certificate(files.plan))
        if files.run.test_key:
            text = "NOT PRIVATE: the noise key is a fixed key for tests, which anybody can guess"
            self.checks.append(Check("noise key", "failed", text))

    def _read_files(self, journal: StepJournal) -> str | Check:
        created = journal.created
        check_digest(self.root / "run.json", created.settings_sha256, "the run was created")
        check_digest(self.root / "plan.json", created.plan_sha256, "the run was created")
        for name, sha256 in created.files.items():
            check_digest(self.root / name, sha256, "the run was created")
        files = CentralizedFiles(self.root)
        if files.run.run != created.run:
            raise UnsafeState("run.json belongs to another run")
        files.check_units()
        self.files = files
        names = ", ".join(("run.json", "plan.json", *created.files))
        text = f"{names} and the mechanism are unchanged since the run was created"
        if (self.root / CANARIES).exists() and CANARIES not in created.files:
            text += f"; {CANARIES} is not sealed: the run did not have it when it was created"
            return Check("settings and plan", "warning", text)
        return text

    def _check_in_order(self, journal: StepJournal, files: CentralizedFiles) -> None:
        """Run the checks of epsilon of a run without sampling."""
        in_order, plan = InOrder(files), files.plan
        planned = plan.dataset.steps
        self._check("epsilon", lambda: in_order.check(plan.epsilon, planned, "the plan"))
        steps = min(journal.steps, planned)

        def check_saved() -> str | Check:
            for before, after in zip(journal.saves, journal.saves[1:], strict=False):
                if not after.epsilon >= before.epsilon * (1 - ROUNDING):
                    raise UnsafeState(
                        f"epsilon falls from {before.epsilon:.7g} to {after.epsilon:.7g} between "
                        f"the checkpoints after {before.steps} and {after.steps} steps"
                    )
            if not journal.saves:
                return "no checkpoint was written yet"
            last = journal.saves[-1]
            return in_order.check(last.epsilon, min(last.steps, planned), "the journal")

        def check_coverage(claim: GuaranteeFile) -> str | Check:
            stated = in_order.check(claim.epsilon, min(claim.steps, planned), "the file")
            text = stated.text if isinstance(stated, Check) else stated
            needed = in_order.range(steps).least if steps else 0.0
            if claim.steps < journal.steps and not claim.epsilon >= needed * (1 - ROUNDING):
                text += (
                    ". All steps in the journal count as released, so the file is older than the "
                    f"run: their epsilon is {needed:.6g}. Resume the run to write it again"
                )
                return Check("guarantee.json", "warning", text)
            return text

        self._check("journalled epsilon", check_saved)
        self._check_guarantee(journal, files, check_coverage)
        self._check("rigorous", lambda: self._check_rigorous(in_order))
        if journal.steps <= planned:
            try:
                self.epsilon = in_order.range(steps).least if steps else 0.0
            except DpftrlError:  # a check above has failed with the same message
                self.epsilon = None

    def _check_sampled(self, journal: StepJournal, files: CentralizedFiles) -> None:
        """Run the checks of epsilon of a run with sampling."""
        sampled, plan = Sampled(files), files.plan
        self._check("sampling", sampled.check_strategy)
        is_estimate = plan.sampling == "balls-in-bins"
        confirmation = run_check(
            ESTIMATE if is_estimate else "epsilon",
            sampled.check_bins if is_estimate else sampled.check_poisson,
        )
        self.checks.append(confirmation)
        # What was recomputed is an upper bound or an estimate. The stated epsilon is confirmed.
        if confirmation.outcome != "failed" and journal.steps <= plan.dataset.steps:
            self.epsilon = plan.epsilon if journal.steps else 0.0

        def check_saved() -> str:
            for saved in journal.saves:
                if saved.epsilon != plan.epsilon:
                    raise UnsafeState(
                        f"epsilon after {saved.steps} steps is {saved.epsilon:.7g} in the journal, "
                        f"and {plan.epsilon:.7g} in the plan; with sampling they are equal"
                    )
            return "the epsilon of every checkpoint is that of the plan"

        def check_coverage(claim: GuaranteeFile) -> str:
            if claim.epsilon != plan.epsilon:
                raise UnsafeState(
                    f"the file states epsilon {claim.epsilon:.7g}, and the plan {plan.epsilon:.7g};"
                    " with sampling they are equal"
                )
            return "its epsilon is that of the plan, which covers all planned steps"

        self._check("journalled epsilon", check_saved)
        self._check_guarantee(journal, files, check_coverage)
        self.checks.append(Check("rigorous", "skipped", rigorous.SAMPLED))

    def _check_rigorous(self, in_order: "InOrder") -> str | Check:
        """Enclose epsilon in interval arithmetic, for the steps that the file covers."""
        path = self.root / "guarantee.json"
        outcomes = {check.name: check.outcome for check in self.checks}
        if not path.exists() or outcomes.get("guarantee.json") != "passed":
            text = "not checked rigorously: there is no guarantee.json that passed its check"
            return Check("rigorous", "skipped", text)
        claim = read_json(path, GuaranteeFile, "centralized guarantee")
        stream = in_order.noise_stream(claim.steps)
        return rigorous.check_epsilon([stream], claim.delta, claim.epsilon)

    def _check_guarantee(
        self,
        journal: StepJournal,
        files: CentralizedFiles,
        check_coverage: Callable[[GuaranteeFile], str | Check],
    ) -> None:
        """Run the checks of `guarantee.json`.

        Args:
            journal: The journal of the run.
            files: The settings and the plan.
            check_coverage: Checks the epsilon of the file.
        """
        path = self.root / "guarantee.json"
        if not path.exists():
            self._check("guarantee.json", lambda: _check_no_guarantee(journal))
            return
        claims: list[GuaranteeFile] = []

        def check() -> str | Check:
            claim = read_json(path, GuaranteeFile, "centralized guarantee")
            claims.append(claim)
            text = _check_description(claim, path, files, journal)
            result = check_coverage(claim)
            if isinstance(result, Check):
                return Check("guarantee.json", result.outcome, f"{text}; {result.text}")
            return f"{text}; {result}"

        self._check("guarantee.json", check)
        for claim in claims:
            self._check("hypotheses", lambda claim=claim: check_hypotheses(claim.hypotheses, files))


def _check_no_guarantee(journal: StepJournal) -> str:
    if journal.steps:
        raise UnsafeState("guarantee.json is missing, although a step was done")
    return "no step was done yet, so there is none"


def _check_description(
    claim: GuaranteeFile, path: Path, files: CentralizedFiles, journal: StepJournal
) -> str:
    """Check that a guarantee file describes this run.

    Raises:
        UnsafeState: It does not.
    """
    run, plan = files.run, files.plan
    for what, holds in (
        ("the identity of the run", claim.run == run.run),
        ("the unit", claim.unit == run.settings.unit),
        ("the adjacency", claim.adjacency == "zero-out"),
        ("the data set", claim.dataset == plan.dataset),
        ("the sampling", claim.sampling == plan.sampling),
        ("the number of groups", claim.groups == plan.groups),
        ("the mechanism", mechanism_from(claim.mechanism, path) == files.mechanism),
        ("the noise multiplier", claim.noise_multiplier == plan.noise_multiplier),
        ("the clip norm", claim.clip_norm == run.settings.clip_norm),
        ("delta", claim.delta == plan.delta),
        ("the failure probability", claim.failure == plan.failure),
    ):
        if not holds:
            raise UnsafeState(f"{what} in guarantee.json is not that of this run")
    most = files.next_checkpoint(journal.steps)
    if not max(1, journal.saved_steps) <= claim.steps <= most:
        raise UnsafeState(
            f"it covers {claim.steps:,} steps; the last checkpoint was written after "
            f"{journal.saved_steps:,} steps, and the next one is due after {most:,}"
        )
    return f"it covers {claim.steps:,} steps, and the journal has {journal.steps:,}"


def _check_steps(journal: StepJournal, files: CentralizedFiles) -> str:
    """Check the number of steps, and that the guarantee covers so many normals."""
    planned, size = files.plan.dataset.steps, files.run.settings.size
    if journal.steps > planned:
        raise UnsafeState(
            f"the journal has {journal.steps:,} steps, and the plan only {planned:,}: no guarantee "
            "covers the others"
        )
    if not 0 < size * planned <= MOST_DRAWS:
        raise UnsafeState(
            f"a model of {size:,} coordinates in {planned:,} steps needs more normals than the "
            "2^40 that a guarantee covers"
        )
    return f"{journal.steps:,} of {planned:,} planned steps"


def _check_noise(files: CentralizedFiles) -> str | Check:
    """Check that the noise stream of the mechanism multiplies by the inverse of C."""
    steps = files.plan.dataset.steps
    checked = min(steps, MOST_ROUNDS)
    text = Strategy(files.mechanism, checked).check_noise()
    if checked == steps:
        return text
    return Check("noise", "warning", f"{text}; the later ones of {steps:,} were not compared")


def _check_certificate(plan: PlanFile) -> str | Check:
    """Check the failure probability of certificates from random samples."""
    if not plan.failure:
        raise UnsafeState(
            "epsilon rests on random samples, which can mislead, but the failure probability is 0"
        )
    text = f"the certificate of epsilon is wrong with probability {plan.failure:.2g} at most"
    if plan.failure > MOST_FAILURE:
        return Check("certificate", "warning", f"{text}, which is more than {MOST_FAILURE:g}")
    return text


def _adaptive(journal: StepJournal, files: CentralizedFiles) -> AdaptiveRun:
    """Return what the files of a run say about its adaptive clipping."""
    plan, settings = files.plan, files.run.settings
    if len(journal.clipped) != journal.steps:
        raise UnsafeState("a step has no clip norm in the journal")
    finest = grid_step(plan.noise_multiplier, STEPS_PER_DEVIATION)
    return AdaptiveRun(
        options=settings.clip_norm,
        rounds=[step.clipping for step in journal.clipped],
        digests=[step.digest for step in journal.clipped],
        goal=plan.dataset.batch_size,
        most=plan.dataset.size,
        step=JAX_STEP if settings.framework == "jax" else finest,
        mechanism=files.mechanism,
        noise_multiplier=plan.noise_multiplier,
        size=settings.size,
        buffers="float64",
    )
