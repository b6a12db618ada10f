"""Empirical audits: what an attacker achieves against the real code, beside what is claimed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpftrl.auditing.mechanism import MechanismAudit, audit_mechanism
    from dpftrl.auditing.run import RunAudit, audit_run
    from dpftrl.auditing.sampled import SampledAudit, audit_sampled

__all__ = [
    "MechanismAudit",
    "RunAudit",
    "SampledAudit",
    "audit_mechanism",
    "audit_run",
    "audit_sampled",
]

# Names are loaded when they are first used: trainings need only `dpftrl.auditing.canaries`.
_MODULES = {
    "MechanismAudit": "mechanism",
    "audit_mechanism": "mechanism",
    "RunAudit": "run",
    "audit_run": "run",
    "SampledAudit": "sampled",
    "audit_sampled": "sampled",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
