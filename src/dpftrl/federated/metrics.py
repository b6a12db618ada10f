"""`metrics.jsonl`: public metrics of a run, one line per round, written after it is committed.

The lines carry no times: how long a round takes would say something about its clients.
"""

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import msgspec

from dpftrl._internal.storage import open_own, read_file, replace_file
from dpftrl.errors import InvalidInput


@final
class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The public metrics after one round.

    Attributes:
        round: Number of rounds released so far.
        epsilon: Epsilon of all these rounds together.
        accuracy: Share of the held-out users' words that the model predicts; None if not measured.
        perplexity: Perplexity on the same sentences; None if not measured.
        evaluation: Other metrics of the released model, by name.
        clip_norm: The clip norm of the next round, with adaptive clipping; else None.
    """

    round: int
    epsilon: float
    accuracy: float | None = None
    perplexity: float | None = None
    evaluation: dict[str, float] = msgspec.field(default_factory=dict)
    clip_norm: float | None = None


@final
class MetricsFile:
    """The file `metrics.jsonl` of a run.

    Args:
        folder: Folder of the run.
        rounds: Number of rounds released. Points of later rounds, which a killed process may have
            written, are dropped.

    Attributes:
        points: The points in the file.
    """

    def __init__(self, folder: Path, rounds: int):
        self._path = folder / "metrics.jsonl"
        self.points = [point for point in read_points(self._path) if point.round <= rounds]
        replace_file(self._path, _lines(self.points))

    @property
    def last(self) -> int:
        """Round of the last point; -1 if there is none."""
        return self.points[-1].round if self.points else -1

    def add(self, point: Point) -> None:
        """Append the point of a committed round."""
        self.points.append(point)
        try:
            handle = open_own(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            with os.fdopen(handle, "ab") as file:
                file.write(_lines([point]))
        except OSError as error:
            raise InvalidInput(f"{self._path} cannot be written: {error.strerror}") from None


def read_points(path: Path) -> list[Point]:
    """Return the points of a `metrics.jsonl` file; none if the file does not exist."""
    if not path.exists():
        return []
    points = list[Point]()
    for line in read_file(path).splitlines():
        with contextlib.suppress(msgspec.MsgspecError):  # a killed process may leave half a line
            points.append(msgspec.json.decode(line, type=Point))
    return points


def finite_numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are single finite numbers, which is what a point can hold."""
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _lines(points: Sequence[Point]) -> bytes:
    return b"".join(msgspec.json.encode(point) + b"\n" for point in points)
