"""Released models: what an export says about itself, how to load and use it, and its model card."""

from dpftrl.models.card import model_card
from dpftrl.models.description import ModelDescription, describe, read_description
from dpftrl.models.released import NextWord, ReleasedModel, load_model

__all__ = [
    "ModelDescription",
    "NextWord",
    "ReleasedModel",
    "describe",
    "load_model",
    "model_card",
    "read_description",
]
