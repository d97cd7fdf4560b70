"""``ltui demo gpus``: show the GPU panels with simulated GPUs, on machines without any."""

from __future__ import annotations

import sys
from argparse import Namespace

from ltui.app.exit_codes import EXIT_DONE
from ltui.training.problem import ProblemError


def show(options: Namespace) -> int:  # noqa: ARG001 - `gpus` is the only demo
    """Run ``ltui demo gpus``."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ProblemError.of(where="ltui demo gpus", what="the demo needs a terminal.")
    # Local: Textual takes time to import, and a refused demo does not need it.
    from ltui.app.demo.gpu_demo import DemoApp

    app = DemoApp()
    app.run()
    return app.return_code or EXIT_DONE
