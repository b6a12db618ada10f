"""`dpftrl verify` as a command."""

import json
import shutil

import pytest
from audited_runs import Place, made
from click.testing import CliRunner, Result

from dpftrl.cli.verify import verify_command
from dpftrl.errors import InvalidInput


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return made(tmp_path_factory.mktemp("verified"), 3, test_key=1)


def verify(*arguments, **environment) -> Result:
    return CliRunner().invoke(verify_command, [*map(str, arguments)], env=environment)


def test_a_table_and_a_verdict(place):
    said = verify(place.folder, "--state-folder", place.state)
    assert said.exit_code == 0
    assert "NOT PRIVATE" in said.output
    assert said.output.splitlines()[-1].startswith("passed, with 1 warning(s): 3 rounds, epsilon ")


def test_json(place):
    said = json.loads(verify(place.folder, "--state-folder", place.state, "--json").output)
    assert (said["passed"], said["rounds"], said["delta"]) == (True, 3, 1e-6)
    guarantee = json.loads((place.folder / "guarantee.json").read_text())
    assert said["epsilon"] == pytest.approx(guarantee["epsilon"], rel=1e-7)
    assert {"name": "witness", "outcome": "passed"}.items() <= said["checks"][2].items()


def test_the_witness_is_looked_for_where_the_server_puts_it(place, tmp_path):
    assert verify(place.folder, DPFTRL_STATE=str(place.state)).exit_code == 0
    shutil.copytree(place.state, tmp_path / "dpftrl")
    known = {"DPFTRL_STATE": "", "XDG_STATE_HOME": str(tmp_path)}
    assert verify(place.folder, **known).exit_code == 0
    home = {"DPFTRL_STATE": "", "XDG_STATE_HOME": "", "HOME": str(tmp_path)}
    assert verify(place.folder, **home).exit_code == 1
    assert verify(place.folder, "--no-witness", **home).exit_code == 0


def test_a_failure(place, tmp_path):
    edited = place.copy_to(tmp_path)
    edited.ledger.write_bytes(edited.ledger.read_bytes() + b"0,c0,counted\n")
    said = verify(edited.folder, "--state-folder", edited.state)
    assert said.exit_code == 1
    assert said.output.splitlines()[-1].startswith("FAILED: 1 of ")


def test_no_run(tmp_path):
    assert isinstance(verify(tmp_path).exception, InvalidInput)
