r"""DP-FTRL for models that are trained with Opacus: its gradients, our noise.

Opacus computes the gradients of single examples, or ghost norms. The optimizers of this module clip
them, add correlated noise of a `DatasetPlan`, and state the guarantee:

```python
plan = make_dataset_plan(Dataset(len(data), batch_size=128, epochs=5), epsilon=2, delta=1e-5)
model = GradSampleModule(model)  # of Opacus
optimizer = DPFTRLOptimizer(optimizer, plan, key=NoiseKey.generate(), clip_norm=1.0)
for x, y in optimizer.loader(data):  # all epochs
    loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()
print(optimizer.get_epsilon())
```

With ghost clipping, `GhostClippingModule` and `DPFTRLOptimizerFastGradientClipping` take the place
of `GradSampleModule` and `DPFTRLOptimizer`, with the loss `GhostClippingLoss`. Opacus'
`BatchMemoryManager` and the learning rate schedulers of PyTorch work as usual. Do not use
`PrivacyEngine`: it draws noise of its own, and its accountants do not know correlated noise.
"""

# PyTorch and Opacus are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, cast, final

import numpy as np
import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from dpftrl._internal.checks import positive_number
from dpftrl.accounting import Guarantee, Hypothesis, SampledGuarantee
from dpftrl.centralized.batches import Batches, Units
from dpftrl.clipping import ExactSum, Grid
from dpftrl.errors import InvalidInput, RoundsExceeded, UnsafeState
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.plan import DatasetPlan
from dpftrl.torch._opacus_batches import HandedOut, planned_loader
from dpftrl.torch._opacus_ghost import (
    GhostClippingLoss,
    GhostClippingModule,
    GhostSums,
    LayerRecord,
    check_records,
)
from dpftrl.torch._opacus_sums import add_examples, add_examples_on_device

__all__ = [
    "DPFTRLOptimizer",
    "DPFTRLOptimizerFastGradientClipping",
    "GhostClippingLoss",
    "GhostClippingModule",
]

# Steps of the grid per standard deviation of the noise. Gradients of single examples are cut off to
# whole steps, so a fine grid keeps more of them.
FINENESS = 2**34
# A finer grid for ghost clipping, where rounding to the grid is part of the margin.
GHOST_FINENESS = 2**40
# The largest margin: with more, the noise would be wasted.
MOST_MARGIN = 0.05
# The entry of a state dict that holds the state of the noise.
NOISE_STATE = "dpftrl_noise_state"

OWN_GRADIENT = Hypothesis(
    "gradients",
    "The gradient of an example, as it is computed in floating point, depends on this example, the "
    "model and the shape of the batch only. The inputs of every layer have the examples in the "
    "same dimension, and no layer and no loss mixes examples: no batch normalization, and no mean "
    "over a number of words that other examples decide.",
)
OPACUS_SAMPLING = Hypothesis(
    "sampling",
    "The batches are drawn by Opacus with a random generator of PyTorch, whose seed and numbers "
    "stay secret. It has 24 bits, so that an example joins a batch with a probability that is up "
    "to 2^-24 larger than planned.",
)


def _ghost_hypothesis(margin: float) -> Hypothesis:
    return Hypothesis(
        "ghost clipping",
        f"Examples are clipped to {1 - margin:.6g} times the clip norm. The rest covers the "
        "rounding of sums and norms, provided that products of matrices in float64 are sums of "
        "products in some order, rounded as IEEE 754 says, as in BLAS libraries.",
    )


class _CorrelatedNoise(DPOptimizer):
    """What both optimizers share: the noise, the batches, the guarantee and the state."""

    _fineness: int

    def __init__(
        self,
        optimizer: Optimizer,
        plan: DatasetPlan,
        *,
        key: NoiseKey,
        clip_norm: float,
        loss_reduction: str = "mean",
    ):
        _check_arguments(optimizer, plan, loss_reduction)
        self._plan = plan
        self._clip_norm = positive_number("clip_norm", clip_norm)
        _check_not_wrapped(optimizer)
        super().__init__(
            optimizer,
            noise_multiplier=plan.noise_multiplier,
            max_grad_norm=self._clip_norm,
            expected_batch_size=plan.dataset.batch_size,
            loss_reduction=loss_reduction,
        )
        self._parameters: list[nn.Parameter] = self.params
        for p in self._parameters:
            del cast("Any", p).summed_grad  # Opacus' place for sums, which is not used here
        _check_parameters(self._parameters)
        self._size = sum(p.numel() for p in self._parameters)
        self._stream = NoiseStream(plan, self._size, key=key, clip_norm=self._clip_norm)
        self._key = key
        self._grid = Grid.for_noise(plan.noise_multiplier, self._clip_norm, self._fineness)
        self._total = ExactSum(self._grid, self._size)
        self._batches = Batches(plan, Units(plan.dataset.size), key)
        self._handed_out = HandedOut(self._discard)
        self._opacus_sampling = False
        self._accounted: Guarantee | SampledGuarantee = plan.guarantee
        self._accounted_steps = 0

    # --- What users read ---------------------------------------------------------------------

    @property
    def plan(self) -> DatasetPlan:
        """The plan."""
        return self._plan

    @property
    def steps(self) -> int:
        """Number of steps done."""
        return self._stream.round

    @property
    def margin(self) -> float:
        """The relative part of the clip norm that covers rounding; 0 if sums are exact."""
        return 0.0

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The conditions of `get_epsilon`: those of the plan, and those of Opacus' gradients."""
        accounted = self._account().hypotheses
        if self._opacus_sampling:
            accounted = (*(one for one in accounted if one.name != "sampling"), OPACUS_SAMPLING)
        return (*accounted, OWN_GRADIENT)

    def guarantee(self) -> Guarantee | SampledGuarantee | None:
        """The guarantee of the steps done so far, with `hypotheses`; None before the first step."""
        return replace(self._account(), hypotheses=self.hypotheses) if self.steps else None

    def _account(self) -> Guarantee | SampledGuarantee:
        """The guarantee of the steps done so far; before the first step, that of the plan."""
        if self.steps and self._accounted_steps != self.steps:
            self._accounted = self._plan.after(self.steps)  # with balls-in-bins, it takes seconds
            self._accounted_steps = self.steps
        return self._accounted

    def get_epsilon(self, delta: float | None = None) -> float:
        """The epsilon of the steps done so far, at the delta of the plan.

        Args:
            delta: The delta of the plan; another one is refused.

        Guarantees:
            It holds under `hypotheses`, for whoever sees the model after every step.
        """
        planned = self._plan.guarantee.delta
        if delta is not None and delta != planned:
            raise InvalidInput(
                f"the guarantee of this plan is for delta {planned!r}, got {delta!r}; plan with "
                "the delta that you need"
            )
        return self._account().epsilon if self.steps else 0.0

    def loader(self, data: Any, *, per_epoch: bool = False, **options: Any) -> DataLoader[Any]:
        """The data loader that hands out the batches of the plan, from the step that is due.

        Without sampling, these are the same batches in the same order in every epoch. With
        sampling, they are random batches of random sizes, and some may be empty. All of them depend
        on the key only, so that a run can be resumed. Sampled batches are secret: do not log them.

        Args:
            data: The data set, with as many examples as planned. Only if the plan has Poisson
                sampling, it may be a loader of Opacus with the same sample rate; its batches must
                stay secret, and they are not the same after a restart. Prefer the data set.
            per_epoch: Stop at the end of each epoch. By default, the loader goes through all steps
                of the plan.
            options: Other arguments of `DataLoader`, such as `num_workers` and `collate_fn`.

        Raises:
            InvalidInput: The data or the loader is not what the plan is for.
        """
        loader = planned_loader(
            self._plan,
            self._batches,
            self._handed_out,
            data,
            per_epoch=per_epoch,
            options=options,
        )
        self._opacus_sampling |= isinstance(data, DataLoader)
        return loader

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._plan.mechanism.name}, {self.steps:,} of "
            f"{self._plan.dataset.steps:,} steps, {self._inner!r})"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("this optimizer cannot be pickled or copied; use state_dict()")

    # --- One step ----------------------------------------------------------------------------

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:  # noqa: ARG002
        """Clip and sum; at the end of a batch, add the noise to the sum and set gradients.

        Returns:
            Whether the gradients are set. They are not within a batch that has several parts.

        Raises:
            RoundsExceeded: All steps of the plan are done.
            InvalidInput: The gradients are not those of the batch of this step.
        """
        if self.steps >= self._plan.dataset.steps:
            raise RoundsExceeded(
                f"all {self._plan.dataset.steps:,} steps of the plan are done, and a further step "
                "has no guarantee; plan for more epochs before training"
            )
        if list(map(id, self.params)) != list(map(id, self._parameters)):
            raise InvalidInput(
                "the trainable parameters changed since the optimizer was created; create it after "
                "freezing layers"
            )
        self.clip_and_accumulate()
        if self._check_skip_next_step():
            self._is_last_step_skipped = True
            return False
        self._is_last_step_skipped = False
        self.add_noise()
        self.scale_grad()
        if self.step_hook:
            self.step_hook(self)
        return True

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Do a step of the wrapped optimizer with private gradients; see `pre_step`."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        return self._inner.step() if self.pre_step() else None

    def add_noise(self) -> None:
        """Add the noise of this step to the sum of the batch, and put the result into `p.grad`.

        Guarantees:
            The result is the exact sum of clipped gradients, plus the noise of `NoiseStream`,
            rounded to a grid.
        """
        total, self._total = self._total, ExactSum(self._grid, self._size)
        self._handed_out.check(total.updates)
        self._stream.add_to(total)
        self._handed_out.advance()
        noisy, end = torch.from_numpy(self._grid.values(total.steps)), 0
        for p in self._parameters:
            start, end = end, end + p.numel()
            p.grad = noisy[start:end].view(p.shape).to(device=p.device, dtype=p.dtype, copy=True)

    def scale_grad(self) -> None:
        """Divide `p.grad` by the planned batch size, unless losses are sums, as Opacus does."""
        if self.loss_reduction == "mean":
            for p in self._parameters:
                cast("Tensor", p.grad).div_(self._plan.dataset.batch_size)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Clear gradients. Between two parts of a batch, the sum of the batch is kept."""
        for p in self._parameters:
            cast("Any", p).grad_sample = None
        if self._total.updates and not self._is_last_step_skipped:
            self._total = ExactSum(self._grid, self._size)
        self._inner.zero_grad(set_to_none)

    def _discard(self) -> None:
        """Forget what was done of a batch that is not complete. Nothing of it was released."""
        self._total = ExactSum(self._grid, self._size)
        self._is_last_step_skipped = False
        self._step_skip_queue.clear()

    # --- State -------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The state of the wrapped optimizer, and of the noise as a tensor.

        The state is as secret as the key: whoever reads it can remove noise from the model. Never
        publish it beside a model. The key is not part of it; store the key elsewhere.

        A checkpoint protects against a planned stop. If a run may be killed at any time, a step can
        be released that no checkpoint knows; `dpftrl.torch.make_private` keeps a durable record of
        every step.
        """
        if self._total.updates or self._is_last_step_skipped:
            raise InvalidInput("within a batch there is no state to save; finish the batch first")
        with tempfile.TemporaryDirectory() as folder:  # only its owner can read it
            path = Path(folder) / "state.safetensors"
            self._stream.save(path)
            content = np.frombuffer(path.read_bytes(), np.uint8).copy()
        return {**self._inner.state_dict(), NOISE_STATE: torch.from_numpy(content)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from a state that `state_dict` returned, with the same plan and key.

        Guarantees:
            The state has a keyed seal: no other state is loaded. If steps after the saved one were
            done, and are done again with other gradients, they get fresh noise. But whoever saw
            both results has seen more than the guarantee covers: load an older state only if
            nothing of the later steps was released or looked at. An optimizer that has done later
            steps itself refuses.
        """
        content = state_dict.get(NOISE_STATE)
        if not isinstance(content, Tensor) or content.dtype != torch.uint8:
            raise InvalidInput(
                f"the state dict has no {NOISE_STATE!r}; it was saved by another optimizer, and "
                "going on without the state of the noise would repeat noise"
            )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            path.touch(mode=0o600)
            path.write_bytes(content.cpu().numpy().tobytes())
            stream = NoiseStream.load(path, self._plan, key=self._key, at_least=0)
        size, clip_norm = stream._size, stream._clip_norm  # pyright: ignore[reportPrivateUsage]
        if (size, clip_norm) != (self._size, self._clip_norm):
            raise InvalidInput(
                f"the state is of a model with {size:,} coordinates and clip norm {clip_norm!r}, "
                f"this one has {self._size:,} and {self._clip_norm!r}"
            )
        if stream.round < self.steps:
            raise UnsafeState(
                f"the state is of step {stream.round:,}, and this optimizer has released "
                f"{self.steps:,} steps, which cannot be taken back"
            )
        rest = {name: value for name, value in state_dict.items() if name != NOISE_STATE}
        self._inner.load_state_dict(rest)
        self._stream = stream
        self._handed_out.restart(stream.round)

    # --- What Opacus must not do -------------------------------------------------------------

    @property
    def original_optimizer(self) -> Optimizer:
        """Refused: `PrivacyEngine` would use it to replace this optimizer by one of its own."""
        raise InvalidInput(
            "an optimizer of dpftrl cannot be unwrapped: PrivacyEngine.make_private would replace "
            "its noise by independent noise. Wrap the model in GradSampleModule instead, and leave "
            "out PrivacyEngine"
        )

    @original_optimizer.setter
    def original_optimizer(self, optimizer: Optimizer) -> None:
        self._inner = optimizer

    @property
    def noise_multiplier(self) -> float:
        """Refused: Opacus' accountants would take it for the noise of DP-SGD."""
        raise InvalidInput(
            "Opacus' accountants and noise schedulers do not know correlated noise, and would "
            "state a wrong epsilon; use optimizer.get_epsilon() and optimizer.plan"
        )

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        _refuse_change("noise_multiplier", value, self._plan.noise_multiplier)

    @property
    def max_grad_norm(self) -> float:
        """The clip norm."""
        return self._clip_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: float) -> None:
        _refuse_change("max_grad_norm", value, self._clip_norm)

    @property
    def expected_batch_size(self) -> int:
        """The planned batch size."""
        return self._plan.dataset.batch_size

    @expected_batch_size.setter
    def expected_batch_size(self, value: float) -> None:
        _refuse_change("expected_batch_size", value, self._plan.dataset.batch_size)

    def attach_step_hook(self, fn: Callable[[DPOptimizer], None]) -> None:
        """Call a function after noise was added and before parameters change.

        An accountant of Opacus is refused, because it does not know correlated noise.
        """
        function: Any = fn.func if isinstance(fn, functools.partial) else fn
        if str(getattr(function, "__module__", "")).startswith("opacus.accountants"):
            raise InvalidInput(
                "Opacus' accountants do not know correlated noise, and would state a wrong "
                "epsilon; use optimizer.get_epsilon()"
            )
        super().attach_step_hook(fn)

    # --- What is passed on to the wrapped optimizer ------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of the wrapped optimizer."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self._inner.param_groups = param_groups

    @property
    def state(self) -> Any:
        """The state of the wrapped optimizer."""
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        self._inner.state = state

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the wrapped optimizer."""
        return self._inner.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self._inner.defaults = defaults


@final
class DPFTRLOptimizer(_CorrelatedNoise):
    """An Opacus optimizer with correlated noise, for gradients of single examples.

    It works with `GradSampleModule` and with everything else that fills `p.grad_sample`.

    Args:
        optimizer: The optimizer that changes the parameters, such as `torch.optim.SGD`. Create it
            with the trainable parameters only.
        plan: The plan; see `dpftrl.plan.make_dataset_plan`.
        key: The noise key; `NoiseKey.generate()`. Every run needs a new one.
        clip_norm: Largest L2 norm of the gradient of one example, over all parameters.
        loss_reduction: "mean" if the loss is the mean over a batch, as in the `GradSampleModule`;
            then `p.grad` is divided by the planned batch size. "sum" if it is the sum; then
            `p.grad` is not divided. Opacus does the same.

    Guarantees:
        The sum of a batch is exact: it changes by at most the clip norm if the gradient of one
        example is replaced by zero. A gradient with a NaN or an infinity counts as zero. The noise
        covers the sums of all steps as the plan says. `get_epsilon` holds under `hypotheses`. A
        step after the last planned one is refused, and so is one with other batches than those of
        `loader`, as far as their number and sizes show.
    """

    _fineness = FINENESS

    def clip_and_accumulate(self) -> None:
        """Clip the gradient of every example and add it to the sum of the batch."""
        given: list[Any] = [getattr(p, "grad_sample", None) for p in self._parameters]
        if all(samples is None for samples in given):
            return  # an empty batch; that it is one is checked before noise is added
        if any(samples is None for samples in given):
            raise InvalidInput(
                "some parameters got no gradient; freeze them with requires_grad_(False) before "
                "creating the optimizer"
            )
        for part in zip(*map(_as_list, given), strict=True):
            gradients = [_rows(s, p) for s, p in zip(part, self._parameters, strict=True)]
            if all(rows.device.type == "cpu" for rows in gradients):
                arrays = [rows.numpy() for rows in gradients]
                add_examples(self._total, arrays, torch.get_num_threads())
            else:
                add_examples_on_device(self._total, gradients)
        for p in self._parameters:
            cast("Any", p).grad_sample = None


@final
class DPFTRLOptimizerFastGradientClipping(_CorrelatedNoise, DPOptimizerFastGradientClipping):
    """An Opacus optimizer with correlated noise, for ghost clipping.

    Use it with `GhostClippingModule`, and with `GhostClippingLoss` or Opacus'
    `DPLossFastGradientClipping`.

    Args:
        optimizer: See `DPFTRLOptimizer`.
        plan: See `DPFTRLOptimizer`.
        module: The model, wrapped in `GhostClippingModule`.
        key: See `DPFTRLOptimizer`.
        clip_norm: See `DPFTRLOptimizer`.
        loss_reduction: See `DPFTRLOptimizer`.
        margin: The relative part of the clip norm that covers rounding, at most 0.05. A batch whose
            rounding it cannot cover is refused; which batches these are depends on sizes only.

    Guarantees:
        As for `DPFTRLOptimizer`, except that the sum of a batch is not exact. It still changes by
        at most the clip norm if the gradient of one example is replaced by zero, because examples
        are clipped to (1 - `margin`) times the clip norm; see `GhostSums`.
    """

    _fineness = GHOST_FINENESS

    def __init__(
        self,
        optimizer: Optimizer,
        plan: DatasetPlan,
        *,
        module: GhostClippingModule,
        key: NoiseKey,
        clip_norm: float,
        loss_reduction: str = "mean",
        margin: float = 1e-3,
    ):
        if not isinstance(module, GhostClippingModule):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidInput(
                f"module must be a GhostClippingModule, got {type(module).__name__}: the norms of "
                "other modules have no proven bound"
            )
        super().__init__(
            optimizer, plan, key=key, clip_norm=clip_norm, loss_reduction=loss_reduction
        )
        if not 0 < margin <= MOST_MARGIN:
            raise InvalidInput(f"margin must be above 0 and at most {MOST_MARGIN}, got {margin!r}")
        if module.loss_reduction != loss_reduction:
            raise InvalidInput(
                f"the module has loss_reduction {module.loss_reduction!r}, the optimizer "
                f"{loss_reduction!r}; use the same"
            )
        if any(p.device.type == "mps" for p in self._parameters):
            raise InvalidInput("ghost clipping needs float64, which this device does not have")
        self._margin = margin
        self._sums().check_grid(plan.dataset.max_batch_size or plan.dataset.batch_size)
        module.attach(self)

    @property
    def margin(self) -> float:
        """The relative part of the clip norm that covers rounding."""
        return self._margin

    @property
    def hypotheses(self) -> tuple[Hypothesis, ...]:
        """The conditions of the guarantee, including that of the margin."""
        return (*super().hypotheses, _ghost_hypothesis(self._margin))

    def _sums(self) -> GhostSums:
        return GhostSums(self._parameters, self._total, self._margin)

    def add_gradients(self, records: list[LayerRecord]) -> tuple[Tensor, Tensor]:
        """Clip and add the gradients of a backward pass; `GhostClippingModule` calls this.

        Returns:
            The clipping factor and an upper bound of the norm of every example.
        """
        if not check_records(records, self._parameters):
            return torch.zeros(0), torch.zeros(0)
        batch, sums = self._handed_out.size(), self._sums()
        sums.check_grid(batch)
        factors, norms = sums.factors(records, batch)
        sums.add(records, factors)
        return factors, norms

    def clip_and_accumulate(self) -> None:
        """Do nothing: `add_gradients` did it after the backward pass."""

    def accumulate(self) -> None:
        """Do nothing: `add_gradients` did it after the backward pass."""


def _check_arguments(optimizer: Any, plan: Any, loss_reduction: str) -> None:
    """Raise for arguments of a wrong kind."""
    if isinstance(optimizer, DPOptimizer) or not isinstance(optimizer, Optimizer):
        raise InvalidInput(
            f"optimizer must be a plain optimizer of PyTorch, got {type(optimizer).__name__}"
        )
    if not isinstance(plan, DatasetPlan):
        raise InvalidInput(
            f"plan must be a DatasetPlan, got {type(plan).__name__}; "
            "dpftrl.plan.make_dataset_plan makes one"
        )
    if loss_reduction not in ("mean", "sum"):
        raise InvalidInput(f"loss_reduction must be 'mean' or 'sum', got {loss_reduction!r:.40}")
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        raise InvalidInput("distributed training is not supported: one process adds the noise")


def _check_not_wrapped(optimizer: Optimizer) -> None:
    """Raise if another optimizer of Opacus has the same parameters."""
    groups = optimizer.param_groups
    if any(hasattr(p, "summed_grad") for group in groups for p in group["params"]):
        raise InvalidInput(
            "another optimizer of Opacus has these parameters, as after "
            "PrivacyEngine.make_private; its accountant does not see this noise. Start from a new "
            "model, wrap it in GradSampleModule, and leave out PrivacyEngine"
        )


def _check_parameters(parameters: Sequence[nn.Parameter]) -> None:
    if not parameters:
        raise InvalidInput("the optimizer has no trainable parameter")
    if len(set(map(id, parameters))) != len(parameters):
        raise InvalidInput("the optimizer has a parameter twice")
    if not all(hasattr(p, "grad_sample") for p in parameters):
        raise InvalidInput(
            "the parameters have no gradients of single examples: wrap the model in Opacus' "
            "GradSampleModule (or in GhostClippingModule) before creating this optimizer"
        )


def _refuse_change(name: str, value: float, planned: float) -> None:
    if value != planned:
        raise InvalidInput(
            f"{name} is {planned!r} in the plan and cannot become {value!r} within a run"
        )


def _as_list(samples: Any) -> list[Tensor]:
    """The gradients of one or several backward passes."""
    return list(samples) if isinstance(samples, list) else [samples]


def _rows(samples: Tensor, parameter: nn.Parameter) -> Tensor:
    """Gradients of single examples as a matrix of float32 or float64, one row per example."""
    if samples.shape[1:] != parameter.shape:
        raise InvalidInput(
            f"the gradients of a parameter of shape {tuple(parameter.shape)} have the shape "
            f"{tuple(samples.shape)}; the first dimension must be that of the examples"
        )
    wide = samples.detach() if samples.dtype == torch.float64 else samples.detach().float()
    return wide.reshape(len(samples), parameter.numel()).contiguous()
