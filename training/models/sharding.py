"""The strategy for models that do not fit one GPU: FSDP2 over all ranks."""

from __future__ import annotations

from lightning.pytorch.strategies import ModelParallelStrategy


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's ``ModelParallelStrategy`` with all ranks sharing the data, which by itself shares
    it between machines only. The module shards itself in ``configure_model``."""

    def __init__(
        self, tensor_parallel_size: int = 1, save_distributed_checkpoint: bool = True
    ) -> None:
        """``tensor_parallel_size``: ranks that split each layer among them (your module has to);
        ``save_distributed_checkpoint``: a folder with a file of each rank, instead of one file that
        rank 0 puts together in its memory."""
        super().__init__(
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
        )

    def setup_environment(self) -> None:
        ranks, together = self.num_processes * self.num_nodes, self._tensor_parallel_size
        assert isinstance(together, int)
        if ranks % together:
            raise ValueError(f"{ranks} ranks can't be split into groups of {together}")
        self._data_parallel_size = ranks // together
        super().setup_environment()
