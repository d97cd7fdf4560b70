"""A run on two machines, started in every way. Its command is a script that needs no torch."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ltui.training.nodes.link_key import LinkKey
from tests.ltui_command import LTUI, answer
from tests.nodes.ssh_server import SshServer
from tests.nodes.two_machines import Machine, Machines, ltui_on, open_machines, run_on, start_on
from tests.waiting import wait_for

PLACE_SCRIPT = """
import os, socket, sys, time
names = ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PET_NNODES", "LTUI_NODE_KEY")
print(socket.gethostname(), *(os.environ.get(name) for name in names), *sys.argv[1:], flush=True)
time.sleep(float(sys.argv[1]))
"""
"""Program that prints its place and sleeps. It does not communicate with the other node."""
SHORT, LONG = "1", "600"


@pytest.fixture
def script(tmp_path: Path) -> tuple[str, ...]:
    """A command that prints its place and sleeps."""
    path = tmp_path / "place.py"
    path.write_text(PLACE_SCRIPT)
    return ("python", str(path))


def only_run(machine: Machine) -> Path:
    (run,) = (machine.home / "runs").iterdir()
    return run


def state(machine: Machine) -> dict[str, Any]:
    shown = ltui_on(machine, "show", "last", "--json", code=0)
    snapshot: dict[str, Any] = answer(shown.stdout)
    return snapshot


def wait_until_running(machine: Machine, head: subprocess.Popen[str]) -> None:
    wait_for(lambda: list((machine.home / "runs").glob("*/spec.yaml")), head)
    wait_for(lambda: state(machine)["state"] == "running", head, period_s=0.5)


def printed(run: Path) -> list[str]:
    """The lines that the commands of all nodes printed, the first node first."""
    names = ("engine.log", "engine-1.log")
    return [(run / "logs" / "1" / name).read_text().strip() for name in names]


def join_line(head: subprocess.Popen[str]) -> list[str]:
    """Return the words after ``ltui`` of the line that the head prints for the others."""
    assert head.stdout is not None
    for line in head.stdout:
        if line.startswith("  ltui join "):
            return line.split()[1:]
    raise AssertionError(f"no line: {head.communicate()}")


def hide_folder(owner: Machine, other: Machine) -> None:
    """Let ``other`` see an empty folder where ``owner`` has its own."""
    hide = ["mount", "-t", "tmpfs", "none", str(owner.folder.parent)]
    run_on(other, hide, code=0)


def check_nothing_left(machines: Machines) -> None:
    """A supervisor exits shortly after it has recorded the end of its run."""
    for machine in machines:
        wait_for(machine.processes, wanted=lambda processes: not processes, seconds=30)


def check_finished(machines: Machines, head: subprocess.Popen[str]) -> None:
    out, err = head.communicate(timeout=60)
    assert head.returncode == 0, (out, err)
    snapshot = state(machines[0])
    assert snapshot["state"] == "finished"
    assert [node["host"] for node in snapshot["nodes"]] == [m.host_name for m in machines]
    lines = printed(only_run(machines[0]))
    address = machines[0].address
    assert lines == [
        f"{machine.host_name} {number} {address} 29500 2 None {SHORT}"
        for number, machine in enumerate(machines)
    ]
    check_nothing_left(machines)


def test_by_hand(two_machines: Machines, script: tuple[str, ...]) -> None:
    first, second = two_machines
    words = ["exec", "--plain", "--num-nodes", "2", "--", *script, SHORT]
    head = start_on(first, [*LTUI, *words])
    line = join_line(head)
    key = LinkKey.read(Path(line[-1]))
    assert key.text not in " ".join(line)
    joined = ltui_on(second, *line, code=0)
    assert "as node 1 of 2; node 0 is machine-0" in joined.stdout
    check_finished(two_machines, head)


@pytest.mark.slow
@pytest.mark.parametrize("key", ["in the environment", "in a shared home", "in a shared file"])
@pytest.mark.parametrize("by_name", [False, True])
def test_by_a_launcher(tmp_path: Path, script: tuple[str, ...], key: str, by_name: bool) -> None:
    """``by_name``: the hosts file of node 0 gives its own name a loopback address."""
    shared = key == "in a shared home"
    with open_machines(tmp_path, shared_home=shared, own_name_is_loopback=by_name) as machines:
        words = ["exec", "--plain", "--num-nodes", "2"]
        first = machines[0]
        environment = {"MASTER_ADDR": first.name if by_name else first.address}
        if key == "in the environment":
            environment["LTUI_NODE_KEY"] = LinkKey.generate().text
        elif key == "in a shared file":
            words += ["--key-file", str(tmp_path / "shared.key")]
        nodes = [
            start_on(
                machine,
                [*LTUI, *words, "--", *script, SHORT],
                env={**environment, "NODE_RANK": str(number)},
            )
            for number, machine in reversed(list(enumerate(machines)))
        ]
        out, err = nodes[0].communicate(timeout=60)
        assert nodes[0].returncode == 0, (out, err)
        check_finished(machines, nodes[1])


@pytest.mark.slow
def test_a_signal_of_the_launcher_to_another_node_stops_the_run(
    two_machines: Machines, script: tuple[str, ...]
) -> None:
    environment = {
        "SKYPILOT_NODE_IPS": "\n".join(machine.address for machine in two_machines),
        "SKYPILOT_NUM_NODES": "2",
        "LTUI_NODE_KEY": LinkKey.generate().text,
    }
    nodes = [
        start_on(
            machine,
            [*LTUI, "exec", "--plain", "--", *script, LONG],
            env={**environment, "SKYPILOT_NODE_RANK": str(number)},
        )
        for number, machine in enumerate(two_machines)
    ]
    wait_until_running(two_machines[0], nodes[0])
    nodes[1].send_signal(signal.SIGTERM)
    for node in nodes:
        node.communicate(timeout=60)
    assert state(two_machines[0])["state"] == "stopped"
    check_nothing_left(two_machines)


@pytest.mark.slow
def test_by_ssh(tmp_path: Path, two_machines: Machines, script: tuple[str, ...]) -> None:
    server = SshServer(tmp_path / "ssh")
    first, second = two_machines
    with server.on(second):
        environment = server.client(first, second)
        words = ["exec", "--plain", "--nodes", "machine-0,machine-1", "--", *script, LONG]
        head = start_on(first, [*LTUI, *words], env=environment)
        wait_until_running(first, head)
        secret = LinkKey.read(only_run(first) / "node.key").text
        for process in [*first.processes(), *second.processes()]:
            assert secret not in " ".join(process.cmdline())
        head.send_signal(signal.SIGINT)
        out, err = head.communicate(timeout=180)
        assert head.returncode == 0, (out, err)
        assert printed(only_run(first))[1].startswith("machine-1 1 10.77.0.1 ")
    check_nothing_left(two_machines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("unknown host", "no-such-host: ssh cannot log in there (ssh: Could not resolve hostname"),
        ("unknown host key", "machine-1: ssh cannot log in there (Host key verification failed)"),
        ("refused", "machine-1: ssh cannot log in there ("),
        ("no ltui", "machine-1: /no/ltui cannot be run there"),
        ("another version", "prints 'ltui 0.0.1' there, and node 0 has "),
        ("no working directory", "machine-1: it cannot join: node 1 of "),
    ],
)
def test_a_host_that_cannot_be_started(
    tmp_path: Path,
    two_machines: Machines,
    script: tuple[str, ...],
    fault: str,
    said: str,
) -> None:
    server = SshServer(tmp_path / "ssh")
    first, second = two_machines
    words = ["exec", "--plain", "--nodes", "machine-1"]
    if fault == "unknown host":
        words[-1] = "no-such-host"
    elif fault == "no ltui":
        words += ["--remote-ltui", "/no/ltui"]
    elif fault == "another version":
        other = tmp_path / "other"
        other.write_text("#!/bin/sh\necho ltui 0.0.1\n")
        other.chmod(0o755)
        words += ["--remote-ltui", str(other)]
    elif fault == "no working directory":
        hide_folder(first, second)
    if fault == "refused":
        server.refuse_the_user()
    with server.on(second):
        environment = server.client(first, second, known=fault != "unknown host key")
        head = start_on(first, [*LTUI, *words, "--", *script, LONG], env=environment)
        out, err = head.communicate(timeout=180)
        assert head.returncode == 2, (out, err)
        assert said in err
        assert err.count("\n") == 1, err
    check_nothing_left(two_machines)


@pytest.mark.slow
def test_a_machine_that_has_joined_ends_if_another_one_cannot(
    tmp_path: Path, script: tuple[str, ...]
) -> None:
    server = SshServer(tmp_path / "ssh")
    with open_machines(tmp_path, count=3) as machines:
        first, second, third = machines
        hide_folder(first, third)
        with server.on(second), server.on(third):
            environment = server.client(first, second, third)
            words = ["exec", "--plain", "--nodes", "machine-1,machine-2", "--", *script, LONG]
            refused = ltui_on(first, *words, env=environment, code=2)
            assert refused.stderr.startswith("machine-2: it cannot join: node 2 of ")
            assert refused.stderr.count("\n") == 1, refused.stderr
            assert list((second.home / "nodes").iterdir()), "machine-1 had not joined"
        check_nothing_left(machines)


def test_a_key_that_differs(two_machines: Machines, script: tuple[str, ...]) -> None:
    """Also a port that is taken, an address of another machine, and a name of itself."""
    first, second = two_machines
    words = ["exec", "--plain", "--num-nodes", "2"]
    head = start_on(first, [*LTUI, *words, "--", *script, LONG])
    line = join_line(head)
    wrong = LinkKey.generate().text
    refused = ltui_on(second, *line[:2], env={"LTUI_NODE_KEY": wrong}, code=2)
    assert refused.stderr.count("\n") == 1
    assert "key" in refused.stderr
    assert wrong not in refused.stderr
    for options, said in (
        (["--port", "29500"], "port 29501: another program on this machine listens"),
        (["--address", second.address], "10.77.0.2 is not an address of this machine"),
        (["--nodes", "machine-0"], "there is no machine besides this one"),
        (["--num-nodes", "1", "--key-file", "x"], "--key-file: the run uses only one machine"),
    ):
        extra = [*words, *options, "--", *script, LONG]
        assert said in ltui_on(first, *extra, code=2).stderr
    assert ltui_on(first, "stop", "last", "--kill").returncode == 0
    head.communicate(timeout=60)
    recorded = state(first)
    assert recorded["state"] != "running"
    check_nothing_left(two_machines)


def test_a_machine_without_a_network(tmp_path: Path, script: tuple[str, ...]) -> None:
    with open_machines(tmp_path, count=1, own_name_is_loopback=True) as machines:
        run_on(machines[0], ["ip", "address", "flush", "dev", "eth0"], code=0)
        words = ["exec", "--num-nodes", "2", "--", *script, SHORT]
        refused = ltui_on(machines[0], *words, code=2)
        assert "no address was found at which other machines can reach this one" in refused.stderr
        assert "--address" in refused.stderr
        assert not os.path.exists(machines[0].home / "nodes")
