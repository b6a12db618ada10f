"""How fast planning answers: the web page while a slider moves, and the command line.

The page is served by a process of its own on 127.0.0.1; each slider of the fleet moves through its
range, and the time is that from the request to the whole answer. Times of planning in a program are
CPU times in fresh processes, after all imports.
"""

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import peer

from dpftrl.web.form import FIELDS, Field

SERVE = """
import sys
from pathlib import Path
from dpftrl.web.serve import serve
place = Path(sys.argv[1])
serve(runs=None, state_folder=place, host="127.0.0.1", port=0, token=None,
      on_address=lambda address: print(address, flush=True), browser=False)
"""
CPU = """
import json, time
import numpy, scipy.special, dpftrl, dpftrl.optimize, dpftrl.plan
from dpftrl.plan import *
start = time.process_time()
{code}
first = time.process_time() - start
start = time.process_time()
{again}
print(json.dumps([first, time.process_time() - start]))
"""
BLT = """
clients = dpftrl.MinSep({rounds}, {min_sep})
chosen = dpftrl.mechanism("blt", clients)
dpftrl.calibrate(chosen, clients, 4.0, 1e-7)
"""
TABLE = """
answer_plan({{
    "kind": "fleet", "population": {population}, "report_goal": 6500, "rounds": 2000,
    "epsilon": 4.0, "delta": 1e-10
}})
"""


def values_of(field: Field, count: int) -> list[str]:
    """Values along a slider, as the page rounds them."""
    assert field.low is not None
    assert field.high is not None
    ratio = (field.high / field.low) ** (1 / (count + 1))
    values = [field.low * ratio ** (k + 1) for k in range(count)]
    if field.kind == "count":
        return [str(round(value)) for value in values]
    return [f"{value:.3g}" for value in values]


def page_rows(count: int) -> list[dict[str, Any]]:
    """The time of an answer of the page, for each slider of the fleet."""
    found = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as place:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, place], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            with httpx.Client(base_url=address, timeout=120) as client:
                found = _answers(client, count)
        finally:
            server.terminate()
            server.wait()
    every = [time for row in found for time in row.pop("times")]
    whole = {"slider": "all", "median_ms": statistics.median(every), "slowest_ms": max(every)}
    return [*found, whole]


def _answers(client: httpx.Client, count: int) -> list[dict[str, Any]]:
    match = re.search(r'name="csrf-token" content="([^"]+)"', client.get("/").text)
    assert match is not None
    headers = {"x-csrf-token": match[1]}
    standard = {field.name: field.default for field in FIELDS["fleet"] if field.default}

    def ask(values: dict[str, str]) -> float:
        start = time.perf_counter()
        content = {"mode": "fleet", "values": values}
        answer = client.post("/api/plan", json=content, headers=headers)
        took = time.perf_counter() - start
        assert answer.status_code == 200, answer.text
        return 1e3 * took

    ask(standard)  # the first answer loads what planning needs
    rows = list[dict[str, Any]]()
    for field in FIELDS["fleet"]:
        if field.low is None:
            continue
        values = dict(standard)
        if field.name == "rounds":
            values.pop("days", None)
        times = [ask({**values, field.name: text}) for text in values_of(field, count)]
        rows.append(
            {
                "slider": field.name,
                "median_ms": statistics.median(times),
                "slowest_ms": max(times),
                "times": times,
            }
        )
    return rows


def cpu_row(what: str, code: str, again: str, target: float) -> dict[str, Any]:
    """CPU seconds of planning, for the first time in a process and for other numbers after."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CPU.format(code=code, again=again)],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    first, later = map(float, done.stdout.strip().strip("[]").split(","))
    return {"what": what, "first_s": first, "again_s": later, "target_s": target}


def help_row() -> dict[str, Any]:
    """CPU seconds of `dpftrl --help`."""
    program = Path(sys.executable).with_name("dpftrl")
    code = (
        "import resource, subprocess, sys; subprocess.run([sys.argv[1], '--help'], "
        "stdout=subprocess.DEVNULL); u = resource.getrusage(resource.RUSAGE_CHILDREN); "
        "print(u.ru_utime + u.ru_stime)"
    )
    times = [
        float(subprocess.check_output([sys.executable, "-c", code, program])) for _ in range(3)
    ]
    return {"what": "dpftrl --help", "first_s": times[0], "again_s": min(times), "target_s": 0.3}


def measure(quick: bool) -> dict[str, list[dict[str, Any]]]:
    """All tables."""
    blt = [BLT.format(rounds=2000, min_sep=400), BLT.format(rounds=1990, min_sep=390)]
    plan = [TABLE.format(population=n) for n in (4_000_000, 4_100_000)]
    return {
        "the page while a slider moves": page_rows(3 if quick else 10),
        "CPU time": [
            cpu_row("optimized BLT and its guarantee", *blt, 0.25),
            cpu_row("table without BandMF", *plan, 2.0),
            help_row(),
        ],
    }


if __name__ == "__main__":
    assert __doc__ is not None
    peer.main(__doc__, "3 places per slider", measure)
