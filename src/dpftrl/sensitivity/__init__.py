"""How far one client can move the release: exact where theory allows, else a bound that says so."""

from dpftrl.mechanisms._sensitivity import Sensitivity

__all__ = ["Sensitivity"]
