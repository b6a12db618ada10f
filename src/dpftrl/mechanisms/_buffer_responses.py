"""The responses of buffers to one row of Z, computed round by round as noise streams do it.

A module of its own, because it needs numba: only `GeneralBLT.rounding_gain` imports it.
"""

# pyright: basic
import numba
import numpy as np

from dpftrl._internal.arrays import Array
from dpftrl._internal.compiled import compiled


@numba.njit(**compiled)
def sum_of_responses(feedback: Array, inlet: Array, rounds: int) -> Array:
    """Sum the absolute content of each buffer over all rounds, after one row of Z that is 1.

    Args:
        feedback: The matrix by which a round multiplies the buffers, if its row of Z is 0.
        inlet: The weight with which a row of Z enters each buffer.
        rounds: The number of rounds.
    """
    size = inlet.shape[0]
    buffers, following, sums = inlet.copy(), np.empty(size), np.zeros(size)
    for _ in range(rounds):
        for i in range(size):
            sums[i] += abs(buffers[i])
        for i in range(size):
            content = 0.0
            for j in range(size):
                content += feedback[i, j] * buffers[j]
            following[i] = content
        buffers, following = following, buffers
    return sums
