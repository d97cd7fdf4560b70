"""Read which memory ran out, and what held it, from the message of an exception. Pure.

The patterns are phrases from the sources of torch (``CUDACachingAllocator.cpp``, ``alloc_cpu.cpp``
and the CUDA libraries that it calls). Every part of a message may be missing in another version.

Error messages that torch's communication back ends raise when another rank has ended. The patterns
are complete phrases from the sources of torch, gloo, NCCL and Lightning. A single word such as
"store" or "peer" may as well belong to an error of the user's own code.
"""

from __future__ import annotations

import re

_CONSEQUENCE = re.compile(
    r"connection (was )?(likely )?(closed|reset|refused)|broken pipe|closed by (remote )?peer|"
    r"socket timeout|timed out waiting|client socket has (failed|timed out)|"
    r"timed out after \S+ seconds waiting for clients|wait timeout after|"
    r"recv(Value)?(WithTimeout)? failed|Application timeout caused pair closure|gloo.*timed out|"
    r"(failed to pass|timed out in|reached) monitoredBarrier|"
    # An agent ends the other ranks by SIGTERM, and with them the workers of their loaders.
    r"DataLoader worker \(pid \d+\) is killed by signal: Terminated|"
    r"nccl.*(abort|remote)|remote process exited|collective operation timeout|"
    r"\bDist(Network|Store)Error\b|\bSIGTERMException\b|\bSignalException\b",
    re.IGNORECASE,
)


def is_consequence(error: str) -> bool:
    """Return True if an error, as ``Type: message``, is a consequence of another rank's end.

    Such an error is not the cause of a failure if another rank reports a different error.
    """
    return _CONSEQUENCE.search(error) is not None


_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|CUBLAS_STATUS_ALLOC_FAILED|"
    r"CUDNN_STATUS_ALLOC_FAILED|CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"
)
_SIZE = r"([\d.]+ (?:[KMGT]i)?B|[\d.]+ bytes)"
_TRIED = re.compile(rf"Tried to allocate {_SIZE}")
_CAPACITY = re.compile(rf"GPU (\d+) has a total capaci?ty of {_SIZE} of which {_SIZE} is free")
_OTHERS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_ALLOCATED = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
_GRAPHS = re.compile(rf"{_SIZE} allocated in private pools")
_UNUSED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_SETTING = re.compile(r"\bPYTORCH_\w*ALLOC_CONF=\w+:\w+")

_UNITS = {"bytes": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_LARGE = 0.1
"""Fraction of a GPU's memory from which another holder of it is named in the remedy."""
_LESS_MEMORY = "Use a smaller batch, gradient accumulation or a lower precision."


def is_out_of_memory(name: str, message: str) -> bool:
    """Return True if an exception of type ``name`` says that memory ran out."""
    return name in ("OutOfMemoryError", "MemoryError") or bool(_OUT_OF_MEMORY.search(message))


def memory_text(message: str) -> str | None:
    """Return what was requested of a GPU and what held its memory; None for another message.

    The text continues a sentence: ``tried to allocate 2.00 GiB while 1.00 GiB of 8.00 GiB was free
    on GPU 0; PyTorch held 6.00 GiB in tensors``.
    """
    capacity = _CAPACITY.search(message)
    if capacity is None:
        return None
    gpu, total, free = capacity.groups()
    tried = _TRIED.search(message)
    action = f"tried to allocate {tried[1]}" if tried else "tried to allocate more memory"
    text = f"{action} while {free} of {total} was free on GPU {gpu}"
    holders = []
    if allocated := _ALLOCATED.search(message):
        graphs = _GRAPHS.search(message)
        of_graphs = f" ({graphs[1]} for CUDA graphs)" if graphs else ""
        holders.append(f"PyTorch held {allocated[1]} in tensors{of_graphs}")
    if unused := _UNUSED.search(message):
        holders.append(f"{unused[1]} that was reserved and not used")
    holders += [f"process {pid} held {size}" for pid, size in _OTHERS.findall(message)]
    return f"{text}; {', '.join(holders)}" if holders else text


def memory_remedy(message: str) -> str:
    """Return what to do about the largest holder of memory that can be freed."""
    capacity = _CAPACITY.search(message)
    if capacity is None:
        return _LESS_MEMORY
    large = _LARGE * _bytes(capacity[2])
    others = [(_bytes(size), pid, size) for pid, size in _OTHERS.findall(message)]
    other_bytes, pid, size = max(others, default=(0.0, "", ""))
    if other_bytes > large:
        return (
            f"Process {pid} holds {size} of that GPU: end it, or give the run GPUs of its own"
            " (trainer.devices=free:N)."
        )
    unused, setting = _UNUSED.search(message), _SETTING.search(message)
    if unused and setting and _bytes(unused[1]) > large:
        return f"Memory is fragmented: set {setting[0]} in the environment. Or: {_LESS_MEMORY}"
    return _LESS_MEMORY


def _bytes(size: str) -> float:
    number, unit = size.split()
    return float(number) * _UNITS[unit]
