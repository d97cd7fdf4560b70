"""A LightningDataModule for images in ``.beton`` files, read by FFCV or by torch's DataLoader.

The pipelines are built on each rank once its device is known. Every rank gets the same number of
batches; in validation and test every sample comes once, and what fills up the last batches is
labelled ``NO_LABEL``, which a metric has to leave out (``ignore_index=NO_LABEL``).
"""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import LightningDataModule

NO_LABEL = -1
"""Label of a sample that only fills a batch: neither learned nor counted."""

Order = Literal["random", "quasi_random", "sequential"]
Crop = Literal["auto", "resized", "shifted", "none"]


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
        mean: tuple[float, float, float] = (0.485, 0.456, 0.406),
        std: tuple[float, float, float] = (0.229, 0.224, 0.225),
        loader: Literal["ffcv", "torch"] = "ffcv",
        num_workers: int | None = None,
        batches_ahead: int = 3,
        os_cache: bool | None = None,
    ) -> None:
        """``train``, ``val``, ``test``: ``.beton`` files; a relative path is looked for where the
        run starts, then in ``folder`` (by default ltui's data folder).
        ``sources``: what ``ltui data build`` would be given for one of them, such as ``{train:
        "torchvision:CIFAR10?train=true"}``; a missing file is built from it on first use.
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
        ``num_workers``: threads of FFCV, or processes of the DataLoader; by default the cores that
        a rank has. ``os_cache``: read through the operating system's cache; by default unless the
        file is too large for it and the order is ``quasi_random``.
        """
        super().__init__()
        for name in ("train", "val", "test"):
            setattr(self, f"{name}_path", locals()[name])
        raise NotImplementedError("being written")

    def train_dataloader(self) -> Any:
        """A ``RankLoader``."""

    def val_dataloader(self) -> Any:
        """A ``RankLoader``."""

    def test_dataloader(self) -> Any:
        """A ``RankLoader``."""

    def close(self) -> None:
        """Nothing is read any more."""
