"""What make_private says: what it planned and resumed, and one line about every mistake."""

import re
import sys
from typing import Any

import pytest
import torch
from small_private_trainings import (
    COMMIT_EVERY,
    EXAMPLES,
    INPUTS,
    LABELS,
    STEPS,
    loss_fn,
    plain_data,
    private,
    sgd,
    small_model,
    train,
)
from small_training_runs import Place
from torch import nn

from dpftrl.centralized import owner
from dpftrl.errors import InvalidInput, RunInUse, UnsafeState
from dpftrl.plan import dataset as dataset_module
from dpftrl.torch import make_private

TARGET: dict[str, Any] = {
    "folder": None,
    "clip_norm": 0.8,
    "epsilon": 4.0,
    "delta": 1e-3,
    "epochs": 2,
    "batch_size": 6,
    "sampling": "none",
}


@pytest.fixture
def place(tmp_path) -> Place:
    return Place(tmp_path / "run", tmp_path / "state")


def planned(data: Any = None, **changes: Any) -> Any:
    model = small_model()
    return make_private(model, sgd(model), data or plain_data(), **{**TARGET, **changes})


# --- Reports -------------------------------------------------------------------------------------


def test_what_was_planned_is_said_in_one_line(capsys):
    training = planned()
    noise = f"{training.plan.noise_multiplier:.4g}"
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"dpftrl: planned: blt.*, no sampling \(fixed order\), noise multiplier {noise}, 8 steps",
        line,
    )
    said: list[tuple[float | None, str]] = []
    planned(on_progress=lambda *one: said.append(one))
    assert said[-1] == (None, line.removeprefix("dpftrl: "))
    assert capsys.readouterr().err == ""


def test_where_a_run_is_resumed_is_said(place, capsys):
    with private(place, small_model()) as training:
        train(training, COMMIT_EVERY + 2)
    assert capsys.readouterr().err == ""
    with private(place, small_model()) as training:
        assert capsys.readouterr().err == (
            "dpftrl: resumed at step 3 of 12; steps 3 to 4 are repeated, with the same batches and "
            "the same noise\n"
        )
        train(training)
    with private(place, small_model()):
        assert capsys.readouterr().err == (
            f"dpftrl: resumed a run whose {STEPS} steps are all done\n"
        )


@pytest.mark.parametrize("sampling", ["auto", None])
def test_auto_is_the_default_and_says_what_it_cannot_compare(sampling, capsys, monkeypatch):
    wanted: list[Any] = []

    def quick(dataset: Any, epsilon: float, delta: float, **options: Any) -> Any:
        wanted.append(options["sampling"])
        return dataset_module.make_dataset_plan(dataset, epsilon, delta, sampling="none")

    monkeypatch.setattr(owner, "make_dataset_plan", quick)
    planned(sampling=sampling)
    assert "dp-accounting" not in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    planned(sampling=sampling)
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        "dpftrl: poisson sampling is not compared: it needs the package dp-accounting "
        "(pip install 'dpftrl[dp-accounting]')"
    )
    assert second.startswith("dpftrl: planned: ")
    assert wanted == [sampling] * 2


def test_a_run_is_resumed_with_auto_and_with_the_name_of_its_sampling(place):
    options = {"folder": place.folder, "state_folder": place.state}
    planned(**options).close()
    for sampling in ("auto", None, "none"):
        planned(**options, sampling=sampling).close()
    with pytest.raises(InvalidInput, match="sampling poisson instead of none"):
        planned(**options, sampling="poisson")


@pytest.mark.parametrize("sampling", ["poisson", "cyclic-poisson"])
def test_a_sampling_without_its_accountant_is_refused_with_the_extra(sampling, monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    message = f"sampling '{sampling}' needs the package dp-accounting: pip install 'dpftrl[dp-"
    with pytest.raises(InvalidInput, match=re.escape(message)):
        planned(sampling=sampling)


def test_a_large_delta_gives_the_warning_of_dpftrl_plan():
    with pytest.warns(UserWarning, match=r"delta 0.1 is not below 1 / dataset, 0.0417: .* example"):
        planned(delta=0.1)
    users = [n // 4 for n in range(EXAMPLES)]
    with pytest.warns(UserWarning, match="publishing one user in full") as caught:
        planned(delta=0.2, units=users, batch_size=2)
    assert caught[0].filename == __file__


# --- Bad arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": -2}, "batch_size must be a whole number of at least 1, got -2"),
        ({"batch_size": 2.5}, "batch_size must be a whole number of at least 1, got 2.5"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
        ({"epsilon": 0}, "epsilon must be a positive finite number, got 0"),
        ({"epsilon": -1.0}, "epsilon must be a positive finite number, got -1.0"),
        ({"epsilon": float("nan")}, "epsilon must be a positive finite number, got nan"),
        ({"epsilon": float("inf")}, "epsilon must be a positive finite number, got inf"),
        ({"epsilon": "4"}, "epsilon must be a positive finite number, got '4'"),
        ({"delta": 0}, "delta must be between 0 and 1, got 0"),
        ({"delta": 1.0}, "delta must be between 0 and 1, got 1.0"),
        ({"delta": "1e-5"}, "delta must be between 0 and 1, got '1e-5'"),
        (
            {"sampling": "shuffle"},
            "sampling must be one of auto, none, poisson, cyclic-poisson, balls-in-bins, got "
            "'shuffle'",
        ),
        (
            {"batch_size": 25},
            "a batch of 25 examples is larger than the data set, which has 24 examples; give a "
            "smaller batch_size",
        ),
        (
            {"batch_size": 7, "units": [n % 6 for n in range(EXAMPLES)]},
            "a batch of 7 users is larger than the data set, which has 6 users; give a smaller "
            "batch_size",
        ),
    ],
)
@pytest.mark.parametrize("sampling", ["auto", "none"])
def test_a_bad_number_is_one_line_before_anything_is_planned(changes, message, sampling):
    with pytest.raises(InvalidInput) as error:
        planned(**{"sampling": sampling, **changes})
    assert str(error.value) == message


def test_a_bad_number_is_refused_when_a_run_is_resumed(place):
    options = {"folder": place.folder, "state_folder": place.state}
    planned(**options).close()
    with pytest.raises(InvalidInput, match="epsilon must be a positive finite number, got '4'"):
        planned(**options, epsilon="4")


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("as_arrays", [False, True])
def test_a_pair_of_tensors_is_refused_with_the_right_class(kind, as_arrays):
    pair = (INPUTS.numpy(), LABELS.numpy()) if as_arrays else (INPUTS, LABELS)
    with pytest.raises(InvalidInput, match=rf"a {kind.__name__} of 2 arrays .*TensorDataset\(X, Y"):
        planned(kind(pair))


def test_a_list_of_examples_is_a_data_set():
    planned(list(plain_data())).close()
    planned([INPUTS[i] for i in range(EXAMPLES)]).close()
    with pytest.raises(InvalidInput, match="a batch of 6 examples"):  # rows of other lengths
        planned([torch.zeros(length, 3) for length in (5, 6, 7)])


# --- Bad steps -----------------------------------------------------------------------------------

STEP = r"call step\(loss_fn, batch\), where loss_fn\(model, batch\) returns the mean .* tensor; got"
RETURN = r"loss_fn\(model, batch\) must return the mean loss as a scalar tensor"


def test_a_loss_in_place_of_a_function_and_swapped_arguments_are_refused():
    model = small_model()
    with private(None, model) as training:
        batch = next(iter(training.loader))
        with pytest.raises(InvalidInput, match=f"{STEP} Tensor as loss_fn"):
            training.step(loss_fn(model, batch), batch)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match=f"{STEP} list and a function: swap"):
            training.step(batch, loss_fn)
        with pytest.raises(InvalidInput, match=f"{STEP} CrossEntropyLoss as"):
            training.step(nn.CrossEntropyLoss(), batch)
        training.step(loss_fn, batch)
        assert training.steps == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loss: loss.item(), f"{RETURN}.*got float"),
        (lambda _: None, f"{RETURN}.*got NoneType"),
        (lambda loss: loss.long(), f"{RETURN}.*got a tensor of torch.int64"),
        (lambda loss: loss.detach(), r"has no gradient.*without detach\(\)"),
        (lambda loss: loss * torch.ones(2, 2), f"{RETURN}.*shape"),
    ],
)
def test_a_loss_that_is_no_scalar_tensor_is_refused(change, message):
    with private(None, small_model()) as training:
        batch = next(iter(training.loader))
        with pytest.raises(InvalidInput, match=message):
            training.step(lambda model, rows: change(loss_fn(model, rows)), batch)
        assert training.steps == 0


def test_a_sum_of_losses_is_refused_with_the_right_reduction():
    def total(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    with private(None, small_model()) as training:
        batch = next(iter(training.loader))
        with pytest.raises(InvalidInput, match="use reduction='mean'"):
            training.step(total, batch)


# --- Files ---------------------------------------------------------------------------------------

RESTORE = "restore it from a copy, or start in another folder"


CHECKPOINT = "private/checkpoints/00000003.safetensors"


@pytest.mark.parametrize(
    ("name", "removed"),
    [
        *((name, removed) for name in ("plan.json", CHECKPOINT) for removed in (False, True)),
        ("run.json", False),
        ("private/noise.key", True),
    ],
)
def test_a_file_that_was_changed_or_removed_is_refused_with_what_to_do(place, name, removed):
    with private(place, small_model()) as training:
        train(training, COMMIT_EVERY)
    path = place.folder / name
    if removed:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(UnsafeState, match=RESTORE):
        private(place, small_model())


def test_messages_have_no_words_of_fleets(place):
    with private(place, small_model()), pytest.raises(RunInUse) as error:
        private(place, small_model())
    assert str(error.value) == "another object of this process is using this run; close() it first"
    for path in place.state.rglob("*"):
        if path.is_file():
            path.unlink()
    with pytest.raises(UnsafeState, match="trust_folder=True"):
        private(place, small_model())
