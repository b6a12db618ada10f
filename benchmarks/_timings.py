"""Run in a fresh process: NAME FOLDER; measure one timing of `before_after.py` and print it.

Without arguments, print the names of all timings.

This file runs against the source tree that PYTHONPATH names, old or new. Where the trees use
different names, the function that needs them tries the new ones first.
"""

import inspect
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

import dpftrl
from dpftrl import MinSep, account, calibrate, mechanism
from dpftrl.federated import Server, Settings
from dpftrl.mechanisms import BLT, Mechanism
from dpftrl.noise import NoiseKey, NoiseStream
from dpftrl.plan import Fleet, Plan

Measurement = dict[str, list[float]]

PARTICIPATION = MinSep(2000, 400, 5)
THETA = (0.995, 0.97, 0.8, 0.2)
OMEGA = (0.05, 0.05, 0.1, 0.1)
SMALL_MODEL = 34_000
SEED = 0


def cpu_seconds() -> float:
    """Seconds of all cores, of this process and the children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(action: Callable[[], object], repeats: int, calls: int = 1) -> Measurement:
    """Seconds of one call, `repeats` times, each the mean of `calls` calls."""
    measured: Measurement = {"seconds": [], "cpu_seconds": []}
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), cpu_seconds()
        for _ in range(calls):
            action()
        measured["seconds"].append((time.perf_counter() - start) / calls)
        measured["cpu_seconds"].append((cpu_seconds() - cpu_start) / calls)
    return measured


def noise_stream(chosen: Mechanism, size: int, buffers: str | None) -> NoiseStream:
    """A noise stream that keeps buffers. Only the old tree can choose their number type."""
    key, stream_class = NoiseKey.generate(), cast(Any, NoiseStream)
    if hasattr(NoiseStream, "unchecked"):
        names = inspect.signature(stream_class.unchecked).parameters
        noise_name = "noise_multiplier" if "noise_multiplier" in names else "sigma"
        return stream_class.unchecked(
            chosen, size, clip_norm=1.0, key=key, mode="buffered", **{noise_name: 1.0}
        )
    options = {} if buffers is None else {"dtype": buffers}
    return stream_class(chosen, size, sigma=1.0, key=key, mode="buffered", **options)


def noise(chosen: Mechanism, size: int, repeats: int, buffers: str | None = None) -> Measurement:
    """A row of noise, added to an update of float32."""
    update = np.ones(size, np.float32)
    stream = noise_stream(chosen, size, buffers)
    for _ in range(3):
        stream.add_to(update)
    return measure(lambda: stream.add_to(update), repeats)


def new_blt() -> BLT:
    """A BLT whose sensitivity has not been computed yet."""
    return BLT(THETA, OMEGA)


def new_banded() -> Mechanism:
    """A banded matrix whose sensitivity has not been computed yet."""
    return mechanism("band-sqrt:400")


def account_again() -> Measurement:
    """The guarantee of a mechanism that was used before."""
    blt = new_blt()
    return measure(lambda: account(blt, PARTICIPATION, 10.0, 1e-8), 20, calls=50)


def calibrate_again(chosen: Mechanism) -> Measurement:
    """The noise multiplier of a mechanism that was used before."""
    return measure(lambda: calibrate(chosen, PARTICIPATION, 2.0, 1e-8), 20, calls=50)


def create_run(folder: str, size: int) -> Server:
    """A run with 20 reports per round, of a population of 2,000."""
    guarantee = account(mechanism("blt-b400"), MinSep(200, 50), 10.0, 1e-8)
    plan = Plan(Fleet(population=2000, report_goal=20), guarantee)
    start = {"weights": np.zeros(size, np.float32)}
    settings = Settings(clip_norm=1.0)
    return Server.create(f"{folder}/run", plan, settings, start, state_folder=f"{folder}/state")


def resume_run(folder: str) -> Server:
    """Resume the run."""
    server_class: Any = Server
    resume = server_class.resume if hasattr(Server, "resume") else server_class.open
    return resume(f"{folder}/run", state_folder=f"{folder}/state")


def run_round(server: Server, names: Sequence[str], update: np.ndarray) -> None:
    """Contact a cohort, sum its reports, and commit the round."""
    current: Any = server.begin(names)
    attempt = current.attempt if hasattr(current, "attempt") else current.number
    for client in current.clients:
        current.report(client, update, attempt)
    server.commit(current)


def server_round() -> Measurement:
    """One round of a small model, with everything that is written to the disk."""
    names = [f"client-{number}" for number in range(2000)]
    update = np.full(SMALL_MODEL, 0.01, np.float32)
    with tempfile.TemporaryDirectory() as folder, create_run(folder, SMALL_MODEL) as server:
        for _ in range(3):
            run_round(server, names, update)
        return measure(lambda: run_round(server, names, update), 60)


def resume() -> Measurement:
    """Resume a run of 50 rounds, ten of them after the noise buffers were saved."""
    names = [f"client-{number}" for number in range(2000)]
    update = np.full(SMALL_MODEL, 0.01, np.float32)
    with tempfile.TemporaryDirectory() as folder:
        with create_run(folder, SMALL_MODEL) as server:
            for _ in range(50):
                run_round(server, names, update)
        return measure(lambda: resume_run(folder).close(), 15)


def optimize() -> Measurement:
    """The first call of `optimize_blt` in a process."""
    from dpftrl.optimize import optimize_blt

    return measure(lambda: optimize_blt(PARTICIPATION, 4, "max"), 1)


def observe(path: Path) -> Measurement:
    """Read a participation log."""
    try:
        from dpftrl.accounting.logs import observe as observe_log
    except ImportError:
        from dpftrl.observed import observe as observe_log
    return measure(lambda: observe_log(path), 3)


def command(*arguments: str) -> Measurement:
    """Run Python with these arguments in a process of its own."""
    line = [sys.executable, *arguments]
    return measure(lambda: subprocess.run(line, check=True, stdout=subprocess.DEVNULL), 5)


def simulated_round() -> Measurement:
    """One round of training with the simulated clients of the task chitchat."""
    from dpftrl.tasks import load_task

    try:
        from dpftrl.simulation.jax_clients import JaxClients, LocalTraining
        from dpftrl.simulation.population import Population, next_round
        from dpftrl.tasks.language_model import language_model
    except ImportError:
        from dpftrl.engines.local.batches import LocalTraining
        from dpftrl.engines.local.jax_clients import JaxClients
        from dpftrl.engines.local.loop import next_round
        from dpftrl.engines.local.population import Population

        from dpftrl.tasks.language_model import language_model
    task = load_task("chitchat", vocabulary_size=1000, sentence_length=20)
    model = language_model("window", len(task.vocabulary), embedding=16, hidden=16)
    clients = JaxClients(model, task.train, LocalTraining(0.5, 16, 1), SEED)
    population = Population(task.train.names, SEED, drop_out=0, straggler_share=0, least=1, most=1)
    guarantee = account(mechanism("blt-b400"), MinSep(200, 50), 10.0, 1e-8)
    plan = Plan(Fleet(len(task.train), report_goal=20), guarantee)
    with (
        tempfile.TemporaryDirectory() as folder,
        Server.create(
            f"{folder}/run",
            plan,
            Settings(clip_norm=1.0),
            model.init(SEED),
            state_folder=f"{folder}/state",
        ) as server,
    ):

        def one_round() -> None:
            next_round(server, clients, population, rounds_per_hour=1.0)

        for _ in range(3):
            one_round()
        return measure(one_round, 15)


def timings(folder: Path) -> Iterator[tuple[str, Callable[[], Measurement]]]:
    """All timings, by name.

    Args:
        folder: Folder with the participation log.
    """
    tree = mechanism("tree", MinSep(100, 100))
    yield "noise of a BLT, 1e6 coordinates", lambda: noise(new_blt(), 10**6, 40)
    yield "noise of a BLT, 1e7 coordinates", lambda: noise(new_blt(), 10**7, 10)
    yield (
        "noise of a BLT, 1e6 coordinates, both with float64 buffers",
        lambda: noise(new_blt(), 10**6, 40, "float64"),
    )
    yield "noise of TreeAgg, 1e6 coordinates", lambda: noise(tree, 10**6, 32)
    yield "server round, 34,000 parameters", server_round
    yield "resume after 50 rounds", resume
    yield "simulated training round, jax clients", simulated_round
    yield (
        "sensitivity of a BLT, n = 2,000",
        lambda: measure(lambda: new_blt().sensitivity(PARTICIPATION), 20, calls=20),
    )
    yield (
        "account, BLT, first call",
        lambda: measure(lambda: account(new_blt(), PARTICIPATION, 10.0, 1e-8), 20, calls=20),
    )
    yield "account, BLT, later calls", account_again
    yield (
        "calibrate, BLT, first call",
        lambda: measure(lambda: calibrate(new_blt(), PARTICIPATION, 2.0, 1e-8), 20, calls=20),
    )
    yield "calibrate, BLT, later calls", lambda: calibrate_again(new_blt())
    yield (
        "calibrate, banded, first call",
        lambda: measure(lambda: calibrate(new_banded(), PARTICIPATION, 2.0, 1e-8), 10, calls=2),
    )
    yield "calibrate, banded, later calls", lambda: calibrate_again(new_banded())
    yield "optimize_blt, first call", optimize
    yield "observe, 1e6 rows of CSV", lambda: observe(folder / "log.csv")
    yield "import dpftrl", lambda: command("-c", "import dpftrl")
    yield "dpftrl --version", lambda: command("-m", "dpftrl", "--version")


def main() -> None:
    """Print the source tree, and the measurement or the names of all timings."""
    if len(sys.argv) == 1:
        printed: dict[str, Any] = {"names": [name for name, _ in timings(Path())]}
    else:
        printed = dict(timings(Path(sys.argv[2])))[sys.argv[1]]()
    print(json.dumps({"source": dpftrl.__file__, **printed}))


if __name__ == "__main__":
    main()
