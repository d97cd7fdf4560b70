"""The link and the probe between two machines whose connection is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ltui.training.nodes.link_key import KEY_VARIABLE, LinkKey
from tests.nodes.link_fixtures import freeze
from tests.nodes.two_machines import Machine, Machines, open_machines, run_on, start_on

_HEAD = """
import json, os, sys, time
from ltui.training.nodes.head_link import HeadLink
from ltui.training.nodes.link_key import LinkKey

key = LinkKey.find(None, os.environ)
link = HeadLink(key, sys.argv[1], int(sys.argv[2]), lambda _, report: report, print)
print(json.dumps({"port": link.port}), flush=True)
time.sleep(600)
"""

_AGENT = """
import json, os, sys
from ltui.training.nodes.agent_link import AgentLink
from ltui.training.nodes.link_key import LinkKey
from ltui.training.nodes.node_watch import ProbeSocket

link = AgentLink(LinkKey.find(None, os.environ), sys.argv[1], int(sys.argv[2]), "1")
probed = ProbeSocket(link.local_address)
print(json.dumps({"probe_port": probed.port}), flush=True)
shown, number = None, 0
while True:
    number += 1
    answered = link.exchange(b"%d" % number, 0.5) is not None
    if answered != shown:
        shown = answered
        why = None if answered else link.why_not_connected(0.3)
        print(json.dumps({"answered": answered, "why": why}), flush=True)
    link.woken(0.05)
"""

_PROBE = """
import sys
from ltui.training.nodes.node_watch import probe
print(probe(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])).value)
"""


class Link:
    """Head on the first machine, agent on the second."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.key = LinkKey.generate()
        self.head = self.start_head(0)
        self.port: int = self.line(self.head)["port"]
        self.agent = self.start(machines[1], _AGENT, machines[0].address, self.port)
        self.probe_port: int = self.line(self.agent)["probe_port"]
        self.until_answered(True)

    def start(self, machine: Machine, program: str, *words: Any) -> subprocess.Popen[str]:
        return start_on(
            machine,
            [sys.executable, "-c", program, *map(str, words)],
            env={KEY_VARIABLE: self.key.text},
            stderr=None,
        )

    def start_head(self, port: int) -> subprocess.Popen[str]:
        return self.start(self.machines[0], _HEAD, self.machines[0].address, port)

    @staticmethod
    def line(process: subprocess.Popen[str]) -> dict[str, Any]:
        """Return the next line of a process."""
        assert process.stdout is not None
        document: dict[str, Any] = json.loads(process.stdout.readline())
        return document

    def until_answered(self, answered: bool) -> dict[str, Any]:
        """Wait until the agent gets answers, or none any more."""
        while (line := self.line(self.agent))["answered"] is not answered:
            pass
        return line

    def probe(self, port: int | None = None, seconds: float = 60) -> str:
        argv = [self.machines[1].address, str(port or self.probe_port), str(seconds)]
        return run_on(self.machines[0], [sys.executable, "-c", _PROBE, *argv]).stdout.strip()

    def end(self) -> None:
        for machine in self.machines:
            machine.kill_all()
        for process in (self.head, self.agent):
            process.communicate(timeout=30)


@pytest.mark.parametrize("ipv6", [False, True])
def test_a_cut_link_is_told_from_a_frozen_and_a_dead_agent(tmp_path: Path, ipv6: bool) -> None:
    with open_machines(tmp_path, ipv6=ipv6) as machines:
        link = Link(machines)
        assert link.probe() == "accepted"
        machines.cut(machines[1])
        why = link.until_answered(False)["why"]
        assert why is None or "does not answer" in why  # the connection may still seem alive
        assert link.probe(seconds=0.5) == "unreachable"
        machines.restore(machines[1])
        link.until_answered(True)
        freeze(machines[1].processes()[0].pid)
        assert link.probe() == "accepted"
        machines[1].kill_all()
        assert link.probe() == "refused"
        link.end()


def test_the_head_is_killed_and_comes_back_while_the_link_is_cut(two_machines: Machines) -> None:
    link = Link(two_machines)
    two_machines.cut(two_machines[1])
    link.until_answered(False)
    two_machines[0].kill_all()
    link.head.communicate(timeout=30)
    link.head = link.start_head(link.port)
    assert link.line(link.head) == {"port": link.port}
    two_machines.restore(two_machines[1])
    link.until_answered(True)
    link.end()
