"""Planning before training: chooses the mechanism and the noise, and computes epsilon."""

from dpftrl.plan.candidates import (
    LABELS,
    Budget,
    Missing,
    Option,
    Point,
    Question,
    Walk,
    extrapolate,
    options,
)
from dpftrl.plan.dataset import (
    SAMPLINGS,
    Dataset,
    DatasetOption,
    DatasetPlan,
    SamplingName,
    account_dataset,
    calibrate_dataset,
    load_dataset_plan,
    make_dataset_plan,
    mechanism_for_dataset,
    options_for_dataset,
    save_dataset_plan,
)
from dpftrl.plan.make_plan import make_plan, mechanism
from dpftrl.plan.plan import Fleet, Plan, load_plan, save_plan

__all__ = [
    "LABELS",
    "SAMPLINGS",
    "Budget",
    "Dataset",
    "DatasetOption",
    "DatasetPlan",
    "Fleet",
    "Missing",
    "Option",
    "Plan",
    "Point",
    "Question",
    "SamplingName",
    "Walk",
    "account_dataset",
    "calibrate_dataset",
    "extrapolate",
    "load_dataset_plan",
    "load_plan",
    "make_dataset_plan",
    "make_plan",
    "mechanism",
    "mechanism_for_dataset",
    "options",
    "options_for_dataset",
    "save_dataset_plan",
    "save_plan",
]
