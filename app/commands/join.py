"""``ltui join`` and ``ltui key``: make this machine a node of a run on several machines."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from pathlib import Path

from ltui.app.command_output import EXIT_DONE
from ltui.app.interrupt_signals import ReceivedSignals
from ltui.app.nodes.join_run import JoinRequestOptions, follow_agent, join_run, joined_line
from ltui.training.nodes.link_key import KEY_VARIABLE, LinkKey
from ltui.training.nodes.node_address import parse_host_and_port
from ltui.training.store.run_directory import ltui_home

_KEY_BYTES = 1024
"""Maximum number of characters that are read from standard input."""


def join(options: Namespace) -> int:
    """Run ``ltui join HOST:PORT``."""
    host, port = parse_host_and_port(options.place, "ltui join")
    key = _read_key(options.key_file)
    os.environ.pop(KEY_VARIABLE, None)  # the ranks must not inherit it
    request = JoinRequestOptions(
        node=options.node,
        python=options.python,
        cwd=None if options.cwd is None else Path(options.cwd),
    )
    joined = join_run(ltui_home(), key, host, port, request)
    print(joined_line(joined), flush=True)
    if options.detach:
        return EXIT_DONE
    with ReceivedSignals().catching() as signals:
        return follow_agent(joined, signals)


def _read_key(path: str | None) -> LinkKey:
    if path == "-":
        return LinkKey.from_text(sys.stdin.readline(_KEY_BYTES), "standard input")
    if path is not None:
        return LinkKey.read(Path(path))
    return LinkKey.find(None, os.environ)


def print_key(_options: Namespace) -> int:
    """Run ``ltui key``."""
    print(LinkKey.generate().text)
    return EXIT_DONE
