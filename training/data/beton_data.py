"""A LightningDataModule for images in ``.beton`` files, read by FFCV or by torch's DataLoader.

The pipelines are built on each rank once its device is known. Every rank gets the same number of
batches. In validation and test every sample occurs once. The last batches are padded with samples
that are labelled ``NO_LABEL``, which a metric must ignore (``ignore_index=NO_LABEL``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from ltui.training.data.data_files import data_folder
from ltui.training.data.ffcv.beton_file import BetonError, BetonFile
from ltui.training.data.ffcv.epoch_order import (
    BetonLoader,
    EpochOrder,
    Order,
    dataloader_batches,
    ffcv_batches,
    side_at_epoch,
    uniform_side,
)
from ltui.training.data.ffcv.ffcv_environment import (
    available_bytes,
    cores_per_rank,
    has_ffcv,
    keep_torch_threads,
    uses_ffcv,
)
from ltui.training.data.ffcv.image_transform import ImageTransformConfig, Triple, precision_dtype
from ltui.training.data.ffcv.torch_dataset import NO_LABEL as NO_LABEL
from ltui.training.data.ffcv.torch_dataset import BetonSamples
from ltui.training.data.rank_data_module import RankData, Variant
from ltui.training.data.sample_order import OpenBatches

Crop = Literal["auto", "resized", "shifted", "none"]
_DEFAULT_SIDE, _DEFAULT_CENTER = 224, 224 / 256


class BetonData(RankData):
    """Batches of (images, labels) on the rank's device.

    Images are normalised floats (n, 3, height, width) in the dtype of the trainer's precision,
    channels last in memory. Labels are integers (n,). A batch is never overwritten later.
    """

    def __init__(  # noqa: PLR0913  (a configuration file names each parameter)
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
        """``train``, ``val``, ``test``: ``.beton`` files. A relative path is resolved against the
        folder in which the run starts, then against ``folder`` (by default ltui's data folder).
        ``sources``: sources of these files as for ``ltui data build``, such as ``{train:
        "torchvision:CIFAR10?train=true"}``. A missing file is built from its source on first use.
        ``fields``: fields of a batch in this order; by default all fields of the file.
        ``batch_size``: samples per rank. ``val_batch_size``: by default ``batch_size``.
        ``order``: ``quasi_random`` reads only a few pages of a rank at a time, for files larger
        than memory. ``drop_last``: leave out samples that do not fill a batch on every rank.
        Otherwise some samples occur twice in an epoch of training.
        ``resolution``: side of the square images; by default that of the images in the file, or
        224 if their sizes differ. ``resolution_from_epoch``: ``{0: 160, 10: 192}`` for progressive
        resizing. ``val_crop_ratio``: fraction of the shorter side that validation uses.
        ``crop``: ``resized`` crops a random part with a fraction ``crop_scale`` of the area.
        ``shifted`` shifts by up to ``shift`` pixels. ``auto`` selects ``resized`` if sizes differ.
        ``cutout``: side of a blank square. ``mean``, ``std``: of values from 0 to 1.
        ``loader``: ``auto`` selects FFCV if it is installed.
        ``num_workers``: threads of FFCV, or processes of the DataLoader; by default the number of
        cores per rank. ``os_cache``: read through the operating system's cache. This is the default
        unless the order is ``quasi_random`` and the file is larger than half of the free memory.
        """
        super().__init__()
        _check(batch_size=batch_size, val_batch_size=val_batch_size, batches_ahead=batches_ahead)
        self.paths = {"train": train, "val": val, "test": test}
        self.sources = sources or {}
        self.folder, self.fields = folder, fields
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
        self.with_ffcv = uses_ffcv(loader)
        self.num_workers, self.batches_ahead = num_workers, batches_ahead
        self.os_cache = os_cache
        self._readers: dict[object, Any] = {}

    # Files.

    def prepare_data(self) -> None:
        # Lightning calls this on one rank of each machine while the other ranks wait.
        for part, source in self.sources.items():
            if self.paths.get(part) and not self.path_of(part).exists():
                # Local: most runs build no file.
                from ltui.training.data.ffcv.beton_script import build_source

                build_source(source, self.path_of(part))

    def path_of(self, part: str) -> Path:
        """Return the path of ``train``, ``val`` or ``test``. The file may not exist."""
        path = Path(str(self.paths[part])).expanduser()
        if path.is_absolute() or path.exists():
            return path
        return data_folder(self.folder) / path

    # Loaders. Lightning requests them after the process group is initialised and uses them
    # unchanged.

    def train_dataloader(self) -> BetonLoader:
        return self._loader("train", train=True)

    def val_dataloader(self) -> BetonLoader | list[BetonLoader]:
        return self._loader("val") if self.paths["val"] else []

    def test_dataloader(self) -> BetonLoader:
        return self._loader("test" if self.paths["test"] else "val")

    def _loader(self, part: str, train: bool = False) -> BetonLoader:
        if not self.paths[part]:
            raise BetonError(f"no file is configured for {part}: set data.init_args.{part}.")
        file = BetonFile(self.path_of(part))
        order = self.epoch_order(file, train)
        open_batches = (self.through_ffcv if self.with_ffcv else self.through_dataloader)(
            file, order, train, self.num_workers
        )
        loader = BetonLoader(order, open_batches)
        self._loaders.append(loader)
        return loader

    def epoch_order(self, file: BetonFile, train: bool) -> EpochOrder:
        """Return the order of this rank's samples."""
        order: Order = self.order if train else "sequential"
        return EpochOrder(
            file.samples,
            batch_size=self.batch_size if train else self.val_batch_size,
            **self.ranks(),
            order=order,
            drop_last=self.drop_last and train,
            pad=not train,
            page_of=file.page_of_samples() if order == "quasi_random" else None,
            page_bytes=file.page_size,
        )

    def through_ffcv(
        self, file: BetonFile, order: EpochOrder, train: bool, workers: int | None
    ) -> OpenBatches:
        """Return a function that opens batches of FFCV's pipelines.

        The pipelines are compiled here, which takes some seconds.
        """
        with keep_torch_threads():
            # Local: importing FFCV takes seconds.
            from ltui.training.data.ffcv.ffcv_reader import FfcvReader
            from ltui.training.data.ffcv.field_pipelines import image_pipelines

        device, dtype = self.device_and_dtype()
        key = (file.path, train, order.batch_size, workers)
        if key not in self._readers:
            transform = self.transform(file, train)
            self._readers[key] = FfcvReader(
                file,
                image_pipelines(
                    file, device=device, dtype=dtype, transform=transform, names=self.fields
                ),
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
        """Return a function that opens batches of torch's DataLoader."""
        device, dtype = self.device_and_dtype()
        samples = BetonSamples(file, self.fields, self.transform(file, train), dtype)
        count = cores_per_rank() if workers is None else workers
        sides = self.sides if train else None
        return dataloader_batches(samples, order, count, sides, device.type == "cuda")

    def loader_variants(self, counts: Sequence[int]) -> list[Variant]:
        """Return the variants that ``ltui bench data`` compares: FFCV and torch's DataLoader."""
        file = BetonFile(self.path_of("train"))
        loaders = [("ffcv", "FFCV", self.through_ffcv)] if has_ffcv() else []
        loaders.append(("torch", "DataLoader", self.through_dataloader))
        variants = []
        for key, name, open_with in loaders:
            for workers in counts:
                order = self.epoch_order(file, train=True)
                loader = BetonLoader(order, open_with(file, order, True, workers))
                settings = {"data.init_args.loader": key, "data.init_args.num_workers": workers}
                variants.append(Variant(name, workers, partial(_identity, loader), settings))
        return variants

    def device_and_dtype(self) -> tuple[torch.device, torch.dtype]:
        """Return device and dtype of this rank; the CPU and float32 without a Trainer."""
        if self.trainer is None:
            return torch.device("cpu"), torch.float32
        return self.trainer.strategy.root_device, precision_dtype(self.trainer.precision)

    def _through_os_cache(self, file: BetonFile, order: EpochOrder) -> bool:
        if self.os_cache is not None:
            return self.os_cache
        available = available_bytes()
        return order.kind != "quasi_random" or available is None or file.bytes < available / 2

    def transform(self, file: BetonFile, train: bool) -> ImageTransformConfig:
        """Return the transform of images. Raises ``BetonError`` if the file has no images."""
        column = file.image_field()
        if column is None:
            names = ", ".join(file.field_names)
            raise BetonError(f"{file.path}: the file has no image field. Its fields are: {names}.")
        file_side = uniform_side(file, column)
        side = self.resolution or file_side or _DEFAULT_SIDE
        val_side = self.val_resolution or side
        plain = ImageTransformConfig(
            side=val_side,
            center_ratio=self.val_crop_ratio or (1.0 if file_side == val_side else _DEFAULT_CENTER),
            mean=self.mean,
            std=self.std,
            channels_last=self.channels_last,
        )
        if not train:
            return plain
        resized = self.crop == "resized" or (self.crop == "auto" and file_side is None)
        shifted = self.crop == "shifted" or (self.crop == "auto" and not resized)
        return replace(
            plain,
            side=side_at_epoch(self.sides, 0) or side,
            center_ratio=1.0,
            scale=self.crop_scale if resized else None,
            flip=self.flip,
            shift=self.shift if shifted else 0,
            cutout=self.cutout,
        )


def _identity(loader: BetonLoader) -> BetonLoader:
    return loader


def _check(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{name} must be 1 or more, not {number}")
