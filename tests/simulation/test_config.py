"""The configuration of a training: checking, reading and writing it."""

import re
import shlex

import msgspec
import pytest

from dpftrl import AdaptiveClipping
from dpftrl.errors import InvalidInput
from dpftrl.simulation.config import (
    EXAMPLES,
    PRESETS,
    Config,
    Data,
    Local,
    Privacy,
    Simulation,
    check_beside_plan,
    config_text,
    read_config,
    read_run_config,
)
from dpftrl.simulation.training import make_plan


def test_another_optimizer_replaces_all_of_the_default():
    config = read_config(None, ['server={name="adam",learning_rate=0.1}'])
    assert config.server.learning_rate == 0.1
    assert read_config(None, ["privacy.noise_multiplier=3.0"]).privacy.epsilon is None
    with pytest.raises(InvalidInput, match="momentum"):
        read_config(None, ['server={name="adam",momentum=0.1}'])
    assert isinstance(config, Config)


def test_the_clip_norm_is_a_number_or_adaptive_or_a_table(tmp_path):
    assert read_config(None, ['clip_norm="adaptive"']).clip_norm == "adaptive"
    config = read_config(None, ["clip_norm.start=3.0", "clip_norm.beta=0.2"])
    assert config.clip_norm == AdaptiveClipping(start=3.0, beta=0.2)
    for one in (config, read_config(None, ['clip_norm="adaptive"'])):
        (tmp_path / "config.toml").write_text(config_text(one))
        assert read_config(tmp_path / "config.toml") == one
    for wrong in ('"median"', "0.0", "{beta=1.5}", "{start=1.0,stop=2.0}", '""'):
        with pytest.raises(InvalidInput, match="clip_norm"):
            read_config(None, [f"clip_norm={wrong}"])


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (Config, {"seed": -1}),
        (Config, {"evaluate_every": 0}),
        (Data, {"heldout_share": float("nan")}),
        (Local, {"learning_rate": float("inf")}),
        (Privacy, {"budget": 0.0}),
        (Simulation, {"straggler_share": float("nan")}),
        (Simulation, {"most_available": 0.0}),
    ],
)
def test_invalid_sections_are_refused_in_python_too(kind, wrong):
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        kind(**wrong)


def test_a_heldout_share_of_zero_is_refused_with_a_reason():
    with pytest.raises(InvalidInput, match="evaluated on held-out users"):
        read_config(None, ["data.heldout_share=0"])


def _missing(config: Config) -> list[str]:
    tables = msgspec.to_builtins(config)
    return [name for name, value in tables.items() if value is None] + [
        f"{table}.{name}"
        for table, values in tables.items()
        if isinstance(values, dict)
        for name, value in values.items()
        if value is None
    ]


@pytest.mark.parametrize(
    "config",
    [
        *PRESETS.values(),
        read_config(None, ['server={name="adam"}', "privacy.noise_multiplier=2.0"]),
    ],
)
def test_settings_without_a_value_are_shown_as_comments(config, tmp_path):
    path = tmp_path / "config.toml"
    for key in _missing(config):
        name = key.rpartition(".")[2]
        uncommented, count = re.subn(rf"(?m)^# ({name} = .+  # .+)$", r"\1", config_text(config))
        assert count == 1, key
        path.write_text(uncommented)
        whole = msgspec.to_builtins(read_config(path))
        table = whole[key.partition(".")[0]] if "." in key else whole
        assert table[name] is not None, key
    path.write_text(config_text(config))
    assert read_config(path) == config


def test_every_example_belongs_to_a_setting():
    shown = {key for config in (*PRESETS.values(), Config()) for key in _missing(config)}
    without_noise = _missing(read_config(None, ["privacy.noise_multiplier=2.0"]))
    bare = {f"data.{name}" for name, value in msgspec.to_builtins(Data()).items() if value is None}
    assert set(EXAMPLES) == shown | set(without_noise) | bare


@pytest.mark.parametrize("content", [b'task = "caf\xe9"', "seed = 1".encode("utf-16")])
def test_a_file_in_another_encoding_is_refused(content, tmp_path):
    path = tmp_path / "config.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"config\.toml is not text in UTF-8"):
        read_config(path)


def test_a_byte_order_mark_is_accepted(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text("seed = 3", encoding="utf-8-sig")
    assert read_config(path).seed == 3


def test_a_task_that_is_not_a_string_is_refused():
    with pytest.raises(InvalidInput, match="tasks are"):
        read_config(None, ['task=["poetry"]'])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.path=my.jsonl", """text needs quotes: --set 'data.path="my.jsonl"'"""),
        ("task=jsonl", """text needs quotes: --set 'task="jsonl"'"""),
        ("population=people's own", "text needs quotes"),
        ("model.other_people=abc", """text needs quotes: --set 'model.other_people=["abc"]'"""),
        ("privacy.epsilon=eight", "privacy.epsilon needs a number, got 'eight'"),
        ("model.pretraining_cooldown=yes", "pretraining_cooldown needs true or false, got 'yes'"),
        ("privacy.rounds", "write KEY=VALUE, such as --set privacy.rounds=100"),
        ("model.sizes.hidden=big", "text needs quotes"),
        ('data.path="my.jsonl', "text needs quotes"),
    ],
)
def test_a_change_that_is_not_toml_is_explained(change, message):
    with pytest.raises(InvalidInput) as refusal:
        read_config(None, [change])
    assert str(refusal.value).endswith(message)


def test_the_suggested_quoting_is_accepted():
    with pytest.raises(InvalidInput) as refusal:
        read_config(None, ['task="jsonl"', r"data.path=C:\my data\é.jsonl"])
    suggested = shlex.split(str(refusal.value).rpartition("--set ")[2])
    assert read_config(None, ['task="jsonl"', *suggested]).data.path == r"C:\my data\é.jsonl"


@pytest.mark.parametrize(
    ("change", "name", "suggestion"),
    [
        ("privacy.epsilom=8", "privacy.epsilom", "privacy.epsilon"),
        ("epsilon=8", "epsilon", "privacy.epsilon"),
        ("epsilom=8", "epsilom", "privacy.epsilon"),
        ("epsilom=eight", "epsilom", "privacy.epsilon"),
        ("privcy.epsilon=8", "privcy.epsilon", "privacy.epsilon"),
        ("client.rate=8", "client.rate", None),
        ("zzz=8", "zzz", None),
    ],
)
def test_an_unknown_setting_gets_a_suggestion(change, name, suggestion):
    with pytest.raises(InvalidInput) as refusal:
        read_config(None, [change])
    meant = "" if suggestion is None else f"did you mean {suggestion}? "
    assert str(refusal.value) == (
        f"there is no setting {name}; {meant}`dpftrl train --show-config` lists all settings"
    )


def test_an_unknown_setting_of_a_file_names_the_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("[privacy]\nround = 3\n")
    with pytest.raises(InvalidInput, match=r"mine\.toml: there is no setting privacy\.round; did"):
        read_config(path)


def test_data_in_place_of_the_configuration_is_explained(tmp_path):
    path = tmp_path / "my people.jsonl"
    path.write_text('{"user": "ann", "text": "hi"}')
    with pytest.raises(InvalidInput) as refusal:
        read_config(path)
    assert str(refusal.value).endswith(f"""--set 'task="jsonl"' --set 'data.path="{path}"'""")


def test_a_plan_fixes_all_of_privacy_except_the_budget():
    check_beside_plan(["seed=1", "privacy.budget=3.0"])
    with pytest.raises(InvalidInput, match=r"--set privacy\.rounds: the plan decides"):
        check_beside_plan(["privacy.budget=3.0", "privacy={budget=3.0,rounds=4}"])


@pytest.mark.parametrize(("rounds", "buffers"), [(1, 1), (3, 3), (4, 4), (12, 4)])
def test_a_short_training_has_fewer_buffers(rounds, buffers):
    plan = make_plan(Privacy(rounds=rounds, report_goal=2, epsilon=8.0), 100)
    assert plan.mechanism.memory(rounds) <= buffers


def test_more_buffers_than_rounds_are_refused():
    with pytest.raises(InvalidInput, match="buffers must be at most the rounds"):
        make_plan(Privacy(rounds=3, report_goal=2, epsilon=8.0, buffers=4), 100)


def test_a_run_is_read_without_the_defaults_of_its_task(tmp_path):
    # A run of chitchat that was created when its task had no schedule.
    config = Config(task="chitchat")
    assert PRESETS["chitchat"].server.schedule is not None
    path = tmp_path / "config.toml"
    path.write_text(config_text(config))
    assert read_run_config(path) == config
    assert read_config(path) != config  # the defaults of the day fill what has no value
