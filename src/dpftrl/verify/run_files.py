"""The files of a run: their content, their digests, their modes, and the witness.

Of the JSON files, only the fields that the verification needs are read. Other fields are ignored.
"""

import hashlib
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, final

import msgspec

from dpftrl._internal.storage import read_json
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.mechanisms import Mechanism
from dpftrl.mechanisms.registry import MechanismFile, mechanism_from
from dpftrl.verify.journal import AnyJournal, Journal
from dpftrl.verify.verdict import Check, run_check


class AdaptiveContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of adaptive clipping, in `run.json`."""

    start: float
    quantile: float
    beta: float
    learning_rate: float
    minimum: float
    maximum: float


class SettingsContent(msgspec.Struct, frozen=True):
    """The settings of a run, in `run.json`."""

    clip_norm: float | AdaptiveContent
    hash_clients: bool
    budget: float | None
    timer_hours: float | None
    identity: Literal["stated", "registered", "unregistered"] = "stated"
    aggregators: bool = False


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
    shapes: list[list[int]]
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
        size: Number of parameters of the model.
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
        self.size = sum(math.prod(shape) for shape in run.shapes)
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
    def adaptive(self) -> bool:
        """Whether the clip norm moves."""
        return isinstance(self.settings.clip_norm, AdaptiveContent)

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
    if path.exists() and not path.is_file():
        raise UnsafeState(f"{path.name} is not a file")
    try:
        with path.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise UnsafeState(f"{path.name} cannot be read: {error.strerror}") from None
    if digest != sha256:
        raise UnsafeState(f"{path.name} was changed: it is not what it was when {when}")


class WitnessFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a witness file: how much of the journal had been written."""

    format: Literal["dpftrl witness"]
    version: Literal[1]
    run: str
    lines: int
    mac: str


def witness_folder() -> Path:
    """Return the default folder of witnesses: $DPFTRL_STATE, or the user's state folder."""
    if configured := os.environ.get("DPFTRL_STATE"):
        return Path(configured)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "dpftrl"


def witness_checks(journal: AnyJournal, folder: Path | None, root: Path) -> tuple[Check, ...]:
    """Compare the journal with its witness, and check an incomplete last line.

    Args:
        journal: The journal of the run.
        folder: The folder of witnesses; None to leave out the comparison.
        root: The folder of the run.
    """
    if folder is None:
        text = "not compared: this may be an older copy of the run"
        witness = Check("witness", "warning", text)
    else:
        witness = run_check("witness", lambda: check_witness(journal, folder, root))
    if not journal.torn:
        return (witness,)
    text = "the journal ends with half a line"
    if witness.outcome == "passed":
        text += "; it had no effect, and resuming the run removes it"
    outcome = "warning" if witness.outcome == "passed" else "failed"
    return witness, Check("journal's end", outcome, text)


def check_witness(journal: AnyJournal, folder: Path, root: Path) -> str:
    """Compare the journal with the witness of the run.

    Args:
        journal: The journal of the run.
        folder: The folder of witnesses.
        root: The folder of the run.

    Raises:
        UnsafeState: There is no witness, or it has seen another journal.
    """
    run, lines = journal.created.run, len(journal.macs)
    if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(root)):
        raise UnsafeState(
            f"{folder} lies in the folder of the run, so an older copy of the run has an older "
            "witness with it; give the folder that the server used"
        )
    path = folder / f"{run}.json"
    if not path.exists():
        raise UnsafeState(
            f"there is no witness of this run in {folder}, so this may be an older copy of the "
            "run; give the folder of the witness with --state-folder, or skip this check with "
            "--no-witness"
        )
    witness = read_json(path, WitnessFile, "witness")
    if witness.run != run:
        raise UnsafeState(f"{path} is the witness of another run")
    if not 0 <= witness.lines <= lines:
        raise UnsafeState(
            f"the run was rolled back: its journal has {lines} complete lines, but the "
            f"witness has seen {witness.lines}"
        )
    if ("0" * 64, *journal.macs)[witness.lines] != witness.mac:
        raise UnsafeState(
            f"line {witness.lines} of the journal is not the line that the witness saw"
        )
    if lines - witness.lines > 1:
        raise UnsafeState(
            f"the journal has {lines} lines, but the witness has seen {witness.lines}; a server "
            "stops at most one line ahead of its witness, so lines were added, or the witness is "
            "an old copy"
        )
    ahead = (
        "; the server stopped after it wrote the last line and before it updated the witness"
        if lines > witness.lines
        else ""
    )
    return f"it has seen {witness.lines:,} of {lines:,} lines{ahead}"


def check_modes(private: Path) -> str:
    """Check that only the owner may access the private files.

    Raises:
        UnsafeState: Somebody else may read, write or execute one of them.
    """
    try:
        open_to_others = list(_open_to_others(private))
        entries = sum(1 for _ in private.rglob("*"))
    except OSError as error:
        raise InvalidInput(f"{private} cannot be read: {error.strerror}") from None
    if open_to_others:
        path, mode = open_to_others[0]
        raise UnsafeState(
            f"{path.relative_to(private.parent)} has mode {mode:04o}, open to more than its owner"
            + (f", and {len(open_to_others) - 1} more" if len(open_to_others) > 1 else "")
            + "; other users may have read it"
        )
    return f"{private.name}/ and its {entries} entries are accessible by the owner only"


def _open_to_others(private: Path) -> Iterator[tuple[Path, int]]:
    """Yield each path that others may access, with its mode."""
    for path in (private, *sorted(private.rglob("*"))):
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & ~stat.S_IRWXU:  # the owner may have fewer rights, as in an archive
            yield path, mode


def check_checkpoints(folder: Path, journal: Journal) -> str:
    """Compare the digest of every kept checkpoint with the journal.

    Raises:
        UnsafeState: The last checkpoint is missing, or a checkpoint differs from the journal.
    """
    digests = [journal.created.checkpoint_sha256]
    digests += [committed.checkpoint_sha256 for committed in journal.commits]
    last = len(digests) - 1
    paths = {path.stem: path for path in folder.glob("*.safetensors") if path.name[0] != "."}
    if f"{last:08d}" not in paths:
        raise UnsafeState(f"the model after {last} rounds is missing")
    checked = 0
    for rounds, sha256 in enumerate(digests):
        if (path := paths.pop(f"{rounds:08d}", None)) is not None:
            when = f"round {rounds} was released" if rounds else "the run was created"
            check_digest(path, sha256, when)
            checked += 1
    if journal.in_flight:
        # A checkpoint is written before the journal line that releases it.
        paths.pop(f"{last + 1:08d}", None)
    if paths:
        raise UnsafeState(f"{sorted(paths)[0]}.safetensors belongs to no round of the journal")
    return f"{checked} checkpoint(s), the last after {last} rounds, unchanged since their release"
