"""Long computations in the background: one after the other, with progress, bounded in number."""

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, final

from dpftrl.web.worker import Task, TaskFailed, Worker

State = Literal["waiting", "running", "done", "failed", "cancelled"]
MOST_WAITING: Final = 4  # jobs that wait for the one that runs
MOST_KEPT: Final = 12  # ended jobs whose results are kept
LONGEST_SECONDS: Final = 1800.0  # of one job


class TooManyJobs(Exception):
    """No further job is accepted until one has ended."""


@final
@dataclass
class Job:
    """A long computation.

    Attributes:
        task: What is computed.
        number: An opaque name.
        state: Whether it waits, runs or has ended.
        fraction: How much of it is done, from 0 to 1; None if that is not known.
        message: What is being done.
        result: The result of a job that is done.
        error: Why it failed.
        started: When it began to run, in seconds of a steady clock.
        seconds: How long it ran.
    """

    task: Task
    number: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    state: State = "waiting"
    fraction: float | None = None
    message: str = ""
    result: Any = None
    error: TaskFailed | None = None
    started: float | None = None
    seconds: float = 0.0
    handle: "asyncio.Task[None] | None" = None

    @property
    def ended(self) -> bool:
        """Whether it neither waits nor runs."""
        return self.state in {"done", "failed", "cancelled"}

    def as_json(self) -> dict[str, Any]:
        """The job as plain data; the files of its result are left out, they are downloaded."""
        result = self.result
        if isinstance(result, dict):
            result = {name: value for name, value in result.items() if name != "files"}  # pyright: ignore[reportUnknownVariableType]
        seconds = self.seconds
        if self.started is not None and not self.ended:
            seconds = time.monotonic() - self.started
        return {
            "job": self.number,
            "state": self.state,
            "fraction": self.fraction,
            "message": self.message,
            "seconds": round(seconds, 1),
            "result": result if self.state == "done" else None,
            "error": None
            if self.error is None
            else {"message": str(self.error), "field": self.error.field},
        }


@final
class Jobs:
    """The jobs of a server.

    Args:
        seconds: A job that takes longer is ended.
    """

    def __init__(self, seconds: float = LONGEST_SECONDS):
        self._seconds = seconds
        self._jobs = dict[str, Job]()
        self._turn = asyncio.Lock()

    def find(self, number: str) -> Job | None:
        """The job with this name."""
        return self._jobs.get(number)

    def start(self, task: Task, on_done: Callable[[Any], None] | None = None) -> Job:
        """Accept a job; one that computes the same and has not failed is taken instead.

        Args:
            task: What to compute.
            on_done: Called with the result.

        Raises:
            TooManyJobs: Too many are waiting.
        """
        for job in self._jobs.values():
            if job.task == task and not job.ended:
                return job
        if sum(not job.ended for job in self._jobs.values()) > MOST_WAITING:
            raise TooManyJobs(
                f"{MOST_WAITING} computations are waiting already; cancel one, or wait"
            )
        job = Job(task)
        self._jobs[job.number] = job
        job.handle = asyncio.create_task(self._run(job, on_done))
        for name in [number for number, old in self._jobs.items() if old.ended][:-MOST_KEPT]:
            del self._jobs[name]
        return job

    async def _run(self, job: Job, on_done: Callable[[Any], None] | None) -> None:
        def on_progress(fraction: float | None, message: str) -> None:
            job.fraction, job.message = fraction, message

        worker = Worker(self._seconds)
        try:
            async with self._turn:
                job.state, job.started = "running", time.monotonic()
                job.result = await worker.ask(job.task, on_progress)
                if on_done is not None:
                    on_done(job.result)
                job.state = "done"
        except TaskFailed as error:
            job.state, job.error = "failed", error
        except asyncio.CancelledError:
            job.state = "cancelled"
            raise
        finally:
            if job.started is not None:
                job.seconds = time.monotonic() - job.started
            await worker.stop()

    def cancel(self, job: Job) -> None:
        """End a job that waits or runs."""
        if job.handle is not None and not job.ended:
            if job.state == "waiting":
                job.state = "cancelled"  # it may be so new that nothing of it runs yet
            job.handle.cancel()

    async def stop(self) -> None:
        """End all jobs."""
        handles = [job.handle for job in self._jobs.values() if job.handle and not job.ended]
        for job in list(self._jobs.values()):
            self.cancel(job)
        await asyncio.gather(*handles, return_exceptions=True)
