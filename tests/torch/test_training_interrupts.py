"""KeyboardInterrupt at random instants: the training goes on, or refuses and can be resumed."""

import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from small_private_trainings import STEPS, Augmented, bits, loss_fn, private, sgd, small_model
from small_training_runs import Place, fast_places, journal_records
from torch import nn

from dpftrl.errors import InvalidInput
from dpftrl.torch import PrivateTraining


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def alarm() -> Iterator[Any]:
    """Sets a timer that raises KeyboardInterrupt, as Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def opened(place: Place) -> tuple[PrivateTraining, nn.Module]:
    model = small_model(dropout=0.3)
    return private(place, model, sgd(model), Augmented()), model


def finished(training: PrivateTraining) -> bool:
    """Train to the end; False if the training refuses to go on."""
    try:
        for batch in training.loader:
            training.step(loss_fn, batch)
    except InvalidInput:
        return False
    return True


# An interrupt within a destructor is not raised, but reported; that is not what is tested here.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_at_random_instants_are_harmless(alarm: Any) -> None:
    dice, interrupts = random.Random(0), 0
    with fast_places() as places:
        training, model = opened(next(places))
        assert finished(training)
        training.close()
        wanted = bits(model)
        while interrupts < 40:
            place = next(places)
            training, model = opened(place)
            is_finished = False
            while not is_finished:
                alarm(dice.uniform(0.001, 0.12))
                try:
                    is_finished = finished(training)
                    is_refused = not is_finished
                    alarm(0)
                except KeyboardInterrupt:
                    interrupts += 1
                    is_refused = False
                if is_refused:  # as somebody does who starts the cell of a notebook again
                    training.close()
                    training, model = opened(place)
            training.close()
            assert bits(model) == wanted
            steps = sum(one["kind"] == "step" for one in journal_records(place))
            assert steps == training.steps == STEPS
