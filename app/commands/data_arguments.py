"""The grammar of ``ltui data`` and ``ltui bench``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def positive(text: str) -> int:
    """A number that counts from 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number from 1 up.")
    return int(text)


def worker_counts(text: str) -> list[int]:
    """``1,2,4``."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"`{text}` is not a list of whole numbers, such as 1,2,4.")
    return [int(part) for part in text.split(",")]


def add_data(commands: Any) -> None:
    """``ltui data build|info|verify``."""
    about = "build .beton files, which FFCV reads, look into them, verify them"
    add = _group(commands, "data", about, _DATA)
    build = add("build", "data:build", "write a dataset as a .beton file", _BUILD)
    build.add_argument(
        "source", metavar="SOURCE", help="an image folder, torchvision:NAME, or a class path"
    )
    build.add_argument("-o", dest="output", metavar="FILE.beton", required=True, help="the file")
    build.add_argument("--force", action="store_true", help="write it anew where it exists")
    build.add_argument(
        "--images",
        choices=("jpeg", "raw", "mixed"),
        default="jpeg",
        help="how images are stored; mixed: every other one raw (default: jpeg)",
    )
    build.add_argument(
        "--max-side", type=positive, metavar="N", help="make larger images smaller: N pixels"
    )
    build.add_argument(
        "--quality", type=positive, metavar="N", default=90, help="of JPEGs made here (default: 90)"
    )
    build.add_argument(
        "--page-size", type=positive, metavar="MIB", default=8, help="a sample fits into one page"
    )
    build.add_argument(
        "--skip-bad", action="store_true", help="leave out samples that can't be read"
    )
    _add_common(build)
    info = add("info", "data:info", "say what a .beton file holds")
    info.add_argument("file", metavar="FILE")
    info.add_argument("--json", action="store_true", help="print one JSON document, nothing else")
    verify = add("verify", "data:verify", "decode every sample, name those that can't be")
    verify.add_argument("file", metavar="FILE")
    _add_common(verify)


def add_bench(commands: Any) -> Any:
    """``ltui bench data PRESET``; gives the parser, to which the preset's arguments are added."""
    add = _group(commands, "bench", "measure a preset's data loader alone", "")
    bench = add("data", "bench:data", "measure a preset's loader, and torch's DataLoader", _BENCH)
    bench.add_argument(
        "--workers", type=worker_counts, metavar="N,N,...", help="worker counts to try"
    )
    bench.add_argument(
        "--seconds",
        type=positive,
        metavar="S",
        default=4,
        help="how long each is read in each round (default: 4)",
    )
    bench.add_argument(
        "--rounds", type=positive, metavar="N", default=3, help="how often in turn (default: 3)"
    )
    bench.add_argument("--json", action="store_true", help="print one JSON document, nothing else")
    bench.add_argument("--python", metavar="PATH", help="the interpreter that trains")
    return bench


def _add_common(parser: Any) -> None:
    parser.add_argument(
        "--workers", type=positive, metavar="N", help="by default as many as there are cores"
    )
    parser.add_argument("--python", metavar="PATH", help="the interpreter that trains")
    parser.add_argument("--json", action="store_true", help="print one JSON document, nothing else")


def _group(commands: Any, name: str, about: str, epilog: str) -> Callable[..., Any]:
    description = about[0].upper() + about[1:] + "."
    group = commands.add_parser(name, help=about, description=description, epilog=epilog)
    inner = group.add_subparsers(metavar="COMMAND", title="commands", required=True)

    def add(word: str, do: str, what: str, examples: str = "") -> Any:
        said = what[0].upper() + what[1:] + "."
        command = inner.add_parser(word, help=what, description=said, epilog=examples)
        command.set_defaults(do=do)
        return command

    return add


_DATA = """\
examples:
  ltui data build photos/ -o photos.beton --max-side 512
  ltui data info photos.beton
  ltui data verify photos.beton
"""

_BUILD = """\
SOURCE is one of
  photos/                           folder/class/image, classes in alphabetical order
  torchvision:CIFAR10?train=true    downloaded where it has to be
  my_data.Scans?split=train         a class (or function) that gives an indexed dataset

A JPEG that need not be made smaller is kept byte for byte. The file appears once
it is whole. A sample that can't be read is named and nothing is written, unless
--skip-bad leaves it out. Exit code 2 then, and for every other bad input.
"""

_BENCH = """\
The loader is read alone, and the same work through torch's DataLoader, in turn,
so that all meet the same load of the machine.

examples:
  ltui bench data cifar10-ffcv-resnet18
  ltui bench data my.yaml --set data.init_args.batch_size=256 --workers 1,4,8
"""
