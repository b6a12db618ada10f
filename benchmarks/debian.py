"""A text of one's own, with no settings but the file and epsilon: Debian's package descriptions.

`python benchmarks/debian.py` writes one line per package of this machine's package lists: the
maintainer is the user, the one-line description is the text. Then it runs `dpftrl train` on that
file, as a user would, and compares the accuracy on held-out maintainers with always guessing the
most frequent word. The package lists come with `apt-get update`.
"""

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from dpftrl.simulation.config import read_config
from dpftrl.simulation.training import load_training_task
from dpftrl.tasks.language_model import unigram_accuracy
from dpftrl.tasks.vocabulary import UNKNOWN

HERE = Path(__file__).parent
FIELD = re.compile(r"^(Maintainer|Description): (.*)$", re.MULTILINE)
EPSILON = 8.0
# The margin over the most frequent word with the defaults of version 0.1, whose vocabulary had
# 1,000 words: 25.75% against 21.64%.
EARLIER_MARGIN = 0.2575 - 0.2164
WANTED = 1.5


def main() -> None:
    """Write the file, train on it, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/debian"))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "debian.json")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    path = chosen.folder / "descriptions.jsonl"
    packages = write_descriptions(path)
    settings = ['task="jsonl"', f'data.path="{path}"', f"privacy.epsilon={EPSILON}", *chosen.set]
    result = text_figures(settings) | {"packages": packages, "settings": chosen.set}
    result["runs"] = [train(settings, seed, chosen.folder) for seed in range(chosen.seeds)]
    accuracy = statistics.fmean(run["accuracy"] for run in result["runs"])
    margin = accuracy - result["most_frequent_word"]
    result |= {
        "accuracy": accuracy,
        "accuracy_with_unknown_words": accuracy * result["known_share"],
        "margin": margin,
        "times_the_earlier_margin": margin / EARLIER_MARGIN,
    }
    chosen.out.write_text(json.dumps(result, indent=2) + "\n")
    show(result)
    if not margin >= WANTED * EARLIER_MARGIN:
        sys.exit(1)


def write_descriptions(path: Path) -> int:
    """Write {"user": maintainer, "text": description} per package; return the number of lines."""
    if shutil.which("apt-cache") is None:
        sys.exit("this benchmark reads Debian's package lists: run it on Debian")
    done = subprocess.run(["apt-cache", "dumpavail"], capture_output=True, text=True, check=True)
    lines = []
    for package in done.stdout.split("\n\n"):
        fields = dict(FIELD.findall(package))
        if len(fields) == 2:
            line = {"user": fields["Maintainer"].strip(), "text": fields["Description"]}
            lines.append(json.dumps(line) + "\n")
    if not lines:
        sys.exit("there are no package lists on this machine; run apt-get update first")
    path.write_text("".join(lines))
    return len(lines)


def text_figures(settings: list[str]) -> dict:
    """Who is there, which share of the words is known, and the accuracy of a constant guess."""
    task = load_training_task(read_config(None, settings))
    heldout = task.heldout.sentences
    known = int(np.sum(heldout[:, 1:] > UNKNOWN))
    unknown = int(np.sum(heldout[:, 1:] == UNKNOWN))
    constant = unigram_accuracy(heldout, heldout)
    return {
        "maintainers": len(task.train),
        "heldout_maintainers": len(task.heldout),
        "vocabulary": len(task.vocabulary.words),
        "known_share": known / (known + unknown),
        "most_frequent_word": constant,
        "most_frequent_word_with_unknown_words": constant * known / (known + unknown),
    }


def train(settings: list[str], seed: int, folder: Path) -> dict:
    """Run `dpftrl train` in a new folder."""
    run, started = folder / f"run-{seed}", time.monotonic()
    shutil.rmtree(run, ignore_errors=True)
    changes = [part for change in (*settings, f"seed={seed}") for part in ("--set", change)]
    command = [sys.executable, "-m", "dpftrl", "train", *changes, "--out", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    result = json.loads(done.stdout)
    names = ("accuracy", "perplexity", "epsilon", "delta", "rounds", "verified")
    seconds = round(time.monotonic() - started, 1)
    return {"seed": seed, **{name: result[name] for name in names}, "seconds": seconds}


def show(result: dict) -> None:
    """Print the figures."""
    print(
        f"{result['packages']:,} descriptions; {result['maintainers']:,} maintainers to train on, "
        f"{result['heldout_maintainers']:,} held out\n"
        f"{result['vocabulary']:,} words cover {result['known_share']:.1%} of all words\n"
        f"known words:           accuracy {result['accuracy']:.2%}, most frequent word "
        f"{result['most_frequent_word']:.2%}\n"
        f"with unknown words:    accuracy {result['accuracy_with_unknown_words']:.2%}, most "
        f"frequent word {result['most_frequent_word_with_unknown_words']:.2%}\n"
        f"margin on known words: {100 * result['margin']:.2f} points, "
        f"{result['times_the_earlier_margin']:.2f} times that of version 0.1"
    )


if __name__ == "__main__":
    main()
