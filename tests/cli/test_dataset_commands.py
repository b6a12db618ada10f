"""The commands with --dataset: account, calibrate, compare, optimize and plan."""

import json

import pytest
from command_line import refused_in_one_line, run

from dpftrl.accounting import balls_in_bins
from dpftrl.optimize import sampled

DATASET = ("--dataset", "1_000", "--batch-size", 100, "--epochs", 4)
NOISE = (*DATASET, "--delta", 1e-4, "--noise-multiplier", 1)
ORDER = (*DATASET, "--sampling", "none")
CUT = (*DATASET, "--max-batch-size", 110)
TARGET = ("--epsilon", 2, "--delta", "1e-4")
PROMISED = ("sampling", "adjacency", "confidence", "sensitivity_kind", "rms_noise")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.getbasetemp() / "cache of data sets"
    monkeypatch.setenv("DPFTRL_CACHE", str(folder))


@pytest.fixture(autouse=True)
def _few_samples(monkeypatch):
    """Fewer samples than users get, since the certificates themselves are tested elsewhere."""
    monkeypatch.setattr(balls_in_bins, "DEFAULT_SAMPLES", 2**15)
    monkeypatch.setattr(sampled, "SAMPLES", 2**10)
    monkeypatch.setattr(sampled, "EVALUATIONS", 8)


def answer(*arguments) -> dict:
    """Run a command that succeeds; return its JSON output. Progress may be on standard error."""
    code, out, err = run(*arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_plan_sorts_the_schemes_by_noise_and_recommends_the_first():
    plan = answer("plan", *DATASET, *TARGET)
    noise = [row["rms_noise"] for row in plan["mechanisms"]]
    assert noise == sorted(noise)
    assert plan["recommended"]["name"] == plan["mechanisms"][0]["name"] == "blt"
    assert plan["recommended"]["sampling"] == plan["mechanisms"][0]["sampling"] == "balls-in-bins"
    assert plan["recommended"]["failure_probability"] == 1e-9
    assert (plan["dataset"], plan["steps"], plan["epsilon"]) == (1_000, 40, 2.0)
    for row in plan["mechanisms"]:
        assert all(name in row for name in PROMISED)
        assert row["effective_noise_multiplier"] == row["noise_multiplier"] / row["sensitivity"]


def test_a_plan_is_saved_and_computed_again_when_it_is_read(tmp_path):
    for sampling, choose in (("balls-in-bins", ()), ("poisson", ("--choose", "dp-sgd"))):
        path = tmp_path / f"{sampling}.json"
        only = ("--sampling", sampling)
        plan = answer("plan", *DATASET, *TARGET, *only, "--out", path, *choose)
        (row,) = plan["mechanisms"]
        got = answer("account", path)
        for field in ("sampling", "noise_multiplier", "epsilon", "delta", "rms_noise", "mechanism"):
            assert got[field] == row[field]
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "epsilon": 1.8}))
        assert "not confirmed" in refused_in_one_line("account", path)
        path.write_text(json.dumps(content))
        assert "leave out --delta" in refused_in_one_line("account", path, "--delta", 1e-5)
        answer("plan", *DATASET, *TARGET, "--sampling", "none", "--out", path)  # ours: replaced


def test_plan_says_so_when_plain_dp_sgd_is_best():
    few_steps = ("--dataset", 10_000, "--batch-size", 2_000, "--epochs", 1, "--epsilon", 0.05)
    code, out, err = run("plan", *few_steps, "--delta", "1e-6", "--sampling", "poisson")
    assert code == 0, err
    assert "plain DP-SGD is best here" in out
    code, out, _ = run("plan", *DATASET, *TARGET, "--sampling", "none")
    assert code == 0
    assert "plain DP-SGD" not in out


def test_plan_warns_about_a_delta_that_permits_publishing_an_example():
    code, _, err = run("plan", *DATASET, "--epsilon", 2, "--delta", 1e-3, "--sampling", "none")
    assert code == 0
    assert "not below 1 / dataset" in err
    _, _, err = run("plan", *DATASET, "--epsilon", 2, "--delta", 1e-4, "--sampling", "none")
    assert "not below" not in err


def test_calibrate_and_account_agree_for_every_sampling():
    for name, sampling in [
        ("independent", "poisson"),
        ("band-sqrt:3", "cyclic-poisson"),
        ("blt-b100", "balls-in-bins"),
        ("blt", "none"),
    ]:
        wanted = answer("calibrate", name, *DATASET, *TARGET, "--sampling", sampling)
        noise = ("--noise-multiplier", wanted["noise_multiplier"])
        got = answer("account", name, *DATASET, *noise, "--delta", 1e-4, "--sampling", sampling)
        assert got["epsilon"] == pytest.approx(2.0, rel=0.02)
        assert got["sampling"] == wanted["sampling"] == sampling
        assert got["rms_noise"] == wanted["rms_noise"]
        for numbers in (wanted, got):
            assert all(field in numbers for field in PROMISED)
            assert any(one["name"] == "keystream" for one in numbers["hypotheses"])


def test_an_optimized_blt_is_saved_and_accounted_as_a_file(tmp_path):
    path = tmp_path / "blt.json"
    best = answer("optimize", "blt", *DATASET, *TARGET, "--out", path)
    noise = ("--noise-multiplier", best["noise_multiplier"])
    sampling = ("--sampling", "balls-in-bins")
    got = answer("account", path, *DATASET, *noise, "--delta", 1e-4, *sampling)
    assert got["epsilon"] == pytest.approx(2.0, rel=0.02)
    assert got["mechanism"] == best["mechanism"]
    code, out, err = run("optimize", "band-toeplitz", *DATASET, *TARGET)
    assert code == 0, err
    assert "cyclic-poisson sampling in" in out


def test_compare_adds_up_the_failures_of_the_certificates_it_chose_among():
    names = ("blt-b100", "blt-b400", "independent")
    rows = answer("compare", *names, *DATASET, *TARGET, "--sampling", "balls-in-bins")
    assert len(rows["mechanisms"]) == 3
    assert rows["recommended"]["failure_probability"] == pytest.approx(3e-9)
    code, out, err = run("compare", *DATASET, *TARGET, "--sampling", "poisson")
    assert code == 0, err
    assert "independent" in out


def test_compare_lists_what_does_not_go_with_the_sampling():
    names = ("independent", "sqrt")
    rows = answer("compare", *names, *DATASET, *TARGET, "--sampling", "poisson")
    assert [row["name"] for row in rows["mechanisms"]] == ["independent"]
    assert "as many bands" in rows["left_out"][0]["note"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", *DATASET, "--delta", 1e-4), "needs --epsilon"),
        (("plan", *DATASET, *TARGET, "--rounds", 5), "--rounds does not go with --dataset"),
        (("plan", *DATASET, *TARGET, "--choose", "blt"), "give --out"),
        (("plan", *DATASET, *TARGET, "--out", "x.txt"), "saved as a .json file"),
        (("plan", *ORDER, *TARGET, "--out", "x.json", "--choose", "dp-sgd"), "no row 'dp-sgd'"),
        (("plan", "--dataset", 100, *TARGET), "needs --batch-size and --epochs"),
        (("plan", *TARGET, "--sampling", "poisson"), "goes with --dataset"),
        (("plan", *TARGET), "give --population of a fleet, or --dataset"),
        (("account", "blt", *DATASET, "--delta", 1e-4), "needs --noise-multiplier"),
        (
            ("account", "blt", *NOISE, "--sampling", "balls-in-bins"),
            "depends on epsilon",
        ),
        (
            ("account", "sqrt", *NOISE, "--sampling", "poisson"),
            "at most as many bands",
        ),
        (
            ("calibrate", "independent", *CUT, *TARGET, "--sampling", "poisson"),
            "use a larger max_batch_size",
        ),
        (("calibrate", "blt", *DATASET, "--rho", 1), "--rho does not go with --dataset"),
        (("compare", *DATASET, "--sampling", "poisson"), "needs --epsilon and --delta"),
        (("compare", "blt", "--epsilon", 1, "--rounds", 9, "--min-sep", 3), "goes with --dataset"),
        (("optimize", "blt", *DATASET), "needs --epsilon and --delta"),
        (("optimize", "blt", *DATASET, *TARGET, "--sampling", "poisson"), "balls-in-bins"),
        (("optimize", "blt", *DATASET, *TARGET, "--rounds", 5), "does not go with --dataset"),
        (("optimize", "blt", "--rounds", 100), "--min-sep"),
        (("optimize", "band-toeplitz", "--rounds", 100, "--min-sep", 10), "--bands"),
    ],
)
def test_options_that_do_not_go_together_are_refused_in_one_line(arguments, words):
    assert words in refused_in_one_line(*arguments)
