"""An ssh server on a machine of the tests, with keys of its own."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nodes.two_machines import Machine, run_on, start_on
from tests.waiting import wait_for

_READY = """
import socket, sys
socket.create_connection((sys.argv[1], 22), timeout=1).close()
"""


class SshServer:
    """The files of a server and its client."""

    def __init__(self, folder: Path) -> None:
        for program in ("sshd", "ssh", "ssh-keygen"):
            if shutil.which(program, path="/usr/sbin:/usr/bin:/bin:/sbin") is None:
                pytest.skip(f"the ways to start by ssh need {program}")
        self.folder = folder
        folder.mkdir()
        folder.chmod(0o700)
        for name in ("host", "user", "stranger"):
            argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(argv, check=True)
        self.authorized = folder / "authorized_keys"
        self.authorized.write_text((folder / "user.pub").read_text())

    @contextlib.contextmanager
    def on(self, machine: Machine) -> Iterator[None]:
        """Run the server on ``machine``."""
        config = self.folder / f"sshd_config-{machine.name}"
        variables = ("LTUI_HOME", "CUDA_VISIBLE_DEVICES", "PATH", "OMP_NUM_THREADS")
        settings = " ".join(f'{name}="{machine.environment[name]}"' for name in variables)
        config.write_text(
            f"HostKey {self.folder}/host\nAuthorizedKeysFile {self.authorized}\n"
            f"PidFile none\nStrictModes no\nUsePAM no\nPermitRootLogin yes\n"
            f"PasswordAuthentication no\nKbdInteractiveAuthentication no\nSetEnv {settings}\n"
        )
        # The server refuses to start without the folder, which a system's service would create.
        setup = 'mkdir -p /run/sshd && exec /usr/sbin/sshd -D -e -f "$1"'
        server = start_on(
            machine, ["sh", "-c", setup, "sshd", str(config)], stderr=subprocess.DEVNULL
        )
        try:
            probe = ["python3", "-c", _READY, machine.address]
            wait_for(lambda: run_on(machine, probe).returncode == 0, server, seconds=30)
            yield
        finally:
            server.kill()
            server.communicate()

    def client(self, machine: Machine, *hosts: Machine, known: bool = True) -> dict[str, str]:
        """Return the environment of a client on ``machine`` whose ssh knows the keys of ``hosts``.

        The client reads only its own configuration, by a program ``ssh`` that comes first on PATH.
        """
        files = self.folder / f"client-{machine.name}-{known}"
        files.mkdir(exist_ok=True)
        key = (self.folder / "host.pub").read_text().split()[:2]
        lines = [" ".join([f"{host.name},{host.address}", *key]) + "\n" for host in hosts]
        (files / "known_hosts").write_text("".join(lines) if known else "")
        (files / "config").write_text(
            f"IdentityFile {self.folder}/user\nIdentitiesOnly yes\nUser {getpass.getuser()}\n"
            f"UserKnownHostsFile {files}/known_hosts\nGlobalKnownHostsFile /dev/null\n"
        )
        script = files / "ssh"
        script.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {files}/config "$@"\n')
        script.chmod(0o755)
        return {"PATH": f"{files}:{machine.environment['PATH']}"}

    def refuse_the_user(self) -> None:
        """Let the server accept another key only."""
        self.authorized.write_text((self.folder / "stranger.pub").read_text())
