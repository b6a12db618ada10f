"""Files that are damaged, hostile or merely wrong: one line of advice, and nothing else."""

import hashlib
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

import dpftrl
from dpftrl import DpftrlError, load_mechanism, save_mechanism
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms.registry import FAMILIES

COLUMNS = np.array([[1.0, 1.0, 1.0], [0.5, 0.25, 0.0]])


def refused(path: Path) -> str:
    """Loading must fail, with an error of ours on one line."""
    with pytest.raises(DpftrlError) as error:
        load_mechanism(path)
    message = str(error.value)
    assert message
    assert len(message.splitlines()) == 1
    return message


def content(family: str, parameters: object, **others: object) -> dict[str, object]:
    return {
        "format": "dpftrl mechanism",
        "version": 1,
        "family": family,
        "parameters": parameters,
        **others,
    }


def write(folder: Path, what: object) -> Path:
    path = folder / "m.json"
    path.write_text(what if isinstance(what, str) else json.dumps(what))
    return path


def write_matrix(folder: Path, raw: bytes, name: str = "m.safetensors") -> Path:
    """A banded mechanism whose matrix is these bytes, with the right checksum."""
    (folder / name).write_bytes(raw)
    reference = {"file": name, "sha256": hashlib.sha256(raw).hexdigest()}
    return write(folder, content("banded", {"columns": reference}))


# --- What must work ---------------------------------------------------------------------------


def test_a_valid_file_loads(tmp_path):
    """The control for everything below: without the damage these files are fine."""
    path = write(tmp_path, content("blt", {"theta": [0.5], "omega": [0.25]}))
    assert load_mechanism(path) == dpftrl.BLT([0.5], [0.25])
    matrix = write_matrix(tmp_path, save({"columns": COLUMNS}))
    assert load_mechanism(matrix) == dpftrl.Banded(COLUMNS)


def test_paths_may_be_text_and_files_replace_one_another(tmp_path):
    path = str(tmp_path / "m.json")
    for mech in (dpftrl.Banded(COLUMNS), dpftrl.BLT([0.5], [0.25]), dpftrl.Banded(2 * COLUMNS)):
        save_mechanism(mech, path, about={"why": "a test"})
        assert load_mechanism(path) == mech
    assert all(p.suffix in (".json", ".safetensors") for p in tmp_path.iterdir())  # no drafts


def test_notes_do_not_change_the_mechanism(tmp_path):
    save_mechanism(dpftrl.SquareRoot(), tmp_path / "a.json", about={"n": [1, {"deep": None}]})
    assert load_mechanism(tmp_path / "a.json") == dpftrl.SquareRoot()


def test_a_folder_may_hold_several_and_be_moved(tmp_path):
    home = tmp_path / "here"
    home.mkdir()
    save_mechanism(dpftrl.Banded(COLUMNS), home / "a.json")
    save_mechanism(dpftrl.Banded(2 * COLUMNS), home / "b.json")
    home.rename(tmp_path / "there")
    assert load_mechanism(tmp_path / "there" / "a.json") == dpftrl.Banded(COLUMNS)
    assert load_mechanism(tmp_path / "there" / "b.json") == dpftrl.Banded(2 * COLUMNS)


def test_extreme_numbers_come_back_to_the_last_bit(tmp_path):
    numbers = [5e-324, 2.2250738585072014e-308, 0.1, 1 / 3, 1.7976931348623157e308]
    mech = dpftrl.Toeplitz(numbers)
    save_mechanism(mech, tmp_path / "a.json")
    assert load_mechanism(tmp_path / "a.json") == mech


# --- JSON --------------------------------------------------------------------------------------


GOOD = json.dumps(content("blt", {"theta": [0.5], "omega": [0.25]}))


@pytest.mark.parametrize("cut", range(0, len(GOOD), 7))
def test_a_truncated_file_is_refused(tmp_path, cut: int):
    refused(write(tmp_path, GOOD[:cut]))


@pytest.mark.parametrize(
    "text",
    {
        "empty": "",
        "blank": " \n ",
        "nan": GOOD.replace("0.25", "NaN"),
        "infinity": GOOD.replace("0.25", "Infinity"),
        "minus infinity": GOOD.replace("0.25", "-Infinity"),
        "out of range": GOOD.replace("0.25", "1e999"),
        "many digits": GOOD.replace("0.25", "9" * 10_000),
        "large integer": GOOD.replace("0.25", "1" + "0" * 400),
        "deep list": "[" * 100_000,
        "deep list, closed": "[" * 50_000 + "]" * 50_000,
        "deep object": '{"a":' * 50_000 + "1" + "}" * 50_000,
        "deep parameter": GOOD.replace("[0.25]", "[" * 20_000 + "]" * 20_000),
        "list": "[]",
        "number": "5",
        "null": "null",
        "text": '"blt"',
        "two values": GOOD + GOOD,
        "comment": "// a mechanism\n" + GOOD,
        "comma at the end": GOOD[:-1] + ",}",
        "single quotes": GOOD.replace('"', "'"),
        "control character": GOOD.replace("blt", "b\x00lt"),
        "lone surrogate": GOOD.replace("blt", "\\ud800"),
        "newlines": GOOD.replace("blt", "b\\nl\\nt"),
    }.values(),
    ids=lambda text: text[:12],
)
def test_json_that_is_not_a_mechanism_file_is_refused(tmp_path, text: str):
    refused(write(tmp_path, text))


@pytest.mark.parametrize(
    "raw", [b"\xff\xfe{\x00}\x00", b"\x80abc", b"\xef\xbb\xbf{}", b"\x00" * 64]
)
def test_bytes_that_are_not_utf8_are_refused(tmp_path, raw: bytes):
    path = tmp_path / "m.json"
    path.write_bytes(raw)
    refused(path)


@given(raw=st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(raw, tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "m.json"
    path.write_bytes(raw)
    refused(path)


WRONG = [None, True, 0, -1, 1.5, "x", "", [], [1], {}, {"a": 1}, [[]], "a\nb", 10**30]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("field", ["format", "version", "family", "parameters"])
def test_a_field_of_the_wrong_type_is_refused(tmp_path, field: str, wrong):
    refused(write(tmp_path, content("blt", {"theta": [0.5], "omega": [0.5]}) | {field: wrong}))


@pytest.mark.parametrize("wrong", [w for w in WRONG if not isinstance(w, dict)], ids=repr)
def test_notes_of_the_wrong_type_are_refused(tmp_path, wrong):
    refused(write(tmp_path, content("independent", {}, about=wrong)))


@pytest.mark.parametrize("field", ["format", "version", "family", "parameters"])
def test_a_missing_field_is_refused(tmp_path, field: str):
    whole = content("independent", {})
    load_mechanism(write(tmp_path, whole))
    del whole[field]
    assert field in refused(write(tmp_path, whole))


def test_an_unknown_field_is_refused(tmp_path):
    assert "extra" in refused(write(tmp_path, content("independent", {}, extra=1)))


def test_a_later_version_is_refused(tmp_path):
    refused(write(tmp_path, content("independent", {}) | {"version": 2}))


@pytest.mark.parametrize(
    "family", ["", "bLt", "Mechanism", "object", "__class__", "a\nb", "x" * 9999]
)
def test_an_unknown_family_is_refused(tmp_path, family: str):
    message = refused(write(tmp_path, content(family, {})))
    assert "blt" in message  # says which there are


# --- Parameters --------------------------------------------------------------------------------


PARAMETERS = {
    "independent": {},
    "blt": {"theta": [0.5], "omega": [0.25]},
    "gblt": {"theta": [[0.5, 0.25]], "omega": [[0.125, -0.0625]]},
    "sqrt": {"bands": 3},
    "toeplitz": {"coefficients": [1.0, 0.5]},
    "banded": {"columns": COLUMNS.tolist()},
    "banded-inverse": {"inverse_coefficients": [1.0, -0.5]},
    "tree": {"refine": False},
    "tree-full": {"rounds": 5},
    "smooth-tree": {"height": 4},
}


def test_the_parameter_table_covers_every_family():
    assert set(PARAMETERS) == set(FAMILIES)


@pytest.mark.parametrize("family", PARAMETERS)
def test_valid_parameters_load(tmp_path, family: str):
    made = load_mechanism(write(tmp_path, content(family, PARAMETERS[family])))
    assert made.family == family


@pytest.mark.parametrize(
    "name", ["extra", "self", "cls", "", "__class__", "a\nb", "theta ", "x" * 500], ids=repr
)
@pytest.mark.parametrize("family", PARAMETERS)
def test_an_unknown_parameter_is_refused(tmp_path, family: str, name: str):
    refused(write(tmp_path, content(family, PARAMETERS[family] | {name: 1})))


@pytest.mark.parametrize(
    "family", [f for f in PARAMETERS if f not in ("independent", "sqrt", "tree")]
)
def test_a_missing_parameter_is_refused(tmp_path, family: str):
    for name in PARAMETERS[family]:
        rest = {key: value for key, value in PARAMETERS[family].items() if key != name}
        refused(write(tmp_path, content(family, rest)))


# What no parameter of any family may be.
NEVER = [
    -1,
    1.5,
    "x",
    "",
    "0.5",
    {},
    {"a": 1},
    {"file": 3, "sha256": 4},
    [],
    ["x"],
    ["1.0"],
    [None],
    [[]],
    [[[1.0]]],
    [[1.0], [1.0, 2.0]],
    [["1.0"]],
    [["x"]],
    [{}],
    [0.5, {"a": [1]}],
    [[10**400, 1.0]],
    -(10**400),
    "a\nb",
]


@pytest.mark.parametrize("wrong", NEVER, ids=lambda wrong: repr(wrong)[:24])
@pytest.mark.parametrize(
    ("family", "name"), [(f, name) for f, p in PARAMETERS.items() for name in p]
)
def test_a_parameter_of_the_wrong_type_is_refused(tmp_path, family: str, name: str, wrong):
    refused(write(tmp_path, content(family, PARAMETERS[family] | {name: wrong})))


@pytest.mark.parametrize("wrong", [None, True, 0, [0.5], 2.0], ids=repr)
@pytest.mark.parametrize("family", ["tree-full", "smooth-tree"])
def test_sizes_are_whole_numbers(tmp_path, family: str, wrong):
    (name,) = PARAMETERS[family]
    refused(write(tmp_path, content(family, {name: wrong})))


@pytest.mark.parametrize("number", [10**18, 10**30, 10**300])
def test_huge_sizes_are_refused_now_or_when_used(tmp_path, number: int):
    """They may load, since nothing is built yet; asking for anything must not hang or crash."""
    for family, name in (("smooth-tree", "height"), ("tree-full", "rounds"), ("sqrt", "bands")):
        try:
            made = load_mechanism(write(tmp_path, content(family, {name: number})))
            made.step(made.init(1), lambda _: np.zeros(1))
        except DpftrlError as error:
            assert "\n" not in str(error)  # noqa: PT017


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(family=st.sampled_from(sorted(PARAMETERS)), data=st.data())
def test_any_parameters_load_or_are_refused_in_one_line(family, data, tmp_path_factory):
    names = st.sampled_from([*PARAMETERS[family], "extra"])
    parameters = PARAMETERS[family] | data.draw(st.dictionaries(names, JSON, max_size=2))
    path = write(tmp_path_factory.mktemp("any"), content(family, parameters))
    try:
        load_mechanism(path)
    except DpftrlError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017


# --- The matrix beside it ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "/tmp/m.safetensors",
        "a/b.safetensors",
        "./m.safetensors",
        "..",
        ".",
        "",
        "/",
        "m.json",
        "m.safetensors/",
        "m.safetensors/.",
        "..\\m.safetensors",
        "C:m.safetensors",
        "absent.safetensors",
        "a\nb.safetensors",
        "a\x00.safetensors",
        "x" * 5000 + ".safetensors",
        "~.safetensors",
        "$HOME.safetensors",
    ],
    ids=lambda file: repr(file)[:24],
)
def test_a_reference_out_of_the_folder_or_to_nothing_is_refused(tmp_path, file: str):
    home = tmp_path / "home"
    home.mkdir()
    raw = save({"columns": COLUMNS})
    (tmp_path / "outside.safetensors").write_bytes(raw)
    (home / "m.safetensors").write_bytes(raw)
    reference = {"file": file, "sha256": hashlib.sha256(raw).hexdigest()}
    refused(write(home, content("banded", {"columns": reference})))


@pytest.mark.parametrize(
    "reference",
    [
        {"file": "m.safetensors"},
        {"sha256": "0" * 64},
        {"file": "m.safetensors", "sha256": None},
        {"file": None, "sha256": "0" * 64},
        {"file": ["m.safetensors"], "sha256": "0" * 64},
        {"file": "m.safetensors", "sha256": "0" * 64},
        {"file": "m.safetensors", "sha256": ""},
        {"file": "m.safetensors", "sha256": "RIGHT", "extra": 1},
        {"file": "m.safetensors", "sha256": "RIGHT", "a\nb": 1},
    ],
    ids=repr,
)
def test_a_reference_that_is_incomplete_or_wrong_is_refused(tmp_path, reference):
    raw = save({"columns": COLUMNS})
    (tmp_path / "m.safetensors").write_bytes(raw)
    if reference.get("sha256") == "RIGHT":
        reference = reference | {"sha256": hashlib.sha256(raw).hexdigest()}
    refused(write(tmp_path, content("banded", {"columns": reference})))


def test_a_matrix_that_was_changed_is_refused(tmp_path):
    save_mechanism(dpftrl.Banded(COLUMNS), tmp_path / "m.json")
    (matrix,) = tmp_path.glob("*.safetensors")
    raw = bytearray(matrix.read_bytes())
    raw[-1] ^= 1
    matrix.write_bytes(bytes(raw))
    refused(tmp_path / "m.json")


@pytest.mark.parametrize("cut", range(0, 120, 9))
def test_a_truncated_matrix_is_refused_even_with_the_right_checksum(tmp_path, cut: int):
    raw = save({"columns": COLUMNS})
    assert cut < len(raw)
    refused(write_matrix(tmp_path, raw[:cut]))


def with_header(text: str, data: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file: the length of the header, the header, the numbers."""
    return struct.pack("<Q", len(text) if length is None else length) + text.encode() + data


def slot(kind: str, shape: list[int], begin: int, end: int) -> str:
    entry = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    return json.dumps({"columns": entry})


HOSTILE_MATRICES = {
    "header of 2^64 - 1 bytes": with_header("{}", length=2**64 - 1),
    "header of 2^40 bytes": with_header("{}", length=2**40),
    "no header": with_header(""),
    "header is no JSON": with_header("abc"),
    "header is a list": with_header("[]"),
    "nothing inside": with_header("{}"),
    "data missing": with_header(slot("F64", [1, 2], 0, 16)),
    "data too long": with_header(slot("F64", [1, 2], 0, 16), bytes(99)),
    "offsets backwards": with_header(slot("F64", [1, 2], 16, 0), bytes(16)),
    "shape overflows": with_header(slot("F64", [2**62, 2**62], 0, 16), bytes(16)),
    "unknown type": with_header(slot("F99", [1, 2], 0, 16), bytes(16)),
    "bfloat16, of the wrong size": with_header(slot("BF16", [1, 2], 0, 2), bytes(2)),
    "float8 of zeros": with_header(slot("F8_E4M3", [1, 2], 0, 2), bytes(2)),
    "other name": save({"other": COLUMNS}),
    "no rounds": save({"columns": np.zeros((1, 0))}),
    "a vector": save({"columns": np.ones(3)}),
    "a number": save({"columns": np.array(1.0)}),
    "three axes": save({"columns": np.ones((1, 2, 3))}),
    "nan": save({"columns": np.array([[1.0, np.nan]])}),
    "infinity": save({"columns": np.array([[1.0, np.inf]])}),
    "more bands than rounds": save({"columns": np.ones((3, 2))}),
    "no diagonal": save({"columns": np.array([[0.0, 1.0]])}),
    "random": bytes(range(256)),
}


@pytest.mark.parametrize("name", HOSTILE_MATRICES)
def test_a_hostile_matrix_is_refused_even_with_the_right_checksum(tmp_path, name: str):
    refused(write_matrix(tmp_path, HOSTILE_MATRICES[name]))


@given(raw=st.binary(max_size=100))
def test_any_bytes_for_a_matrix_are_refused(raw, tmp_path_factory):
    refused(write_matrix(tmp_path_factory.mktemp("matrix"), raw))


@pytest.mark.parametrize(
    "matrix", [np.full((2, 1), 0.5), np.full((1, 1), 0.5), np.array(0.5)], ids=["2x1", "1x1", "0d"]
)
def test_a_matrix_where_a_list_belongs_is_refused(tmp_path, matrix):
    raw = save({"theta": matrix})
    (tmp_path / "m.safetensors").write_bytes(raw)
    reference = {"file": "m.safetensors", "sha256": hashlib.sha256(raw).hexdigest()}
    refused(write(tmp_path, content("blt", {"theta": reference, "omega": [0.1] * matrix.size})))


# --- Paths -------------------------------------------------------------------------------------


def test_a_missing_file_is_refused(tmp_path):
    assert "absent.json" in refused(tmp_path / "absent.json")
    refused(tmp_path / "no" / "folder" / "m.json")


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "m.json").mkdir()
    refused(tmp_path / "m.json")
    with pytest.raises(DpftrlError):
        save_mechanism(dpftrl.Independent(), tmp_path / "m.json")
    assert list((tmp_path / "m.json").iterdir()) == []
    assert [p.name for p in tmp_path.iterdir()] == ["m.json"]  # no draft is left


def test_a_folder_in_place_of_a_matrix_is_refused(tmp_path):
    (tmp_path / "m.safetensors").mkdir()
    reference = {"file": "m.safetensors", "sha256": "0" * 64}
    refused(write(tmp_path, content("banded", {"columns": reference})))


@pytest.mark.parametrize("name", ["m", "m.txt", "m.safetensors", "m.json.bak", ".json", ""])
def test_file_names_that_do_not_end_in_json_are_refused(tmp_path, name: str):
    refused(tmp_path / name)
    with pytest.raises(InvalidInput):
        save_mechanism(dpftrl.Independent(), tmp_path / name)


def test_a_path_with_a_null_byte_is_refused(tmp_path):
    refused(tmp_path / "a\x00b.json")
    with pytest.raises(DpftrlError):
        save_mechanism(dpftrl.Independent(), tmp_path / "a\x00b.json")


def test_a_path_with_a_newline_keeps_the_message_on_one_line(tmp_path):
    refused(tmp_path / "a\nb.json")


@pytest.mark.parametrize("path", [None, 5, b"m.json", ["m.json"]], ids=repr)
def test_a_value_that_is_not_a_path_is_refused(path):
    with pytest.raises((DpftrlError, TypeError)):
        load_mechanism(path)


def test_a_loop_of_links_is_refused(tmp_path):
    (tmp_path / "m.json").symlink_to(tmp_path / "m.json")
    refused(tmp_path / "m.json")


def test_a_file_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "m.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # sparse: takes no room
    refused(path)


def test_a_matrix_that_is_too_large_is_refused_before_it_is_read(tmp_path):
    with (tmp_path / "m.safetensors").open("wb") as file:
        file.truncate(2**40)
    reference = {"file": "m.safetensors", "sha256": "0" * 64}
    refused(write(tmp_path, content("banded", {"columns": reference})))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_refused(tmp_path):
    path = write(tmp_path, GOOD)
    path.chmod(0)
    refused(path)


def test_saving_into_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DpftrlError) as error:
        save_mechanism(dpftrl.Banded(COLUMNS), tmp_path / "no" / "m.json")
    assert len(str(error.value).splitlines()) == 1


def test_a_failed_save_keeps_the_previous_file(tmp_path):
    """The matrix is a second file: replacing it first would orphan the one that was saved."""
    path, held = tmp_path / "m.json", dpftrl.Banded(COLUMNS)
    save_mechanism(held, path)
    with pytest.raises((DpftrlError, TypeError)):
        save_mechanism(dpftrl.Banded(2 * COLUMNS), path, about={"what": object()})
    assert load_mechanism(path) == held


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_crash_before_either_file_is_in_place_leaves_one_that_loads(
    tmp_path, monkeypatch, suffix: str
):
    path, held, fresh = tmp_path / "m.json", dpftrl.Banded(COLUMNS), dpftrl.Banded(2 * COLUMNS)
    save_mechanism(held, path)
    replace = os.replace

    def crash(source: Path, target: Path) -> None:
        if Path(target).suffix == suffix:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(KeyboardInterrupt):
            save_mechanism(fresh, path)
    assert load_mechanism(path) in (held, fresh)
