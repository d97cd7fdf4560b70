"""Join a run as the node that a launcher has made of this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ltui.app.nodes.join_run import JoinedNode, JoinRequestOptions, join_run
from ltui.app.nodes.launcher_key import SHARED_FOLDER_S, key_of_agent, remove_local_key
from ltui.training.config.run_spec import Nodes
from ltui.training.nodes.join_client import LinkRefusedError
from ltui.training.nodes.link_key import KEY_VARIABLE

_RETRY_S = 1.0
"""Seconds between two attempts with a key that was refused."""


def join_by_launcher(
    nodes: Nodes, key_file: str | None, python: str | None, home: Path
) -> JoinedNode:
    """Join the run of the node 0 that the same launcher starts. Wait until it listens.

    Raise ``ProblemError`` if that fails.
    """
    give_up_s = time.monotonic() + nodes.join_timeout_s
    refused_since_s: float | None = None
    path = None if key_file is None else Path(key_file)
    while True:
        key = key_of_agent(nodes, path, home, give_up_s)
        options = JoinRequestOptions(
            node=nodes.rank, python=python, cwd=Path.cwd(), give_up_s=give_up_s
        )
        try:
            joined = join_run(home, key, nodes.address, nodes.control_port, options)
        except LinkRefusedError:
            # The file may still be that of an earlier run.
            now_s = time.monotonic()
            refused_since_s = refused_since_s or now_s
            if KEY_VARIABLE in os.environ or now_s - refused_since_s > SHARED_FOLDER_S:
                raise
            time.sleep(_RETRY_S)
        else:
            os.environ.pop(KEY_VARIABLE, None)
            remove_local_key(nodes)
            return joined
