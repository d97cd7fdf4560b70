"""The machines that the tests of several nodes run on."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.nodes.two_machines import Machine, Machines, open_machines, run_on, start_on

_LISTEN = """
import socket, sys
server = socket.create_server((sys.argv[1], 7000), family=int(sys.argv[2]))
print("listens", flush=True)
while True:
    connection, peer = server.accept()
    connection.sendall(socket.gethostname().encode())
    connection.close()
"""
_CALL = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=float(sys.argv[2])) as connection:
    print(connection.recv(100).decode())
"""
_NEVER_S = "0.5"
"""Seconds after which a connection that cannot succeed is given up."""


def call(caller: Machine, called: str, seconds: str = "60") -> str:
    """Return what the server at ``called`` answers, or an empty text without a connection."""
    argv = [sys.executable, "-c", _CALL, called, seconds]
    return run_on(caller, argv).stdout.strip()


def check_connection(machines: Machines, family: int) -> None:
    server = start_on(
        machines[1], [sys.executable, "-c", _LISTEN, machines[1].address, str(family)]
    )
    assert server.stdout is not None
    assert server.stdout.readline().strip() == "listens"
    assert [process.pid for process in machines[1].processes()] == [server.pid]
    assert machines[0].processes() == []
    for name in (machines[1].address, "machine-1"):
        assert call(machines[0], name) == machines[1].host_name
    machines.cut(machines[1])
    assert call(machines[0], "machine-1", _NEVER_S) == ""
    machines.restore(machines[1])
    assert call(machines[0], "machine-1") == machines[1].host_name
    machines[1].kill_all()
    server.communicate(timeout=30)
    assert call(machines[0], "machine-1") == ""


def test_two_machines(two_machines: Machines) -> None:
    check_connection(two_machines, 2)
    assert run_on(two_machines[0], ["pwd"]).stdout.strip() == str(two_machines[0].folder)


def test_two_machines_with_ipv6_only_and_one_host_name(tmp_path: Path) -> None:
    with open_machines(tmp_path, ipv6=True, host_names=("node", "node")) as machines:
        check_connection(machines, 10)
        for machine in machines:
            looked_up = run_on(machine, ["getent", "hosts", "node"], code=0).stdout.split()
            assert looked_up == [machine.address, "node"]


def test_a_machine_that_has_been_up_for_longer(tmp_path: Path) -> None:
    program = "import time; print(time.monotonic())"
    with open_machines(tmp_path, uptime_skew_s=100_000) as machines:
        near, far = (
            float(run_on(machine, [sys.executable, "-c", program], code=0).stdout)
            for machine in machines
        )
        assert far - near > 99_000


def test_a_skewed_clock(tmp_path: Path) -> None:
    program = "import time; print(time.time(), time.monotonic())"
    with open_machines(tmp_path, clock_skew_s=90) as machines:
        (near, uptime), (far, later) = (
            map(float, run_on(machine, [sys.executable, "-c", program], code=0).stdout.split())
            for machine in machines
        )
        assert 89 < (far - near) - (later - uptime) < 91
