"""The page's API gives the numbers of the command line, and errors beside a field."""

import json
import random
import re
import shlex
import zipfile
from io import BytesIO

import pytest
from click.testing import CliRunner

from dpftrl import load_mechanism, load_plan
from dpftrl.cli.main import dpftrl
from dpftrl.errors import DpftrlError
from dpftrl.web.answers import answer_form, plan_file, solve_form
from dpftrl.web.form import FIELDS, Form
from dpftrl.web.presets import presets

EXAMPLE = {
    "population": "3M",
    "availability": "60%",
    "timer_days": "3",
    "rounds_per_day": "120",
    "days": "14",
    "devices": "2",
    "epsilon": "4",
    "delta": "1e-10",
}
SMALL = {"population": "570", "report_goal": "10", "rounds": "24", "epsilon": "2", "delta": "1e-4"}
DATASET = {"size": "400", "batch_size": "40", "epochs": "2", "epsilon": "2", "delta": "1e-4"}


def ask(client, mode="fleet", figures=True, **values):
    return client.post("/api/plan", json={"mode": mode, "values": values, "figures": figures})


def printed(command: str) -> dict:
    """What the command line prints as JSON, or its error."""
    outcome = CliRunner().invoke(dpftrl, [*shlex.split(command)[1:], "--json"])
    if isinstance(outcome.exception, DpftrlError):
        return {"error": str(outcome.exception)}
    assert outcome.exception is None, outcome.output
    return json.loads(outcome.stdout)


def random_values(chance: random.Random) -> tuple[str, dict[str, str]]:
    """A form as somebody could fill it in; some are wrong."""
    if chance.random() < 0.1:
        size = chance.randint(50, 2_000)
        return "dataset", {
            "size": str(size),
            "batch_size": str(chance.randint(1, size + 20)),
            "epochs": str(chance.randint(1, 6)),
            "epsilon": f"{10 ** chance.uniform(-1, 1.3):.3g}",
            "delta": f"{10 ** chance.uniform(-9, -3):.2g}",
            "sampling": "none",  # Poisson sampling takes seconds
        }
    values = {
        "population": chance.choice(
            [f"{chance.uniform(1, 9):.3g}M", str(chance.randint(50, 10**5))]
        ),
        "availability": chance.choice(["60%", "0.25", "1", "99.5 %", "1.5"]),
        "devices": chance.choice(["", "1", "3"]),
        "epsilon": f"{10 ** chance.uniform(-1, 1.3):.3g}",
        "delta": f"{10 ** chance.uniform(-12, -4):.2g}",
        "objective": chance.choice(["rms", "max", ""]),
        "parameters": chance.choice(["", "1M", "25_000"]),
        "buffers": chance.choice(["", "2", "3"]),
        "over_selection": chance.choice(["", "1.3"]),
        "max_participations": chance.choice(["", "", "2"]),
    }
    if chance.random() < 0.5:
        values |= {
            "rounds": str(chance.randint(2, 400)),
            "report_goal": str(chance.randint(1, 900)),
        }
    else:
        values |= {
            "days": str(chance.randint(1, 9)),
            "rounds_per_day": str(chance.randint(1, 40)),
            "timer_days": chance.choice(["", "0.5", "3"]),
        }
    if chance.random() < 0.2:
        values["min_sep"] = chance.choice(["5", "2:8"])
    if chance.random() < 0.1:
        values["noise_multiplier"] = "5"
        values["epsilon"] = chance.choice(["", "1"])
    return "fleet", values


def compare_settings(client, seed: int, count: int) -> list[str]:
    """Compare API and command line; return what came out, for a check that it was something."""
    chance, outcomes = random.Random(seed), list[str]()
    for _ in range(count):
        mode, values = random_values(chance)
        response = ask(client, mode, **values)
        command = Form.read({"mode": mode, "values": values}).command("quick")
        expected = printed(command)
        content = response.json()
        if "error" not in content:
            assert content["command"] == command
            assert content["answer"] == expected, command
            outcomes.append(mode)
        else:
            assert content["error"]["message"] == expected["error"], command
            outcomes.append("error")
    return outcomes


def test_the_api_and_the_command_line_give_the_same_json(client):
    outcomes = compare_settings(client, seed=1, count=12)
    assert outcomes.count("fleet") >= 4
    assert "error" in outcomes


@pytest.mark.slow
def test_the_api_and_the_command_line_give_the_same_json_for_200_settings(client):
    outcomes = compare_settings(client, seed=2, count=200)
    assert outcomes.count("fleet") >= 80
    assert outcomes.count("dataset") >= 8
    assert outcomes.count("error") >= 20


def test_a_wrong_number_would_be_noticed(client):
    """The negative control of the comparison: another epsilon gives another answer."""
    answer = ask(client, **SMALL).json()["answer"]
    assert answer != printed(Form("fleet", {**SMALL, "epsilon": "2.01"}).command("quick"))


def test_the_texts_are_those_of_the_command_line(client):
    content = ask(client, **EXAMPLE).json()
    outcome = CliRunner().invoke(dpftrl, shlex.split(content["command"])[1:])
    for table in content["tables"]:
        for row in table["rows"]:
            assert all(cell in outcome.stdout for cell in row), row
    headline = content["headline"]
    flat = " ".join(outcome.stdout.split())
    for text in (headline["reason"], headline["binding"]):
        assert text in flat
    assert headline["recommended"] == content["answer"]["recommended"]["name"]


def test_a_live_answer_has_no_figures_and_the_same_numbers(client):
    live, whole = (ask(client, figures=figures, **SMALL).json() for figures in (False, True))
    assert live["figures"] is None
    del live["answer"]["extrapolation"], whole["answer"]["extrapolation"]
    assert live["answer"] == whole["answer"]


def test_the_figures_have_the_points_of_the_answer(client):
    content = ask(client, **EXAMPLE).json()
    figures = {figure["name"]: figure for figure in content["figures"]}
    assert list(figures) == [
        "epsilon-by-min-sep",
        "epsilon-by-report-goal",
        "epsilon-by-rounds",
        "error-per-round",
        "loss-against-memory",
        "coefficients-of-c",
        "coefficients-of-c-inverse",
    ]
    answer = content["answer"]
    for along in ("min_sep", "report_goal", "rounds"):
        figure = figures[f"epsilon-by-{along.replace('_', '-')}"]
        points = answer["extrapolation"][along]
        for series in figure["series"]:
            assert series["x"] == [point[along] for point in points]
            assert series["y"] == [point["epsilon"][series["name"]] for point in points]
        assert figure["planned"]["x"] == answer[along]
        assert figure["target"]["y"] == 4.0
        assert "equal utility" in figure["y"]["label"]
    losses = {row["name"]: row["rms_loss"] for row in answer["mechanisms"]}
    memory = figures["loss-against-memory"]["series"]
    assert {one["name"]: one["y"][0] for one in memory} == losses
    assert [one["name"] for one in memory if one["chosen"]] == [answer["recommended"]["name"]]
    for series in figures["error-per-round"]["series"]:
        assert series["x"][0] == 1
        assert series["x"][-1] == answer["rounds"]


def test_errors_name_the_field(client):
    for values, field in (
        ({"population": "many"}, "population"),
        ({"delta": "2"}, "delta"),
        ({"report_goal": "1M"}, "report_goal"),
        ({"epsilon": "-1"}, "epsilon"),
        ({"rounds": ""}, "rounds"),
    ):
        response = ask(client, **{**SMALL, **values})
        assert response.json()["error"]["field"] == field, response.text


def test_what_is_no_form_is_refused(client):
    unknown = b'{"mode": "fleet", "values": {"folder": "/"}}'
    for content in (b"{", b"[1]", b"[" * 10_000, b"\xff", unknown):
        assert client.post("/api/plan", content=content).json()["error"]["message"]


def test_the_plan_and_the_mechanism_can_be_downloaded(client, tmp_path):
    answer = ask(client, **SMALL).json()["answer"]
    for name in ("plan.json", "mechanism.json"):
        response = client.get(f"/download/{name}", params={"mode": "fleet", **SMALL})
        assert response.headers["content-disposition"] == f'attachment; filename="{name}"'
        (tmp_path / name).write_bytes(response.content)
    plan = load_plan(tmp_path / "plan.json")
    assert plan.guarantee.epsilon == answer["recommended"]["epsilon"]
    assert plan.mechanism == load_mechanism(tmp_path / "mechanism.json")


def test_the_draft_statement_can_be_downloaded(client):
    markdown = client.get("/download/statement.md", params={"mode": "fleet", **SMALL})
    assert "Privacy statement" in markdown.text
    page = client.get("/download/statement.html", params={"mode": "fleet", **SMALL})
    assert "sandbox" in page.headers["content-security-policy"]
    assert "attachment" in page.headers["content-disposition"]


def test_a_download_with_wrong_fields_says_so(client):
    wrong = client.get("/download/plan.json", params={"mode": "fleet", **SMALL, "delta": "x"})
    assert (wrong.status_code, wrong.text[:7]) == (422, "dpftrl:")
    assert client.get("/download/other.json", params=SMALL).status_code == 404


def test_a_mechanism_with_a_matrix_comes_as_one_archive(tmp_path):
    form = Form("fleet", {**SMALL, "rounds": "12"})
    answer = solve_form(form, "slow", extrapolate=False)
    chosen = answer.row("bandmf")
    object.__setattr__(answer, "recommended", chosen)
    file = plan_file(answer, "plan.json")
    assert file.name == "plan.zip"
    with zipfile.ZipFile(BytesIO(file.content)) as archive:
        archive.extractall(tmp_path)
    assert load_plan(tmp_path / "plan.json").mechanism == chosen.plan.mechanism


def test_every_preset_can_be_planned_for():
    for preset in presets():
        form = Form.read({"mode": "fleet", "values": preset["values"]})
        answer = answer_form(form, "quick", figures=False)["answer"]
        assert answer["recommended"]["epsilon"] <= float(preset["printed"]["epsilon"])
        assert answer["rounds"] == int(preset["values"]["rounds"])
        assert answer["max_participations"] == int(preset["values"]["max_participations"])


def test_a_preset_that_does_not_reproduce_shows_both_numbers_and_the_reason(client):
    rows = {one["title"]: one["number"] for one in presets()}
    content = client.post(f"/api/presets/{rows['pt-PT, tree, noise multiplier 7']}").json()
    assert content["state"] == "done"
    rho = content["result"]["rows"][0]
    assert (rho["printed"], rho["ours"], rho["verdict"]) == ("1.33", "0.4388", "does not")
    assert "43 / (2 x 49)" in content["result"]["reason"]
    good = client.post(f"/api/presets/{rows['id-ID, blt-b400, noise multiplier 7.379']}").json()
    assert [row["verdict"] for row in good["result"]["rows"]] == ["reproduces", "reproduces"]
    assert client.post("/api/presets/99").status_code == 404


def test_the_page_has_every_field_once(client):
    text = client.get("/").text
    for mode, fields in FIELDS.items():
        for field in fields:
            assert text.count(f'id="{mode}-{field.name}"') == 1
            assert text.count(f'for="{mode}-{field.name}"') == 1
    assert "{{" not in text


def test_a_data_set_is_answered_too(client):
    content = ask(client, "dataset", sampling="none", **DATASET).json()
    assert content["answer"]["recommended"]["sampling"] == "none"
    assert {figure["name"] for figure in content["figures"]} >= {"error-per-round"}
    query = {"mode": "dataset", "sampling": "none", **DATASET}
    plan = client.get("/download/plan.json", params=query)
    assert plan.json()["format"] == "dpftrl dataset plan"
    draft = client.get("/download/statement.md", params=query).text
    assert "This describes a plan. Nothing was trained" in draft
    assert "enforced |" not in draft
    assert re.search(r"\(2\.000, .{1,9}\)-differentially private, for each example", draft)
