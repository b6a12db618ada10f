"""Privacy statements: their content, that no number is too small, and how a run changes them."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import Page, page_of_markdown

import dpftrl
from dpftrl import FixedEpochs, MinSep, mechanism
from dpftrl._internal.formatting import percent_up, rounded_up
from dpftrl.accounting import Guarantee, account, compose, epsilon_of
from dpftrl.accounting.logs import Limits, Observed, observe
from dpftrl.errors import InvalidInput
from dpftrl.plan import Fleet, Plan
from dpftrl.statement.facts import NOT_COVERED, Input
from dpftrl.statement.statement import Statement, make_statement, save_statement, statement_paths
from dpftrl.verify import Check, Verdict

CLIENTS = MinSep(rounds=200, min_sep=50)
BLT = dpftrl.BLT([0.9, 0.5], [0.1, 0.2])


def promise(clients: dpftrl.Participation = CLIENTS, noise_multiplier: float = 8.0) -> Guarantee:
    return account(BLT, clients, noise_multiplier, 1e-8)


@pytest.fixture
def log(tmp_path):
    """Return a function that summarizes a log in which each client took part in given rounds."""

    def observed(rounds: Mapping[str, Sequence[int]], limits: Limits | None = None) -> Observed:
        path = tmp_path / "ledger.csv"
        rows = [f"{t},{client},counted" for client, taken in rounds.items() for t in taken]
        path.write_text("\n".join(["round,client,status", *rows]))
        return observe(path, limits)

    return observed


KEPT = {"ann": [0, 50, 150], "bob": [199]}
EVERY = {
    "plan": lambda: make_statement(Plan(Fleet(50_000, 1000), promise())),
    "guarantee": lambda: make_statement(promise(), devices=7, date="2026-01-31"),
    "upper bound": lambda: make_statement(
        account(mechanism("toeplitz:1,0,0.5"), CLIENTS, 5.0, 1e-6)
    ),
    "matrix": lambda: make_statement(account(mechanism("banded:4", CLIENTS), CLIENTS, 5.0, 1e-6)),
    "pairs": lambda: make_statement(account(mechanism("gblt:0.5+0.1j@0.05"), CLIENTS, 5.0, 1e-6)),
    "fixed epochs": lambda: make_statement(promise(FixedEpochs(200, 50))),
    "composed": lambda: make_statement(
        compose([promise(), promise(noise_multiplier=9.0)], 1e-8, 5)
    ),
    "two devices": lambda: make_statement(promise().for_devices(2)),
    "far too little noise": lambda: make_statement(promise(noise_multiplier=0.1)),
    "run": lambda: make_statement(promise(), accounted=promise(MinSep(200, 40))),
}
every = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY.keys())


# --- Markdown, HTML and JSON ----------------------------------------------------------------------


@every
def test_markdown_and_html_hold_the_same_words(make):
    statement = make()
    page = Page(statement.html())
    assert page.words == page_of_markdown(statement.markdown()).words
    assert page.title == "Privacy statement"
    assert len(page.words) > 500


@every
def test_the_same_facts_give_the_same_bytes(make):
    first, second = make(), make()
    assert first.markdown() == second.markdown()
    assert first.html() == second.html()
    assert first.json_bytes() == second.json_bytes()


@every
def test_the_json_file_has_the_numbers_in_full(make):
    statement = make()
    content, stated = json.loads(statement.json_bytes()), statement.guarantee
    assert (content["format"], content["version"]) == ("dpftrl statement", 2)
    for name in ("epsilon", "delta", "sampler_delta", "rho", "mu", "unit", "adjacency", "kind"):
        assert content[name] == getattr(stated, name)
    assert content["setting"] == "central"
    assert content["dpftrl_version"] == dpftrl.__version__
    assert [run["noise_multiplier"] for run in content["runs"]] == [
        run.noise_multiplier for run in stated.runs
    ]
    assert {row["devices"] for row in content["devices"]} >= {1, 2, 3}
    assert {row["delta"] for row in content["epsilon_at_delta"]} >= {stated.delta, 1e-5, 1e-6, 1e-8}
    assert content["not_covered"] == list(NOT_COVERED)
    assert content["date"] in {None, "2026-01-31"}


@every
def test_every_hypothesis_is_listed_with_its_basis(make):
    statement = make()
    text = " ".join(Page(statement.html()).words)
    rows = json.loads(statement.json_bytes())["hypotheses"]
    names = {row["name"] for row in rows}
    assert names >= {"participation", "clipping", "zero-out", "keystream", "secrecy"}
    for row in rows:
        assert re.search(f"{row['name']} . {row['basis']} {re.escape(row['text'])}", text)


def test_a_hypothesis_that_a_file_left_out_is_assumed():
    bare = replace(promise(), hypotheses=())
    full = json.loads(make_statement(promise()).json_bytes())["hypotheses"]
    assert json.loads(make_statement(bare).json_bytes())["hypotheses"] == full


@every
def test_every_item_of_the_checklist_is_covered(make):
    text = " ".join(Page(make().html()).words)
    for words in (
        "central differential privacy",
        "Data accesses covered",
        "Output",
        "Unit of privacy",
        "Zero-out",
        "PLD",
        "sensitivity",
        "Formal statement",
        "keystream",
        f"dpftrl {dpftrl.__version__}",
        *NOT_COVERED,
    ):
        assert words in text


# --- Numbers -------------------------------------------------------------------------------------


@given(st.floats(1e-300, 1e300), st.integers(1, 8))
def test_numbers_are_rounded_up_in_the_last_digit(value, digits):
    shown = float(rounded_up(value, digits))
    assert value <= shown <= value * (1 + 10.0 ** (1 - digits)) * (1 + 1e-15)


@given(st.floats(0, 1))
def test_percentages_are_rounded_up(share):
    assert 100 * share <= float(percent_up(share)[:-1]) + 1e-12 <= 100.2


def stated_numbers(statement: Statement) -> tuple[float, float, float]:
    """Return epsilon, delta and rho of the summary sentence."""
    match = re.search(
        r"are \(([^,]+), ([^)]+)\)-differentially private and (\S+)-zCDP", statement.summary
    )
    assert match is not None
    epsilon, delta, rho = map(float, match.groups())
    return epsilon, delta, rho


@given(st.floats(-1, 3), st.floats(-40, -1))
def test_stated_numbers_are_never_below_the_guarantee(log_noise_multiplier, log_delta):
    guarantee = account(BLT, CLIENTS, 10.0**log_noise_multiplier, 10.0**log_delta)
    statement = make_statement(guarantee)
    if "no guarantee" in statement.summary:
        assert guarantee.total_delta >= 1
        return
    epsilon, delta, rho = stated_numbers(statement)
    assert epsilon >= guarantee.epsilon
    assert rho >= guarantee.rho
    assert delta >= guarantee.delta
    assert delta >= guarantee.total_delta * (1 - 1e-12)
    assert f"exp({rounded_up(guarantee.epsilon)})" in statement.markdown()


def test_the_numbers_of_the_paper_are_stated():
    clients = MinSep.from_rounds_between(2000, rounds_between=1181, max_participations=2)
    statement = make_statement(
        account(mechanism("blt-b1000"), clients, noise_multiplier=16.1, delta=1e-10)
    )
    assert stated_numbers(statement) == (0.9790, 1e-10, 0.01395)  # 0.01394, and rounding of buffers


def test_the_right_guess_is_that_of_the_best_test_between_two_gaussians():
    guarantee = promise()
    best = 0.5 * (1 + math.erf(guarantee.mu / 2 / math.sqrt(2)))
    assert json.loads(make_statement(guarantee).json_bytes())["right_guess"] == pytest.approx(
        best, rel=1e-9
    )
    assert percent_up(best) in make_statement(guarantee).markdown()


def test_a_delta_smaller_than_that_of_the_sampler_is_stated_with_it():
    guarantee = account(BLT, CLIENTS, 8.0, 1e-30)
    assert guarantee.sampler_delta > 1e-30
    assert stated_numbers(make_statement(guarantee))[1] >= guarantee.delta + guarantee.sampler_delta


def test_far_too_little_noise_is_stated_as_no_guarantee():
    statement = EVERY["far too little noise"]()
    assert "no guarantee" in statement.summary
    assert statement.markdown().startswith(
        "# Privacy statement\n\n> **Attention.** There is no guarantee"
    )


def test_a_delta_above_one_over_the_population_is_a_warning():
    reckless = Plan(Fleet(50_000, 1000), promise().at(1e-4))
    assert "Delta is not below 1 / 50,000" in make_statement(reckless).summary
    assert "Delta" not in make_statement(Plan(Fleet(50_000, 1000), promise())).summary


def test_the_mu_of_several_devices_of_one_person_add_up():
    guarantee, single = promise(), promise().mu
    rows = json.loads(make_statement(guarantee, devices=7).json_bytes())["devices"]
    assert [row["devices"] for row in rows] == [1, 2, 3, 7]
    for row in rows:
        assert row["mu"] == single * row["devices"]
        assert row["epsilon"] == pytest.approx(epsilon_of(1e-8, row["mu"]), rel=1e-9)
    pairs = json.loads(make_statement(guarantee.for_devices(2), devices=4).json_bytes())
    assert pairs["unit"] == "2 clients (devices) of one person"
    assert [row["mu"] for row in pairs["devices"]] == [single * g for g in (1, 2, 3, 4)]


def test_composed_runs_are_listed_and_called_an_upper_bound():
    statement = EVERY["composed"]()
    text = statement.markdown()
    assert "2 training runs together" in text
    assert "at most 5 rounds of one client" in text
    assert "The numbers are an upper bound" in text
    assert "| run 2 | 200 |" in text
    assert json.loads(statement.json_bytes())["max_participations_over_all_runs"] == 5


def test_parameters_are_listed_with_all_digits():
    assert "[0.9, 0.5]" in make_statement(promise()).markdown()
    long = dpftrl.Toeplitz(np.linspace(1, 0.1, 40).tolist())
    statement = make_statement(account(long, CLIENTS, 5.0, 1e-6))
    assert "40 numbers" in statement.markdown()
    parameters = json.loads(statement.json_bytes())["runs"][0]["parameters"]
    assert parameters["coefficients"] == list(long.c)


# --- After a run ---------------------------------------------------------------------------------


def test_a_log_within_the_limits_makes_participation_observed(log):
    statement = make_statement(promise(), observed=log(KEPT))
    content = json.loads(statement.json_bytes())
    assert statement.guarantee.epsilon == promise().epsilon
    assert content["origin"] == "guarantee"
    assert content["hypotheses"][0]["basis"] == "observed"
    assert content["observed"]["kept_to_limits"] is True
    assert content["observed"]["guarantee"]["epsilon"] < statement.guarantee.epsilon
    assert (content["observed"]["clients"], content["observed"]["participations"]) == (2, 4)
    assert content["warnings"] == []
    assert "ex post" in statement.markdown()


WORSE = {
    "too often": {"ann": [0, 50, 100, 150, 199]},
    "too soon": {"ann": [0, 20, 70, 150]},
    "too long": {"ann": [0, 50, 100, 150, 230]},
    "too soon, but seldom": {"ann": [0, 20]},
}


@pytest.mark.parametrize("rounds", WORSE.values(), ids=WORSE.keys())
def test_a_log_that_exceeds_the_limits_replaces_the_promised_guarantee(log, rounds):
    observed = log(rounds, Limits(50, 4))
    statement = make_statement(promise(), observed=observed)
    stated = statement.guarantee
    assert stated.epsilon >= promise().epsilon
    assert stated.runs[0].participation.rounds >= 200
    pattern = tuple(rounds["ann"])
    norm = BLT.pattern_norm(pattern, max(200, pattern[-1] + 1))
    assert stated.mu >= norm / 8.0  # it covers the client that broke the limits
    content = json.loads(statement.json_bytes())
    assert content["origin"] == "log"
    assert content["planned"]["epsilon"] == promise().epsilon
    assert content["hypotheses"][0] == {
        "name": "participation",
        "text": stated.runs[0].hypothesis.text,
        "basis": "observed",
    }
    assert statement.markdown().startswith(
        "# Privacy statement\n\n> **Attention.** The participation limits were not kept."
    )
    assert stated_numbers(statement)[0] >= stated.epsilon


def test_the_larger_epsilon_comes_from_the_participation_in_the_log(log):
    observed = log(WORSE["too soon"])
    statement = make_statement(promise(), observed=observed)
    assert statement.guarantee.epsilon == account(BLT, MinSep(200, 20, 4), 8.0, 1e-8).epsilon
    assert statement.guarantee.epsilon > promise().epsilon


def test_a_log_that_ends_early_does_not_reduce_the_sensitivity(log):
    content = json.loads(make_statement(promise(), observed=log({"ann": [0, 50]})).json_bytes())
    observed = content["observed"]["guarantee"]
    assert observed["mu"] == account(BLT, MinSep(200, 50, 2), 8.0, 1e-8).mu


def test_the_accounted_guarantee_replaces_the_planned_one(log):
    accounted = promise(MinSep(200, 40))
    statement = make_statement(promise(), accounted=accounted, observed=log({"ann": [0, 45]}))
    assert statement.guarantee.mu == accounted.mu
    assert "The run spent more than was promised" in statement.summary
    assert "came back after 45 round(s), where at least 50 were planned" in statement.summary
    broken = make_statement(
        promise(), accounted=accounted, observed=log({"ann": [0, 5, 50, 90, 130]})
    )
    assert broken.guarantee.mu > accounted.mu
    assert json.loads(broken.json_bytes())["origin"] == "log"


def test_another_mechanism_than_planned_is_a_warning():
    other = account(mechanism("tree"), CLIENTS, 80.0, 1e-8)
    assert "did not use the mechanism" in make_statement(promise(), accounted=other).summary


def test_enforced_participation_becomes_observed_if_the_log_exceeds_the_limits(log):
    enforced = replace(promise().hypotheses[0], basis="enforced")
    clipping = replace(promise().hypotheses[1], basis="enforced")
    accounted = promise().resting_on(enforced, clipping)

    def bases(rounds: Mapping[str, Sequence[int]], verdict: Verdict | None) -> dict[str, str]:
        statement = make_statement(
            promise(), accounted=accounted, observed=log(rounds), verdict=verdict
        )
        rows = json.loads(statement.json_bytes())["hypotheses"]
        return {row["name"]: row["basis"] for row in rows}

    verified = Verdict("0" * 32, (Check("journal", "passed", ""),), 200, 1.0, 1e-8)
    kept, broken = bases(KEPT, verified), bases(WORSE["too soon"], verified)
    assert (kept["participation"], broken["participation"]) == ("enforced", "observed")
    assert (kept["clipping"], broken["clipping"]) == ("enforced", "enforced")
    claimed = bases(KEPT, None)
    assert (claimed["participation"], claimed["clipping"]) == ("observed", "claimed")


def test_every_gap_of_fixed_epochs_is_compared_with_the_log(log):
    fixed = promise(FixedEpochs(200, 50))
    on_time = make_statement(fixed, observed=log({"ann": [3, 53, 103], "bob": [7, 57]}))
    assert on_time.facts.stated.kept_limits
    assert on_time.facts.stated.ex_post is not None
    assert on_time.facts.stated.ex_post.mu <= fixed.mu
    late = make_statement(fixed, observed=log({"ann": [3, 53, 104]}))
    assert not late.facts.stated.kept_limits
    assert late.guarantee.mu >= fixed.mu
    assert isinstance(late.guarantee.runs[0].participation, MinSep)


def test_repeated_rows_are_a_warning_and_a_hypothesis(log):
    statement = make_statement(promise(), observed=log({"ann": [1, 1, 1]}))
    assert "2 row(s) too many" in statement.summary
    rows = json.loads(statement.json_bytes())["hypotheses"]
    assert {row["name"]: row["basis"] for row in rows}["repeated rows"] == "assumed"


def test_the_log_of_several_runs_is_not_compared_with_each_run(log):
    both = compose([promise(), promise()], 1e-8)
    statement = make_statement(both, observed=log({"ann": [0, 10, 20]}))
    assert statement.guarantee.mu == both.mu
    assert "not compared with the limits of each run" in statement.summary
    with pytest.raises(InvalidInput, match="9 rounds, the 2 runs allow 8"):
        make_statement(both, observed=log({"ann": range(9)}))


def test_a_statement_names_no_client(log):
    observed = log({"client-secret": [0, 0, 1, 2, 3, 4, 5]}, Limits(50, 4))
    statement = make_statement(promise(), observed=observed)
    for text in (statement.markdown(), statement.html(), statement.json_bytes().decode()):
        assert "secret-client" not in text
        assert "client-secret" not in text


# --- Files ---------------------------------------------------------------------------------------


def test_saving_writes_or_replaces_three_files(tmp_path):
    statement = make_statement(promise())
    for stem in ("v1.2", "v1.2.md"):  # a stem may carry one of the endings
        paths = save_statement(statement, tmp_path / stem)
        assert [path.name for path in paths] == ["v1.2.md", "v1.2.html", "v1.2.json"]
    assert paths[0].read_text(encoding="utf-8") == statement.markdown()
    assert paths[2].read_bytes() == statement.json_bytes()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_path_without_a_file_name_is_refused():
    with pytest.raises(InvalidInput, match="needs a name"):
        statement_paths(Path("/"))


def test_file_names_are_escaped():
    name = "<b>|`plan`|*x*\u202e.json"
    statement = make_statement(promise(), inputs=(Input("guarantee", name, "0" * 64),))
    page = Page(statement.html())
    assert "<b>|`plan`|*x*\ufffd.json" in page.words
    assert page.words == page_of_markdown(statement.markdown()).words
    assert json.loads(statement.json_bytes())["input_sha256"] == "0" * 64
