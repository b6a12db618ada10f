"""The losses of a mechanism where the server does more than add up."""

import numpy as np
from numpy.typing import NDArray

from dpftrl.mechanisms import Loss, Mechanism, ToeplitzMechanism
from dpftrl.optimize.toeplitz_error import error_curve
from dpftrl.participation import Participation
from dpftrl.workload import Workload

Vector = NDArray[np.float64]


def workload_loss(mechanism: Mechanism, participation: Participation, workload: Workload) -> Loss:
    """Errors of A D and the sensitivity of C: for the prefix sum, `mechanism.loss`.

    Toeplitz mechanisms need no dense matrix; others are kept to as many rounds as their dense
    decoder is.

    >>> from dpftrl.mechanisms import SquareRoot
    >>> from dpftrl.participation import MinSep
    >>> loss = workload_loss(SquareRoot(), MinSep(64, 8), Workload(momentum=0.9))
    >>> print(f"{loss.rms_loss:.1f} instead of {SquareRoot().loss(MinSep(64, 8)).rms_loss:.1f}")
    62.4 instead of 10.2
    """
    if workload.is_prefix_sum:
        return mechanism.loss(participation)
    curve = _curve(mechanism, mechanism.check_rounds(participation.rounds), workload)
    return Loss(
        max_error=float(curve.max()),
        rms_error=float(np.sqrt(np.mean(curve**2))),
        sensitivity=mechanism.sensitivity(participation),
    )


def _curve(mechanism: Mechanism, rounds: int, workload: Workload) -> Vector:
    if isinstance(mechanism, ToeplitzMechanism):
        mechanism.check_curve(rounds)
        return error_curve(mechanism.inverse_coefficients(rounds), workload)
    return np.linalg.norm(workload.apply(mechanism.decoder(rounds)), axis=1)
