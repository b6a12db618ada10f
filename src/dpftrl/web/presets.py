"""The rows of the paper's table of production models, as presets of the planner.

The table does not print the population. A preset fills in the smallest fleet whose strict rotation
allows the printed min-sep at a report goal of 6,500, that of the paper's extrapolation.
"""

from typing import Any, Final

from dpftrl._internal.formatting import rounded_up
from dpftrl._internal.progress import Progress
from dpftrl.errors import InvalidInput
from dpftrl.paper.extrapolation import GOAL
from dpftrl.paper.production import DELTA, GBOARD, TABLE, Printed, claims_of_row

NOTE: Final = (
    "The table does not print the population: the fleet is the smallest whose rotation allows "
    f"this min-sep at a report goal of {GOAL:,}."
)


def presets() -> list[dict[str, Any]]:
    """All presets as plain data: a title, the fields of the form, and what the paper prints."""
    return [_preset(number, row) for number, row in enumerate(TABLE)]


def _preset(number: int, row: Printed) -> dict[str, Any]:
    min_sep = row.between + 1
    rotation = min(min_sep, row.rounds)  # a longer rotation than the training changes nothing
    return {
        "number": number,
        "title": f"{row.model}, {row.mechanism}, noise multiplier {row.noise_multiplier:g}",
        "values": {
            "population": str(GOAL * rotation),
            "report_goal": str(GOAL),
            "rounds": str(row.rounds),
            "min_sep": str(rotation),
            "max_participations": str(row.cap),
            "epsilon": row.epsilon,
            "delta": f"{DELTA:g}",
        },
        "printed": {"rho": row.rho, "epsilon": row.epsilon},
        "is_slow": row.mechanism.startswith("BandMF"),
        "note": NOTE,
    }


def compare_preset(number: int, on_progress: Progress) -> dict[str, Any]:
    """Recompute a row of the table: what the paper prints, what we get, and why they differ.

    Raises:
        InvalidInput: There is no such row.
    """
    if not 0 <= number < len(TABLE):
        raise InvalidInput(f"there are {len(TABLE)} presets, got number {number}")
    claims = claims_of_row(TABLE[number], GBOARD.full, on_progress)
    return {
        "number": number,
        "rows": [
            {
                "name": name,
                "printed": claim.paper,
                "ours": rounded_up(claim.ours) if isinstance(claim.ours, float) else claim.ours,
                "verdict": claim.verdict,
            }
            for name, claim in zip(("rho", "epsilon"), claims, strict=True)
        ],
        "reason": claims[0].because or claims[1].because,
    }
