"""Places of the nodes of a run: which machine has which number, and what it is offered.

A machine asks for a place (``JoinClient``), is offered one, and keeps it for some time, until its
agent sends its first report. Before it runs the specification, it compares versions and files with
those of the head. The training interpreter is asked for its versions without importing torch.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.lifecycle.record_code import VERSIONS_SCRIPT
from ltui.training.nodes.agent_link import AgentLink
from ltui.training.nodes.link_key import LinkKey
from ltui.training.nodes.messages import (
    SAME_VERSION,
    JoinDecline,
    JoinOffer,
    JoinRefusal,
    JoinRequest,
    Message,
    MessageError,
    Orders,
    OrdersMessage,
    decode,
    encode,
    own_version,
)
from ltui.training.nodes.node_address import format_host_and_port, machine_id
from ltui.training.problem import ProblemError
from ltui.training.process.python_environment import program_command
from ltui.training.store.spec_file import spec_text

OFFER_S = 60.0
"""Seconds for which an offered place is kept for a machine that has not yet an agent."""
_MAX_REASON = 300
"""Maximum number of characters of the reason of a machine that cannot join."""


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
        self._declined: dict[int, str] = {}
        """Why a machine could not take a place: its last one, until another asks for the place."""

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

    def declined_text(self, nodes: Iterable[int]) -> str:
        """Return which machines could not take these places last, and why, each after a ";"."""
        # The thread of the link may change them meanwhile.
        texts = (self._declined.get(node) for node in nodes)
        return "".join(f"; {text}" for text in texts if text)

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
            return JoinRefusal(
                what=f"this machine has ltui {request.version}, and node 0 has {self._version}.",
                remedy=SAME_VERSION,
            )
        if request.node is not None and not 0 < request.node < self._count:
            return JoinRefusal(
                what=f"there is no node {request.node} to join: {self._run_id} has {self._count} "
                "nodes, and node 0 is the one that started it.",
                remedy=f"Use a number from 1 to {self._count - 1}, or leave --node out.",
            )
        if request.node is not None and request.node in self._left_out:
            return JoinRefusal(
                what=f"{self._run_id} continues without node {request.node}, which was gone.",
                remedy="Stop the run and resume it to use all its nodes again.",
            )
        for number, place in list(self._places.items()):
            if place.offered_until_s is not None and place.offered_until_s < now_s:
                del self._places[number]
        own = next((n for n, p in self._places.items() if p.machine == request.machine), None)
        if own is not None and self._places[own].has_reported:
            return JoinRefusal(
                what=f"this machine has already joined {self._run_id} as node {own} "
                f"(pid {self._places[own].pid}).",
            )
        node = request.node if request.node is not None else own
        if node is None:
            taken = {*self._places, *self._left_out}
            node = next((n for n in range(1, self._count) if n not in taken), None)
        if node is None:
            return JoinRefusal(
                what=f"all {self._count} nodes of {self._run_id} have joined already."
            )
        holder = self._places.get(node)
        if holder is not None and holder.machine != request.machine:
            verb = "has joined" if holder.has_reported else "is joining"
            return JoinRefusal(
                what=f"node {node} of {self._run_id} is taken: {holder.host} {verb} as it.",
                remedy="Leave --node out to become the first node that is missing.",
            )
        if own is not None and own != node:
            del self._places[own]
        self._places[node] = _Place(request.machine, request.host, request.pid, now_s + OFFER_S)
        self._declined.pop(node, None)
        return self._offer(node)

    def _return_place(self, decline: JoinDecline) -> None:
        place = self._places.get(decline.node)
        if place is not None and place.machine == decline.machine and not place.has_reported:
            del self._places[decline.node]
            if decline.reason:
                reason = decline.reason[:_MAX_REASON].rstrip(".")
                self._declined[decline.node] = f"{place.host} cannot join: {reason}"


_PROBE_S = 30.0
"""Seconds to wait for the training interpreter."""
_PACKAGES = ("torch", "lightning", "pytorch-lightning")
_PARTS_COMPARED = 2
"""Numbers of the version of Python and of each package that must be equal on all nodes."""


def training_versions(spec: RunSpec) -> dict[str, str]:
    """Return the versions of Python, torch and Lightning in the training interpreter.

    They are empty for a command of the user, and if the interpreter does not answer.
    """
    if spec.command is not None:
        return {}
    try:
        answer = subprocess.run(
            [*program_command(VERSIONS_SCRIPT, python=spec.python), *_PACKAGES],
            cwd=spec.cwd,
            env={**os.environ, **spec.env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=True,
        )
        document = json.loads(answer.stdout.strip().split("\n")[-1])
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return {str(name): str(version) for name, version in document.items()}


def version_difference(head: Mapping[str, str], here: Mapping[str, str]) -> str | None:
    """Return the first difference in words; None if the versions fit together.

    A package that only one side has is no difference: a missing one is reported by other checks.
    """
    for name in ("python", *_PACKAGES):
        if name in head and name in here:
            versions = (v[name].split("+")[0].split(".")[:_PARTS_COMPARED] for v in (head, here))
            first, second = versions
            if first != second:
                return f"{name} is {here[name]} on this machine and {head[name]} on node 0"
    return None


def make_offer(spec: RunSpec, node: int, versions: Mapping[str, str], orders: Orders) -> JoinOffer:
    """Return the offer of the place ``node`` in the run of ``spec``.

    ``orders`` are those of an agent that has not reported yet.
    """
    assert spec.nodes is not None
    own = spec.with_changes(nodes=replace(spec.nodes, rank=node))
    return JoinOffer(
        run_id=spec.id,
        node=node,
        spec=spec_text(own),
        versions=dict(versions),
        files=tuple(dict.fromkeys(_named_files(spec))),
        head=socket.gethostname(),
        plan=orders.plan,
    )


def missing_files(offer: JoinOffer, cwd: str) -> list[str]:
    """Return the files and folders of the offer that do not exist on this machine."""
    return [name for name in offer.files if not os.path.exists(os.path.join(cwd, name))]


def _named_files(spec: RunSpec) -> Iterator[str]:
    """Return the files and filled folders that exist here and that the model or data names.

    An empty or missing folder may be one that the training creates.
    """
    config = spec.config or {}
    for text in _texts([config.get("model"), config.get("data")]):
        if os.sep not in text or len(text) > 4096 or "\0" in text:
            continue
        path = Path(spec.cwd, text)
        try:
            if path.is_file() or (path.is_dir() and any(path.iterdir())):
                yield text
        except OSError:
            continue


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


_ANSWER_S = 1.0
"""Seconds to wait for one answer."""
_FIRST_ANSWER_S = 5.0
"""Seconds after which a head that does not answer is reported, unless it may still start."""


class LinkRefusedError(ProblemError):
    """The head closed the connection: the key is most likely not that of the run."""


class JoinClient:
    """Connection of a machine that has no place yet."""

    def __init__(self, key: LinkKey, host: str, port: int, home: Path) -> None:
        """``home`` is ``$LTUI_HOME``. Raise ``ProblemError`` if ``host`` has no address."""
        self._where = f"ltui join {format_host_and_port(host, port)}"
        self._machine = machine_id(home)
        self._link = AgentLink(key, host, port, f"join-{secrets.token_hex(6)}")

    def ask(self, node: int | None, *, give_up_s: float | None = None) -> JoinOffer:
        """Return the offer of the head. Raise ``ProblemError`` if it refuses or does not answer.

        ``give_up_s``: monotonic time until which the head may still have to start; None if it must
        be there already.
        """
        request = JoinRequest(
            version=own_version(),
            host=socket.gethostname(),
            machine=self._machine,
            pid=os.getpid(),
            node=node,
        )
        limit_s = time.monotonic() + _FIRST_ANSWER_S if give_up_s is None else give_up_s
        while True:
            answer = self._exchange(request)
            if isinstance(answer, JoinOffer):
                return answer
            if isinstance(answer, JoinRefusal):
                self._fail(answer.what, answer.remedy)
            if self._link.refusal is not None:
                raise LinkRefusedError.of(
                    where=self._where,
                    what=self._link.refusal,
                    remedy="Use the key file that node 0 names.",
                )
            if time.monotonic() < limit_s:
                if give_up_s is not None or self._link.connected:
                    continue
                # Nothing listens: that is certain at once.
                reason = self._link.why_not_connected()
                if reason is None or not reason.startswith("Nothing listens"):
                    continue
            else:
                reason = self._link.why_not_connected() or "The head of the run does not answer."
            self._fail(reason, "Check the address and port that node 0 prints, and its firewall.")

    def decline(self, node: int, reason: str) -> None:
        """Return the offered place, so that another machine may take it, with the reason."""
        self._exchange(JoinDecline(node=node, machine=self._machine, reason=reason))

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _exchange(self, message: Message) -> Message | None:
        payload = self._link.exchange(encode(message), _ANSWER_S)
        if payload is None:
            return None
        try:
            answer = decode(payload)
        except MessageError as error:
            self._fail(f"its answer cannot be used: {error}.", SAME_VERSION)
        if isinstance(answer, OrdersMessage):
            self._fail(f"the request cannot be read: {answer.orders.refusal}.", SAME_VERSION)
        return answer

    def _fail(self, what: str, remedy: str | None = None) -> NoReturn:
        raise ProblemError.of(where=self._where, what=what, remedy=remedy)
