"""The runs below one folder, for the page: their status, metrics, statement and verification.

A browser names a run by an opaque id, never by a path, and no file of a run is served: the page
gets figures that are computed from the files, and the statement, which may be published.
"""

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import msgspec
from msgspec.structs import replace

from dpftrl._internal.formatting import in_full, rounded_up
from dpftrl._internal.storage import read_json
from dpftrl.accounting import load_guarantee
from dpftrl.centralized.guarantee import GuaranteeFile
from dpftrl.errors import DpftrlError, InvalidInput
from dpftrl.federated.metrics import read_points
from dpftrl.journal import witness_folder
from dpftrl.plan import load_plan
from dpftrl.statement import make_statement
from dpftrl.statement.centralized import CentralizedStatement
from dpftrl.statement.from_files import run_record
from dpftrl.status import Status, StatusReader
from dpftrl.status.figures import PublicFigures
from dpftrl.status.texts import private_rows, public_rows, unit_of
from dpftrl.verify.centralized_files import is_centralized

DEPTH: Final = 3  # folders below the given one in which runs are looked for
MOST_FOLDERS: Final = 5_000  # that are looked into
MOST_RUNS: Final = 200
MOST_POINTS: Final = 1_000  # of a curve
MOST_METRICS: Final = 64 * 2**20  # bytes of metrics.jsonl
# A status is read again after this many seconds, and after five times as long as reading takes.
REST_SECONDS: Final = 1.0
REST_FACTOR: Final = 5.0


@final
class Run:
    """A run, and what was last read from its files.

    Args:
        folder: Its folder.
        name: Its path below the folder of all runs.
        state_folder: Folder with its witness; None for the default.
    """

    def __init__(self, folder: Path, name: str, state_folder: Path | None):
        self.folder, self.name, self.state_folder = folder, name, state_folder
        self.number = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
        self._reader: StatusReader | None = None
        self._lock = threading.Lock()
        self._known: tuple[float, Status] | None = None  # until when it is shown again, and status

    def status(self) -> Status:
        """The status, at most some seconds old.

        Raises:
            DpftrlError: The run cannot be read.
        """
        with self._lock:
            started = time.monotonic()
            if self._known is not None and started < self._known[0]:
                return self._known[1]
            if self._reader is None:
                self._reader = StatusReader(self.folder, state_folder=self.state_folder)
            status = self._reader.read()
            took = time.monotonic() - started
            self._known = started + took + max(REST_SECONDS, REST_FACTOR * took), status
            return status

    def row(self) -> dict[str, Any]:
        """The run in a list of runs."""
        try:
            status = self.status()
        except DpftrlError as error:
            return {"run": self.number, "name": self.name, "error": self._without_paths(error)}
        public = status.public
        running = status.private.process.running
        state = "ended" if public.ended else "running" if running else "not running"
        return {
            "run": self.number,
            "name": self.name,
            "state": state,
            "kind": public.kind,
            "unit": unit_of(public),
            "rounds": f"{public.rounds:,} of {public.rounds_planned:,}",
            "fraction": public.rounds / public.rounds_planned,
            "epsilon": rounded_up(public.epsilon),
            "planned": rounded_up(public.epsilon_planned),
            "warnings": len(status.warnings),
        }

    def view(self) -> dict[str, Any]:
        """Everything that the page of the run shows.

        Raises:
            DpftrlError: The run cannot be read.
        """
        status = self.status()
        public, private = status.public, status.private
        curve = self._curve(public.rounds)
        rows = {
            "public": list(public_rows(public)),
            "private": [
                (name, private.witness.state if name == "witness" else self._without_paths(text))
                for name, text in private_rows(public, private, status.time)
            ],
        }
        return {
            "run": self.number,
            "name": self.name,
            "time": status.time,
            "status": msgspec.to_builtins(self._portable(status)),
            **rows,
            "warnings": [
                {"kind": warning.kind, "text": warning.text}
                for warning in self._portable(status).warnings
            ],
            "curve": curve,
            "headline": _headline(dict(rows["public"]), dict(rows["private"]), public, curve),
            "figures": _figures(public, curve),
        }

    def _curve(self, rounds: int) -> list[dict[str, Any]]:
        """Epsilon and held-out metrics by round, from the public `metrics.jsonl`."""
        path = self.folder / "metrics.jsonl"
        try:
            if path.is_symlink() or path.stat().st_size > MOST_METRICS:
                return []
            points = [point for point in read_points(path) if point.round <= rounds]
        except (OSError, DpftrlError):
            return []
        every = max(1, -(-len(points) // MOST_POINTS))
        kept = [*points[::every], *(points[-1:] if (len(points) - 1) % every else [])]
        return [msgspec.to_builtins(point) for point in kept]

    def statement(self) -> str:
        """The statement of what was released so far, as an HTML page.

        The run is not verified for it, so every hypothesis is stated as claimed.

        Raises:
            DpftrlError: There is no statement yet.
        """
        root = self.folder
        if not (root / "guarantee.json").is_file():
            raise InvalidInput("there is no statement before the first release")
        if is_centralized(root):
            guarantee = read_json(root / "guarantee.json", GuaranteeFile, "centralized guarantee")
            return CentralizedStatement(guarantee).html()
        return make_statement(
            load_plan(root / "plan.json"),
            accounted=load_guarantee(root / "guarantee.json"),
            record=run_record(root),
        ).html()

    def is_running(self) -> bool:
        """Whether a process works on the run."""
        return bool(self.status().private.process.running)

    def verify_task(self) -> dict[str, Any]:
        """The task that verifies the run."""
        state = None if self.state_folder is None else str(self.state_folder)
        return {"kind": "verify", "folder": str(self.folder), "state_folder": state}

    def _portable(self, status: Status) -> Status:
        """The status without the place of the run and of its witness on the machine."""
        private = status.private
        problems = tuple(map(self._without_paths, private.disk.problems))
        warnings = tuple(
            replace(warning, text=self._without_paths(warning.text)) for warning in status.warnings
        )
        shown = replace(
            private,
            disk=replace(private.disk, problems=problems),
            witness=replace(private.witness, folder=""),
        )
        return replace(status, folder=self.name, private=shown, warnings=warnings)

    def _without_paths(self, text: object) -> str:
        """The text without the place of the run, and of its witness, on the machine."""
        witness = str(witness_folder(self.folder, self.state_folder))
        return str(text).replace(str(self.folder), self.name).replace(witness, "(state folder)")


def _headline(
    public_texts: dict[str, str],
    private_texts: dict[str, str],
    public: PublicFigures,
    curve: list[dict[str, Any]],
) -> list[dict[str, str]]:
    """The most important figures: a label, a value and a note each."""

    def box(label: str, text: str, separator: str = "; ") -> dict[str, str]:
        value, _, note = text.partition(separator)
        return {"label": label, "value": value, "note": note}

    unit = unit_of(public)
    boxes = [box(unit, public_texts[unit]), box("epsilon", public_texts["epsilon"])]
    measured = [point for point in curve if "accuracy" in point]
    if measured:
        last = measured[-1]
        text = f"{last['accuracy']:.2%}; after {last['round']:,} {unit}"
        boxes.append(box("held-out accuracy", text))
    if "eligible now" in private_texts:
        boxes.append(box("eligible clients (private)", private_texts["eligible now"], " "))
    if "expected end" in private_texts:
        when, _, left = private_texts["expected end"].partition(", ")
        shown = f"{left}; {when}" if left else when
        boxes.append(box("expected end (private)", shown))
    return boxes


def _figures(public: PublicFigures, curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Epsilon against the budget, or against the plan without one, and held-out accuracy."""
    if not curve:
        return []
    unit, budget = unit_of(public), public.epsilon_budget
    planned = {
        "y": public.epsilon_planned,
        "label": f"planned epsilon {rounded_up(public.epsilon_planned)}",
    }
    x = {"label": f"{unit} released", "log": False, "range": [0, public.rounds_planned]}
    figures = [
        {
            "name": "epsilon-by-round",
            "title": "Epsilon against the plan" if budget is None else "Epsilon against the budget",
            "x": x,
            "y": {"label": f"epsilon at delta {in_full(public.delta)}", "log": False, "zero": True},
            "target": planned if budget is None else {"y": budget, "label": f"budget {budget:g}"},
            "series": [_series("epsilon", curve)],
        }
    ]
    measured = [point for point in curve if "accuracy" in point]
    if measured:
        figures.append(
            {
                "name": "accuracy-by-round",
                "title": "Held-out accuracy",
                "x": x,
                "y": {"label": "accuracy on held-out people", "log": False, "zero": True},
                "series": [_series("accuracy", measured)],
            }
        )
    return figures


def _series(name: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": name,
        "x": [point["round"] for point in points],
        "y": [point[name] for point in points],
    }


@final
@dataclass
class Runs:
    """All runs below a folder.

    Attributes:
        root: The folder.
        state_folder: Folder with the witnesses; None for the default.
    """

    root: Path
    state_folder: Path | None = None

    def __post_init__(self) -> None:
        if not self.root.is_dir():
            raise InvalidInput(f"{self.root} is not a folder; --runs takes a folder with runs")
        self._runs = dict[str, Run]()
        self._lock = threading.Lock()

    def all(self) -> list[Run]:
        """The runs that are there now, sorted by name."""
        with self._lock:
            there = dict[str, Run]()
            for folder in find_runs(self.root):
                name = folder.relative_to(self.root).as_posix()
                run = Run(folder, self.root.name if name == "." else name, self.state_folder)
                there[run.number] = self._runs.get(run.number, run)
            self._runs = there
            return sorted(there.values(), key=lambda run: run.name)

    def find(self, number: str) -> Run | None:
        """The run with this id."""
        if number not in self._runs:
            self.all()
        return self._runs.get(number)


def find_runs(root: Path) -> Iterator[Path]:
    """Yield the folders of runs at or below a folder; links are not followed."""
    waiting, seen, count = [(root, 0)], 0, 0
    while waiting and seen < MOST_FOLDERS and count < MOST_RUNS:
        folder, depth = waiting.pop()
        seen += 1
        if (folder / "run.json").is_file():
            count += 1
            yield folder
            continue
        if depth == DEPTH:
            continue
        try:
            with os.scandir(folder) as entries:
                found = [
                    Path(entry.path)
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".")
                ]
        except OSError:
            continue
        waiting += [(path, depth + 1) for path in sorted(found, reverse=True)]
