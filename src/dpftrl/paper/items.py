"""All items that can be reproduced, in the order of the paper."""

import difflib
from collections.abc import Sequence
from typing import Any

from dpftrl.errors import InvalidInput
from dpftrl.paper.accuracy import ACCURACY
from dpftrl.paper.coefficients import COEFFICIENTS
from dpftrl.paper.extrapolation import EXTRAPOLATE
from dpftrl.paper.faster import FASTER
from dpftrl.paper.findings import Item
from dpftrl.paper.frontier import FRONTIER
from dpftrl.paper.inverse_time import CINV
from dpftrl.paper.more_rounds import VARY
from dpftrl.paper.production import GBOARD, LAUNCHED
from dpftrl.paper.rmse import MAXLOSS, RMSE
from dpftrl.paper.robust_min_sep import K3, NKB, OTHERS
from dpftrl.paper.stackoverflow_loss import LOSSES
from dpftrl.paper.summary import SUMMARY
from dpftrl.paper.text import TEXT
from dpftrl.paper.trainings import TUNING
from dpftrl.paper.utility import UTILITY
from dpftrl.paper.vary_rounds import VARY_N

ITEMS: tuple[Item[Any], ...] = (
    SUMMARY,
    CINV,
    FASTER,
    LOSSES,
    ACCURACY,
    TUNING,
    RMSE,
    MAXLOSS,
    K3,
    NKB,
    VARY_N,
    OTHERS,
    GBOARD,
    LAUNCHED,
    UTILITY,
    EXTRAPOLATE,
    VARY,
    COEFFICIENTS,
    TEXT,
    FRONTIER,
)


def chosen(names: Sequence[str]) -> tuple[Item[Any], ...]:
    """The items with these names, in the order of the paper; all items if no name is given.

    Raises:
        InvalidInput: There is no item of this name.
    """
    known = {item.name: item for item in ITEMS}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=2, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else "--list shows all names"
            raise InvalidInput(f"the paper has no item {name!r}; {hint}")
    return tuple(item for item in ITEMS if not names or item.name in names)
