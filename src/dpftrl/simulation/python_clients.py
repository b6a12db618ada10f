"""Clients that are any Python function: PyTorch, numpy, or whatever trains."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from numpy.typing import NDArray

from dpftrl._internal.arrays import Float32Vector
from dpftrl.errors import InvalidInput
from dpftrl.federated.layout import Layout

Arrays = dict[str, NDArray[Any]]


@final
class PythonClients:
    """Clients trained by a function, one after the other.

    >>> import numpy as np
    >>> def train(model, client, round_number):
    ...     return {"w": model["w"] + len(client)}
    >>> clients = PythonClients(train, {"w": np.zeros(2, np.float32)})
    >>> [update.tolist() for _, update in clients.updates(np.ones(2, np.float32), ["ann"], 0)]
    [[3.0, 3.0]]
    """

    def __init__(
        self,
        train: Callable[[Arrays, str, int], Mapping[str, NDArray[Any]]],
        model: Mapping[str, NDArray[Any]],
    ):
        """Take the function and a model, for its names and shapes.

        Args:
            train: Gets named arrays (its own copy), a client's name and the number of the round;
                returns the arrays as trained (not the difference).
            model: Any model of the right names and shapes.
        """
        self._train = train
        self._layout = Layout.of(model)

    def updates(
        self, model: Float32Vector, cohort: Sequence[str], round_number: int
    ) -> Iterator[tuple[str, Float32Vector]]:
        """Each client's update, its model minus the one it was handed, in the cohort's order."""
        if model.shape != (self._layout.size,):
            raise InvalidInput(f"the model must be {self._layout.size:,} long, got {model.shape}")
        for name in cohort:
            trained = self._train(self._layout.arrays(model.copy()), name, round_number)
            if why := self._layout.misfit(trained):
                raise InvalidInput(f"what came back from training {name!r:.60} does not fit: {why}")
            yield name, self._layout.flat(trained) - model
