"""Writers of the public metrics of a run: `metrics.jsonl`, TensorBoard, and a plot."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, final

from dpftrl._internal.storage import check_own_folder
from dpftrl.errors import InvalidInput
from dpftrl.federated.metrics import MetricsFile, Point, read_points
from dpftrl.plots import Panel, plot_training

__all__ = ["Metrics", "Point", "plot_points", "read_points"]

# Of the metrics of a user's function, so many are in the plot; all of them are in the files.
MOST_PANELS = 3


@final
class Metrics:
    """Writes metrics to `metrics.jsonl`, to `events/` for TensorBoard, and to `curves.png`.

    Without the package tensorboardX there is no `events/`, and without matplotlib no `curves.png`.

    Args:
        folder: Folder of the run.
        rounds: Number of rounds released. Points of later rounds, which a killed process may have
            written, are dropped.
    """

    def __init__(self, folder: Path, rounds: int):
        self._curves = folder / "curves.png"
        self._file = MetricsFile(folder, rounds)
        self.points = self._file.points
        self._events = None
        if find_spec("tensorboardX") is not None:
            self._events = _Events(folder / "events", self.points)

    @property
    def last(self) -> int:
        """Round of the last point; -1 if there is none."""
        return self._file.last

    def add(self, point: Point) -> None:
        """Append the point of a committed round."""
        self._file.add(point)
        if self._events is not None:
            self._events.add(point)

    def close(self) -> None:
        """Close the TensorBoard file and plot the curves."""
        self.close_events()
        if find_spec("matplotlib") is not None:
            plot_points(self.points, self._curves)

    def close_events(self) -> None:
        """Close the TensorBoard file, if it is open."""
        if self._events is not None:
            self._events.close()
            self._events = None


def plot_points(points: Sequence[Point], path: Path, private_baseline: float | None = None) -> None:
    """Plot the metrics of a run, and epsilon, by round.

    Args:
        points: The metrics. Of metrics that a user's function returned, the first three are shown.
        path: The image to write.
        private_baseline: An accuracy to compare with, drawn as a line. Only the owner may then read
            the image.
    """
    measured = [point for point in points if point.accuracy is not None]
    panels = list[Panel]()
    if measured:
        panels.append(
            Panel(
                "accuracy on held-out clients (%)",
                [point.round for point in measured],
                [100 * (point.accuracy or 0.0) for point in measured],
                None if private_baseline is None else 100 * private_baseline,
            )
        )
    names = dict.fromkeys(name for point in points for name in point.evaluation)
    for name in list(names)[:MOST_PANELS]:
        having = [point for point in points if name in point.evaluation]
        rounds = [point.round for point in having]
        panels.append(Panel(name, rounds, [point.evaluation[name] for point in having]))
    shown = measured or points
    rounds = [point.round for point in shown]
    panels.append(Panel("epsilon of all rounds so far", rounds, [p.epsilon for p in shown]))
    plot_training(panels, path, private=private_baseline is not None)


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
        own = ("epsilon", "accuracy", "perplexity", "clip_norm")
        values = {name: getattr(point, name) for name in own}
        values.update({f"evaluation/{name}": value for name, value in point.evaluation.items()})
        for name, value in values.items():
            if value is not None:
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
