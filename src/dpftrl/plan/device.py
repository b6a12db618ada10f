"""More noise for noise that is computed on a device, so that the guarantee of the plan holds."""

import math
from typing import Final

from dpftrl._internal.checks import whole_number
from dpftrl.accounting import SampledGuarantee
from dpftrl.accounting.gaussian import FARTHEST_NORMAL
from dpftrl.errors import InvalidInput
from dpftrl.noise.device import ARITHMETIC, ArithmeticName, decaying_buffers
from dpftrl.noise.stream import NoisePlan
from dpftrl.plan.dataset import DatasetPlan

__all__ = ["noise_multiplier_on_device"]

# The largest ratio of the noise multiplier on a device to that of the plan.
MOST_MORE_NOISE: Final = 1.1
# It exceeds all rounding errors of `noise_multiplier_on_device`.
MARGIN: Final = 1 + 1e-12


def noise_multiplier_on_device(
    plan: NoisePlan, size: int, arithmetic: ArithmeticName = "split"
) -> float:
    """The noise multiplier with which noise on a device has the guarantee of a plan.

    It is a little larger than that of the plan: the arithmetic of a device has larger errors than
    the float64 of `dpftrl.noise.NoiseStream`, which the guarantee of the plan covers.

    Guarantees:
        Let one client move C X by `norm` at clip norm 1, so that `norm` / `plan.noise_multiplier`
        is its mu before rounding. With the result s, noise on the device is m-Gaussian DP for the
        m that solves

            m = norm / s + 2 h (r + m) sqrt(size) G + 2 e sqrt(size * rounds)

        by the theorem of docs/guarantees.md. Here h and e are `Arithmetic.rounding` and
        `Arithmetic.noise_error`, G is the mechanism's `rounding_gain`, and r the largest normal. An
        error of the noise of a round counts like a shift that depends on the past. The result is
        such that m is at most `norm` / `plan.noise_multiplier` for every `norm` of at least 1. The
        diagonal of C is 1 for all mechanisms that devices support, so no client that takes part has
        a smaller norm. So all guarantees hold that follow from mu: the one that was planned, and
        those for fewer rounds, other participations or groups.

    Args:
        plan: The plan. Its guarantee must not be for sampled batches.
        size: Number of coordinates of the model.
        arithmetic: How the device computes; see `dpftrl.noise.device.Arithmetic`.

    Raises:
        InvalidInput: The guarantee is for sampled batches, devices do not support the mechanism, or
            more than a tenth more noise would be necessary.
    """
    if isinstance(plan, DatasetPlan) and isinstance(plan.guarantee, SampledGuarantee):
        raise InvalidInput(
            f"the guarantee of the plan is for {plan.sampling} sampling, and does not cover the "
            "rounding of noise on a device; plan with sampling='none', or use the noise on the CPU"
        )
    mechanism, kind = plan.mechanism, ARITHMETIC[arithmetic]
    decaying_buffers(mechanism)  # refuses other mechanisms
    rounds = mechanism.check_rounds(plan.participation.rounds)
    size = whole_number("size", size)
    stored = 2 * kind.rounding * math.sqrt(size) * mechanism.rounding_gain(rounds)
    draws = 2 * math.sqrt(size * rounds)
    # All errors are linear in the largest normal, r + m.
    fixed = draws * kind.noise_error(mechanism, rounds, 0.0)
    slope = stored + draws * kind.noise_error(mechanism, rounds, 1.0) - fixed
    planned = 1 / plan.noise_multiplier
    left = planned * (1 - slope) - fixed - slope * FARTHEST_NORMAL
    if not left * MOST_MORE_NOISE >= planned:
        raise InvalidInput(
            f"{arithmetic} arithmetic on a device over {rounds:,} rounds of {size:,} coordinates "
            f"has errors for which {mechanism.name} would need over {MOST_MORE_NOISE - 1:.0%} more "
            "noise; use fewer rounds, a smaller noise multiplier, float64, or the noise on the CPU"
        )
    return max(MARGIN / left, plan.noise_multiplier)
