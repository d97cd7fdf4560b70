"""``make gpu``: what ltui says and costs on real NVIDIA GPUs, in one command."""
