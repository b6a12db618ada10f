"""Run as a program: trains a small PyTorch model by several processes, which can be killed.

The program reads one job per line and forks a process for each rank. The parent has imported and
compiled everything, and never opens a run itself.
"""

import contextlib
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from killed_run import DURABLE, Fuse
from small_private_trainings import PLAN, Augmented, loss_fn, private, sgd, small_model
from torch import nn
from torch.distributed.fsdp import fully_shard

from dpftrl.errors import DpftrlError
from dpftrl.torch.distributed import DistributedTraining, make_private

os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # all ranks are on this machine
HERE = Path(__file__).parent
PATIENCE = 60.0  # seconds for which a rank may outlive another


def opened(job: dict[str, Any]) -> tuple[DistributedTraining, nn.Module]:
    model = small_model(dropout=0.3, seed=job.get("seed", 0), frozen=job.get("frozen", False))
    if job["kind"] == "fsdp":
        fully_shard(model[0])
        fully_shard(model)
    wrapped = nn.parallel.DistributedDataParallel(model) if job["kind"] == "wrapped" else model
    rate, options = job.get("rate", 0.05), job.get("options", {})
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=rate)
    root = job.get("root")
    training = make_private(
        wrapped,
        optimizer,
        Augmented(),
        folder=root and f"{root}/run",
        state_folder=root and f"{root}/state",
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5),
        **{
            "plan": PLAN,
            "clip_norm": 0.8,
            "commit_every": 3,
            "insecure_test_key": 5,
            "micro_batch": 2,
            **options,
        },
    )
    return training, model


def bits(model: nn.Module) -> str:
    hasher = hashlib.sha256()
    for parameter in model.parameters():
        whole: Any = parameter.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        hasher.update(whole.numpy().tobytes())
    return hasher.hexdigest()


def work(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Train as one of the ranks."""
    training, model = opened(job)
    with training:
        if log := job.get("log"):
            apply = training._apply

            def logged(mean: Any) -> None:
                with open(log, "a") as file:
                    digest = hashlib.sha256(mean.tobytes()).hexdigest()
                    file.write(f"{training.steps} {rank} {digest}\n")
                apply(mean)

            training._apply = logged
        losses = list[float]()
        for batches in training.loader:
            if training.steps == job.get("steps"):
                break
            scale = job.get("scale", 1.0) if rank == job.get("scaled_rank", 0) else 1.0

            def loss(model: nn.Module, batch: Any, scale: float = scale) -> torch.Tensor:
                return scale * loss_fn(model, batch)

            losses.append(training.step(loss, batches).loss)
        return {
            "model": bits(model),
            "steps": training.steps,
            "epsilon": training.epsilon,
            "losses": losses,
            "noise_bytes": training.noise_bytes,
        }


def child(rank: int, job: dict[str, Any], store: str, reply: str) -> None:
    torch.manual_seed(0)
    warnings.simplefilter("ignore")  # about private losses
    fuse = Fuse(job["fuse"] if job.get("fused_rank") == rank else None)
    for name in DURABLE if job.get("fused_rank") == rank else ():
        fuse.around(name)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=job["ranks"]
        )
        answer = work(rank, job)
        answer["points"] = fuse.points
    except DpftrlError as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    Path(reply).write_text(json.dumps(answer))


def run(job: dict[str, Any], scratch: str) -> list[dict[str, Any]]:
    """Fork all ranks, kill some if the job says so, and collect what they answered."""
    store = tempfile.mktemp(dir=scratch)
    replies = [tempfile.mktemp(dir=scratch) for _ in range(job["ranks"])]
    processes = list[int]()
    for rank, reply in enumerate(replies):
        pid = os.fork()
        if pid == 0:
            if job.get("quiet"):
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                child(rank, job, store, reply)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        processes.append(pid)
    if "delay" in job:
        time.sleep(job["delay"])
        for rank in job["killed_ranks"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(processes[rank], signal.SIGKILL)
    wait(processes, job.get("patience", PATIENCE))
    read = (Path(reply) for reply in replies)
    return [json.loads(path.read_text()) if path.exists() else {"killed": True} for path in read]


def wait(processes: list[int], patience: float) -> None:
    """Wait for all ranks. Those that outlive another one for long are killed too."""
    left, deadline = set(processes), None
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.remove(pid)
                if status:
                    deadline = deadline or time.monotonic() + patience
        if deadline is not None and time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + PATIENCE
        time.sleep(0.005)


def warm_up() -> None:
    """Let the parent compile and import what all ranks need."""
    model = small_model(dropout=0.3)
    with private(None, model, sgd(model), Augmented(), micro_batch=2) as training:
        for batch in training.loader:
            training.step(loss_fn, batch)
            if training.steps == 5:
                break


def serve() -> None:
    torch.set_num_threads(1)  # a fork copies no threads
    warm_up()
    with tempfile.TemporaryDirectory() as scratch:
        for line in sys.stdin:
            sys.stdout.write(json.dumps(run(json.loads(line), scratch)) + "\n")
            sys.stdout.flush()


class Launcher:
    """Starts the program, and gives it jobs."""

    def __enter__(self) -> "Launcher":
        roots = [HERE, HERE.parent, HERE.parent / "centralized", HERE.parent / "federated"]
        path = os.pathsep.join([*map(str, roots), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE)
        self._process.stdout.close()

    def run(self, kind: str, ranks: int, root: Path | None = None, **job: Any) -> list[Any]:
        """Train by several ranks; what each of them answered."""
        job |= {"kind": kind, "ranks": ranks, "root": root and str(root)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def run_with_kills(
        self, kinds: list[str], ranks: int, folder: Path, kills: int, seed: int
    ) -> "Kills":
        """Kill runs again and again until each has ended; begin a new one as long as needed.

        Half of the kills hit one rank when it is about to write something; the others hit one rank
        or all of them after a random time.
        """
        chance, tally = random.Random(seed), Kills()
        while tally.kills < kills:
            root = folder / f"run {len(tally.models)}"
            kind = kinds[len(tally.models) % len(kinds)]
            log = str(folder / f"log {len(tally.models)}")
            answers = [{"killed": True}]
            while any("killed" in answer for answer in answers):
                how: dict[str, Any] = {}
                victim, left = chance.randrange(ranks), kills - tally.kills
                if left > 0 and chance.random() < 0.5:
                    most = 160 if victim == 0 else 40
                    how = {"fused_rank": victim, "fuse": chance.randrange(most)}
                elif left > 0:
                    hit = list(range(ranks)) if chance.random() < 0.5 else [victim]
                    how = {"delay": chance.uniform(0.0, tally.longest), "killed_ranks": hit}
                began = time.monotonic()
                answers = self.run(kind, ranks, root, log=log, **how, patience=0.2, quiet=bool(how))
                was_killed = any("killed" in answer for answer in answers)
                tally.kills += was_killed
                if not was_killed:
                    tally.longest = time.monotonic() - began
            tally.models.append(answers[0].get("model", str(answers)))
            tally.divergences += two_releases(Path(log))
        return tally


class Kills:
    """What came of kills: how many there were, the models at the end, and divergences."""

    def __init__(self) -> None:
        self.kills = 0
        self.models = list[str]()
        self.divergences = list[str]()
        self.longest = 1.5  # seconds that a run takes


def two_releases(log: Path) -> list[str]:
    """The steps and ranks with two different noisy means."""
    known, twice = dict[str, str](), list[str]()
    for line in log.read_text().splitlines():
        step, rank, digest = line.split()
        if known.setdefault(f"{step} {rank}", digest) != digest:
            twice.append(f"step {step} of rank {rank}")
    return twice


if __name__ == "__main__":
    serve()
