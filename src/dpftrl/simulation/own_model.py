"""`simulate`: private federated training of your own model, in any framework, in one call."""

import hashlib
import inspect
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, cast, final

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Float32Vector, Layout
from dpftrl._internal.checks import whole_number
from dpftrl._internal.formatting import rounded_up
from dpftrl._internal.storage import read_json
from dpftrl.adaptive_clipping import ClipNorm
from dpftrl.errors import InvalidInput
from dpftrl.federated import Optimizer, RunFolder, Server, Settings, Sgd, StartModel
from dpftrl.federated.eligibility import Eligibility, Rules
from dpftrl.federated.metrics import Point, finite_numbers_of
from dpftrl.noise import NoiseKey
from dpftrl.plan import Plan
from dpftrl.simulation.loop import Measured, TrainingLoop, TrainingProgress, refuse_other_files
from dpftrl.simulation.population import Population, in_parallel
from dpftrl.simulation.structure import ModelStructure
from dpftrl.statement.statement import Statement

PathLike = str | os.PathLike[str]
# The file of a run that says how the user's model is taken apart.
STRUCTURE = "model_structure.json"
# Arguments that a training function gets if it has a parameter of this name.
OPTIONAL_ARGUMENTS = ("seed", "round")
# The name of the metric if the evaluation returns a single number.
SCORE = "score"
# Seconds between two lines about the progress.
PATIENCE = 2.0


@final
@dataclass(frozen=True, eq=False)
class SimulationResult:
    """The result of `simulate`.

    Attributes:
        model: The last released model, in the structure of the model that was given. It may be
            published.
        rounds: Number of rounds released.
        epsilon: Epsilon of all released rounds, including earlier runs that are composed.
        delta: Delta of the guarantee.
        ended: Why there is no further round.
        points: The metrics, one point per round; `evaluation` of a point is what your function
            returned for it.
        folder: Folder of the run.
        statement: The privacy statement, which is also in the folder.
    """

    model: Any
    rounds: int
    epsilon: float
    delta: float
    ended: str
    points: tuple[Point, ...]
    folder: Path
    statement: Statement | None

    @property
    def evaluation(self) -> dict[str, float]:
        """The last metrics that your function returned; empty without an evaluation."""
        last = (point.evaluation for point in reversed(self.points) if point.evaluation)
        return dict(next(last, dict[str, float]()))

    def __repr__(self) -> str:
        metrics = "".join(f", {name} {value:.4g}" for name, value in self.evaluation.items())
        return (
            f"SimulationResult({self.rounds:,} rounds, epsilon {rounded_up(self.epsilon)} at delta "
            f"{self.delta:g}{metrics}, {str(self.folder)!r})"
        )


def simulate(
    folder: PathLike,
    plan: Plan,
    *,
    model: Any,
    train: Callable[..., Any],
    clients: Mapping[str, Any],
    clip_norm: ClipNorm,
    server: Optimizer | None = None,
    evaluate: Callable[[Any], Any] | None = None,
    every: int = 10,
    frozen: Sequence[str] = (),
    start: StartModel | PathLike | None = None,
    workers: int = 1,
    seed: int = 0,
    drop_out: float = 0.0,
    budget: float | None = None,
    population: str | None = None,
    snapshot_every: int = 20,
    on_round: Callable[[TrainingProgress], None] | None = None,
    state_folder: PathLike | None = None,
    trust_folder: bool = False,
    insecure_test_key: int | None = None,
) -> SimulationResult:
    """Train a model of any framework on simulated clients, with a privacy guarantee.

    If `folder` holds a run, it is resumed: call `simulate` with the same arguments after a crash.
    A run that has ended is not changed, and its result is returned. It needs no extra besides your
    framework; with the extra `plot`, the run also gets curves.

    Args:
        folder: Folder for the files of the run.
        plan: Mechanism, noise and fleet, for example from `make_plan`.
        model: The model to start from, which must not depend on the clients' data: a NumPy array,
            a PyTorch module or `state_dict`, a pytree of JAX such as an Equinox module, or dicts,
            lists and tuples of these. Arrays of floating-point numbers are trained, in float32.
            Everything else stays as it is: see `frozen`.
        train: Called as `train(model, data)` with a copy of the model and the data of one client;
            returns the trained model (not the difference), in the same structure. If it has
            parameters of these names, it also gets `seed`, a number for this client and round, and
            `round`, the number of rounds before this one.
        clients: The data of each client, by name. The values are only passed on to `train`.
        clip_norm: Every client's change of the model is clipped to this L2 norm. `"adaptive"`, or
            an `AdaptiveClipping` with its options: the norm follows a quantile of the norms.
        server: Optimizer of the server; by default `Sgd(learning_rate=1.0, momentum=0.9)`.
        evaluate: Called as `evaluate(model)` with a released model; returns a number, or numbers
            by name. They are written to `metrics.jsonl`, which is meant to be published: use data
            that is public, or that is from people who agree.
        every: Rounds between two evaluations.
        frozen: Names of parts of the model that are not trained, such as `embedding` or
            `layers.0.*`. In a `torch.nn.Module`, parameters with `requires_grad=False` and buffers
            are never trained; nor are running statistics of batch normalisation.
        start: An exported model, whose arrays replace those of `model`. The private runs that
            trained it are composed with this one.
        workers: Number of threads that call `train`. The result does not depend on it if `train`
            depends only on its arguments and may be called by several threads.
        seed: Seed of the cohorts, and of the seeds that `train` gets. It has nothing to do with
            the noise.
        drop_out: Share of the contacted clients that never report.
        budget: The run stops before epsilon would exceed this value.
        population: Your label for the people of this run, which is published with the model.
        snapshot_every: Rounds between two saved noise states.
        on_round: Called after every round; by default there are messages on stderr.
        state_folder: Folder for the witness of the run, outside `folder`; by default $DPFTRL_STATE,
            or the user's state folder.
        trust_folder: Resume even if the witness is missing.
        insecure_test_key: Seed of a noise key that anybody can guess. For tests only.

    Raises:
        InvalidInput: The arguments do not fit together, or not to the run in the folder; or a
            function returned something unusable. What `train` and `evaluate` raise is passed on,
            with a note that says where it happened; the run can be resumed.

    Guarantees:
        See `Server`: no client adds more than the clip norm to a sum, min-sep is enforced, and
        the model of a round is used for nothing before the round is on the disk. An update with
        NaN counts as zeros. With a `train` that depends only on its arguments, a run that was
        killed at any moment ends with the same bits as one that was not.
    """
    root = Path(folder)
    names = _client_names(clients)
    _check_plan(plan, len(names))
    structure = ModelStructure.of(model, frozen)
    settings = Settings(
        clip_norm=clip_norm,
        optimizer=Sgd(learning_rate=1.0, momentum=0.9) if server is None else server,
        budget=budget,
        seed=seed,
        snapshot_every=snapshot_every,
        population=population,
    )
    settings.check(plan.covering_rounding())
    fleet = Population(names, seed, drop_out=drop_out, straggler_share=0.0, least=1.0, most=1.0)
    trained = _OwnClients(structure, train, clients, seed, whole_number("workers", workers))
    whole_number("every", every)
    _warn_about_statistics(structure)
    if find_spec("matplotlib") is None:
        sys.stderr.write("dpftrl: no curves.png will be drawn: pip install 'dpftrl[plot]'\n")
    place = None if state_folder is None else Path(state_folder)
    measure = None
    is_new = not RunFolder(root).exists
    if is_new:
        RunFolder(root).refuse_if_begun()
        refuse_other_files(root, STRUCTURE)
        first = _start_arrays(structure, start)
        arrays = first.arrays if isinstance(first, StartModel) else first
        before = None if evaluate is None else _evaluated(evaluate, structure.build(arrays), 0)
        trained.try_one(structure.layout.flat(arrays), names[0])
        run = Server.create(
            root,
            plan,
            settings,
            first,
            state_folder=place,
            insecure_test_key=insecure_test_key,
            files={STRUCTURE: msgspec.json.format(msgspec.json.encode(_file(structure)))},
        )
    else:
        run, before = Server.resume(root, state_folder=place, trust_folder=trust_folder), None
    with run:
        if not is_new:
            _check_same(run, plan, settings, structure)

        def measured() -> Measured:
            assert evaluate is not None
            if run.rounds == 0 and before is not None:
                return Measured(evaluation=before)
            built = structure.build(run.arrays())
            return Measured(evaluation=_evaluated(evaluate, built, run.rounds))

        measure = None if evaluate is None else measured
        loop = TrainingLoop(run, trained, fleet, measure, every=every, state_folder=place)
        ended = loop.run(on_round or _Messages())
        return SimulationResult(
            structure.build(run.arrays()),
            run.rounds,
            run.epsilon,
            plan.guarantee.delta,
            ended or "",
            tuple(loop.points),
            root,
            loop.statement,
        )


@final
class _OwnClients:
    """Clients that train a user's model with a user's function."""

    def __init__(
        self,
        structure: ModelStructure,
        train: Callable[..., Any],
        clients: Mapping[str, Any],
        seed: int,
        workers: int,
    ):
        self._structure = structure
        self._train = train
        self._clients = clients
        self._seed = seed
        self._workers = workers
        self._wanted = _optional_arguments(train)
        self._warned = False

    def updates(
        self, model: Float32Vector, cohort: Sequence[str], round_number: int
    ) -> Iterator[tuple[str, Float32Vector]]:
        """Yield each client's name and update (trained model minus given model), in cohort order.

        Raises:
            InvalidInput: The function returned a model that does not fit.
        """
        given = self._structure.layout.arrays(model.copy())
        # What a client gets, after rounding to the types of the user's arrays.
        rounded = self._structure.arrays_of(self._structure.build(given), "rounding")

        def update(name: str) -> Float32Vector:
            return self._update(given, rounded, name, round_number)

        for name, change in in_parallel(update, cohort, self._workers, model.nbytes):
            if not self._warned and not np.isfinite(change).all():
                self._warned = True
                warnings.warn(
                    f"train returned NaN or infinity for client {name!r:.60} in round "
                    f"{round_number:,}; such updates count as zeros",
                    stacklevel=2,
                )
            yield name, change

    def try_one(self, model: Float32Vector, name: str) -> None:
        """Train one client, whose update is thrown away, before anything is on the disk.

        Raises:
            InvalidInput: The function returned a model that does not fit, or NaN.
        """
        given = self._structure.layout.arrays(model)
        change = self._structure.layout.arrays(self._update(given, given, name, 0))
        for part, numbers in change.items():
            if not np.isfinite(numbers).all():
                raise InvalidInput(
                    f"train returned NaN or infinity in {part!r:.60} for client {name!r:.60}, from "
                    "the model to start from; a smaller learning rate may help"
                )

    def _update(
        self,
        given: Mapping[str, NDArray[Any]],
        rounded: Mapping[str, NDArray[Any]],
        name: str,
        round_number: int,
    ) -> Float32Vector:
        values = {"seed": _seed_of(self._seed, round_number, name), "round": round_number}
        arguments = {key: values[key] for key in self._wanted}
        copied = self._structure.build(given)
        try:
            model = self._train(copied, self._clients[name], **arguments)
        except Exception as error:
            error.add_note(
                f"train was called for client {name!r:.60} in round {round_number:,}; if the run "
                "has begun, the same call of dpftrl.simulate resumes it"
            )
            raise
        source = f"train, for client {name!r:.60} in round {round_number:,},"
        arrays = self._structure.arrays_of(model, source)
        with np.errstate(invalid="ignore", over="ignore"):  # the server counts NaN as zeros
            change = {
                part: np.subtract(array, rounded[part], dtype=np.float64).astype(np.float32)
                for part, array in arrays.items()
            }
        return self._structure.layout.flat(change)


class StructureFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of `model_structure.json`, which may be published.

    Attributes:
        trained: The types of the arrays that are trained, by name.
        kept: The types of all other parts, by name.
        kept_sha256: SHA-256 of the other parts that are arrays, numbers or texts.
    """

    format: Literal["dpftrl model structure"] = "dpftrl model structure"
    version: Literal[1] = 1
    trained: dict[str, str]
    kept: dict[str, str]
    kept_sha256: dict[str, str]


def _file(structure: ModelStructure) -> StructureFile:
    return StructureFile(
        trained=structure.types,
        kept={leaf.name: leaf.kind for leaf in structure.kept},
        kept_sha256={leaf.name: leaf.digest() for leaf in structure.kept},
    )


def _check_same(run: Server, plan: Plan, settings: Settings, structure: ModelStructure) -> None:
    """Refuse to resume a run with other arguments than those that created it."""
    root, hint = run.folder.root, "use the same arguments, or choose another folder"
    path = root / STRUCTURE
    if not path.exists():
        raise InvalidInput(
            f"{root} holds a run that dpftrl.simulate did not create; resume it with the program "
            "that did, or choose another folder"
        )
    if run.plan != plan.covering_rounding():
        raise InvalidInput(f"{root} holds a run with another plan; {hint}")
    for name in settings.__struct_fields__:
        old, new = getattr(run.settings, name), getattr(settings, name)
        if old != new:
            shown = "server" if name == "optimizer" else name
            raise InvalidInput(
                f"{root} holds a run with {shown} {old!r:.80}, got {new!r:.80}; {hint}"
            )
    if run.layout != structure.layout:
        raise InvalidInput(
            f"{root} holds a run of a model with {_described(run.layout)}, got "
            f"{_described(structure.layout)}; {hint}"
        )
    old, new = read_json(path, StructureFile, "model structure"), _file(structure)
    if (old.trained, old.kept) != (new.trained, new.kept):
        raise InvalidInput(f"{root} holds a run of a model with parts of other types; {hint}")
    for name, digest in old.kept_sha256.items():
        if new.kept_sha256[name] != digest:
            raise InvalidInput(
                f"{name!r:.60}, which is not trained, is not what it was when the run in {root} "
                f"began; {hint}"
            )


def _described(layout: Layout) -> str:
    arrays = [f"{name} {shape}" for name, shape in zip(layout.names, layout.shapes, strict=True)]
    more = f" and {len(arrays) - 3} more" if len(arrays) > 3 else ""
    return ", ".join(arrays[:3]) + more


def _start_arrays(
    structure: ModelStructure, start: StartModel | PathLike | None
) -> StartModel | dict[str, NDArray[np.float32]]:
    """The arrays that the run starts from, with their origin if they come from a file."""
    if start is None:
        return structure.start
    loaded = start if isinstance(start, StartModel) else StartModel.load(start)
    if why := structure.layout.misfit(
        {name: np.asarray(array, np.float32) for name, array in loaded.arrays.items()}
    ):
        raise InvalidInput(f"the start model does not fit the model: {why}")
    return loaded


def _client_names(clients: Any) -> tuple[str, ...]:
    """The names of the clients; refuse what is no dict, and names that are unclear."""
    if not isinstance(clients, Mapping):
        raise InvalidInput(
            f"clients must be a dict of the data of each client, by name, got "
            f"{type(clients).__name__}; for a list: {{str(i): data for i, data in enumerate(...)}}"
        )
    names = tuple(cast("Mapping[Any, Any]", clients))
    if not names:
        raise InvalidInput("clients is empty: there is nobody to train on")
    for name in names:
        if not isinstance(name, str):
            raise InvalidInput(
                f"the names of clients must be texts, got {name!r:.60}; convert them with str()"
            )
    # As the server will do in every round, but before it has written anything.
    rules = Rules(1, 1, None)
    Eligibility(NoiseKey.generate(), rules, 1, 0, len(names)).population(names)
    return names


def _check_plan(plan: Any, clients: int) -> None:
    if not isinstance(plan, Plan):
        raise InvalidInput(
            f"plan must be the plan of a fleet, from dpftrl.make_plan or dpftrl.load_plan, got "
            f"{type(plan).__name__}"
        )
    if plan.fleet.population > clients:
        raise InvalidInput(
            f"the plan is for {plan.fleet.population:,} clients, got {clients:,}; make a plan with "
            f"population={clients}"
        )


def _warn_about_statistics(structure: ModelStructure) -> None:
    if statistics := structure.statistics:
        warnings.warn(
            f"the running statistics of batch normalisation stay as they are ({statistics[0]} and "
            f"{len(statistics) - 1} more): a model in evaluation mode would use them; GroupNorm or "
            "LayerNorm have none",
            stacklevel=3,
        )


def _optional_arguments(train: Any) -> tuple[str, ...]:
    """Which further arguments a training function wants, by the names of its parameters."""
    if not callable(train):
        raise InvalidInput(f"train must be a function, got {type(train).__name__}")
    try:
        signature = inspect.signature(train)
    except (TypeError, ValueError):  # some functions that are not written in Python
        return ()
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = [one.name for one in signature.parameters.values() if one.kind in kinds]
    wanted = tuple(name for name in OPTIONAL_ARGUMENTS if name in named)
    try:
        signature.bind(None, None, **dict.fromkeys(wanted))
    except TypeError as error:
        raise InvalidInput(
            f"train must work as train(model, data), with {' and '.join(OPTIONAL_ARGUMENTS)} as "
            f"optional further parameters: {error}"
        ) from None
    return wanted


def _seed_of(seed: int, round_number: int, name: str) -> int:
    """A number below 2**32 for one client in one round, which any framework takes as a seed."""
    digest = hashlib.sha256(json.dumps(["simulate", seed, round_number, name]).encode()).digest()
    return int.from_bytes(digest[:4], "little")


def _evaluated(evaluate: Callable[[Any], Any], model: Any, rounds: int) -> dict[str, float]:
    """The metrics that a user's function returns for a model; those that are NaN are left out."""
    try:
        found = evaluate(model)
    except Exception as error:
        error.add_note(f"evaluate was called with the model after {rounds:,} rounds")
        raise
    by_name = cast("Mapping[Any, Any]", found) if isinstance(found, Mapping) else {SCORE: found}
    return finite_numbers_of({str(name): _number(name, value) for name, value in by_name.items()})


def _number(name: object, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInput(
            f"evaluate must return a number, or numbers by name, got {type(value).__name__} for "
            f"{name!r:.60}"
        ) from None


class _Messages:
    """Writes the progress to stderr every few seconds."""

    def __init__(self) -> None:
        self._next = time.monotonic() + PATIENCE

    def __call__(self, progress: TrainingProgress) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PATIENCE
        metrics = "".join(f"{name} {value:.4g}  " for name, value in progress.evaluation.items())
        left = f"{math.ceil(progress.seconds_left):,} s left"
        point = progress.point
        sys.stderr.write(
            f"dpftrl: round {point.round:,}/{progress.rounds:,}  {metrics}"
            f"epsilon {rounded_up(point.epsilon)}  {left}\n"
        )
