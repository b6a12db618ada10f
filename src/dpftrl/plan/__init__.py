"""Before training: which mechanism, how much noise, what epsilon."""

from dpftrl.plan.candidates import LABELS, Budget, Missing, Option, Question, options
from dpftrl.plan.extrapolate import Point, Walk, extrapolate
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
    "options",
    "save_plan",
]
