"""`metrics.jsonl`: one line per released round, which a killed process cannot spoil."""

import json

import pytest

from dpftrl.errors import UnsafeState
from dpftrl.federated.metrics import MetricsFile, Point, finite_numbers_of, read_points


def test_every_point_is_a_line_without_what_was_not_measured(tmp_path):
    file = MetricsFile(tmp_path, 0)
    assert file.last == -1
    file.add(Point(0, 0.0))
    file.add(Point(1, 0.5, evaluation={"loss": 2.0}))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"round": 0, "epsilon": 0.0},
        {"round": 1, "epsilon": 0.5, "evaluation": {"loss": 2.0}},
    ]
    assert read_points(tmp_path / "metrics.jsonl") == file.points
    assert file.last == 1


def test_a_resumed_run_drops_what_was_not_released_and_half_a_line(tmp_path):
    file = MetricsFile(tmp_path, 0)
    for number in range(4):
        file.add(Point(number, float(number)))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + b'{"round":4,"eps')
    again = MetricsFile(tmp_path, rounds=2)
    assert [point.round for point in again.points] == [0, 1, 2]
    again.add(Point(3, 9.0))
    assert [point.epsilon for point in read_points(path)] == [0.0, 1.0, 2.0, 9.0]


def test_a_link_in_its_place_is_not_written_to(tmp_path):
    file = MetricsFile(tmp_path, 0)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "other")
    with pytest.raises(UnsafeState):
        file.add(Point(0, 0.0))
    assert not (tmp_path / "other").exists()


def test_only_single_finite_numbers_are_metrics():
    metrics = {"loss": 1, "accuracy": 0.5, "nan": float("nan"), "list": [1.0], "text": "x"}
    assert finite_numbers_of(metrics) == {"loss": 1.0, "accuracy": 0.5}
