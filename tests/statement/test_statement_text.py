"""The text of statements: fleets, persons, details, delta in words, glossary and digits."""

import json
import re
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pages import Page, page_of_markdown

import dpftrl
from dpftrl import MinSep, mechanism
from dpftrl._internal.formatting import (
    percent_up,
    probability_in_words,
    rounded_down,
    rounded_up,
    short_up,
)
from dpftrl.accounting import Guarantee, account
from dpftrl.errors import InvalidInput
from dpftrl.plan import Fleet, Plan
from dpftrl.statement.facts import Details, Input, right_guess
from dpftrl.statement.statement import Statement, make_statement

CLIENTS = MinSep(rounds=200, min_sep=50)
NOISE = 7.654321987654321  # more digits than anybody can read


def promise(delta: float = 1e-10) -> Guarantee:
    return account(dpftrl.BLT([0.9, 0.5], [0.1, 0.2]), CLIENTS, NOISE, delta)


def text_of(statement: Statement) -> str:
    return " ".join(Page(statement.html()).words)


def headline(statement: Statement) -> str:
    """Return the first paragraph of the summary."""
    return statement.markdown().partition("## Summary\n\n**")[2].partition("**")[0]


def section(statement: Statement, title: str) -> str:
    """Return the Markdown of one section, without the sections after it."""
    return statement.markdown().partition(f"# {title}\n")[2].partition("\n#")[0]


# --- The planned fleet ---------------------------------------------------------------------------


def test_planned_timers_rounds_per_day_and_availability_are_stated():
    fleet = Fleet(50_000, 1000, 0.255, 1.3, timer_days=2.5, rounds_per_day=24)
    covered = section(make_statement(Plan(fleet, promise())), "2.1 Data accesses covered")
    for row in (
        "| clients that may take part | 50,000 |",
        "| reports that complete a round | 1,000 |",
        "| availability: share of the clients that can be contacted | 25.5% |",
        "| clients contacted per report needed | 1.3 |",
        "| timer: days that a client waits before it takes part again | 2.5 (60 rounds) |",
        "| rounds per day | 24 |",
    ):
        assert row in covered


def test_a_plan_without_a_timer_says_so():
    statement = make_statement(Plan(Fleet(50_000, 1000), promise()))
    covered = section(statement, "2.1 Data accesses covered")
    assert "The plan has no timer" in covered
    assert "| rounds per day |" not in covered
    assert "| availability: share of the clients that can be contacted | 100% |" in covered


def test_a_timer_shorter_than_a_round_is_not_an_error():
    fleet = Fleet(50_000, 1000, timer_days=0.01, rounds_per_day=1)
    assert "0.01 (less than one round)" in make_statement(Plan(fleet, promise())).markdown()


def test_a_guarantee_without_a_plan_says_nothing_about_a_fleet():
    text = make_statement(promise()).markdown()
    assert "planned about the clients" not in text
    assert "timer" not in text


# --- Persons with several devices ----------------------------------------------------------------

THREE = {
    "devices=3": lambda: make_statement(promise(), devices=3),
    "for_devices(3)": lambda: make_statement(promise().for_devices(3)),
}
three = pytest.mark.parametrize("make", THREE.values(), ids=THREE.keys())


def parameters(guarantee: Guarantee) -> str:
    return (
        f"({rounded_up(guarantee.epsilon)}, 1e-10)-differentially private and "
        f"{rounded_up(guarantee.rho)}-zCDP"
    )


@three
def test_the_headline_is_about_a_client_and_a_person_with_three_devices(make):
    statement, one = make(), promise()
    person = one.for_devices(3)
    for text in (headline(statement), json.loads(statement.json_bytes())["summary"]):
        sentences = re.split(r"(?<=\.) ", text)
        (about_client,) = [sentence for sentence in sentences if "each client" in sentence]
        (about_person,) = [
            sentence for sentence in sentences if "each person with up to 3 devices" in sentence
        ]
        assert parameters(one) in about_client
        assert parameters(person) in about_person
    assert person.epsilon > one.epsilon


@three
def test_no_number_contradicts_the_headline(make):
    """Every section gives the same two epsilons, deltas and rhos, each for the same unit."""
    statement, one = make(), promise()
    person = one.for_devices(3)
    units = {"each client": one, "each person with up to 3 devices": person}
    table = section(statement, "2.3 Unit of privacy")
    for guarantee in units.values():
        epsilon, rho = rounded_up(guarantee.epsilon), rounded_up(guarantee.rho)
        assert f"| {guarantee.devices} | {epsilon} | 1e-10 | {rho} |" in table
    numbers = section(statement, "3.3 Numbers")
    order = re.search(r"\|  \| (each .*?) \| (each .*?) \|", numbers)
    assert order is not None
    in_order = [units[name] for name in order.groups()]
    row = " | ".join(rounded_up(guarantee.epsilon) for guarantee in in_order)
    assert f"| epsilon | {row} |" in numbers
    assert f"| 1e-10 (stated) | {row} |" in numbers
    formal = section(statement, "3.5 Formal statement")
    assert "zero-out of one client, and for any set S of outputs" in formal
    for guarantee in units.values():
        assert f"exp({rounded_up(guarantee.epsilon)})" in formal
    # Nothing else is raised to the power of e, and no third epsilon has a delta next to it.
    stated = {rounded_up(guarantee.epsilon) for guarantee in units.values()}
    assert set(re.findall(r"exp\(([\d.]+)\)", statement.markdown())) == stated
    assert set(re.findall(r"\(([\d.]+), 1e-10\)", statement.markdown())) == stated


@three
def test_the_unit_and_the_neighbours_are_those_of_the_headline(make):
    statement = make()
    neighbours = section(statement, "2.4 Neighbouring datasets")
    assert "differ in one client" in neighbours
    assert "differ in up to 3 clients (devices) of one person" in neighbours
    unit = section(statement, "2.3 Unit of privacy")
    expected = "a client" if statement.guarantee.devices == 1 else "a person with up to 3 devices"
    assert unit.strip().startswith(f"The unit is {expected}")


@three
def test_the_right_guess_is_stated_for_both_units(make):
    summary = section(make(), "Summary")
    assert f"{percent_up(right_guess(promise()))}" in summary
    assert f"{percent_up(right_guess(promise().for_devices(3)))}" in summary


def test_three_devices_without_any_guarantee_are_stated_as_such():
    weak = account(dpftrl.BLT([0.9, 0.5], [0.1, 0.2]), CLIENTS, 0.35, 1e-10)
    text = headline(make_statement(weak, devices=40))
    assert "For each client" not in text
    assert "There is no guarantee for each person with up to 40 devices" in text


def test_one_device_is_stated_once():
    for statement in (make_statement(promise()), make_statement(promise(), devices=1)):
        assert headline(statement).count("differentially private") == 1
        assert "person with up to" not in text_of(statement)


def test_there_is_a_command_for_each_unit():
    statement = make_statement(
        account(mechanism("tree"), CLIENTS, NOISE, 1e-10),
        devices=3,
        inputs=(Input("guarantee", "g.json", "0" * 64),),
    )
    account_lines = re.findall(r"^dpftrl account .*$", statement.markdown(), re.MULTILINE)
    assert [line.endswith(" --devices 3") for line in account_lines] == [False, True]


# --- What the publisher says ---------------------------------------------------------------------

SAID = {
    "organisation": "Ex & Co <b>Ltd</b>",
    "model_name": "next word | *v2*",
    "contact": "privacy@example.org",
    "public_data": "`C4` [2019](https://example.org/)",
    "shipped_checkpoint": "round 1,900",
}
LABELS = ("organisation", "model", "contact", "public data used", "checkpoint that ships")


def test_details_are_in_all_three_formats():
    statement = make_statement(promise(), **SAID)
    page = Page(statement.html())
    assert page.words == page_of_markdown(statement.markdown()).words
    text = " ".join(page.words)
    for label, value in zip(LABELS, SAID.values(), strict=True):
        assert f"{label} {value}" in text
    assert json.loads(statement.json_bytes())["publisher"] == SAID
    assert "dpftrl did not check it" in text


def test_details_are_escaped():
    plain_tags = [tag for tag, _ in Page(make_statement(promise(), organisation="a").html()).tags]
    hostile = make_statement(promise(), organisation='<script>x</script>|`*"\u202e')
    assert [tag for tag, _ in Page(hostile.html()).tags] == plain_tags
    assert Page(hostile.html()).words == page_of_markdown(hostile.markdown()).words
    assert json.loads(hostile.json_bytes())["publisher"] == {
        "organisation": '<script>x</script>|`*"\ufffd'
    }


def test_details_that_are_not_given_leave_no_trace():
    without = make_statement(promise())
    assert "publisher" not in json.loads(without.json_bytes())
    assert "publisher" not in text_of(without)
    only = make_statement(promise(), contact="a@example.org")
    assert json.loads(only.json_bytes())["publisher"] == {"contact": "a@example.org"}
    assert "organisation" not in text_of(only)


@pytest.mark.parametrize("name", SAID)
def test_blank_or_endless_details_are_refused(name):
    with pytest.raises(InvalidInput, match=f"{name} is blank; give a text, or leave it out"):
        make_statement(promise(), **{name: " \n"})
    with pytest.raises(InvalidInput, match=f"{name} has 2,001 characters; give at most 2,000"):
        make_statement(promise(), **{name: "x" * 2001})


def test_white_space_in_details_is_single_spaces():
    assert Details(organisation=" A\n\n B ").organisation == "A B"


# --- Delta in words ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("delta", "words"),
    [
        (1e-10, "one in ten billion"),
        (1e-3, "one in a thousand"),
        (1e-5, "one in a hundred thousand"),
        (1e-6, "one in a million"),
        (1e-8, "one in a hundred million"),
        (2e-7, "one in 5 million"),
        (3e-7, "at most one in 3.3 million"),
        (1.2345e-8, "at most one in 81 million"),
        (1e-18, "one in a quintillion"),
        (1e-24, "one in 1 followed by 24 zeros"),
        (0.01, "one in 100"),
        (0.3, "at most one in 3"),
        (0.7, "more than one in two"),
    ],
)
def test_delta_in_words(delta, words):
    assert probability_in_words(delta) == words


UNITS = {
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "quadrillion": 10**15,
    "quintillion": 10**18,
}
LEADING = {"a": 1, "ten": 10, "hundred": 100}


@given(st.floats(1e-20, 0.5))
def test_words_are_never_a_smaller_probability(delta):
    words = probability_in_words(delta).removeprefix("at most ").removeprefix("one in ").split()
    number = Fraction(1)
    for word in words:
        number *= UNITS.get(word) or LEADING.get(word) or Fraction(word)
    assert number <= 1 / Fraction(delta) * (1 + Fraction(1, 10**15))
    assert number >= 1 / Fraction(delta) / 2  # and the words are not far off


def test_delta_is_explained_next_to_the_number():
    statement = make_statement(promise())
    words = "A delta of 1e-10 means one in ten billion."
    assert words in statement.summary
    assert words in section(statement, "Summary")
    assert "| delta | 1e-10 (one in ten billion) |" in section(statement, "3.3 Numbers")
    assert json.loads(statement.json_bytes())["delta_in_words"] == "one in ten billion"


# --- Glossary ------------------------------------------------------------------------------------


def test_the_statement_ends_with_a_glossary():
    last = make_statement(promise()).document.sections[-1]
    assert last.title == "5. Glossary"
    (table,) = last.blocks
    meanings = dict(table.rows)
    for term in (
        "differential privacy",
        "epsilon",
        "delta",
        "zero-out adjacency",
        "client",
        "person",
        "noise multiplier",
        "clip norm",
        "round",
        "min-sep",
        "hypothesis (assumption)",
    ):
        sentences = re.findall(r"[^.]+\.", meanings[term].replace("3.4", "3-4").replace("2.3", ""))
        assert 1 <= len(sentences) <= 2


# --- Digits --------------------------------------------------------------------------------------


def test_the_text_has_few_digits_and_the_json_file_all_of_them():
    awkward = replace(promise(), delta=1.23456789e-9)
    statement = make_statement(awkward, devices=3)
    prose = re.sub(r"```.*?```|`[^`]*`", "", statement.markdown(), flags=re.DOTALL)
    for shown in re.findall(r"(?<![\w.])\d+\.\d+(?:e-?\d+)?", prose):
        digits = shown.partition("e")[0].replace(".", "").lstrip("0")
        assert len(digits) <= 4, shown
    content = json.loads(statement.json_bytes())
    assert content["runs"][0]["noise_multiplier"] == NOISE
    assert content["epsilon"] == awkward.epsilon
    assert content["delta"] == 1.23456789e-9
    assert "1.235e-9" in statement.summary
    assert "| noise multiplier | 7.654 " in statement.markdown()


@given(st.floats(1e-300, 1e300), st.integers(1, 8))
def test_noise_is_rounded_down(value, digits):
    shown = float(rounded_down(value, digits))
    assert value * (1 - 10.0 ** (1 - digits)) * (1 - 1e-15) <= shown <= value


@given(st.floats(1e-300, 1.0))
def test_deltas_are_rounded_up(value):
    shown = float(short_up(value))
    assert value <= shown <= value * 1.001 * (1 + 1e-15)


def test_parameters_are_not_rounded_to_one():
    statement = make_statement(account(mechanism("blt-b400"), CLIENTS, 5.0, 1e-6))
    assert "`[0.999999, 0.994445, 0.898592, 0.4912]` (rounded)" in statement.markdown()
    parameters = json.loads(statement.json_bytes())["runs"][0]["parameters"]
    assert parameters["theta"] == statement.guarantee.runs[0].mechanism.parameters()["theta"]
