"""``ltui demo gpus``: show the GPU panels with simulated GPUs, on machines without any.

A stand-in replaces the driver's library and plays a script, so the panels show the result of the
whole path from the driver's interface to the screen. The dynamic loader reads its search path when
a program starts, so the command restarts itself in the stand-in's environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace

from ltui.app.exit_codes import EXIT_DONE
from ltui.training.gpu import nvml_stand_in
from ltui.training.problem import Problem, ProblemError
from ltui.training.store.run_directory import ltui_home

MARK = "LTUI_DEMO_INSIDE"
"""Environment variable that is set in the restarted command."""
OTHER_NAME = "simulated-job"
"""Process name of at most 15 characters, because Linux stores no more."""
SCRIPT = """\
# Eight GPUs that train, and what can go wrong with them.
gpus 8 h100
set * util ~92,7,11 sm_activity ~66,14,9 tensor_activity ~41,12,9 dram_activity ~48,9,13
set * power ~560,80,9 temp ~63,4,60 mem_used 61e9 mem_util ~48,8,11
set 1 util ~88,9,7 sm_activity ~61,12,7 power ~545,70,7
# 2 and 3 become hot, slow down, and cool again.
set 2-3 temp 0:64,20:88,60:88,75:66 throttle 0@0,20@0x20,60@0
set 2-3 sm_clock 0@1980,20@1395,60@1980
# 4 waits in a collective that does not complete.
set 4 util 0@94,25@100,80@94 sm_activity 0@66,25@9,80@66 tensor_activity 0@41,25@0,80@41
set 4 power 0@560,25@74,80@560 dram_activity 0@48,25@2,80@48
# 5 runs out of memory.
set 5 mem_used 0:60e9,40:84e9
# 6 is also used by another process, and reading its power is not permitted.
process 6 {pid} 4e9
set 6 power !NO_PERMISSION
# 7 reports an error, and later falls off the bus.
xid 7 94 at 15
xid 7 79 at 90
lost 7 from 90
"""
"""Script for the stand-in, in the format of ``training/gpu/standin``."""


def show(options: Namespace) -> int:  # noqa: ARG001 - `gpus` is the only demo
    """Run ``ltui demo gpus``."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ProblemError(Problem(where="ltui demo gpus", what="the demo needs a terminal."))
    if os.environ.get(MARK):
        return _show_demo()
    folder = ltui_home() / "demo"
    library = nvml_stand_in.build(folder)
    script = folder / "gpus.txt"
    nvml_stand_in.write_script(script, SCRIPT.format(pid=_start_other_process().pid))
    env = {**nvml_stand_in.environment(library.parent, script), MARK: "1"}
    sys.stdout.flush()
    argv = [sys.executable, "-m", "ltui.app", "demo", "gpus"]
    return os.execve(argv[0], argv, env)  # noqa: S606


def _start_other_process() -> subprocess.Popen[bytes]:
    """Start a process that plays the process of another user on a GPU, and sleeps until the demo
    ends.

    It is a child of this process, which becomes the demo.
    """
    program = (
        "import os, time\n"
        f"with open('/proc/self/comm', 'w') as file: file.write({OTHER_NAME!r})\n"
        f"while os.getppid() == {os.getpid()}: time.sleep(1)\n"
    )
    argv = [sys.executable, "-I", "-S", "-c", program]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _show_demo() -> int:
    # Local: the parent process does not need Textual.
    from ltui.app.gpu_demo import DemoApp

    app = DemoApp()
    app.run()
    return app.return_code or EXIT_DONE
