"""Recomputes the tables and figures of the paper: one file per item, by the public API only."""

from dpftrl.paper.findings import Claim, Findings, Item
from dpftrl.paper.items import ITEMS, chosen
from dpftrl.paper.output import Result, reproduce, shown

__all__ = ["ITEMS", "Claim", "Findings", "Item", "Result", "chosen", "reproduce", "shown"]
