"""Tang poems as public text and Song poets as users, on a tarball of a few poems."""

import hashlib

import numpy as np
import pytest
from tiny_poems import FILES, FOLDER, poem, write_tarball

from dpftrl._internal.cache import cache_folder
from dpftrl.errors import InvalidInput
from dpftrl.tasks import UNKNOWN, Vocabulary, load_task, poetry
from dpftrl.tasks.poetry import Tarball
from dpftrl.tasks.task import chance


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Use an empty cache, and no npm."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("DPFTRL_CACHE", str(folder))
    monkeypatch.setenv("PATH", "/nowhere")
    return folder


@pytest.fixture
def tarball(monkeypatch, tmp_path, cache):
    assert not cache.exists()
    return take(monkeypatch, write_tarball(tmp_path / "tiny.tgz", FILES))


def take(monkeypatch, path):
    """Make this tarball the expected one."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(poetry, "TARBALL", Tarball("chinese-poetry", "2.0.1", digest))
    return path


def load(path=None, **options):
    return load_task("poetry", path=path, **{"heldout_share": 0, "sentence_length": 4, **options})


def words_of(rows, vocabulary) -> list[str]:
    signs = ["", "", ".", "?", *vocabulary.words]
    return ["".join(signs[number] for number in row) for row in rows.tolist()]


def test_song_poets_are_users_with_lines_in_file_order(tarball):
    task = load(tarball)
    assert task.train.names == ("乙", "甲")
    assert words_of(task.train.of(0), task.vocabulary) == ["月."]
    assert words_of(task.train.of(1), task.vocabulary) == ["月山?.", "月水?.", "山水?."]
    assert "MIT" in task.source


def test_tang_poems_are_public_and_give_the_vocabulary(tarball):
    task = load(tarball)
    assert task.vocabulary.words == ("月", "山", "水")
    assert words_of(task.public, task.vocabulary) == ["月月月山", "水.", "????"]
    assert not task.public.flags.writeable


def test_the_vocabulary_does_not_depend_on_users(monkeypatch, tmp_path, tarball):
    before = load(tarball)
    song = f"{FOLDER}/poet.song.2000.json"
    other = {**FILES, song: [poem("丙", "私密私密私密。")]}
    after = load(take(monkeypatch, write_tarball(tmp_path / "other.tgz", other)))
    assert after.train.names == ("丙", "乙", "甲")
    assert after.vocabulary == before.vocabulary
    assert np.array_equal(after.public, before.public)
    assert set(after.train.of(0)[:, 1:].ravel()) == {UNKNOWN}


def test_a_given_vocabulary_is_used(tarball):
    task = load(tarball, vocabulary=Vocabulary(("一",)))
    assert words_of(task.train.of(1), task.vocabulary) == ["??一.", "???.", "???."]


def test_the_cached_task_is_equal_and_needs_no_tarball(tarball, cache):
    first = load(tarball)
    (held,) = cache.iterdir()
    assert held.suffix == ".safetensors"
    tarball.unlink()
    again = load()
    assert again.train.names == first.train.names
    assert again.vocabulary == first.vocabulary
    for name in ("sentences", "offsets"):
        assert np.array_equal(getattr(again.train, name), getattr(first.train, name))
    assert np.array_equal(again.public, first.public)


@pytest.mark.parametrize(
    "other",
    [
        {"sentence_length": 3},
        {"sentences_per_user": 1},
        {"vocabulary_size": 2},
        {"vocabulary": Vocabulary(("月", "山", "火"))},
    ],
)
def test_other_settings_use_another_cache_entry(tarball, cache, other):
    load(tarball)
    load(tarball, **other)
    assert len(list(cache.iterdir())) == 2


def test_holding_out_users_reuses_the_cache_entry(tarball, cache):
    everybody = load(tarball)
    between = (chance("甲", "heldout") + chance("乙", "heldout")) / 2
    some = load(tarball, heldout_share=between)
    assert len(list(cache.iterdir())) == 1
    assert len(some.train) == len(some.heldout) == 1
    assert {*some.train.names, *some.heldout.names} == {*everybody.train.names}


def test_a_damaged_cache_is_ignored(tarball, cache):
    first = load(tarball)
    (held,) = cache.iterdir()
    content = held.read_bytes()
    for place in range(0, len(content), 5):
        held.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        again = load(tarball)
        assert again.train.names == first.train.names
        assert again.vocabulary == first.vocabulary
        assert np.array_equal(again.train.sentences, first.train.sentences)
        assert np.array_equal(again.public, first.public)


def test_a_cache_that_cannot_be_written_is_ignored(tarball, cache):
    cache.touch()
    assert len(load(tarball).train) == 2


def test_a_given_tarball_is_checked_even_if_the_task_is_cached(tarball):
    load(tarball)
    content = bytearray(tarball.read_bytes())
    content[-1] ^= 1
    tarball.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"is not chinese-poetry@2\.0\.1: its SHA-256 is"):
        load(tarball)


def test_a_cached_tarball_is_used(tarball, cache):
    cache.mkdir()
    tarball.rename(cache / "chinese-poetry-2.0.1.tgz")
    assert load().train.names == ("乙", "甲")


def test_progress_is_reported(tarball):
    progress = []
    load(tarball, on_progress=lambda done, what: progress.append((done, what)))
    assert progress[-1] == (None, "encoding the poems")
    assert all(0 < done <= 1 and what == "reading the poems" for done, what in progress[:-1])
    assert len(progress) == 4


@pytest.mark.slow
def test_the_real_tarball(monkeypatch, tmp_path):
    path = cache_folder() / poetry.TARBALL.file_name
    if not path.exists():
        pytest.skip("the tarball of poems is not in the cache")
    monkeypatch.setenv("DPFTRL_CACHE", str(tmp_path))
    tang, song = poetry.read_poems(poetry.TARBALL.read(path), lambda *_: None)
    assert (len(tang), len(song)) == (57_607, 254_248)
    lines = [sum(len(p.paragraphs) for p in poems) for poems in (tang, song)]
    assert lines == [268_283, 1_099_146]
    poets = [{p.author for p in poems} for poems in (tang, song)]
    assert [len(names) for names in poets] == [3_663, 8_934]
    assert len(poets[0] & poets[1]) == 229
    task = load_task("poetry", path=path)
    assert len(task.train) + len(task.heldout) == 8_682
    assert len(task.public) == 254_653
    assert not (poets[0] & {*task.train.names, *task.heldout.names})
    # Most of a Song poet's characters are among the 4,000 most frequent of the Tang poems.
    words = task.train.sentences[task.train.sentences >= UNKNOWN]
    assert np.mean(words == UNKNOWN) < 0.04
