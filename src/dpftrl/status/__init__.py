"""The status of a run for its operator: figures, forecasts and warnings, read without its lock."""

from dpftrl.status.figures import Status, StatusWarning
from dpftrl.status.status import StatusReader, read_status

__all__ = ["Status", "StatusReader", "StatusWarning", "read_status"]
