"""Run as a program: trains a centralized run without a framework in children that can be killed."""

import os
import signal
from typing import Any

from killable_children import Salts, serve
from small_training_runs import STEPS, Place, Trainer, fast_places, result


def work(place: Place, job: dict[str, Any], salts: Salts | None, reply: int) -> dict[str, Any]:
    with Trainer.open(place) as trainer:
        if job.get("hold"):
            os.write(reply, b"held")
            signal.pause()
        while trainer.run.steps < job.get("steps", STEPS):
            repeated = bool(trainer.run.repeating)
            trainer.step(0.1 * salts.of(trainer.run.steps, repeated) if salts else 0.0)
    return {} if "steps" in job else {"result": result(place)}


def warm_up() -> None:
    with fast_places() as places, Trainer.create(next(places)) as trainer:
        trainer.train()


if __name__ == "__main__":
    serve(work, warm_up)
