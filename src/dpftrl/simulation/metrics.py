"""What may be watched while a run goes on: written only once a round is committed."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import msgspec

from dpftrl._internal.storage import read_file, replace_file
from dpftrl.errors import InvalidInput
from dpftrl.plots import plot_training


@final
class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A round, as the world may see it.

    Attributes:
        round: Rounds released.
        epsilon: What they guarantee together.
        accuracy: Share of the held-out people's words that were guessed, where it was measured.
        perplexity: On the same sentences.
    """

    round: int
    epsilon: float
    accuracy: float | None = None
    perplexity: float | None = None


@final
class Metrics:
    """`metrics.jsonl`, and the same for TensorBoard in `events/`.

    Args:
        folder: The folder of the run.
        rounds: Rounds released: what a killed process wrote of others is dropped.
    """

    def __init__(self, folder: Path, rounds: int):
        self._path = folder / "metrics.jsonl"
        self._curves = folder / "curves.png"
        self.points = [point for point in read_points(self._path) if point.round <= rounds]
        replace_file(self._path, _lines(self.points))
        self._events = _Events(folder / "events", self.points)

    @property
    def last(self) -> int:
        """The last round that is in."""
        return self.points[-1].round if self.points else -1

    def add(self, point: Point) -> None:
        """Add a round that was committed."""
        self.points.append(point)
        try:
            with self._path.open("ab") as file:
                file.write(_lines([point]))
        except OSError as error:
            raise InvalidInput(f"{self._path} cannot be written: {error.strerror}") from None
        self._events.add(point)

    def close(self) -> None:
        """Draw the curves, and end the TensorBoard file."""
        self._events.close()
        seen = [point for point in self.points if point.accuracy is not None]
        plot_training(
            [point.round for point in seen],
            [point.accuracy or 0.0 for point in seen],
            [point.epsilon for point in seen],
            self._curves,
        )


def read_points(path: Path) -> list[Point]:
    """The rounds that a `metrics.jsonl` has; none if there is no such file."""
    if not path.exists():
        return []
    points = list[Point]()
    for line in read_file(path).splitlines():
        with contextlib.suppress(msgspec.MsgspecError):  # a line that a killed process cut short
            points.append(msgspec.json.decode(line, type=Point))
    return points


def _lines(points: Sequence[Point]) -> bytes:
    return b"".join(msgspec.json.encode(point) + b"\n" for point in points)


class _Events:
    """The TensorBoard file: all points again, then each new one.

    TensorBoard wants a time with every point. How long a round took says something of who took
    part in it, so the time here is the number of the round, in seconds, and so is the file's.
    """

    def __init__(self, folder: Path, points: Sequence[Point]):
        from tensorboardX.record_writer import RecordWriter

        try:
            folder.mkdir(exist_ok=True)
            for old in folder.glob("events.out.tfevents.*"):
                old.unlink()
            self._file: Any = RecordWriter(str(folder / "events.out.tfevents.0.dpftrl"))
        except OSError as error:
            raise InvalidInput(f"{folder} cannot be written: {error.strerror}") from None
        self._write(wall_time=0.0, file_version="brain.Event:2")
        for point in points:
            self.add(point)

    def add(self, point: Point) -> None:
        from tensorboardX import summary

        tensorboard: Any = summary
        for name in ("epsilon", "accuracy", "perplexity"):
            if (value := getattr(point, name)) is not None:
                at = float(point.round)
                self._write(wall_time=at, step=point.round, summary=tensorboard.scalar(name, value))
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, **event: Any) -> None:
        from tensorboardX.proto import event_pb2

        made: Any = event_pb2
        self._file.write(made.Event(**event).SerializeToString())
