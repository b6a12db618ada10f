"""A run on Flower writes `metrics.jsonl`, and `dpftrl status` understands it."""

import json
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord
from tiny_apps import grid, plan, start_arrays, strategy

from dpftrl import Server, read_status


def lines(place: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (place / "run" / "metrics.jsonl").read_bytes().splitlines()
    ]


def evaluate(rounds: int, _: ArrayRecord) -> MetricRecord:
    return MetricRecord({"loss": 1.0 / (1 + rounds), "per-class": [0.5, 0.25]})


def test_every_round_is_a_line_with_the_metrics_of_the_server(tmp_path: Path) -> None:
    strategy(tmp_path).start(grid(), start_arrays(), evaluate_fn=evaluate)
    points = lines(tmp_path)
    assert [point["round"] for point in points] == list(range(7))
    assert [point["evaluation"] for point in points] == [
        {"loss": 1.0 / (1 + number)} for number in range(7)
    ]
    assert points[0]["epsilon"] == 0.0
    with Server.resume(tmp_path / "run", state_folder=tmp_path / "state") as server:
        assert points[-1]["epsilon"] == server.epsilon


def test_a_resumed_run_has_every_round_once(tmp_path: Path) -> None:
    strategy(tmp_path).start(grid(), start_arrays())
    path = tmp_path / "run" / "metrics.jsonl"
    content = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(content[:-1]) + content[-1][:-9])  # killed while it wrote a line
    strategy(tmp_path).start(grid(), start_arrays())
    assert [point["round"] for point in lines(tmp_path)] == list(range(7))


def test_the_status_of_a_run_on_flower_is_known(tmp_path: Path) -> None:
    """With timers in hours, Flower's clock is that of the machine."""
    hours = {"timer_hours": 24.0}
    planned = plan(rounds=4, population=12)
    strategy(tmp_path, planned, settings=hours).start(grid(), start_arrays())
    status = read_status(tmp_path / "run", state_folder=tmp_path / "state")
    assert status.public.ended == "all 4 rounds are done"
    clients = status.private.clients
    assert clients is not None
    assert (clients.contacted, clients.rested) == (12, 0)
    assert (clients.available_at_begin, clients.eligible_at_begin) == (12, 3)
    later = read_status(
        tmp_path / "run", state_folder=tmp_path / "state", now=status.time + 25 * 3600
    )
    assert later.private.clients is not None
    assert later.private.clients.rested == 12
