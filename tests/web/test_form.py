"""The form of the planner: what its texts mean, and where its errors belong."""

import shlex

import click
import pytest

from dpftrl.cli.plan import plan_command
from dpftrl.plan import DatasetPlanRequest, FleetPlanRequest
from dpftrl.web.form import FIELDS, FieldError, Form

FLEET = {"population": "4.21M", "report_goal": "6500", "rounds": "2000", "epsilon": "4"}
DATASET = {"size": "50k", "batch_size": "500", "epochs": "10", "epsilon": "1", "delta": "1e-6"}


def form(mode: str = "fleet", **values: str) -> Form:
    base = {**FLEET, "delta": "1e-10"} if mode == "fleet" else DATASET
    return Form.read({"mode": mode, "values": {**base, **values}})


def test_texts_are_read_as_on_the_command_line():
    filled = form(availability="60%", min_sep="300:600", devices="3")
    request = filled.request("quick", extrapolate=True)
    assert isinstance(request, FleetPlanRequest)
    assert (request.population, request.report_goal, request.devices) == (4_210_000, 6_500, 3)
    assert (request.availability, request.min_sep, request.max_min_sep) == (0.6, 300, 600)
    assert (request.effort, request.extrapolate) == ("quick", True)


def test_empty_fields_are_left_open():
    request = form(report_goal=" ", rounds="").request("quick", extrapolate=False)
    assert isinstance(request, FleetPlanRequest)
    assert request.report_goal is None
    assert request.rounds is None


def test_a_data_set_has_a_request_of_its_own():
    request = form("dataset", sampling="poisson").request("normal", extrapolate=True)
    assert request == DatasetPlanRequest(
        size=50_000,
        batch_size=500,
        epochs=10,
        epsilon=1.0,
        delta=1e-6,
        sampling="poisson",
        effort="normal",
    )


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"population": "many"}, "population"),
        ({"population": ""}, "population"),
        ({"delta": "small"}, "delta"),
        ({"availability": "a lot"}, "availability"),
        ({"min_sep": "3:"}, "min_sep"),
        ({"objective": "least"}, "objective"),
        ({"population": "x" * 61}, "population"),
    ],
)
def test_an_error_names_its_field(values, field):
    with pytest.raises(FieldError) as caught:
        form(**values).request("quick", extrapolate=False)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("delta must be between 0 and 1, got 2.0", "delta"),
        ("report_goal must be at least 1", "report_goal"),
        ("rounds_per_day must be positive", "rounds_per_day"),
        ("rounds is missing: give rounds, or days and rounds_per_day", "rounds"),
        ("one round contacts 7 clients, but only 5 x 1 are available", "report_goal"),
        ("give exactly one of epsilon and noise_multiplier", "epsilon"),
        ("something else", ""),
    ],
)
def test_a_message_of_the_planner_is_shown_beside_a_field(message, field):
    assert form().error(ValueError(message)).field == field


@pytest.mark.parametrize(
    "content",
    [
        None,
        [],
        {"mode": "other", "values": {}},
        {"mode": "fleet", "values": []},
        {"mode": "fleet", "values": {"folder": "/etc"}},
        {"mode": "fleet", "values": {"population": 5}},
    ],
)
def test_anything_else_is_refused(content):
    with pytest.raises(FieldError):
        Form.read(content)


def test_the_command_line_says_the_same():
    filled = form(availability="1.0", devices="1", parameters="1_000_000", min_sep="300:600")
    assert filled.command("quick") == (
        "dpftrl plan --population 4.21M --report-goal 6500 --rounds 2000 --epsilon 4 --delta 1e-10 "
        "--min-sep 300:600 --effort quick"
    )


def test_the_command_line_is_quoted_for_a_shell():
    words = shlex.split(form(availability="60 %", population="4.21M; ls").command("normal"))
    assert "4.21M; ls" in words
    assert "60 %" in words


def test_every_field_is_an_option_of_the_command():
    options = {
        option
        for parameter in plan_command.params
        if isinstance(parameter, click.Option)
        for option in parameter.opts
    }
    for fields in FIELDS.values():
        assert {field.flag for field in fields} <= options
