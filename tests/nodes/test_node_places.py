"""Which machine gets which place of a run, and who is refused."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from ltui.training.nodes.join_offer import (
    JOIN,
    JoinDecline,
    JoinMessage,
    JoinOffer,
    JoinRefusal,
    JoinRequest,
    decode_join,
    encode_join,
    is_join,
)
from ltui.training.nodes.node_places import OFFER_S, DeclinedPlace, NodePlaces

B = JoinRequest(version="1.0", host="b", machine="id of b", pid=7)
C = JoinRequest(version="1.0", host="c", machine="id of c", pid=8)
D = JoinRequest(version="1.0", host="d", machine="id of d", pid=9)


def offer(node: int) -> JoinOffer:
    return JoinOffer(
        run_id="brave-owl-1", node=node, spec="id: x", versions={"python": "3.11"}, files=("/d",)
    )


def places() -> NodePlaces:
    """The places of a run on three nodes."""
    return NodePlaces(run_id="brave-owl-1", count=3, version="1.0", offer=offer)


def ask(at: NodePlaces, message: JoinMessage, now_s: float = 0.0) -> JoinMessage:
    return decode_join(at.answer(encode_join(message), now_s))


def refusal(at: NodePlaces, message: JoinMessage, now_s: float = 0.0) -> str:
    answer = ask(at, message, now_s)
    assert isinstance(answer, JoinRefusal), answer
    return answer.what


@pytest.mark.parametrize(
    "message",
    [
        B,
        replace(B, node=2),
        offer(1),
        JoinRefusal(what="no."),
        JoinRefusal(what="no.", remedy="yes."),
        JoinDecline(node=1, host="b", machine="id of b", reason="no GPU."),
    ],
)
def test_a_message_survives_the_wire(message: JoinMessage) -> None:
    frames = encode_join(message)
    assert is_join(frames)
    assert decode_join(frames) == message


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [JOIN],
        [JOIN, b"{"],
        [JOIN, b"[]"],
        [JOIN, b"[" * 200_000],
        [JOIN, b"\xff"],
        [JOIN, b"{}", b"{}"],
        [b"report", encode_join(B)[1]],
        [JOIN, b'{"join_version": 1}'],
        [JOIN, b'{"join_version": 1, "kind": "request"}'],
        [JOIN, encode_join(B)[1].replace(b'"pid": 7', b'"pid": "7"')],
        [JOIN, encode_join(offer(1))[1].replace(b'["/d"]', b"[1]")],
        [JOIN, encode_join(offer(1))[1].replace(b'"3.11"', b"3")],
        [JOIN, encode_join(B)[1].replace(b'"join_version": 1', b'"join_version": 2')],
    ],
)
def test_a_damaged_message(frames: list[bytes]) -> None:
    with pytest.raises(ValueError, match=r"message|version"):
        decode_join(frames)
    answer = decode_join(places().answer(frames, 0.0))
    assert isinstance(answer, JoinRefusal)
    assert "cannot be read" in answer.what


def test_machines_take_the_lowest_free_place() -> None:
    run = places()
    assert run.missing() == [1, 2]
    assert ask(run, B) == offer(1)
    assert run.missing() == [1, 2]
    assert run.reported(1, "id of b", "b", 70) is None
    assert run.missing() == [2]
    assert ask(run, C) == offer(2)
    assert run.reported(2, "id of c", "c", 80) is None
    assert run.missing() == []
    assert "all 3 nodes of brave-owl-1 have joined" in refusal(run, D)


def test_a_machine_asks_twice() -> None:
    run = places()
    assert ask(run, B) == offer(1)
    assert ask(run, B) == offer(1)
    assert ask(run, replace(B, node=2)) == offer(2)
    assert ask(run, C) == offer(1)
    run.reported(2, "id of b", "b", 70)
    assert refusal(run, B) == "this machine has already joined brave-owl-1 as node 2 (pid 70)."


def test_a_place_is_taken() -> None:
    run = places()
    assert ask(run, replace(B, node=1)) == offer(1)
    assert "taken: b is joining as it" in refusal(run, replace(C, node=1))
    run.reported(1, "id of b", "b", 70)
    assert "taken: b has joined as it" in refusal(run, replace(C, node=1))
    assert run.reported(1, "id of c", "c", 80) == "node 1 of brave-owl-1 is b (pid 70)"
    assert run.reported(3, "id of c", "c", 80) == "brave-owl-1 has no node 3"


@pytest.mark.parametrize("node", [0, 3, -1])
def test_a_place_that_does_not_exist(node: int) -> None:
    assert f"no node {node} to join" in refusal(places(), replace(B, node=node))


def test_an_offer_ends() -> None:
    run = places()
    ask(run, B, 0.0)
    ask(run, C, 1.0)
    assert "have joined already" in refusal(run, D, OFFER_S)
    assert ask(run, D, OFFER_S + 0.5) == offer(1)
    # The agent of a machine that was slow is refused, because the place is given away ...
    run.reported(1, "id of d", "d", 90)
    assert run.reported(1, "id of b", "b", 70) is not None
    # ... and is accepted if it is not.
    assert run.reported(2, "id of c", "c", 80) is None


def test_a_machine_declines() -> None:
    run = places()
    ask(run, B)
    run.answer(encode_join(JoinDecline(node=1, host="c", machine="id of c", reason="x")), 0.0)
    assert run.declined == []
    decline = JoinDecline(node=1, host="b", machine="id of b", reason="no GPU.")
    run.answer(encode_join(decline), 0.0)
    assert run.declined == [DeclinedPlace(1, "b", "no GPU.")]
    assert ask(run, C) == offer(1)


def test_a_machine_that_comes_back_gets_its_number() -> None:
    run = places()
    for node, request in ((1, B), (2, C)):
        ask(run, request)
        run.reported(node, request.machine, request.host, 1)
    run.gone(1)
    run.gone(2)
    assert run.missing() == [1, 2]
    assert ask(run, C) == offer(2)
    assert ask(run, B) == offer(1)


def test_another_version_is_refused() -> None:
    answer = ask(places(), replace(B, version="0.9"))
    assert isinstance(answer, JoinRefusal)
    assert answer.what == "this machine has ltui 0.9, and node 0 has 1.0."
    assert "same version" in str(answer.remedy)
    newer = {**json.loads(encode_join(B)[1]), "join_version": 9}
    unread = decode_join(places().answer([JOIN, json.dumps(newer).encode()], 0.0))
    assert isinstance(unread, JoinRefusal)
    assert "version 9" in unread.what
