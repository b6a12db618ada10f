"""The page of runs: live figures as `dpftrl status` has them, and nothing that is private."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from small_runs import PEOPLE, create, fill, small_plan
from web_client import ADDRESS, TestClient, csrf_of, make_app

from dpftrl import read_status
from dpftrl.cli.main import dpftrl
from dpftrl.federated.metrics import MetricsFile, Point
from dpftrl.web.runs import Runs, find_runs

ROUNDS = 6


def write_run(place: Path, rounds: int = ROUNDS) -> Path:
    """A run of the real server, with held-out accuracy."""
    with create(place, small_plan(ROUNDS)) as server:
        metrics = MetricsFile(place / "run", 0)
        for number in range(rounds):
            attempt = server.begin(PEOPLE)
            fill(attempt)
            released = server.commit(attempt)
            metrics.add(Point(number + 1, released.epsilon, accuracy=0.1 + 0.01 * number))
    return place / "run"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "first")
    write_run(folder / "second", rounds=3)
    (folder / "first" / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def watching(place):
    app = make_app(runs=place, state_folder=place / "first" / "state")
    with TestClient(app, base_url=ADDRESS) as opened:
        opened.headers.update(csrf_of(opened))
        yield opened


def number_of(watching, name: str) -> str:
    rows = watching.get("/api/runs").json()["runs"]
    return next(row["run"] for row in rows if row["name"] == name)


def test_the_list_has_every_run(watching):
    rows = {row["name"]: row for row in watching.get("/api/runs").json()["runs"]}
    assert set(rows) == {"first/run", "second/run"}
    assert rows["first/run"]["state"] == "ended"
    assert rows["second/run"]["rounds"] == "3 of 6"
    assert watching.get("/runs").status_code == 200


def test_the_figures_are_those_of_the_status_command(watching, place):
    view = watching.get(f"/api/runs/{number_of(watching, 'first/run')}").json()
    status = read_status(place / "first" / "run", state_folder=place / "first" / "state")
    assert view["status"]["public"]["epsilon"] == status.public.epsilon
    assert view["status"]["private"]["clients"]["eligible"] == status.private.clients.eligible
    command = ["status", str(place / "first" / "run")]
    printed = (
        CliRunner()
        .invoke(dpftrl, [*command, "--state-folder", str(place / "first" / "state")])
        .stdout
    )
    flat = " ".join(printed.replace("│", " ").split())
    for name, text in view["public"]:
        assert name in flat
        assert text in flat
    curve = view["curve"]
    assert [point["round"] for point in curve] == list(range(1, ROUNDS + 1))
    assert curve[-1]["accuracy"] == pytest.approx(0.15)
    assert curve[-1]["epsilon"] == status.public.epsilon


def test_public_and_private_figures_are_apart(watching):
    view = watching.get(f"/api/runs/{number_of(watching, 'first/run')}").json()
    public, private = (dict(view[name]) for name in ("public", "private"))
    assert "eligible now" in private
    assert not set(public) & set(private)
    page = watching.get(f"/runs/{number_of(watching, 'first/run')}").text
    assert "May be published" in page
    assert "Not to be published" in page


def test_no_private_content_is_served(watching, place):
    """Whatever is asked for, no response holds a key, a journal line or a path of this machine."""
    root = place / "first" / "run"
    key = (root / "private" / "noise.key").read_bytes()
    journal = (root / "private" / "journal.jsonl").read_text().splitlines()
    macs = [json.loads(line)["mac"] for line in journal]
    number = number_of(watching, "first/run")
    paths = ["/runs", f"/runs/{number}", f"/runs/{number}/statement", "/api/runs"]
    paths += [f"/api/runs/{number}"]
    for path in paths:
        response = watching.get(path)
        assert response.status_code == 200, path
        assert response.headers["cache-control"] == "no-store"
        content = response.content
        assert key not in content
        assert key.hex().encode() not in content
        assert not any(mac.encode() in content for mac in macs)
        assert str(place).encode() not in content, path
        assert not any(person.encode() in content for person in PEOPLE)


@pytest.mark.parametrize(
    "path",
    [
        "private/noise.key",
        "private/journal.jsonl",
        "plan.json",
        "..%2f..%2fetc%2fpasswd",
        "statement/../private/noise.key",
    ],
)
def test_no_file_of_a_run_is_served(watching, path):
    number = number_of(watching, "first/run")
    assert watching.get(f"/runs/{number}/{path}").status_code == 404
    assert watching.get(f"/runs/{path}").status_code == 404
    assert watching.get(f"/api/runs/{path}").status_code == 404


def test_a_run_is_named_by_its_id_only(watching, place):
    for name in ("first/run", "first%2frun", "..", str(place / "first" / "run"), "0" * 16):
        assert watching.get(f"/api/runs/{name}").status_code == 404


def test_the_statement_claims_no_more_than_the_files_show(watching):
    response = watching.get(f"/runs/{number_of(watching, 'first/run')}/statement")
    assert "Privacy statement" in response.text
    assert "sandbox" in response.headers["content-security-policy"]
    assert "enforced by" not in response.text.lower()


def test_verifying_gives_the_verdict_of_the_command(watching, place):
    number = number_of(watching, "first/run")
    job = watching.post(f"/runs/{number}/verify").json()
    while job["state"] in {"waiting", "running"}:
        job = watching.get(f"/api/jobs/{job['job']}").json()
    command = ["verify", str(place / "first" / "run"), "--json"]
    printed = CliRunner().invoke(
        dpftrl, [*command, "--state-folder", str(place / "first" / "state")]
    )
    summary = job["result"].pop("summary")
    assert job["result"] == json.loads(printed.stdout)
    assert summary.startswith("passed")
    unprotected = watching.post(f"/runs/{number}/verify", headers={"x-csrf-token": "no"})
    assert unprotected.status_code == 403


def test_a_changed_run_fails_to_verify(tmp_path):
    folder = write_run(tmp_path)
    journal = folder / "private" / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join(lines[:2] + lines[3:]))
    app = make_app(runs=tmp_path, state_folder=tmp_path / "state")
    with TestClient(app, base_url=ADDRESS) as opened:
        opened.headers.update(csrf_of(opened))
        row = opened.get("/api/runs").json()["runs"][0]
        assert "error" in row
        assert str(tmp_path) not in row["error"]
        job = opened.post(f"/runs/{row['run']}/verify").json()
        while job["state"] in {"waiting", "running"}:
            job = opened.get(f"/api/jobs/{job['job']}").json()
        assert job["result"]["passed"] is False


def test_a_run_that_somebody_works_on_is_not_verified(tmp_path):
    app = make_app(runs=tmp_path, state_folder=tmp_path / "state")
    with create(tmp_path, small_plan(ROUNDS)) as server:
        client = TestClient(app, base_url=ADDRESS)
        client.headers.update(csrf_of(client))
        fill(attempt := server.begin(PEOPLE))
        server.commit(attempt)
        row = client.get("/api/runs").json()["runs"][0]
        assert row["state"] == "running"
        refused = client.post(f"/runs/{row['run']}/verify")
        assert (refused.status_code, "a process works" in refused.text) == (409, True)


def test_links_are_not_followed_and_one_run_may_be_given(place, tmp_path):
    (tmp_path / "link").symlink_to(place / "first")
    assert list(find_runs(tmp_path)) == []
    alone = Runs(place / "first" / "run").all()
    assert [run.name for run in alone] == ["run"]


def test_a_run_that_is_removed_disappears(place, tmp_path):
    shutil.copytree(place / "first" / "run", tmp_path / "copy")
    runs = Runs(tmp_path)
    (run,) = runs.all()
    shutil.rmtree(tmp_path / "copy")
    assert runs.all() == []
    assert runs.find(run.number) is None


def test_without_the_option_there_are_no_runs(client):
    for path in ("/runs", "/api/runs", "/runs/0123456789abcdef"):
        response = client.get(path)
        assert response.status_code == 404
        assert "--runs" in response.text
