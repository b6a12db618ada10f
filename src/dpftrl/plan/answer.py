"""`answer_plan`: a request for a plan in, a plain answer out, with one recommended row.

The command line prints the answer, and a web page can show it: it consists of numbers, texts, lists
and dicts. `solve_fleet` and `solve_dataset` give the same as values, with plans that can train.

The recommended row of a fleet needs the least memory, among the mechanisms whose loss is within 10%
of the smallest loss. Losses compare mechanisms at equal privacy, and 10% more noise can hardly be
seen in a model. The recommended row of a data set has the least noise.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np

from dpftrl._internal.formatting import memory_text
from dpftrl._internal.progress import Progress
from dpftrl.accounting import calibrate, risk_of
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.optimize import loss_value
from dpftrl.participation import MOST_ROUNDS, MinSep
from dpftrl.plan.candidates import (
    Missing,
    Option,
    Point,
    Walk,
    epsilon_if,
    extrapolate,
    options,
)
from dpftrl.plan.dataset import Dataset, DatasetOption, options_for_dataset
from dpftrl.plan.plan import Plan
from dpftrl.plan.request import (
    DatasetPlanRequest,
    FleetPlanRequest,
    PlanRequest,
    ResolvedRequest,
    plan_request,
)

# A mechanism can be recommended if its loss is at most this factor times the smallest loss.
NEARLY_BEST: Final = 1.1
# The numbers of rounds, as shares of the planned one, after which epsilon is stated.
STOPS: Final = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
# The number of min-seps of a range for which epsilon is stated.
MIN_SEPS: Final = 5


def answer_plan(
    request: PlanRequest | Mapping[str, Any], on_progress: Progress | None = None
) -> dict[str, Any]:
    """Compare the ways to run a planned training, and recommend one.

    Args:
        request: The request, or its JSON content.
        on_progress: Called with the label of each row.

    Returns:
        The answer, as JSON has it.

    Raises:
        InvalidInput: A field of the request is wrong; the message names it.

    >>> answer = answer_plan(
    ...     {
    ...         "kind": "fleet",
    ...         "population": 100_000,
    ...         "epsilon": 2.0,
    ...         "delta": 1e-8,
    ...         "timer_days": 2.0,
    ...         "rounds_per_day": 24.0,
    ...         "days": 10.0,
    ...         "effort": "quick",
    ...     }
    ... )
    >>> {name: answer[name] for name in ("rounds", "report_goal", "min_sep", "binding")}
    {'rounds': 240, 'report_goal': 2083, 'min_sep': 48, 'binding': 'timer'}
    >>> answer["recommended"]["name"]
    'blt'
    """
    if isinstance(request, Mapping):
        request = plan_request(request)
    if isinstance(request, FleetPlanRequest):
        return solve_fleet(request, on_progress).as_json()
    return solve_dataset(request, on_progress).as_json()


@final
@dataclass(frozen=True)
class FleetAnswer:
    """The ways to train a fleet, and the recommended one.

    Attributes:
        resolved: The request, with nothing left open.
        rows: The mechanisms, or why they were left out.
        recommended: The recommended mechanism.
        walks: Epsilon for other settings, at equal utility, if that was asked for.
    """

    resolved: ResolvedRequest
    rows: tuple[Option | Missing, ...]
    recommended: Option
    walks: tuple[Walk, ...]

    @property
    def computed(self) -> tuple[Option, ...]:
        """The mechanisms that were not left out."""
        return tuple(row for row in self.rows if isinstance(row, Option))

    @property
    def left_out(self) -> tuple[Missing, ...]:
        """The mechanisms that were left out."""
        return tuple(row for row in self.rows if isinstance(row, Missing))

    @property
    def reason(self) -> str:
        """Why the recommended mechanism is recommended, in one sentence."""
        objective = self.resolved.question.objective
        name = "RmsLoss" if objective == "rms" else "MaxLoss"
        losses = {row.label: loss_value(row.error_report, objective) for row in self.computed}
        chosen, best = self.recommended, min(losses, key=losses.__getitem__)
        size = memory_text(chosen.memory_bytes)
        if chosen.label == best:
            return (
                f"{chosen.label} has the smallest {name}, and needs {size}, the least of all "
                "mechanisms that come within 10% of it."
            )
        above = 100 * (losses[chosen.label] / losses[best] - 1)
        return (
            f"{chosen.label} needs {size}, the least of all mechanisms whose {name} is within 10% "
            f"of the smallest, that of {best}; its own is {above:.2g}% above it."
        )

    def row(self, label: str) -> Option:
        """The mechanism with this label.

        Raises:
            InvalidInput: It was left out.
        """
        for option in self.computed:
            if option.label == label:
                return option
        raise InvalidInput(
            f"the row {label} was left out, so --out has nothing to save; choose another row"
        )

    def epsilon_after(self) -> dict[int, float | None]:
        """Epsilon of the recommended mechanism if training ends early or goes on, by rounds."""
        question, plan = self.resolved.question, self.recommended.plan
        stops = sorted({math.ceil(share * question.rounds) for share in STOPS})
        return {
            rounds: _epsilon(plan, self.resolved.with_rounds(rounds))
            for rounds in stops
            if rounds <= MOST_ROUNDS
        }

    def by_min_sep(self) -> list[dict[str, Any]]:
        """What other min-seps of a range give: epsilon, and the noise multiplier for the target."""
        question, plan = self.resolved.question, self.recommended.plan
        if question.max_min_sep is None:
            return []
        low, high = question.min_sep_range
        places = np.geomspace(low, high, MIN_SEPS)
        epsilon, delta = question.budget.epsilon, question.budget.delta
        rows = list[dict[str, Any]]()
        for min_sep in sorted({low, high, *(round(float(place)) for place in places)}):
            participation = MinSep(question.rounds, min_sep, question.max_participations)
            rows.append(
                {
                    "min_sep": min_sep,
                    "max_participations": participation.max_participations,
                    "epsilon": _epsilon(plan, participation),
                    "noise_multiplier_for_target": None
                    if epsilon is None
                    else calibrate(plan.mechanism, participation, epsilon, delta),
                }
            )
        return rows

    def as_json(self) -> dict[str, Any]:
        """The answer as plain data."""
        resolved, question = self.resolved, self.resolved.question
        fleet, planned = question.fleet, question.participation()
        plan = self.recommended.plan
        return {
            "kind": "fleet",
            "population": fleet.population,
            "report_goal": fleet.report_goal,
            "availability": fleet.availability,
            "over_selection": fleet.over_selection,
            "timer_rounds": fleet.timer_rounds,
            "rotation": fleet.rotation(),
            "days": resolved.days,
            **_participation(planned),
            "delta": question.budget.delta,
            "parameters": question.parameters,
            "objective": question.objective,
            "devices": resolved.request.devices,
            "recommended": {
                "name": self.recommended.label,
                "report_goal": fleet.report_goal,
                "rounds": planned.rounds,
                "min_sep": planned.min_sep,
                "memory_vectors": plan.mechanism.memory(planned.rounds),
                "noise_multiplier": plan.noise_multiplier,
                "epsilon": plan.guarantee.epsilon,
            },
            "reason": self.reason,
            "chosen": {
                choice.name: {"value": choice.value, "reason": choice.reason}
                for choice in resolved.choices
            },
            "binding": resolved.binding,
            "binding_text": resolved.binding_text,
            "warnings": list(resolved.warnings),
            "mechanisms": [self._row_as_json(row) for row in self.computed],
            "left_out": [{"name": row.label, "note": row.note} for row in self.left_out],
            "epsilon_after": [
                {"rounds": rounds, "epsilon": epsilon}
                for rounds, epsilon in self.epsilon_after().items()
            ],
            "by_min_sep": self.by_min_sep(),
            "extrapolation": {
                walk.along: [_point_as_json(point) for point in walk.points] for walk in self.walks
            },
            "extrapolation_at": f"equal utility, that of {self.recommended.label}",
        }

    def _row_as_json(self, option: Option) -> dict[str, Any]:
        guarantee, sensitivity = option.plan.guarantee, option.error_report.sensitivity
        person = guarantee.for_devices(self.resolved.request.devices)
        return {
            "name": option.label,
            "recommended": option is self.recommended,
            "noise_multiplier": option.plan.noise_multiplier,
            "sensitivity": sensitivity.value,
            "sensitivity_kind": sensitivity.kind,
            "kind": guarantee.kind,
            "mu": guarantee.mu,
            "rho": guarantee.rho,
            "epsilon": guarantee.epsilon,
            **risk_of(guarantee).as_json(),
            "per_person": {
                "devices": person.devices,
                "epsilon": person.epsilon,
                **risk_of(person).as_json(),
            },
            "rms_loss": option.error_report.rms_loss,
            "max_loss": option.error_report.max_loss,
            "noise_per_report": _noise_per_report(option),
            "memory_bytes": option.memory_bytes,
            "epsilon_if": dict(option.scenarios),
        }


def _noise_per_report(option: Option) -> float:
    """Root mean square of the noise on a prefix sum of means of reports, in clip norms."""
    plan = option.plan
    return option.error_report.rms_error * plan.noise_multiplier / plan.fleet.report_goal


def _epsilon(plan: Plan, participation: MinSep) -> float | None:
    """Epsilon of a plan's noise with another participation."""
    return epsilon_if(plan.mechanism, participation, plan.noise_multiplier, plan.guarantee.delta)


def _participation(participation: MinSep) -> dict[str, int]:
    return {
        "rounds": participation.rounds,
        "min_sep": participation.min_sep,
        "max_participations": participation.max_participations,
    }


def _point_as_json(point: Point) -> dict[str, Any]:
    return {
        "report_goal": point.report_goal,
        "noise_scale": point.scale,
        **_participation(point.participation),
        "epsilon": point.epsilon,
    }


def recommend(rows: Sequence[Option], objective: str) -> Option:
    """The mechanism with the least memory, of those with nearly the smallest loss.

    Of several with equal memory, it is the one with the smallest loss.

    Args:
        rows: The mechanisms; at least one.
        objective: The loss to compare: `rms` or `max`.
    """

    def loss(row: Option) -> float:
        return loss_value(row.error_report, "max" if objective == "max" else "rms")

    limit = NEARLY_BEST * min(map(loss, rows))
    good = [row for row in rows if loss(row) <= limit]
    return min(good, key=lambda row: (row.memory_bytes, loss(row)))


def solve_fleet(request: FleetPlanRequest, on_progress: Progress | None = None) -> FleetAnswer:
    """Compare the mechanisms for a fleet, and recommend one.

    Args:
        request: The request.
        on_progress: Called with the label of each row.
    """
    resolved = request.resolve()
    rows = list[Option | Missing]()
    quick, slow = request.effort == "quick", request.effort == "slow"
    for row in options(resolved.question, with_bandmf=slow, quick=quick):
        rows.append(row)
        if on_progress is not None:
            on_progress(None, row.label)
    computed = [row for row in rows if isinstance(row, Option)]
    if not computed:
        reasons = "; ".join(f"{row.label}: {row.note}" for row in rows if isinstance(row, Missing))
        raise InvalidInput(f"no mechanism reaches the target: {reasons}")
    best = recommend(computed, resolved.question.objective)
    walks = ()
    if request.extrapolate:
        walks = extrapolate(resolved.question, computed, reference=best)
    return FleetAnswer(resolved, tuple(rows), best, walks)


@final
@dataclass(frozen=True)
class DatasetAnswer:
    """The ways to train on a data set, and the recommended one.

    Attributes:
        request: The request.
        computed: The ways, with the least noise first.
        left_out: What was left out, and why.
    """

    request: DatasetPlanRequest
    computed: tuple[DatasetOption, ...]
    left_out: tuple[Missing, ...]

    @property
    def recommended(self) -> DatasetOption:
        """The way with the least noise."""
        return self.computed[0]

    @property
    def failure(self) -> float:
        """The probability that a certificate behind the recommended epsilon is wrong.

        Who compares several certificates and takes the best one must add up their failures.
        """
        return sum(row.failure for row in self.computed) if self.recommended.failure else 0.0

    @property
    def reason(self) -> str:
        """Why the recommended way is recommended, in one sentence."""
        chosen = self.recommended
        noise = f"the least noise on prefix sums, {chosen.rms_noise:.4g} clip norms"
        text = f"{chosen.label} with {chosen.sampling} sampling has {noise}"
        if chosen.label == "dp-sgd":
            return f"{text}: plain DP-SGD is best here, and correlated noise does not help."
        return f"{text}."

    def as_json(self) -> dict[str, Any]:
        """The answer as plain data."""
        chosen = self.recommended
        return {
            "kind": "dataset",
            **dataset_fields(self.request.dataset),
            "epsilon": self.request.epsilon,
            "delta": self.request.delta,
            "mechanisms": [dataset_row(row) for row in self.computed],
            "left_out": [{"name": row.label, "note": row.note} for row in self.left_out],
            "recommended": {
                "name": chosen.label,
                "sampling": chosen.sampling,
                "failure_probability": self.failure,
            },
            "reason": self.reason,
            "binding": "epochs",
            "warnings": list(self.request.warnings),
        }


def dataset_fields(dataset: Dataset) -> dict[str, Any]:
    """A data set, as plain data."""
    return {
        "dataset": dataset.size,
        "batch_size": dataset.batch_size,
        "epochs": dataset.epochs,
        "steps": dataset.steps,
        "max_batch_size": dataset.max_batch_size,
    }


def dataset_row(row: DatasetOption) -> dict[str, Any]:
    """A way to train on a data set, as plain data."""
    guarantee = row.guarantee
    groups = getattr(getattr(guarantee, "sampling", None), "groups", None)
    return {
        "name": row.label,
        "sampling": row.sampling,
        **({} if groups is None else {"groups": groups}),
        "adjacency": guarantee.adjacency,
        "unit": "example",
        "noise_multiplier": row.noise_multiplier,
        "sensitivity": row.sensitivity,
        "sensitivity_kind": row.sensitivity_kind,
        "effective_noise_multiplier": row.noise_multiplier / row.sensitivity,
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "confidence": 1 - row.failure,
        "failure_probability": row.failure,
        "rms_noise": row.rms_noise,
        **risk_of(guarantee).as_json(),
        "mechanism": {"family": row.mechanism.family, **_parameters(row.mechanism)},
    }


def _parameters(mechanism: Mechanism) -> dict[str, Any]:
    """The parameters of a mechanism, with lists instead of arrays."""
    return {
        name: value.tolist() if isinstance(value, np.ndarray) else value
        for name, value in mechanism.parameters().items()
    }


def solve_dataset(
    request: DatasetPlanRequest, on_progress: Progress | None = None
) -> DatasetAnswer:
    """Compare the ways to train on a data set, and recommend the one with the least noise.

    Args:
        request: The request.
        on_progress: Called with the label of each row, and by long optimizations.
    """
    rows = list[DatasetOption | Missing]()
    for row in options_for_dataset(
        request.dataset,
        request.epsilon,
        request.delta,
        samplings=request.samplings,
        with_bandmf=request.effort == "slow",
        on_progress=on_progress,
    ):
        rows.append(row)
        if on_progress is not None:
            on_progress(None, row.label)
    return best_first(request, rows)


def best_first(
    request: DatasetPlanRequest, rows: Sequence[DatasetOption | Missing]
) -> DatasetAnswer:
    """The answer with these rows.

    Raises:
        InvalidInput: All of them were left out.
    """
    computed = sorted(
        (row for row in rows if isinstance(row, DatasetOption)), key=lambda row: row.rms_noise
    )
    left_out = tuple(row for row in rows if isinstance(row, Missing))
    if not computed:
        reasons = "; ".join(f"{row.label}: {row.note}" for row in left_out)
        raise InvalidInput(f"no mechanism reaches the target: {reasons}")
    return DatasetAnswer(request, tuple(computed), left_out)
