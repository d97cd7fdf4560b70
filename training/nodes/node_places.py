"""Places of the nodes of a run at the head: which machine has which number. Pure.

A machine asks for a place, is offered one, and keeps it for some time, until its agent sends its
first report. The place is then taken until the head says that the agent is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from ltui.training.nodes.messages import (
    SAME_VERSION,
    JoinDecline,
    JoinOffer,
    JoinRefusal,
    JoinRequest,
)

OFFER_S = 60.0
"""Seconds for which an offered place is kept for a machine that has not yet an agent."""


class _Place(Struct):
    machine: str
    host: str
    pid: int
    offered_until_s: float | None
    """Time at which the offer ends; None if the agent has reported."""

    @property
    def has_reported(self) -> bool:
        return self.offered_until_s is None


class NodePlaces:
    """Places 1 to ``count - 1``; place 0 is the head's own."""

    def __init__(
        self,
        *,
        run_id: str,
        count: int,
        version: str,
        offer: Callable[[int], JoinOffer],
        left_out: Sequence[int] = (),
    ) -> None:
        """``version`` is that of ltui; ``offer`` returns the offer for a number.

        The run continues without the nodes ``left_out``.
        """
        self._left_out = frozenset(left_out)
        self._run_id = run_id
        self._count = count
        self._version = version
        self._offer = offer
        self._places: dict[int, _Place] = {}

    def answer(self, message: JoinRequest | JoinDecline, now_s: float) -> JoinOffer | JoinRefusal:
        """Return the answer to a machine without an agent. ``now_s``: monotonic time."""
        if isinstance(message, JoinRequest):
            return self._answer_request(message, now_s)
        self._return_place(message)
        return JoinRefusal(what="the place was returned.")

    def reported(self, node: int, machine: str, host: str, pid: int) -> str | None:
        """Note a report of the agent of ``node``. Return why it is not wanted; None if it is."""
        if not 0 < node < self._count:
            return f"{self._run_id} has no node {node}"
        if node in self._left_out:
            return f"{self._run_id} continues without node {node}, which was gone"
        place = self._places.get(node)
        if place is not None and place.has_reported and place.machine != machine:
            return f"node {node} of {self._run_id} is {place.host} (pid {place.pid})"
        self._places[node] = _Place(machine, host, pid, None)
        return None

    def missing(self) -> list[int]:
        """Return the numbers of the nodes that have no agent."""
        return [
            node
            for node in range(1, self._count)
            if node not in self._left_out
            and (node not in self._places or not self._places[node].has_reported)
        ]

    def _answer_request(self, request: JoinRequest, now_s: float) -> JoinOffer | JoinRefusal:
        if request.version != self._version:
            return _refuse(
                f"this machine has ltui {request.version}, and node 0 has {self._version}.",
                SAME_VERSION,
            )
        if request.node is not None and not 0 < request.node < self._count:
            return _refuse(
                f"there is no node {request.node} to join: {self._run_id} has {self._count} "
                "nodes, and node 0 is the one that started it.",
                f"Use a number from 1 to {self._count - 1}, or leave --node out.",
            )
        if request.node is not None and request.node in self._left_out:
            return _refuse(
                f"{self._run_id} continues without node {request.node}, which was gone.",
                "Stop the run and resume it to use all its nodes again.",
            )
        for number, place in list(self._places.items()):
            if place.offered_until_s is not None and place.offered_until_s < now_s:
                del self._places[number]
        own = next((n for n, p in self._places.items() if p.machine == request.machine), None)
        if own is not None and self._places[own].has_reported:
            return _refuse(
                f"this machine has already joined {self._run_id} as node {own} "
                f"(pid {self._places[own].pid}).",
            )
        node = request.node if request.node is not None else own
        if node is None:
            taken = {*self._places, *self._left_out}
            node = next((n for n in range(1, self._count) if n not in taken), None)
        if node is None:
            return _refuse(f"all {self._count} nodes of {self._run_id} have joined already.")
        holder = self._places.get(node)
        if holder is not None and holder.machine != request.machine:
            verb = "has joined" if holder.has_reported else "is joining"
            return _refuse(
                f"node {node} of {self._run_id} is taken: {holder.host} {verb} as it.",
                "Leave --node out to become the first node that is missing.",
            )
        if own is not None and own != node:
            del self._places[own]
        self._places[node] = _Place(request.machine, request.host, request.pid, now_s + OFFER_S)
        return self._offer(node)

    def _return_place(self, decline: JoinDecline) -> None:
        place = self._places.get(decline.node)
        if place is not None and place.machine == decline.machine and not place.has_reported:
            del self._places[decline.node]


def _refuse(what: str, remedy: str | None = None) -> JoinRefusal:
    return JoinRefusal(what=what, remedy=remedy)
