"""The key of a run on several machines: its text, its file, and what is refused."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ltui.training.nodes.link_key import KEY_VARIABLE, LinkKey
from ltui.training.problem import ProblemError


def test_text_and_key_are_equivalent() -> None:
    key = LinkKey.generate()
    assert LinkKey.from_text(f" {key.text}\n", "x") == key
    assert len({key.secret, key.head_secret, key.agent_secret}) == 3
    assert LinkKey.generate() != key


def test_neither_repr_nor_str_shows_the_key() -> None:
    key = LinkKey.generate()
    for shown in (repr(key), str(key), f"{key}", repr({"key": key})):
        assert key.text not in shown
        assert key.text[-20:] not in shown
        assert repr(key.secret) not in shown
        assert key.fingerprint in shown


def test_a_created_file_is_private_and_complete(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    mask = os.umask(0)
    try:
        key = LinkKey.read_or_create(path)
    finally:
        os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text() == key.text + "\n"
    assert LinkKey.read_or_create(path) == key
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["node.key"]


def test_many_creators_get_one_key(tmp_path: Path) -> None:
    path = tmp_path / "node.key"
    start = threading.Barrier(8)

    def create(_: int) -> LinkKey:
        start.wait()
        return LinkKey.read_or_create(path)

    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(create, range(8)))
    assert len(set(keys)) == 1


def test_without_hard_links_the_file_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "node.key"
    key = LinkKey.read_or_create(path)
    assert LinkKey.read(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o777])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "node.key"
    key = LinkKey.read_or_create(path)
    path.chmod(mode)
    with pytest.raises(ProblemError) as caught:
        LinkKey.read(path)
    text = str(caught.value)
    assert f"mode {mode:04o}" in text
    assert "chmod 600" in text
    assert KEY_VARIABLE in text
    assert key.text not in text


def test_a_missing_file_names_both_remedies(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"node\.key.*No such file.*LTUI_NODE_KEY"):
        LinkKey.read(tmp_path / "node.key")
    with pytest.raises(ProblemError, match=r"LTUI_NODE_KEY.*missing"):
        LinkKey.find(None, {})


def test_a_path_that_cannot_be_a_key_file_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="cannot be written"):
        LinkKey.read_or_create(tmp_path / "absent" / "node.key")
    os.mkfifo(tmp_path / "node.key", 0o600)
    with pytest.raises(ProblemError, match="not a file"):
        LinkKey.read(tmp_path / "node.key")


@pytest.mark.parametrize("damage", ["", "secret", "{text}x", "{half}", "\x00\xff"])
def test_damaged_text_is_refused_and_not_repeated(tmp_path: Path, damage: str) -> None:
    text = LinkKey.generate().text
    damaged = damage.format(text=text, half=text[:40])
    path = tmp_path / "node.key"
    path.write_text(damaged)
    path.chmod(0o600)
    with pytest.raises(ProblemError, match="not the key of a run") as caught:
        LinkKey.read(path)
    assert text[20:40] not in str(caught.value)


def test_the_environment_comes_first(tmp_path: Path) -> None:
    in_file = LinkKey.read_or_create(tmp_path / "node.key")
    other = LinkKey.generate()
    assert LinkKey.find(tmp_path / "node.key", {}) == in_file
    assert LinkKey.find(tmp_path / "node.key", {KEY_VARIABLE: ""}) == in_file
    assert LinkKey.find(tmp_path / "node.key", {KEY_VARIABLE: other.text}) == other
    with pytest.raises(ProblemError, match="LTUI_NODE_KEY: this is not the key"):
        LinkKey.find(tmp_path / "node.key", {KEY_VARIABLE: "wrong"})
