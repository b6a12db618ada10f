"""The paper, recomputed: one file a table or figure, with the public interface only."""

from dpftrl.paper.findings import Claim, Findings
from dpftrl.paper.item import Item
from dpftrl.paper.items import ITEMS, chosen
from dpftrl.paper.run import Result, reproduce
from dpftrl.paper.written import shown

__all__ = ["ITEMS", "Claim", "Findings", "Item", "Result", "chosen", "reproduce", "shown"]
