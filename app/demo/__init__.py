"""``ltui demo gpus``: the GPU panels with simulated GPUs."""
