"""What users import from `dpftrl`: complete, light, typed, and documented by a README that runs."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dpftrl
from dpftrl import verify_run

ROOT = Path(__file__).parent.parent
NAMES = """
Adam AdaptiveClipping BLT BallsInBins Banded BandedInverse BinaryTree CyclicPoisson Dataset
DpftrlError ErrorReport ExactSum FixedEpochs Fleet FullTree GeneralBLT Grid Guarantee Independent
InvalidInput Mechanism MinSep NoiseKey NoiseStream Observed Participation Plan Poisson Released
ReleasedModel Round SampledGuarantee Sampler Sampling Sensitivity Server Settings Sgd
SimulationResult SmoothTree SquareRoot StartModel Statement Status StreamState Toeplitz
ToeplitzMechanism Workload account account_sampled calibrate calibrate_rho calibrate_sampled compose
errors load_guarantee load_mechanism load_model load_plan make_plan make_statement mechanism observe
open_log optimize_band_inverse optimize_band_toeplitz optimize_bandmf optimize_blt
optimize_for_balls_in_bins optimize_for_cyclic_poisson optimize_general_blt optimize_robust_blt
read_status save_guarantee save_mechanism save_plan save_statement simulate verify_run
"""


def test_the_public_names_are_exactly_these():
    assert sorted(dpftrl.__all__) == sorted(NAMES.split())


def test_every_public_name_can_be_imported_and_explains_itself():
    for name in dpftrl.__all__:
        assert getattr(dpftrl, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = dpftrl.nothing


def test_importing_dpftrl_loads_nothing_heavy():
    heavy = "numpy scipy numba polars matplotlib click rich jax torch flwr safetensors cryptography"
    code = f"import sys, dpftrl; print([m for m in {heavy.split()} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_types_are_shipped():
    assert (Path(dpftrl.__file__).parent / "py.typed").exists()


def test_the_python_examples_of_the_readme_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "state"))
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    centralized, federated = ({}, {})
    exec(compile(examples[0], "README.md", "exec"), centralized)
    assert (tmp_path / "training" / "guarantee.json").exists()
    assert (tmp_path / "statement.html").exists()
    assert centralized["private"].epsilon == pytest.approx(4.0)
    assert verify_run(tmp_path / "training").passed
    exec(compile(examples[1], "README.md", "exec"), federated)
    assert federated["result"].epsilon == pytest.approx(8.0)
    assert federated["result"].evaluation["error"] < 0.1
    assert all((tmp_path / "run" / name).exists() for name in ("curves.png", "statement.md"))
    assert verify_run(tmp_path / "run").passed
    assert len([line for line in examples[1].splitlines() if line.strip()]) <= 15
    assert len(examples) == 2


USER_PROGRAM = ROOT / "tests" / "user_program.py"


def test_a_program_of_a_user_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, USER_PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert "2 " in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("mistake", [False, True])
def test_a_program_of_a_user_passes_strict_type_checks_and_a_mistake_does_not(tmp_path, mistake):
    text = USER_PROGRAM.read_text()
    if mistake:
        text = text.replace("guarantee.epsilon:.3f", "guarantee.epsilom:.3f")
    (tmp_path / "program.py").write_text(text)
    settings = {"typeCheckingMode": "strict", "include": ["program.py"], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    done = subprocess.run(
        [
            Path(sys.executable).with_name("basedpyright"),
            *("--project", tmp_path, "--pythonpath", sys.executable),
        ],
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 1) is mistake, done.stdout
    assert ("epsilom" in done.stdout) is mistake


def test_no_result_is_documented_with_a_colon_that_sphinx_takes_for_a_type():
    """In "Returns: The loss: a number", the site shows "The loss" as the type of the result."""
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            lines = (ast.get_docstring(node) or "").splitlines()
            if "Returns:" in lines:
                first = re.sub("`[^`]*`", "", lines[lines.index("Returns:") + 1])
                assert ":" not in first, f"{path}, {node.name}: {first.strip()}"
