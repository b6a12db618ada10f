"""Flower is imported by our package first, which knows the warnings of its imports."""

import dpftrl.flower  # noqa: F401
