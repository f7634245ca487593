"""A real Slurm on this machine: its daemons run on network nodes. Needs root, and the packages slurm-wlm and munge."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.nodes.network_nodes import ENVIRON, NetworkNodes, can_make_nodes, network_nodes

_CONFIG = """
ClusterName=here
SlurmctldHost=node0({head})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=10,socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5,requeue_delay=1
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=5
MinJobAge=3600
SlurmdTimeout={node_timeout}
SlurmctldTimeout=30
MessageTimeout=10
SlurmdParameters=config_overrides
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
"""


def can_run_slurm() -> bool:
    """Whether Slurm is installed, and network nodes can be made."""
    return can_make_nodes() and all(
        shutil.which(name, path=ENVIRON["PATH"]) for name in ("slurmctld", "slurmd", "munged")
    )


@dataclass
class SlurmCluster:
    """Slurm on some network nodes; its controller runs on node 0."""

    nodes: NetworkNodes
    daemons: "list[subprocess.Popen[str]]" = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.nodes.folder / "slurm"

    @property
    def environ(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "CUDA_VISIBLE_DEVICES": ""}

    def up(self, *, node_timeout: int = 300) -> None:
        self.folder.mkdir()
        for name in ("state", *(f"spool-node{node}" for node in range(self.nodes.count))):
            (self.folder / name).mkdir()
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        places = "\n".join(
            f"NodeName=node{node} NodeAddr={self.nodes.address(node)} CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 "
            "ThreadsPerCore=1 RealMemory=4000 State=UNKNOWN"
            for node in range(self.nodes.count)
        )
        config = _CONFIG.format(head=self.nodes.address(0), folder=self.folder, nodes=places, node_timeout=node_timeout)
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # named, so that none is looked for
        munge = {
            name: f"--{name}={self.folder}/munge.{name.partition('-')[0]}"
            for name in ("key-file", "socket", "pid-file", "log-file", "seed-file")
        }
        munged = ["munged", "--foreground", "--force", *munge.values()]
        self.daemons.append(subprocess.Popen(munged, env=ENVIRON, text=True, stderr=subprocess.DEVNULL))
        self.start_daemon(0, "slurmctld", "-D")
        for node in range(self.nodes.count):
            self.start_daemon(node, "slurmd", "-D", "-N", f"node{node}")
        deadline = time.monotonic() + 60
        while self.run("sinfo", "-h", "-o", "%T").split() != ["idle"]:
            assert time.monotonic() < deadline, self.run("sinfo")
            time.sleep(0.5)

    def start_daemon(self, node: int, *command: str) -> None:
        process = self.nodes.start(node, list(command), environ=self.environ, output=subprocess.DEVNULL)
        self.daemons.append(process)

    def run(self, *command: str, timeout: float = 300) -> str:
        """The output of a command on node 0."""
        process = self.nodes.start(0, list(command), environ=self.environ)
        out, err = process.communicate(timeout=timeout)
        return out + err

    def wait_until_over(self, job: str, *, seconds: float = 300) -> str:
        """Wait until a job has left the queue; return what Slurm says of it."""
        deadline = time.monotonic() + seconds
        while self.run("squeue", "-h", "-j", job, "-o", "%T").strip():
            assert time.monotonic() < deadline, self.run("scontrol", "show", "job", job)
            time.sleep(1)
        return self.run("scontrol", "show", "job", job)

    def down(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


@contextmanager
def slurm_cluster(count: int, folder: Path) -> Iterator[SlurmCluster]:
    """Make nodes with a Slurm on them, and remove them at the end."""
    with network_nodes(count, folder) as nodes:
        cluster = SlurmCluster(nodes)
        try:
            cluster.up()
            yield cluster
        finally:
            cluster.down()
