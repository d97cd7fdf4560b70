"""Two ranks write one sharded checkpoint, each its part, and rank 0 makes it whole. Argument: a
folder."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_sharded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.insert(0, str(Path(__file__).parents[3]))
from ltui.training.rank.coordination.save_checkpoint import WeightsCheck, wait_for_all_ranks
from ltui.training.shared.checkpoint_files import (
    checkpoint_name,
    partial_path,
    publish_checkpoint,
    rank_file,
)
from tests.rank.exactness import world


class Gloo:
    """What Lightning's strategy does for the check of the weights."""

    @staticmethod
    def reduce_boolean_decision(decision: bool) -> bool:
        votes = torch.tensor(int(decision))
        distributed.all_reduce(votes, distributed.ReduceOp.MIN)
        return bool(votes)


ROWS = torch.arange(40.0).reshape(10, 4)


def save(folder: Path) -> None:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (world.HERE.ranks,))
    rows = distribute_tensor(ROWS, mesh, [Shard(0)])
    spoilt = ROWS.clone()
    spoilt[9] = float("nan")
    check = WeightsCheck({"rows": rows, "spoilt": distribute_tensor(spoilt, mesh, [Shard(0)])})
    assert check.result() == ("finite", "NaN")[world.HERE.rank]
    # Only the part of rank 1 has a NaN, which rank 0 has to learn.
    assert wait_for_all_ranks(Gloo, check, True) == "NaN"
    weights = wait_for_all_ranks(Gloo, WeightsCheck({"rows": rows}), True)
    path = folder / checkpoint_name(7, "stop")
    save_sharded({"rows": rows, "step": torch.tensor(7)}, checkpoint_id=partial_path(path))
    torch.save({"rank": world.HERE.rank}, partial_path(rank_file(path, world.HERE.rank)))
    distributed.barrier()
    if world.HERE.rank == 0:
        publish_checkpoint(
            partial_path(path),
            path,
            2,
            global_step=7,
            attempt=1,
            fit=1,
            reason="stop",
            weights=weights,
        )
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    codes = world.wait(world.start(2, lambda: save(Path(sys.argv[1]))))
    sys.exit(any(codes))
