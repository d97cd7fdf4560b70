"""Run a command without permission to trace processes and without py-spy.

    python deprived.py COMMAND...

A seccomp filter refuses ptrace and reads of other processes' memory, as container runtimes do. The
py-spy of this interpreter is hidden in a mount namespace of its own, if that is permitted.
The same applies to every process that the command starts.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _MS_BIND, _MS_PRIVATE_REC = 0x20000, 0x1000, 0x40000 | 0x4000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2
_REFUSED = {"x86_64": (101, 310, 311), "aarch64": (117, 270, 271)}
_ALLOW, _EPERM = 0x7FFF0000, 0x00050000 | 1


def refuse_tracing() -> None:
    """From here on ptrace, process_vm_readv and process_vm_writev fail with EPERM."""
    numbers = _REFUSED[platform.machine()]
    program = [struct.pack("HBBI", 0x20, 0, 0, 0)]  # load the system call's number
    for place, number in enumerate(numbers):
        program.append(struct.pack("HBBI", 0x15, len(numbers) - place, 0, number))
    program += [struct.pack("HBBI", 0x06, 0, 0, _ALLOW), struct.pack("HBBI", 0x06, 0, 0, _EPERM)]
    code = b"".join(program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("HxxxxxxP", len(program), ctypes.addressof(buffer))
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if _LIBC.prctl(_PR_SET_SECCOMP, _FILTER, header, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp filter refused")


def hide_py_spy() -> bool:
    """Hide py-spy, and return True if it cannot be started any more."""
    neighbour = os.path.join(os.path.dirname(sys.executable), "py-spy")
    paths = {path for path in (shutil.which("py-spy"), neighbour) if path and os.path.exists(path)}
    if not paths:
        return True
    if _LIBC.unshare(_CLONE_NEWNS) != 0:
        return False
    _LIBC.mount(None, b"/", None, _MS_PRIVATE_REC, None)
    return all(
        _LIBC.mount(b"/dev/null", path.encode(), None, _MS_BIND, None) == 0 for path in paths
    )


def main(argv: list[str]) -> None:
    if not hide_py_spy():
        print("deprived: py-spy could not be hidden here", file=sys.stderr)
    refuse_tracing()
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
