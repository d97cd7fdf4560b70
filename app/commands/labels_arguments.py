"""The arguments of ``ltui rename``, ``tag``, ``group``, ``note``, ``star``. Imports little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ltui.app.commands.data_arguments import add_flag

AddCommand = Callable[..., Any]


def add_label_commands(add: AddCommand, run_help: str) -> None:
    """Add ``ltui rename``, ``tag``, ``group``, ``note`` and ``star``."""

    def labels(name: str, about: str) -> Any:
        command = add(name, f"labels:{name}", about, _LABEL_EPILOGS[name])
        command.add_argument("runs", metavar="RUN", nargs="+", help=run_help)
        return command

    tag = labels("tag", "print, add and remove the tags of runs")
    for option in ("--add", "--remove"):
        tag.add_argument(
            option,
            metavar="TAG",
            action="append",
            default=[],
            help=f"{option[2:]} a tag, or several with commas between them; can be repeated",
        )
    group = labels("group", "print or set the group of runs")
    change = group.add_mutually_exclusive_group()
    change.add_argument("--name", metavar="GROUP", help="put the runs into this group")
    add_flag(change, "--remove", "take the runs out of their group")
    rename = add("rename", "labels:rename", "give a run another name", _LABEL_EPILOGS["rename"])
    rename.add_argument("runs", metavar="RUN", nargs=1, help=run_help)
    rename.add_argument("name", metavar="NAME", help="the name; '' restores that of the id")
    note = add("note", "labels:note", "print or set the note of a run", _LABEL_EPILOGS["note"])
    note.add_argument("runs", metavar="RUN", nargs=1, help=run_help)
    note.add_argument("text", metavar="TEXT", nargs="?", help="the note; '' removes it")
    star = labels("star", "mark runs that are kept and easy to find")
    add_flag(star, "--remove", "take the star away")


def add_label_options(parser: Any) -> None:
    """Add ``--tag``, ``--group`` and ``--note`` to a command that launches a run."""
    parser.add_argument(
        "--tag",
        metavar="TAG",
        action="append",
        default=[],
        help="a tag for the run, or several with commas between them; can be repeated",
    )
    parser.add_argument("--group", metavar="GROUP", help="the group of the run")
    parser.add_argument("--note", metavar="TEXT", help="a note about the run, one line")


_LABEL_EPILOGS = {
    "rename": """\
A name may have any characters. The id of the run stays, and both name it in commands.

examples:
  ltui rename brave-owl 'ResNet, rate 0.1 (best)'
  ltui rename brave-owl ''
""",
    "tag": """\
A tag has at most 40 letters, digits and . : / = + @ - _ without blanks. Without an
option, the tags are printed.

examples:
  ltui tag last --add baseline,v2
  ltui tag brave-owl calm-fox --add keep --remove draft
""",
    "group": """\
A run is in one group or in none. Without an option, the group is printed.

examples:
  ltui group brave-owl calm-fox --name lr-sweep
  ltui group brave-owl --remove
""",
    "note": """\
examples:
  ltui note last 'the first one with the cleaned labels'
  ltui note last ''
""",
    "star": """\
`ltui prune` never deletes a run with a star.

examples:
  ltui star brave-owl
  ltui star brave-owl --remove
""",
}
