"""The time that a run's timers go by."""

import time
from logging import WARNING
from typing import Final, final

from flwr.supercore import log

HOUR: Final = 3600.0


@final
class RunClock:
    """Hours since 1970, which never go back and never jump while this process lives.

    The machine's clock is asked once. If it is behind what the run has seen, the run goes on from
    there: nobody's turn comes sooner for that. A clock that was too far ahead when the process
    started cannot be told from time that passed; devices may then return sooner, and the guarantee,
    which counts the rounds between their turns as they were, says what that costs.

    Args:
        seen: The latest time that the run knows of, in hours.
    """

    def __init__(self, seen: float | None):
        now = time.time() / HOUR
        self._start = now if seen is None else max(now, seen)
        self._since = time.monotonic()
        if self._start > now:
            log(
                WARNING,
                "The clock is %.1f hours behind the run's last turn; timers go on from that turn",
                self._start - now,
            )

    def hours(self) -> float:
        """The time now."""
        return self._start + (time.monotonic() - self._since) / HOUR
