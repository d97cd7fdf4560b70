"""Ask the head of a run for a place, as ``ltui join`` and the commands of a launcher do."""

from __future__ import annotations

import os
import secrets
import socket
import time
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from ltui.training.nodes.agent_link import AgentLink
from ltui.training.nodes.join_offer import (
    JoinDecline,
    JoinMessage,
    JoinOffer,
    JoinRefusal,
    JoinRequest,
    decode_join,
    encode_join,
)
from ltui.training.nodes.link_key import LinkKey
from ltui.training.nodes.node_address import format_host_and_port, machine_id
from ltui.training.problem import ProblemError

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
        self._host = socket.gethostname()
        self._machine = machine_id(home)
        self._link = AgentLink(key, host, port, f"join-{secrets.token_hex(6)}")

    def ask(self, node: int | None, *, give_up_s: float | None = None) -> JoinOffer:
        """Return the offer of the head. Raise ``ProblemError`` if it refuses or does not answer.

        ``give_up_s``: monotonic time until which the head may still have to start; None if it must
        be there already.
        """
        request = JoinRequest(
            version=version("ltui-train"),
            host=self._host,
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
        """Return the offered place, so that another machine may take it. Never fails."""
        self._exchange(
            JoinDecline(node=node, host=self._host, machine=self._machine, reason=reason)
        )

    def close(self) -> None:
        """Close the connection."""
        self._link.close()

    def _exchange(self, message: JoinMessage) -> JoinMessage | None:
        frames = self._link.exchange(encode_join(message), _ANSWER_S)
        if frames is None:
            return None
        try:
            return decode_join(frames)
        except ValueError as error:
            self._fail(f"its answer cannot be used: {error}.", _SAME_VERSION)

    def _fail(self, what: str, remedy: str | None = None) -> NoReturn:
        raise ProblemError.of(where=self._where, what=what, remedy=remedy)


_SAME_VERSION = "Install the same version of ltui on every node."
