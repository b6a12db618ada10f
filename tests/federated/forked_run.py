"""Run as a program: FOLDER; what copies of a server, made by fork, may do, as JSON."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from small_runs import PEOPLE, create, fill, records, reopen

from dpftrl.errors import DpftrlError
from dpftrl.federated import Server


def in_a_copy(action: Callable[[], object]) -> str:
    """What a copy of this process says to an action."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.write(writing, said(action).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        found = answer.read()
    os.waitpid(child, 0)
    return found


def said(action: Callable[[], object]) -> str:
    try:
        action()
    except DpftrlError as error:
        return str(error)
    return "done"


def idle_copy() -> int:
    """A copy that lives on; it ends when the returned end of a pipe is closed."""
    reading, writing = os.pipe()
    if not os.fork():
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    os.close(reading)
    return writing


def main(place: Path) -> dict[str, Any]:
    with create(place) as server:
        copy = {"begin": in_a_copy(lambda: server.begin(PEOPLE))}
        attempt = server.begin(PEOPLE)
        fill(attempt)
        before = records(server)
        copy["commit"] = in_a_copy(lambda: server.commit(attempt))
        copy["abandon"] = in_a_copy(lambda: server.abandon(attempt, "no"))
        copy["close"] = in_a_copy(server.close)
        second = said(lambda: Server.resume(place / "run", state_folder=place / "state"))
        grew = records(server) != before
        rounds = server.commit(attempt).rounds
        idle_copy()
    with reopen(server) as again:
        after = again.rounds
    return {
        "copy": copy,
        "while it is open": second,
        "journal grew": grew,
        "rounds": rounds,
        "rounds after close": after,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))))
