"""Recomputes the tables and figures of the paper with the public API only, mostly one file each.

In this library, "the paper" is McMahan, Xu and Zhang (2024), A Hassle-free Algorithm for Private
Learning in Practice: Don't Use Tree Aggregation, Use BLTs.
"""

from dpftrl.paper.item import Claim, Findings, Item
from dpftrl.paper.results import ITEMS, Result, chosen, reproduce, shown

__all__ = ["ITEMS", "Claim", "Findings", "Item", "Result", "chosen", "reproduce", "shown"]
