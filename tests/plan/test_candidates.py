"""Every mechanism of a plan: its noise, its losses, its surprises, against separate accounts."""

import math

import pytest

from dpftrl import MinSep, account
from dpftrl.errors import InvalidInput, TooLarge
from dpftrl.optimize import optimize_blt
from dpftrl.plan import Budget, Fleet, Missing, Option, Question, candidates, options

DELTA = 1e-6
LABELS = ["blt", "blt-robust", "blt-b400", "tree", "tree-full", "band-toeplitz", "bandmf"]
ENDLESS = {"blt", "blt-robust", "blt-b400", "tree", "band-toeplitz"}
SMALL = Fleet(57, 10, availability=0.9)  # takes five turns


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Nothing of the user's is read or written."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DPFTRL_CACHE", str(folder))
        yield folder


def answered(question: Question, **how) -> dict[str, Option]:
    rows = list(options(question, **how))
    assert all(isinstance(row, Option) for row in rows), rows
    return {row.label: row for row in rows}


BY_EPSILON = Question(SMALL, 24, Budget(DELTA, epsilon=2.5), parameters=1000, buffers=2)
BY_NOISE_MULTIPLIER = Question(
    SMALL, 12, Budget(DELTA, noise_multiplier=3.7), 2, parameters=7, objective="max", buffers=1
)
QUESTIONS = {"epsilon": BY_EPSILON, "sigma": BY_NOISE_MULTIPLIER}


@pytest.fixture(scope="module")
def answers():
    return {name: answered(question) for name, question in QUESTIONS.items()}


@pytest.fixture(params=QUESTIONS)
def answer(request, answers):
    return QUESTIONS[request.param], answers[request.param]


def test_all_mechanisms_are_listed_with_the_optimised_blt_first(answer):
    question, found = answer
    assert list(found) == LABELS
    assert question.participation().min_sep == 5
    for option in found.values():
        assert option.plan.fleet == SMALL
        assert option.plan.participation == question.participation()


def test_every_option_uses_the_given_epsilon(answers):
    for option in answers["epsilon"].values():
        assert 2.5 * (1 - 1e-6) <= option.plan.guarantee.epsilon <= 2.5


def test_noise_multipliers_of_mechanisms_are_not_comparable(answers):
    """The control: sigmas differ, since they do not compare."""
    sigmas = {option.plan.noise_multiplier for option in answers["epsilon"].values()}
    assert len(sigmas) >= 6
    with_same_sigma = {
        account(option.plan.mechanism, BY_EPSILON.participation(), 3.0, DELTA).epsilon
        for option in answers["epsilon"].values()
    }
    assert max(with_same_sigma) > 1.1 * min(with_same_sigma)


def test_a_given_noise_multiplier_is_that_of_the_blt_and_others_match_its_noise(answers):
    found = answers["sigma"]
    assert found["blt"].plan.noise_multiplier == 3.7
    noise = [
        option.error_report.rms_error * option.plan.noise_multiplier for option in found.values()
    ]
    assert noise == pytest.approx([noise[0]] * len(noise), rel=1e-12)
    assert len({option.plan.noise_multiplier for option in found.values()}) >= 6
    assert len({option.plan.guarantee.epsilon for option in found.values()}) >= 6


def test_guarantees_match_separate_accounts(answer):
    question, found = answer
    for option in found.values():
        again = account(
            option.plan.mechanism, question.participation(), option.plan.noise_multiplier, DELTA
        )
        assert option.plan.guarantee == again
        assert again.delta == DELTA


def test_losses_are_those_of_the_mechanism(answer):
    question, found = answer
    for option in found.values():
        assert option.error_report == option.plan.mechanism.error_report(question.participation())


def test_memory_is_in_float64(answer):
    question, found = answer
    for option in found.values():
        vectors = option.plan.mechanism.memory(question.rounds)
        assert option.memory_bytes == vectors * question.parameters * 8
    assert found["blt-b400"].memory_bytes == 4 * question.parameters * 8


SETTINGS = {
    "min_sep_half": (1, 2),
    "min_sep_double": (1, 10),
    "rounds_half": (0.5, 5),
    "rounds_double": (2, 5),
}


@pytest.mark.parametrize("scenario", SETTINGS)
def test_scenarios_match_separate_accounts(answer, scenario):
    question, found = answer
    times, min_sep = SETTINGS[scenario]
    otherwise = MinSep(int(question.rounds * times), min_sep, question.max_participations)
    assert otherwise != question.participation()
    for label, option in found.items():
        assert set(option.scenarios) == set(SETTINGS)
        if scenario == "rounds_double" and label not in ENDLESS:
            assert option.scenarios[scenario] is None
        else:
            again = account(option.plan.mechanism, otherwise, option.plan.noise_multiplier, DELTA)
            assert option.scenarios[scenario] == again.epsilon


def test_epsilon_of_scenarios_moves_in_the_right_direction(answer):
    _, found = answer
    for option in found.values():
        planned, turned_out = option.plan.guarantee.epsilon, option.scenarios
        assert turned_out["min_sep_double"] <= planned <= turned_out["min_sep_half"]
        assert turned_out["rounds_half"] <= planned
        assert turned_out["rounds_double"] is None or planned <= turned_out["rounds_double"]


def test_scenarios_keep_the_participation_cap(answers):
    for option in answers["sigma"].values():
        assert option.plan.participation == MinSep(12, 5, 2)
        uncapped = account(
            option.plan.mechanism, MinSep(12, 2), option.plan.noise_multiplier, DELTA
        )
        assert option.scenarios["min_sep_half"] < uncapped.epsilon


@pytest.mark.parametrize(("name", "loss"), [("epsilon", "rms_loss"), ("sigma", "max_loss")])
def test_the_optimised_blt_is_the_best_blt_at_its_objective(answers, name, loss):
    found = answers[name]
    best = getattr(found["blt"].error_report, loss)
    assert best <= getattr(found["blt-b400"].error_report, loss)
    assert best <= getattr(found["blt-robust"].error_report, loss) * (1 + 1e-6)


def test_toeplitz_bands_and_bandmf_are_no_worse_than_the_blt(answers):
    """They contain it, but for the bands that are cut: close by is all that is sure."""
    found = answers["epsilon"]
    assert found["bandmf"].error_report.rms_loss <= found["band-toeplitz"].error_report.rms_loss * (
        1 + 1e-6
    )
    assert found["bandmf"].error_report.rms_loss <= found["blt"].error_report.rms_loss
    assert found["tree-full"].error_report.rms_loss <= found["tree"].error_report.rms_loss


TINY = {
    "one round": (Fleet(50, 10), 1),
    "two rounds": (Fleet(50, 10), 2),
    "three rounds": (Fleet(50, 10), 3),
    "everybody, every round": (Fleet(10, 10), 5),
    "one client": (Fleet(1, 1), 1),
    "more turns than rounds": (Fleet(10**12, 1), 4),
}


@pytest.mark.parametrize(("fleet", "rounds"), TINY.values(), ids=TINY.keys())
def test_options_for_tiny_fleets_and_few_rounds(fleet, rounds):
    question = Question(fleet, rounds, Budget(DELTA, epsilon=1.0), buffers=1)
    found = answered(question)
    assert list(found) == LABELS
    for option in found.values():
        assert 1 - 1e-6 <= option.plan.guarantee.epsilon <= 1
        assert 0 < option.error_report.rms_loss <= option.error_report.max_loss
        assert option.plan.participation == MinSep(rounds, fleet.min_sep())
    if rounds == 1:  # there is nothing to correlate
        assert found["blt"].error_report.rms_loss == pytest.approx(1)


QUICK = Question(SMALL, 6, Budget(DELTA, epsilon=1.0), buffers=1)


def left_out(**how) -> dict[str, str]:
    return {row.label: row.note for row in options(QUICK, **how) if isinstance(row, Missing)}


def refuse(*_):
    raise TooLarge("too much of a good thing")


@pytest.fixture
def quickly(monkeypatch):
    """Without the robust BLT, which takes longest and has nothing to do with the others."""
    plain = optimize_blt(QUICK.participation(), 1, "rms")
    monkeypatch.setattr(candidates, "optimize_robust_blt", lambda *_: plain)


@pytest.mark.usefixtures("quickly")
def test_bandmf_of_many_rounds_is_left_out_unless_asked_for(monkeypatch):
    monkeypatch.setattr(candidates, "QUICK_BANDMF", 5)
    assert left_out() == {"bandmf": "left out, it is slow to optimize: add --with-bandmf"}
    assert left_out(with_bandmf=True) == {}
    monkeypatch.setattr(candidates, "QUICK_BANDMF", 6)
    assert left_out() == {}


@pytest.mark.usefixtures("quickly")
def test_slow_mechanisms_are_left_out_with_a_note(monkeypatch):
    monkeypatch.setattr(candidates, "QUICK_TREE", 0)
    monkeypatch.setattr(candidates, "QUICK_BAND_TOEPLITZ", 0)
    missing = left_out()
    assert set(missing) == {"tree", "tree-full", "band-toeplitz"}
    assert "dpftrl account tree" in missing["tree"]


def test_a_mechanism_that_fails_is_left_out_and_the_others_stay(monkeypatch):
    monkeypatch.setattr(candidates, "optimize_robust_blt", refuse)
    monkeypatch.setattr(candidates, "optimize_band_toeplitz", refuse)
    missing = left_out()
    assert missing == dict.fromkeys(["blt-robust", "band-toeplitz"], "too much of a good thing")
    candidates.optimized_blt.cache_clear()
    monkeypatch.setattr(candidates, "optimize_blt", refuse)
    with pytest.raises(TooLarge):
        list(options(QUICK))


def test_other_exceptions_are_not_caught(monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(candidates, "optimize_robust_blt", broken)
    with pytest.raises(ZeroDivisionError):
        list(options(QUICK))


def test_options_are_computed_lazily(monkeypatch):
    monkeypatch.setattr(candidates, "optimize_robust_blt", None)
    assert isinstance(next(options(QUICK)), Option)


def test_too_many_rounds_for_float64_buffers_give_no_option():
    question = Question(Fleet(10**18, 1), 10**18, Budget(DELTA, epsilon=1.0), buffers=1)
    first = next(options(question))
    assert isinstance(first, Missing), first
    assert "rounding in the noise buffers" in first.note


def test_too_much_noise_for_float64_buffers_gives_no_option():
    """Every mechanism that rounds is left out, and the others are still there."""
    question = Question(Fleet(1300, 100), 20, Budget(DELTA, noise_multiplier=1e7), buffers=1)
    found = {option.label: option for option in options(question)}
    assert isinstance(found["blt"], Missing)
    assert "of mu" in found["blt"].note


NAN, INF = math.nan, math.inf
BAD_BUDGETS = {
    "neither": {},
    "both": {"epsilon": 1.0, "noise_multiplier": 1.0},
    **{f"epsilon {bad}": {"epsilon": bad} for bad in (0.0, -1.0, NAN, INF)},
    **{f"sigma {bad}": {"noise_multiplier": bad} for bad in (0.0, -1.0, NAN, INF)},
    **{f"delta {bad}": {"epsilon": 1.0, "delta": bad} for bad in (0.0, 1.0, -0.1, 2.0, NAN, INF)},
}


@pytest.mark.parametrize("given", BAD_BUDGETS.values(), ids=BAD_BUDGETS.keys())
def test_invalid_budgets_are_refused(given):
    with pytest.raises(InvalidInput) as refused:
        Budget(**{"delta": DELTA, **given})
    assert "\n" not in str(refused.value)


BAD_QUESTIONS = {
    "no rounds": {"rounds": 0},
    "half a round": {"rounds": 2.5},
    "no cap": {"max_participations": 0},
    "no parameters": {"parameters": 0},
    "negative parameters": {"parameters": -3},
    "no buffers": {"buffers": 0},
    "half a buffer": {"buffers": 0.5},
    "too small a fleet": {"fleet": Fleet(9, 10)},
    "too short a timer": {"fleet": Fleet(90, 10, timer_days=0.1, rounds_per_day=1)},
}


@pytest.mark.parametrize("given", BAD_QUESTIONS.values(), ids=BAD_QUESTIONS.keys())
def test_invalid_questions_are_refused(given):
    with pytest.raises(InvalidInput) as refused:
        Question(**{"fleet": SMALL, "rounds": 9, "budget": Budget(DELTA, 1.0), **given})
    assert "\n" not in str(refused.value)


def test_unknown_objectives_are_refused():
    with pytest.raises(InvalidInput):
        list(options(Question(SMALL, 9, Budget(DELTA, 1.0), objective="mean")))  # pyright: ignore
