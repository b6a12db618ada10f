"""Tiny centralized runs without a framework, and independent readers of their files."""

import contextlib
import hashlib
import hmac
import itertools
import json
import os
import tempfile
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dpftrl import account, mechanism
from dpftrl.centralized import Settings, TrainingRun, Units
from dpftrl.centralized.store import RunFolder
from dpftrl.noise import NoiseKey
from dpftrl.participation import Poisson
from dpftrl.plan import Dataset, DatasetPlan
from dpftrl.verify import verify_run

SIZE = 5  # coordinates of the model
EXAMPLES = 20
DATASET = Dataset(EXAMPLES, 6, 3)  # batches of 6, 6, 6 and 2; 12 steps
STEPS = DATASET.steps
CLIP = 0.75
COMMIT_EVERY = 3
KEY = 5
DATA = np.random.default_rng(3).normal(size=(EXAMPLES, SIZE))


def plan_in_order(dataset: Dataset = DATASET, noise: float = 1.5) -> DatasetPlan:
    """A plan without sampling, made in milliseconds."""
    blt = mechanism("blt-b400", dataset.in_order)
    return DatasetPlan("none", account(blt, dataset.in_order, noise, 1e-6), dataset)


PLAN = plan_in_order()


def settings_for(units: Units, **changes: Any) -> Settings:
    values = {
        "clip_norm": CLIP,
        "unit": units.kind,
        "examples": units.examples,
        "examples_per_unit": units.examples_per_unit,
        "units_sha256": units.fingerprint(),
        "size": SIZE,
        "names": ("weights",),
        "commit_every": COMMIT_EVERY,
        "clipping": "Every gradient is clipped.",
        "framework": "none",
    }
    return Settings(**{**values, **changes})


@dataclass(frozen=True)
class Place:
    """The folder of a run, and that of its witness."""

    folder: Path
    state: Path

    @property
    def journal(self) -> Path:
        return self.folder / "private" / "journal.jsonl"


@contextlib.contextmanager
def fast_places() -> Generator[Iterator[Place]]:
    """Places in memory, if the system has such a folder: a killed process loses nothing there."""
    shared = Path("/dev/shm")
    home = shared if shared.is_dir() and os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=home) as folder:
        root = Path(folder)
        yield (Place(root / f"run {n}", root / f"state {n}") for n in itertools.count())


@dataclass
class Trainer:
    """A model of some numbers, which follows the mean of the data, and its run."""

    run: TrainingRun
    model: np.ndarray = field(default_factory=lambda: np.zeros(SIZE))
    means: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def create(
        cls,
        place: Place | None,
        plan: DatasetPlan = PLAN,
        units: Units | None = None,
        **options: Any,
    ) -> "Trainer":
        units = units or Units(EXAMPLES)
        run = TrainingRun.create(
            None if place is None else place.folder,
            plan,
            settings_for(units, **options.pop("changes", {})),
            units,
            lambda: np.zeros(SIZE).tobytes(),
            state_folder=None if place is None else place.state,
            **{"insecure_test_key": KEY, **options},
        )
        return cls(run)

    @classmethod
    def resume(cls, place: Place, units: Units | None = None, trust: bool = False) -> "Trainer":
        units = units or Units(EXAMPLES)
        run = TrainingRun.resume(place.folder, units, state_folder=place.state, trust_folder=trust)
        try:
            return cls(run, np.frombuffer(run.saved_checkpoint()).copy())
        except BaseException:
            run.close()
            raise

    @classmethod
    def open(cls, place: Place) -> "Trainer":
        """As somebody does who does not know how far a killed process came."""
        return cls.resume(place) if RunFolder(place.folder).exists else cls.create(place)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.run.close()

    def sum(self, salt: float = 0.0) -> tuple[np.ndarray, int]:
        """The sum of the clipped gradients of the current step, and its number of units."""
        batch = self.run.batch(self.run.steps)
        counts = [1] * len(batch.examples) if batch.counts is None else batch.counts.tolist()
        total, start = np.zeros(SIZE, np.int64), 0
        for count in counts:
            rows = DATA[batch.examples[start : start + count] % EXAMPLES]
            start += count
            gradient = self.model - rows.mean(axis=0) + salt
            gradient *= min(1.0, 0.999 * CLIP / np.linalg.norm(gradient))
            total += np.trunc(gradient / self.run.grid.step).astype(np.int64)
        return total, batch.units

    def step(self, salt: float = 0.0) -> None:
        total, units = self.sum(salt)
        self.run.step(total, units, self.apply)
        self.run.save_if_due(self.checkpoint)

    def apply(self, mean: np.ndarray) -> None:
        self.means.append(mean.copy())
        self.model -= 0.3 * mean

    def checkpoint(self) -> bytes:
        return self.model.tobytes()

    def train(self, until: int | None = None) -> "Trainer":
        most = self.run.plan.dataset.steps
        while self.run.steps < (most if until is None else until):
            self.step()
        return self


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def journal_records(place: Place) -> list[dict[str, Any]]:
    """The records of the journal, whose chain of keyed digests is checked by hand.

    An incomplete last line is left out. The witness must know the last line or the one before it.
    """
    private = place.folder / "private"
    key = NoiseKey((private / "noise.key").read_bytes())
    secret = key.derive(b"journal").secret_bytes()
    macs, records = ["0" * 64], list[dict[str, Any]]()
    for line in (private / "journal.jsonl").read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        prefix = len('{"mac":"') + 64 + len('","record":')
        content = line[prefix:-2]
        mac = hmac.new(secret, bytes.fromhex(macs[-1]) + content, "sha256").hexdigest()
        assert json.loads(line)["mac"] == mac, "the journal has a wrong digest"
        macs.append(mac)
        records.append(json.loads(content))
    (witness,) = (json.loads(path.read_bytes()) for path in witnesses(place, records[0]["run"]))
    assert (witness["lines"], witness["mac"]) in list(enumerate(macs))[-2:]
    steps = [record["step"] for record in records if record["kind"] == "step"]
    assert steps == list(range(len(steps)))
    return records


def failed_checks(place: Place) -> dict[str, str]:
    """What `dpftrl verify` finds wrong with a run, apart from its test key."""
    checks = verify_run(place.folder, place.state).checks
    return {
        check.name: check.text
        for check in checks
        if check.outcome == "failed" and check.name != "noise key"
    }


def witnesses(place: Place, run: str) -> list[Path]:
    return [path for path in place.state.glob("*.json") if path.stem == run]


def journalled_steps(place: Place) -> int:
    return sum(record["kind"] == "step" for record in journal_records(place))


def stated_guarantee(place: Place) -> dict[str, Any] | None:
    """The content of `guarantee.json`, if there is one."""
    path = place.folder / "guarantee.json"
    return json.loads(path.read_bytes()) if path.exists() else None


def result(place: Place) -> dict[str, str]:
    """Digests of what must not depend on how often a run was interrupted."""
    stated = {**(stated_guarantee(place) or {}), "run": ""}
    with Trainer.resume(place) as trainer:
        parts = {
            "model": trainer.model.tobytes(),
            "steps": repr((trainer.run.steps, trainer.run.epsilon)).encode(),
            "guarantee": json.dumps(stated).encode(),
        }
    return {name: sha256(content) for name, content in parts.items()}


def poisson_plan(batch_size: int = 6, epochs: int = 2) -> DatasetPlan:
    """A plan with Poisson sampling whose guarantee is not computed, but claimed: for tests only."""
    from dpftrl.accounting.amplification import believe_sampled

    dataset = Dataset(EXAMPLES, batch_size, epochs)
    drawn = dataset.sampling("poisson")
    assert isinstance(drawn, Poisson)
    independent = mechanism("independent", dataset.in_order)
    believed = believe_sampled(independent, drawn, 3.0, 7.0, 1e-6, failure=0.0)
    return DatasetPlan("poisson", believed, dataset)
