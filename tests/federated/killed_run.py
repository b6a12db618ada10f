"""A run that can be killed at any instant: run as a program, it forks a child for every job.

The parent has imported and compiled everything, and never opens a run itself; so a child lives for
some milliseconds, and dies as a process dies: without a destructor, a handler or a flush.
"""

import contextlib
import hashlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpftrl import MinSep, account, mechanism
from dpftrl.errors import DpftrlError
from dpftrl.federated import Round, RunFolder, Server, Settings, Sgd
from dpftrl.federated.store import run_store
from dpftrl.federated.store.ledger import ledger_file
from dpftrl.journal import WITNESS_BYTES, Chain
from dpftrl.noise import NoiseStream, stream
from dpftrl.plan import Fleet, Plan

SIZE = 50
ROUNDS = 6
ABANDONED = 2  # the number of the attempt that is given up
NAMES = tuple(f"client {number}" for number in range(60))
# All that storage.py does to a disk goes through these, but for the content of drafts, which a
# file has only after `replace`.
DURABLE = ("open", "replace", "fsync", "fdatasync", "pwrite", "ftruncate", "unlink", "mkdir")
run_store.FEWEST_CONTACTS = 200  # so that these runs save snapshots, after every two attempts

PLAN = Plan(
    Fleet(population=60, report_goal=4, over_selection=1.25),
    account(mechanism("blt-b400"), MinSep(ROUNDS, 3), noise_multiplier=1.0, delta=1e-6),
)
SETTINGS = Settings(clip_norm=0.5, optimizer=Sgd(momentum=0.9), snapshot_every=2)
ADAPTIVE = Settings(clip_norm="adaptive", optimizer=Sgd(momentum=0.9), snapshot_every=2)
BY_TIME = Settings(clip_norm=0.5, timer_hours=15.0, snapshot_every=2, hash_clients=False)


@dataclass(frozen=True)
class Place:
    """A run's folder, and where its witness is."""

    folder: Path
    state: Path

    def create(self, settings: Settings = SETTINGS, plan: Plan = PLAN, key: int = 1) -> Server:
        model = {"weights": np.zeros(SIZE)}
        return Server.create(
            self.folder, plan, settings, model, state_folder=self.state, insecure_test_key=key
        )

    def open(self, trust_folder: bool = False) -> Server:
        return Server.resume(self.folder, state_folder=self.state, trust_folder=trust_folder)

    def open_or_create(self, settings: Settings = SETTINGS) -> Server:
        """As somebody does who does not know how far a killed process came."""
        begun = RunFolder(self.folder).exists
        return self.open() if begun else self.create(settings)


@contextlib.contextmanager
def fast_places() -> Generator[Iterator[Place]]:
    """Places in memory, if the system has such a folder: a killed process loses nothing there."""
    shared = Path("/dev/shm")
    home = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=home) as folder:
        root = Path(folder)
        yield (Place(root / f"run {n}", root / f"state {n}") for n in itertools.count())


def go_on(
    server: Server, salt: int = 0, rounds: int = ROUNDS, empty_rows: tuple[int, ...] = ()
) -> None:
    """Rounds to the last; what clients send depends on who they are, the row and the salt."""
    while server.rounds < rounds:
        if server.rounds in empty_rows:
            server.close_empty_round([], "nobody is online", now=10.0 * server.rounds)
            continue
        attempt = server.begin(NAMES, now=10.0 * server.rounds)
        take_reports(attempt, salt)
        if attempt.attempt == ABANDONED:
            server.abandon(attempt, "too few")
        else:
            server.commit(attempt)


def unharmed() -> dict[str, str]:
    """What a run comes to that nothing happened to."""
    with fast_places() as found:
        place = next(found)
        with place.create() as server:
            go_on(server)
        return result(place)


def take_reports(attempt: Round, salt: int = 0) -> None:
    for client in attempt.clients:
        seed = [int(client.split()[1]), attempt.number, salt]
        update = np.random.default_rng(seed).normal(size=SIZE).astype(np.float32)
        if attempt.report(client, update, attempt.attempt):
            return


def result(place: Place) -> dict[str, str]:
    """What must not depend on how often a run was interrupted: digests of it."""
    # Before the run is opened, which would write the guarantee once more.
    parts = {"guarantee.json": (place.folder / "guarantee.json").read_bytes()}
    with ledger_file(place.folder) as ledger:
        parts["ledger"] = ledger.read_bytes()
    with place.open() as server:
        parts["epsilon"] = repr((server.rounds, server.epsilon)).encode()
        parts["model"] = server.model.tobytes()
        parts["clip norm"] = repr(server.clip_norm).encode()
        parts["checkpoint"] = server.folder.checkpoint(server.rounds).read_bytes()
    return {name: hashlib.sha256(content).hexdigest() for name, content in parts.items()}


class Fuse:
    """Ends this process at the n-th point; before and after each operation there is one."""

    def __init__(self, blows_at: int | None):
        self.points = 0
        self._blows_at = blows_at

    def point(self) -> None:
        if self.points == self._blows_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.points += 1

    def around(self, name: str) -> None:
        """Put points around a function of `os`, and one within what it writes."""
        whole: Callable[..., Any] = getattr(os, name)

        def fused(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return whole(*args, **options)
            self.point()
            if name == "pwrite" and self.points == self._blows_at:
                handle, content, at = args
                # A witness is overwritten within one sector, of which disks write all or nothing.
                if at > 0 or len(content) != WITNESS_BYTES:
                    whole(handle, content[: len(content) // 2], at)
            if name == "pwrite":
                self.point()
            done = whole(*args, **options)
            self.point()
            return done

        setattr(os, name, fused)


def log_noise(path: str) -> None:
    """Let every round write its number, its sum and its noise, as digests, to a file."""
    add_to = NoiseStream.add_to

    def logged(self: NoiseStream, total: Any) -> None:
        before, row = total.steps.copy(), self.round
        add_to(self, total)
        noise = total.steps - before
        digests = [hashlib.sha256(part.tobytes()).hexdigest() for part in (before, noise)]
        with open(path, "a") as file:
            file.write(json.dumps([row, *digests]) + "\n")

    NoiseStream.add_to = logged


def forget_sums() -> None:
    """A broken noise, for a negative control: rows depend on the key and the row alone."""
    honest = stream.digest_of_update

    def careless(key: Any, parts: Any, *rest: Any) -> Any:
        return honest(key, [memoryview(np.zeros_like(part)) for part in parts], *rest)

    stream.digest_of_update = careless


def witness_first() -> None:
    """A broken order, for a negative control: the witness hears of what is not on the disk yet."""

    def write(self: Chain[Any], record: Any) -> None:
        mac = self.journal._mac(msgspec.json.encode(record))  # pyright: ignore[reportPrivateUsage]
        self.witness.remember(self.journal.lines + 1, mac)
        self.journal.append(record)

    Chain.append = write


BREAKAGES = {"noise forgets sums": forget_sums, "witness first": witness_first}


def child(job: dict[str, Any], reply: int) -> None:
    """Do a job; what it returns goes through a pipe."""
    place = Place(Path(job["folder"]), Path(job["state"]))
    for name in job.get("broken", []):
        BREAKAGES[name]()
    if log := job.get("log"):
        log_noise(log)
    fuse = Fuse(job.get("fuse"))
    for name in DURABLE if "fuse" in job else ():
        fuse.around(name)
    answer: dict[str, Any] = {}
    try:
        kinds = {"by_time": BY_TIME, "adaptive": ADAPTIVE}
        with place.open_or_create(kinds.get(job.get("kind", ""), SETTINGS)) as server:
            if job.get("hold"):
                os.write(reply, b"held")
                signal.pause()
            empty_rows = tuple(job.get("empty_rows", ()))
            go_on(server, job.get("salt", 0), job.get("rounds", ROUNDS), empty_rows)
        answer["points"] = fuse.points
        if "rounds" not in job:
            answer["result"] = result(place)
    except DpftrlError as error:
        answer["error"] = f"{type(error).__name__}: {error}"
    os.write(reply, json.dumps(answer).encode())


def serve() -> None:
    """Fork a child for every line of input, and say what became of it."""
    warm_up()
    held: list[tuple[int, int]] = []
    for line in sys.stdin:
        job = json.loads(line)
        if job.get("kill_holder"):
            pid, readable = held.pop()
            os.kill(pid, signal.SIGKILL)
        else:
            pid, readable = fork(job)
        if job.get("hold"):
            held.append((pid, readable))
            said = {"held": os.read(readable, 4) == b"held"}
        else:
            said = ended(pid, readable, job.get("delay"))
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()


def fork(job: dict[str, Any]) -> tuple[int, int]:
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            child(job, writable)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writable)
    return pid, readable


def ended(pid: int, readable: int, delay: float | None) -> dict[str, Any]:
    """Wait for a child's answer, or kill it after a delay."""
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    with os.fdopen(readable, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"status": status, **(json.loads(answer) if status == 0 else {})}


def warm_up() -> None:
    with fast_places() as found, next(found).create() as server:
        go_on(server)


class Children:
    """The program of this file at work: every `run` is a process of its own."""

    def __init__(self) -> None:
        self._program = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, place: Place, **job: Any) -> dict[str, Any]:
        """Begin or resume a run in a child; what became of it."""
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


if __name__ == "__main__":
    serve()
