"""Ctrl-C, or no memory left, on any line: whoever catches it and goes on gets the same run."""

import contextlib
import linecache
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from killed_run import NAMES, Place, fast_places, go_on, result, unharmed

import dpftrl.federated
from dpftrl.errors import InvalidInput
from dpftrl.federated import Server
from dpftrl.federated.eligibility import Timers

# A file that was being opened is closed by the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
WATCHED = str(Path(dpftrl.federated.__file__).parent)


class Interruption:
    """Comes at the n-th line of code in dpftrl.federated.

    Not at a `with`: a trace comes there again before its end, where no signal is ever handled.
    """

    def __init__(self, at: int):
        self.at = at
        self.lines: list[str] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> "Interruption | None":
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not line.lstrip().startswith("with "):
            self.lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            if len(self.lines) == self.at:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> "Interruption":
        self._before = sys.gettrace()
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)


@pytest.fixture(scope="module")
def wanted() -> dict[str, str]:
    return unharmed()


@pytest.fixture
def places() -> Iterator[Iterator[Place]]:
    with fast_places() as found:
        yield found


def stubbornly(server: Server, place: Place) -> None:
    """Go on with the server that was interrupted; only if it refuses, with a new one."""
    with server, contextlib.suppress(InvalidInput):
        go_on(server)
        return
    with place.open() as another:
        go_on(another)


def harmed(places: Iterator[Place], wanted: dict[str, str], at: int) -> tuple[bool, str]:
    """Whether an interruption at a line of two rounds and one abandoned attempt does harm."""
    place = next(places)
    server = place.create()
    go_on(server, rounds=1)
    interruption = Interruption(at)
    with contextlib.suppress(KeyboardInterrupt), interruption:
        go_on(server, rounds=3)
    where = interruption.lines[-1]
    try:
        stubbornly(server, place)
    except Exception as error:
        return True, f"{where} {error!r}"
    return result(place) != wanted, where


def first_and_last(places: Iterator[Place]) -> list[int]:
    """Every line that these rounds pass, at the first time and at the last."""
    place = next(places)
    with place.create() as server:
        go_on(server, rounds=1)
        with Interruption(0) as interruption:
            go_on(server, rounds=3)
    lines = interruption.lines
    first = {where: at for at, where in reversed([*enumerate(lines, 1)])}
    last = {where: at for at, where in enumerate(lines, 1)}
    return sorted({*first.values(), *last.values()})


def check(places: Iterator[Place], wanted: dict[str, str], step: int) -> None:
    instants = first_and_last(places)
    assert len(instants) > 200
    found = [harmed(places, wanted, at) for at in instants[::step]]
    assert [where for was_harmed, where in found if was_harmed] == []


def test_an_interruption_is_harmless(places: Iterator[Place], wanted: dict[str, str]) -> None:
    check(places, wanted, 9)


@pytest.mark.slow
def test_an_interruption_at_any_line_is_harmless(
    places: Iterator[Place], wanted: dict[str, str]
) -> None:
    check(places, wanted, 1)


def test_timers_that_cannot_be_set_end_the_server(
    places: Iterator[Place], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients were contacted and the server forgot: one could come back too early."""

    def out_of_memory(*_: object) -> None:
        raise MemoryError

    with next(places).create() as server:
        with monkeypatch.context() as patch:
            patch.setattr(Timers, "mark", out_of_memory)
            with pytest.raises(MemoryError):
                server.begin(NAMES)
        with pytest.raises(InvalidInput, match="resume the run"):
            server.begin(NAMES)
