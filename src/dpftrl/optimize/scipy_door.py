"""The door to scipy's optimisers."""

from typing import Any


def scipy_optimize() -> Any:
    """Imported when needed, since it takes a while; without types, since it ships few."""
    import scipy.optimize

    return scipy.optimize
