"""Recomputes the tables and figures of the paper, mostly one file each, by the public API only."""

from dpftrl.paper.item import Claim, Findings, Item
from dpftrl.paper.results import ITEMS, Result, chosen, reproduce, shown

__all__ = ["ITEMS", "Claim", "Findings", "Item", "Result", "chosen", "reproduce", "shown"]
