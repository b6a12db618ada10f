"""Computations in the background: progress, results, errors, limits, and ending them."""

import asyncio
import time

import pytest

from dpftrl.web.jobs import MOST_WAITING, Jobs, TooManyJobs
from dpftrl.web.worker import TaskFailed, Worker

VALUES = {"population": "570", "report_goal": "10", "rounds": "24", "epsilon": "2", "delta": "1e-4"}
FORM = {"mode": "fleet", "values": VALUES}
TASK = {"kind": "answer", "form": FORM, "effort": "quick", "figures": False}
# BandMF for so many rounds takes minutes.
LONG = {"kind": "job", "form": {"mode": "fleet", "values": {**VALUES, "rounds": "3000"}}}


def followed(client, started):
    """Poll a job until it has ended."""
    states = [started]
    while states[-1]["state"] in {"waiting", "running"}:
        time.sleep(0.1)
        states.append(client.get(f"/api/jobs/{started['job']}").json())
    return states


def test_a_job_shows_its_progress_and_gives_the_full_table(client):
    started = client.post("/api/jobs", json={**FORM, "effort": "slow"})
    assert started.status_code == 202
    states = followed(client, started.json())
    last = states[-1]
    assert last["state"] == "done", last
    assert last["message"] == "bandmf"
    answer = last["result"]["answer"]
    assert {row["name"] for row in answer["mechanisms"]} >= {"blt", "band-toeplitz", "bandmf"}
    assert "files" not in last["result"]
    assert last["result"]["command"].endswith("--effort slow")
    plan = client.get(f"/api/jobs/{last['job']}/plan.json")
    assert plan.json()["format"] == "dpftrl plan"
    assert client.get(f"/api/jobs/{last['job']}/run.json").status_code == 404


def test_a_wrong_field_is_reported_before_a_job_starts(client):
    response = client.post("/api/jobs", json={**FORM, "values": {}, "effort": "slow"})
    assert response.json()["error"]["field"] == "population"
    response = client.post("/api/jobs", json={**FORM, "effort": "endless"})
    assert "effort must be one of" in response.json()["error"]["message"]


def test_an_error_within_a_job_is_reported(client):
    values = {**VALUES, "report_goal": "571"}
    started = client.post("/api/jobs", json={**FORM, "values": values, "effort": "normal"}).json()
    last = followed(client, started)[-1]
    assert last["state"] == "failed"
    assert last["error"]["field"] == "report_goal"


def test_a_job_can_be_cancelled_and_there_are_not_too_many(client):
    def start(delta: int):
        values = {**LONG["form"]["values"], "delta": f"{delta}e-6"}
        return client.post("/api/jobs", json={"mode": "fleet", "values": values, "effort": "slow"})

    accepted = [start(delta).json() for delta in range(1, MOST_WAITING + 2)]
    assert start(9).status_code == 429
    assert start(1).json()["job"] == accepted[0]["job"]  # the same again is not computed twice
    for job in reversed(accepted):
        client.post(f"/api/jobs/{job['job']}/cancel")
    assert {followed(client, job)[-1]["state"] for job in accepted} == {"cancelled"}
    assert client.get("/api/jobs/unknown").status_code == 404


def test_a_task_that_takes_too_long_is_ended_and_the_next_one_works():
    async def main():
        worker = Worker(0.05)
        with pytest.raises(TaskFailed, match="took longer than"):
            await worker.ask({**LONG, "effort": "slow"})
        worker._seconds = 600.0
        answer = await worker.ask(TASK)
        await worker.stop()
        return answer["answer"]["recommended"]["name"]

    assert asyncio.run(main()) == "blt"


def test_too_many_jobs_and_stopping():
    async def main():
        jobs = Jobs()
        for number in range(MOST_WAITING + 1):
            jobs.start({**LONG, "effort": "slow", "number": number})
        with pytest.raises(TooManyJobs):
            jobs.start({**LONG, "effort": "slow", "number": 99})
        await jobs.stop()
        states = {job.state for job in jobs._jobs.values()}
        assert states == {"cancelled"}

    asyncio.run(main())
