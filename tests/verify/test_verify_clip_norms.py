"""Verification of adaptive clipping: wrong clip norms and wrong noise are found."""

import math

import numpy as np
import pytest
from recorded_runs import CLIENTS, PLAN, RunFolders, failed, read_records, record_run, rewrite

import dpftrl
from dpftrl import AdaptiveClipping, MinSep, NoiseKey, NoiseStream
from dpftrl.adaptive_clipping import MovingClipNorm
from dpftrl.federated import Server, Settings
from dpftrl.noise import ExactSum
from dpftrl.verify.clip_norms import NoiseOfCoordinate

CLIPPING = AdaptiveClipping(start=1.0, beta=0.2)


def record(root, rounds: int = 5) -> RunFolders:
    run = RunFolders(root / "run", root / "state")
    server = Server.create(
        run.folder, PLAN, Settings(clip_norm=CLIPPING), {"w": np.zeros(5)}, state_folder=run.state
    )
    with server:
        for _ in range(rounds):
            attempt = server.begin(CLIENTS)
            for number, client in enumerate(attempt.clients[:3]):
                # One of three cannot be used.
                update = np.full(5, math.nan if number == 2 else 1.0)
                attempt.report(client, update, attempt.attempt)
            server.commit(attempt)
    return run


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> RunFolders:
    return record(tmp_path_factory.mktemp("original"))


@pytest.fixture
def run(original, tmp_path) -> RunFolders:
    return original.copy_to(tmp_path)


def commits(records: list[dict]) -> list[dict]:
    return [record for record in records if record["kind"] == "committed"]


def test_an_honest_run_passes(run):
    verdict = run.verify()
    assert failed(verdict) == {}
    (text,) = (check.text for check in verdict.checks if check.name == "clip norms")
    assert "5 clip norms follow" in text
    assert "have the noise" in text
    rewrite(run, read_records(run))
    assert failed(run.verify()) == {}


@pytest.mark.parametrize("row", [0, 2, 4])
def test_an_edited_clip_norm_fails(run, row):
    records = read_records(run)
    commits(records)[row]["clipping"]["state"]["clip_norm"] *= 1.0001
    rewrite(run, records)
    assert set(failed(run.verify())) == {"clip norms"}


def test_an_edited_end_of_the_search_fails(run):
    records = read_records(run)
    commits(records)[4]["clipping"]["state"]["settled"] += 1
    rewrite(run, records)
    assert "search" in failed(run.verify())["clip norms"]


def test_edited_bits_fail_even_if_all_later_clip_norms_follow(run):
    records = read_records(run)
    commits(records)[4]["clipping"]["bits"] += 1000  # no clip norm follows the last row yet
    rewrite(run, records)
    assert "noise of that row" in failed(run.verify())["clip norms"]


def test_a_missing_record_fails(run):
    records = read_records(run)
    del commits(records)[1]["clipping"]
    rewrite(run, records)
    assert "no clip norm" in failed(run.verify())["clip norms"]


def test_a_moving_clip_norm_in_a_run_with_a_fixed_one_fails(run, tmp_path):
    fixed = record_run(tmp_path / "fixed", 2)
    records = read_records(fixed)
    commits(records)[0]["clipping"] = commits(read_records(run))[0]["clipping"]
    rewrite(fixed, records)
    assert "fixed" in failed(fixed.verify())["clip norms"]


def test_a_guarantee_for_a_fixed_clip_norm_fails(run):
    path = run.folder / "guarantee.json"
    path.write_text(path.read_text().replace("clip norm of its round", "clip norm"))
    assert "the clipping" in failed(run.verify())["guarantee.json"]


def test_a_clip_norm_that_follows_bits_without_noise_is_found(tmp_path, monkeypatch):
    """A broken server: it takes the bits before the noise is added."""
    honest = NoiseStream.add_to

    def careless(self: NoiseStream, total: ExactSum) -> None:
        bits = total.steps[-1]
        honest(self, total)
        total.steps[-1] = bits

    monkeypatch.setattr(NoiseStream, "add_to", careless)
    broken = record(tmp_path)
    assert "noise of that row" in failed(broken.verify())["clip norms"]


def test_a_division_by_the_usable_reports_is_found(tmp_path, monkeypatch):
    """A broken server: the bits are divided by a number that depends on the clients' data."""
    honest = MovingClipNorm.__init__

    def careless(self: MovingClipNorm, options, grid, goal, last) -> None:
        honest(self, options, grid, goal - 1, last)  # one of three updates cannot be used

    monkeypatch.setattr(MovingClipNorm, "__init__", careless)
    broken = record(tmp_path)
    assert "follows from" in failed(broken.verify())["clip norms"]


class StreamFiles:
    """What `NoiseOfCoordinate` reads."""

    def __init__(self, mechanism: dpftrl.Mechanism, size: int, noise_multiplier: float):
        self.mechanism, self.size, self.noise_multiplier = mechanism, size, noise_multiplier
        self.buffers = "float64"


@pytest.mark.parametrize("name", ["blt-b400", "tree", "banded:3", "sqrt", "inv-sqrt"])
@pytest.mark.parametrize("coordinate", [0, 1023, 1024, 2047, 2048, 5001])
def test_the_noise_of_a_coordinate_is_that_of_the_stream(name, coordinate):
    mechanism = dpftrl.mechanism(name, MinSep(6, 2))
    key = NoiseKey.insecure_for_tests(7)
    stream = NoiseStream.unchecked(
        mechanism, 5002, noise_multiplier=2.0, key=key, clip_norm=1.0, threads=1
    )
    ours = NoiseOfCoordinate(
        StreamFiles(mechanism, 5001, 2.0), coordinate, memoryview(key.secret_bytes())
    )
    for row in range(6):
        total = np.full(5002, float(row))
        stream.add_to(total)
        digest = bytes(stream.last_digest().secret_bytes())
        assert 2 * ours.next(digest) == pytest.approx(total[coordinate] - row, abs=1e-12)
