"""The documentation: its code runs, its commands exist, and its links lead somewhere.

Python blocks of one page share their names and run from the top of the page down, in an empty
folder. Commands of console blocks run in the slow tests; here, their options are looked up.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
import pytest

import dpftrl
from dpftrl.cli.main import dpftrl as command_line

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "deploy" / "README.md"]
# Pages whose Python blocks have a test of their own, with more checks.
TESTED_ELSEWHERE = {
    "README.md",
    "centralised.md",
    "large_models.md",
    "own_model.md",
    "using_models.md",
}
# Commands that run for ever, or that only mean something on another machine.
NOT_RUN = ("make ", "systemctl", "flwr ", "pip ", "source ")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """The commands of the console blocks of a page, without prompts and comments."""
    found: list[str] = []
    for block in blocks(page, "console"):
        joined = block.replace("\\\n", " ")
        lines = [line[2:] for line in joined.splitlines() if line.startswith("$ ")]
        found += [re.sub(r"\s#\s.*", "", line).strip() for line in lines]
    return found


def dpftrl_commands(page: Path) -> list[list[str]]:
    """The words of each call of dpftrl, also behind a pipe."""
    parts = [part.strip() for line in commands(page) for part in re.split(r"\||&&", line)]
    return [shlex.split(part)[1:] for part in parts if part.startswith("dpftrl ")]


def with_blocks(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


# --- what the Python blocks of some pages take from the reader's own program ---


def save_plan(**options: float) -> dpftrl.Plan:
    plan = dpftrl.make_plan(population=200, report_goal=20, epsilon=8.0, delta=1e-4, **options)
    dpftrl.save_plan(plan, "plan.json")
    return plan


def for_training() -> dict:
    save_plan(rounds=2)
    return {
        "available_clients": lambda: [f"client-{i}" for i in range(200)],
        "train_on": lambda clients, _arrays: ((name, {"w": np.ones(1000)}) for name in clients),
    }


def for_guarantees() -> dict:
    save_plan(rounds=2)
    updates = [np.full(6_400_000, 1e-4, np.float32)] * 2
    return {"update": updates[0].copy(), "updates": updates, "report_goal": 2, "released": 1}


def for_logs() -> dict:
    Path("export.csv").write_text("user_id;round;status\nann;0;ok\nbob;1;done\n")
    return {}


def for_flower() -> dict:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what Flower imports uses old names of click
        from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
        from flwr.clientapp import ClientApp

        from dpftrl.flower import DpFtrl, InProcessGrid, client_mod

    app = ClientApp(mods=[client_mod()])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        arrays = message.content["arrays"].to_numpy_ndarrays()
        changed = ArrayRecord([array + context.run_config["lr"] for array in arrays])
        metrics = MetricRecord({"num-examples": 1})
        return Message(RecordDict({"arrays": changed, "metrics": metrics}), reply_to=message)

    plan = dpftrl.make_plan(population=20_000, report_goal=20, rounds=2, epsilon=8.0, delta=1e-5)
    return {
        "client_app": app,
        "plan": plan,
        "settings": dpftrl.Settings(clip_norm=1.0),
        "arrays": ArrayRecord([np.zeros(5, np.float32)]),
        "DpFtrl": DpFtrl,
        "InProcessGrid": InProcessGrid,
    }


READERS_PROGRAM: dict[str, Callable[[], dict]] = {
    "training.md": for_training,
    "guarantees.md": for_guarantees,
    "logs.md": for_logs,
    "flower.md": for_flower,
}


@pytest.mark.parametrize(
    "page", [p for p in with_blocks("python") if p.name not in TESTED_ELSEWHERE], ids=name_of
)
def test_the_python_blocks_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPFTRL_STATE", str(tmp_path / "state"))
    names = READERS_PROGRAM.get(page.name, dict)()
    names["__name__"] = "__main__"
    for block in blocks(page, "python"):
        exec(compile(block, name_of(page), "exec"), names)


@pytest.mark.parametrize("page", with_blocks("console"), ids=name_of)
def test_the_commands_of_a_page_exist_with_their_options(page):
    for words in dpftrl_commands(page):
        command: click.Command = command_line
        context = click.Context(command)
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            found = command.get_command(context, words.pop(0))
            assert found is not None, words
            command = found
        options = [(*option.opts, *option.secondary_opts) for option in command.params]
        known = {name for names in options for name in names}
        used = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= known | {"--help", "--version"}, f"dpftrl {command.name}: {used - known}"


def test_a_wrong_option_is_noticed(tmp_path):
    (page := tmp_path / "page.md").write_text("```console\n$ dpftrl plan --no-such 3\n```\n")
    with pytest.raises(AssertionError, match="--no-such"):
        test_the_commands_of_a_page_exist_with_their_options(page)


# --- links ---


def anchors(page: Path) -> set[str]:
    """The anchors of the headings of a page, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


def broken_links(page: Path) -> list[str]:
    """The links of a page to files or headings that do not exist."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=name_of
)
def test_links_lead_to_files_and_headings_that_exist(page):
    assert broken_links(page) == []


def test_a_broken_link_is_noticed(tmp_path):
    (page := tmp_path / "page.md").write_text("# One\n[a](#one) [b](#two) [c](none.md)\n")
    assert broken_links(page) == ["#two", "none.md"]


# --- commands, run for real ---

SMALL_RUN = "dpftrl train --set privacy.rounds=4 --set privacy.report_goal=40"
PLAN = "dpftrl plan --population 1174 --report-goal 40 --rounds 4 --epsilon 8 --delta 1e-4"
# Shell commands that make what a page takes for granted.
PREPARE = {
    "accounting.md": f"{SMALL_RUN} --out run && ln -s run RUN && dpftrl account blt-b400 "
    "--rounds 9 --min-sep 3 --noise-multiplier 7 --delta 1e-10 --out second.json",
    "logs.md": f"{SMALL_RUN} --out run && {PLAN} --out plan.json && python make_logs.py",
    "operations.md": f"{SMALL_RUN} --out run",
    "statement.md": f"mkdir out && {SMALL_RUN} --out out/run && cp out/run/plan.json .",
    "training.md": f"{SMALL_RUN} --set population='\"es-ES keyboards\"' --out es && "
    "dpftrl export es es.safetensors && dpftrl train --show-config > pt.toml",
    "paper.md": f"mkdir docs && cp -r {ROOT}/docs/paper {ROOT}/docs/paper.md docs",
}
# An export, events with times, and lines of JSON: logs as other systems write them.
MAKE_LOGS = """
import gzip, json
import polars as pl
rows = [(f"c{i}", i % 4) for i in range(8)]
with open("export.csv", "w") as file:
    file.write("user_id;iteration;outcome\\n")
    file.writelines(f"{client};{turn};ok\\n" for client, turn in rows)
with gzip.open("events.jsonl.gz", "wt") as file:
    file.writelines(json.dumps({"client": c, "round": r}) + "\\n" for c, r in rows)
times = [f"2026-01-0{1 + turn}T00:00:00" for _, turn in rows]
data = pl.DataFrame({"client": [c for c, _ in rows], "reported_at": times})
data.with_columns(pl.col("reported_at").str.to_datetime(time_zone="UTC")).write_parquet("events.parquet")
"""


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "DPFTRL_STATE": str(folder / "state")}
    editor = folder / "editor.sh"
    if not editor.exists():  # stands for the reader, who enters the path of the file
        change = 's|^# path = .*|path = "people.jsonl"|; s|^report_goal = .*|report_goal = 20|'
        editor.write_text(f"#!/bin/sh\nsed -i '{change}; s|^rounds = .*|rounds = 3|' \"$1\"\n")
        editor.chmod(0o755)
        lines = [{"user": f"u{i}", "text": "see you there later then"} for i in range(200)]
        (folder / "people.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=folder,
        env=environment | {"EDITOR": str(editor)},
        capture_output=True,
        text=True,
        timeout=1200,
    )


@pytest.mark.slow
@pytest.mark.parametrize("page", with_blocks("console"), ids=name_of)
def test_the_commands_of_a_page_run(page, tmp_path):
    (tmp_path / "make_logs.py").write_text(MAKE_LOGS)
    for block in blocks(page, "python") if page.name == "own_data.md" else []:
        (tmp_path / "block.py").write_text(block)
        assert shell("python block.py", tmp_path).returncode == 0
    if page.name in PREPARE:
        done = shell(PREPARE[page.name], tmp_path)
        assert done.returncode == 0, done.stderr
    for command in commands(page):
        if command.startswith(NOT_RUN):
            continue
        if "--prometheus" in command or command.startswith("dpftrl web"):
            command = f"timeout -s INT 20 {command} || test $? -eq 124 -o $? -eq 130"
        done = shell(command, tmp_path)
        # 1 is the answer of a check: a small run has warnings, or breaks what was planned.
        assert done.returncode in (0, 1), f"{command}\n{done.stderr}"
        assert "Traceback" not in done.stderr, done.stderr
