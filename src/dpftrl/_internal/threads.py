"""Work shared between threads; on one thread there is none to start."""

from collections import deque
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def side_by_side(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int
) -> list[Result]:
    """The results for all items, in their order.

    The caller's thread works too, and whoever is done takes the next item. No pool: starting one
    takes longer than a round of a small model. After an error nobody takes another item, and it is
    raised when all have stopped.
    """
    left = deque(enumerate(items))
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                place, item = left.popleft()
            except IndexError:
                return
            try:
                results[place] = function(item)
            except BaseException as error:  # to be raised where somebody can catch it
                errors.append(error)

    helpers = [Thread(target=work) for _ in range(min(threads, len(items)) - 1)]
    try:
        for helper in helpers:
            helper.start()
        work()
        _wait_for(helpers)
    except BaseException as error:  # interrupted by hand: nobody goes on behind our back
        errors.append(error)
        _wait_for(helpers)
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # each holds the frame that holds it
    return [results[place] for place in range(len(items))]


def _wait_for(helpers: Sequence[Thread]) -> None:
    for helper in helpers:
        if helper.ident is not None:
            helper.join()
