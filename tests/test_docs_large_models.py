"""The examples of the page about large models run: two by themselves, one with torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dpftrl import verify_run

PAGE = (Path(__file__).parents[1] / "docs" / "large_models.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.slow  # starts three processes that import PyTorch
def test_two_processes_train_a_sharded_model(tmp_path):
    (tmp_path / "train.py").write_text(BLOCKS[0])
    environment = {
        **os.environ,
        "DPFTRL_STATE": str(tmp_path / "state"),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "train.py"],
        cwd=tmp_path, env=environment, check=True, capture_output=True,
    )  # fmt: skip
    assert (tmp_path / "statement.html").exists()
    assert verify_run(tmp_path / "run", state_folder=tmp_path / "state").passed


@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_noise_on_a_device(number):
    assert len(BLOCKS) == 3
    names: dict = {}
    exec(compile(BLOCKS[number], "large_models.md", "exec"), names)
    result = names["params"]["w"] if number == 1 else names["mean"]
    assert result.std() > 0
