"""Run as a program: trains a small PyTorch model privately in children that can be killed."""

import os
import signal
from typing import Any

import torch
from killable_children import Salts, serve
from small_private_trainings import (
    STEPS,
    Augmented,
    bits,
    loss_fn,
    private,
    small_model,
)
from small_training_runs import Place, fast_places, sha256
from torch import nn
from torch.optim import lr_scheduler

from dpftrl.torch import PrivateTraining


def opened(place: Place, num_workers: int = 0) -> tuple[PrivateTraining, nn.Module]:
    model = small_model(dropout=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    training = private(
        place, model, optimizer, Augmented(), scheduler=scheduler, num_workers=num_workers
    )
    return training, model


def work(place: Place, job: dict[str, Any], salts: Salts | None, reply: int) -> dict[str, Any]:
    training, model = opened(place, job.get("num_workers", 0))
    with training:
        if job.get("hold"):
            os.write(reply, b"held")
            signal.pause()
        for batch in training.loader:
            if training.steps == job.get("steps", STEPS):
                break
            salt = 0
            if salts is not None:
                salt = salts.of(training.steps, bool(training.run.repeating))

            def loss(model: nn.Module, batch: Any, scale: float = 1 + 0.1 * salt) -> torch.Tensor:
                return scale * loss_fn(model, batch)

            training.step(loss, batch)
            if job.get("pause_at") == training.steps:
                os.write(reply, b"held")
                signal.pause()
    if "steps" in job:
        return {}
    (saved,) = (place.folder / "private" / "checkpoints").glob("*.safetensors")
    return {
        "result": {
            "model": bits(model),
            "checkpoint": sha256(saved.read_bytes()),
            "epsilon": repr((training.steps, training.epsilon)),
        }
    }


def warm_up() -> None:
    torch.set_num_threads(1)  # a fork copies no threads
    with fast_places() as places:
        place = next(places)
        for _ in range(2):
            training, _ = opened(place)
            with training:
                for batch in training.loader:
                    training.step(loss_fn, batch)
                    if training.steps == 5:
                        break


if __name__ == "__main__":
    serve(work, warm_up)
