"""Folders of images, one folder for each class, read by torch's DataLoader.

The random augmentation of an image depends on the seed, the epoch and the number of the image. A
resumed epoch therefore continues with the same images, also in worker processes.
"""

from __future__ import annotations

import warnings
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2

from ltui.training.data.rank_data_module import NO_LABEL, RankData
from ltui.training.data.sample_order import RankLoader, RankOrder

VALIDATION_FRACTION = 0.2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_MARGIN = 256 / 224
"""Factor by which an image is resized beyond the crop size, before validation crops its centre."""


class ImageError(RuntimeError):
    """A folder or an image can't be used. The text names it and says what to do."""


class ImageSamples(Dataset[tuple[torch.Tensor, int]]):
    """Decoded, augmented and normalised images: (3, size, size) floats and the class index.

    Number ``len(images)`` is the padding sample: a black image with the label ``NO_LABEL``.
    """

    def __init__(
        self, files: list[tuple[str, int]], size: int, *, augment: bool, seed: int, epoch: int
    ) -> None:
        self.files = files
        self.size = size
        self.seed, self.epoch = seed, epoch
        self._augment = augment
        self._transform = _transform(size, augment)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        if number == len(self.files):
            return torch.zeros(3, self.size, self.size), NO_LABEL
        path, label = self.files[number]
        image = _open(path)
        if not self._augment:
            return self._transform(image), label
        seed = zlib.crc32(f"{self.seed} {self.epoch} {number}".encode())
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # not the GPU's
            return self._transform(image), label


def _open(path: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return default_loader(path)
    except (OSError, SyntaxError, ValueError) as error:
        raise ImageError(
            f"{path} can't be read as an image ({error}): restore or remove it."
        ) from error


def _transform(size: int, augment: bool) -> Any:
    if augment:
        scale = (0.35, 1.0)
        crop = [v2.RandomResizedCrop(size, scale, antialias=True), v2.RandomHorizontalFlip()]
    else:
        crop = [v2.Resize(round(size * _MARGIN), antialias=True), v2.CenterCrop(size)]
    to_floats = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return v2.Compose([*crop, *to_floats])


class ImageFolders(RankData):
    """Images in ``folder/train/CLASS/...``, ``folder/val/...`` and ``folder/test/...``.

    Alternatively ``folder/CLASS/...``, of which a fifth is used for validation. Without ``test``,
    the validation images are used for the test.
    """

    def __init__(
        self,
        folder: str | None = None,
        batch_size: int = 32,
        size: int = 224,
        workers: int = 0,
    ) -> None:
        """``size``: side of the network's square input in pixels. ``batch_size``: images per rank.
        ``workers``: processes of a rank's DataLoader."""
        super().__init__()
        self.folder = folder
        self.batch_size = batch_size
        self.size = size
        self.workers = workers
        self.classes: list[str] = []
        self._splits: dict[str, list[tuple[str, int]]] = {}

    def setup(self, stage: str) -> None:  # noqa: ARG002
        if self._splits:
            return
        if self.folder is None:
            raise ImageError(
                "No image folder is configured: set data.init_args.folder to a folder with one "
                "subfolder for each class."
            )
        base = Path(self.folder).expanduser()
        if (base / "train").is_dir():
            self._read_splits(base)
        else:
            images = _list_images(base)
            self.classes = images.classes
            self._splits["train"], self._splits["val"] = _split_samples(images.samples)
        self._splits.setdefault("val", [])
        self._splits.setdefault("test", self._splits["val"])

    def _read_splits(self, base: Path) -> None:
        for split in ("train", "val", "test"):
            if not (base / split).is_dir():
                continue
            images = _list_images(base / split)
            self.classes = self.classes or images.classes
            if images.classes != self.classes:
                differing = sorted(set(images.classes) ^ set(self.classes))
                raise ImageError(
                    f"{base / split} has other classes than {base / 'train'} "
                    f"({', '.join(differing[:5])})."
                )
            self._splits[split] = images.samples

    def train_dataloader(self) -> RankLoader:
        return self._loader("train", augment=True)

    def val_dataloader(self) -> Any:
        return self._loader("val") if self._splits["val"] else []

    def test_dataloader(self) -> Any:
        return self._loader("test") if self._splits["test"] else []

    def _loader(self, split: str, augment: bool = False) -> RankLoader:
        files = self._splits[split]
        filler = None if augment else len(files)
        order = RankOrder(len(files), **self.ranks(), shuffle=augment, filler=filler)

        def open_batches(numbers: list[int]) -> Any:
            images = ImageSamples(
                files, self.size, augment=augment, seed=order.seed, epoch=order.epoch
            )
            return self.worker_batches(images)(numbers)

        return self.open_loader(order, open_batches)


def _list_images(folder: Path) -> ImageFolder:
    try:
        return ImageFolder(str(folder))
    except OSError as error:
        raise ImageError(
            f"{folder} does not contain one folder of images for each class ({error})."
        ) from error


def _split_samples(
    samples: list[tuple[str, int]],
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Split samples into training and validation, equally on every rank and in every run."""
    permutation = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    held_out = set(permutation[: int(len(samples) * VALIDATION_FRACTION)])
    return (
        [s for i, s in enumerate(samples) if i not in held_out],
        [s for i, s in enumerate(samples) if i in held_out],
    )
