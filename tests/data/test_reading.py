"""Batches of a ``.beton`` by FFCV: the samples asked for, never overwritten, and whatever goes
wrong in the thread that reads is told with the sample's number instead of waiting for ever."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.conftest import damage, everything, needs_ffcv

# One process for everything: importing FFCV and compiling a pipeline take seconds.
_PROGRAM = """
import os, sys, threading
from pathlib import Path
import numpy as np
import torch
from ffcv.fields.basics import IntDecoder
from ffcv.pipeline.operation import Operation
from ffcv.transforms import Cutout, ModuleWrapper, RandomHorizontalFlip, Squeeze, ToTensor
from ltui.training.data.ffcv.beton_file import BetonError, BetonFile
from ltui.training.data.ffcv.torch_dataset import BetonSamples
from ltui.training.data.ffcv.epoch_order import BetonLoader, EpochOrder
from ltui.training.data.ffcv.epoch_order import dataloader_batches, ffcv_batches
from ltui.training.data.ffcv.field_pipelines import image_pipelines, value_pipeline
from ltui.training.data.ffcv.ffcv_reader import FfcvReader
from ltui.training.data.ffcv.image_transform import ImageTransformConfig

CPU = torch.device("cpu")
good, damaged = (BetonFile(Path(p)) for p in sys.argv[1:3])
labels = good.metadata["f1"]

def threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("ltui-")]

def raw_pixels():
    # Without a conversion, so that what FFCV's code hands out stands in its buffers.
    from ltui.training.data.ffcv.field_pipelines import DecodeImages
    decode = DecodeImages(ImageTransformConfig(side=32))
    return {"image": [decode, ToTensor()], "label": value_pipeline(1, CPU)}

def batches_are_kept():
    reader = FfcvReader(good, raw_pixels(), batch_size=4, device=CPU, batches_ahead=1)
    order = torch.randperm(45, generator=torch.Generator().manual_seed(1)).tolist()
    kept = list(reader.batches(order))
    for number, (images, found) in enumerate(kept):
        samples = order[4 * number : 4 * number + 4]
        assert found.tolist() == labels[samples].tolist()
        # Read alone, nothing can have been written over it.
        (alone, _), = reader.batches(samples)
        assert torch.equal(images, alone), number
    # And the buffers do come round: without the clones the same test fails.
    from ltui.training.data.ffcv import ffcv_reader
    clone, ffcv_reader._Buffers.detach = ffcv_reader._Buffers.detach, lambda self, value: value
    views = list(reader.batches(order))
    ffcv_reader._Buffers.detach = clone
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(kept, views))
    assert not threads()
    unread = reader.batches(order)
    next(unread)
    assert threads()
    unread.close()
    assert not threads()

def on_a_gpu_all_epochs_use_one_stream():
    # The reader on the CPU, with a stand-in for CUDA that records what is asked of it.
    from contextlib import contextmanager
    from types import SimpleNamespace
    from ltui.training.data.ffcv import ffcv_reader
    calls, current = [], ["the default"]

    @contextmanager
    def on_stream(stream):
        current.append(stream)
        yield
        current.pop()

    class Stream:
        def __init__(self, device):
            calls.append("stream")
        def synchronize(self):
            calls.append("wait")
            raise RuntimeError("CUDA error: the kernel of a step")
        def wait_event(self, event):
            calls.append("order")

    class Torch:
        cuda = SimpleNamespace(
            Stream=Stream,
            stream=on_stream,
            current_stream=Stream,
            Event=lambda: SimpleNamespace(record=lambda stream: None, synchronize=lambda: None),
        )
        def __getattr__(self, name):
            return getattr(torch, name)
        def empty(self, *shape, pin_memory, **options):
            calls.append(("pinned" if pin_memory else "not pinned", type(current[-1])))
            return torch.empty(*shape, **options)

    ffcv_reader.torch = Torch()
    gpu = SimpleNamespace(type="cuda")
    reader = FfcvReader(good, raw_pixels(), batch_size=4, device=gpu, batches_ahead=1)
    assert len(set(calls[1:-3])) == 1, calls
    assert (calls[0], calls[1], calls[-3:]) == (
        "stream", ("pinned", Stream), ["stream", "order", "wait"]
    ), calls
    calls.clear()
    unread = reader.batches(range(45))
    next(unread)
    assert "wait" not in calls
    unread.close()
    assert calls.count("wait") == 1
    assert not threads()
    ffcv_reader.torch = torch

def both_loaders_agree():
    transform = ImageTransformConfig(side=48, scale=(0.3, 1.0), flip=True, shift=3, cutout=6)
    names = ["label", "image"]
    order = EpochOrder(45, batch_size=8, rank=1, world_size=2, pad=True)
    order.seed = 5
    pipelines = image_pipelines(
        good, device=CPU, dtype=torch.bfloat16, transform=transform, names=names
    )
    for os_cache in (True, False):
        reader = FfcvReader(
            good, pipelines, batch_size=8, device=CPU, num_workers=1 + os_cache, os_cache=os_cache
        )
        by_ffcv = BetonLoader(order, ffcv_batches(reader, order, {0: 48, 1: 64}))
        samples = BetonSamples(good, names, transform, torch.bfloat16)
        by_torch = BetonLoader(order, dataloader_batches(samples, order, 0, {0: 48, 1: 64}))
        for epoch in (0, 1):
            order.set_epoch(epoch)
            pairs = list(zip(by_ffcv, by_torch))
            assert len(pairs) == 3
            for (ours, images), (theirs, same) in pairs:
                assert ours.tolist() == theirs.tolist()
                side = 48 + 16 * epoch
                assert images.shape == same.shape == (len(ours), 3, side, side)
                assert images.dtype == same.dtype == torch.bfloat16
                assert images.is_contiguous(memory_format=torch.channels_last)
                # Two ways to make an image smaller; the parts and flips are the same.
                apart = (images.float() - same.float()).abs().mean()
                mirrored = (images.float() - same.float().flip(3)).abs().mean()
                assert apart < 0.25 < mirrored, (apart, mirrored)
            # 45 samples on two ranks: the last of this one is padding.
            assert pairs[-1][0][0][-1] == -1
            assert all(-1 not in found.tolist()[:-1] for (found, _), _ in pairs)

def refused(reader, words):
    # Returns how many batches were read before the error.
    got = []
    try:
        got.extend(reader.batches(range(45)))
    except BetonError as error:
        assert words in str(error), error
        return len(got)
    raise AssertionError("nothing was raised")

def a_damaged_image_is_named():
    transform = ImageTransformConfig(side=32)
    reader = FfcvReader(
        damaged, image_pipelines(damaged, device=CPU, dtype=torch.float32, transform=transform),
        batch_size=4, device=CPU,
    )
    assert refused(reader, "sample 23: the image in 'image' is damaged") == 5

class Unchanged(Operation):
    # Returns what it gets.
    def declare_state_and_memory(self, previous_state):
        return previous_state, None

    def generate_code(self):
        return lambda values, _: values

def any_error_is_told():
    class Fussy(Unchanged):
        def generate_code(self):
            def refuse(values, _):
                if (values == 2).any():
                    raise RuntimeError("a two")
                return values
            return refuse

    reader = FfcvReader(
        good, {"label": [IntDecoder(), ToTensor(), Fussy()]}, batch_size=8, device=CPU
    )
    assert len(list(reader.batches(range(24)))) == 3
    refused(reader, "sample 30: RuntimeError: a two")
    assert not threads()

def what_threads_draw_is_said_on_resume():
    from ltui.training.rank.resume.loader_positions import LoaderPositions
    from ltui.training.rank.resume.loader_positions import describe_inexact_operations

    RandomNothing = type("RandomNothing", (Unchanged,), {})

    def notes(*added):
        operations = {"label": [IntDecoder(), ToTensor(), *added, Squeeze(1)]}
        reader = FfcvReader(good, operations, batch_size=5, device=CPU)
        order = EpochOrder(45, batch_size=5)
        before, now = (BetonLoader(order, ffcv_batches(reader, order)) for _ in range(2))
        next(iter(before))
        saved, going_on = LoaderPositions(), LoaderPositions()
        saved.track([before])
        states = saved.states(None)
        before.close()
        going_on.track([now])
        going_on.resume(states, 1, same_ranks=True, over=False)
        assert sum(len(batch) for batch, in now) == 40
        return going_on.inexact

    assert notes() == []
    (note,) = notes(RandomNothing())
    assert note.startswith("FFCV's RandomNothing draws at random in threads of its own"), note
    wrapped = type("RandomErasing", (torch.nn.Module,), {})()
    found = describe_inexact_operations([RandomHorizontalFlip(), Cutout(4), ModuleWrapper(wrapped)])
    names = "RandomHorizontalFlip and Cutout and ModuleWrapper"
    assert found.startswith(f"FFCV's {names} draw at random in")

def a_file_that_shrinks():
    cut = Path(sys.argv[3])
    file = BetonFile(cut)
    reader = FfcvReader(
        file, {"image": raw_pixels()["image"]}, batch_size=8, device=CPU, os_cache=False
    )
    os.truncate(cut, file.page_size + 1000)
    refused(reader, "became shorter")

def ends_in_the_middle():
    # A thread that still reads must not abort the end of Python.
    global left
    left = FfcvReader(good, raw_pixels(), batch_size=2, device=CPU).batches([*range(45)] * 40)
    next(left)

for name in sys.argv[4:]:
    globals()[name]()
print("ok")
"""


USUAL = (
    "batches_are_kept",
    "any_error_is_told",
    "what_threads_draw_is_said_on_resume",
    "on_a_gpu_all_epochs_use_one_stream",
)
MORE = ("both_loaders_agree", "a_damaged_image_is_named", "a_file_that_shrinks")
LAST = ("ends_in_the_middle",)


@pytest.mark.slow
@needs_ffcv
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "checks", [USUAL, pytest.param(MORE, marks=everything), pytest.param(LAST, marks=everything)]
)
def test_reading(beton: Path, tmp_path: Path, checks: tuple[str, ...]) -> None:
    damaged = Path(shutil.copy(beton, tmp_path / "damaged.beton"))
    damage(damaged, 23)
    cut = shutil.copy(beton, tmp_path / "cut.beton")
    files = [str(path) for path in (beton, damaged, cut)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PROGRAM, *files, *checks],
        env={**os.environ, "LOCAL_WORLD_SIZE": "64"},  # one thread compiles sooner than several
        capture_output=True,
        text=True,
        timeout=390,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "ok"
