"""How long the server waits, and for what."""

from dataclasses import dataclass, fields
from typing import final

from dpftrl.checks import as_float, whole_number
from dpftrl.errors import InvalidInput


@final
@dataclass(frozen=True)
class Patience:
    """Limits of a deployment; all times in seconds.

    Attributes:
        replies: From asking a cohort to giving up on those who have not answered.
        nodes: For enough nodes to be online and rested.
        lock: For an earlier server that still works on the run; 0 refuses at once.
        attempts: Attempts in a row that may come to nothing.
        backoff: Between the first of them and the next; it doubles with each, up to a minute.
    """

    replies: float = 600.0
    nodes: float = 3600.0
    lock: float = 0.0
    attempts: int = 20
    backoff: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 <= as_float(getattr(self, field.name)) < float("inf"):
                raise InvalidInput(
                    f"{field.name} must be a finite number that is not negative, "
                    f"got {getattr(self, field.name)!r}"
                )
        if not self.replies > 0:
            raise InvalidInput("replies must be above 0: a message cannot be answered in no time")
        whole_number("attempts", self.attempts)

    def before_attempt(self, failed: int) -> float:
        """How long to wait after so many attempts in a row that came to nothing."""
        return min(60.0, self.backoff * 2.0 ** min(failed - 1, 10))
