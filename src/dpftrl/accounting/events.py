"""Our guarantees as events of Google's dp-accounting, so that its accountants compose them."""

from typing import Any

from dpftrl.accounting.guarantee import Guarantee
from dpftrl.errors import InvalidInput


def dp_event(guarantee: Guarantee) -> Any:
    """What happened, as a `dp_accounting.DpEvent`: one Gaussian mechanism a run.

    Where a cap over all runs was used, it is one for all of them.

    The releases of a run are post-processing of a single Gaussian mechanism with the noise
    multiplier 1 / mu, so that is the whole event, however many rounds it had. Use it with the
    neighbouring relation REPLACE_SPECIAL, which is zero-out (the others give the same numbers for
    Gaussians).
    """
    try:
        import dp_accounting
    except ImportError:
        raise InvalidInput(
            "events need dp-accounting: pip install 'dpftrl[dp-accounting]'"
        ) from None

    event: Any = dp_accounting
    if len(guarantee.runs) == 1 or guarantee.common_cap is not None:
        return event.GaussianDpEvent(1 / guarantee.mu)
    each = [run.mu * guarantee.devices for run in guarantee.runs]
    return event.ComposedDpEvent([event.GaussianDpEvent(1 / mu) for mu in each])
