"""From replies to reports."""

from collections import Counter
from collections.abc import Iterable, Mapping
from logging import WARNING

from flwr.app import Message
from flwr.supercore import log

from dpftrl.engines.flower.messages import attempt_of, nonce_of, refusal_of, update_of
from dpftrl.errors import InvalidInput, ReportRefused
from dpftrl.federated import Attempt


def collect(
    attempt: Attempt, asked: Mapping[str, str], replies: Iterable[Message]
) -> dict[str, int]:
    """Hand each reply to the attempt at once, until there are enough.

    Args:
        attempt: What the replies are for.
        asked: The name of each node that was asked, by the nonce that only it was told.
        replies: As they come.

    Returns:
        How many nodes refused, by reason.
    """
    refusals: Counter[str] = Counter()
    for reply in replies:
        if not reply.has_content():
            refusals.update(filter(None, [refusal_of(reply)]))
            continue
        name = asked.get(nonce_of(reply), "")
        try:
            if attempt.report(name, update_of(reply), attempt_of(reply)):
                break
        except ReportRefused as error:
            log(WARNING, "A report was refused: %s", error)
    return dict(refusals)


def complain(refusals: dict[str, int], asked: int) -> None:
    """If all nodes refuse for the same reason, trying again will not help."""
    for why, count in refusals.items():
        if count == asked:
            raise InvalidInput(f"every node that was asked refuses: {why}")
        log(WARNING, "Some nodes refuse: %s", why)
