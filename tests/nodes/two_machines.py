"""Machines on one machine: network namespaces with an address, a host name and clocks of their own.

Each machine is a set of Linux namespaces (network, host name, mounts, and time if asked for), held
by a process that sleeps. A bridge in a namespace of its own connects them. A link can be cut in the
middle: the cable of the machine stays plugged in, and its packets go nowhere. Everything ends with
the holders, which die with the test's process.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ltui_command import LTUI

_PROGRAMS = ("ip", "nsenter", "unshare", "setpriv", "mount", "hostname")
_INTERFACE = "eth0"
_CLOCK = Path(__file__).parent.parent / "chaos" / "shifted_clock.c"


@functools.lru_cache(maxsize=1)
def missing_rights() -> str | None:
    """Return why namespaces cannot be made here; None if they can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"network namespaces need the programs {', '.join(absent)}"
    probe = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "ip", "link", "set", "lo", "up"],
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        return f"network namespaces need root's rights ({probe.stderr.strip()[:100]})"
    return None


@dataclass
class Machine:
    """One of the machines. Processes within it reach only the other machines."""

    name: str
    """Name that the hosts files of all machines know: ``machine-0``."""
    host_name: str
    address: str
    holders: tuple[int, int]
    """Pids of the processes that hold the namespaces; the second is within all of them."""
    home: Path
    """``$LTUI_HOME`` on this machine."""
    folder: Path
    """Working directory on this machine."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment of its processes."""
    has_own_uptime: bool = False

    @property
    def holder(self) -> int:
        return self.holders[1]

    def command(self, argv: Sequence[str], cwd: Path | None = None) -> list[str]:
        """Return the command that runs ``argv`` on this machine."""
        spaces = ["--net", "--uts", "--mount", *(["--time"] if self.has_own_uptime else [])]
        where = f"--wd={cwd or self.folder}"
        return ["nsenter", "--target", str(self.holder), *spaces, where, "--", *argv]

    def processes(self) -> list[psutil.Process]:
        """Return the processes that run on this machine, zombies and the holders excepted."""
        own = os.readlink(f"/proc/{self.holder}/ns/net")
        running = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                inside = os.readlink(f"/proc/{process.pid}/ns/net") == own
                if inside and process.pid not in self.holders and process.status() != "zombie":
                    running.append(process)
        return running

    def kill_all(self) -> None:
        """Kill every process on this machine, as a loss of power would."""
        deadline = time.monotonic() + 30
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            assert time.monotonic() < deadline, f"cannot be killed: {processes}"
            time.sleep(0.02)


@dataclass
class Machines:
    """Several machines on one network."""

    machines: tuple[Machine, ...]
    switch: int
    """Pid of a process in the namespace of the bridge."""

    def __getitem__(self, number: int) -> Machine:
        return self.machines[number]

    def __iter__(self) -> Iterator[Machine]:
        return iter(self.machines)

    def cut(self, machine: Machine) -> None:
        """Let the network lose every packet from and to ``machine``; its cable stays plugged in."""
        _ip(self.switch, "link", "set", _port(self.machines.index(machine)), "nomaster")

    def restore(self, machine: Machine) -> None:
        """Undo ``cut``."""
        _ip(self.switch, "link", "set", _port(self.machines.index(machine)), "master", "bridge")


def with_settable_clock(machine: Machine) -> Path:
    """Let the wall clock of a machine be fast by the seconds in a file. Return its path.

    libfaketime fakes too much: Python cannot sleep in its processes. Skips the test without a C
    compiler.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("another clock needs a C compiler")
    library, clock = machine.folder / "shifted_clock.so", machine.folder / "clock"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, _CLOCK, "-ldl"], check=True)
    set_clock(clock, 0)
    machine.environment |= {"LD_PRELOAD": str(library), "LTUI_TEST_CLOCK": str(clock)}
    return clock


def set_clock(clock: Path, seconds: int) -> None:
    """Store the seconds in place, because the processes have mapped the file."""
    with open(clock, "r+b" if clock.exists() else "wb") as file:
        file.write(seconds.to_bytes(8, "little", signed=True))


def run_on(
    machine: Machine,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    code: int | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run ``argv`` on ``machine`` to its end. With ``code``: fail unless it ends with that code."""
    done = subprocess.run(
        machine.command(argv, cwd),
        env={**machine.environment, **(env or {})},
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert code in (None, done.returncode), (
        f"{machine.name}: {argv}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done


def start_on(
    machine: Machine,
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    **options: Any,
) -> subprocess.Popen[str]:
    """Start ``argv`` on ``machine``. Its output is piped, unless ``options`` say otherwise."""
    piped = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(
        machine.command(argv, cwd),
        env={**machine.environment, **(env or {})},
        text=True,
        **{**piped, **options},
    )


def ltui_on(
    machine: Machine, *words: str, env: Mapping[str, str] | None = None, code: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``ltui WORDS`` on ``machine`` to its end."""
    return run_on(machine, [*LTUI, *words], env=env, code=code)


@contextlib.contextmanager
def open_machines(
    folder: Path,
    count: int = 2,
    *,
    host_names: Sequence[str] | None = None,
    ipv6: bool = False,
    shared_home: bool = False,
    own_name_is_loopback: bool = False,
    clock_skew_s: float = 0.0,
    uptime_skew_s: int = 0,
) -> Iterator[Machines]:
    """Make ``count`` machines, and end every process on them at the end.

    ``ipv6``: they have no IPv4 address. ``own_name_is_loopback``: the hosts file of each machine
    gives its own name the address 127.0.1.1, as Debian's installer does. ``clock_skew_s``: the
    clock of the last machine is fast by so much (needs a C compiler). ``uptime_skew_s``: the last
    machine has been up for so much longer, so its monotonic clock differs. Skips the test, with
    the reason, where namespaces cannot be made.
    """
    if (reason := missing_rights()) is not None:
        pytest.skip(reason)
    host_names = host_names or [f"machine-{number}" for number in range(count)]
    addresses = [_address(number, ipv6) for number in range(count)]
    with contextlib.ExitStack() as stack:
        _, switch = stack.enter_context(_holders(["--net"], "true"))
        _ip(switch, "link", "add", "bridge", "type", "bridge")
        _ip(switch, "link", "set", "bridge", "up")
        machines = []
        for number in range(count):
            last = number == count - 1
            base = folder / f"machine-{number}"
            base.mkdir(parents=True, exist_ok=True)
            hosts = base / "hosts"
            own = "127.0.1.1" if own_name_is_loopback else addresses[number]
            hosts.write_text(_hosts_file(number, addresses, host_names[number], own))
            spaces = ["--net", "--uts", "--mount"]
            if last and uptime_skew_s:
                shift = str(uptime_skew_s)
                spaces += ["--time", "--boottime", shift, "--monotonic", shift]
            setup = 'mount --bind "$1" /etc/hosts && hostname "$2"'
            holders = stack.enter_context(_holders(spaces, setup, str(hosts), host_names[number]))
            _connect(switch, holders[1], number, addresses[number], ipv6)
            machine = Machine(
                name=f"machine-{number}",
                host_name=host_names[number],
                address=addresses[number],
                holders=holders,
                home=folder / "home" if shared_home else base / "home",
                folder=base / "project",
                has_own_uptime=last and uptime_skew_s != 0,
            )
            machine.folder.mkdir(exist_ok=True)
            machine.environment = _environment(machine)
            if last and clock_skew_s:
                set_clock(with_settable_clock(machine), round(clock_skew_s))
            machines.append(machine)
            stack.callback(machine.kill_all)
        yield Machines(tuple(machines), switch)


@pytest.fixture
def two_machines(tmp_path: Path) -> Iterator[Machines]:
    """Two machines with an IPv4 and a home of their own."""
    with open_machines(tmp_path) as machines:
        yield machines


def _environment(machine: Machine) -> dict[str, str]:
    """Return an environment without anything that a launcher or another test has set."""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG", "TMPDIR")}
    return {
        **kept,
        "LTUI_HOME": str(machine.home),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        # So that `ltui`, `python` and `torchrun` are those of the tests.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}",
    }


def _address(number: int, ipv6: bool) -> str:
    return f"fd77::{number + 1}" if ipv6 else f"10.77.0.{number + 1}"


def _hosts_file(number: int, addresses: Sequence[str], host_name: str, own: str) -> str:
    lines = ["127.0.0.1 localhost", "::1 localhost"]
    if host_name != f"machine-{number}" or own != addresses[number]:
        lines.append(f"{own} {host_name}")
    lines += [
        f"{address} machine-{at}"
        for at, address in enumerate(addresses)
        if own == addresses[number] or at != number or host_name != f"machine-{number}"
    ]
    return "\n".join(lines) + "\n"


def _port(number: int) -> str:
    return f"port{number}"


def _connect(switch: int, holder: int, number: int, address: str, ipv6: bool) -> None:
    """Give the machine of ``holder`` an interface, and plug it into the bridge."""
    port = _port(number)
    peer = ["peer", "name", _INTERFACE, "netns", str(holder)]
    _ip(switch, "link", "add", port, "type", "veth", *peer)
    _ip(switch, "link", "set", port, "master", "bridge", "up")
    # Without `nodad` an IPv6 address cannot be used for the first second.
    words = [f"{address}/64", "nodad"] if ipv6 else [f"{address}/24"]
    _ip(holder, "address", "add", *words, "dev", _INTERFACE)
    _ip(holder, "link", "set", "lo", "up")
    _ip(holder, "link", "set", _INTERFACE, "up")


def _ip(holder: int, *words: str) -> None:
    """Run ``ip`` in the network namespace of a holder."""
    subprocess.run(
        ["nsenter", "--target", str(holder), "--net", "ip", *words], check=True, timeout=30
    )


@contextlib.contextmanager
def _holders(spaces: Sequence[str], setup: str, *arguments: str) -> Iterator[tuple[int, int]]:
    """Start processes in new namespaces that run ``setup`` and sleep. Yield their pids."""
    script = f"{setup} && echo $$ && exec sleep infinity"
    guard = ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "--fork", "--kill-child"]
    process = subprocess.Popen(
        [*guard, "sh", "-c", script, "holder", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.strip().isdecimal(), "the namespaces could not be made"
        yield process.pid, int(line)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        process.stdout.close()
