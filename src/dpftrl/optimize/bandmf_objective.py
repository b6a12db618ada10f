"""The objective of BandMF: error and gradient of banded strategies with columns of norm 1."""

from typing import Any, cast, final

import numpy as np
from numpy.typing import NDArray

from dpftrl._internal.arrays import Matrix, Vector
from dpftrl.workload import Workload

SMALLEST_BLOCK = 64  # rows per matrix product: smaller products are not worth their overhead


def rows_reached(rounds: int, bands: int) -> NDArray[np.intp]:
    """The row of C, from 0, to which each entry of an array of columns belongs.

    Rows from `rounds` on lie outside C.
    """
    return np.arange(rounds)[:, None] + np.arange(bands)[None, :]


@final
class BandedError:
    """The log RmsError of B = A C^-1 as a function of the columns of C, scaled to norm 1 first.

    Columns are given as an array of n x P numbers. Entry (j, p) is C[j + p, j]; entries below the
    last row of C are ignored. With D = C^-1, the derivatives of ||B||^2 by C are -2 (B^T B) D^T, of
    which only the bands are computed. All products are computed by scipy: numpy may have its own
    thread pool, and two thread pools that wait for each other on few cores are many times slower.

    Attributes:
        reaches: Which entries of the array lie inside C.
        scale: A preconditioner: how far a step moves each entry relative to the others. Early
            rounds and the diagonal have more influence on the error and move less.
    """

    def __init__(self, rounds: int, bands: int, workload: Workload):
        self.rounds, self.bands, self.workload = rounds, bands, workload
        self.reaches = rows_reached(rounds, bands) < rounds
        weight = np.linalg.norm(workload.matrix(rounds), axis=0)
        # The constants of the preconditioner are empirical.
        self.scale = np.ones((rounds, bands))
        self.scale[:, 0] = 0.3
        self.scale *= np.maximum(weight / weight.max(), 1e-2)[:, None] ** -0.6

    def columns(self, raw: Matrix) -> Matrix:
        """The columns of C, at norm 1."""
        inside = np.where(self.reaches, raw, 0.0)
        return inside / np.linalg.norm(inside, axis=1, keepdims=True)

    def scaled(self, free: Vector) -> tuple[float, Vector]:
        """The log RmsError and its derivatives as a function of the columns divided by `scale`."""
        value, gradient = self(free.reshape(self.scale.shape) * self.scale)
        return value, (gradient * self.scale).ravel()

    def __call__(self, raw: Matrix) -> tuple[float, Matrix]:
        """The log RmsError and its derivatives by the columns before they are scaled to norm 1."""
        from scipy.linalg import lapack

        columns = self.columns(raw)
        strategy, bands = self._blank()
        bands[:] = columns
        # LAPACK is column-major: it sees the transpose of a row-major upper triangle as a lower
        # one.
        decoder, fault = cast(Any, lapack).dtrtri(strategy.T, lower=1, overwrite_c=1)
        if fault:
            return np.inf, np.zeros(raw.shape)
        gram = _lower_gram(self._applied(decoder))
        square = float(np.trace(gram))
        by_columns = self._bands_of_product(decoder, gram) / -square
        along = np.einsum("jp,jp->j", by_columns, columns)[:, None]
        norms = np.linalg.norm(np.where(self.reaches, raw, 0.0), axis=1, keepdims=True)
        return np.log(square / self.rounds) / 2, (by_columns - columns * along) / norms

    def _blank(self) -> tuple[Matrix, Matrix]:
        """A matrix of zeros, and a view of its bands, in which (j, p) is its entry (j, j + p).

        Entries of the view that lie outside C fall below the diagonal of the matrix, so they must
        stay zero.
        """
        n, size = self.rounds, np.dtype(np.float64).itemsize
        memory = np.zeros(n * n + self.bands)
        bands = np.lib.stride_tricks.as_strided(
            memory, (n, self.bands), ((n + 1) * size, size), writeable=True
        )
        return memory[: n * n].reshape(n, n), bands

    def _applied(self, decoder: Matrix) -> Matrix:
        """B = A D, in column-major order."""
        if self.workload.is_prefix_sum:
            return np.cumsum(decoder.T, axis=1).T  # of contiguous rows; .T is column-major
        return np.asfortranarray(self.workload.apply(np.ascontiguousarray(decoder)))

    def _bands_of_product(self, decoder: Matrix, gram: Matrix) -> Matrix:
        """The bands of (B^T B) D^T, from the lower triangle of B^T B, block by block."""
        from scipy.linalg import blas

        product, bands = self._blank()
        width = max(SMALLEST_BLOCK, self.bands // 2)
        for start in range(0, self.rounds, width):
            stop = min(start + width, self.rounds)
            reach = min(stop + self.bands - 1, self.rounds)
            corner = gram[start:stop, start:stop]
            corner += np.tril(corner, -1).T
            product[start:stop, start:reach] = cast(Any, blas).dgemm(
                1.0, decoder[start:stop, :stop], gram[start:reach, :stop], trans_b=1
            )
        return np.where(self.reaches, bands, 0.0)


def _lower_gram(noise: Matrix) -> Matrix:
    """The lower triangle of B^T B, with zeros above it, for a lower triangular B."""
    from scipy.linalg import blas, lapack

    if len(noise) <= SMALLEST_BLOCK:  # too small for the threads of dlauum
        return np.tril(cast(Any, blas).dgemm(1.0, noise, noise, trans_a=1))
    return cast(Any, lapack).dlauum(noise, lower=1, overwrite_c=1)[0]
