"""``ltui join`` with a head that answers as the real one does."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ltui.app.cli import main
from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.nodes.head_link import HeadLink
from ltui.training.nodes.link_key import LinkKey
from ltui.training.nodes.messages import JoinDecline, JoinOffer, JoinRequest, Orders, decode, encode
from ltui.training.nodes.node_places import (
    NodePlaces,
    make_offer,
    training_versions,
    version_difference,
)

VERSION = version("ltui-train")


class Head:
    """The link of a head, and its places. No run is behind it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.key = LinkKey.read_or_create(folder / "node.key")
        self.key_file = str(folder / "node.key")
        self.spec = RunSpec(
            id="brave-owl-1",
            name="brave-owl",
            created_at=0.0,
            cwd=str(folder),
            python=sys.executable,
            command=("true",),
            nproc=0,
            nodes=Nodes(count=2, rank=0, address="127.0.0.1", port=1),
        ).with_changes(**changes)
        self.versions = training_versions(self.spec)
        self.orders = Orders(attempt=1)
        self.places = NodePlaces(run_id=self.spec.id, count=2, version=VERSION, offer=self.offer)
        self.refused: list[str] = []
        self.link = HeadLink(
            self.key,
            "127.0.0.1",
            0,
            self._answer,
            self.refused.append,
        )

    def _answer(self, _identity: str, payload: bytes) -> bytes:
        message = decode(payload)
        assert isinstance(message, (JoinRequest, JoinDecline))
        return encode(self.places.answer(message, 0.0))

    def offer(self, node: int) -> JoinOffer:
        return make_offer(self.spec, node, self.versions, self.orders)

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.link.port}"

    def close(self) -> None:
        self.link.close()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    with closing(Head(tmp_path)) as opened:
        yield opened


def join(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what ``ltui join`` prints on standard error when it ends with 2: one line."""
    assert main(["join", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1, printed.err
    return printed.err


def nothing_is_left(home: Path, head: Head) -> bool:
    folder = home / "nodes"
    return (not folder.exists() or not list(folder.iterdir())) and head.places.missing() == [1]


def test_a_wrong_key(
    head: Head, tmp_path: Path, private_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.key"
    LinkKey.read_or_create(wrong)
    said = join(capsys, head.place, "--key-file", str(wrong))
    assert "key" in said
    assert nothing_is_left(private_home, head)


def test_no_key(head: Head, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "LTUI_NODE_KEY: the key of the run's nodes is missing" in join(capsys, head.place)
    missing = str(tmp_path / "no.key")
    assert f"{missing}: the key of the run's nodes cannot be read" in join(
        capsys, head.place, "--key-file", missing
    )


def test_nothing_listens(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f"Nothing listens at {place}" in join(capsys, place, "--key-file", head.key_file)


def test_no_such_host(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    said = join(capsys, "no-such-host.invalid:29501", "--key-file", head.key_file)
    assert "the host 'no-such-host.invalid' has no address here" in said


@pytest.mark.parametrize("place", ["here", "here:", ":29501", "here:0", "fd00::1:29501"])
def test_no_place(place: str, head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not HOST:PORT" in join(capsys, place, "--key-file", head.key_file)


def test_another_version(
    head: Head, private_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head.places = NodePlaces(run_id="r", count=2, version="9.9", offer=head.offer)
    said = join(capsys, head.place, "--key-file", head.key_file)
    assert f"this machine has ltui {VERSION}, and node 0 has 9.9" in said
    assert nothing_is_left(private_home, head)


def test_a_place_that_is_taken(head: Head, capsys: pytest.CaptureFixture[str]) -> None:
    head.places.reported(1, "another machine", "gpu-02", 7)
    words = (head.place, "--key-file", head.key_file)
    assert "all 2 nodes of brave-owl-1 have joined already" in join(capsys, *words)
    assert "node 1 of brave-owl-1 is taken: gpu-02" in join(capsys, *words, "--node", "1")
    assert "there is no node 2 to join" in join(capsys, *words, "--node", "2")


PRESET = {
    "command": None,
    "nproc": 1,
    "config": {
        "trainer": {"accelerator": "cpu", "devices": 1, "num_nodes": 2},
        "model": {"class_path": "my_model.Net", "init_args": {"weights": "data/weights.pt"}},
    },
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cwd": "/no/such/folder"}, "the working directory /no/such/folder of node 0"),
        ({"command": ("no-such-program",)}, "no-such-program: there is no such command"),
        (PRESET, "`my_model.Net` cannot be imported: no module named `my_model`"),
    ],
)
def test_a_machine_that_cannot_run_it(
    tmp_path: Path,
    private_home: Path,
    changes: dict[str, Any],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with closing(Head(tmp_path, **changes)) as head:
        assert said in join(capsys, head.place, "--key-file", head.key_file)
        other = JoinRequest(version=VERSION, host="c", machine="id of c", pid=1)
        assert isinstance(head.places.answer(other, 0.0), JoinOffer)
        assert nothing_is_left(private_home, head)


def test_a_machine_without_the_data(
    tmp_path: Path, private_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node_0, here = tmp_path / "node-0", tmp_path / "here"
    for folder in (node_0, here):
        folder.mkdir()
        (folder / "my_model.py").write_text("class Net:\n    def __init__(self, weights): pass\n")
    (node_0 / "data").mkdir()
    (node_0 / "data" / "weights.pt").touch()
    with closing(Head(node_0, **PRESET)) as head:
        head.offer(1)  # read while the files are there
        said = join(capsys, head.place, "--key-file", head.key_file, "--cwd", str(here))
        assert "files that node 0 has and this machine lacks: data/weights.pt" in said
        assert nothing_is_left(private_home, head)


def test_other_versions_of_packages(
    tmp_path: Path, private_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_model.py").write_text("class Net:\n    def __init__(self, weights): pass\n")
    with closing(Head(tmp_path, **PRESET)) as head:
        assert "torch" in head.versions
        head.versions["torch"] = "1.9.1"
        said = join(capsys, head.place, "--key-file", head.key_file)
        assert "on this machine and 1.9.1 on node 0" in said
        assert nothing_is_left(private_home, head)


@pytest.mark.parametrize(
    ("head", "here", "different"),
    [
        ({"python": "3.11", "torch": "2.6.0+cu124"}, {"python": "3.11", "torch": "2.6.1"}, None),
        ({"python": "3.11"}, {"python": "3.12"}, "python is 3.12 on this machine and 3.11"),
        ({"lightning": "2.6.6"}, {"lightning": "2.5.1"}, "lightning is 2.5.1"),
        ({"lightning": "2.6.6"}, {"pytorch-lightning": "2.5.1"}, None),
        ({}, {"python": "3.12"}, None),
    ],
)
def test_which_versions_fit(
    head: dict[str, str], here: dict[str, str], different: str | None
) -> None:
    text = version_difference(head, here)
    assert (text is None) if different is None else (different in str(text))


def test_a_key_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key"]) == 0
    LinkKey.from_text(capsys.readouterr().out, "output")
