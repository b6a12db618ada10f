"""A virtual environment for the peer that we measure ourselves against."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
PEER = "jax-privacy==2.0.0"
FOLDER = HERE / ".peer"


def python() -> Path:
    """The peer's interpreter; its environment is made the first time."""
    interpreter, done = FOLDER / "bin" / "python", FOLDER / "ready"
    if not done.exists():
        print(f"installing {PEER} into {FOLDER} (once) ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        command = [str(interpreter), "-m", "pip", "install", "--quiet"]
        subprocess.run([*command, "--disable-pip-version-check", PEER], check=True)
        done.write_text(PEER)
    return interpreter


def in_fresh_process(interpreter: Path | str, script: str, *arguments: object) -> Any:
    """What a script of this folder prints as JSON, from a process of its own."""
    command = [str(interpreter), str(HERE / script), *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def seconds(action: Any, repeats: int) -> float:
    """The median time of an action."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def table(title: str, rows: list[dict[str, Any]]) -> None:
    """Rows of figures, as people read them."""
    shown = Table(title=title)
    for heading in rows[0]:
        shown.add_column(heading.replace("_", " "), justify="right")
    for row in rows:
        shown.add_row(*(f"{x:.6g}" if isinstance(x, float) else str(x) for x in row.values()))
    Console(width=140).print(shown)


def main(
    about: str, quick: str, measure: Callable[[bool], dict[str, list[dict[str, Any]]]]
) -> None:
    """The command line of a benchmark: --quick measures less, --json prints for machines."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", action="store_true", help="print JSON")
    chosen = parser.parse_args()
    results = measure(chosen.quick)
    if chosen.json:
        print(json.dumps(results, indent=2))
    else:
        for title, rows in results.items():
            table(title, rows)
