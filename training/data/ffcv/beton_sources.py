"""What a ``.beton`` can be built from: an image folder, a torchvision dataset, or any indexed
dataset by its class path.

    photos/                              folder/class/image.jpg, classes in alphabetical order
    torchvision:CIFAR10?train=true       downloaded where it has to be
    my_project.data.Scans?split=train    a class, or a function, that gives a dataset
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

IMAGE_ENDINGS = frozenset(
    (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
)


class SourceError(ValueError):
    """``where``: what the person named; ``what`` is wrong with it; ``remedy``."""

    def __init__(self, where: str, what: str, remedy: str | None = None) -> None:
        self.where, self.what, self.remedy = where, what, remedy
        super().__init__(f"{where}: {what}" + (f" {remedy}" if remedy else ""))


class Indexed(Protocol):
    """A dataset whose samples have numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image that is still to be read, so that a JPEG can be kept as it is."""

    path: Path


class ImageFolder:
    """``root/class/image``; a sample is (image file, number of its class)."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.classes = sorted(p.name for p in root.iterdir() if p.is_dir())
        self.samples = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in IMAGE_ENDINGS and not path.is_dir()
        ]
        if not self.samples:
            raise SourceError(
                str(root),
                "it holds no folders with images.",
                "Put the images of each class into a folder of its own: photos/cat/1.jpg.",
            )

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[ImageFile, int]:
        path, number = self.samples[index]
        return ImageFile(path), number

    def name_of(self, index: int) -> str:
        """As a person knows the sample."""
        return str(self.samples[index][0].relative_to(self.root))


def open_source(source: str, downloads: Path) -> Indexed:
    """``SourceError`` where it names nothing, or no dataset. ``downloads``: where torchvision keeps
    what it fetches."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return ImageFolder(folder)
    path, _, query = source.partition("?")
    if "/" in path or (":" not in path and "." not in path):
        raise SourceError(
            source,
            "there is no such folder.",
            "Name a folder of images, torchvision:CIFAR10, or a class such as my_data.Scans.",
        )
    arguments = {name: _value(text) for name, text in parse_qsl(query, keep_blank_values=True)}
    if path.startswith("torchvision:"):
        return _torchvision(source, path.removeprefix("torchvision:"), arguments, downloads)
    return _as_dataset(source, _call(source, _find(source, path), arguments))


def _value(text: str) -> Any:
    """As JSON where it is that, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _find(source: str, path: str) -> Any:
    module, _, name = path.replace(":", ".").rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        raise SourceError(
            source,
            f"the module {error.name!r} can't be imported.",
            "Correct the path, or start ltui where that module can be imported from.",
        ) from error
    if not callable(found):
        raise SourceError(source, f"{module} has no class or function {name!r}.")
    return found


def _call(source: str, make: Any, arguments: Mapping[str, Any]) -> Any:
    try:
        return make(**arguments)
    except Exception as error:
        raise SourceError(
            source,
            f"it could not be made ({type(error).__name__}: {error}).",
            f"It takes {_takes(make)}; arguments follow a question mark: {_example(source)}.",
        ) from error


def _takes(make: Any) -> str:
    try:
        return str(inspect.signature(make))
    except (TypeError, ValueError):
        return "arguments of its own"


def _example(source: str) -> str:
    return f"{source.partition('?')[0]}?split=train&size=32"


def _as_dataset(source: str, made: Any) -> Indexed:
    if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
        raise SourceError(
            source,
            f"it is no dataset: a {type(made).__name__} has no __len__ and __getitem__.",
            "Name a class whose samples have numbers, like torch.utils.data.Dataset.",
        )
    if len(made) == 0:
        raise SourceError(source, "it holds no samples.")
    return made  # type: ignore[no-any-return]


def _torchvision(source: str, name: str, arguments: Mapping[str, Any], downloads: Path) -> Indexed:
    # Local: importing it takes seconds.
    from torchvision import datasets

    make = getattr(datasets, name, None)
    if make is None:
        known = ", ".join(n for n in datasets.__all__ if not n.startswith("Dataset"))
        raise SourceError(source, f"torchvision has no dataset {name!r}. It has: {known}.")
    parameters = inspect.signature(make).parameters
    usual: dict[str, Any] = {}
    if "root" in parameters:
        usual["root"] = str(downloads)
    if "download" in parameters:
        usual["download"] = True
    return _as_dataset(source, _call(source, make, {**usual, **arguments}))
