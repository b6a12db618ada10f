"""`dpftrl account --rigorous`: enclosures in a table and in JSON, and what they do not cover."""

import pytest
from command_line import answer, refused_in_one_line, run

from dpftrl.cli import enclosures
from dpftrl.verify.rigorous import SAMPLED

pytest.importorskip("flint")

SETTING = ("--rounds", 60, "--min-sep", 7, "--noise-multiplier", 3.3, "--delta", 1e-7)
DATASET = ("--dataset", "1_000", "--batch-size", 100, "--epochs", 4)
NOISE = ("--noise-multiplier", 1, "--delta", 1e-4)


@pytest.mark.parametrize("name", ["blt-b400", "tree", "band-sqrt", "banded:4", "toeplitz:1,0,0.5"])
def test_json_has_every_enclosure_and_epsilon_is_not_below_it(name):
    printed = answer("account", name, *SETTING, "--rigorous")
    found = printed["rigorous"]
    (sensitivity,) = found["sensitivity"]
    for (low, high), number in (
        (sensitivity, printed["sensitivity"]),
        (found["mu"], printed["mu"]),
        (found["epsilon"], printed["epsilon"]),
        (found["delta"], printed["delta"]),
    ):
        assert high - low <= 1e-12 * high
        assert number == pytest.approx(high, rel=1e-6)
    assert printed["epsilon"] >= found["epsilon"][1]
    assert "rigorous" not in answer("account", name, *SETTING)


def test_the_table_shows_both_ends():
    code, out, _ = run("account", "sqrt", *SETTING, "--rigorous")
    assert code == 0
    assert "they contain the true values" in out
    assert "delta at the stated epsilon" in out


def test_devices_are_enclosed_too():
    printed = answer("account", "sqrt", *SETTING, "--devices", 3, "--rigorous")
    assert printed["mu"] == pytest.approx(printed["rigorous"]["mu"][1], rel=1e-9)


def test_a_data_set_in_order_is_enclosed_and_sampling_is_not():
    in_order = answer("account", "sqrt", *DATASET, *NOISE, "--sampling", "none", "--rigorous")
    assert in_order["epsilon"] >= in_order["rigorous"]["epsilon"][1]
    poisson = ("account", "independent", *DATASET, *NOISE, "--sampling", "poisson", "--rigorous")
    code, out, err = run(*poisson, "--json")
    assert code == 0
    assert '"rigorous": null' in out
    assert SAMPLED in err


def test_without_python_flint_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(enclosures, "is_installed", lambda: False)
    assert "pip install 'dpftrl[audit]'" in refused_in_one_line(
        "account", "sqrt", *SETTING, "--rigorous"
    )


def test_an_epsilon_below_the_enclosure_is_refused(monkeypatch):
    """The negative control: accounting that rounds down is not published."""
    from dpftrl.accounting import guarantee

    right = guarantee.epsilon_as_drawn

    def rounded_down(*arguments, **options):
        drawn = right(*arguments, **options)
        return drawn._replace(epsilon=drawn.epsilon * (1 - 1e-11))

    monkeypatch.setattr(guarantee, "epsilon_as_drawn", rounded_down)
    said = refused_in_one_line("account", "sqrt", *SETTING, "--rigorous")
    assert "do not publish it" in said
