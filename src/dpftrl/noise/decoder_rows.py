"""The rows of D, one a round: what regenerating mode weighs all rows of Z with."""

from typing import final

import numpy as np
from numpy.typing import NDArray

from dpftrl.mechanisms import Mechanism, StreamState, ToeplitzMechanism

Vector = NDArray[np.float64]


@final
class DecoderRows:
    """Gives row t of D for t = 0, 1, ...; going back starts from the beginning."""

    def __init__(self, mechanism: Mechanism):
        self._mechanism = mechanism
        self._state = mechanism.init(1)

    def row(self, round_: int) -> Vector:
        """Weights of the rows of Z in the noise of this round."""
        if isinstance(self._mechanism, ToeplitzMechanism):
            return self._mechanism.inverse_coefficients(round_ + 1)[::-1].copy()
        if self._state.round > round_:
            self._state = self._mechanism.init(1)
        noise = np.zeros(0)
        while self._state.round <= round_:
            noise = self._next()
        return noise

    def _next(self) -> Vector:
        """One reference step on unit vectors, of which there are as many as rows of Z so far."""
        state = self._state
        width = state.next_row + 128
        buffers = np.zeros((len(state.buffers), width))
        if state.round:
            buffers[:, : state.buffers.shape[1]] = state.buffers

        def unit(index: int) -> Vector:
            row = np.zeros(width)
            row[index] = 1.0
            return row

        start = StreamState(
            state.round, state.next_row, buffers if state.round else np.zeros((0, width))
        )
        noise, after = self._mechanism.step(start, unit)
        used = after.next_row
        self._state = StreamState(after.round, used, after.buffers[:, :used])
        return noise[:used]
