"""Numbers in the text of the paper, outside its tables and figures."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from dpftrl import BinaryTree, MinSep, mechanism
from dpftrl._internal.progress import Progress
from dpftrl.accounting import epsilon_of
from dpftrl.paper.item import Claim, Findings, Item, blt, holds

# The presets of the appendix, each with the rounds, min-sep and participations that it was
# optimized for.
APPENDIX = (
    ("blt-b100", 2000, 100, 10),
    ("blt-b400", 4000, 400, 5),
    ("blt-b1000", 4000, 1000, 2),
)


@final
@dataclass(frozen=True)
class Sizes:
    """Rounds and min-sep for the number of buffers, and the min-seps at which to try `blt-b400`."""

    rounds: int
    min_sep: int
    min_seps: tuple[int, ...]


def compute(sizes: Sizes, on_progress: Progress) -> Findings:
    """All claims; the rows of the table repeat them."""
    groups: tuple[Callable[[Sizes], list[Claim]], ...] = (
        _noise_multiplier_one,
        _tree_bound,
        _buffers,
        _appendix,
        _default,
        _report_goals,
    )
    claims: list[Claim] = []
    for claims_of in groups:
        on_progress(None, claims_of.__name__.strip("_").replace("_", " "))
        claims += claims_of(sizes)
    return Findings(
        [{"claim": claim.text, "paper": claim.paper, "ours": claim.ours} for claim in claims],
        claims,
    )


def _noise_multiplier_one(_: Sizes) -> list[Claim]:
    epsilon = epsilon_of(1e-7, 1.0)
    text = "Noise multiplier alpha = 1 means epsilon 5.3 at delta 1e-7"
    return [holds(text, abs(epsilon - 5.3) < 0.1, epsilon, "5.3")]


def _tree_bound(_: Sizes) -> list[Claim]:
    """The paper's lower bound on the sensitivity of trees: participations as early as possible."""
    clients = MinSep(2350, 438, 5)
    tree = BinaryTree()
    early = tree.pattern_norm(clients.earliest(), clients.rounds) ** 2
    worst = tree.sensitivity(clients).value ** 2
    return [
        holds(
            "The sensitivity of trees is that of the earliest pattern (squared, worst over earliest"
            ", at 2,350 rounds, min-sep 438, 5 participations)",
            worst <= early * (1 + 1e-9),
            worst / early,
            "1",
            f"another pattern reaches {worst:.0f}, the earliest {early:.0f}",
        )
    ]


def _buffers(sizes: Sizes) -> list[Claim]:
    clients = MinSep(sizes.rounds, sizes.min_sep)
    four, eight = (blt(clients, d, "max").error_report(clients).max_loss for d in (4, 8))
    depth = mechanism("tree").memory(sizes.rounds)
    return [
        holds(
            "Four buffers achieve low losses, more do not improve (MaxLoss, 4 over 8)",
            four < 1.001 * eight,
            four / eight,
            "1",
        ),
        holds("TreeAgg keeps about 11 vectors", abs(depth - 11) <= 1, float(depth), "11"),
    ]


def _appendix(_: Sizes) -> list[Claim]:
    claims: list[Claim] = []
    for name, rounds, min_sep, cap in APPENDIX:
        clients = MinSep(rounds, min_sep, cap)
        theirs = mechanism(name).error_report(clients).max_loss
        best = blt(clients, 4, "max").error_report(clients).max_loss
        ratio = best / theirs
        claims.append(
            Claim(
                f"Appendix: {name} is optimised for MaxLoss (the best with 4 buffers over it)",
                "1",
                ratio,
                "better" if ratio < 0.999 else "reproduces",
                "two of its buffers coincide: its search had not ended" if ratio < 0.999 else "",
            )
        )
    return claims


def _default(sizes: Sizes) -> list[Claim]:
    """The claims that compare the BLT for min-sep 400 with the best BLT for the actual min-sep."""
    worst = max(
        mechanism("blt-b400").error_report(point).max_loss
        / blt(point, 4, "max").error_report(point).max_loss
        for point in (MinSep(2000, b) for b in sizes.min_seps)
    )
    span = f"{sizes.min_seps[0]} to {sizes.min_seps[-1]:,}"
    return [
        holds(
            f"The BLT for b = 400 is competitive for a wide range of min-seps (MaxLoss over the "
            f"best BLT at 2,000 rounds, min-sep {span}, at worst)",
            worst < 1.15,
            worst,
            "competitive",
        )
    ]


def _report_goals(_: Sizes) -> list[Claim]:
    """The claims about two larger report goals: 12,000 after 6,500, and 6,000 after 3,000."""
    scaled = {"pt-BR": (16.1 / 8.681, 12_000 / 6_500), "pt-PT": (5.5 / 3.12, 6_000 / 3_000)}
    halved = {"pt-BR": 1181 / 2001, "pt-PT": 49 / 92}
    claims = [
        holds(
            f"{model}: the noise multiplier grows in line with the report goal (factor)",
            abs(noise_multiplier / goal - 1) < 0.02,
            noise_multiplier,
            f"{goal:.3f}",
            ""
            if abs(noise_multiplier / goal - 1) < 0.02
            else "the printed noise multipliers say otherwise",
        )
        for model, (noise_multiplier, goal) in scaled.items()
    ]
    claims += [
        holds(f"{model}: min-sep almost halves with it (factor)", share < 0.6, share, "0.5")
        for model, share in halved.items()
    ]
    return claims


TEXT = Item(
    "text",
    "Numbers in the text",
    Sizes(2052, 342, (100, 150, 200, 300, 400, 600, 800, 1000)),
    Sizes(2052, 342, (100, 400, 1000)),
    compute,
)
