"""Plans for a data set: which mechanism and which sampling need the least noise.

`options_for_dataset` compares DP-SGD with Poisson sampling, banded strategies with cyclic Poisson
sampling, and a BLT with and without balls-in-bins sampling. They are compared by `rms_noise`, which
is what reaches the model. A `DatasetPlan` holds the one that was chosen.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal, final, get_args

import msgspec

from dpftrl._internal.checks import fraction, positive_number, whole_number
from dpftrl._internal.progress import Progress
from dpftrl._internal.storage import read_json, replace_file
from dpftrl.accounting import Guarantee, account, calibrate
from dpftrl.accounting.amplification import (
    SampledGuarantee,
    account_sampled,
    bands_of,
    believe_sampled,
    calibrate_sampled,
    check_sampled,
)
from dpftrl.accounting.balls_in_bins import DEFAULT_FAILURE
from dpftrl.accounting.guarantee import BufferType
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.mechanisms import Independent, Mechanism
from dpftrl.mechanisms.registry import MechanismFile, mechanism_content, mechanism_from
from dpftrl.optimize import (
    optimize_bandmf,
    optimize_blt,
    optimize_for_balls_in_bins,
    optimize_for_cyclic_poisson,
)
from dpftrl.participation import (
    BallsInBins,
    CyclicPoisson,
    FixedEpochs,
    MinSep,
    Poisson,
    Sampling,
)
from dpftrl.plan.candidates import QUICK_BANDMF, Missing
from dpftrl.plan.make_plan import DEFAULT_BUFFERS, OPTIMIZED_BLT, mechanism

SamplingName = Literal["none", "poisson", "cyclic-poisson", "balls-in-bins"]
SAMPLINGS: Final[tuple[SamplingName, ...]] = get_args(SamplingName)
# A sampling, or `auto` for the one that needs the least noise.
SamplingChoice = SamplingName | Literal["auto"]
# The samplings whose accountant is the package dp-accounting.
WITH_DP_ACCOUNTING: Final = ("poisson", "cyclic-poisson")
# The samplings that are compared if none is given.
QUICK_SAMPLINGS: Final[tuple[SamplingName, ...]] = ("poisson", "none", "balls-in-bins")
# The name of the banded Toeplitz strategy that is optimized for cyclic Poisson sampling.
OPTIMIZED_BANDS: Final = "band-toeplitz"


@final
@dataclass(frozen=True)
class Dataset:
    """A data set, and how long it is trained on.

    Attributes:
        size: Number of examples.
        batch_size: Expected number of examples per batch.
        epochs: How often every example takes part.
        max_batch_size: Largest number of examples in a batch; None for no limit.

    >>> Dataset(size=50_000, batch_size=500, epochs=10).steps
    1000
    """

    size: int
    batch_size: int
    epochs: int
    max_batch_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs"):
            whole_number(name, getattr(self, name))
        self.sampling("poisson")  # checks the other numbers

    @property
    def steps_per_epoch(self) -> int:
        """Number of batches that hold every example about once."""
        return -(-self.size // self.batch_size)

    @property
    def steps(self) -> int:
        """Number of steps of the training."""
        return self.epochs * self.steps_per_epoch

    @property
    def in_order(self) -> FixedEpochs:
        """The participation without sampling: the same batches in the same order every epoch."""
        return FixedEpochs(self.steps, self.steps_per_epoch, self.epochs)

    def sampling(self, name: SamplingName, groups: int = 1) -> Sampling:
        """The sampling of this name.

        Args:
            name: A name in `SAMPLINGS`, but not `none`.
            groups: For cyclic Poisson sampling.
        """
        size, batch, steps, most = self.size, self.batch_size, self.steps, self.max_batch_size
        if name == "poisson":
            return Poisson(size, batch, steps, max_batch_size=most)
        if name == "cyclic-poisson":
            return CyclicPoisson(size, batch, steps, groups, max_batch_size=most)
        if name == "balls-in-bins":
            return BallsInBins(size, batch, steps, max_batch_size=most)
        raise InvalidInput(f"there is no sampling {name!r}")

    def sampling_for(self, chosen: Mechanism, name: SamplingName) -> Sampling:
        """The sampling of this name, with as many groups as the mechanism has bands."""
        if name != "cyclic-poisson":
            return self.sampling(name)
        return self.sampling(name, min(bands_of(chosen, self.steps), self.steps_per_epoch))

    def __str__(self) -> str:
        return (
            f"{self.size:,} examples, batches of {self.batch_size:,}, {self.epochs:,} epoch(s) "
            f"({self.steps:,} steps)"
        )


@dataclass(frozen=True)
class _Training:
    """A sampling and a guarantee, and what follows from them.

    Attributes:
        sampling: The name of the sampling.
        guarantee: The guarantee, with mechanism and noise.
    """

    sampling: SamplingName
    guarantee: Guarantee | SampledGuarantee

    @property
    def mechanism(self) -> Mechanism:
        """The mechanism that correlates the noise."""
        one = self.guarantee
        return one.mechanism if isinstance(one, SampledGuarantee) else one.runs[0].mechanism

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of Z divided by the clip norm."""
        one = self.guarantee
        return (
            one.noise_multiplier
            if isinstance(one, SampledGuarantee)
            else one.runs[0].noise_multiplier
        )

    @property
    def sensitivity(self) -> float:
        """The sensitivity that the guarantee rests on."""
        one = self.guarantee
        return (
            one.sensitivity if isinstance(one, SampledGuarantee) else one.runs[0].sensitivity.value
        )

    @property
    def sensitivity_kind(self) -> str:
        """Whether the sensitivity is exact or an upper bound."""
        one = self.guarantee
        return "exact" if isinstance(one, SampledGuarantee) else one.runs[0].sensitivity.kind

    @property
    def failure(self) -> float:
        """The probability that a certificate behind epsilon is wrong."""
        return self.guarantee.failure if isinstance(self.guarantee, SampledGuarantee) else 0.0

    @property
    def rms_noise(self) -> float:
        """Root mean square of the noise on prefix sums, in clip norms."""
        one = self.guarantee
        if isinstance(one, SampledGuarantee):
            return one.rms_noise
        run = one.runs[0]
        return run.noise_multiplier * run.mechanism.rms_error(run.participation.rounds)


@final
@dataclass(frozen=True)
class DatasetOption(_Training):
    """A way to train on a data set.

    Attributes:
        label: The name of the mechanism in tables.
        seconds: How long it took to find it.
    """

    label: str = ""
    seconds: float = 0.0


@final
@dataclass(frozen=True)
class DatasetPlan(_Training):
    """A mechanism with its noise and a sampling for a data set, and the guarantee of training.

    Attributes:
        dataset: The data set.
    """

    dataset: Dataset

    def __post_init__(self) -> None:
        self.mechanism.check_noise(self.dataset.steps)

    @property
    def participation(self) -> FixedEpochs:
        """The number of steps. Without sampling, also in which of them an example takes part."""
        return self.dataset.in_order

    @property
    def buffers(self) -> BufferType:
        """The number type of the noise buffers that the guarantee covers."""
        return "float64"

    def after(self, steps: int) -> Guarantee | SampledGuarantee:
        """The guarantee of a run that stopped after some of its steps.

        Args:
            steps: Number of steps, at least 1 and at most as many as planned.
        """
        promised = self.guarantee
        if isinstance(promised, SampledGuarantee):
            return promised.after(steps)
        if steps > self.dataset.steps:
            raise InvalidInput(
                f"the guarantee covers {self.dataset.steps:,} steps, got {steps:,}; plan a new run"
            )
        epochs = -(-steps // self.dataset.steps_per_epoch)
        taken = FixedEpochs(steps, self.dataset.steps_per_epoch, epochs)
        return account(self.mechanism, taken, self.noise_multiplier, promised.delta)


def mechanism_for_dataset(
    name: str,
    dataset: Dataset,
    sampling: SamplingName,
    epsilon: float | None = None,
    delta: float | None = None,
    on_progress: Progress | None = None,
) -> Mechanism:
    """Build the mechanism of this name for a data set and a sampling.

    With balls-in-bins sampling, `blt` is the BLT that needs the least noise for the target. With
    cyclic Poisson sampling, `band-toeplitz` is the banded Toeplitz strategy that does.

    Args:
        name: A name that `dpftrl mechanisms` lists, `band-toeplitz`, or the path of a .json file.
        dataset: The data set.
        sampling: The sampling.
        epsilon: The target epsilon, where the name needs one.
        delta: The target delta, where the name needs one.
        on_progress: Called by long optimizations.

    Raises:
        InvalidInput: The name needs a target and there is none.
    """
    is_blt = name == OPTIMIZED_BLT and sampling == "balls-in-bins"
    is_banded = name == OPTIMIZED_BANDS and sampling == "cyclic-poisson"
    if not (is_blt or is_banded):
        if name == OPTIMIZED_BANDS:
            raise InvalidInput(
                "band-toeplitz is optimized for cyclic-poisson sampling; for another sampling, "
                "optimize it with `dpftrl optimize band-toeplitz` and give the file"
            )
        return mechanism(name, dataset.in_order)
    if epsilon is None or delta is None:
        raise InvalidInput(
            f"which {name} is best with {sampling} sampling depends on epsilon: optimize it with "
            f"`dpftrl optimize {name} --out FILE.json` and give the file"
        )
    if is_blt:
        bins = BallsInBins(dataset.size, dataset.batch_size, dataset.steps)
        return optimize_for_balls_in_bins(bins, epsilon, delta, on_progress=on_progress).mechanism
    return optimize_for_cyclic_poisson(
        dataset.size, dataset.batch_size, dataset.steps, epsilon, delta, on_progress=on_progress
    ).mechanism


def account_dataset(
    chosen: Mechanism,
    dataset: Dataset,
    sampling: SamplingName,
    noise_multiplier: float,
    delta: float,
    failure: float = DEFAULT_FAILURE,
) -> Guarantee | SampledGuarantee:
    """The guarantee of a mechanism with given noise, with or without sampling."""
    if sampling == "none":
        return account(chosen, dataset.in_order, noise_multiplier, delta)
    drawn = dataset.sampling_for(chosen, sampling)
    return account_sampled(chosen, drawn, noise_multiplier, delta, failure=failure)


def calibrate_dataset(
    chosen: Mechanism,
    dataset: Dataset,
    sampling: SamplingName,
    epsilon: float,
    delta: float,
    failure: float = DEFAULT_FAILURE,
) -> Guarantee | SampledGuarantee:
    """The guarantee of a mechanism with the smallest noise for an epsilon."""
    if sampling == "none":
        noise_multiplier = calibrate(chosen, dataset.in_order, epsilon, delta)
        return account(chosen, dataset.in_order, noise_multiplier, delta)
    drawn = dataset.sampling_for(chosen, sampling)
    return calibrate_sampled(chosen, drawn, epsilon, delta, failure=failure)


def options_for_dataset(
    dataset: Dataset,
    epsilon: float,
    delta: float,
    *,
    samplings: tuple[SamplingName, ...] = SAMPLINGS,
    with_bandmf: bool = False,
    failure: float = DEFAULT_FAILURE,
    on_progress: Progress | None = None,
) -> Iterator[DatasetOption | Missing]:
    """Yield every way to train on a data set for an epsilon, or why it was left out.

    At most one of them rests on a certificate, so that choosing the best one afterwards does not
    make it less certain.

    Args:
        dataset: The data set.
        epsilon: The target epsilon.
        delta: The target delta.
        samplings: The samplings to consider.
        with_bandmf: Optimize BandMF even for many steps, which is slow.
        failure: The largest probability that a certificate is wrong.
        on_progress: Called by long optimizations.
    """

    def option(label: str, sampling: SamplingName, chosen: Mechanism) -> DatasetOption:
        guarantee = calibrate_dataset(chosen, dataset, sampling, epsilon, delta, failure)
        return DatasetOption(sampling, guarantee, label, time.perf_counter() - started)

    def dp_sgd() -> DatasetOption:
        return option("dp-sgd", "poisson", Independent())

    def banded() -> DatasetOption:
        best = optimize_for_cyclic_poisson(
            dataset.size, dataset.batch_size, dataset.steps, epsilon, delta, on_progress=on_progress
        )
        bands.append(bands_of(best.mechanism, dataset.steps))
        return option("band-toeplitz", "cyclic-poisson", best.mechanism)

    def bandmf() -> DatasetOption | Missing:
        if not bands:
            return Missing("bandmf", "the number of bands comes from band-toeplitz, left out too")
        if dataset.steps > QUICK_BANDMF and not with_bandmf:
            return Missing(
                "bandmf", f"slow for more than {QUICK_BANDMF:,} steps; give --with-bandmf"
            )
        once = MinSep.once(dataset.steps)
        return option("bandmf", "cyclic-poisson", optimize_bandmf(once, bands[0]).mechanism)

    def blt_in_order() -> DatasetOption:
        buffers = min(DEFAULT_BUFFERS, dataset.steps)
        return option("blt", "none", optimize_blt(dataset.in_order, buffers, "rms").mechanism)

    def blt_in_bins() -> DatasetOption:
        best = mechanism_for_dataset(
            OPTIMIZED_BLT, dataset, "balls-in-bins", epsilon, delta, on_progress
        )
        return option("blt", "balls-in-bins", best)

    bands = list[int]()
    for label, sampling, compute in (
        ("dp-sgd", "poisson", dp_sgd),
        ("band-toeplitz", "cyclic-poisson", banded),
        ("bandmf", "cyclic-poisson", bandmf),
        ("blt", "none", blt_in_order),
        ("blt", "balls-in-bins", blt_in_bins),
    ):
        if sampling not in samplings:
            continue
        started = time.perf_counter()
        try:
            yield compute()
        except DpftrlError as error:
            yield Missing(f"{label} ({sampling})", str(error))


def make_dataset_plan(
    dataset: Dataset,
    epsilon: float,
    delta: float,
    *,
    sampling: SamplingChoice | None = "auto",
    mechanism_name: str | None = None,
    on_progress: Progress | None = None,
) -> DatasetPlan:
    """Plan a training on a data set: the mechanism and the sampling with the least noise.

    By default, DP-SGD with Poisson sampling and BLTs with and without balls-in-bins sampling are
    compared. Cyclic Poisson sampling, whose best number of bands takes long to find and which never
    was the best in our measurements, is considered if `sampling` names it.

    Args:
        dataset: The data set.
        epsilon: The target epsilon.
        delta: The target delta.
        sampling: The sampling; `auto`, which is the default, or None for the one that needs the
            least noise. `none` is no sampling: a fixed order.
        mechanism_name: A name that `dpftrl mechanisms` lists, or the path of a .json file; by
            default the mechanism with the least noise. It needs a sampling.
        on_progress: Called by long optimizations.

    >>> plan = make_dataset_plan(Dataset(1_000, 100, 5), 2.0, 1e-5, sampling="none")
    >>> plan.sampling, plan.mechanism.family, round(plan.guarantee.epsilon, 6)
    ('none', 'blt', 2.0)
    """
    check_target(epsilon, delta)
    if sampling == "auto":
        sampling = None
    if sampling is not None:
        check_sampling(sampling)
    if mechanism_name is not None:
        if sampling is None:
            raise InvalidInput(
                f"give the sampling for {mechanism_name} too: one of {', '.join(SAMPLINGS)}"
            )
        chosen = mechanism_for_dataset(
            mechanism_name, dataset, sampling, epsilon, delta, on_progress
        )
        guarantee = calibrate_dataset(chosen, dataset, sampling, epsilon, delta)
        return DatasetPlan(sampling, guarantee, dataset)
    samplings = QUICK_SAMPLINGS if sampling is None else (sampling,)
    rows = list(
        options_for_dataset(dataset, epsilon, delta, samplings=samplings, on_progress=on_progress)
    )
    options = [row for row in rows if isinstance(row, DatasetOption)]
    if not options:
        reasons = "; ".join(f"{row.label}: {row.note}" for row in rows if isinstance(row, Missing))
        raise InvalidInput(f"nothing trains on this data set for this target: {reasons}")
    best = min(options, key=lambda row: row.rms_noise)
    return DatasetPlan(best.sampling, best.guarantee, dataset)


def check_target(epsilon: float | None, delta: float | None) -> None:
    """Refuse an epsilon or a delta that no training can have. None stands for one not given."""
    if epsilon is not None:
        positive_number("epsilon", epsilon)
    if delta is not None:
        fraction("delta", delta)


def check_sampling(sampling: SamplingName) -> None:
    """Refuse a sampling that does not exist, or whose accountant is not installed."""
    if sampling not in SAMPLINGS:
        names = ", ".join(("auto", *SAMPLINGS))
        raise InvalidInput(f"sampling must be one of {names}, got {sampling!r:.40}")
    if sampling in WITH_DP_ACCOUNTING and not has_dp_accounting():
        raise InvalidInput(
            f"sampling {sampling!r} needs the package dp-accounting: pip install "
            "'dpftrl[dp-accounting]'"
        )


def has_dp_accounting() -> bool:
    """Whether the package dp-accounting is installed, which Poisson sampling needs."""
    return find_spec("dp_accounting") is not None


def large_delta(delta: float, size: int, unit: str = "example") -> str | None:
    """A warning about a delta that is not below 1 / `size`; None if it is."""
    # A mechanism that publishes each unit in full with probability delta is (0, delta)-DP. With
    # such a delta it publishes one unit on average.
    if delta * size < 1:
        return None
    return (
        f"delta {delta:g} is not below 1 / dataset, {1 / size:.3g}: such a delta permits "
        f"publishing one {unit} in full"
    )


class DatasetPlanFile(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of the file of a plan for a data set."""

    format: Literal["dpftrl dataset plan"]
    version: Literal[1]
    dataset: Dataset
    sampling: SamplingName
    groups: int | None
    mechanism: MechanismFile
    noise_multiplier: float
    epsilon: float
    delta: float
    failure: float


def save_dataset_plan(plan: DatasetPlan, path: str | os.PathLike[str]) -> None:
    """Write a plan for a data set to a .json file; an existing file is replaced."""
    target = _json_path(path)
    drawn = plan.guarantee.sampling if isinstance(plan.guarantee, SampledGuarantee) else None
    content = DatasetPlanFile(
        "dpftrl dataset plan",
        1,
        plan.dataset,
        plan.sampling,
        drawn.groups if isinstance(drawn, CyclicPoisson) else None,
        mechanism_content(plan.mechanism, target),
        plan.noise_multiplier,
        plan.guarantee.epsilon,
        plan.guarantee.delta,
        plan.failure,
    )
    replace_file(target, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def load_dataset_plan(path: str | os.PathLike[str], *, certify: bool = True) -> DatasetPlan:
    """Read a plan for a data set from a .json file.

    Args:
        path: The file.
        certify: Whether to compute the guarantee of sampled batches again. Leave it out only for a
            file that nobody else can have changed.

    Raises:
        InvalidInput: The file is not such a plan, or claims more than it guarantees.

    Guarantees:
        The guarantee is computed again; with balls-in-bins sampling, it is certified again with new
        samples, which takes some seconds. A file that claims a smaller epsilon is refused.
    """
    target = _json_path(path)
    file = read_json(target, DatasetPlanFile, "dataset plan")
    chosen = mechanism_from(file.mechanism, target)
    delta, scale = file.delta, file.noise_multiplier
    if file.sampling == "none":
        guarantee = account(chosen, file.dataset.in_order, scale, delta)
        if guarantee.epsilon > file.epsilon * (1 + 1e-9):
            raise InvalidInput(
                f"{target} claims epsilon {file.epsilon:g}, but its noise gives "
                f"{guarantee.epsilon:g}"
            )
        return DatasetPlan(file.sampling, guarantee, file.dataset)
    drawn = file.dataset.sampling(file.sampling, file.groups or 1)
    # Whatever the file says, a certificate is as sure as usual.
    failure = min(file.failure or DEFAULT_FAILURE, DEFAULT_FAILURE)
    if not certify:
        believed = believe_sampled(chosen, drawn, scale, file.epsilon, delta, failure=file.failure)
        return DatasetPlan(file.sampling, believed, file.dataset)
    try:
        checked = check_sampled(chosen, drawn, scale, file.epsilon, delta, failure=failure)
    except InvalidInput as error:
        raise InvalidInput(f"{target}: {error}") from None
    return DatasetPlan(file.sampling, checked, file.dataset)


def _json_path(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix != ".json":
        raise InvalidInput(f"the name of a plan file ends in .json, got {str(target)!r}")
    return target
