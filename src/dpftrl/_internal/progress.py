"""The type of a callback that long computations call to show their progress."""

from collections.abc import Callable

# Arguments: the fraction done, from 0 to 1 (None if it is not known), and what is being done.
Progress = Callable[[float | None, str], None]


def ignore_progress(fraction: float | None, message: str) -> None:
    """Do nothing: the `Progress` callback for callers that show none."""
    del fraction, message
