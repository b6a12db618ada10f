"""Hashes and kinds of names against hashlib and `is_plain_id`; populations against a dict."""

import hashlib
import random
import traceback

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_runs import PEOPLE, create, one_round, small_plan

from dpftrl._internal.client_ids import MOST_PADDED_DIGITS, is_plain_id
from dpftrl.errors import InvalidInput, TooFewClients
from dpftrl.federated import pseudonyms as module
from dpftrl.federated.eligibility import Eligibility, Rules, Timers
from dpftrl.federated.pseudonyms import OTHER, PADDED, PLAIN, Population, Pseudonyms
from dpftrl.noise import NoiseKey

KEY = NoiseKey.insecure_for_tests(3)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: None)


def by_hashlib(name: str) -> int:
    secret = KEY.derive(b"pseudonyms").secret_bytes()
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8, key=secret).digest(), "big")


def random_names(count: int, seed: int) -> list[str]:
    """Names of all lengths around one, two and three blocks, in one to four bytes a letter."""
    dice = random.Random(seed)
    letters = ["ab", "0123456789", "é水a", "\U0001f600ß", " \n-.+eE07", "\x00\xff\x7f~"]
    lengths = [*range(1, 20), 63, 64, 65, 120, 127, 128, 129, 130, 255, 256, 257, 384, 385, 700]
    return [
        "".join(dice.choices(dice.choice(letters), k=dice.choice(lengths))) for _ in range(count)
    ]


def test_thousands_of_hashes_are_those_of_hashlib():
    names = random_names(5_000, 0)
    hashes = Pseudonyms(KEY).keys(names).tolist()
    assert hashes == [by_hashlib(name) for name in names]
    assert len({len(name.encode()) for name in names}) > 60


@pytest.mark.parametrize("changed", ["_IV", "_ORDERS"])
def test_a_wrong_constant_would_be_seen(changed):
    """The negative control of the test above: the compression in plain Python, with one error."""
    table = getattr(module, changed).copy()
    table.flat[5] ^= 1
    assert list(table.flat) != list(getattr(module, changed).flat)
    block = list(range(1, 17))
    right = plain_compress(block, module._IV.tolist(), module._ORDERS.tolist())
    state = np.array(module._IV)
    module._compress(state, np.array(block, np.uint64), 8, True)
    assert state.tolist() == right
    tables = {"_IV": module._IV, "_ORDERS": module._ORDERS, changed: table}
    assert plain_compress(block, tables["_IV"].tolist(), tables["_ORDERS"].tolist()) != right


def plain_compress(block: list[int], iv: list[int], orders: list[list[int]]) -> list[int]:
    """RFC 7693, 3.2, for a last block, after which 8 bytes were read."""
    most = 2**64 - 1
    v = [*module._IV.tolist(), *iv]
    v[12] ^= 8
    v[14] ^= most
    columns = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    diagonals = [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
    for order in orders:
        for step, (a, b, c, d) in enumerate(columns + diagonals):
            for word, left, right in ((order[2 * step], 32, 24), (order[2 * step + 1], 16, 63)):
                v[a] = (v[a] + v[b] + block[word]) & most
                v[d] = rotated(v[d] ^ v[a], left)
                v[c] = (v[c] + v[d]) & most
                v[b] = rotated(v[b] ^ v[c], right)
    start = module._IV.tolist()
    return [start[i] ^ v[i] ^ v[i + 8] for i in range(8)]


def rotated(number: int, by: int) -> int:
    return ((number >> by) | (number << (64 - by))) & (2**64 - 1)


ADVERSARIAL = st.text("07e E+-._a/z~\t\x7f\nA9,é", min_size=1, max_size=5)


@given(names=st.lists(ADVERSARIAL, min_size=1, max_size=40))
@settings(max_examples=300)
def test_kinds_are_those_of_is_plain_id(names):
    _, _, kinds = Pseudonyms(KEY)._hash(names)
    for name, kind in zip(names, kinds.tolist(), strict=True):
        is_padded = name.isascii() and name.isdigit() and name[0] == "0" and len(name) > 1
        if is_padded:
            assert kind == PADDED
        elif kind == PLAIN or name.isascii():
            assert (kind == PLAIN) == is_plain_id(name), name
        else:
            assert kind == OTHER


@pytest.mark.parametrize("length", [MOST_PADDED_DIGITS, MOST_PADDED_DIGITS + 1])
def test_long_padded_names_are_left_to_python(length):
    _, _, kinds = Pseudonyms(KEY)._hash(["7".zfill(length)])
    assert kinds[0] == (PADDED if length == MOST_PADDED_DIGITS else OTHER)


@pytest.mark.parametrize("batch", [1, 3, 65_536])
def test_batches_change_nothing(monkeypatch, batch):
    names = [*random_names(50, 1), "007", "07", " a", "x\ny"]
    whole = Pseudonyms(KEY).hashed(names)
    monkeypatch.setattr(module, "BATCH", batch)
    parts = Pseudonyms(KEY).hashed(names)
    for one, other in zip(whole, parts, strict=True):
        assert one.tolist() == other.tolist()
    for position, form in zip(whole.unclear.tolist(), whole.forms.tolist(), strict=True):
        if names[position] in ("007", "07"):
            assert form == by_hashlib("7")


@pytest.mark.parametrize("broken", ["", None, 7, b"ann", "half \ud800"])
@pytest.mark.parametrize("others", [["a"], ["two\nlines"]])
def test_what_is_no_name_is_refused_wherever_it_stands(broken, others):
    for names in ([broken, *others], [*others, broken], [*others, broken, *others]):
        with pytest.raises(InvalidInput, match="client's name"):
            Pseudonyms(KEY).keys(names)


class Text(str):
    """A kind of text that could compare in its own way."""


def test_a_text_of_another_type_is_refused():
    with pytest.raises(InvalidInput, match="is a text"):
        Pseudonyms(KEY).keys(["a", Text("b")])


def test_no_traceback_shows_the_secret_state(monkeypatch):
    pseudonyms = Pseudonyms(KEY)
    monkeypatch.setattr(module, "hash_names", None)
    with pytest.raises(TypeError) as error:
        pseudonyms.keys(["a"])
    shown = traceback.TracebackException.from_exception(error.value, capture_locals=True)
    text = "".join(shown.format())
    assert "names = ['a']" in text  # local variables are in it
    assert not any(str(word) in text for word in pseudonyms._state.tolist())


# --- Populations ---------------------------------------------------------------------------------


def eligibility(size: int = 2) -> Eligibility:
    return Eligibility(KEY, Rules(2, 3, None), size, seed=1, population=0)


@given(
    names=st.lists(st.sampled_from("abcdefgh"), max_size=12),
    mask=st.lists(st.booleans(), min_size=12, max_size=12),
)
def test_a_selection_is_what_a_dict_says(names, mask):
    population = eligibility().population(names)
    chosen = np.array(mask[: len(names)], np.bool_)
    known = {by_hashlib(name): name for name in names}
    some = {by_hashlib(name): name for name, one in zip(names, mask, strict=False) if one}
    keys = np.sort(np.array([*map(by_hashlib, "abcdefghij")], np.uint64))
    assert population.names_of(keys) == known
    assert population.keys.tolist() == sorted(known)
    for which in (chosen, np.flatnonzero(chosen)):
        selected = population.select(which)
        assert selected.names_of(keys) == some
        assert len(selected) == len(some)
    assert len(population) == len(known)
    assert population.names_of(keys) == known  # a selection leaves it as it was


@pytest.mark.parametrize(
    "which",
    [[True], [0.5], [3], [-1], [[0]], "all", np.ones(4, np.bool_), np.ones((1, 3), np.bool_)],
)
def test_a_selection_that_makes_no_sense_is_refused(which):
    population = eligibility().population(["a", "b", "c"])
    with pytest.raises(InvalidInput, match="mask"):
        population.select(which)


def test_nobody_can_be_selected():
    population = eligibility().population(["a", "b"])
    assert len(population.select([])) == len(population.select(np.zeros(2, np.bool_))) == 0
    assert len(eligibility().population([])) == 0


def test_rounds_with_a_population_are_those_with_the_names(tmp_path):
    dice = random.Random(0)
    with create(tmp_path / "names") as one, create(tmp_path / "population") as other:
        everybody = other.population(PEOPLE)
        assert isinstance(everybody, Population)
        for _ in range(8):
            there = dice.sample(range(len(PEOPLE)), 40)
            assert one_round(one, [PEOPLE[i] for i in there]) is not None
            which = np.array(there) if dice.random() < 0.5 else np.isin(np.arange(60), there)
            one_round(other, everybody.select(which))
        journals = [server._store.eligibility.timers.columns() for server in (one, other)]
        for a, b in zip(*journals, strict=True):
            assert a.tolist() == b.tolist()


def test_a_population_of_another_server_is_refused(tmp_path):
    with create(tmp_path / "a") as one, create(tmp_path / "b", key=2) as other:
        with pytest.raises(InvalidInput, match="another server"):
            one.begin(other.population(PEOPLE))
        assert one.begin(one.population(PEOPLE)).clients


@pytest.mark.parametrize("names", [["7", "007"], ["a", " a"], ["1e5", "100000"], ["a", ""]])
def test_a_population_with_an_unclear_name_is_refused(tmp_path, names):
    with create(tmp_path) as server, pytest.raises(InvalidInput, match="name"):
        server.population(names)


@given(
    names=st.lists(
        st.sampled_from(["7", "07", "007", "8", "08", "1e5", "100000", " a", "a", "7.0", "b"]),
        min_size=1,
        max_size=6,
    )
)
def test_names_are_refused_exactly_when_all_of_them_are_checked_one_by_one(names):
    """`_refuse_unclear` passes on suspects only; here everything is checked."""
    deciding = eligibility()
    from dpftrl.federated.eligibility import refuse_unclear

    by_key = {by_hashlib(name): name for name in names}
    unclear = {key: name for key, name in by_key.items() if not is_plain_id(name)}
    expected = None
    try:
        refuse_unclear(by_key, unclear, Timers())
    except InvalidInput as error:
        expected = str(error)
    try:
        deciding.population(names)
        got = None
    except InvalidInput as error:
        got = str(error)
    assert got == expected


def test_a_client_outside_the_population_cannot_return_under_another_spelling(tmp_path):
    """The shortcut for populations that hold everybody who was contacted must not apply here."""
    with create(tmp_path, small_plan(goal=1, min_sep=1)) as server:
        one_round(server, ["7"])
        with pytest.raises(InvalidInput, match="contacted before"):
            server.begin(server.population(["007"]))
        with pytest.raises(InvalidInput, match="differ only"):
            server.population(["7", "007"])
        people = server.population(["7", "8"])
        with pytest.raises(TooFewClients):
            server.begin(people.select([]))
        assert server.begin(people).clients
