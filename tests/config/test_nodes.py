"""Position of a machine among several nodes, by the variables of each launcher."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ltui.training.config.device_selection import Machine
from ltui.training.config.node_environment import (
    choose_nodes,
    expand_hosts,
    read_node_environment,
    without_launcher,
)
from ltui.training.config.preflight import CheckedConfiguration, preflight
from ltui.training.config.run_spec import Nodes, RunSpec
from ltui.training.store.spec_file import parse_spec, spec_text
from tests.required import required

BY_HAND = {"NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
BY_SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_JOB_NODELIST": "n[07-09]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[07-08]",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
}
BY_SKYPILOT = {
    "SKYPILOT_NODE_IPS": "10.1.0.4\n10.1.0.9",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
BY_DSTACK = {
    "DSTACK_NODES_IPS": "10.2.0.9\n10.2.0.4",
    "DSTACK_MASTER_NODE_IP": "10.2.0.4",
    "DSTACK_NODE_RANK": "0",
    "DSTACK_NODES_NUM": "2",
}
BY_KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "job-node-0.job",
    "PET_MASTER_PORT": "29400",
}
BY_KUBEFLOW_ELASTIC = {
    "PET_NNODES": "1:4",
    "PET_NODE_RANK": "1",
    "PET_RDZV_ENDPOINT": "job-worker-0:23456",
    "PET_RDZV_BACKEND": "c10d",
}
BY_MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "MASTER_ADDR": "m0",
}


def placed(rank: int, address: str, port: int, start: str, control_port: int = -1) -> Nodes:
    """The position among two nodes."""
    return Nodes(
        count=2, rank=rank, address=address, port=port, start=start, control_port=control_port
    )


@pytest.mark.parametrize(
    ("environ", "nodes"),
    [
        (BY_HAND, placed(1, "10.0.0.1", 29500, "launcher")),
        ({**BY_HAND, "MASTER_PORT": "5"}, placed(1, "10.0.0.1", 5, "launcher")),
        (BY_SRUN, placed(0, "n07", 18456, "srun", 28456)),
        ({**BY_SRUN, **BY_HAND}, placed(1, "10.0.0.1", 18456, "srun", 28456)),
        ({**BY_SRUN, "MASTER_PORT": "7"}, placed(0, "n07", 7, "srun")),
        (BY_SKYPILOT, placed(1, "10.1.0.4", 29500, "launcher")),
        ({**BY_SRUN, **BY_SKYPILOT}, placed(1, "10.1.0.4", 18456, "launcher", 28456)),
        (BY_DSTACK, placed(0, "10.2.0.4", 29500, "launcher")),
        (BY_KUBEFLOW, placed(1, "job-node-0.job", 29400, "launcher")),
        (BY_KUBEFLOW_ELASTIC, placed(1, "job-worker-0", 23456, "launcher")),
        (BY_MPIRUN, placed(1, "m0", 29500, "launcher")),
    ],
)
def test_the_position_of_a_node(environ: dict[str, str], nodes: Nodes) -> None:
    environment = read_node_environment(environ)
    assert choose_nodes({"num_nodes": 2}, environment) == (nodes, [])
    assert choose_nodes({"num_nodes": 1}, environment) == (None, [])


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        (BY_SRUN, 2),
        (BY_SKYPILOT, 2),
        (BY_DSTACK, 2),
        (BY_KUBEFLOW, 2),
        (BY_MPIRUN, 2),
        ({**BY_HAND, "NNODES": "2"}, 2),
        # The number of nodes is not certain: variables that are left over, a batch script.
        (BY_HAND, None),
        (BY_KUBEFLOW_ELASTIC, None),
        ({k: v for k, v in BY_SRUN.items() if "STEP" not in k}, None),
        ({}, None),
    ],
)
def test_the_number_of_nodes_is_that_of_the_launcher(
    environ: dict[str, str], count: int | None
) -> None:
    machine = Machine(node=read_node_environment(environ))

    def checked(trainer: dict[str, int], *overrides: str) -> CheckedConfiguration:
        document = {"model": {"class_path": "a.B"}, "trainer": {**trainer, "devices": 1}}
        return preflight(document, overrides, "my.yaml", lines={}, machine=machine, cpu_ranks=1)

    for trainer in ({}, {"num_nodes": 1}):
        configuration = checked(trainer)
        assert (configuration.nodes and configuration.nodes.count) == count
        assert configuration.document["trainer"].get("num_nodes", 1) == (count or 1)
    assert checked({}, "trainer.num_nodes=1").nodes is None


def test_without_a_launcher_this_machine_is_node_0() -> None:
    environment = replace(read_node_environment({}), own_address="10.0.0.7")
    nodes = placed(0, "10.0.0.7", 29500, "by hand", 29501)
    assert choose_nodes({"num_nodes": 2}, environment) == (nodes, [])
    assert choose_nodes({}, environment) == (None, [])
    chosen = without_launcher(read_node_environment({**BY_SRUN, **BY_HAND}), "fd00::1", 4000)
    assert choose_nodes({"num_nodes": 2}, chosen)[0] == placed(0, "fd00::1", 4000, "by hand", 4001)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"NODE_RANK": "1"}, "MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "a"}, "NODE_RANK is not set"),
        ({**BY_HAND, "NODE_RANK": "2"}, "NODE_RANK is 2, but 2 nodes are numbered 0 to 1"),
        ({**BY_HAND, "NNODES": "4"}, "NNODES is 4, not 2"),
        ({**BY_SRUN, "SLURM_STEP_NUM_NODES": "3"}, "SLURM allocated 3 nodes, not 2"),
        ({**BY_SRUN, "SLURM_LOCALID": "1"}, "srun has started more than one ltui on this node"),
        ({**BY_SRUN, "SLURM_NODEID": "2"}, "SLURM_NODEID is 2, but"),
        (
            {"SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]"},
            "srun runs the command on every node",
        ),
        ({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}, "NODE_RANK is not set"),
        ({**BY_SKYPILOT, "SKYPILOT_NUM_NODES": "5"}, "SkyPilot started 5 nodes, not 2"),
        ({**BY_MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "1"}, "mpirun has started more than one"),
        ({k: v for k, v in BY_MPIRUN.items() if k != "MASTER_ADDR"}, "MASTER_ADDR is not set"),
    ],
)
def test_what_can_not_be(environ: dict[str, str], said: str) -> None:
    nodes, (fault,) = choose_nodes({"num_nodes": 2}, read_node_environment(environ))
    assert nodes is None
    assert fault.path == "trainer.num_nodes"
    assert said in fault.what
    assert "NODE_RANK=0, 1, ..." in str(fault.remedy)


def test_a_machine_without_a_network() -> None:
    nodes, (fault,) = choose_nodes({"num_nodes": 2}, read_node_environment({}))
    assert nodes is None
    assert "no address was found" in fault.what
    assert "--address" in str(fault.remedy)


@pytest.mark.parametrize(
    ("listed", "hosts"),
    [
        ("n3", ["n3"]),
        ("n3,n4", ["n3", "n4"]),
        ("n[3-5,9],m1", ["n3", "n4", "n5", "n9", "m1"]),
        ("gpu[012,014]-ib", ["gpu012-ib", "gpu014-ib"]),
        ("n[08-10]", ["n08", "n09", "n10"]),
        ("r[0-1]n[1-2]", ["r0n1", "r0n2", "r1n1", "r1n2"]),
        ("127.0.0.[11-12]", ["127.0.0.11", "127.0.0.12"]),
        (" a , b ", ["a", "b"]),
        ("", []),
    ],
)
def test_slurms_list_of_hosts(listed: str, hosts: list[str]) -> None:
    assert list(expand_hosts(listed)) == hosts


@pytest.mark.parametrize(
    "listed",
    ["n[1-3", "n1-3]", "n[[1]]", "n[a-b]", "n[3-1]", "n[]", "n[1-99999999]", "r[0-999]n[0-999]"],
)
def test_no_list_of_hosts(listed: str) -> None:
    with pytest.raises(ValueError, match=r"bracket|list|range|hosts"):
        expand_hosts(listed)


SPEC = RunSpec(id="i", name="n", created_at=0.0, cwd="/", python="python")
SIZES = [1, 2]


@pytest.mark.parametrize(
    "changes",
    [
        {"nodes": Nodes(count=3, rank=0, address="a", port=1, control_port=0, hosts=("b", "c"))},
        {"config": {"key": b"hi", "names": {"x", "y"}, "limit": float("inf"), "none": None}},
        {"config": {"model": {"sizes": SIZES}, "data": {"sizes": SIZES}}},
    ],
    ids=["nodes", "values of YAML", "one list twice"],
)
def test_a_specification_is_read_as_it_was_written(changes: dict[str, Any]) -> None:
    spec = SPEC.with_changes(**changes)
    assert "id001" not in spec_text(spec), "anchors"
    assert parse_spec(spec_text(spec), "spec.yaml") == spec


def test_a_specification_without_the_newer_fields_of_nodes() -> None:
    nodes = {"count": 2, "rank": 1, "address": "a", "port": 29500}
    loaded = required(RunSpec.from_document({**SPEC.to_document(), "nodes": nodes}).nodes)
    assert loaded == Nodes(count=2, rank=1, address="a", port=29500, control_port=29501)
    assert loaded.start == "launcher"
    assert loaded.join_timeout_s == 600
