"""Simulated agents: many real links in a few processes, with opaque reports and without ranks.

``python -m tests.nodes.simulated_agents HOST PORT FIRST COUNT BYTES HZ`` runs COUNT agents with the
identities FIRST, FIRST+1, ... until its standard input ends, and then prints how many answers they
got. The key is in ``LTUI_NODE_KEY``.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ltui.training.nodes.agent_link import AgentLink
from ltui.training.nodes.link_key import KEY_VARIABLE, LinkKey
from tests.waiting import wait_for

ROOT = Path(__file__).resolve().parents[2]


def run_agents(
    links: dict[int, AgentLink], report: bytes, hz: float, ended: Callable[[float], bool]
) -> int:
    """Let every agent report ``hz`` times a second, evenly spread; return the number of answers.

    ``ended(seconds)`` waits so long and returns whether the agents should end.
    """
    answers = 0
    period_s = 1 / hz
    next_s = {n: time.monotonic() + period_s * i / len(links) for i, n in enumerate(links)}
    while True:
        number = min(next_s, key=next_s.__getitem__)
        if ended(max(0.0, next_s[number] - time.monotonic())):
            return answers
        # Without waiting: the answer to the previous report is returned.
        answers += links[number].exchange(report, 0.0) is not None
        next_s[number] = max(next_s[number] + period_s, time.monotonic() - period_s)


@contextlib.contextmanager
def agent_processes(
    key: LinkKey,
    address: str,
    port: int,
    *,
    count: int,
    processes: int,
    report_bytes: int,
    hz: float,
) -> Iterator[list[int]]:
    """Run ``count`` agents in some processes; after the block, the list has their answers."""
    answers: list[int] = []
    shares = [range(count)[n::processes] for n in range(processes)]
    started = []
    try:
        for n, share in enumerate(shares):
            arguments = [address, port, n * len(shares[0]), len(share), report_bytes, hz]
            started.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.nodes.simulated_agents", *map(str, arguments)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    cwd=ROOT,
                    env={**os.environ, KEY_VARIABLE: key.text},
                )
            )
        yield answers
        for process in started:
            answers.append(int(process.communicate(timeout=60)[0]))
    finally:
        for process in started:
            process.kill()
            process.communicate()


def wait_until_all_report(reported: Callable[[], int], count: int) -> None:
    """Wait until ``count`` agents have reported."""
    wait_for(reported, wanted=lambda number: number >= count)


def main(arguments: Sequence[str]) -> None:
    host, port, first, count, report_bytes, hz = arguments
    key = LinkKey.from_environment(os.environ)
    assert key is not None
    numbers = range(int(first), int(first) + int(count))
    links = {n: AgentLink(key, host, int(port), str(n)) for n in numbers}
    report = os.urandom(int(report_bytes))

    def ended(seconds: float) -> bool:
        return bool(select.select([sys.stdin], [], [], seconds)[0])

    try:
        print(run_agents(links, report, float(hz), ended))
    finally:
        for link in links.values():
            link.close()


if __name__ == "__main__":
    main(sys.argv[1:])
