"""`simulate`: the whole run, resumed, in threads, with bad functions, and in other frameworks."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_runs import small_plan

import dpftrl
from dpftrl import InvalidInput, Sgd, simulate, verify_run
from dpftrl.errors import UnsafeState
from dpftrl.federated import Server, Settings
from dpftrl.simulation import population
from dpftrl.simulation.metrics import plot_points

ROUNDS = 4
PLAN = small_plan(rounds=ROUNDS, over_selection=1.5)
CLIENTS = {f"person {i}": np.random.default_rng(i).normal(1.0, 0.1, 3) for i in range(60)}


def train(model: dict[str, Any], data: np.ndarray, seed: int, round: int) -> dict[str, Any]:  # noqa: A002
    assert 0 <= seed < 2**32
    noise = np.random.default_rng(seed).normal(0.0, 0.01, 3)
    return {**model, "w": model["w"] + 0.5 * (data - model["w"]) + noise / (1 + round)}


def error(model: dict[str, Any]) -> dict[str, float]:
    return {"error": np.abs(model["w"] - 1).mean(), "nan": np.nan}


@pytest.fixture(autouse=True)
def plots(monkeypatch) -> list[Path]:
    """Drawing takes longer than these runs: only the paths are kept."""
    drawn: list[Path] = []
    monkeypatch.setattr("dpftrl.simulation.metrics.plot_points", lambda _, path: drawn.append(path))
    return drawn


@pytest.fixture
def run(tmp_path) -> Callable[..., dpftrl.SimulationResult]:
    def start(name: str = "run", plan: Any = PLAN, **changes: Any) -> dpftrl.SimulationResult:
        arguments: dict[str, Any] = {
            "model": {"w": np.zeros(3), "calls": np.array([0])},
            "train": train,
            "clients": CLIENTS,
            "clip_norm": 1.0,
            "evaluate": error,
            "every": 2,
            "state_folder": tmp_path / "state",
            "insecure_test_key": 1,
            **changes,
        }
        return simulate(tmp_path / name, plan, **arguments)

    return start


def checkpoint(folder: Path, rounds: int = ROUNDS) -> bytes:
    return (folder / f"private/checkpoints/{rounds:08}.safetensors").read_bytes()


def test_a_run_has_metrics_curves_statement_and_a_verified_guarantee(run, tmp_path, plots):
    result = run()
    folder = tmp_path / "run"
    assert (result.rounds, result.ended) == (ROUNDS, "all 4 rounds are done")
    assert result.epsilon == json.loads((folder / "guarantee.json").read_bytes())["epsilon"]
    assert result.model["w"].shape == (3,)
    assert result.model["calls"].tolist() == [0]
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [point["round"] for point in points] == [0, 1, 2, 3, 4]
    assert [list(point.get("evaluation", {})) for point in points] == [
        ["error"] if number % 2 == 0 else [] for number in range(5)
    ]
    assert result.evaluation["error"] == points[-1]["evaluation"]["error"]
    assert points[0]["evaluation"]["error"] == 1.0
    assert plots == [folder / "curves.png"]
    plot_points(result.points, plots[0])
    for name in ("curves.png", "statement.md", "statement.html", "model_structure.json"):
        assert (folder / name).exists(), name
    assert verify_run(folder, tmp_path / "state").passed
    assert repr(result).startswith("SimulationResult(4 rounds, epsilon 6.146 at delta 1e-06, error")


def test_a_run_is_a_run_of_the_server_with_the_same_bits(run, tmp_path):
    """The oracle: a loop over the server and plain NumPy, as docs/training.md shows it."""
    result = run(train=lambda model, data: {**model, "w": 0.5 * (model["w"] + data)})
    settings = Settings(clip_norm=1.0, optimizer=Sgd(learning_rate=1.0, momentum=0.9))
    place = tmp_path / "by hand"
    fleet = population.Population(tuple(CLIENTS), 0, drop_out=0, straggler_share=0, least=1, most=1)
    with Server.create(
        place,
        PLAN,
        settings,
        {"w": np.zeros(3)},
        state_folder=tmp_path / "state",
        insecure_test_key=1,
    ) as server:
        while not server.ended():
            current = server.begin(list(CLIENTS), float(server.rounds))
            for name in fleet.reporting(current.clients, current.attempt)[:3]:
                given = server.arrays()["w"].astype(np.float64)
                change = (0.5 * (given + CLIENTS[name]) - given).astype(np.float32)
                current.report(name, {"w": change}, current.attempt)
            server.commit(current)
        assert result.model["w"].tolist() == server.arrays()["w"].tolist()


def test_threads_do_not_change_a_bit(run, tmp_path):
    for workers in (1, 3):
        run(f"{workers} workers", workers=workers)
    assert checkpoint(tmp_path / "1 workers") == checkpoint(tmp_path / "3 workers")


@pytest.mark.parametrize("killed_in", [1, 5, 11])
def test_a_killed_run_ends_with_the_same_bits(run, tmp_path, killed_in):
    """The process dies within a client's training; the first call is a trial of one client."""
    run("whole")
    calls = 0

    def deadly(model, data, seed, round):  # noqa: A002
        nonlocal calls
        calls += 1
        if calls > killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(model, data, seed, round)

    child = os.fork()
    if child == 0:
        run("killed", train=deadly)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (tmp_path / "killed" / "private" / "journal.jsonl").exists()
    result = run("killed")
    assert result.rounds == ROUNDS
    assert checkpoint(tmp_path / "whole") == checkpoint(tmp_path / "killed")
    metrics = [(tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "killed")]
    assert metrics[0] == metrics[1]


def test_a_run_that_has_ended_gives_its_result_again(run, tmp_path):
    first = run()
    before = checkpoint(tmp_path / "run")

    def never(*_: Any) -> None:
        raise AssertionError

    again = run(train=never)
    assert again.model["w"].tolist() == first.model["w"].tolist()
    assert again.points == first.points
    assert checkpoint(tmp_path / "run") == before


def test_an_error_within_training_is_passed_on_and_the_run_resumes(run, tmp_path):
    run("whole")
    calls = 0

    def failing(model, data, seed, round):  # noqa: A002
        nonlocal calls
        calls += 1
        if calls == 6:
            raise ZeroDivisionError("mine")
        return train(model, data, seed, round)

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        run(train=failing)
    assert "in round 1" in caught.value.__notes__[0]
    assert (tmp_path / "run" / "statement.md").exists()  # one round was released
    assert run().rounds == ROUNDS
    assert checkpoint(tmp_path / "run") == checkpoint(tmp_path / "whole")


def returning(value: Any) -> Callable[..., Any]:
    return lambda *_: value


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"clients": {}}, "clients is empty"),
        ({"clients": list(CLIENTS.values())}, "clients must be a dict"),
        ({"clients": dict.fromkeys(range(60))}, "names of clients must be texts"),
        ({"clients": {**CLIENTS, "person 1 ": None}}, "person 1"),
        ({"clients": dict(list(CLIENTS.items())[:59])}, "plan is for 60 clients, got 59"),
        ({"plan": "plan.json"}, "plan must be"),
        ({"train": returning(None)}, "returned None"),
        ({"train": returning({"v": np.zeros(3)})}, "without 'w'"),
        ({"train": returning({"w": np.zeros(4)})}, r"shape \(4,\)"),
        ({"train": returning({"w": np.full(3, np.nan)})}, "NaN or infinity in 'w'"),
        ({"train": lambda model: model}, "train must work as train"),
        ({"train": 3}, "train must be a function"),
        ({"evaluate": returning("good")}, "evaluate must return"),
        ({"evaluate": returning({"a": np.zeros(2)})}, "for 'a'"),
        ({"clip_norm": -1.0}, "clip"),
        ({"server": Sgd(momentum=2.0)}, "momentum"),
        ({"workers": 0}, "workers"),
        ({"every": 0}, "every"),
        ({"seed": -1}, "seed"),
        ({"drop_out": 2.0}, "drop_out"),
        ({"frozen": ["v"]}, "frozen names 'v'"),
        ({"model": {"w": np.zeros(3), "b": 1j}}, "complex"),
        ({"start": "missing.safetensors"}, "missing.safetensors"),
    ],
)
def test_bad_arguments_are_refused_and_leave_nothing_behind(run, tmp_path, changes, reason):
    with pytest.raises(InvalidInput, match=reason) as caught:
        run(**changes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "state").exists()


def test_an_error_in_the_first_call_of_a_function_leaves_nothing_behind(run, tmp_path):
    def failing(*_: Any) -> None:
        raise KeyError("mine")

    for name in ("train", "evaluate"):
        with pytest.raises(KeyError, match="mine"):
            run(**{name: failing})
        assert not (tmp_path / "run").exists()


def test_a_model_that_does_not_fit_in_a_later_round_is_refused_and_the_run_resumes(run, tmp_path):
    def growing(model, data, round):  # noqa: A002, ARG001
        return {**model, "w": np.zeros(3 + round)}

    with pytest.raises(InvalidInput, match=r"in round 1, returned 'w' with shape \(4,\)"):
        run(train=growing)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    assert run().rounds == ROUNDS


def test_updates_with_nan_count_as_zeros_and_the_user_hears_of_it_once(run, tmp_path):
    def partly_nan(model, data, round):  # noqa: A002
        is_nan = round and data[0] > 1
        return {**model, "w": np.full(3, np.nan) if is_nan else 0.5 * (model["w"] + data)}

    def partly_zero(model, data, round):  # noqa: A002
        return model if round and data[0] > 1 else {**model, "w": 0.5 * (model["w"] + data)}

    with pytest.warns(UserWarning, match="count as zeros") as caught:
        run("nan", train=partly_nan)
    assert len(caught) == 1
    run("zero", train=partly_zero)
    assert checkpoint(tmp_path / "nan") == checkpoint(tmp_path / "zero")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"plan": small_plan(rounds=5, over_selection=1.5)}, "another plan"),
        ({"clip_norm": 2.0}, "clip_norm 1.0, got 2.0"),
        ({"server": Sgd()}, "server Sgd"),
        ({"seed": 3}, "seed 0, got 3"),
        ({"model": {"w": np.zeros(4), "calls": np.array([0])}}, r"w \(3,\), got w \(4,\)"),
        ({"model": {"w": np.zeros(3, np.float32), "calls": np.array([0])}}, "other types"),
        ({"model": {"w": np.zeros(3), "calls": np.array([1])}}, "'calls', which is not trained"),
    ],
)
def test_a_folder_with_another_run_is_refused_and_not_changed(run, tmp_path, changes, reason):
    run()
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(InvalidInput, match=reason):
        run(**changes)
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


def test_a_run_of_another_program_and_files_of_the_user_are_refused(run, tmp_path):
    settings = Settings(clip_norm=1.0)
    state = tmp_path / "state"
    Server.create(tmp_path / "run", PLAN, settings, {"w": np.zeros(3)}, state_folder=state).close()
    with pytest.raises(InvalidInput, match=r"dpftrl\.simulate did not create"):
        run()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "plan.json").write_text("mine")
    with pytest.raises(InvalidInput, match=r"plan\.json, which a new run would replace"):
        run("mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["plan.json"]


def test_a_structure_file_that_was_changed_is_refused(run, tmp_path):
    run()
    path = tmp_path / "run" / "model_structure.json"
    path.write_text(path.read_text().replace("int64", "int32"))
    with pytest.raises(UnsafeState, match="not what it was"):
        run()


def test_a_run_that_starts_from_an_exported_model_is_composed(run, tmp_path):
    first = run()
    model = tmp_path / "model.safetensors"
    with Server.resume(tmp_path / "run", state_folder=tmp_path / "state") as server:
        server.export(model)
    second = run("second", start=model, evaluate=lambda model: model["w"][0])
    assert second.epsilon > first.epsilon * 1.2
    assert second.points[0].evaluation == {"score": pytest.approx(first.model["w"][0])}
    with pytest.raises(InvalidInput, match="start model does not fit"):
        run("third", model={"v": np.zeros(3)}, start=model, train=lambda model, _: model)


def test_a_budget_and_drop_outs_and_no_evaluation(run):
    whole = run("whole", evaluate=None)
    assert whole.evaluation == {}
    half = run("half", budget=0.95 * whole.epsilon, drop_out=0.3)
    assert 0 < half.rounds < ROUNDS
    assert "budget" in half.ended


def test_messages_show_the_progress(run, monkeypatch, capsys):
    monkeypatch.setattr("dpftrl.simulation.own_model.PATIENCE", 0.0)
    run()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == ROUNDS
    assert lines[-1].startswith("dpftrl: round 4/4  error 1.204  epsilon 6.146")
    seen: list[int] = []
    run("callback", on_round=lambda progress: seen.append(progress.point.round))
    assert seen == [1, 2, 3, 4]
    assert capsys.readouterr().err == ""


def test_modules_of_pytorch_are_trained_and_given_back(run):
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Linear(3, 1, bias=False), torch.nn.BatchNorm1d(1))

    before = module[0].weight.detach().clone()

    def fit(model, data):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model[0](torch.tensor(data, dtype=torch.float32)).pow(2).sum()
        loss.backward()
        optimizer.step()
        model[1].num_batches_tracked += 1
        return model

    def norm(model):
        return float(model[0].weight.detach().norm())

    with pytest.warns(UserWarning, match="batch normalisation stay"):
        result = run("module", model=module, train=fit, evaluate=norm)
    assert type(result.model) is type(module)
    assert result.evaluation == {"score": pytest.approx(norm(result.model))}
    assert result.model[1].num_batches_tracked == 0
    assert torch.equal(module[0].weight, before)


def test_equinox_modules_are_trained_and_given_back(run):
    jax = pytest.importorskip("jax")
    eqx = pytest.importorskip("equinox")
    linear = eqx.nn.Linear(3, 1, key=jax.random.key(0))

    @eqx.filter_jit
    def fit(model, data):
        gradient = eqx.filter_grad(lambda m: jax.numpy.sum(m(data) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradient))

    clients = {name: jax.numpy.asarray(data) for name, data in CLIENTS.items()}
    result = run(model=linear, train=fit, clients=clients, evaluate=lambda m: m.weight[0, 0])
    assert isinstance(result.model, eqx.nn.Linear)
    assert result.model(jax.numpy.ones(3)).shape == (1,)


def test_narrow_types_give_updates_against_what_the_client_received(run, tmp_path):
    """A client that changes nothing adds nothing, although its model is a rounded one."""
    torch = pytest.importorskip("torch")
    half = {"w": torch.full((3,), 0.3, dtype=torch.bfloat16)}
    run("half", model=half, train=lambda model, _: model, evaluate=None)
    full = {"w": half["w"].to(torch.float32)}
    run("full", model=full, train=lambda model, _: model, evaluate=None)
    assert checkpoint(tmp_path / "half") == checkpoint(tmp_path / "full")


WITHOUT_EXTRAS = """
import sys
sys.modules.update(dict.fromkeys(("polars", "matplotlib", "tensorboardX")))
import numpy as np
import dpftrl
plan = dpftrl.make_plan(population=30, report_goal=3, rounds=4, epsilon=8.0, delta=1e-3)
result = dpftrl.simulate(
    "run",
    plan,
    model=np.zeros(2),
    train=lambda model, data: model + data,
    clients={f"person {i}": np.ones(2) for i in range(30)},
    clip_norm=1.0,
)
assert result.rounds == 4, result
assert result.statement is not None
from dpftrl.cli import start
sys.argv = ["dpftrl", "statement", "run"]
start()
"""


def test_a_run_and_its_statement_need_no_extra(tmp_path):
    environment = {**os.environ, "DPFTRL_STATE": str(tmp_path / "state")}
    command = [sys.executable, "-c", WITHOUT_EXTRAS]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert (tmp_path / "run" / "statement.html").exists()
    assert not (tmp_path / "run" / "curves.png").exists()
    said = "dpftrl: no curves.png will be drawn: pip install 'dpftrl[plot]'"
    assert ran.stderr.splitlines().count(said) == 1


def test_an_error_of_the_statement_does_not_replace_an_interrupt(run, monkeypatch):
    def fails(*_args: Any, **_named: Any) -> None:
        raise InvalidInput("no room on the disk")

    def interrupted(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("dpftrl.simulation.loop.statement_of_files", fails)
    with pytest.raises(KeyboardInterrupt) as caught:
        run(on_round=interrupted)
    assert "no room on the disk" in caught.value.__notes__[0]
