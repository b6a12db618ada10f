"""The public metrics of a run contain no timing."""

import itertools
import struct
import time

import pytest

pytest.importorskip("tensorboardX")

from tensorboardX.proto.event_pb2 import Event

from dpftrl.simulation.metrics import Metrics, Point

POINTS = [
    Point(round=0, epsilon=0.5, accuracy=0.1, perplexity=900.0),
    Point(round=1, epsilon=1.0),
    Point(round=2, epsilon=1.5, accuracy=0.2, perplexity=800.0),
]


def events(folder) -> list[Event]:
    """Return all records of all TensorBoard files of a run."""
    events = []
    for path in sorted((folder / "events").iterdir()):
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            events.append(Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return events


def write(folder, points=POINTS) -> None:
    metrics = Metrics(folder, 0)
    for point in points:
        metrics.add(point)
    metrics.close()


def files(folder) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_public_files_do_not_depend_on_the_clock(tmp_path, monkeypatch):
    written = []
    for name, step in (("quick", 0.001), ("slow", 1e6)):
        (tmp_path / name).mkdir()
        clock = itertools.count(1.7e9, step)
        with monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda clock=clock: next(clock))
            write(tmp_path / name)
        written.append(files(tmp_path / name))
    assert written[0] == written[1]
    assert any(name.startswith("events/") for name in written[0])


def test_tensorboard_times_are_round_numbers(tmp_path):
    write(tmp_path)
    scalars = [(e.wall_time, e.step, e.summary.value[0].tag) for e in events(tmp_path)[1:]]
    assert [(at, step) for at, step, _ in scalars] == [
        (point.round, point.round)
        for point in POINTS
        for name in ("epsilon", "accuracy", "perplexity")
        if getattr(point, name) is not None
    ]
    assert {tag for *_, tag in scalars} == {"epsilon", "accuracy", "perplexity"}


def test_a_resumed_run_has_every_round_once(tmp_path):
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "events.out.tfevents.1700000000.host").write_bytes(b"with timings")
    write(tmp_path)
    again = Metrics(tmp_path, rounds=1)  # round 2 was never released
    again.add(Point(round=2, epsilon=1.75))
    again.close()
    assert len(list((tmp_path / "events").iterdir())) == 1
    steps = [e.step for e in events(tmp_path)[1:] if e.summary.value[0].tag == "epsilon"]
    assert steps == [0, 1, 2]
