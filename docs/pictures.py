"""Draw the pictures of docs/blts.md: `python docs/pictures.py`."""

from pathlib import Path

import matplotlib.pyplot as plt

import dpftrl

IMAGES = Path(__file__).parent / "images"
PARTICIPATION = dpftrl.MinSep(rounds=2000, min_sep=400)
COLOURS = {"independent": "#D55E00", "tree": "#009E73", "blt": "#0072B2", "sqrt": "#000000"}
LABELS = {
    "independent": "fresh noise (DP-SGD)",
    "tree": "binary tree (TreeAgg)",
    "blt": "BLT, 3 buffers",
    "sqrt": "square root, a buffer per round",
}


def mechanism(name: str) -> dpftrl.Mechanism:
    """The mechanism of this name, for the participation of the pictures."""
    if name == "blt":
        return dpftrl.optimize_blt(PARTICIPATION, buffers=3).mechanism
    return dpftrl.mechanism(name, PARTICIPATION)


def draw_error() -> None:
    """Draw the noise on prefix sums after each round, at the same privacy."""
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for name in ("independent", "tree", "blt"):
        chosen = mechanism(name)
        scale = chosen.sensitivity(PARTICIPATION).value
        curve = chosen.error_curve(PARTICIPATION.rounds) * scale
        axes.plot(curve, color=COLOURS[name], label=LABELS[name], linewidth=1)
    axes.set_xlabel("round")
    axes.set_ylabel("noise on the prefix sum\n(std in clip norms, at mu = 1)")
    axes.legend(frameon=False)
    figure.savefig(IMAGES / "blt-error.png", dpi=110)


def draw_coefficients() -> None:
    """Draw the coefficients of C and of its inverse."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    for name in ("sqrt", "blt"):
        chosen = mechanism(name)
        style = {"color": COLOURS[name], "label": LABELS[name]}
        left.plot(range(1, 2001), chosen.coefficients(2000), **style)
        right.plot(range(1, 2000), -chosen.inverse_coefficients(2000)[1:], **style)
    for axes, label in ((left, "coefficient of C"), (right, "minus the coefficient of C⁻¹")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("lag (rounds)" if axes is right else "lag + 1 (rounds)")
        axes.set_ylabel(label)
        axes.legend(frameon=False)
    right.set_ylim(bottom=1e-6)
    figure.savefig(IMAGES / "blt-coefficients.png", dpi=110)


if __name__ == "__main__":
    draw_error()
    draw_coefficients()
