"""What the run claims to guarantee, against what follows from its files."""

import math
from pathlib import Path
from typing import Final

from dpftrl.audit.files import GuaranteeFile, Told, stream_mechanism
from dpftrl.audit.gaussian import epsilon_of, sampler_delta, stated_epsilon
from dpftrl.audit.patterns import ROUNDING, Limits
from dpftrl.audit.strategy import Sensitivity, Strategy
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
    covered = claim.stream.participation.rounds
    if covered == rounds + 1:
        raise UnsafeState(
            "guarantee.json is one round ahead: a server stopped while it committed a round; "
            "resuming rewrites it"
        )
    if covered != rounds:
        raise UnsafeState(f"it covers {covered} rounds, and {rounds} were released")
    return claim


def claimed_limits(claim: GuaranteeFile) -> Limits:
    """The participation that a guarantee is stated for."""
    said = claim.stream.participation
    if not (said.rounds >= 1 and said.min_sep >= 1 and said.max_participations >= 1):
        raise InvalidInput("guarantee.json has a participation that nobody can keep to")
    return Limits(said.rounds, said.min_sep, said.max_participations)


def check_claim(claim: GuaranteeFile, path: Path, told: Told, narrow: Limits, wide: Limits) -> str:
    """Whether it speaks of this run.

    Args:
        claim: What `guarantee.json` says.
        path: Where it is.
        told: What the run was told.
        narrow: What clients were held to, or what was observed, when the last round was released.
        wide: The same by now: a resumed server counts contacts of rounds in flight as well.
    """
    stream, limits = claim.stream, claimed_limits(claim)
    basis = {one.name: one.basis for one in claim.hypotheses}
    secrecy = [one.text for one in claim.hypotheses if one.name == "secrecy"]
    for what, holds in (
        ("the mechanism", stream_mechanism(stream, path) == told.mechanism),
        ("the noise multiplier", stream.noise_multiplier == told.sigma),
        ("delta", claim.delta == told.delta),
        ("min-sep", wide.min_sep <= limits.min_sep <= narrow.min_sep),
        ("max participations", narrow.most <= limits.cap <= wide.most),
        ("the unit", (claim.unit, claim.devices, claim.common_cap) == ("device", 1, None)),
        ("the adjacency", claim.adjacency == "zero-out"),
        ("the precision of the buffers", stream.buffers == told.buffers),
        ("mu", _same(claim.mu, stream.sensitivity / told.sigma + stream.rounding)),
        ("rho", _same(claim.rho, claim.mu * (claim.mu / 2))),
        ("sampler_delta", sampler_delta(claim.mu) * (1 - AGREEMENT) <= claim.sampler_delta <= 1),
        ("kind", claim.kind == stream.sensitivity_kind),
        ("what it rests on", set(basis) >= _rests_on(claim, told)),
        ("the basis", basis.get("participation") == _participation_basis(told)),
        ("identity", basis.get("identity") == "assumed"),
        ("secrecy", ("NOTHING IS PRIVATE" in "".join(secrecy)) == told.test_key),
    ):
        if not holds:
            raise UnsafeState(f"{what} in guarantee.json is not that of this run")
    return f"it covers {limits.rounds:,} rounds at min-sep {limits.min_sep:,}, as was released"


def check_sensitivity(claimed: float, found: Sensitivity) -> str:
    """Whether a claimed sensitivity is what follows from the strategy."""
    if not claimed >= found.value * (1 - ROUNDING):
        raise UnsafeState(f"{claimed:.7g} is claimed, and one client can reach {found.value:.7g}")
    if not claimed <= found.claimable * (1 + ROUNDING):
        raise UnsafeState(f"{claimed:.7g} is claimed, and {found.claimable:.7g} follows")
    return f"no client can move the release by more than {found.value:.7g} clip norms"


def check_epsilon(
    claimed: float, found: Sensitivity, told: Told, strategy: Strategy, where: str
) -> str:
    """Whether a claimed epsilon follows from the sensitivity, the noise and its rounding."""
    ours, most = epsilon_between(found, told, strategy)
    if not claimed >= ours * (1 - ROUNDING):
        raise UnsafeState(f"{where} says {claimed:.7g}, less than what follows: {ours:.7g}")
    if not claimed <= most * (1 + AGREEMENT) + 1e-12:
        raise UnsafeState(f"{where} says {claimed:.7g}, and {most:.7g} follows")
    return f"{where} says {claimed:.6g}, recomputed {ours:.6g}"


def epsilon_between(found: Sensitivity, told: Told, strategy: Strategy) -> tuple[float, float]:
    """The least and the most epsilon that an honest file states."""
    least, most = found.value / told.sigma, found.claimable / told.sigma
    if told.buffers == "float32":  # version 0.1: neither rounding nor the sampler were in it
        return epsilon_of(told.delta, least), epsilon_of(told.delta, most)
    # The library bounds the sampler's part from above, by less than a factor of two.
    return (
        stated_epsilon(told.delta, strategy.least_mu(least)),
        stated_epsilon(told.delta, strategy.most_mu(most), sampler_share=2.0),
    )


def _rests_on(claim: GuaranteeFile, told: Told) -> set[str]:
    """Hypotheses that must be stated; version 1 of the file knew nothing of rounding."""
    uncovered = claim.version > 1 and told.buffers == "float32"
    return {*RESTS_ON, "rounding"} if uncovered else {*RESTS_ON}


def _same(claimed: float, follows: float) -> bool:
    return math.isclose(claimed, follows, rel_tol=ROUNDING)


def _participation_basis(told: Told) -> str:
    if told.settings.identity == "unregistered":
        return "assumed"
    return "enforced" if told.settings.timer_hours is None else "observed"
