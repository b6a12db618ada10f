"""The coefficients of a mechanism: how far back its strategy and its noise reach."""

import numpy as np

from dpftrl._internal.arrays import Vector
from dpftrl.errors import InvalidInput
from dpftrl.mechanisms.base import Mechanism
from dpftrl.mechanisms.toeplitz import ToeplitzMechanism


def coefficients_of(mechanism: Mechanism, rounds: int) -> tuple[Vector, Vector]:
    """The first column of C, and the last row of C^-1 in reverse order.

    The first says how an update of round 0 affects later rounds. The second says how much of each
    earlier row of Z is in the noise of the last round.

    Raises:
        InvalidInput: The mechanism has no such coefficients.
    """
    if isinstance(mechanism, ToeplitzMechanism):
        inverse = mechanism.inverse_coefficients(mechanism.check_curve(rounds))
        strategy = np.zeros(rounds)
        coefficients = mechanism.coefficients(rounds)  # may be shorter: the others are zero
        strategy[: len(coefficients)] = coefficients
        return strategy, inverse
    matrix, decoder = mechanism.strategy(rounds), mechanism.decoder(rounds)
    if not matrix.any():
        raise InvalidInput(f"{mechanism.name} has no coefficients to draw")
    return matrix[:, 0], decoder[-1, ::-1]
