"""Public metrics of a run, one point per round; written only after the round is committed."""

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import msgspec

from dpftrl._internal.storage import check_own_folder, open_own, read_file, replace_file
from dpftrl.errors import InvalidInput
from dpftrl.plots import plot_training


@final
class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The public metrics after one round.

    Attributes:
        round: Number of rounds released so far.
        epsilon: Epsilon of all these rounds together.
        accuracy: Share of the held-out users' words that the model predicts; None if not measured.
        perplexity: Perplexity on the same sentences; None if not measured.
        clip_norm: The clip norm of the next round, with adaptive clipping; else None.
    """

    round: int
    epsilon: float
    accuracy: float | None = None
    perplexity: float | None = None
    clip_norm: float | None = None


@final
class Metrics:
    """Writes metrics to `metrics.jsonl`, to `events/` for TensorBoard, and to `curves.png`.

    Args:
        folder: Folder of the run.
        rounds: Number of rounds released. Points of later rounds, which a killed process may have
            written, are dropped.
    """

    def __init__(self, folder: Path, rounds: int):
        self._path = folder / "metrics.jsonl"
        self._curves = folder / "curves.png"
        self.points = [point for point in read_points(self._path) if point.round <= rounds]
        replace_file(self._path, _lines(self.points))
        self._events = _Events(folder / "events", self.points)

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
        self._events.add(point)

    def close(self) -> None:
        """Close the TensorBoard file and plot the curves."""
        self._events.close()
        measured = [point for point in self.points if point.accuracy is not None]
        plot_training(
            [point.round for point in measured],
            [point.accuracy or 0.0 for point in measured],
            [point.epsilon for point in measured],
            self._curves,
        )


def read_points(path: Path) -> list[Point]:
    """Return the points of a `metrics.jsonl` file; none if the file does not exist."""
    if not path.exists():
        return []
    points = list[Point]()
    for line in read_file(path).splitlines():
        with contextlib.suppress(msgspec.MsgspecError):  # a killed process may leave half a line
            points.append(msgspec.json.decode(line, type=Point))
    return points


def _lines(points: Sequence[Point]) -> bytes:
    return b"".join(msgspec.json.encode(point) + b"\n" for point in points)


class _Events:
    """Writes the TensorBoard file: first all earlier points, then each new one.

    TensorBoard needs a time for every point. The duration of a round would reveal something about
    the clients in it. Therefore the time of a point is its round number, in seconds, and the time
    in the file's name is 0.
    """

    def __init__(self, folder: Path, points: Sequence[Point]):
        from tensorboardX.record_writer import RecordWriter

        try:
            folder.mkdir(exist_ok=True)
            check_own_folder(folder)
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
        for name in ("epsilon", "accuracy", "perplexity", "clip_norm"):
            if (value := getattr(point, name)) is not None:
                self._write(
                    wall_time=float(point.round),
                    step=point.round,
                    summary=tensorboard.scalar(name, value),
                )
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, **event: Any) -> None:
        from tensorboardX.proto import event_pb2

        untyped: Any = event_pb2
        self._file.write(untyped.Event(**event).SerializeToString())
