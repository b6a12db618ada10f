"""The parts of a run's JSON files that the verification needs.

Other fields of these files are ignored.
"""

import hashlib
import math
from pathlib import Path
from typing import Literal, final

import msgspec

from dpftrl._internal.storage import read_json
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.mechanisms import Mechanism
from dpftrl.mechanisms.files import MechanismFile, mechanism_from


class SettingsContent(msgspec.Struct, frozen=True):
    """The settings of a run, in `run.json`."""

    clip_norm: float
    hash_clients: bool
    budget: float | None
    timer_hours: float | None
    identity: Literal["stated", "registered", "unregistered"] = "stated"


class ParticipationContent(msgspec.Struct, frozen=True):
    """Which rounds one client may take part in."""

    kind: Literal["min-sep"]
    rounds: int
    min_sep: int
    max_participations: int


class StreamContent(msgspec.Struct, frozen=True):
    """A noise stream: its mechanism, its participation limits and its noise."""

    mechanism: MechanismFile
    participation: ParticipationContent
    noise_multiplier: float
    sensitivity: float
    sensitivity_kind: str
    buffers: Literal["float32", "float64"] = "float32"
    rounding: float = 0.0


class HypothesisContent(msgspec.Struct, frozen=True):
    """One hypothesis that a guarantee rests on."""

    name: str
    text: str
    basis: Literal["assumed", "enforced", "observed"]


class GuaranteeFile(msgspec.Struct, frozen=True):
    """The content of `guarantee.json`, and of the promised guarantee in `plan.json`."""

    format: Literal["dpftrl guarantee"]
    version: Literal[1, 2]
    runs: list[StreamContent]
    mu: float
    rho: float
    epsilon: float
    delta: float
    sampler_delta: float
    kind: str
    unit: str
    devices: int
    common_cap: int | None
    adjacency: str
    hypotheses: list[HypothesisContent]

    @property
    def stream(self) -> StreamContent:
        """The noise stream of a guarantee for a single run.

        Raises:
            InvalidInput: The guarantee is not for exactly one run.
        """
        if len(self.runs) != 1:
            raise InvalidInput(
                f"expected a guarantee for one run, with one noise stream, got {len(self.runs)}"
            )
        return self.runs[0]


class EarlierRunContent(msgspec.Struct, frozen=True):
    """A private run that produced the start model, in `run.json`."""

    run: str | None
    test_key: bool
    people: Literal["same", "others"]
    guarantee: GuaranteeFile


class StartContent(msgspec.Struct, frozen=True):
    """The model file that a run started from, in `run.json`."""

    sha256: str
    earlier: list[EarlierRunContent]


class RunFile(msgspec.Struct, frozen=True):
    """The content of `run.json`."""

    format: Literal["dpftrl run"]
    version: Literal[1, 2]
    run: str
    settings: SettingsContent
    test_key: bool
    buffers: Literal["float32", "float64"] = "float32"
    start: StartContent | None = None


class FleetContent(msgspec.Struct, frozen=True):
    """The clients that the run was planned for, in `plan.json`."""

    report_goal: int
    over_selection: float


class PlanFile(msgspec.Struct, frozen=True):
    """The content of `plan.json`."""

    format: Literal["dpftrl plan"]
    version: Literal[1, 2]
    fleet: FleetContent
    guarantee: GuaranteeFile


@final
class RunFiles:
    """What `run.json` and `plan.json` of a run say.

    Attributes:
        run_id: The identity of the run.
        settings: The settings of the run, from `run.json`.
        test_key: Whether the noise key is a test key, which anybody can guess.
        buffers: The precision of the noise buffers.
        start: The model file that the run started from, or None if it did not start from a file.
        version: The version of `run.json`. Version 1 does not record start models.
        fleet: The clients that the run was planned for, from `plan.json`.
        promised: The guarantee of the plan, from `plan.json`.
        mechanism: The mechanism that correlates the noise.

    Raises:
        InvalidInput: A file cannot be read, or its noise multiplier or delta is out of range.
    """

    def __init__(self, folder: Path):
        run = read_json(folder / "run.json", RunFile, "run")
        plan = read_json(folder / "plan.json", PlanFile, "plan")
        self.run_id = run.run
        self.settings = run.settings
        self.test_key = run.test_key
        self.buffers = run.buffers
        self.start = run.start
        self.version = run.version
        self.fleet = plan.fleet
        self.promised = plan.guarantee
        self.mechanism = stream_mechanism(plan.guarantee.stream, folder / "plan.json")
        if not (0 < self.noise_multiplier < math.inf and 0 < self.delta < 1):
            raise InvalidInput(
                "plan.json needs a positive noise multiplier and a delta between 0 and 1, got "
                f"{self.noise_multiplier} and {self.delta}"
            )

    def __repr__(self) -> str:
        return f"RunFiles({self.run_id}, {self.mechanism.name})"

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier of the plan."""
        return self.promised.stream.noise_multiplier

    @property
    def delta(self) -> float:
        """The delta of the plan's guarantee."""
        return self.promised.delta

    @property
    def cohort_size(self) -> int:
        """The largest number of clients that one attempt may contact."""
        return math.ceil(
            self.fleet.report_goal * self.fleet.over_selection - 1e-9
        )  # 1e-9: float error


def stream_mechanism(stream: StreamContent, path: Path) -> Mechanism:
    """Load the mechanism of a noise stream.

    Args:
        stream: The noise stream.
        path: The file that describes it. Matrices are in files beside it, and their digests are
            checked.
    """
    return mechanism_from(stream.mechanism, path)


def check_digest(path: Path, sha256: str, when: str) -> None:
    """Check that a file still has the digest that the journal recorded.

    Args:
        path: The file.
        sha256: The recorded digest.
        when: When it was recorded, for the error message.

    Raises:
        UnsafeState: The file cannot be read, or has another digest.
    """
    try:
        with path.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise UnsafeState(f"{path.name} cannot be read: {error.strerror}") from None
    if digest != sha256:
        raise UnsafeState(f"{path.name} was changed: it is not what it was when {when}")
