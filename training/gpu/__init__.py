"""GPUs of this machine: readings, the ranks and processes on them, and findings. No torch."""
