"""Processes that are killed at any instant: a program forks a child for every job it is given.

The parent has imported and compiled everything, and never opens a run itself.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from killed_run import DURABLE, Fuse
from small_training_runs import Place

from dpftrl.centralized import TrainingRun
from dpftrl.centralized.store import RunStore, Saved
from dpftrl.errors import DpftrlError
from dpftrl.noise import NoiseStream, stream

KILLED = -9
NEVER = 10**9
HERE = Path(__file__).parent


class Log:
    """Appends a line for every row of noise, and for every mean that changes a model."""

    def __init__(self, path: str):
        self._path = path

    def write(self, kind: str, *values: Any) -> None:
        digests = [
            hashlib.sha256(one.tobytes()).hexdigest() if isinstance(one, np.ndarray) else one
            for one in values
        ]
        with open(self._path, "a") as file:
            file.write(json.dumps([kind, *digests]) + "\n")

    def patch(self) -> None:
        """Log every sum with its noise, and every mean before the model changes.

        The noise is computed while the step is journalled. Here it comes first, so that it is in
        the log if the process is killed while it writes the journal.
        """
        add_to, step, log = NoiseStream.add_to, TrainingRun.step, self.write

        def logged(
            self: NoiseStream, total: Any, *rest: Any, on_digest: Any, **options: Any
        ) -> None:
            before, row = total.copy(), self.round
            add_to(self, total, *rest, **options)
            log("noise", row, before, total - before)
            on_digest(self.last_digest())

        def logged_step(
            self: TrainingRun, total: Any, units: int, apply: Any, *rest: Any, **options: Any
        ) -> None:
            row = self.steps

            def logged_apply(mean: Any) -> None:
                log("applied", row, mean)
                apply(mean)

            step(self, total, units, logged_apply, *rest, **options)

        NoiseStream.add_to = logged
        TrainingRun.step = logged_step


def read_log(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def noise_on_two_sums(path: Path) -> int:
    """How many noise vectors were added to more than one sum."""
    sums: dict[str, set[str]] = defaultdict(set)
    for kind, *rest in read_log(path):
        if kind == "noise":
            sums[rest[2]].add(rest[1])
    return sum(len(some) > 1 for some in sums.values())


def rows_with_two_releases(path: Path) -> int:
    """How many rows of noise changed a model by two different means."""
    means: dict[int, set[str]] = defaultdict(set)
    for kind, *rest in read_log(path):
        if kind == "applied":
            means[rest[0]].add(rest[1])
    return sum(len(some) > 1 for some in means.values())


def rows_with_two_sums(path: Path) -> int:
    """How many rows were computed for more than one sum, whether released or not."""
    sums: dict[int, set[str]] = defaultdict(set)
    for kind, *rest in read_log(path):
        if kind == "noise":
            sums[rest[0]].add(rest[1])
    return sum(len(some) > 1 for some in sums.values())


# --- Broken code, for negative controls ----------------------------------------------------------


def noise_forgets_sums() -> None:
    """Rows of noise depend on the key and the row alone."""
    honest = stream.digest_of_update

    def careless(key: Any, parts: Any, *rest: Any) -> Any:
        return honest(key, [memoryview(np.zeros_like(part)) for part in parts], *rest)

    stream.digest_of_update = careless


def model_first() -> None:
    """The model changes before the journal is written."""

    honest = TrainingRun.step

    def step(
        self: TrainingRun, total: Any, units: int, apply: Any, *rest: Any, **options: Any
    ) -> None:
        assert self.store is not None
        record, arguments = self.store.start_recording_step, list[Any]()

        def apply_first(mean: Any) -> None:
            apply(mean)
            if written := record(*arguments):
                written.result()

        self.store.start_recording_step = lambda *given: arguments.extend(given)
        honest(self, total, units, apply_first, *rest, **options)
        self.store.start_recording_step = record

    TrainingRun.step = step


def checkpoint_last() -> None:
    """The checkpoint is journalled before it is on the disk."""
    honest = RunStore.save

    def save(self: RunStore, steps: int, checkpoint: bytes, noise: Any, epsilon: float) -> None:
        if steps <= self.state.saved:
            return
        self._append(Saved(steps, hashlib.sha256(checkpoint).hexdigest(), epsilon))
        append, self._append = self._append, lambda _: None
        self.state.saved -= 1
        honest(self, steps, checkpoint, noise, epsilon)
        self.state.saved += 1
        self._append = append

    RunStore.save = save


def repeats_are_not_compared() -> None:
    """A step that is repeated after a crash may have another sum than the first time."""
    honest = RunStore.start_recording_step

    def record(self: RunStore, step: int, *rest: Any) -> Any:
        return honest(self, step, *rest) if step >= len(self.state.digests) else None

    RunStore.start_recording_step = record


BREAKAGES = {
    "noise forgets sums": noise_forgets_sums,
    "model first": model_first,
    "checkpoint last": checkpoint_last,
    "repeats are not compared": repeats_are_not_compared,
}


# --- The program ---------------------------------------------------------------------------------


class Salts:
    """What was added to the gradients of each step, so that a step can be repeated exactly.

    The salt of a step is written before the step is journalled, and the last one counts. So after a
    kill, the salt of a journalled step is known.
    """

    def __init__(self, path: Path, new: int, mixed: bool):
        self._path, self._new, self._mixed = path, new, mixed

    def of(self, step: int, is_repeated: bool) -> int:
        if is_repeated and not self._mixed:
            return self._known()[step]
        with open(self._path, "a") as file:
            file.write(f"{step} {self._new}\n")
        return self._new

    def _known(self) -> dict[int, int]:
        pairs = (line.split() for line in self._path.read_text().splitlines())
        return {int(step): int(salt) for step, salt in pairs}


def child(job: dict[str, Any], reply: int, work: Callable[..., dict[str, Any]]) -> None:
    """Do a job; what it returns goes through a pipe."""
    place = Place(Path(job["folder"]), Path(job["state"]))
    for name in job.get("broken", []):
        BREAKAGES[name]()
    if log := job.get("log"):
        Log(log).patch()
    salts = None
    if "salt" in job:
        salts = Salts(place.folder.with_name(place.folder.name + " salts"), job["salt"],
                      job.get("mixed", False))  # fmt: skip
    fuse = Fuse(job.get("fuse"))
    for name in DURABLE if "fuse" in job else ():
        fuse.around(name)
    try:
        answer = work(place, job, salts, reply)
        answer["points"] = fuse.points
    except DpftrlError as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    os.write(reply, json.dumps(answer).encode())


def serve(work: Callable[..., dict[str, Any]], warm_up: Callable[[], object]) -> None:
    """Fork a child for every line of input, and say what became of it."""
    warm_up()
    held: list[tuple[int, int]] = []
    for line in sys.stdin:
        job = json.loads(line)
        if job.get("kill_holder"):
            pid, readable = held.pop()
            os.kill(pid, signal.SIGKILL)
        else:
            pid, readable = _fork(job, work)
        if job.get("hold"):
            held.append((pid, readable))
            said = {"held": os.read(readable, 4) == b"held"}
        else:
            said = _ended(pid, readable, job.get("delay"))
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


def _fork(job: dict[str, Any], work: Callable[..., dict[str, Any]]) -> tuple[int, int]:
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(job, writable, work)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    os.close(writable)
    return pid, readable


def _ended(pid: int, readable: int, delay: float | None) -> dict[str, Any]:
    """Wait for a child's answer, or kill it after a delay."""
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    # Answers are short, and fit into a pipe. Processes that the child has started may still hold
    # the other end, so nobody waits for the end of the pipe.
    answer = json.loads(os.read(readable, 2**16)) if status == 0 else {}
    os.close(readable)
    return {"status": status, **answer}


class Children:
    """A program that calls `serve`: every `run` is a process of its own."""

    def __init__(self, program: Path):
        paths = [HERE, HERE.parent / "federated", HERE.parent / "torch"]
        self._program = subprocess.Popen(
            [sys.executable, str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        )

    def run(self, place: Place, **job: Any) -> dict[str, Any]:
        """Create or resume a run in a child; what became of it."""
        given = {"folder": str(place.folder), "state": str(place.state), **job}
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.write(json.dumps(given) + "\n")
        self._program.stdin.flush()
        return json.loads(self._program.stdout.readline())

    def close(self) -> None:
        assert self._program.stdin is not None
        assert self._program.stdout is not None
        self._program.stdin.close()
        self._program.wait(10)
        self._program.stdout.close()
