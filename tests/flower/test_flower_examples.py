"""The example apps still run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
def test_the_jax_app_as_its_readme_says(tmp_path: Path) -> None:
    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=EXAMPLES / "flower_jax",
            env={**os.environ, "DPFTRL_STATE": str(tmp_path / "state"), "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    plan, folder = str(tmp_path / "plan.json"), str(tmp_path / "run")
    cli = (sys.executable, "-m", "dpftrl")
    fleet = ("--population", "1174", "--report-goal", "4", "--rounds", "2")
    run(*cli, "plan", *fleet, "--delta", "1e-4", "--epsilon", "10", "--out", plan)
    assert "all 2 rounds are done" in run(sys.executable, "simulate.py", plan, folder)
    assert "passed: 2 rounds" in run(*cli, "verify", folder)


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("flower_*/**/*.py")))
def test_the_examples_compile(script: Path) -> None:
    compile(script.read_text(encoding="utf-8"), str(script), "exec")
