"""A process that computes answers for the page: `python -m dpftrl.web.worker`.

It reads one task per line from standard input, as JSON, and writes lines of JSON: `progress` while
it computes, and `result` or `error` at the end. The server can end the process when a task takes
too long, and stays responsive while it computes.
"""

import asyncio
import base64
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TextIO, final

import msgspec

from dpftrl.errors import DpftrlError

LONGEST_LINE: Final = 512 * 2**20  # bytes of a result; matrices of BandMF are large
Task = dict[str, Any]
OnProgress = Callable[[float | None, str], None]


class TaskFailed(Exception):
    """A task ended with an error, for the user to read.

    Attributes:
        field: The field of the form that it is about; empty if there is none.
    """

    def __init__(self, message: str, field: str = ""):
        super().__init__(message)
        self.field = field


@final
class Worker:
    """The process, seen from the server. It is started when it is first needed.

    Args:
        seconds: A task that takes longer is ended.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()

    async def ask(self, task: Task, on_progress: OnProgress | None = None) -> Any:
        """Compute a task; several wait for each other.

        Raises:
            TaskFailed: The input is wrong, or it took too long.
        """
        async with self._lock:
            try:
                return await asyncio.wait_for(self._ask(task, on_progress), self._seconds)
            except TimeoutError:
                await self.stop()
                raise TaskFailed(
                    f"this took longer than {self._seconds:,.0f} s and was ended; use smaller "
                    "numbers, or the command line"
                ) from None
            except asyncio.CancelledError:
                await self.stop()
                raise

    async def _ask(self, task: Task, on_progress: OnProgress | None) -> Any:
        process = self._process
        if process is None or process.returncode is not None:
            process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError, ConnectionResetError):
            process.stdin.write(json.dumps(task).encode() + b"\n")
            await process.stdin.drain()
        while line := await process.stdout.readline():
            message = msgspec.json.decode(line)
            if "progress" in message:
                if on_progress is not None:
                    on_progress(*message["progress"])
            elif "error" in message:
                raise TaskFailed(message["error"]["message"], message["error"]["field"])
            else:
                return message["result"]
        await self.stop()
        raise TaskFailed("the computation ended without a result; there may be too little memory")

    async def _start(self) -> asyncio.subprocess.Process:
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "dpftrl.web.worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LONGEST_LINE,
            )
        )
        try:
            process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._process = await starting  # `stop` must know the process, to end it
            raise
        self._process = process
        return process

    async def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def compute(task: Task, on_progress: OnProgress) -> Any:
    """Compute one task.

    Raises:
        DpftrlError: The input is wrong.
    """
    kind = task["kind"]
    if kind == "verify":
        return _verify(Path(task["folder"]), task["state_folder"])
    if kind == "preset":
        from dpftrl.web.presets import compare_preset

        return compare_preset(task["number"], on_progress)
    from dpftrl.web.answers import FILES, answer_form, describe, plan_file, solve_form
    from dpftrl.web.form import Form

    form = Form.read(task["form"])
    if kind == "answer":
        return answer_form(form, task["effort"], figures=task["figures"], on_progress=on_progress)
    answer = solve_form(form, task["effort"], extrapolate=kind == "job", on_progress=on_progress)
    if kind == "file":
        return _file_as_json(plan_file(answer, task["name"]))
    files = {name: _file_as_json(plan_file(answer, name)) for name in FILES}
    return {**describe(form, answer), "files": files}


def _file_as_json(file: Any) -> dict[str, str]:
    content = base64.b64encode(file.content).decode()
    return {"name": file.name, "media_type": file.media_type, "content": content}


def _verify(folder: Path, state_folder: str | None) -> dict[str, Any]:
    from dpftrl.verify import verify_run
    from dpftrl.verify.texts import verdict_json, verdict_summary

    verdict = verify_run(folder, state_folder)
    return {**verdict_json(verdict), "summary": verdict_summary(verdict)}


def main(tasks: TextIO, results: TextIO) -> None:
    """Compute one task after the other, until there are no more."""

    def write(message: dict[str, Any]) -> None:
        results.write(msgspec.json.encode(message).decode() + "\n")
        results.flush()

    def on_progress(fraction: float | None, message: str) -> None:
        write({"progress": [fraction, message]})

    for line in tasks:
        try:
            write({"result": compute(json.loads(line), on_progress)})
        except DpftrlError as error:
            field = getattr(error, "field", "")
            write({"error": {"message": str(error), "field": field}})
        except MemoryError:
            text = "not enough memory for this computation; use fewer rounds"
            write({"error": {"message": text, "field": ""}})
        except OSError as error:
            text = f"a file cannot be read: {error.strerror or error}"
            write({"error": {"message": text, "field": ""}})


if __name__ == "__main__":
    # Results go to the real standard output; what a library prints goes to standard error.
    with (
        suppress(KeyboardInterrupt, BrokenPipeError),
        os.fdopen(os.dup(1), "w", encoding="utf-8") as standard_output,
    ):
        os.dup2(2, 1)
        main(sys.stdin, standard_output)
