"""What noise that is computed on a device guarantees: its larger rounding is a part of mu."""

import math
from dataclasses import replace

from dpftrl._internal.checks import whole_number
from dpftrl.accounting import Guarantee
from dpftrl.accounting.gaussian import FARTHEST_NORMAL, MOST_SHARE
from dpftrl.errors import InvalidInput
from dpftrl.noise.device import ARITHMETIC, ArithmeticName


def guarantee_on_device(
    guarantee: object, size: int, arithmetic: ArithmeticName = "split"
) -> Guarantee:
    """The guarantee of a plan, if its noise is computed on a device.

    Guarantees:
        The result is that of `dpftrl.accounting.gaussian.mu_with_rounding`, with the rounding of
        the device in place of 2^-53, and for this size. To it is added 2 e sqrt(size * rounds),
        where e bounds the error of the noise of one round: as if the error were a shift that
        depends on the past.

    Args:
        guarantee: The guarantee of a plan without sampling.
        size: Number of coordinates of the model.
        arithmetic: How the device computes; see `dpftrl.noise.device.Arithmetic`.

    Raises:
        InvalidInput: The guarantee is for sampled batches or several runs, or rounding leaves
            nothing of it.
    """
    if not isinstance(guarantee, Guarantee) or len(guarantee.runs) != 1:
        raise InvalidInput(
            "rounding on a device is accounted for single runs without sampling; plan with "
            "sampling='none', or use the noise on the CPU"
        )
    (run,) = guarantee.runs
    kind, rounds = ARITHMETIC[arithmetic], run.participation.rounds
    size = whole_number("size", size)
    share = 2 * kind.rounding * math.sqrt(size) * run.mechanism.rounding_gain(rounds)
    if not share <= MOST_SHARE:
        raise InvalidInput(
            f"rounding on the device over {rounds:,} rounds of {size:,} coordinates leaves no "
            "guarantee; use fewer rounds, float64, or the noise on the CPU"
        )
    errors = 2 * kind.noise_error * math.sqrt(size * rounds)
    mu = (run.ideal_mu + errors + share * FARTHEST_NORMAL) / (1 - share)
    return replace(guarantee, mu_of_one=max(mu, guarantee.mu_of_one))
