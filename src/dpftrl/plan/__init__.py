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
from dpftrl.plan.make_plan import make_plan, mechanism
from dpftrl.plan.plan import Fleet, Plan, load_plan, save_plan

__all__ = [
    "LABELS",
    "Budget",
    "Fleet",
    "Missing",
    "Option",
    "Plan",
    "Point",
    "Question",
    "Walk",
    "extrapolate",
    "load_plan",
    "make_plan",
    "mechanism",
    "options",
    "save_plan",
]
