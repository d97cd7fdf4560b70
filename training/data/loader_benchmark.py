"""Measures the data loader of a configuration alone, and what could take its place, in turn:

    python -m ltui.training.data.loader_benchmark '{"config": ..., "workers": [1, 2], ...}'

Prints JSON lines as ``beton_build.py`` does. A data module offers what is to be compared with
``loader_variants(workers) -> list[Variant]``; any other that gives a DataLoader is measured with
several worker counts.
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
from ltui.training.data.ffcv.build_beton import EXIT_BAD_INPUT, Reporter
from ltui.training.data.loader_variant import Variant
from ltui.training.rank.config_errors import to_config_error
from ltui.training.rank.telemetry import count_samples
from ltui.training.rank.train_preset import build

_MEMORY_EVERY_S = 0.5


@dataclass
class VariantMeasurement:
    """One variant, over the rounds."""

    variant: Variant
    samples_per_s: list[float] = field(default_factory=list)
    first_batch_s: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    """The most that reading it added, with its workers; shared pages are counted once."""

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
    asked = json.loads(arguments[0])
    reporter = Reporter()
    sys.path[:0] = asked.get("python_path") or []
    try:
        reporter.tell(phase="loading the classes")
        data = open_data_module(asked["config"])
        chosen = variants(data, asked.get("workers") or default_worker_counts())
        measured = [VariantMeasurement(variant) for variant in chosen]
        for number in range(asked["rounds"]):
            for one in measured:
                reporter.tell(phase=f"round {number + 1} of {asked['rounds']}: {one.variant.name}")
                measure(one, asked["seconds"])
    except BetonError as error:
        where, _, what = str(error).partition(": ")
        reporter.problem(where, what)
        return EXIT_BAD_INPUT
    except (Exception, SystemExit) as error:  # noqa: BLE001  (of the configuration or its classes)
        mistake = to_config_error(error)
        reporter.problem(mistake.where, mistake.what, mistake.remedy)
        return EXIT_BAD_INPUT
    finally:
        with contextlib.suppress(UnboundLocalError):
            close_data_module(data)
    reporter.tell(result={"variants": [one.to_document() for one in measured]})
    return 0


def open_data_module(config: Mapping[str, Any]) -> Any:
    """The configuration's data module, as the only rank there is would see it."""
    trainer = {**(config.get("trainer") or {}), "devices": 1, "num_nodes": 1, "strategy": "auto"}
    trainer.pop("callbacks", None)
    cli = build({**config, "trainer": trainer}, train=False)
    data = cli.datamodule
    if data is None:
        raise ValueError("configuration: it names no data module.")
    cli.trainer.strategy.setup_environment()
    data.trainer = cli.trainer
    data.prepare_data()
    data.setup("fit")
    return data


def default_worker_counts() -> list[int]:
    """1, 2, 4 and so on, up to the cores that there are."""
    cores = len(os.sched_getaffinity(0))
    return sorted({1, cores, *(n for n in (2, 4, 8, 16, 32) if n < cores)})


def variants(data: Any, counts: Sequence[int]) -> list[Variant]:
    own = getattr(data, "loader_variants", None)
    if callable(own):
        return list(own(counts))
    loader = data.train_dataloader()
    if not isinstance(loader, DataLoader):
        return [Variant("the loader", None, lambda: loader)]
    tried = sorted({0, loader.num_workers, *counts})
    return [Variant("DataLoader", n, _with_workers(loader, n)) for n in tried]


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
    """One round. An epoch that ends is begun again, at its usual cost."""
    before = memory_of_tree()
    loader = one.variant.open()
    with _MemoryWatch() as memory:
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
    close = getattr(loader, "close", None)
    if callable(close):
        close()
    one.memory_bytes = max(one.memory_bytes, memory.most - before)


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
            raise ValueError("data: the loader gives no batches.")
        epoch += 1


class _MemoryWatch:
    """Looks at memory now and then, in a thread."""

    def __init__(self) -> None:
        self.most = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, memory_of_tree())

    def _watch(self) -> None:
        while not self._stop.wait(_MEMORY_EVERY_S):
            self.most = max(self.most, memory_of_tree())


def memory_of_tree() -> int:
    """Bytes of this process and all below it; what several share is counted once."""
    return sum(_proportional_bytes(pid) for pid in _tree(os.getpid()))


def _tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in task.read_text().split():
                yield from _tree(int(child))


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def close_data_module(data: Any) -> None:
    close = getattr(data, "close", None)
    if callable(close):
        close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
