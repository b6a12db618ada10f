"""Models of all frameworks come back as they were given, and clients cannot change each other's."""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest

from dpftrl.errors import InvalidInput
from dpftrl.simulation.structure import ModelStructure


class Layer(NamedTuple):
    weight: np.ndarray
    bias: np.ndarray


def numbers(structure: ModelStructure) -> dict[str, np.ndarray]:
    """Other numbers than those at the start."""
    return {name: array + 1.5 for name, array in structure.start.items()}


def test_nested_containers_of_numpy_arrays_come_back_in_the_same_structure():
    model = {
        "layers": [Layer(np.ones((2, 3)), np.zeros(2, np.float16)), (np.ones(1, np.float32),)],
        "steps": np.array([3, 4]),
        "name": "mine",
        "rate": 0.5,
        "nothing": None,
    }
    structure = ModelStructure.of(model)
    assert structure.layout.names == ("layers.0.bias", "layers.0.weight", "layers.1.0")
    assert {leaf.name for leaf in structure.kept} == {"steps", "name", "rate"}
    built = structure.build(numbers(structure))
    assert built.keys() == model.keys()
    assert isinstance(built["layers"][0], Layer)
    assert isinstance(built["layers"][1], tuple)
    assert built["layers"][0].weight.dtype == np.float64
    assert built["layers"][0].bias.dtype == np.float16
    assert built["layers"][0].weight.tolist() == [[2.5] * 3] * 2
    assert (built["name"], built["rate"], built["nothing"]) == ("mine", 0.5, None)
    assert built["steps"].tolist() == [3, 4]
    arrays = structure.arrays_of(built, "train")
    assert {name: array.tolist() for name, array in arrays.items()} == {
        name: array.tolist() for name, array in numbers(structure).items()
    }


def test_a_single_array_is_a_model():
    structure = ModelStructure.of(np.zeros(3))
    assert structure.layout.names == ("model",)
    assert structure.build({"model": np.ones(3)}).tolist() == [1, 1, 1]


def test_what_a_client_changes_in_place_changes_nothing_else():
    model = {"w": np.zeros(2), "table": np.zeros(2, np.int64)}
    structure = ModelStructure.of(model)
    server = {"w": np.zeros(2, np.float32)}
    first = structure.build(server)
    first["w"] += 7
    first["table"] += 7
    model["table"] += 7  # the user's own array, after the call
    second = structure.build(server)
    assert second["w"].tolist() == server["w"].tolist() == [0, 0]
    assert second["table"].tolist() == [0, 0]


@pytest.mark.parametrize("frozen", ["embedding", "embedding.*", ["embedding.weight"]])
def test_frozen_parts_are_named_by_part_or_pattern(frozen):
    model = {"embedding": {"weight": np.ones(2)}, "out": np.zeros(2), "embedding2": np.zeros(1)}
    structure = ModelStructure.of(model, frozen)
    assert structure.layout.names == ("embedding2", "out")
    assert structure.build(numbers(structure))["embedding"]["weight"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("model", "frozen", "reason"),
    [
        ({}, (), "nothing to train"),
        ({"w": np.zeros(2, np.int32)}, (), "nothing to train"),
        ({"w": np.zeros(2)}, ["w"], "nothing to train"),
        ({"w": np.zeros(2)}, ["v"], "frozen names 'v'"),
        ({"a": {"b": np.zeros(1)}, "a.b": np.zeros(1)}, (), "two parts with the name 'a.b'"),
        ({"w": np.zeros(2, np.complex64)}, (), "complex"),
        ({"w": np.float32(1.0), "v": np.zeros(1)}, (), "single number"),
        ({"w": np.array([np.nan])}, (), "finite"),
    ],
)
def test_models_that_cannot_be_trained_are_refused(model, frozen, reason):
    with pytest.raises(InvalidInput, match=reason):
        ModelStructure.of(model, frozen)


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "returned None"),
        ({"w": np.zeros(2)}, "without 'b'"),
        ({"w": np.zeros(2), "b": np.zeros(1), "c": np.zeros(1)}, "with 'c'"),
        ({"w": np.zeros(3), "b": np.zeros(1)}, r"shape \(3,\); return it with shape \(2,\)"),
        ({"w": np.zeros(2, int), "b": np.zeros(1)}, "'w' as int64"),
        ({"w": 1.0, "b": np.zeros(1)}, "'w' as float"),
        (np.zeros(2), "ndarray without 'b', 'w'"),
    ],
)
def test_models_that_come_back_changed_are_refused(returned, reason):
    structure = ModelStructure.of({"w": np.zeros(2), "b": np.zeros(1), "n": 3})
    with pytest.raises(InvalidInput, match=reason):
        structure.arrays_of(returned, "train")
    structure.arrays_of({"w": np.zeros(2), "b": np.zeros(1)}, "train")  # kept parts may be missing


def test_a_state_dict_comes_back_as_one():
    torch = pytest.importorskip("torch")
    layers = (torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    module = torch.nn.Sequential(*layers).to(torch.float64)
    state = module.state_dict()
    structure = ModelStructure.of(state)
    assert structure.layout.names == ("0.bias", "0.weight", "1.bias", "1.weight")
    assert structure.statistics == ["1.running_mean", "1.running_var"]
    built = structure.build(numbers(structure))
    assert isinstance(built, OrderedDict)
    assert built._metadata == state._metadata
    assert built["0.weight"].dtype == torch.float64
    assert built["1.num_batches_tracked"].dtype == torch.int64
    module.load_state_dict(built)
    assert module[0].bias.tolist() == built["0.bias"].tolist()


def test_a_module_comes_back_as_a_module_and_keeps_what_is_not_trained():
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(
        torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False), torch.nn.BatchNorm1d(4)
    )
    module[0].weight.requires_grad_(False)
    structure = ModelStructure.of(module)
    assert structure.layout.names == ("1.weight", "2.bias", "2.weight")
    built = structure.build(numbers(structure))
    assert type(built) is type(module)
    assert torch.equal(built[0].weight, module[0].weight)
    assert not built[0].weight.requires_grad
    assert torch.allclose(built[1].weight, module[1].weight + 1.5)
    assert built[1].weight.requires_grad
    built[2].running_mean += 1
    built[2].num_batches_tracked += 1
    assert structure.build(structure.start)[2].running_mean.tolist() == [0] * 4
    assert structure.arrays_of(built, "train").keys() == structure.start.keys()


def test_tied_weights_stay_tied_in_a_module_and_are_refused_in_a_state_dict():
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Embedding(4, 3), torch.nn.Linear(3, 4, bias=False))
    module[1].weight = module[0].weight
    structure = ModelStructure.of(module)
    assert structure.layout.names == ("0.weight",)
    built = structure.build(numbers(structure))
    assert built[1].weight is built[0].weight
    with pytest.raises(InvalidInput, match="tied weights"):
        ModelStructure.of(module.state_dict())


def test_bfloat16_tensors_are_trained_in_float32_and_come_back_rounded():
    torch = pytest.importorskip("torch")
    structure = ModelStructure.of({"w": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)})
    built = structure.build({"w": np.array([1.001, 2.5], np.float32)})
    assert built["w"].dtype == torch.bfloat16
    assert built["w"].tolist() == [1.0, 2.5]
    assert structure.arrays_of(built, "train")["w"].tolist() == [1.0, 2.5]


def test_pytrees_of_jax_and_equinox_modules_come_back_as_they_were():
    jax = pytest.importorskip("jax")
    eqx = pytest.importorskip("equinox")
    mlp = eqx.nn.MLP(2, 1, width_size=3, depth=1, key=jax.random.key(0))
    model: Any = {"mlp": mlp, "key": jax.random.key(1), "half": jax.numpy.ones(2, "bfloat16")}
    structure = ModelStructure.of(model)
    assert "mlp.layers.0.weight" in structure.layout.names
    assert "half" in structure.layout.names
    assert {"key"} <= {leaf.name for leaf in structure.kept}
    built = structure.build(numbers(structure))
    assert isinstance(built["mlp"], eqx.nn.MLP)
    assert jax.tree.structure(built) == jax.tree.structure(model)
    assert built["half"].dtype == model["half"].dtype
    assert np.allclose(built["mlp"].layers[0].weight, mlp.layers[0].weight + 1.5)
    assert built["mlp"](jax.numpy.ones(2)).shape == (1,)  # the activation is there
    assert structure.arrays_of(built, "train").keys() == structure.start.keys()
    assert all(len(leaf.digest()) == 64 for leaf in structure.kept)
