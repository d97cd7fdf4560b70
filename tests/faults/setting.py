"""Prepare the machine for a fault: control groups, a disk to freeze, namespaces. All are undone."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from tests.faults.fault import Fault

OOM_LIMIT_BYTES = 400 << 20
LOW_LIMIT_BYTES = 2 << 30
_CGROUPS = Path("/sys/fs/cgroup/memory")
_PREFIX = {
    "network": ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"],
    "shm": [
        "unshare", "-m", "sh", "-c",
        'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh",
    ],
}  # fmt: skip
_JOIN_CGROUP = ["sh", "-c", 'echo $$ > "$ZOO_CGROUP/cgroup.procs" && exec "$@"', "sh"]


def command_prefix(fault: Fault) -> list[str]:
    """Return the words before the engine's command line."""
    words = [word for need in fault.needs for word in _PREFIX.get(need, ())]
    return words + (_JOIN_CGROUP if fault.id == "memory_low" else [])


@lru_cache
def why_unavailable(need: str) -> str | None:
    """Return why this machine cannot provide ``need``, or None if it can."""
    if need in _PREFIX:
        done = subprocess.run(
            [*_PREFIX[need], "true"], capture_output=True, text=True, check=False, timeout=10
        )
        return None if done.returncode == 0 else f"{need}: {done.stderr.strip()}"
    if need == "cgroup":
        try:
            with _cgroup(OOM_LIMIT_BYTES):
                return None
        except OSError as error:
            return f"no memory control group (v1): {error}"
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_mount(Path("/tmp"), f"zoo-probe-{os.getpid()}"))
            return None
    except (OSError, subprocess.SubprocessError) as error:
        return f"no loop mount: {error}"


@contextlib.contextmanager
def prepared_machine(fault: Fault, folder: Path) -> Iterator[dict[str, str]]:
    """Prepare the machine, and return the environment variables that the ranks need."""
    with contextlib.ExitStack() as stack:
        environment: dict[str, str] = {}
        if "cgroup" in fault.needs:
            limit = LOW_LIMIT_BYTES if fault.id == "memory_low" else OOM_LIMIT_BYTES
            environment["ZOO_CGROUP"] = str(stack.enter_context(_cgroup(limit)))
        if "mount" in fault.needs:
            environment["ZOO_MOUNT"] = str(stack.enter_context(_mount(folder, "disk")))
        yield environment


@contextlib.contextmanager
def _cgroup(limit_bytes: int) -> Iterator[Path]:
    group = _CGROUPS / f"zoo-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        deadline = time.monotonic() + 10
        while True:
            try:
                group.rmdir()
                break
            except OSError:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)


@contextlib.contextmanager
def _mount(folder: Path, name: str) -> Iterator[Path]:
    image, point = folder / f"{name}.ext4", folder / name
    point.mkdir()
    with open(image, "wb") as file:
        file.truncate(32 << 20)
    run = {"check": True, "capture_output": True, "timeout": 20}
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], **run)  # type: ignore[call-overload]
        subprocess.run(["mount", "-o", "loop", str(image), str(point)], **run)  # type: ignore[call-overload]
        yield point
    finally:
        thaw(point)
        _unmount(point)
        image.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            point.rmdir()


def thaw(point: Path) -> None:
    """Unfreeze a file system, if it is frozen."""
    subprocess.run(["fsfreeze", "-u", str(point)], capture_output=True, check=False, timeout=10)


def _unmount(point: Path) -> None:
    deadline = time.monotonic() + 10
    while os.path.ismount(point) and time.monotonic() < deadline:
        subprocess.run(["umount", str(point)], capture_output=True, check=False, timeout=20)
        time.sleep(0.2)
