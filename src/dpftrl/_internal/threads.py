"""Work shared between threads: the one thread helper of the package."""

from collections import deque
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TypeVar, cast

Item = TypeVar("Item")
Result = TypeVar("Result")


def parallel_map(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int
) -> list[Result]:
    """Call a function on every item, on several threads, and return the results in order.

    The calling thread works too, so that with `threads=1` no thread is started. A thread that has
    finished an item takes the next one. There is no thread pool: starting one takes longer than a
    whole round of a small model.

    Args:
        function: Called once per item.
        items: The arguments, one per call.
        threads: The largest number of threads that work at the same time.

    Raises:
        BaseException: The first error that `function` raised. After an error no thread takes
            another item, and the error is raised when all threads have stopped.
    """
    waiting = deque(enumerate(items))
    results = cast("list[Result]", [None] * len(items))
    errors: list[BaseException] = []

    def work() -> None:
        while not errors:
            try:
                position, item = waiting.popleft()
            except IndexError:
                return
            try:
                results[position] = function(item)
            except BaseException as error:  # raised again in the calling thread
                errors.append(error)

    helpers = [Thread(target=work) for _ in range(min(threads, len(items)) - 1)]
    try:
        for helper in helpers:
            helper.start()
        work()
        for helper in helpers:
            helper.join()
    except BaseException as error:  # such as Ctrl-C: stop the helpers before raising it again
        errors.append(error)
        for helper in helpers:
            if helper.ident is not None:  # it was started
                helper.join()
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # breaks the reference cycle between an error and this frame
    return results
