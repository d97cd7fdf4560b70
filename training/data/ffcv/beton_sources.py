"""Sources of a ``.beton`` file: an image folder, a torchvision dataset, or a dataset by class path.

photos/                              folder/class/image.jpg, with classes in alphabetical order
torchvision:CIFAR10?train=true       downloaded if it is missing
my_project.data.Scans?split=train    a dataset class, or a function that returns a dataset
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import parse_qsl

from ltui.training.data.ffcv.beton_file import BetonError

IMAGE_ENDINGS = frozenset(
    (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
)


class IndexedDataset(Protocol):
    """A dataset with samples that are accessed by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image file that is not decoded yet, so that a JPEG can be stored unchanged."""

    path: Path


class ImageFolder:
    """Dataset of ``root/class/image``. A sample is (image file, class index)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.classes = sorted(p.name for p in root.iterdir() if p.is_dir())
        # torchvision's ImageFolder follows symbolic links, also to a folder that contains them.
        self.samples = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in IMAGE_ENDINGS and not path.is_dir()
        ]
        if not self.samples:
            raise BetonError(
                f"{root}: it contains no folders with images. Put the images of each class into a "
                "separate folder: photos/cat/1.jpg."
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[ImageFile, int]:
        path, number = self.samples[index]
        return ImageFile(path), number

    def name_of(self, index: int) -> str:
        """Return the displayed name of a sample."""
        return str(self.samples[index][0].relative_to(self.root))


def open_source(source: str, downloads: Path) -> IndexedDataset:
    """Return the dataset of ``source``. Raises ``BetonError`` if there is none.

    ``downloads``: folder of torchvision's downloads.
    """
    folder = Path(source).expanduser()
    if folder.is_dir():
        return ImageFolder(folder)
    path, _, query = source.partition("?")
    if "/" in path or (":" not in path and "." not in path):
        raise BetonError(
            f"{source}: there is no such folder. Give a folder of images, torchvision:CIFAR10, or "
            "a class such as my_data.Scans."
        )
    arguments = {name: _value(text) for name, text in parse_qsl(query, keep_blank_values=True)}
    if path.startswith("torchvision:"):
        return _torchvision(source, path.removeprefix("torchvision:"), arguments, downloads)
    return _as_dataset(source, _call(source, _import_class(source, path), arguments))


def _value(text: str) -> Any:
    """Parse ``text`` as JSON; return the text itself if it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _import_class(source: str, path: str) -> Any:
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        target = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise BetonError(
            f"{source}: the module {error.name!r} can't be imported. Correct the path, or start "
            "ltui where that module can be imported from."
        ) from error
    if not callable(target):
        raise BetonError(f"{source}: {module} has no class or function {name!r}.")
    return target


def _call(source: str, factory: Any, arguments: Mapping[str, Any]) -> Any:
    try:
        return factory(**arguments)
    except Exception as error:
        example = f"{source.partition('?')[0]}?split=train&size=32"
        raise BetonError(
            f"{source}: it could not be created ({type(error).__name__}: {error}). Its parameters "
            f"are {_signature(factory)}; give arguments after a question mark: {example}."
        ) from error


def _signature(factory: Any) -> str:
    try:
        return str(inspect.signature(factory))
    except (TypeError, ValueError):
        return "unknown"


def _as_dataset(source: str, dataset: Any) -> IndexedDataset:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise BetonError(
            f"{source}: it is not a dataset: {type(dataset).__name__} has no __len__ and "
            "__getitem__. Give a class with indexed samples, like torch.utils.data.Dataset."
        )
    if len(dataset) == 0:
        raise BetonError(f"{source}: it contains no samples.")
    return dataset  # type: ignore[no-any-return]


def _torchvision(
    source: str, name: str, arguments: Mapping[str, Any], downloads: Path
) -> IndexedDataset:
    # Local: importing it takes seconds.
    from torchvision import datasets

    factory = getattr(datasets, name, None)
    if factory is None:
        names = ", ".join(n for n in datasets.__all__ if not n.startswith("Dataset"))
        raise BetonError(f"{source}: torchvision has no dataset {name!r}. It has: {names}.")
    parameters = inspect.signature(factory).parameters
    defaults: dict[str, Any] = {}
    if "root" in parameters:
        defaults["root"] = str(downloads)
    if "download" in parameters:
        defaults["download"] = True
    return _as_dataset(source, _call(source, factory, {**defaults, **arguments}))
