"""The parser of the command line, and the arguments of the commands that need no run.

Imports nothing heavy.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from ltui.app.commands import launch_arguments, runs_arguments
from ltui.app.commands.arguments import (
    JSON,
    Parser,
    add_arguments,
    add_command,
    command,
    positive_number,
    worker_counts,
)
from ltui.app.commands.launch_arguments import EXIT_CODES, PRESET, READONLY, SET

SHELLS = ("bash", "zsh", "fish", "tcsh")
NAMES = ("metrics", "keys")
"""What the scripts of ``ltui completion`` ask for, in place of a shell."""


def build_parser(only: str | None = None) -> Parser:
    """Return the parser, whose ``parse_args`` gives ``do`` (``module:function``) and the options.

    If ``only`` is a command, the others are left out: to build them all takes 10 ms.
    """
    parser = Parser(prog="ltui", description=_ABOUT, epilog=_EPILOG)
    parser.add_argument("--version", action=_Version)
    add_arguments(parser, READONLY, {})
    parser.set_defaults(do="dashboard:open_dashboard", run=None)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", prog="ltui")
    groups = {"": commands}
    every = (*launch_arguments.COMMANDS, *runs_arguments.COMMANDS, *COMMANDS)
    wanted = [one for one in every if one.name.partition(" ")[0] == only] or every
    for one in wanted:
        added = add_command(groups[one.name.rpartition(" ")[0]], one)
        if not one.do:
            groups[one.name] = added.add_subparsers(
                metavar="COMMAND", title="commands", required=True
            )
    return parser


class _Version(argparse.Action):
    """Prints the version. It reads the package's metadata only when needed."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        # Local: reading the metadata takes longer than the rest of the start.
        from importlib.metadata import version

        print(f"ltui {version('ltui-train')}")
        parser.exit()


_ABOUT = """\
A terminal dashboard for training: launch, watch, stop and resume distributed
PyTorch Lightning runs. Without a command, ltui opens the dashboard.

RUN is the id of a run, a unique prefix of it, its name, or `last`."""

_EPILOG = f"""\
examples:
  ltui run quickstart                         train on handwritten digits with two ranks
  ltui run my.yaml --set trainer.devices=4    your own LightningCLI configuration
  ltui exec -- torchrun --nproc-per-node 2 train.py
  ltui attach last                            open the dashboard at the latest run
  ltui stop last && ltui resume last

{EXIT_CODES}
Runs are stored in $LTUI_HOME (default: the user's data directory).
Shell completion: ltui completion bash|zsh|fish|tcsh (`ltui completion --help`)."""

_PYTHON = "--python PATH  the Python interpreter that trains\n"
_WORKERS = f"--workers N  the number of workers (default: one per core)\n{_PYTHON}{JSON}"
COMMANDS = (
    command(
        "presets_and_check:list_all",
        f"""\
presets  list the presets
{JSON}""",
    ),
    command(
        "presets_and_check:check",
        f"""\
check  check a configuration without starting a run
{PRESET}{SET}\
--python PATH  the Python interpreter that loads the model and data classes
--quick        only the checks that do not import torch

First the structure, keys, types and ranges are checked. Then the model and data
classes are loaded in the interpreter that would train, which takes some seconds.

examples:
  ltui check my.yaml
  ltui check quickstart --set trainer.max_epoch=3
""",
    ),
    command(
        "doctor:examine",
        f"""\
doctor  check this machine and name what is missing
{JSON}
Checks the interpreter that would train (packages, malicious releases), the GPUs,
the terminal and the disk, and prints the command that installs what is missing.
""",
    ),
    command(
        "config:config",
        f"""\
config  print, edit or check the configuration file
one of:
--edit  open the file in $VISUAL or $EDITOR, and check it afterwards
--check FILE
    name every mistake in the file (default: your own) with its line and the remedy
{JSON}
Prints every setting with its value and where it is from: a line of the file, the
choice that the dashboard remembers, or the default. The file wins over what is
remembered. It is config.yaml in $XDG_CONFIG_HOME/ltui (default: ~/.config/ltui).

examples:
  ltui config
  ltui config --edit
  ltui config --check conf/my-config.yaml
""",
        check={"nargs": "?", "const": ""},
    ),
    command(
        "dashboard:show_demo",
        """\
demo  show the dashboard with simulated GPUs or machines
gpus|nodes         the GPU panels, or the screen of a run on several machines
--nodes N          simulated machines of `ltui demo nodes` (default: 4)
--gpus-per-node G  GPUs, and so ranks, on each of them (default: 8)
--recording FILE
    readings that `ltui demo gpus` plays instead of its own; `make gpu` records them

`gpus` shows the GPU panels on a machine without a GPU. Eight simulated GPUs
overheat, wait in a collective, run out of memory and report errors.

`nodes` shows the screen of a run on several machines without any. A rank of one
machine stalls, a GPU of another one overheats, and the link to the last one is
cut. The script takes three minutes and repeats.

examples:
  ltui demo gpus
  ltui demo nodes
  ltui demo nodes --nodes 128
""",
        gpus={"dest": "what", "choices": ("gpus", "nodes")},
        nodes=positive_number,
        gpus_per_node=positive_number,
    ),
    command(  # noqa: S604 - the argument SHELL, no process
        "completion:print_script",
        f"""\
completion  print the completion script for a shell
SHELL  one of {", ".join(SHELLS)}
[WORD ...]

examples:
  ltui completion bash > ~/.local/share/bash-completion/completions/ltui
  ltui completion zsh > ~/.zfunc/_ltui          (with ~/.zfunc in $fpath)
  ltui completion fish > ~/.config/fish/completions/ltui.fish
  ltui completion tcsh > ~/.ltui.complete.tcsh  (sourced in ~/.tcshrc)
""",
        words={"help": argparse.SUPPRESS},
        shell={"dest": "what", "choices": (*SHELLS, *NAMES)},
    ),
    command(
        "",
        """\
data  build, inspect and verify .beton files, which FFCV reads

examples:
  ltui data build photos/ -o photos.beton --max-side 512
  ltui data info photos.beton
  ltui data verify photos.beton
""",
    ),
    command(
        "data:build",
        f"""\
data build  write a dataset as a .beton file
SOURCE  an image folder, torchvision:NAME, or a class path
-o FILE.beton    the file to write
--force          replace the file if it exists
--images {{jpeg,raw,mixed}}
    how images are stored; mixed stores every other image raw (default: jpeg)
--max-side N     shrink larger images to N pixels
--quality N      JPEG quality of images that are encoded again (default: 90)
--page-size MIB  page size in MiB; a sample must fit into one page (default: 8)
--skip-bad       leave out samples that cannot be read
{_WORKERS}
SOURCE is one of
  photos/                           folder/class/image, with classes in alphabetical order
  torchvision:CIFAR10?train=true    a torchvision dataset, downloaded if necessary
  my_data.Scans?split=train         a class or function that returns an indexed dataset

JPEGs that are small enough are copied byte for byte. The file appears when it is
complete. If a sample cannot be read, it is named, nothing is written and the
exit code is 2; --skip-bad leaves such samples out instead.
""",
        o={"dest": "output", "required": True},
        images={"default": "jpeg"},
        quality={"default": 90},
        page_size={"default": 8},
    ),
    command(
        "data:info",
        f"""\
data info  show what a .beton file contains
FILE
{JSON}""",
    ),
    command(
        "data:verify",
        f"""\
data verify  decode every sample and name the damaged ones
FILE
{_WORKERS}""",
    ),
    command("", "bench  measure the data loader of a preset alone\n"),
    command(
        "data:bench",
        f"""\
bench data  measure the loader of a preset and torch's DataLoader
--workers N,N,...  the worker counts to try
--seconds S        seconds to read each loader in each round (default: 4)
--rounds N         the number of rounds (default: 3)
{JSON}{_PYTHON}{PRESET}{SET}
Reads the loader alone, and the same data through torch's DataLoader. They take
turns, so that all are measured under the same load of the machine.

examples:
  ltui bench data cifar10-ffcv-resnet18
  ltui bench data my.yaml --set data.init_args.batch_size=256 --workers 1,4,8
""",
        workers=worker_counts,
        seconds={"default": 4},
        rounds={"default": 3},
    ),
)
