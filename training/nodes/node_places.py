"""Places of the nodes of a run at the head: which machine has which number. Pure.

A machine asks for a place, is offered one, and keeps it for some time, until its agent sends its
first report. The place is then taken until the head says that the agent is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct

from ltui.training.nodes.join_offer import (
    JoinDecline,
    JoinOffer,
    JoinRefusal,
    JoinRequest,
    decode_join,
    encode_join,
)

OFFER_S = 60.0
"""Seconds for which an offered place is kept for a machine that has not yet an agent."""


class _Place(Struct):
    machine: str
    host: str
    pid: int
    offered_until_s: float | None
    """Time at which the offer ends; None if the agent has reported."""


class DeclinedPlace(Struct, frozen=True):
    """A machine that could not run the specification."""

    node: int
    host: str
    reason: str


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
        self._last_machine: dict[int, str] = {}
        self.declined: list[DeclinedPlace] = []
        """Machines that returned their place since the head last emptied this list."""

    def answer(self, frames: Sequence[bytes], now_s: float) -> list[bytes]:
        """Return the answer to a message of ``join_offer``. ``now_s``: monotonic time."""
        try:
            message = decode_join(frames)
        except ValueError as error:
            return encode_join(_refuse(f"the request cannot be read: {error}.", _SAME_VERSION))
        if isinstance(message, JoinRequest):
            return encode_join(self._answer_request(message, now_s))
        if isinstance(message, JoinDecline):
            self._return_place(message)
            return encode_join(_refuse("the place was returned."))
        return encode_join(_refuse("the request is of an unknown kind.", _SAME_VERSION))

    def reported(self, node: int, machine: str, host: str, pid: int) -> str | None:
        """Note a report of the agent of ``node``. Return why it is not wanted; None if it is."""
        if not 0 < node < self._count:
            return f"{self._run_id} has no node {node}"
        if node in self._left_out:
            return f"{self._run_id} continues without node {node}, which was gone"
        place = self._places.get(node)
        if place is not None and place.offered_until_s is None and place.machine != machine:
            return f"node {node} of {self._run_id} is {place.host} (pid {place.pid})"
        self._places[node] = _Place(machine, host, pid, None)
        self._last_machine[node] = machine
        return None

    def gone(self, node: int) -> None:
        """Note that the agent of ``node`` has ended, so that a machine may take the place."""
        self._places.pop(node, None)

    def missing(self) -> list[int]:
        """Return the numbers of the nodes that have no agent."""
        return [
            node
            for node in range(1, self._count)
            if node not in self._left_out
            and (node not in self._places or self._places[node].offered_until_s is not None)
        ]

    def _answer_request(self, request: JoinRequest, now_s: float) -> JoinOffer | JoinRefusal:
        if request.version != self._version:
            return _refuse(
                f"this machine has ltui {request.version}, and node 0 has {self._version}.",
                _SAME_VERSION,
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
        if own is not None and self._places[own].offered_until_s is None:
            return _refuse(
                f"this machine has already joined {self._run_id} as node {own} "
                f"(pid {self._places[own].pid}).",
            )
        node = request.node if request.node is not None else own
        if node is None:
            node = self._free_place(request.machine)
        if node is None:
            return _refuse(f"all {self._count} nodes of {self._run_id} have joined already.")
        holder = self._places.get(node)
        if holder is not None and holder.machine != request.machine:
            verb = "is joining" if holder.offered_until_s is not None else "has joined"
            return _refuse(
                f"node {node} of {self._run_id} is taken: {holder.host} {verb} as it.",
                "Leave --node out to become the first node that is missing.",
            )
        if own is not None and own != node:
            del self._places[own]
        self._places[node] = _Place(request.machine, request.host, request.pid, now_s + OFFER_S)
        return self._offer(node)

    def _free_place(self, machine: str) -> int | None:
        """Return the place that the machine had before, or else the lowest free one."""
        taken = {*self._places, *self._left_out}
        free = [node for node in range(1, self._count) if node not in taken]
        before = [node for node in free if self._last_machine.get(node) == machine]
        return next(iter([*before, *free]), None)

    def _return_place(self, decline: JoinDecline) -> None:
        place = self._places.get(decline.node)
        if place is None or place.machine != decline.machine or place.offered_until_s is None:
            return
        del self._places[decline.node]
        self.declined.append(DeclinedPlace(decline.node, decline.host, decline.reason))


_SAME_VERSION = "Install the same version of ltui on every node."


def _refuse(what: str, remedy: str | None = None) -> JoinRefusal:
    return JoinRefusal(what=what, remedy=remedy)
