"""Which machine gets which place of a run, and who is refused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from ltui.training.nodes.messages import JoinDecline, JoinOffer, JoinRefusal, JoinRequest
from ltui.training.nodes.node_places import OFFER_S, NodePlaces

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


def ask(at: NodePlaces, request: JoinRequest, now_s: float = 0.0) -> JoinOffer | JoinRefusal:
    return at.answer(request, now_s)


def refusal(at: NodePlaces, request: JoinRequest, now_s: float = 0.0) -> str:
    answer = at.answer(request, now_s)
    assert isinstance(answer, JoinRefusal), answer
    return answer.what


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
    run.answer(JoinDecline(node=1, machine="id of c"), 0.0)
    assert ask(run, C) == offer(2)
    run.answer(JoinDecline(node=1, machine="id of b"), 0.0)
    assert ask(run, D) == offer(1)


def test_another_version_is_refused() -> None:
    answer = ask(places(), replace(B, version="0.9"))
    assert isinstance(answer, JoinRefusal)
    assert answer.what == "this machine has ltui 0.9, and node 0 has 1.0."
    assert "same version" in str(answer.remedy)
