"""A small exported model, made without training, and altered copies of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from small_runs import small_plan

from dpftrl.federated import Server, Settings
from dpftrl.models import ModelDescription
from dpftrl.models.description import TOKENS, Architecture, Preprocessing
from dpftrl.tasks.language_model import language_model

WORDS = ("the", "you", "see", "later", "soon")
NETWORK = language_model("window", 4 + len(WORDS), embedding=3, words=2, hidden=4)
DESCRIPTION = ModelDescription(
    task="jsonl",
    architecture=Architecture(name="window", sizes={"embedding": 3, "words": 2, "hidden": 4}),
    preprocessing=Preprocessing(cut="chat", sentence_length=6, tokens=TOKENS),
    words=WORDS,
    created_by="tests",
)


def released_run(place: Path, description: ModelDescription | None = DESCRIPTION) -> Path:
    """A run with one released round; returns its folder."""
    folder, plan = place / "run", small_plan(rounds=4)
    files = {} if description is None else {"model.json": description.content()}
    with Server.create(
        folder,
        plan,
        Settings(clip_norm=0.1, population="*friends*"),
        NETWORK.init(seed=3),
        state_folder=place / "state",
        files=files,
    ) as server:
        current = server.begin([f"person {i}" for i in range(60)])
        for client in current.clients[:3]:
            current.report(client, np.zeros(server.layout.size, np.float32), current.attempt)
        server.commit(current)
        server.export(place / "model.safetensors")
    return folder


def altered(
    path: Path,
    arrays: Callable[[dict[str, Any]], None] = lambda _: None,
    metadata: Callable[[dict[str, str]], None] = lambda _: None,
) -> Path:
    """A copy of an exported model whose arrays or metadata were changed."""
    with safe_open(path, "numpy") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        texts = dict(file.metadata())
    arrays(found)
    metadata(texts)
    target = path.with_name("altered.safetensors")
    save_file(found, target, texts)
    return target
