"""Files that version 0.1.0 wrote still open, resume to the same bits and verify."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dpftrl import read_status
from dpftrl.accounting import load_guarantee
from dpftrl.federated import Server
from dpftrl.federated.run_guarantee import IDENTITIES
from dpftrl.mechanisms.registry import load_mechanism
from dpftrl.noise import Grid, NoiseKey, NoiseStream
from dpftrl.noise.state_file import mechanism_sha256
from dpftrl.plan import load_plan
from dpftrl.verify import verify_run

V1 = Path(__file__).parent / "v1"
EXPECTED = json.loads((V1 / "expected.json").read_text())
SIZE = 2500
PEOPLE = [f"client-{i:02d}" for i in range(30)]


def update(client: int, row: int) -> np.ndarray[Any, Any]:
    """The update that every golden file was made with: exact in float32."""
    i = np.arange(SIZE, dtype=np.int64)
    steps = ((i * 7 + client * 13 + row * 29 + i * client) % 33) - 16
    return steps.astype(np.float32) / 64


def release(stream: NoiseStream, row: int, grid: Grid) -> str:
    """Add the noise of one round and return the SHA-256 of what is released."""
    if row % 2:
        total = np.round(update(1, row).astype(np.float64) * 2**20).astype(np.int64)
        stream.add_to(total, grid)
    else:
        total = update(2, row)
        stream.add_to(total)
    return hashlib.sha256(total.tobytes()).hexdigest()


def mechanism_of(label: str) -> Any:
    name = label.removesuffix("-buffered").removesuffix("-regenerating")
    return load_mechanism(V1 / "mechanisms" / f"{name[: -len('-float32')]}.json")


@pytest.mark.parametrize("name", sorted(EXPECTED["mechanism_sha256"]))
def test_mechanism_files_load_with_the_same_digest(name: str):
    loaded = load_mechanism(V1 / "mechanisms" / f"{name}.json")
    assert mechanism_sha256(loaded) == EXPECTED["mechanism_sha256"][name]


@pytest.mark.parametrize("label", sorted(EXPECTED["noise"]))
def test_noise_states_go_on_to_the_same_bits(label: str):
    key, grid = NoiseKey.insecure_for_tests(7), Grid.for_noise(1.5, 0.5)
    state = V1 / "noise" / f"{label}.safetensors"
    stream = NoiseStream.load_unchecked(state, mechanism_of(label), key=key, at_least=3)
    releases = [release(stream, row, grid) for row in range(3, 6)]
    assert releases == EXPECTED["noise"][label][3:]


@pytest.mark.parametrize("path", sorted((V1 / "plans").glob("*.json")), ids=lambda p: p.stem)
def test_plans_load(path: Path):
    plan = load_plan(path)
    # The sensitivity is a sum that BLAS orders differently from machine to machine.
    assert plan.guarantee.epsilon <= 4.0 * (1 + 1e-12)
    assert plan.participation.rounds == 8


@pytest.mark.parametrize("path", sorted((V1 / "guarantees").glob("*.json")), ids=lambda p: p.stem)
def test_guarantees_load(path: Path):
    said = json.loads(path.read_text())
    assert load_guarantee(path).epsilon == pytest.approx(said["epsilon"], rel=1e-9)


@pytest.mark.parametrize(
    "path",
    sorted([*V1.glob("guarantees/*.json"), *V1.glob("runs/*/*/guarantee.json")]),
    ids=lambda path: str(path.relative_to(V1)),
)
def test_hypotheses_are_read_in_the_words_of_this_version(path: Path):
    """Version 0.1 called a client a device. Nothing but the words changes."""
    said, loaded = json.loads(path.read_text()), load_guarantee(path)
    assert all("device" not in hypothesis.text for hypothesis in loaded.hypotheses)
    bases = [(hypothesis["name"], hypothesis["basis"]) for hypothesis in said["hypotheses"]]
    kept = [(hypothesis.name, hypothesis.basis) for hypothesis in loaded.hypotheses]
    assert [*bases, ("rounding", "assumed")] == kept
    texts = {hypothesis.text for hypothesis in loaded.hypotheses}
    assert {run.hypothesis.text for run in loaded.runs} <= texts
    identities = {one.text for one in loaded.hypotheses if one.name == "identity"}
    assert identities <= {identity.text for identity in IDENTITIES.values()}


def copy_of(run: Path, to: Path) -> Path:
    """A copy to work on, with the modes that git does not keep."""
    shutil.copytree(run, to)
    for path in (to / "private", *(to / "private").rglob("*")):
        path.chmod(0o700 if path.is_dir() else 0o600)
    return to


def next_round(server: Server, by_time: bool) -> None:
    attempt = server.begin(PEOPLE, float(server.rounds) if by_time else None)
    for client in attempt.clients:
        if not attempt.enough:
            attempt.report(client, update(int(client[-2:]), attempt.number), attempt.attempt)
    server.commit(attempt)


@pytest.mark.parametrize("kind", sorted(EXPECTED["runs"]))
@pytest.mark.parametrize("keep_buffers", [True, False], ids=["saved buffers", "replayed"])
def test_stopped_runs_resume_to_the_same_bits(kind: str, keep_buffers: bool, tmp_path: Path):
    expected = EXPECTED["runs"][kind]
    run = copy_of(V1 / "runs" / kind / "stopped", tmp_path / "run")
    witness = shutil.copytree(V1 / "runs" / kind / "stopped-witness", tmp_path / "witness")
    if not keep_buffers:
        (run / "private" / "noise.safetensors").unlink(missing_ok=True)
    with Server.resume(run, state_folder=witness) as server:
        assert server.rounds == 5
        while server.rounds < 8:
            next_round(server, expected["by_time"])
        digest = hashlib.sha256(np.ascontiguousarray(server.model).tobytes()).hexdigest()
        assert digest == expected["model_sha256"]
        assert server.epsilon == pytest.approx(expected["epsilon"], rel=1e-9)
    assert verify_run(run, witness).passed


@pytest.mark.parametrize("kind", sorted(EXPECTED["runs"]))
@pytest.mark.parametrize("when", ["stopped", "finished"])
def test_runs_verify(kind: str, when: str, tmp_path: Path):
    run = copy_of(V1 / "runs" / kind / when, tmp_path / "run")
    witness = shutil.copytree(V1 / "runs" / kind / f"{when}-witness", tmp_path / "witness")
    verdict = verify_run(run, witness)
    assert verdict.passed
    status = read_status(run, state_folder=witness)
    assert status.public.rounds == verdict.rounds
    assert status.public.epsilon == pytest.approx(verdict.epsilon, rel=1e-9)
    assert (status.public.ended is None) == (when == "stopped")
    assert status.private.witness.state == "in step"


@pytest.mark.parametrize("when", ["stopped", "finished"])
def test_trained_runs_verify(when: str, tmp_path: Path):
    run = copy_of(V1 / "train" / when, tmp_path / "run")
    witness = shutil.copytree(V1 / "train" / f"{when}-witness", tmp_path / "witness")
    assert verify_run(run, witness).passed
