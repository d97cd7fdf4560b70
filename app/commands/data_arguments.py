"""The arguments of ``ltui data`` and ``ltui bench``. Imports nothing heavy."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def positive_number(text: str) -> int:
    """Return a whole number of 1 or more."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number of 1 or more.")
    return int(text)


def worker_counts(text: str) -> list[int]:
    """Return the numbers of ``1,2,4``."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"`{text}` is not a list of whole numbers, such as 1,2,4.")
    return [int(part) for part in text.split(",")]


def add_data(commands: Any) -> None:
    """Add ``ltui data build|info|verify``."""
    about = "build, inspect and verify .beton files, which FFCV reads"
    add = _group(commands, "data", about, _DATA_EPILOG)
    build = add("build", "data:build", "write a dataset as a .beton file", _BUILD_EPILOG)
    build.add_argument(
        "source", metavar="SOURCE", help="an image folder, torchvision:NAME, or a class path"
    )
    build.add_argument(
        "-o", dest="output", metavar="FILE.beton", required=True, help="the file to write"
    )
    add_flag(build, "--force", "replace the file if it exists")
    build.add_argument(
        "--images",
        choices=("jpeg", "raw", "mixed"),
        default="jpeg",
        help="how images are stored; mixed stores every other image raw (default: jpeg)",
    )
    build.add_argument(
        "--max-side", type=positive_number, metavar="N", help="shrink larger images to N pixels"
    )
    build.add_argument(
        "--quality",
        type=positive_number,
        metavar="N",
        default=90,
        help="JPEG quality of images that are encoded again (default: 90)",
    )
    build.add_argument(
        "--page-size",
        type=positive_number,
        metavar="MIB",
        default=8,
        help="page size in MiB; a sample must fit into one page (default: 8)",
    )
    add_flag(build, "--skip-bad", "leave out samples that cannot be read")
    _add_common(build)
    info = add("info", "data:info", "show what a .beton file contains")
    info.add_argument("file", metavar="FILE")
    add_json_option(info)
    verify = add("verify", "data:verify", "decode every sample and name the damaged ones")
    verify.add_argument("file", metavar="FILE")
    _add_common(verify)


def add_bench(commands: Any) -> Any:
    """Add ``ltui bench data PRESET``, and return its parser, to which the preset's arguments are
    added."""
    add = _group(commands, "bench", "measure the data loader of a preset alone", "")
    bench = add(
        "data", "bench:data", "measure the loader of a preset and torch's DataLoader", _BENCH_EPILOG
    )
    bench.add_argument(
        "--workers", type=worker_counts, metavar="N,N,...", help="the worker counts to try"
    )
    bench.add_argument(
        "--seconds",
        type=positive_number,
        metavar="S",
        default=4,
        help="seconds to read each loader in each round (default: 4)",
    )
    bench.add_argument(
        "--rounds",
        type=positive_number,
        metavar="N",
        default=3,
        help="the number of rounds (default: 3)",
    )
    add_json_option(bench)
    _add_python_option(bench)
    return bench


def _add_common(parser: Any) -> None:
    parser.add_argument(
        "--workers",
        type=positive_number,
        metavar="N",
        help="the number of workers (default: one per core)",
    )
    _add_python_option(parser)
    add_json_option(parser)


def _add_python_option(parser: Any) -> None:
    parser.add_argument("--python", metavar="PATH", help="the Python interpreter that trains")


def add_json_option(parser: Any) -> None:
    """Add ``--json``."""
    add_flag(parser, "--json", "print one JSON document and nothing else")


def add_flag(parser: Any, name: str, about: str) -> None:
    """Add an option that takes no value."""
    parser.add_argument(name, action="store_true", help=about)


def add_command(commands: Any, name: str, about: str, epilog: str, do: str | None = None) -> Any:
    """Add a command, and return its parser. ``do`` is ``module:function``; None for a group."""
    description = f"{about[0].upper()}{about[1:]}."
    command = commands.add_parser(name, help=about, description=description, epilog=epilog)
    if do is not None:
        command.set_defaults(do=do)
    return command


def _group(commands: Any, name: str, group_about: str, epilog: str) -> Callable[..., Any]:
    group = add_command(commands, name, group_about, epilog)
    inner = group.add_subparsers(metavar="COMMAND", title="commands", required=True)

    def add(word: str, do: str, about: str, examples: str = "") -> Any:
        return add_command(inner, word, about, examples, do)

    return add


_DATA_EPILOG = """\
examples:
  ltui data build photos/ -o photos.beton --max-side 512
  ltui data info photos.beton
  ltui data verify photos.beton
"""

_BUILD_EPILOG = """\
SOURCE is one of
  photos/                           folder/class/image, with classes in alphabetical order
  torchvision:CIFAR10?train=true    a torchvision dataset, downloaded if necessary
  my_data.Scans?split=train         a class or function that returns an indexed dataset

JPEGs that are small enough are copied byte for byte. The file appears when it is
complete. If a sample cannot be read, it is named, nothing is written and the
exit code is 2; --skip-bad leaves such samples out instead.
"""

_BENCH_EPILOG = """\
Reads the loader alone, and the same data through torch's DataLoader. They take
turns, so that all are measured under the same load of the machine.

examples:
  ltui bench data cifar10-ffcv-resnet18
  ltui bench data my.yaml --set data.init_args.batch_size=256 --workers 1,4,8
"""


def add_config(add: Callable[..., Any]) -> None:
    """Add ``ltui config``."""
    config = add("config", "config:config", "print, edit or check the configuration file", _EPILOG)
    action = config.add_mutually_exclusive_group()
    add_flag(action, "--edit", "open the file in $VISUAL or $EDITOR, and check it afterwards")
    action.add_argument(
        "--check",
        metavar="FILE",
        nargs="?",
        const="",
        help="name every mistake in the file (default: your own) with its line and the remedy",
    )
    add_json_option(action)


_EPILOG = """\
Prints every setting with its value and where it is from: a line of the file, the
choice that the dashboard remembers, or the default. The file wins over what is
remembered. It is config.yaml in $XDG_CONFIG_HOME/ltui (default: ~/.config/ltui).

examples:
  ltui config
  ltui config --edit
  ltui config --check conf/my-config.yaml
"""
