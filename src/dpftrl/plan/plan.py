"""A plan: all that a run needs to know about privacy, and nothing half-built."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import msgspec

from dpftrl.accounting import Guarantee, account
from dpftrl.accounting.files import GuaranteeFile, guarantee_content, guarantee_from
from dpftrl.accounting.sampler import check_rounding
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms import Mechanism
from dpftrl.participation import Participation
from dpftrl.plan.fleet import Fleet
from dpftrl.storage import read_json, replace_file


@final
@dataclass(frozen=True)
class Plan:
    """A mechanism with its noise, for a fleet, and the guarantee that a run of it will have.

    Only a plan can train: its sigma is chosen, its guarantee computed.

    Attributes:
        fleet: The devices.
        guarantee: What is promised; its one run holds mechanism, participation and sigma.
    """

    fleet: Fleet
    guarantee: Guarantee

    def __post_init__(self) -> None:
        promised = self.guarantee
        if len(promised.runs) != 1 or promised.devices != 1 or promised.common_cap is not None:
            raise InvalidInput(
                "a plan is for one run and states the guarantee of one device, got "
                f"{len(promised.runs)} runs and {promised.devices} devices"
            )
        run = promised.runs[0]
        rounds = run.participation.rounds
        check_rounding(run.rounding, run.mu, run.mechanism, rounds)
        run.mechanism.check_noise(rounds)

    def covering_rounding(self) -> "Plan":
        """The same plan with rounding covered, which a plan of version 0.1 did not do.

        Its mu, and with it epsilon, is larger by a part in a million or so.
        """
        run = self.guarantee.runs[0]
        if run.buffers == "float64":
            return self
        covered = account(run.mechanism, run.participation, run.sigma, self.guarantee.delta)
        return Plan(self.fleet, covered)

    @property
    def mechanism(self) -> Mechanism:
        """What correlates the noise."""
        return self.guarantee.runs[0].mechanism

    @property
    def participation(self) -> Participation:
        """Which rounds one device may take part in: the server enforces this."""
        return self.guarantee.runs[0].participation

    @property
    def sigma(self) -> float:
        """The noise multiplier: standard deviation of Z in units of the clip norm."""
        return self.guarantee.runs[0].sigma


class PlanFile(msgspec.Struct, forbid_unknown_fields=True):
    """What the JSON holds."""

    format: Literal["dpftrl plan"]
    version: Literal[1, 2]
    fleet: Fleet
    guarantee: GuaranteeFile


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan to a .json file, replacing one that is there."""
    target = _json_path(path)
    content = PlanFile("dpftrl plan", 2, plan.fleet, guarantee_content(plan.guarantee, target))
    replace_file(target, msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan; its guarantee is recomputed, and refused if the file claims too much."""
    target = _json_path(path)
    content = read_json(target, PlanFile, "plan")
    return Plan(content.fleet, guarantee_from(content.guarantee, target))


def _json_path(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.suffix != ".json":
        raise InvalidInput(f"a plan ends in .json, got {str(target)!r}")
    return target
