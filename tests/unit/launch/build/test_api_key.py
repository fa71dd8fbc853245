"""Where the key may lie."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from launch.build.api_key import TEACHER_KEY_VARIABLE, read_api_key
from pipeline.errors import RecipeError


def key_file(folder: Path, mode: int, text: str = "from-a-file\n") -> dict[str, str]:
    path = folder / "key"
    path.write_text(text)
    path.chmod(mode)
    return {"EVENKEEL_API_KEY_FILE": str(path)}


def test_none_the_variable_or_the_file(tmp_path: Path) -> None:
    assert read_api_key({}) is None
    assert read_api_key({"EVENKEEL_API_KEY": "k"}) == "k"
    assert read_api_key(key_file(tmp_path, 0o600)) == "from-a-file"
    assert read_api_key(key_file(tmp_path, 0o400)) == "from-a-file"
    assert read_api_key({"EVENKEEL_API_KEY": "k", **key_file(tmp_path, 0o600)}) == "k"


def test_the_teacher_s_key_lies_apart_and_is_read_alike(tmp_path: Path) -> None:
    theirs = {"EVENKEEL_TEACHER_API_KEY_FILE": key_file(tmp_path, 0o600)["EVENKEEL_API_KEY_FILE"]}
    assert read_api_key(theirs, TEACHER_KEY_VARIABLE) == "from-a-file"
    assert read_api_key({"EVENKEEL_TEACHER_API_KEY": "k", **theirs}, TEACHER_KEY_VARIABLE) == "k"
    assert read_api_key({"EVENKEEL_API_KEY": "ours"}, TEACHER_KEY_VARIABLE) is None
    assert read_api_key(theirs) is None
    (tmp_path / "key").chmod(0o644)
    with pytest.raises(RecipeError, match=r"has mode 0644.*chmod 600"):
        read_api_key(theirs, TEACHER_KEY_VARIABLE)
    with pytest.raises(RecipeError, match=r"^EVENKEEL_TEACHER_API_KEY_FILE names .*/none, which cannot be read"):
        read_api_key({"EVENKEEL_TEACHER_API_KEY_FILE": str(tmp_path / "none")}, TEACHER_KEY_VARIABLE)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(RecipeError, match=rf"has mode {mode:04o}.*expected 0600 or 0400.*chmod 600"):
        read_api_key(key_file(tmp_path, mode))


def test_a_mounted_secret_belongs_to_root_and_to_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = key_file(tmp_path, 0o440)
    if Path(named["EVENKEEL_API_KEY_FILE"]).stat().st_uid != 0:
        pytest.skip("only root makes files of root")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert read_api_key(named) == "from-a-file"
    with pytest.raises(RecipeError, match="0444"):
        read_api_key(key_file(tmp_path, 0o444))


NO_KEYS = ["\n", "two words\n", "a\nb\n", "hunter2\x7f", "hunter\u00e9"]


@pytest.mark.parametrize("text", ["", *NO_KEYS])
def test_what_is_no_key_is_refused_without_showing_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match="holds no API key") as error:
        read_api_key(key_file(tmp_path, 0o600, text))
    assert not any(part in str(error.value) for part in ("two", "words", "hunter"))


@pytest.mark.parametrize("text", NO_KEYS)
def test_nor_is_it_taken_from_a_variable(text: str) -> None:
    """It cannot be sent: the HTTP client would refuse the header, and quote it."""
    with pytest.raises(RecipeError, match=r"^EVENKEEL_API_KEY holds no API key") as error:
        read_api_key({"EVENKEEL_API_KEY": text})
    assert not any(part in str(error.value) for part in ("two", "words", "hunter"))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"names .*/none, which cannot be read"):
        read_api_key({"EVENKEEL_API_KEY_FILE": str(tmp_path / "none")})
