"""The strategy for models that do not fit one GPU: FSDP2 over all ranks."""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` with data parallelism over all ranks.

    By default that strategy uses data parallelism only between machines. The module shards itself
    in ``configure_model``.
    """

    def __init__(
        self, tensor_parallel_size: int = 1, save_distributed_checkpoint: bool = True
    ) -> None:
        """``tensor_parallel_size``: number of ranks that split each layer, which your module must
        implement. ``save_distributed_checkpoint``: save a folder with one file per rank, instead of
        one file that rank 0 gathers in its memory."""
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
        )

    def setup_environment(self) -> None:
        ranks, group_size = self.num_processes * self.num_nodes, self._tensor_parallel_size
        assert isinstance(group_size, int)
        if ranks % group_size:
            raise ValueError(f"{ranks} ranks can't be split into groups of {group_size}")
        self._data_parallel_size = ranks // group_size
        super().setup_environment()
