"""Choosing the settings of a training without spending privacy: trials on stand-in people."""

from dpftrl.tuning.search import Choice, tune
from dpftrl.tuning.stand_in import StandIn, choose_stand_in

__all__ = ["Choice", "StandIn", "choose_stand_in", "tune"]
