"""Exported models predict as plain NumPy says, without their text; altered files are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("equinox")

from exported import DESCRIPTION, WORDS, altered, released_run

from dpftrl import InvalidInput, load_model
from dpftrl.errors import UnsafeState
from dpftrl.federated import Server, StartModel
from dpftrl.models import read_description


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    released_run(folder)
    return folder


@pytest.fixture(scope="module")
def model(place):
    return load_model(place / "model.safetensors")


def by_hand(arrays: dict, numbers: list[int]) -> np.ndarray:
    """The window model of two words in plain NumPy: probabilities of all words."""
    last = [*[0] * 2, *numbers][-2:]
    inputs = np.concatenate([arrays["embedding.weight"][i] for i in last]).astype(np.float64)
    hidden = np.tanh(arrays["hidden.weight"] @ inputs + arrays["hidden.bias"])
    scores = (arrays["output.weight"] @ hidden + arrays["output.bias"])[4:]
    return np.exp(scores) / np.exp(scores).sum()


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("", [1]),
        ("you", [1, 5]),
        ("See YOU", [1, 6, 5]),
        ("later. see qwertz", [1, 6, 3]),
        ("see you. ", [1]),
        ("the the the the the the the you see", [1, 5, 6]),
    ],
)
def test_predictions_are_those_of_the_model_in_plain_numpy(model, text, numbers):
    expected = by_hand(model.arrays, numbers)
    found = model.predict(text, top=10)
    assert [one.word for one in found] == [WORDS[i] for i in np.argsort(-expected)]
    assert [one.probability for one in found] == pytest.approx(sorted(expected)[::-1], rel=1e-5)
    assert sum(one.probability for one in found) == pytest.approx(1)
    assert model.predict(text, top=2) == found[:2]


def test_a_model_states_its_guarantee_and_its_runs(model, place):
    start = StartModel.load(place / "model.safetensors")
    assert (model.rounds, model.delta) == (1, 1e-6)
    assert model.epsilon == pytest.approx(start.start.epsilon(1e-6))
    assert [run.population for run in model.runs] == ["*friends*"]
    assert model.description == DESCRIPTION
    assert model.unknown_words("see qwertz and you") == ["qwertz", "and"]
    assert repr(model).startswith("ReleasedModel(window, ")


def test_a_folder_is_loaded_by_its_model(place, tmp_path, model):
    (tmp_path / "model.safetensors").write_bytes((place / "model.safetensors").read_bytes())
    assert load_model(tmp_path).predict("see") == model.predict("see")


def test_the_description_of_a_run_is_sealed(tmp_path):
    folder = released_run(tmp_path)
    path = folder / "model.json"
    path.write_bytes(path.read_bytes().replace(b'"soon"', b'"sooo"'))
    with pytest.raises(UnsafeState, match=r"model\.json is not what it was"):
        Server.resume(folder, state_folder=tmp_path / "state")


def test_a_model_without_a_description_has_arrays_and_a_clear_message(tmp_path):
    released_run(tmp_path, description=None)
    found = load_model(tmp_path / "model.safetensors")
    assert found.description is None
    assert "output.bias" in found.arrays
    with pytest.raises(InvalidInput, match="does not say what kind of model"):
        found.predict("see")


def test_an_export_of_version_0_1_has_a_clear_message(place):
    def strip(metadata):
        for name in ("dpftrl_provenance", "dpftrl_model"):
            del metadata[name]

    found = load_model(altered(place / "model.safetensors", metadata=strip))
    with pytest.raises(InvalidInput, match=r"exported by dpftrl 0\.1"):
        found.predict("see")


def described(**changes) -> str:
    content = json.loads(DESCRIPTION.content())
    for name, value in changes.items():
        section, _, key = name.rpartition("__")
        (content[section] if section else content)[key] = value
    return json.dumps(content)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"words": []}, "0 words"),
        ({"words": ["a", "a"]}, "every word once"),
        ({"words": ["a b"]}, "spaces"),
        ({"version": 2}, "install a newer dpftrl"),
        ({"format": "other"}, "cannot be read"),
        ({"extra": 1}, "unknown field"),
        ({"architecture__sizes": {"embedding": -1}}, "size 'embedding' is -1"),
        ({"architecture__sizes": {"embedding": 10**12}}, "makes no sense"),
        ({"preprocessing__cut": "os.system"}, "splits text by 'os.system'"),
        ({"preprocessing__sentence_length": 0}, "0 words"),
        ({"preprocessing__tokens": {"pad": 1}}, "special tokens"),
    ],
)
def test_descriptions_that_make_no_sense_are_refused_when_loading(place, changes, reason):
    text = described(**changes)
    with pytest.raises(InvalidInput, match=reason):
        read_description(text, "model")
    path = altered(place / "model.safetensors", metadata=lambda m: m.update(dpftrl_model=text))
    with pytest.raises(InvalidInput, match=reason) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"words": list("abcdef")}, "shape"),
        ({"architecture__name": "transformer"}, "model must be one of"),
        ({"architecture__sizes": {"depth": 3}}, "'depth'"),
        ({"architecture__sizes": {"embedding": 2**30, "hidden": 2**30}}, "damaged"),
        ({"architecture__sizes": {"embedding": 0}}, "embedding"),
    ],
)
def test_descriptions_of_other_models_are_refused_without_using_memory(place, changes, reason):
    text = described(**changes)
    path = altered(place / "model.safetensors", metadata=lambda m: m.update(dpftrl_model=text))
    with pytest.raises(InvalidInput, match=reason) as caught:
        load_model(path).predict("see")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"epsilon": "0.5"}, "was changed: it states epsilon 0.5"),
        ({"epsilon": "nan"}, "damaged"),
        ({"epsilon": "x"}, "no number"),
        ({"delta": "0"}, "damaged"),
        ({"rounds": "0"}, "damaged"),
        ({"dpftrl_provenance": "{}"}, "provenance cannot be read"),
        ({"dpftrl_model": "\x1b[31m{"}, "description cannot be read"),
    ],
)
def test_metadata_that_was_changed_is_refused(place, metadata, reason):
    path = altered(place / "model.safetensors", metadata=lambda found: found.update(metadata))
    with pytest.raises(InvalidInput, match=reason) as caught:
        load_model(path)
    assert str(caught.value).isprintable()


def test_damaged_arrays_and_other_files_are_refused(place, tmp_path):
    def spoil(arrays):
        arrays["output.bias"][0] = np.nan

    with pytest.raises(InvalidInput, match="NaN or infinity"):
        load_model(altered(place / "model.safetensors", arrays=spoil))
    other = altered(place / "model.safetensors", metadata=dict.clear)
    with pytest.raises(InvalidInput, match="not a model that dpftrl exported"):
        load_model(other)
    content = (place / "model.safetensors").read_bytes()
    for number, broken in enumerate((b"", content[:100], b"\xff" * 64, content[:-4])):
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(broken)
        with pytest.raises(InvalidInput, match="is not a model"):
            load_model(path)
    with pytest.raises(InvalidInput, match="missing"):
        load_model(tmp_path / "missing.safetensors")
