"""What the run claims to guarantee, against what follows from its files."""

import math
from pathlib import Path
from typing import Final

from dpftrl.audit.earlier import EarlierRuns
from dpftrl.audit.files import GuaranteeFile, StreamContent, Told, stream_mechanism
from dpftrl.audit.gaussian import sampler_delta
from dpftrl.audit.patterns import ROUNDING, Limits
from dpftrl.audit.strategy import Sensitivity
from dpftrl.errors import InvalidInput, UnsafeState
from dpftrl.storage import read_json

# How far two computations of epsilon may differ; below ours, only by rounding.
AGREEMENT: Final = 1e-6
RESTS_ON: Final = {"participation", "clipping", "zero-out", "keystream", "secrecy", "identity"}


def read_guarantee(path: Path, rounds: int) -> GuaranteeFile:
    """`guarantee.json`, which must be for exactly the rounds that were released."""
    if not path.exists():
        raise UnsafeState(f"guarantee.json is missing, and {rounds} rounds were released")
    claim = read_json(path, GuaranteeFile, "guarantee")
    covered = own_stream(claim).participation.rounds
    if covered == rounds + 1:
        raise UnsafeState(
            "guarantee.json is one round ahead: a server stopped while it committed a round; "
            "resuming rewrites it"
        )
    if covered != rounds:
        raise UnsafeState(f"it covers {covered} rounds, and {rounds} were released")
    return claim


def own_stream(claim: GuaranteeFile) -> StreamContent:
    """The stream of the run itself: the last, after those of the earlier runs."""
    if not claim.runs:
        raise UnsafeState("it names no stream of noise")
    return claim.runs[-1]


def claimed_limits(claim: GuaranteeFile) -> Limits:
    """The participation that a guarantee is stated for."""
    said = own_stream(claim).participation
    if not (said.rounds >= 1 and said.min_sep >= 1 and said.max_participations >= 1):
        raise InvalidInput("guarantee.json has a participation that nobody can keep to")
    return Limits(said.rounds, said.min_sep, said.max_participations)


def check_claim(
    claim: GuaranteeFile,
    path: Path,
    told: Told,
    earlier: EarlierRuns,
    narrow: Limits,
    wide: Limits,
) -> str:
    """Whether it speaks of this run.

    Args:
        claim: What `guarantee.json` says.
        path: Where it is.
        told: What the run was told.
        earlier: The earlier runs on the same people.
        narrow: What clients were held to, or what was observed, when the last round was released.
        wide: The same by now: a resumed server counts contacts of rounds in flight as well.
    """
    stream, limits = own_stream(claim), claimed_limits(claim)
    secrecy = [one.text for one in claim.hypotheses if one.name == "secrecy"]
    mu = math.hypot(*(one.sensitivity / _noise(one) + one.rounding for one in claim.runs))
    kind = stream.sensitivity_kind if len(claim.runs) == 1 else "upper bound"
    for what, holds in (
        ("the mechanism", stream_mechanism(stream, path) == told.mechanism),
        ("the noise multiplier", stream.noise_multiplier == told.sigma),
        ("the list of earlier runs", _same_runs(claim.runs[:-1], path, earlier)),
        ("delta", claim.delta == told.delta),
        ("min-sep", wide.min_sep <= limits.min_sep <= narrow.min_sep),
        ("max participations", narrow.most <= limits.cap <= wide.most),
        ("the unit", (claim.unit, claim.devices, claim.common_cap) == ("device", 1, None)),
        ("the adjacency", claim.adjacency == "zero-out"),
        ("the precision of the buffers", stream.buffers == told.buffers),
        ("mu", _same(claim.mu, mu)),
        ("rho", _same(claim.rho, claim.mu * (claim.mu / 2))),
        ("sampler_delta", sampler_delta(claim.mu) * (1 - AGREEMENT) <= claim.sampler_delta <= 1),
        ("kind", claim.kind == kind),
        ("what it rests on", {one.name for one in claim.hypotheses} == _rests_on(claim, earlier)),
        ("the basis", _bases_follow(claim, told)),
        ("secrecy", ("NOTHING IS PRIVATE" in "".join(secrecy)) == _test_key(told, earlier)),
    ):
        if not holds:
            raise UnsafeState(f"{what} in guarantee.json is not that of this run")
    together = f", composed with {len(claim.runs) - 1} earlier run(s)" if claim.runs[1:] else ""
    return (
        f"it covers {limits.rounds:,} rounds at min-sep {limits.min_sep:,}, as was released"
        f"{together}"
    )


def check_sensitivity(claimed: float, found: Sensitivity) -> str:
    """Whether a claimed sensitivity is what follows from the strategy."""
    if not claimed >= found.value * (1 - ROUNDING):
        raise UnsafeState(f"{claimed:.7g} is claimed, and one client can reach {found.value:.7g}")
    if not claimed <= found.claimable * (1 + ROUNDING):
        raise UnsafeState(f"{claimed:.7g} is claimed, and {found.claimable:.7g} follows")
    return f"no client can move the release by more than {found.value:.7g} clip norms"


def check_epsilon(claimed: float, least: float, most: float, where: str) -> str:
    """Whether a claimed epsilon lies between the least and the most that an honest file states."""
    if not claimed >= least * (1 - ROUNDING):
        raise UnsafeState(f"{where} says {claimed:.7g}, less than what follows: {least:.7g}")
    if not claimed <= most * (1 + AGREEMENT) + 1e-12:
        raise UnsafeState(f"{where} says {claimed:.7g}, and {most:.7g} follows")
    return f"{where} says {claimed:.6g}, recomputed {least:.6g}"


def _same_runs(claimed: list[StreamContent], path: Path, earlier: EarlierRuns) -> bool:
    """Whether the earlier runs in guarantee.json are those that run.json is sealed with."""
    if len(claimed) != len(earlier.composed):
        return False
    return all(
        (one.participation, one.noise_multiplier, one.buffers)
        == (sealed.stream.participation, sealed.stream.noise_multiplier, sealed.stream.buffers)
        and _same(one.sensitivity, sealed.stream.sensitivity)
        and _same(one.rounding, sealed.stream.rounding)
        and stream_mechanism(one, path) == sealed.mechanism
        for one, sealed in zip(claimed, earlier.composed, strict=True)
    )


def _rests_on(claim: GuaranteeFile, earlier: EarlierRuns) -> set[str]:
    """Hypotheses that are stated; version 1 of the file knew nothing of rounding."""
    uncovered = claim.version > 1 and any(stream.buffers == "float32" for stream in claim.runs)
    return {*RESTS_ON, *(["rounding"] if uncovered else []), *earlier.hypotheses()}


def _bases_follow(claim: GuaranteeFile, told: Told) -> bool:
    """Whether nothing is called enforced or observed but what a server of this run sees to."""
    own = {"participation": _participation_basis(told), "clipping": "enforced"}
    # The run's own hypotheses come first; the participation of an earlier run is assumed.
    return all(one.basis == own.pop(one.name, "assumed") for one in claim.hypotheses)


def _test_key(told: Told, earlier: EarlierRuns) -> bool:
    return told.test_key or earlier.test_key


def _noise(stream: StreamContent) -> float:
    if not 0 < stream.noise_multiplier < math.inf:
        raise InvalidInput("guarantee.json has a noise multiplier that is none")
    return stream.noise_multiplier


def _same(claimed: float, follows: float) -> bool:
    return math.isclose(claimed, follows, rel_tol=ROUNDING)


def _participation_basis(told: Told) -> str:
    if told.settings.identity == "unregistered":
        return "assumed"
    return "enforced" if told.settings.timer_hours is None else "observed"
