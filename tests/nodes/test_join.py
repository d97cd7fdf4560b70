"""Places of a run, and ``ltui join`` with a head that answers as the real one does."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ltui.app.cli import main
from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.nodes.head_link import HeadLink
from ltui.training.nodes.link_key import LinkKey
from ltui.training.nodes.messages import (
    JoinDecline,
    JoinOffer,
    JoinRefusal,
    JoinRequest,
    Orders,
    decode,
    encode,
)
from ltui.training.nodes.node_places import (
    OFFER_S,
    NodePlaces,
    make_offer,
    training_versions,
    version_difference,
)

# -- places ----------------------------------------------------------------------------------------

B = JoinRequest(version="1.0", host="b", machine="id of b", pid=7)
C = JoinRequest(version="1.0", host="c", machine="id of c", pid=8)
D = JoinRequest(version="1.0", host="d", machine="id of d", pid=9)


def offer(node: int) -> JoinOffer:
    return JoinOffer(
        run_id="brave-owl-1", node=node, spec="id: x", versions={"python": "3.11"}, files=("/d",)
    )


@pytest.fixture
def run() -> NodePlaces:
    """The places of a run on three nodes."""
    return NodePlaces(run_id="brave-owl-1", count=3, version="1.0", offer=offer)


def refusal(run: NodePlaces, request: JoinRequest, now_s: float = 0.0) -> str:
    answer = run.answer(request, now_s)
    assert isinstance(answer, JoinRefusal), answer
    return answer.what


def test_machines_take_the_lowest_free_place(run: NodePlaces) -> None:
    assert run.answer(B, 0.0) == offer(1)
    assert run.missing() == [1, 2]
    assert run.reported(1, "id of b", "b", 70) is None
    assert run.missing() == [2]
    assert run.answer(C, 0.0) == offer(2)
    assert run.reported(2, "id of c", "c", 80) is None
    assert run.missing() == []
    assert "all 3 nodes of brave-owl-1 have joined" in refusal(run, D)


def test_a_machine_asks_twice(run: NodePlaces) -> None:
    assert run.answer(B, 0.0) == run.answer(B, 0.0) == offer(1)
    assert run.answer(replace(B, node=2), 0.0) == offer(2)
    assert run.answer(C, 0.0) == offer(1)
    run.reported(2, "id of b", "b", 70)
    assert refusal(run, B) == "this machine has already joined brave-owl-1 as node 2 (pid 70)."


def test_a_place_is_taken(run: NodePlaces) -> None:
    assert run.answer(replace(B, node=1), 0.0) == offer(1)
    assert "taken: b is joining as it" in refusal(run, replace(C, node=1))
    run.reported(1, "id of b", "b", 70)
    assert "taken: b has joined as it" in refusal(run, replace(C, node=1))
    assert run.reported(1, "id of c", "c", 80) == "node 1 of brave-owl-1 is b (pid 70)"
    assert run.reported(3, "id of c", "c", 80) == "brave-owl-1 has no node 3"
    for node in (0, 3, -1):
        assert f"no node {node} to join" in refusal(run, replace(C, node=node))


def test_an_offer_ends(run: NodePlaces) -> None:
    run.answer(B, 0.0)
    run.answer(C, 1.0)
    assert "have joined already" in refusal(run, D, OFFER_S)
    assert run.answer(D, OFFER_S + 0.5) == offer(1)
    # The agent of a machine that was slow is refused, because the place is given away ...
    run.reported(1, "id of d", "d", 90)
    assert run.reported(1, "id of b", "b", 70) is not None
    # ... and is accepted if it is not.
    assert run.reported(2, "id of c", "c", 80) is None


def test_a_machine_declines_and_says_why_until_the_place_is_offered_again(run: NodePlaces) -> None:
    run.answer(B, 0.0)
    run.answer(JoinDecline(node=1, machine="id of c", reason="it lies"), 0.0)
    assert run.answer(C, 0.0) == offer(2)
    assert run.declined_text(run.missing()) == ""
    for node, machine in ((1, "id of b"), (2, "id of c")):
        run.answer(JoinDecline(node=node, machine=machine, reason="/d is missing."), 0.0)
    assert run.declined_text([1, 2]) == (
        "; b cannot join: /d is missing; c cannot join: /d is missing"
    )
    assert run.answer(D, 0.0) == offer(1)
    assert run.declined_text([1, 2]) == "; c cannot join: /d is missing"
    run.answer(JoinDecline(node=1, machine="id of d", reason="x" * 10_000), 0.0)
    assert len(run.declined_text([1])) < 400


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


# -- ltui join -------------------------------------------------------------------------------------

VERSION = version("ltui-train")


class Head:
    """The link of a head, and its places. No run is behind it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.key = LinkKey.read_or_create(folder / "node.key")
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
        self.places = NodePlaces(run_id=self.spec.id, count=2, version=VERSION, offer=self.offer)
        self.link = HeadLink(self.key, "127.0.0.1", 0, self._answer, lambda _: None)
        self.words = (f"127.0.0.1:{self.link.port}", "--key-file", str(folder / "node.key"))

    def _answer(self, _identity: str, payload: bytes) -> bytes:
        message = decode(payload)
        assert isinstance(message, (JoinRequest, JoinDecline))
        return encode(self.places.answer(message, 0.0))

    def offer(self, node: int) -> JoinOffer:
        return make_offer(self.spec, node, self.versions, Orders(attempt=1))

    def close(self) -> None:
        self.link.close()


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    with closing(Head(tmp_path)) as opened:
        yield opened


class Machine:
    """The machine that joins, with its own home."""

    def __init__(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._home, self._capsys = home, capsys

    def refused(self, *words: str) -> str:
        """Return what ``ltui join`` prints when it ends with 2: one line. It leaves nothing."""
        assert main(["join", *words]) == 2
        printed = self._capsys.readouterr()
        assert printed.out == ""
        assert printed.err.count("\n") == 1, printed.err
        assert not list(self._home.glob("nodes/*"))
        return printed.err

    def declines(self, head: Head, *words: str) -> str:
        """Return what it prints when it returns its place. The head can say why, too."""
        said = self.refused(*head.words, *words)
        assert head.places.missing() == [1]
        assert f"{socket.gethostname()} cannot join: " in head.places.declined_text([1])
        assert head.places.declined_text([1]).partition("join: ")[2][:80] in said
        other = JoinRequest(version=VERSION, host="c", machine="id of c", pid=1)
        assert isinstance(head.places.answer(other, 0.0), JoinOffer)
        return said


@pytest.fixture
def machine(private_home: Path, capsys: pytest.CaptureFixture[str]) -> Machine:
    return Machine(private_home, capsys)


def test_an_unusable_key(head: Head, machine: Machine, tmp_path: Path) -> None:
    place, option, _ = head.words
    wrong, missing = tmp_path / "wrong.key", tmp_path / "no.key"
    LinkKey.read_or_create(wrong)
    assert "key" in machine.refused(place, option, str(wrong))
    assert head.places.missing() == [1]
    assert "LTUI_NODE_KEY: the key of the run's nodes is missing" in machine.refused(place)
    said = machine.refused(place, option, str(missing))
    assert f"{missing}: the key of the run's nodes cannot be read" in said


def test_a_place_where_no_head_is(head: Head, machine: Machine) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        unused = f"127.0.0.1:{taken.getsockname()[1]}"
        for place, said in (
            (unused, f"Nothing listens at {unused}"),
            ("no-such-host.invalid:29501", "the host 'no-such-host.invalid' has no address here"),
            ("fd00::1:29501", "is not HOST:PORT"),
        ):
            assert said in machine.refused(place, *head.words[1:])


def test_another_version(head: Head, machine: Machine) -> None:
    head.places = NodePlaces(run_id="r", count=2, version="9.9", offer=head.offer)
    said = machine.refused(*head.words)
    assert f"this machine has ltui {VERSION}, and node 0 has 9.9" in said
    assert "same version" in said


def test_a_place_that_is_taken(head: Head, machine: Machine) -> None:
    head.places.reported(1, "another machine", "gpu-02", 7)
    assert "all 2 nodes of brave-owl-1 have joined already" in machine.refused(*head.words)
    said = machine.refused(*head.words, "--node", "1")
    assert "node 1 of brave-owl-1 is taken: gpu-02" in said
    assert "there is no node 2 to join" in machine.refused(*head.words, "--node", "2")


PRESET = {
    "command": None,
    "nproc": 1,
    "config": {
        "trainer": {"accelerator": "cpu", "devices": 1, "num_nodes": 2},
        "model": {"class_path": "my_model.Net", "init_args": {"weights": "data/weights.pt"}},
    },
}
NET = "class Net:\n    def __init__(self, weights): pass\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"cwd": "/no/such/folder"}, "the working directory /no/such/folder of node 0"),
        ({"command": ("no-such-program",)}, "no-such-program: there is no such command"),
        (PRESET, "`my_model.Net` cannot be imported: no module named `my_model`"),
    ],
)
def test_a_machine_that_cannot_run_it(
    tmp_path: Path, machine: Machine, changes: dict[str, Any], said: str
) -> None:
    with closing(Head(tmp_path, **changes)) as head:
        assert said in machine.declines(head)


def test_a_machine_without_the_data(tmp_path: Path, machine: Machine) -> None:
    node_0, here = tmp_path / "node-0", tmp_path / "here"
    for folder in (node_0, here):
        folder.mkdir()
        (folder / "my_model.py").write_text(NET)
    (node_0 / "data").mkdir()
    (node_0 / "data" / "weights.pt").touch()
    with closing(Head(node_0, **PRESET)) as head:
        said = machine.declines(head, "--cwd", str(here))
        assert "files that node 0 has and this machine lacks: data/weights.pt" in said


def test_other_versions_of_packages(tmp_path: Path, machine: Machine) -> None:
    (tmp_path / "my_model.py").write_text(NET)
    with closing(Head(tmp_path, **PRESET)) as head:
        assert "torch" in head.versions
        head.versions["torch"] = "1.9.1"
        assert "on this machine and 1.9.1 on node 0" in machine.declines(head)


def test_a_key_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key"]) == 0
    LinkKey.from_text(capsys.readouterr().out, "output")
