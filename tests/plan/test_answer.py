"""The answer to a request: the recommended row is the best by brute force, and all is plain."""

import json
import math
from dataclasses import replace

import msgspec
import pytest

from dpftrl import Dataset, MinSep, account, calibrate
from dpftrl.accounting import risk_of
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import mechanism
from dpftrl.optimize import (
    optimize_band_toeplitz,
    optimize_bandmf,
    optimize_blt,
    optimize_robust_blt,
)
from dpftrl.plan import (
    DatasetPlanRequest,
    Fleet,
    FleetPlanRequest,
    Option,
    Plan,
    answer_plan,
    calibrate_dataset,
    recommend,
    solve_fleet,
)

SMALL = {"population": 57, "report_goal": 10, "availability": 0.9, "delta": 1e-6, "epsilon": 2.5}
REQUESTS = {
    "24 rounds": FleetPlanRequest(**SMALL, rounds=24, devices=3, extrapolate=True),
    "MaxLoss": FleetPlanRequest(**SMALL, rounds=12, objective="max", buffers=2),
    "every round": FleetPlanRequest(**{**SMALL, "report_goal": 50}, rounds=12),
    "once": FleetPlanRequest(**SMALL, rounds=5),
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPFTRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def answers():
    return {name: answer_plan(request) for name, request in REQUESTS.items()}


def all_mechanisms(request: FleetPlanRequest) -> dict[str, object]:
    """Every mechanism of the table, optimized here and now."""
    clients = request.resolve().question.participation()
    n, b, objective = clients.rounds, clients.min_sep, request.objective
    buffers = "auto" if request.buffers is None else min(request.buffers, n)
    ranges = (max(1, n // 2), 2 * n), (max(1, b // 2), 2 * b)
    blt = optimize_blt(clients, buffers, objective).mechanism
    few = min(request.buffers or max(1, blt.memory(n)), ranges[0][0])
    return {
        "blt": blt,
        "blt-robust": optimize_robust_blt(
            *ranges, request.resolve().question.max_participations, few, objective, 3
        ).mechanism,
        "blt-b400": mechanism("blt-b400"),
        "tree": mechanism("tree"),
        "tree-full": mechanism("tree-full", clients),
        "band-toeplitz": optimize_band_toeplitz(clients, min(n, b), objective).mechanism,
        "bandmf": optimize_bandmf(clients, min(n, b)).mechanism,
    }


@pytest.mark.parametrize("name", REQUESTS)
def test_the_recommended_row_is_the_best_by_brute_force(answers, name):
    """The least memory, of all whose loss is within 10% of the smallest."""
    request, answer = REQUESTS[name], answers[name]
    clients = request.resolve().question.participation()
    made = all_mechanisms(request)
    reports = {label: one.error_report(clients) for label, one in made.items()}
    losses = {
        label: report.max_loss if request.objective == "max" else report.rms_loss
        for label, report in reports.items()
    }
    good = [label for label in made if losses[label] <= 1.1 * min(losses.values())]
    least = min(made[label].memory(clients.rounds) for label in good)
    smallest = [label for label in good if made[label].memory(clients.rounds) == least]
    best = min(smallest, key=losses.__getitem__)
    chosen = answer["recommended"]["name"]
    assert losses[chosen] == pytest.approx(losses[best], rel=1e-9)
    assert made[chosen].memory(clients.rounds) == least
    assert [row["name"] for row in answer["mechanisms"] if row["recommended"]] == [chosen]
    assert chosen in answer["reason"]
    assert "10%" in answer["reason"]


def options_of(*rows: tuple[str, float, int]) -> list[Option]:
    """Options that only differ in label, error and memory."""
    fleet, clients = Fleet(100, 10), MinSep(20, 10)
    base = mechanism("blt-b100")
    plan = Plan(fleet, account(base, clients, 5.0, 1e-6))
    report = base.error_report(clients)
    return [
        Option(label, plan, replace(report, rms_error=error, max_error=error), memory, {})
        for label, error, memory in rows
    ]


def test_memory_decides_among_good_losses_and_loss_among_equal_memory():
    rows = options_of(("a", 1.0, 100), ("b", 1.09, 3), ("c", 1.05, 3), ("d", 1.2, 1))
    assert recommend(rows, "rms").label == "c"
    assert recommend(rows[:1], "rms").label == "a"
    assert recommend(rows[2:], "max").label == "c"
    assert recommend(rows[3:], "max").label == "d"


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_plain_json(answers, name):
    assert json.loads(json.dumps(answers[name], allow_nan=False)) == answers[name]


def test_a_request_in_json_gets_the_same_answer(answers):
    request = REQUESTS["MaxLoss"]
    content = msgspec.json.decode(msgspec.json.encode(request))
    assert answer_plan(content) == answers["MaxLoss"]


def test_every_row_has_the_risk_of_a_client_and_of_a_person(answers):
    answer = answers["24 rounds"]
    solved = solve_fleet(REQUESTS["24 rounds"])
    for row, option in zip(answer["mechanisms"], solved.computed, strict=True):
        guarantee = option.plan.guarantee
        assert row["tpr_at_fpr"] == risk_of(guarantee).as_json()["tpr_at_fpr"]
        person = guarantee.for_devices(3)
        assert row["per_person"]["epsilon"] == person.epsilon > row["epsilon"]
        assert row["per_person"]["max_advantage"] == risk_of(person).max_advantage
        assert row["per_person"]["devices"] == answer["devices"] == 3


def test_epsilon_after_other_numbers_of_rounds_is_that_of_account(answers):
    answer = answers["24 rounds"]
    plan = solve_fleet(REQUESTS["24 rounds"]).recommended.plan
    stops = {stop["rounds"]: stop["epsilon"] for stop in answer["epsilon_after"]}
    assert list(stops) == [6, 12, 18, 24, 30, 36, 48]
    assert stops[24] == answer["recommended"]["epsilon"]
    for rounds, epsilon in stops.items():
        again = account(plan.mechanism, MinSep(rounds, 5), plan.noise_multiplier, 1e-6)
        assert epsilon == again.epsilon
    assert list(stops.values()) == sorted(stops.values())


def test_a_range_of_min_seps_shows_epsilon_and_the_noise_for_the_target():
    request = FleetPlanRequest(
        **{**SMALL, "report_goal": 2}, rounds=24, min_sep=4, max_min_sep=20, effort="quick"
    )
    solved = solve_fleet(request)
    plan, rows = solved.recommended.plan, solved.by_min_sep()
    assert plan.participation == MinSep(24, 4)
    assert [row["min_sep"] for row in rows] == [4, 6, 9, 13, 20]
    for row in rows:
        clients = MinSep(24, row["min_sep"])
        again = account(plan.mechanism, clients, plan.noise_multiplier, 1e-6)
        assert row["epsilon"] == again.epsilon
        expected = calibrate(plan.mechanism, clients, 2.5, 1e-6)
        assert row["noise_multiplier_for_target"] == expected
    assert answer_plan(request)["by_min_sep"] == rows
    assert solve_fleet(REQUESTS["once"]).by_min_sep() == []


def test_what_was_chosen_is_said_with_a_reason():
    answer = answer_plan(
        {
            "kind": "fleet",
            "population": 400_000,
            "delta": 1e-8,
            "epsilon": 3.0,
            "timer_days": 2.0,
            "rounds_per_day": 20.0,
            "days": 10.0,
            "effort": "quick",
        }
    )
    assert {name: one["value"] for name, one in answer["chosen"].items()} == {
        "rounds": 200,
        "report_goal": 10_000,
    }
    assert (answer["days"], answer["binding"], answer["min_sep"]) == (10, "timer", 40)
    assert [row["name"] for row in answer["mechanisms"]] == ["blt", "blt-b400", "tree"]
    assert {row["name"] for row in answer["left_out"]} == {
        *("blt-robust", "tree-full", "band-toeplitz", "bandmf")
    }
    assert answer["extrapolation"] == {}


def test_no_reachable_target_is_refused_with_the_reasons():
    with pytest.raises(InvalidInput, match="no mechanism reaches the target: blt: "):
        answer_plan(FleetPlanRequest(**{**SMALL, "delta": 1e-300}, rounds=12, effort="quick"))


DATASET = {"size": 1_000, "batch_size": 100, "epochs": 2, "epsilon": 2.0, "delta": 1e-4}


def test_a_quick_answer_for_a_data_set_has_no_certificates_and_recommends_the_least_noise():
    answer = answer_plan({"kind": "dataset", **DATASET, "effort": "quick"})
    noises = {(row["name"], row["sampling"]): row["rms_noise"] for row in answer["mechanisms"]}
    assert set(noises) == {("dp-sgd", "poisson"), ("blt", "none")}
    best = min(noises, key=noises.__getitem__)
    assert (answer["recommended"]["name"], answer["recommended"]["sampling"]) == best
    assert best[0] in answer["reason"]
    assert answer["recommended"]["failure_probability"] == 0
    dataset = Dataset(1_000, 100, 2)
    blt = optimize_blt(dataset.in_order, 4, "rms").mechanism
    guarantee = calibrate_dataset(blt, dataset, "none", 2.0, 1e-4)
    (row,) = [row for row in answer["mechanisms"] if row["name"] == "blt"]
    assert row["tpr_at_fpr"] == risk_of(guarantee).as_json()["tpr_at_fpr"]
    assert json.loads(json.dumps(answer, allow_nan=False)) == answer


def test_a_large_delta_is_in_the_warnings():
    answer = answer_plan(DatasetPlanRequest(**{**DATASET, "delta": 0.01}, effort="quick"))
    assert "not below 1 / dataset" in answer["warnings"][0]
    assert not math.isnan(answer["mechanisms"][0]["epsilon"])
