"""Simulated clients that call any Python function to train: PyTorch, numpy or another framework."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, final

from numpy.typing import NDArray

from dpftrl._internal.arrays import Float32Vector
from dpftrl.errors import InvalidInput
from dpftrl.federated.layout import Layout

Arrays = dict[str, NDArray[Any]]


@final
class PythonClients:
    """Clients that are trained by a Python function, one after the other.

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
        """Use a training function for models of one layout.

        Args:
            train: Called with named arrays (its own copy), a client's name and the round number.
                Returns the trained arrays (not the difference).
            model: Any model with the right names and shapes.
        """
        self._train = train
        self._layout = Layout.of(model)

    def updates(
        self, model: Float32Vector, cohort: Sequence[str], round_number: int
    ) -> Iterator[tuple[str, Float32Vector]]:
        """Yield each client's name and update (trained model minus given model), in cohort order.

        Raises:
            InvalidInput: The model has another size, or `train` returns arrays that do not fit.
        """
        if model.shape != (self._layout.size,):
            raise InvalidInput(
                f"the model must have {self._layout.size:,} numbers, got {model.shape}"
            )
        for name in cohort:
            trained = self._train(self._layout.arrays(model.copy()), name, round_number)
            if mismatch := self._layout.misfit(trained):
                raise InvalidInput(
                    f"the model that came back from training {name!r:.60} does not fit: {mismatch}"
                )
            yield name, self._layout.flat(trained) - model
