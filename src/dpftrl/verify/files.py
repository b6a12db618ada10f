"""What an audit reads out of the JSON files of a run; the rest of them it does not need."""

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
    """What the run was told, as far as it matters here."""

    clip_norm: float
    hash_clients: bool
    budget: float | None
    timer_hours: float | None
    identity: Literal["stated", "registered", "unregistered"] = "stated"


class ParticipationContent(msgspec.Struct, frozen=True):
    """Who may take part, in a file."""

    kind: Literal["min-sep"]
    rounds: int
    min_sep: int
    max_participations: int


class StreamContent(msgspec.Struct, frozen=True):
    """A stream of noise, in a file."""

    mechanism: MechanismFile
    participation: ParticipationContent
    noise_multiplier: float
    sensitivity: float
    sensitivity_kind: str
    buffers: Literal["float32", "float64"] = "float32"
    rounding: float = 0.0


class HypothesisContent(msgspec.Struct, frozen=True):
    """What a guarantee rests on."""

    name: str
    text: str
    basis: Literal["assumed", "enforced", "observed"]


class GuaranteeFile(msgspec.Struct, frozen=True):
    """`guarantee.json`, and the promise within `plan.json`."""

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
        """The stream of noise of a guarantee that is for one run alone."""
        if len(self.runs) != 1:
            raise InvalidInput(f"a run has one stream of noise, and {len(self.runs)} are named")
        return self.runs[0]


class EarlierRunContent(msgspec.Struct, frozen=True):
    """A private run behind the start model, in `run.json`."""

    run: str | None
    test_key: bool
    people: Literal["same", "others"]
    guarantee: GuaranteeFile


class StartContent(msgspec.Struct, frozen=True):
    """The model file that a run started from, in `run.json`."""

    sha256: str
    earlier: list[EarlierRunContent]


class RunFile(msgspec.Struct, frozen=True):
    """`run.json`."""

    format: Literal["dpftrl run"]
    version: Literal[1, 2]
    run: str
    settings: SettingsContent
    test_key: bool
    buffers: Literal["float32", "float64"] = "float32"
    start: StartContent | None = None


class FleetContent(msgspec.Struct, frozen=True):
    """The devices, in a file."""

    report_goal: int
    over_selection: float


class PlanFile(msgspec.Struct, frozen=True):
    """`plan.json`."""

    format: Literal["dpftrl plan"]
    version: Literal[1, 2]
    fleet: FleetContent
    guarantee: GuaranteeFile


@final
class Told:
    """What a run was told before it began.

    Attributes:
        settings: From `run.json`.
        test_key: Whether anybody can guess its noise key.
        fleet: From `plan.json`.
        promise: From there too.
        mechanism: What correlates the noise.
        buffers: What the noise buffers are kept in.
        start: The model file that it started from, if it was one.
        version: Of `run.json`; version 1 did not record start models.
    """

    def __init__(self, folder: Path):
        run = read_json(folder / "run.json", RunFile, "run")
        plan = read_json(folder / "plan.json", PlanFile, "plan")
        self.run = run.run
        self.settings = run.settings
        self.test_key = run.test_key
        self.buffers = run.buffers
        self.start = run.start
        self.version = run.version
        self.fleet = plan.fleet
        self.promise = plan.guarantee
        self.mechanism = stream_mechanism(plan.guarantee.stream, folder / "plan.json")
        if not (0 < self.noise_multiplier < math.inf and 0 < self.delta < 1):
            raise InvalidInput("plan.json has no noise, or no delta between 0 and 1")

    def __repr__(self) -> str:
        return f"Told({self.run}, {self.mechanism.name})"

    @property
    def noise_multiplier(self) -> float:
        """The noise multiplier."""
        return self.promise.stream.noise_multiplier

    @property
    def delta(self) -> float:
        """Where epsilon is stated."""
        return self.promise.delta

    @property
    def cohort_size(self) -> int:
        """Most clients that a round contacts."""
        return math.ceil(self.fleet.report_goal * self.fleet.over_selection - 1e-9)


def stream_mechanism(stream: StreamContent, path: Path) -> Mechanism:
    """The mechanism that a file speaks of; matrices beside it are checked by their digest."""
    return mechanism_from(stream.mechanism, path)


def digest_must_be(path: Path, sha256: str, when: str) -> None:
    """Refuse a file that is not what the journal says."""
    try:
        with path.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise UnsafeState(f"{path.name} cannot be read: {error.strerror}") from None
    if found != sha256:
        raise UnsafeState(f"{path.name} is not what it was when {when}")
