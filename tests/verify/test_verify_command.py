"""`dpftrl verify` as a command."""

import json
import shutil

import pytest
from click.testing import CliRunner, Result
from recorded_runs import RunFolders, record_run

from dpftrl.cli.verify import verify_command
from dpftrl.errors import InvalidInput


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> RunFolders:
    return record_run(tmp_path_factory.mktemp("verified"), 3, test_key=1)


def verify(*arguments, **environment) -> Result:
    return CliRunner().invoke(verify_command, [*map(str, arguments)], env=environment)


def test_the_command_prints_a_table_and_a_verdict(run):
    result = verify(run.folder, "--state-folder", run.state)
    assert result.exit_code == 0
    assert "NOT PRIVATE" in result.output
    assert result.output.splitlines()[-1].startswith(
        "passed, with 1 warning(s), NOT PRIVATE (the noise key is one for tests): 3 rounds, "
    )


def test_json_output(run):
    result = json.loads(verify(run.folder, "--state-folder", run.state, "--json").output)
    assert (result["passed"], result["rounds"], result["delta"]) == (True, 3, 1e-6)
    guarantee = json.loads((run.folder / "guarantee.json").read_text())
    assert result["epsilon"] == pytest.approx(guarantee["epsilon"], rel=1e-7)
    assert {"name": "witness", "outcome": "passed"}.items() <= result["checks"][2].items()


def test_the_default_witness_folder_is_that_of_the_server(run, tmp_path):
    assert verify(run.folder, DPFTRL_STATE=str(run.state)).exit_code == 0
    shutil.copytree(run.state, tmp_path / "dpftrl")
    known = {"DPFTRL_STATE": "", "XDG_STATE_HOME": str(tmp_path)}
    assert verify(run.folder, **known).exit_code == 0
    home = {"DPFTRL_STATE": "", "XDG_STATE_HOME": "", "HOME": str(tmp_path)}
    assert verify(run.folder, **home).exit_code == 1
    assert verify(run.folder, "--no-witness", **home).exit_code == 0


def test_a_failed_check_gives_exit_code_1(run, tmp_path):
    edited = run.copy_to(tmp_path)
    edited.ledger.write_bytes(b"round,client,status\n0,c0,counted\n")
    result = verify(edited.folder, "--state-folder", edited.state)
    assert result.exit_code == 1
    assert result.output.splitlines()[-1].startswith("FAILED: 1 of ")


def test_a_folder_without_a_run_is_refused(tmp_path):
    assert isinstance(verify(tmp_path).exception, InvalidInput)
