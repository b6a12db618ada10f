"""The catalogue of names: each builds what it says, and slips are caught with advice."""

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dpftrl
from dpftrl import MinSep, mechanism, mechanisms
from dpftrl.errors import DpftrlError, InvalidInput, UnknownMechanism
from dpftrl.mechanisms.registry import CATALOGUE, FAMILIES
from dpftrl.optimize import optimize_blt

WANTED_FOR = MinSep(rounds=40, min_sep=6)

# How each line of the catalogue is written out, and what must come of it.
WRITTEN = {
    "independent": ("independent", dpftrl.Independent()),
    "blt": ("blt", optimize_blt(WANTED_FOR, 4, objective="rms").mechanism),
    "blt-b100": ("blt-b100", None),
    "blt-b400": ("blt-b400", None),
    "blt-b1000": ("blt-b1000", None),
    "gblt": (
        "gblt:0.5@0.1,0.5+0.25j@0.125",
        dpftrl.GeneralBLT([0.5, 0.5 + 0.25j], [0.1, 0.125]),
    ),
    "sqrt": ("sqrt", dpftrl.SquareRoot()),
    "band-sqrt": ("band-sqrt:5", dpftrl.SquareRoot(bands=5)),
    "toeplitz": ("toeplitz:1,0.5,0.25", dpftrl.Toeplitz([1.0, 0.5, 0.25])),
    "banded": ("banded:5", dpftrl.Banded.square_root(5, 40)),
    "inv-sqrt": ("inv-sqrt:5", dpftrl.BandedInverse.square_root(5)),
    "banded-inverse": ("banded-inverse:1,-0.5", dpftrl.BandedInverse([1.0, -0.5])),
    "lambda": ("lambda:0.25", dpftrl.BandedInverse([1.0, -0.25])),
    "tree": ("tree", dpftrl.BinaryTree()),
    "tree-vanilla": ("tree-vanilla", dpftrl.BinaryTree(refine=False)),
    "tree-full": ("tree-full", dpftrl.FullTree(40)),
    "smooth-tree": ("smooth-tree", dpftrl.SmoothTree.for_rounds(40)),
}


def test_the_test_table_covers_every_name_of_the_catalogue():
    names = [entry.name for entry in CATALOGUE]
    assert len(names) == len(set(names))
    assert set(names) == set(WRITTEN)
    assert all(entry.summary and "\n" not in entry.summary for entry in CATALOGUE)


def test_the_registry_has_every_family_that_the_package_exports():
    exported = [getattr(mechanisms, name) for name in mechanisms.__all__]
    families = {
        item
        for item in exported
        if inspect.isclass(item)
        and issubclass(item, mechanisms.Mechanism)
        and not inspect.isabstract(item)
    }
    assert set(FAMILIES.values()) == families
    assert all(name == family.family for name, family in FAMILIES.items())


@pytest.mark.parametrize("name", WRITTEN)
def test_a_mechanism_says_whether_its_memory_grows_with_the_rounds(name: str):
    built = mechanism(WRITTEN[name][0], WANTED_FOR)
    keeps_every_round = built.memory(WANTED_FOR.rounds) == WANTED_FOR.rounds - 1
    assert built.memory_grows == keeps_every_round


@pytest.mark.parametrize("name", WRITTEN)
def test_buffers_that_decay_are_those_that_are_rounded_once(name: str):
    """The noise kernel for such buffers uses one fused multiply-add per buffer and round."""
    built = mechanism(WRITTEN[name][0], WANTED_FOR)
    assert (built.decaying_buffers is not None) == built.rounds_buffers_once


@pytest.mark.parametrize("name", WRITTEN)
def test_every_name_builds_a_mechanism_that_works(name: str):
    written, wanted = WRITTEN[name]
    made = mechanism(written, WANTED_FOR)
    assert wanted is None or made == wanted
    loss = made.error_report(WANTED_FOR)
    assert 0 < loss.rms_loss <= loss.max_loss < float("inf")
    noise, _ = made.step(made.init(2), lambda i: dpftrl.SquareRoot().coefficients(100)[i : i + 2])
    assert noise.shape == (2,)


@pytest.mark.parametrize(
    "name", [name for name in WRITTEN if name not in ("toeplitz", "banded", "gblt")]
)
def test_the_name_of_what_was_built_builds_it_again(name: str):
    made = mechanism(WRITTEN[name][0], WANTED_FOR)
    assert mechanism(made.name, WANTED_FOR) == made


@given(decay=st.floats(0, 1))
def test_no_two_one_parameter_mechanisms_share_a_name(decay):
    """A name in a table that stands for another mechanism misleads."""
    made = dpftrl.BandedInverse.one_parameter(decay)
    assert mechanism(made.name) == made


@pytest.mark.parametrize("name", ["band-sqrt", "banded", "inv-sqrt"])
def test_bands_that_are_not_given_are_the_min_sep(name: str):
    assert mechanism(name, WANTED_FOR) == mechanism(f"{name}:6", WANTED_FOR)
    assert mechanism(name, MinSep(4, 9)) == mechanism(f"{name}:4", MinSep(4, 9))


@pytest.mark.parametrize(
    "name", ["band-sqrt", "banded", "banded:5", "inv-sqrt", "tree-full", "smooth-tree"]
)
def test_names_that_need_a_participation_ask_for_it(name: str):
    with pytest.raises(InvalidInput, match="participation") as refused:
        mechanism(name)
    assert not isinstance(refused.value, UnknownMechanism)


@pytest.mark.parametrize("rounds", [1, 2, 5, 6, 19, 20, 70, 2052])
def test_smooth_trees_are_no_higher_than_they_need_to_be(rounds: int):
    made = mechanism("smooth-tree", MinSep(rounds, 1))
    assert made.rounds >= rounds
    assert made.height == 2 or dpftrl.SmoothTree(made.height - 2).rounds < rounds


@pytest.mark.parametrize(
    ("slip", "meant"),
    [
        ("trea", "tree"),
        ("tree-ful", "tree-full"),
        ("tree_full", "tree-full"),
        ("smoothtree", "smooth-tree"),
        ("sqr", "sqrt"),
        ("bandsqrt:5", "band-sqrt"),
        ("invsqrt:4", "inv-sqrt"),
        ("blt-b40", "blt-b400"),
        ("blt-400", "blt-b400"),
        ("independant", "independent"),
        ("toplitz:1,2", "toeplitz"),
        ("lamda:0.5", "lambda"),
        ("band", "banded"),
    ],
)
def test_a_misspelled_name_suggests_similar_names(slip: str, meant: str):
    with pytest.raises(UnknownMechanism) as refused:
        mechanism(slip)
    assert meant in str(refused.value)
    assert repr(slip) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["", ":", "::", ":5", "xyzzy", " ", "🌳", "a\nb", "q" * 1000])
def test_text_that_resembles_no_name_is_unknown(name: str):
    with pytest.raises(UnknownMechanism) as refused:
        mechanism(name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "tree:3",
        "sqrt:5",
        "independent:",
        "blt:4",
        "blt-b400:1",
        "smooth-tree:4",
        "tree-full:40",
        "band-sqrt:0",
        "band-sqrt:-1",
        "band-sqrt:2.5",
        "band-sqrt:x",
        "band-sqrt:nan",
        "band-sqrt:1,2",
        "band-sqrt:1:2",
        "band-sqrt:" + "9" * 5000,
        "banded:0",
        "banded:two",
        "inv-sqrt:0",
        "inv-sqrt:",
        "toeplitz",
        "toeplitz:",
        "toeplitz:a",
        "toeplitz:1,",
        "toeplitz:1,,2",
        "toeplitz:0,1",
        "toeplitz:1,-1",
        "toeplitz:nan",
        "toeplitz:1,inf",
        "toeplitz:1,1e999",
        "banded-inverse:0",
        "banded-inverse:-1",
        "banded-inverse:1,nan",
        "lambda",
        "lambda:",
        "lambda:1.5",
        "lambda:-0.1",
        "lambda:nan",
        "lambda:0.5,0.5",
        "lambda:half",
    ],
    ids=lambda name: name[:24],
)
def test_parameters_that_do_not_fit_are_refused(name: str):
    wanted_for = None if name == "inv-sqrt:" else WANTED_FOR
    with pytest.raises(InvalidInput) as refused:
        mechanism(name, wanted_for)
    assert not isinstance(refused.value, UnknownMechanism)
    assert "\n" not in str(refused.value)


@given(name=st.text(max_size=30), use=st.booleans())
def test_any_text_builds_something_or_is_refused(name, use):
    try:
        made = mechanism(name, WANTED_FOR if use else None)
    except DpftrlError as refused:
        assert "\n" not in str(refused)  # noqa: PT017
    else:
        assert isinstance(made, dpftrl.Mechanism)


@given(
    name=st.sampled_from([entry.name for entry in CATALOGUE]),
    parameter=st.text("0123456789.,-+e_ naif\n", max_size=12),
)
def test_any_parameter_builds_something_or_is_refused(name, parameter):
    try:
        made = mechanism(f"{name}:{parameter}", MinSep(8, 3))
    except DpftrlError as refused:
        assert "\n" not in str(refused)  # noqa: PT017
    else:
        assert isinstance(made, dpftrl.Mechanism)


@pytest.mark.parametrize("name", WRITTEN)
def test_names_build_equal_values_each_time(name: str):
    written, _ = WRITTEN[name]
    one, two = mechanism(written, WANTED_FOR), mechanism(written, WANTED_FOR)
    assert one == two
    assert hash(one) == hash(two)
