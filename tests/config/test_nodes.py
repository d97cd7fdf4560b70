"""Which node this is, as torchrun's and SLURM's variables say."""

from __future__ import annotations

import pytest
import yaml

from ltui.training.config.node_environment import choose_nodes, first_host, read_node_environment
from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.store.spec_file import spec_text
from tests.required import required

BY_HAND = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
BY_SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "n[07-08]",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [
        (BY_HAND, Nodes(count=2, rank=1, address="10.0.0.1", port=29500)),
        ({**BY_HAND, "MASTER_PORT": "5"}, Nodes(count=2, rank=1, address="10.0.0.1", port=5)),
        (BY_SRUN, Nodes(count=2, rank=0, address="n07", port=18456)),
        ({**BY_SRUN, **BY_HAND}, Nodes(count=2, rank=1, address="10.0.0.1", port=18456)),
    ],
)
def test_the_position_of_a_node(environ: dict[str, str], nodes: Nodes) -> None:
    assert choose_nodes({"num_nodes": 2}, read_node_environment(environ)) == (nodes, [])
    assert choose_nodes({"num_nodes": 1}, read_node_environment(environ)) == (None, [])
    assert choose_nodes({}, read_node_environment(environ)) == (None, [])


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({}, "NODE_RANK is not set"),
        ({"NODE_RANK": "1"}, "MASTER_ADDR is not set"),
        ({**BY_HAND, "NODE_RANK": "2"}, "2 nodes are numbered 0 to 1"),
        ({**BY_SRUN, "SLURM_JOB_NUM_NODES": "3"}, "SLURM allocated 3 nodes, not 2"),
        ({**BY_SRUN, "SLURM_LOCALID": "1"}, "more than one ltui on this node"),
    ],
)
def test_what_can_not_be(environ: dict[str, str], said: str) -> None:
    nodes, (fault,) = choose_nodes({"num_nodes": 2}, read_node_environment(environ))
    assert nodes is None
    assert fault.path == "trainer.num_nodes"
    assert said in fault.what
    assert "NODE_RANK=0, 1, ..." in str(fault.remedy)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n3", "n3"),
        ("n3,n4", "n3"),
        ("n[3-5,9],m1", "n3"),
        ("gpu[012,014]-ib", "gpu012-ib"),
        ("127.0.0.[11-12]", "127.0.0.11"),
        ("", None),
    ],
)
def test_the_first_of_slurms_hosts(hosts: str, first: str | None) -> None:
    assert first_host(hosts) == first


def test_a_specification_keeps_it() -> None:
    nodes = Nodes(
        count=3, rank=0, address="a", port=1, control_port=0, start="ssh", hosts=("b", "c")
    )
    spec = RunSpec(id="i", name="n", created_at=0.0, cwd="/", python="python", nodes=nodes)
    stored = yaml.safe_load(spec_text(spec))
    assert RunSpec.from_document(stored) == spec


def test_a_specification_without_the_newer_fields_of_nodes() -> None:
    spec = RunSpec(id="i", name="n", created_at=0.0, cwd="/", python="python")
    nodes = {"count": 2, "rank": 1, "address": "a", "port": 29500}
    loaded = required(RunSpec.from_document({**spec.to_document(), "nodes": nodes}).nodes)
    assert loaded == Nodes(count=2, rank=1, address="a", port=29500, control_port=29501)
    assert loaded.start == "launcher"
    assert loaded.join_timeout_s == 600
