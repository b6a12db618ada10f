"""Models as people keep them: one vector of noise over many arrays, in place."""

import warnings
from collections import OrderedDict
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from noise_pieces import KEY, ONE_OF_EACH, key_of_row, normals_of_key

import dpftrl
from dpftrl._internal.arrays import segments
from dpftrl.errors import InvalidInput
from dpftrl.noise import Grid, NoiseStream
from dpftrl.noise.round_noise import CHUNK

GRID = Grid.for_noise(2.0, 1.0)


def make(size: int, mechanism=None, threads=2) -> NoiseStream:
    mechanism = mechanism or dpftrl.Independent()
    return NoiseStream.unchecked(
        mechanism,
        size,
        clip_norm=1.0,
        noise_multiplier=2.0,
        key=KEY,
        dtype="float64",
        threads=threads,
    )


def wanted_noise(stream: NoiseStream, size: int) -> np.ndarray:
    """Of the first round: the first row of Z, times sigma."""
    return 2.0 * normals_of_key(key_of_row(stream, 0), size)


def check_noise_in_order(update, leaves, grid=None) -> None:
    """Leaves are given in the order in which coordinates are counted."""
    before = [leaf.copy() for leaf in leaves]
    size = sum(leaf.size for leaf in leaves)
    stream = make(size)
    stream.add_to(update, grid)
    noise, start = wanted_noise(stream, size), 0
    for leaf, old in zip(leaves, before, strict=True):
        some = noise[start : start + leaf.size].reshape(leaf.shape)
        start += leaf.size
        unit = GRID.step if grid else 1.0
        tolerance = GRID.step if grid else 1e-6 if leaf.dtype == np.float32 else 1e-12
        np.testing.assert_allclose((leaf - old) * unit, some, rtol=1e-6, atol=tolerance)


def test_nested_arrays_are_one_vector_in_order():
    a, b = np.ones((3, 4)), np.ones(5, np.float32)
    c, d = np.ones((2, 1, 2), np.float32), np.array(1.0)
    e, f = np.ones(CHUNK + 7), np.ones((0, 3))
    update = {"z": [e, (f, a)], "b": {"y": d, "x": c}, "a": b}
    check_noise_in_order(update, [b, c, d, e, f, a])


def test_nested_whole_numbers_are_one_vector_in_order():
    a, b, c = np.ones((3, 4), np.int64), np.ones(2000, np.int64), np.ones(CHUNK, np.int64)
    check_noise_in_order([c, {"b": b, "a": a}], [c, a, b], GRID)


def test_noise_in_another_order_is_noticed():
    a, b = np.ones(10), np.ones(10)
    with pytest.raises(AssertionError):
        check_noise_in_order({"b": b, "a": a}, [b, a])
    with pytest.raises(AssertionError):
        check_noise_in_order([a, b], [b, a])


@settings(max_examples=25)
@given(data=st.data())
def test_any_nesting_is_one_vector_in_order(data):
    leaf = st.builds(
        lambda shape, kind: np.ones(shape, kind),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        st.sampled_from(["float32", "float64"]),
    )
    nested = st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=3).map(tuple),
            st.dictionaries(st.text(max_size=3), inner, max_size=4),
            st.dictionaries(st.integers(-3, 3), inner, max_size=3),
        ),
        max_leaves=8,
    )
    update = data.draw(nested)

    def leaves(part):
        if isinstance(part, np.ndarray):
            return [part]
        inner = [part[name] for name in sorted(part)] if isinstance(part, dict) else part
        return [one for some in inner for one in leaves(some)]

    found = leaves(update)
    assert sum(part.size for part in segments(update)) == sum(one.size for one in found)
    if sum(part.size for part in segments(update)):
        check_noise_in_order(update, found)


@pytest.mark.parametrize("kind", [dict, OrderedDict, lambda x: MappingProxyType(dict(x))])
def test_any_mapping_goes_by_sorted_names(kind):
    a, b = np.ones(3), np.ones(4)
    check_noise_in_order(kind([("b", b), ("a", a)]), [a, b])
    a, b = np.ones(3), np.ones(4)
    check_noise_in_order(kind([(10, b), (9, a)]), [a, b])


def test_the_same_structure_and_values_get_the_same_noise():
    def model():
        return {"w": np.ones((7, 3), np.float32), "b": [np.zeros(5), np.zeros(2)]}

    first, second = model(), model()
    make(28).add_to(first)
    make(28).add_to(second)
    assert np.array_equal(first["w"], second["w"])
    assert np.array_equal(first["b"][0], second["b"][0])


def test_names_do_not_matter_but_the_division_does():
    """The noise depends on the values, in order, and on sizes and kinds of the arrays."""
    flat = np.zeros(28)
    make(28).add_to(flat)
    named, listed = {"a": np.zeros(20), "b": np.zeros(8)}, [np.zeros((4, 5)), np.zeros(8)]
    make(28).add_to(named)
    make(28).add_to(listed)
    assert np.array_equal(named["a"], listed[0].reshape(-1))
    assert not np.isin(named["a"], flat).any()


def test_arrays_are_changed_in_place_and_not_copied():
    arrays = [np.ones((3, 4)), np.ones(5, np.float32), np.array(1.0)]
    addresses = [array.ctypes.data for array in arrays]
    for array, view in zip(arrays, segments(arrays), strict=True):
        assert view.base is not None
        assert view.ctypes.data == array.ctypes.data
        assert np.shares_memory(view, array)
    kept = list(arrays)
    make(18).add_to(arrays)
    assert [array.ctypes.data for array in arrays] == addresses
    assert all(one is other for one, other in zip(arrays, kept, strict=True))
    assert not any(np.any(array == 1) for array in arrays)


def test_neighbours_in_memory_are_left_alone():
    """Views into one block: what lies between and around them must not change."""
    block = np.ones(5 * CHUNK)
    parts = [block[10:11], block[20 : CHUNK + 33], block[2 * CHUNK : 4 * CHUNK + 1]]
    make(sum(part.size for part in parts), ONE_OF_EACH["blt"], threads=3).add_to(parts)
    inside = np.zeros(5 * CHUNK, bool)
    for start, stop in ((10, 11), (20, CHUNK + 33), (2 * CHUNK, 4 * CHUNK + 1)):
        inside[start:stop] = True
    assert np.all(block[~inside] == 1)
    assert np.all(block[inside] != 1)


def test_thousands_of_small_arrays_are_one_vector():
    parts = [np.ones(1 + i % 5, np.float32 if i % 3 else np.float64) for i in range(3000)]
    check_noise_in_order(parts, parts)


def test_empty_arrays_are_accepted():
    empty, a = np.ones((0, 7)), np.ones(4)
    check_noise_in_order([empty, a, np.ones(0, np.float32)], [empty, a])
    for nothing in (np.ones(0), [], {}, [[], {}], [np.ones(0)]):
        with pytest.raises(InvalidInput, match="0 coordinates"):
            make(4).add_to(nothing)


# --- Unusual memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "float64", "int64"])
def test_memory_that_is_not_aligned_works(kind):
    raw = bytearray(8 * 3000 + 1)
    array = np.frombuffer(raw, kind, 3000, offset=1)
    assert not array.flags.aligned
    check_noise_in_order(array, [array], GRID if kind == "int64" else None)


def test_files_mapped_into_memory_work(tmp_path):
    mapped = np.memmap(tmp_path / "model", np.float32, "w+", shape=(30, 100))
    mapped[...] = 1.0
    check_noise_in_order({"a": mapped}, [mapped])


def test_another_name_of_int64_works():
    array = np.ones(50, np.longlong)
    check_noise_in_order(array, [array], GRID)


def refusal(update, size: int = 6, grid=None) -> str:
    """The message with which an update is refused, after which the next round is as if never."""
    stream, wanted, found = make(size), np.ones(size), np.ones(size)
    with pytest.raises(InvalidInput) as error:
        stream.add_to(update, grid)
    assert "\n" not in str(error.value)
    assert stream.round == 0
    stream.add_to(found)
    make(size).add_to(wanted)
    assert np.array_equal(found, wanted)
    return str(error.value)


def read_only() -> np.ndarray:
    array = np.ones(6)
    array.flags.writeable = False
    return array


WRONG = {
    "every other": (lambda: np.ones(12)[::2], "contiguous"),
    "backwards": (lambda: np.ones(6)[::-1], "contiguous"),
    "turned": (lambda: np.ones((2, 3)).T, "contiguous"),
    "Fortran": (lambda: np.asfortranarray(np.ones((2, 3))), "contiguous"),
    "broadcast": (lambda: np.broadcast_to(np.ones(1), (6,)), "contiguous"),
    "read-only": (read_only, "writeable"),
    "float16": (lambda: np.ones(6, np.float16), "float16"),
    "longdouble": (lambda: np.ones(6, np.longdouble), "longdouble|float128"),
    "complex": (lambda: np.ones(6, np.complex64), "complex64"),
    "int32": (lambda: np.ones(6, np.int32), "int32"),
    "uint64": (lambda: np.ones(6, np.uint64), "uint64"),
    "bool": (lambda: np.ones(6, bool), "bool"),
    "object": (lambda: np.ones(6, object), "object"),
    "text": (lambda: np.array(["1"] * 6), "<U1"),
    "big-endian": (lambda: np.ones(6, ">f4"), ">f4"),
    "fields": (lambda: np.ones(6, [("a", "f4"), ("b", "f4")]), "'a'"),
    "times": (lambda: np.ones(6, "m8[s]"), "timedelta"),
    "a number": (lambda: 1.0, "float"),
    "a number of numpy": (lambda: np.float64(1.0), "float64"),
    "None": (lambda: None, "NoneType"),
    "a string": (lambda: "update", "str"),
    "bytes": (lambda: b"update", "bytes"),
    "a generator": (lambda: (np.ones(3) for _ in range(2)), "generator"),
    "a set": (lambda: {1, 2}, "set"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_values_that_cannot_be_changed_in_place_are_refused_by_name(wrong):
    make_wrong, reason = WRONG[wrong]
    with pytest.raises(InvalidInput, match=reason):
        segments(make_wrong())
    for update, place in (
        (make_wrong(), "update "),
        ([np.ones(2), make_wrong()], "update[1] "),
        ({"b": make_wrong(), "a": np.ones(2)}, "update['b'] "),
        ({"layers": [{"bias": make_wrong()}]}, "update['layers'][0]['bias'] "),
        ({3: (np.ones(1), [make_wrong()])}, "update[3][1][0] "),
    ):
        assert place in refusal(update)


def test_names_that_cannot_be_sorted_are_refused():
    assert "update['w'] has keys" in refusal({"w": {1: np.ones(3), "1": np.ones(3)}})


def test_arrays_that_do_not_add_up_are_refused():
    assert "5 coordinates, the stream 6" in refusal(np.ones(5))
    assert "7 coordinates, the stream 6" in refusal([np.ones(3), np.ones(4)])


def test_integer_sums_require_a_grid():
    assert "int64 needs a grid" in refusal([np.ones(3), np.ones(3, np.int64)])
    assert "int64 needs a grid" in refusal([np.ones(3), np.ones(3, np.int64)], grid=GRID)
    assert "int64 needs a grid" in refusal(np.ones(6), grid=GRID)
    assert "int64 needs a grid" in refusal(np.ones(6, np.int64))


def test_a_nan_anywhere_is_refused():
    for strange in (np.nan, np.inf, -np.inf):
        last = np.array([1.0, 1.0, strange], np.float32)
        assert "NaN or an infinity" in refusal([np.ones(3), last])


# --- Arrays that are more than arrays ----------------------------------------------------------


@pytest.mark.parametrize("kind", ["float32", "float64", "int64"])
def test_a_matrix_gets_noise_of_its_own_in_every_entry_or_is_refused(kind):
    """A flat view of numpy's matrix has two dimensions: its first axis has one entry."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        update = np.matrix(np.arange(200).reshape(10, 20), kind)
        before = np.array(update)
        try:
            make(200).add_to(update, GRID if kind == "int64" else None)
        except InvalidInput:
            assert np.array_equal(np.array(update), before)
            return
        noise = np.array(update) - before
        assert len(np.unique(noise)) == 200


@pytest.mark.parametrize("kind", ["float32", "float64", "int64"])
def test_a_masked_array_is_refused_or_gets_noise_everywhere(kind):
    update = np.ma.array(np.ones(200, kind), mask=np.arange(200) % 2)
    stream = make(200)
    try:
        stream.add_to(update, GRID if kind == "int64" else None)
    except InvalidInput:
        assert stream.round == 0
        assert np.all(update.data == 1)
        return
    assert len(np.unique(update.data)) == 200


def test_an_array_with_other_arithmetic_gets_plain_noise():
    class Strange(np.ndarray):
        def __getitem__(self, _):
            return np.zeros(3)

    update = np.ones(300).view(Strange)
    stream = make(300)
    stream.add_to(update)
    plain = np.asarray(update)
    np.testing.assert_allclose(plain, 1 + wanted_noise(stream, 300), rtol=1e-12)
