"""A real SLURM cluster of virtual nodes on this machine, for the tests.

Debian's packages ``slurm-wlm`` and ``munge`` are needed, and root. Each node is a ``slurmd`` of its
own whose name is a loopback address, so that the address of the first node resolves without a
change of ``/etc/hosts``. Keys, sockets and state are in a folder of the test.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.waiting import wait_for

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "squeue", "scancel", "scontrol")
CONFIGURATION = """\
ClusterName=ci
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/run/munge.socket,cred_expire=5
CredType=cred/munge
SlurmctldPort={port}
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/run/slurmctld.pid
SlurmdPidFile={base}/run/slurmd-%n.pid
SlurmctldLogFile={base}/log/slurmctld.log
SlurmdLogFile={base}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
SlurmctldTimeout=10
SlurmdTimeout=10
MessageTimeout=5
TCPTimeout=2
KillWait=30
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
"""


def missing_reason() -> str | None:
    """Return why there can be no cluster here, or None."""
    # Debian installs the daemons to /usr/sbin, which is not on everyone's path.
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian: slurm-wlm, munge)"
    if os.geteuid() != 0:
        return "the daemons of SLURM need root"
    if not os.path.ismount("/sys/fs/cgroup"):
        return "/sys/fs/cgroup is not mounted"
    return None


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class SlurmCluster:
    """A running cluster. ``environment`` makes SLURM's commands use it."""

    def __init__(self, base: Path, nodes: int) -> None:
        self._base = base
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.nodes = [f"127.0.0.{number + 11}" for number in range(nodes)]
        self.configuration = base / "slurm.conf"
        self.environment: dict[str, str] = {
            **{n: v for n, v in os.environ.items() if not n.startswith(("SLURM", "SBATCH"))},
            "PATH": _path(),
            "SLURM_CONF": str(self.configuration),
        }

    def start(self) -> None:
        for name in ("state", "spool", "log", "run"):
            (self._base / name).mkdir()
        host = socket.gethostname().split(".")[0]
        ports = _free_ports(1 + len(self.nodes))
        text = CONFIGURATION.format(host=host, base=self._base, port=ports[0])
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20 - 1024
        for node, port in zip(self.nodes, ports[1:], strict=True):
            text += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 "
                f"RealMemory={memory}\n"
            )
        text += "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1"
        text += "\nPartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=9\n"
        self.configuration.write_text(text)
        key = self._base / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        run = self._base / "run"
        self._start(
            "munged", "-F", "--force", f"--key-file={key}", f"--socket={run}/munge.socket",
            f"--pid-file={run}/munged.pid", f"--log-file={self._base}/log/munged.log",
            f"--seed-file={run}/munge.seed",
        )  # fmt: skip
        wait_for((run / "munge.socket").exists, self._daemons[0], seconds=30)
        self._start("slurmctld", "-D", "-c", "-f", str(self.configuration))
        for node in self.nodes:
            self._start("slurmd", "-D", "-N", node, "-f", str(self.configuration))
        wait_for(self._idle, self._daemons[1], wanted=lambda n: n == len(self.nodes), seconds=60)

    def _start(self, *words: str) -> None:
        log = (self._base / "log" / "daemons.log").open("ab")
        with log:
            daemon = subprocess.Popen(
                words, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self._daemons.append(daemon)

    def _idle(self) -> int:
        done = self.call("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D", code=None)
        return int(done.stdout.strip() or 0) if done.returncode == 0 else 0

    def call(
        self, *words: str, code: int | None = 0, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of SLURM."""
        done = subprocess.run(
            words,
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert code in (None, done.returncode), f"{words}: {done.stdout}{done.stderr}"
        return done

    def job_state(self, job_id: str) -> str:
        """Return SLURM's state of a job."""
        return self.call("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T").stdout.strip()

    def stop(self) -> None:
        """End all jobs and daemons."""
        self.call("scancel", "--user=root", code=None)
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            if not self.call("squeue", "-h", "-o", "%i", code=None).stdout.strip():
                break
            time.sleep(0.1)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _free_ports(number: int) -> list[int]:
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def slurm_cluster(base: Path, nodes: int = 2) -> Iterator[SlurmCluster]:
    """A cluster until the end of the block. Skips the test if there can be none."""
    if (why := missing_reason()) is not None:
        pytest.skip(why)
    base.mkdir()
    cluster = SlurmCluster(base, nodes)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def in_cluster(cluster: SlurmCluster, home: Path, **more: str) -> Mapping[str, str]:
    """Return the environment of an ltui command on the login node of the cluster."""
    return {**cluster.environment, "LTUI_HOME": str(home), "CUDA_VISIBLE_DEVICES": "", **more}
