"""Benchmark of a configuration's data loader, without training, against alternative loaders:

    python -m ltui.training.data.loader_benchmark '{"config": ..., "workers": [1, 2], ...}'

It prints JSON lines like ``beton_script.py``. A data module can define the variants to compare
with ``loader_variants(workers) -> list[Variant]``. Without this method, a DataLoader is measured
with several numbers of workers.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ltui.training.data.ffcv.beton_file import BetonError
from ltui.training.data.ffcv.beton_script import EXIT_BAD_INPUT, Reporter
from ltui.training.data.rank_data_module import Variant
from ltui.training.rank.telemetry import count_samples
from ltui.training.rank.train_preset import build_cli, extend_path, to_config_error

_MEMORY_PERIOD_S = 0.5
"""Seconds between two measurements of memory."""


@dataclass
class VariantMeasurement:
    """Measurements of one variant in all rounds."""

    variant: Variant
    samples_per_s: list[float] = field(default_factory=list)
    first_batch_s: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    """Maximum memory that loading added, including workers. Shared pages are counted once."""

    def to_document(self) -> dict[str, Any]:
        return {
            "loader": self.variant.loader,
            "workers": self.variant.workers,
            "settings": dict(self.variant.settings),
            "samples_per_s": self.samples_per_s,
            "first_batch_s": self.first_batch_s,
            "memory_bytes": self.memory_bytes,
        }


def main(arguments: list[str]) -> int:
    """Run the benchmark that ``arguments[0]`` describes as JSON. Return the exit code."""
    request = json.loads(arguments[0])
    reporter = Reporter()
    extend_path(request.get("python_path") or [], request["config"])
    try:
        reporter.write(phase="loading the classes")
        data = open_data_module(request["config"])
        chosen = variants(data, request.get("workers") or default_worker_counts())
        measured = [VariantMeasurement(variant) for variant in chosen]
        for number in range(request["rounds"]):
            for one in measured:
                reporter.write(
                    phase=f"round {number + 1} of {request['rounds']}: {one.variant.name}"
                )
                measure(one, request["seconds"])
    except BetonError as error:
        where, _, text = str(error).partition(": ")
        reporter.problem(where, text)
        return EXIT_BAD_INPUT
    except (Exception, SystemExit) as error:  # noqa: BLE001  (of the configuration or its classes)
        problem = to_config_error(error)
        reporter.problem(problem.where, problem.what, problem.remedy)
        return EXIT_BAD_INPUT
    finally:
        with contextlib.suppress(UnboundLocalError):
            _close(data)
    reporter.write(result={"variants": [one.to_document() for one in measured]})
    return 0


def open_data_module(config: Mapping[str, Any]) -> Any:
    """Return the configuration's data module, set up for a single rank."""
    trainer = {**(config.get("trainer") or {}), "devices": 1, "num_nodes": 1, "strategy": "auto"}
    trainer.pop("callbacks", None)
    cli = build_cli({**config, "trainer": trainer}, train=False)
    data = cli.datamodule
    if data is None:
        raise ValueError("configuration: it has no data module.")
    cli.trainer.strategy.setup_environment()
    data.trainer = cli.trainer
    data.prepare_data()
    data.setup("fit")
    return data


def default_worker_counts() -> list[int]:
    """Return 1, 2, 4 and so on, up to the number of allowed cores."""
    cores = len(os.sched_getaffinity(0))
    return sorted({1, cores, *(n for n in (2, 4, 8, 16, 32) if n < cores)})


def variants(data: Any, counts: Sequence[int]) -> list[Variant]:
    """Return the variants to compare, with ``counts`` workers."""
    get_variants = getattr(data, "loader_variants", None)
    if callable(get_variants):
        return list(get_variants(counts))
    loader = data.train_dataloader()
    if not isinstance(loader, DataLoader):
        return [Variant("the loader", None, lambda: loader)]
    worker_counts = sorted({0, loader.num_workers, *counts})
    return [Variant("DataLoader", n, _with_workers(loader, n)) for n in worker_counts]


def _with_workers(loader: DataLoader[Any], workers: int) -> Callable[[], DataLoader[Any]]:
    def make() -> DataLoader[Any]:
        batches: dict[str, Any] = {"batch_sampler": loader.batch_sampler}
        if isinstance(loader.dataset, IterableDataset):
            batches = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        return DataLoader(
            loader.dataset,
            num_workers=workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
            prefetch_factor=loader.prefetch_factor if workers else None,
            **batches,
        )

    return make


def measure(one: VariantMeasurement, seconds: float) -> None:
    """Measure one round. When an epoch ends, the next one starts, at its usual cost."""
    before = tree_memory_bytes()
    loader = one.variant.open()
    with _MemoryMonitor() as memory:
        began = time.monotonic()
        reading = _repeat_epochs(loader)
        next(reading)
        one.first_batch_s.append(time.monotonic() - began)
        samples, began = 0.0, time.monotonic()
        while (now := time.monotonic()) - began < seconds:
            samples += count_samples(next(reading))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            now = time.monotonic()
        one.samples_per_s.append(samples / (now - began))
    reading.close()
    _close(loader)
    one.memory_bytes = max(one.memory_bytes, memory.maximum - before)


def _repeat_epochs(loader: Iterable[Any]) -> Any:
    epoch = 0
    while True:
        sampler = getattr(loader, "sampler", None)
        if callable(set_epoch := getattr(sampler, "set_epoch", None)):
            set_epoch(epoch)
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ValueError("data: the loader returns no batches.")
        epoch += 1


class _MemoryMonitor:
    """Measures the maximum memory of the process tree periodically in a thread."""

    def __init__(self) -> None:
        self.maximum = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._measure_periodically, daemon=True)

    def __enter__(self) -> _MemoryMonitor:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.maximum = max(self.maximum, tree_memory_bytes())

    def _measure_periodically(self) -> None:
        while not self._stop.wait(_MEMORY_PERIOD_S):
            self.maximum = max(self.maximum, tree_memory_bytes())


def tree_memory_bytes() -> int:
    """Return the memory of this process and its descendants in bytes.

    Memory that several processes share is counted once.
    """
    return sum(_proportional_bytes(pid) for pid in _process_tree(os.getpid()))


def _process_tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                yield from _process_tree(int(child))


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _close(value: Any) -> None:
    """Call the ``close`` of a data module or a loader if it has one."""
    close = getattr(value, "close", None)
    if callable(close):
        close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
