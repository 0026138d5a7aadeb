"""Answers of earlier runs: found by what they follow from, never believed where their file is not whole, bounded."""

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from layerwise import cache
from layerwise.cache import Answers, UnkeyedError, answers, folder, key_of
from layerwise.config import Config, SearchSpace


def test_an_answer_is_kept_until_its_file_is_altered(tmp_path: Path) -> None:
    said: list[str] = []
    kept = Answers(tmp_path / "here", said.append)
    assert kept.find("key") is None
    kept.keep("key", {"seconds": 0.1, "names": ["ä"]})
    assert kept.find("key") == {"seconds": 0.1, "names": ["ä"]}
    assert not said
    (file,) = (tmp_path / "here").iterdir()
    for text in (file.read_text().replace("0.1", "0.2"), file.read_text()[:-1], "", "\xff"):
        file.write_bytes(text.encode("latin-1"))
        assert kept.find("key") is None
        assert "here/key.json is of no use, so the answer is found anew" in said.pop()


def test_the_oldest_answers_go(tmp_path: Path) -> None:
    kept = Answers(tmp_path, print, most_bytes=3 * 1100)
    for age, key in enumerate("abcd"):
        kept.keep(key, "x" * 1000)
        os.utime(tmp_path / f"{key}.json", (age, age))
        if key == "c":
            assert kept.find("a")  # which is no longer old
    assert sorted(file.stem for file in tmp_path.iterdir()) == ["a", "c", "d"]


def test_what_cannot_be_kept_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").touch()
    kept = Answers(tmp_path / "file" / "folder", said.append)
    kept.keep("key", 1)
    assert said.pop().startswith("the answer is not kept for later runs:")
    assert kept.find("key") is None


def test_keys_differ_with_every_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config.of({"n": 2, "c": 4})
    other = Config.of({"n": 4, "c": 2})
    facts = [1, 1.0, True, "1", None, (1,), ((1,),), {1: 2}, {1: 3}, config, other, SearchSpace(8)]
    keys = {key_of(fact) for fact in facts} | {key_of(1, 2), key_of(2, 1), key_of()}
    assert len(keys) == len(facts) + 3
    assert key_of({"a": 1, "b": config}) == key_of({"b": Config.of({"c": 4, "n": 2}), "a": 1})
    monkeypatch.setattr(cache, "_code", lambda: "other sources")
    assert key_of(config) not in keys


def test_there_is_no_key_for_what_is_not_layerwise_s_own() -> None:
    @dataclass(frozen=True)
    class Mine:
        number: int

    for stranger in (Mine(1), [Mine(1)], {"a": Mine(1)}, object(), 1j):
        with pytest.raises(UnkeyedError):
            key_of(stranger)


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("LAYERWISE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    assert folder().parent == tmp_path
    assert folder().stat().st_mode & 0o777 == 0o700


def test_a_cache_among_temporary_files_that_others_can_write_into_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("LAYERWISE_CACHE", raising=False)
    monkeypatch.delenv("LAYERWISE_NO_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("~none").expanduser())  # which raises
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    place = tmp_path / f"layerwise-{os.getuid()}"
    place.mkdir()
    place.chmod(0o777)
    assert answers() is None
    place.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    place.symlink_to(tmp_path / "elsewhere")
    assert answers() is None
    assert capsys.readouterr().err.count("set LAYERWISE_CACHE to a folder of your own") == 2
    place.unlink()
    assert answers() is not None


def test_what_json_cannot_hold_is_not_kept(tmp_path: Path) -> None:
    said: list[str] = []
    Answers(tmp_path, said.append).keep("key", float("inf"))
    assert "is not kept for later runs" in said[0]
    assert not list(tmp_path.iterdir())


def test_where_answers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAYERWISE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert folder() == Path("/x/layerwise")
    monkeypatch.setenv("LAYERWISE_CACHE", "/y")
    assert answers() is None  # the tests keep none
    monkeypatch.delenv("LAYERWISE_NO_CACHE")
    assert answers(wanted=False) is None
    found = answers()
    assert found is not None
    assert found.place == Path("/y/answers")
