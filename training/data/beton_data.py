"""A LightningDataModule for images in ``.beton`` files, read by FFCV or by torch's DataLoader.

The pipelines are built on each rank once its device is known. Every rank gets the same number of
batches; in validation and test every sample comes once, and what fills up the last batches is
labelled ``NO_LABEL``, which a metric has to leave out (``ignore_index=NO_LABEL``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule

from ltui.training.data.cache_folder import data_folder
from ltui.training.data.cpu_memory_limits import available_bytes, cores_per_rank
from ltui.training.data.ffcv.array_beton import has_ffcv
from ltui.training.data.ffcv.beton_file import BetonError, BetonFile
from ltui.training.data.ffcv.epoch_order import BetonLoader, EpochOrder, Order
from ltui.training.data.ffcv.image_transform import ImageTransformConfig, Triple, precision_dtype
from ltui.training.data.ffcv.open_epoch import (
    dataloader_batches,
    ffcv_batches,
    side_at_epoch,
    uniform_side,
)
from ltui.training.data.ffcv.torch_dataset import NO_LABEL as NO_LABEL
from ltui.training.data.ffcv.torch_dataset import BetonSamples
from ltui.training.data.loader_variant import Variant
from ltui.training.data.sample_order import OpenBatches

Crop = Literal["auto", "resized", "shifted", "none"]
_USUAL_SIDE, _USUAL_CENTER = 224, 224 / 256


class BetonData(LightningDataModule):
    """Batches of (images, labels): floats (n, 3, height, width) in the dtype of the trainer's
    precision, normalised, channels last in memory; whole numbers (n,). Both on the rank's device
    and never overwritten later."""

    def __init__(
        self,
        train: str | None = None,
        val: str | None = None,
        test: str | None = None,
        sources: dict[str, str] | None = None,
        folder: str | None = None,
        fields: list[str] | None = None,
        batch_size: int = 64,
        val_batch_size: int | None = None,
        order: Order = "random",
        drop_last: bool = False,
        resolution: int | None = None,
        resolution_from_epoch: dict[int, int] | None = None,
        val_resolution: int | None = None,
        val_crop_ratio: float | None = None,
        crop: Crop = "auto",
        crop_scale: tuple[float, float] = (0.25, 1.0),
        shift: int = 4,
        flip: bool = True,
        cutout: int = 0,
        mean: Triple = (0.485, 0.456, 0.406),
        std: Triple = (0.229, 0.224, 0.225),
        channels_last: bool = True,
        loader: Literal["auto", "ffcv", "torch"] = "auto",
        num_workers: int | None = None,
        batches_ahead: int = 3,
        os_cache: bool | None = None,
    ) -> None:
        """``train``, ``val``, ``test``: ``.beton`` files; a relative path is looked for where the
        run starts, then in ``folder`` (by default ltui's data folder).
        ``sources``: what ``ltui data build`` would be given for one of them, such as ``{train:
        "torchvision:CIFAR10?train=true"}``; a missing file is built from it on first use.
        ``fields``: which a batch has, in this order; by default all, as they are in the file.
        ``batch_size``: of a rank; ``val_batch_size``: by default the same.
        ``order``: ``quasi_random`` reads a rank's pages a few at a time, for files larger than
        memory. ``drop_last``: leave out what does not fill a batch on every rank; else some
        samples come twice in an epoch of training.
        ``resolution``: side of the square images; by default that of the file, or 224 where sizes
        differ. ``resolution_from_epoch``: ``{0: 160, 10: 192}`` for progressive resizing.
        ``val_crop_ratio``: the share of the shorter side that validation looks at.
        ``crop``: ``resized`` cuts out a random part of ``crop_scale`` of the area; ``shifted``
        moves by up to ``shift`` pixels; ``auto`` takes ``resized`` where sizes differ.
        ``cutout``: side of a blank square. ``mean``, ``std``: of values from 0 to 1.
        ``loader``: ``auto`` takes FFCV where it is installed.
        ``num_workers``: threads of FFCV, or processes of the DataLoader; by default the cores that
        a rank has. ``os_cache``: read through the operating system's cache; by default unless the
        order is ``quasi_random`` and the file larger than half of what memory is left.
        """
        super().__init__()
        if loader == "ffcv" and not has_ffcv():
            raise ValueError("FFCV is not installed: use loader=torch, or pip install ffcv")
        _check(batch_size=batch_size, val_batch_size=val_batch_size, batches_ahead=batches_ahead)
        self.paths = {"train": train, "val": val, "test": test}
        self.sources = sources or {}
        self.folder = folder
        self.fields = fields
        self.batch_size = batch_size
        self.val_batch_size = val_batch_size or batch_size
        self.order: Order = order
        self.drop_last = drop_last
        self.resolution, self.val_resolution = resolution, val_resolution
        self.sides = resolution_from_epoch
        self.val_crop_ratio = val_crop_ratio
        self.crop: Crop = crop
        self.crop_scale = (crop_scale[0], crop_scale[1])
        self.shift, self.flip, self.cutout = shift, flip, cutout
        self.mean, self.std, self.channels_last = mean, std, channels_last
        self.with_ffcv = loader == "ffcv" or (loader == "auto" and has_ffcv())
        self.workers = num_workers
        self.batches_ahead = batches_ahead
        self.os_cache = os_cache
        self._loaders: list[BetonLoader] = []
        self._readers: dict[object, Any] = {}

    # Files.

    def prepare_data(self) -> None:
        # Lightning calls this on one rank of a machine, and the others wait for it.
        for part, source in self.sources.items():
            if self.paths.get(part) and not self.path_of(part).exists():
                # Local: most runs build nothing.
                from ltui.training.data.ffcv.build_beton import build_source

                build_source(source, self.path_of(part))

    def path_of(self, part: str) -> Path:
        """Of ``train``, ``val`` or ``test``, whether or not it is there."""
        given = Path(str(self.paths[part])).expanduser()
        if given.is_absolute() or given.exists():
            return given
        return data_folder(self.folder) / given

    # Loaders. Lightning asks for them once the process group stands and leaves them as they are.

    def train_dataloader(self) -> BetonLoader:
        return self._loader("train", train=True)

    def val_dataloader(self) -> BetonLoader | list[BetonLoader]:
        return self._loader("val") if self.paths["val"] else []

    def test_dataloader(self) -> BetonLoader:
        return self._loader("test" if self.paths["test"] else "val")

    def _loader(self, part: str, train: bool = False) -> BetonLoader:
        if not self.paths[part]:
            raise BetonError(f"no file is named for it: set data.init_args.{part}.")
        file = BetonFile(self.path_of(part))
        order = self.epoch_order(file, train)
        opened = (self.through_ffcv if self.with_ffcv else self.through_dataloader)(
            file, order, train, self.workers
        )
        loader = BetonLoader(order, opened)
        self._loaders.append(loader)
        return loader

    def epoch_order(self, file: BetonFile, train: bool) -> EpochOrder:
        """Which samples this rank reads."""
        trainer = self.trainer
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        order: Order = self.order if train else "sequential"
        return EpochOrder(
            file.samples,
            batch_size=self.batch_size if train else self.val_batch_size,
            rank=rank,
            world_size=world_size,
            order=order,
            drop_last=self.drop_last and train,
            pad=not train,
            page_of=file.page_of_samples() if order == "quasi_random" else None,
            page_bytes=file.page_size,
        )

    def through_ffcv(
        self, file: BetonFile, order: EpochOrder, train: bool, workers: int | None
    ) -> OpenBatches:
        """Batches through FFCV's pipelines, compiled here (some seconds)."""
        # Local: importing FFCV takes seconds.
        from ltui.training.data.ffcv.ffcv_reader import FfcvReader
        from ltui.training.data.ffcv.field_pipelines import image_pipelines

        device, dtype = self.device_and_dtype()
        key = (file.path, train, order.batch_size, workers)
        if key not in self._readers:
            names, transform = self._names(file), self.transform(file, train)
            self._readers[key] = FfcvReader(
                file,
                image_pipelines(file, device=device, dtype=dtype, transform=transform, names=names),
                batch_size=order.batch_size,
                device=device,
                num_workers=workers,
                batches_ahead=self.batches_ahead,
                os_cache=self._through_os_cache(file, order),
            )
        return ffcv_batches(self._readers[key], order, self.sides if train else None)

    def through_dataloader(
        self, file: BetonFile, order: EpochOrder, train: bool, workers: int | None
    ) -> OpenBatches:
        """The same through torch's DataLoader."""
        device, dtype = self.device_and_dtype()
        samples = BetonSamples(file, self._names(file), self.transform(file, train), dtype)
        count = cores_per_rank() if workers is None else workers
        sides = self.sides if train else None
        return dataloader_batches(samples, order, count, sides, device.type == "cuda")

    def loader_variants(self, counts: Sequence[int]) -> list[Variant]:
        """What ``ltui bench data`` compares: reading ``train`` by FFCV and by the DataLoader."""
        file = BetonFile(self.path_of("train"))
        ways = {
            "ffcv": ("FFCV", self.through_ffcv),
            "torch": ("DataLoader", self.through_dataloader),
        }
        found = []
        for way, (name, through) in ways.items():
            for workers in counts if way == "torch" or has_ffcv() else ():
                order = self.epoch_order(file, train=True)
                loader = BetonLoader(order, through(file, order, True, workers))
                settings = {"data.init_args.loader": way, "data.init_args.num_workers": workers}
                found.append(Variant(name, workers, partial(_same, loader), settings))
        return found

    def device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        """Of this rank; the CPU and float32 where there is no Trainer."""
        if self.trainer is None:
            return torch.device("cpu"), torch.float32
        return self.trainer.strategy.root_device, precision_dtype(self.trainer.precision)

    def _names(self, file: BetonFile) -> list[str]:
        names = [field.name for field in file.fields] if self.fields is None else self.fields
        for name in names:
            file.field_index(name)
        return names

    def _through_os_cache(self, file: BetonFile, order: EpochOrder) -> bool:
        if self.os_cache is not None:
            return self.os_cache
        left = available_bytes()
        return order.kind != "quasi_random" or left is None or file.bytes < left / 2

    def transform(self, file: BetonFile, train: bool) -> ImageTransformConfig:
        """How images are to look; ``BetonError`` where the file has none."""
        column = file.image_field()
        if column is None:
            names = ", ".join(field.name for field in file.fields)
            raise BetonError(f"{file.path}: it has no field of images. Its fields are: {names}.")
        even = uniform_side(file, column)
        side = self.resolution or even or _USUAL_SIDE
        if not train:
            whole = even == (self.val_resolution or side)
            return ImageTransformConfig(
                side=self.val_resolution or side,
                center_ratio=self.val_crop_ratio or (1.0 if whole else _USUAL_CENTER),
                mean=self.mean,
                std=self.std,
                channels_last=self.channels_last,
            )
        resized = self.crop == "resized" or (self.crop == "auto" and even is None)
        shifted = self.crop == "shifted" or (self.crop == "auto" and not resized)
        return ImageTransformConfig(
            side=side_at_epoch(self.sides, 0) or side,
            scale=self.crop_scale if resized else None,
            flip=self.flip,
            shift=self.shift if shifted else 0,
            cutout=self.cutout,
            mean=self.mean,
            std=self.std,
            channels_last=self.channels_last,
        )

    def close(self) -> None:
        """Nothing is read any more."""
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()


def _same(loader: BetonLoader) -> BetonLoader:
    return loader


def _check(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} must be 1 or more, not {number}")
