"""How far one client can move the release: exact where theory allows, else a bound that says so."""

from dpftrl.sensitivity.result import Sensitivity

__all__ = ["Sensitivity"]
