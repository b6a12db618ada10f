"""Which check catches which planted privacy bug: `dpftrl verify`, the audits, or the tests.

Usage: python benchmarks/planted_bugs.py [--bugs NAME,...] [--controls N] [--no-tests]

Every bug of `_planted_bugs.py` is planted in a process of its own. There, small federated runs are
made and audited: the white-box audit of the noise stream, and the audit of the server, in which one
client behaves badly. `dpftrl verify` then verifies the runs in a process without the bug. The tests
of the wrong module run with the bug, by a fixed rule: for `src/dpftrl/A/B.py` all of
`tests/A/test_B*.py`, and all of `tests/A` if there is no such file. No check knows the bugs.

As a control, the same runs, audits and verifications are repeated without a bug. Nothing may be
flagged. The results are in `benchmarks/results/planted_bugs.json` and `.md`; they are written after
each bug, and a bug with results is not tried again unless `--again` is given.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _planted_bugs import BUGS

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results" / "planted_bugs.json"
TABLE = RESULTS.with_suffix(".md")
CHECKS = ("verify", "white-box audit", "server audit", "tests")
TEST_SECONDS = 1_200  # of one bug's tests
CONFIDENCE = "1 - 1e-5"


def main() -> None:
    """Run what the options ask for, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bugs", default=",".join(BUGS), help="names, separated by commas")
    parser.add_argument("--controls", type=int, default=100, help="runs without a bug")
    parser.add_argument("--no-tests", action="store_true", help="leave out the tests")
    parser.add_argument("--again", action="store_true", help="repeat what has results")
    options = parser.parse_args()
    results = {"bugs": {}, "controls": []}
    if RESULTS.exists() and not options.again:
        results = json.loads(RESULTS.read_text())
    for name in options.bugs.split(","):
        known = results["bugs"].setdefault(name, {"text": BUGS[name].text})
        known["module"] = BUGS[name].module
        if "verify" not in known:
            known.update(attack(name))
        if not options.no_tests and "tests" not in known:
            known["tests"] = run_tests(name)
        save(results)
        print(f"{name}: caught by {', '.join(caught_by(known)) or 'NOTHING'}", flush=True)
    while len(results["controls"]) < options.controls:
        results["controls"].append(control())
        save(results)
        print(f"control {len(results['controls'])}: {results['controls'][-1]}", flush=True)


def attack(bug: str | None) -> dict[str, Any]:
    """Make and audit runs with a bug, and verify them without it."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [folder] if bug is None else [folder, bug]
        outcomes = _python("_planted_runs.py", *arguments)
        failed = _python("_planted_verify.py", folder)[folder]
    return _summary(outcomes, failed)


def control() -> dict[str, Any]:
    """Do what `attack` does without a bug, in this process: it saves the time to start others."""
    from _planted_runs import main as run
    from _planted_verify import failures

    with tempfile.TemporaryDirectory() as folder:
        return _summary(run(Path(folder), None), failures(Path(folder)))


def _summary(outcomes: dict[str, Any], failed: dict[str, str]) -> dict[str, Any]:
    crashed = {name: part["error"] for name, part in outcomes.items() if "error" in part}
    return {
        "verify": failed,
        "white-box audit": outcomes["white-box"].get("flagged", False),
        "server audit": outcomes["server"].get("behaviors", []),
        "crashed": crashed,
    }


def test_files(module: str) -> list[str]:
    """Return the tests of a module: those with its name, or else all of its package."""
    path = Path("tests") / module
    files = sorted(ROOT.glob(f"{path.parent}/test_{path.name}*.py"))
    return [str(file.relative_to(ROOT)) for file in files] or [str(path.parent)]


def run_tests(bug: str) -> dict[str, Any]:
    """Run the tests of the wrong module up to the first failure, and return which it is."""
    files = test_files(BUGS[bug].module)
    environment = {**os.environ, "PLANTED_BUG": bug, "PYTHONPATH": f"{ROOT / 'src'}:{HERE}"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "_planted_bugs", *files]
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=TEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"files": files, "failed": None, "summary": f"stopped after {TEST_SECONDS} s"}
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", ended.stdout, re.MULTILINE)
    lines = ended.stdout.strip().splitlines() or ended.stderr.strip().splitlines() or [""]
    if failed is None and ended.returncode not in (0, 5):
        raise RuntimeError(f"pytest ended with {ended.returncode}: {ended.stdout[-2000:]}")
    return {"files": files, "failed": failed and failed.group(1), "summary": lines[-1]}


def caught_by(result: dict[str, Any]) -> list[str]:
    """Return the names of the checks that caught a bug."""
    caught = [check for check in CHECKS[:3] if result.get(check)]
    return caught + (["tests"] if result.get("tests", {}).get("failed") else [])


def is_flagged(control: dict[str, Any]) -> bool:
    """Return whether any check flagged a run without a bug."""
    return bool(caught_by(control) or control["crashed"])


def save(results: dict[str, Any]) -> None:
    """Write the results, and the table."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    flagged = sum(map(is_flagged, results["controls"]))
    lines = [
        "# Planted bugs",
        "",
        'By `python benchmarks/planted_bugs.py`. "yes" means that the check caught the bug.',
        "",
        "| bug | `verify` | white-box audit | server audit | tests of the module |",
        "|---|---|---|---|---|",
    ]
    for result in results["bugs"].values():
        if "verify" not in result:
            continue
        tests = result.get("tests")
        lines.append(
            f"| {result['text']} | {_cell(', '.join(result['verify']))} "
            f"| {_cell(result['white-box audit'] and 'lower bound')} "
            f"| {_cell(', '.join(result['server audit']))} "
            f"| {'not run' if tests is None else _cell(_test_name(tests))} |"
        )
    lines += [
        "",
        f"Without a bug: {flagged} of {len(results['controls'])} repetitions flagged, at audit "
        f"confidence {CONFIDENCE}.",
    ]
    TABLE.write_text("\n".join(lines) + "\n")


def _cell(what: Any) -> str:
    return f"yes ({what})" if what else "no"


def _test_name(tests: dict[str, Any]) -> str:
    return f"`{tests['failed'].split('::')[-1].split('[')[0]}`" if tests["failed"] else ""


def _python(script: str, *arguments: str) -> Any:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{HERE}"}
    ended = subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        env=environment,
        text=True,
        capture_output=True,
    )
    if ended.returncode:
        raise RuntimeError(f"{script} {' '.join(arguments)} ended with: {ended.stderr[-2000:]}")
    return json.loads(ended.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
