"""Ask the training interpreter what its torch sees of this machine's GPUs."""

from __future__ import annotations

import json
import subprocess

from msgspec import Struct

from ltui.training.process.python_command import program_command

_TIMEOUT_S = 60.0
"""Seconds to wait for the answer. To import torch and to open the driver takes some seconds."""
_PROGRAM = """
import json, os, warnings
# With this variable, which Lightning sets, torch counts the GPUs of NVML and does not try CUDA.
os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except Exception:
    nccl = None
reasons = [str(warning.message) for warning in caught if "CUDA" in str(warning.message)]
print(json.dumps({
    "cuda": torch.version.cuda, "nccl": nccl, "devices": devices,
    "reason": reasons[-1] if reasons else None,
}))
"""


class CudaReport(Struct, frozen=True, kw_only=True):
    """What torch says about CUDA."""

    cuda: str | None
    """Version of CUDA that torch is built for; None for a build without CUDA."""
    nccl: str | None
    devices: int
    """GPUs that torch can use."""
    reason: str | None = None
    """Torch's warning, usually why there are none."""

    def versions(self) -> str:
        """Return the versions, such as ``CUDA 13.0, NCCL 2.28.9``."""
        names = (("CUDA", self.cuda), ("NCCL", self.nccl))
        return ", ".join(f"{name} {version}" for name, version in names if version is not None)

    def why_no_device(self) -> str:
        """Return why torch can use no GPU of this machine, in a line."""
        if self.cuda is None:
            return "it is built without CUDA"
        first = (self.reason or "").partition("(Triggered")[0].partition(". ")[0].strip()
        return f"{self.versions()}: {first or 'none is visible to it'}"


def probe_cuda(python: str) -> CudaReport | None:
    """Run the probe in ``python``, which takes some seconds; None if it gives no answer."""
    try:
        done = subprocess.run(
            program_command(_PROGRAM, python=python),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return CudaReport(**json.loads(done.stdout))
    except (OSError, ValueError, TypeError, subprocess.SubprocessError):
        return None
