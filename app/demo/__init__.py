"""``ltui demo``: the GPU panels with simulated GPUs, the run screen with simulated machines."""
