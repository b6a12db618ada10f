"""How long a device rests between two turns."""

from typing import final

import msgspec


@final
class TurnRule(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Turns of a device in a run are so far apart.

    Attributes:
        min_sep: Rows from one turn to the next.
        timer_hours: Hours instead; 0 if turns go by rows.
    """

    min_sep: int
    timer_hours: float

    def is_weaker(self, promised: "TurnRule") -> bool:
        """Whether it lets a device return that was promised more; hours do not stand for rows."""
        if promised.timer_hours > 0:
            return not self.timer_hours >= promised.timer_hours
        return self.timer_hours > 0 or not self.min_sep >= promised.min_sep
