"""The instrument ``pdb`` of ``ltui rerun``: a debugger for the terminal of the command."""

from __future__ import annotations

import bdb
import os
import pdb
import socket
import sys
from types import FrameType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ltui.training.rank.channel import current_channel
from ltui.training.rank.step_rerun import Instrument
from ltui.training.shared.rank_environment import rank_from_environment

_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "ltui")
"""Packages in which the debugger does not stop."""
_CALLERS = ("torch.nn.modules.module", "ltui.")
"""Modules between a call of a module and its hooks."""


class Debugger(Instrument):
    """Opens ``pdb`` on one rank, for the terminal that listens at a socket.

    It stops where the program itself, rather than a library, first calls a module in the step.
    """

    def begin(self) -> None:
        """Wait for that call."""
        channel, rank = current_channel(), rank_from_environment(os.environ)
        own_rank = channel.rank if channel is not None else rank or 0
        self._pid = os.getpid()
        self._handle: Any = None
        if own_rank == self.options["rank"]:
            self._handle = register_module_forward_pre_hook(self.before_forward)

    def before_forward(self, _module: Any, _inputs: Any) -> None:
        """Open the debugger if the program itself makes this call."""
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__", "").startswith(_CALLERS):
            frame = frame.f_back  # type: ignore[assignment]
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        is_own = self._handle is not None and os.getpid() == self._pid
        if package in _LIBRARIES or not torch.is_grad_enabled() or not is_own:
            return
        self._handle.remove()
        self._handle = None
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.connect(self.options["debugger"])
        typed = link.makefile("r", encoding="utf-8", errors="replace")
        shown = link.makefile("w", encoding="utf-8", errors="replace")
        libraries = *_LIBRARIES, "contextlib", "functools", "typing"
        skipped = [pattern for name in libraries for pattern in (name, f"{name}.*")]
        debugger = pdb.Pdb(stdin=typed, stdout=shown, nosigint=True, skip=skipped)
        self._debug(debugger, frame)

    def _debug(self, debugger: pdb.Pdb, frame: FrameType) -> None:
        """Ask at the call itself what to do; ``set_trace`` would stop in what it calls."""
        debugger.reset()
        each: FrameType | None = frame
        while each is not None:
            each.f_trace = debugger.trace_dispatch
            debugger.botframe, each = each, each.f_back
        debugger.interaction(frame, None)
        if debugger.quitting:
            raise bdb.BdbQuit
        if frame.f_trace is not None:  # it continues to a breakpoint or another line
            sys.settrace(debugger.trace_dispatch)
