"""Wait in the foreground for the end of a node that has joined a run."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

from ltui.app.exit_codes import EXIT_DONE, EXIT_FAILED
from ltui.app.foreground.interrupt_signals import ReceivedSignals
from ltui.app.nodes.join_run import JoinedNode
from ltui.training.lifecycle.delete_runs import remove_after_end
from ltui.training.lifecycle.run_processes import (
    engine_exit,
    kill_run_processes,
    latest_attempt,
    shim_identity,
)
from ltui.training.process.identity import lock_holder

_POLL_S = 0.25
"""Seconds between two looks at the agent."""
_GONE_S = 3.0
"""Seconds without an agent after which the node has ended; the shim restarts it sooner."""


def joined_line(joined: JoinedNode) -> str:
    """Return the first line of a node that has joined."""
    assert joined.spec.nodes is not None
    return (
        f"joined {joined.spec.id} as node {joined.node} of {joined.spec.nodes.count}; "
        f"node 0 is {joined.head}, where the run is shown and stopped."
    )


def follow_agent(joined: JoinedNode, signals: ReceivedSignals) -> int:
    """Wait until the agent has ended. Return the exit code of ``ltui join``.

    The first Ctrl-C stops the run with a checkpoint. The second kills the ranks of this node.
    """
    run_dir = joined.run_dir
    last_seen_s = time.monotonic()
    while time.monotonic() - last_seen_s < _GONE_S:
        agent = lock_holder(run_dir.lock_path)
        shim = shim_identity(run_dir)
        if agent is not None or (shim is not None and shim.alive()):
            last_seen_s = time.monotonic()
        elif agent is None and not run_dir.lock_path.stat().st_size:
            break  # it has ended regularly
        if signals.leave is not None:
            keeps = f"node {joined.node} of {joined.spec.id} keeps running."
            print(keeps, file=sys.stderr, flush=True)
            return 128 + signals.leave
        request = signals.next_request()
        if request is not None and request["cmd"] == "kill":
            print("killing the ranks of this node", flush=True)
            kill_run_processes(run_dir)
        elif request is not None and agent is not None:
            print("asking node 0 to stop the run with a checkpoint", flush=True)
            with contextlib.suppress(OSError):
                os.kill(agent.pid, signal.SIGINT)
        time.sleep(_POLL_S)
    code = _report_end(joined)
    remove_after_end(run_dir)
    return code


def _report_end(joined: JoinedNode) -> int:
    attempt = latest_attempt(joined.run_dir)
    end = None if attempt is None else engine_exit(joined.run_dir, attempt)
    succeeded = end is not None and end.exit_code == 0
    how = "has ended" if succeeded else "ended with an error; node 0 shows the reason"
    print(f"node {joined.node} of {joined.spec.id} {how}.", flush=True)
    return EXIT_DONE if succeeded else EXIT_FAILED
