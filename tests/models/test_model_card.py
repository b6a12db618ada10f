"""The model card: valid YAML, the privacy statement, and no private statistics."""

import pytest

pytest.importorskip("equinox")
pytest.importorskip("yaml")

import yaml
from exported import released_run

from dpftrl.models import load_model, model_card
from dpftrl.statement.from_files import statement_of_files


@pytest.mark.parametrize("is_described", [True, False])
def test_a_card_has_metadata_that_hugging_face_reads_and_the_statement(tmp_path, is_described):
    folder = released_run(tmp_path, **({} if is_described else {"description": None}))
    statement = statement_of_files(folder / "plan.json", folder, state_folder=tmp_path / "state")
    model = load_model(tmp_path / "model.safetensors")
    card = model_card(model, statement)
    _, front, text = card.split("---\n", 2)
    metadata = yaml.safe_load(front)
    assert metadata["library_name"] == "dpftrl"
    assert "differential-privacy" in metadata["tags"]
    assert ("next-word-prediction" in metadata["tags"]) is is_described
    assert float(metadata["privacy"]["epsilon"]) >= model.epsilon
    assert metadata["privacy"]["runs"] == [model.runs[0].run]
    assert text.count("\n# ") == 1
    assert "\n## Privacy statement" in text
    assert statement.summary.split(".")[0] in text.replace("\\", "")
    assert r"\*friends\*" in text  # a label cannot become markup
    assert "](" not in text.replace("](https", "")  # no image or link to a file that is not there
    assert ("dpftrl predict" in text) is is_described
    assert "accuracy" not in text.lower()
