"""Writers of the public metrics of a run: `metrics.jsonl`, TensorBoard, and a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from dpftrl._internal.storage import check_own_folder
from dpftrl.errors import InvalidInput
from dpftrl.federated.metrics import MetricsFile, Point, read_points
from dpftrl.plots import plot_training

__all__ = ["Metrics", "Point", "read_points"]


@final
class Metrics:
    """Writes metrics to `metrics.jsonl`, to `events/` for TensorBoard, and to `curves.png`.

    Args:
        folder: Folder of the run.
        rounds: Number of rounds released. Points of later rounds, which a killed process may have
            written, are dropped.
    """

    def __init__(self, folder: Path, rounds: int):
        self._curves = folder / "curves.png"
        self._file = MetricsFile(folder, rounds)
        self.points = self._file.points
        self._events = _Events(folder / "events", self.points)

    @property
    def last(self) -> int:
        """Round of the last point; -1 if there is none."""
        return self._file.last

    def add(self, point: Point) -> None:
        """Append the point of a committed round."""
        self._file.add(point)
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
