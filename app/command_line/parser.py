"""The parser of the command line, and the types of the values. Imports nothing heavy.

Arguments are declared as a help text shows them, each with its help two or more blanks behind it:

    RUN ...                a positional argument that can be repeated; [RUN] can be left out
    --kill                 an option without a value
    --by {step,epoch}      an option with one of these values
    --when METRIC<VALUE ...
                           an option that can be repeated
    --port N = 8765        an option with a default
    several machines:      the title of a group for the arguments below it
    one of:                the arguments below it exclude each other
    any of:                those below it do not
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

from ltui.app.command_line import launch_arguments, queue_arguments, runs_arguments
from ltui.app.command_line.launch_arguments import (
    COMPLETED_NAMES,
    EXIT_CODES,
    READONLY,
    SHELLS,
    STOP_SIGNALS,
)
from ltui.training.problem import ProblemError
from ltui.training.shared.defaults import MIRROR_PATTERN


class Command(NamedTuple):
    """One command of ltui."""

    name: str
    """Its name; ``data build`` is the command ``build`` of the group ``data``."""
    do: str
    """Its function as ``module:function``; ``-`` for a group, ``-module:function`` for a group that
    is a command itself. Only ``ltui.app.cli`` imports the
    module, when the command is known, so that ``ltui --version`` and the help load nothing else."""
    about: str
    arguments: str
    epilog: str


def read_commands(text: str) -> Iterator[Command]:
    """Yield the commands of a text. Each begins with a line ``=== NAME  MODULE:FUNCTION  ABOUT``,
    followed by its arguments, and after a blank line by the epilog of its help."""
    for section in text.split("=== ")[1:]:
        head, _, epilog = section.partition("\n\n")
        first, _, arguments = head.partition("\n")
        name, do, about = first.split("  ")
        yield Command(name, do, about, arguments, epilog)


class Parser(argparse.ArgumentParser):
    """A parser that raises ``ProblemError`` with the nearest correct word."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse a command line, in which ``start`` may be left out after ``sweep``."""
        words = None if args is None else with_time(with_verb(list(args)))
        return super().parse_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        raise ProblemError.of(
            where=self.prog, what=_explain(message), remedy=f"See `{self.prog} --help`."
        )


_MEANT = {"kill": "stop --kill", "ls": "runs", "list": "runs", "rm": "delete", "start": "run"}
"""Commands of other tools, and those of ltui that do the same."""


def _explain(message: str) -> str:
    choice = re.match(r"argument [^:]*: invalid choice: '?(.*?)'? \(choose from (.*)\)$", message)
    if choice is None:
        return message if message.endswith("?") else message.rstrip(".") + "."
    choices = re.findall(r"[\w-]+", choice[2])
    hint = _choice_hint(choice[1], choices, ", ".join(choices))
    return f"`{choice[1]}` is not a valid choice. {hint}"


def _choice_hint(word: str, choices: Sequence[str], listed: str) -> str:
    """Return a sentence with the choice that is nearest to ``word``, or with all ``listed``."""
    close_matches = difflib.get_close_matches(word, choices, n=1)
    if "runs" in choices and word in _MEANT:
        close_matches = [_MEANT[word]]
    return f"Did you mean `{close_matches[0]}`?" if close_matches else f"Choose from: {listed}."


def all_commands() -> list[Command]:
    """Return every command of ltui."""
    texts = (
        launch_arguments.COMMANDS,
        runs_arguments.COMMANDS,
        queue_arguments.COMMANDS,
        launch_arguments.SETUP_COMMANDS,
    )
    return [command for text in texts for command in read_commands(text)]


def add_arguments(parser: Any, text: str, command: str = "") -> None:
    """Add the arguments that ``text`` declares, as described above, to the parser of a command."""
    target = parser
    for line in re.split(r"\n(?=\S)", text):
        declared, _, about = line.partition("  ")
        if declared == "one of:":
            target = parser.add_mutually_exclusive_group()
        elif declared == "any of:":
            target = parser
        elif declared.endswith(":"):
            target = parser.add_argument_group(declared[:-1])
        elif declared:
            _add_argument(target, command, declared.strip(), " ".join(about.split()))


def _add_argument(parser: Any, command: str, declared: str, about: str) -> None:
    declared, _, default = declared.partition(" = ")
    is_optional = declared.startswith("[")
    words = (declared[1:-1] if is_optional else declared).split()
    is_many = words[-1] == "..."
    flags = [word.rstrip(",") for word in words if word.startswith("-")]
    metavar = next((word for word in words if not word.startswith("-")), "")
    options: dict[str, Any] = {"help": about or None}
    options |= {"default": default} if default else {}
    if flags:
        name = flags[0].strip("-").replace("-", "_")
        if not metavar:
            options["action"] = "store_true"
        elif metavar.startswith("{"):
            options["choices"] = tuple(metavar[1:-1].split(","))
        else:
            options["metavar"] = metavar
            options |= {"action": "append", "default": []} if is_many else {}
    else:
        name = re.split(r"\W", metavar.lower())[0] + "s" * is_many
        nargs = {(False, True): "+", (True, False): "?", (True, True): "*"}
        options |= {"metavar": metavar, "nargs": nargs.get((is_optional, is_many))}
    for key in (name, f"{name} {metavar}", f"{command} {name}"):
        own = SETTINGS.get(key, {})
        options |= {"type": own} if callable(own) else own
    dest = options.pop("dest", name)
    if flags:
        parser.add_argument(*flags, dest=dest, **options)
    else:
        parser.add_argument(dest, **options)


def add_command(commands: Any, command: Command) -> Any:
    """Add a command to what ``add_subparsers`` returned, and return its parser.

    Of a group, return what commands are added to.
    """
    about = command.about
    parser = commands.add_parser(
        command.name.rpartition(" ")[2],
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog=command.epilog,
    )
    do = command.do.lstrip("-")
    if do:
        parser.set_defaults(do=do, **DEFAULTS.get(command.name, {}))
    add_arguments(parser, command.arguments, command.name)
    if command.do.startswith("-"):
        return parser.add_subparsers(metavar="COMMAND", title="commands", required=not do)
    return parser


# Types of values ----------------------------------------------------------------------------------


def seconds(text: str) -> float:
    """Return a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"`{text}` is not a positive number of seconds.")
    return value


def time_span(text: str) -> float:
    """Return the seconds of ``90``, ``9m`` or ``1.5h``."""
    # Imported here: few options need it, and it loads msgspec.
    from ltui.training.state.stop_conditions import parse_time_condition

    try:
        after = parse_time_condition(f"+{text}s" if text[-1:].isdecimal() else f"+{text}", 0.0)
    except ProblemError:
        after = None
    if after is None or not after.wait_s:
        raise argparse.ArgumentTypeError(f"`{text}` is not a time such as 90, 9m or 2h.")
    return after.wait_s


def port_number(text: str) -> int:
    """Return a number of a port that leaves one above it."""
    if not text.isdecimal() or not 0 < int(text) < 65535:
        raise argparse.ArgumentTypeError(f"`{text}` is not a port from 1 to 65534.")
    return int(text)


def tcp_port(text: str) -> int:
    """Return the number of a port; 0 stands for any free one."""
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"`{text}` is not a port from 0 to 65535.")
    return int(text)


def any_number(text: str) -> int:
    """Return a whole number, perhaps with a minus sign."""
    if re.fullmatch(r"-?\d{1,9}", text) is None:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number.")
    return int(text)


def positive_number(text: str) -> int:
    """Return a whole number of 1 or more."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number of 1 or more.")
    return int(text)


def whole_number(text: str) -> int:
    """Return a whole number of 0 or more. Digit groups as printed by the dashboard are accepted:
    ``3 157``."""
    plain = _without_grouping(text)
    if not plain.isdecimal():
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number of 0 or more.")
    return int(plain)


def _without_grouping(text: str) -> str:
    # Imported here: few options need it, and it loads msgspec.
    from ltui.training.state.stop_conditions import strip_digit_grouping

    return strip_digit_grouping(text)


def worker_counts(text: str) -> list[int]:
    """Return the numbers of ``1,2,4``."""
    if not all(part.isdecimal() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"`{text}` is not a list of whole numbers, such as 1,2,4.")
    return [int(part) for part in text.split(",")]


def rank_name(text: str) -> str:
    """Return the name of a rank, ``12`` or ``gpu-b:12``."""
    machine, colon, number = text.rpartition(":")
    plain = _without_grouping(number)
    if not plain.isdecimal() or (colon and not machine):
        raise argparse.ArgumentTypeError(
            f"`{text}` is not a whole number of 0 or more, with or without a machine: gpu-b:12."
        )
    return f"{machine}{colon}{plain}"


def stall_action(text: str) -> tuple[str, int | None]:
    """Return the action and the count of ``nothing``, ``stop``, ``restart`` or ``restart:N``."""
    word, colon, count = text.partition(":")
    counted = word == "restart" and bool(colon) and count.isdecimal()
    if word in ("nothing", "stop", "restart") and (not colon or counted):
        return word, int(count) if counted else None
    listed = "nothing, stop, restart, restart:N"
    hint = _choice_hint(word, ("nothing", "stop", "restart"), listed)
    raise argparse.ArgumentTypeError(f"`{text}` is not a valid choice. {hint}")


def mirror(text: str) -> str:
    """Return ``tensorboard`` or ``tensorboard:FOLDER``."""
    if re.fullmatch(MIRROR_PATTERN, text) is None:
        raise argparse.ArgumentTypeError(f"`{text}` is not tensorboard or tensorboard:FOLDER.")
    return text


class _AllOf(argparse.Action):
    """Makes one filter of several: the runs that match all of them."""

    def __call__(self, _: object, namespace: argparse.Namespace, text: Any, *__: object) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, text if before is None else f"({before}) ({text})")


SETTINGS: dict[str, Any] = {
    "at_once": positive_number,
    "at_step": whole_number,
    "attempt": whole_number,
    "check FILE": {"nargs": "?", "const": ""},
    "checkpoint_time": seconds,
    "completion shell": {"dest": "what", "choices": (*SHELLS, *COMPLETED_NAMES)},
    "completion words": {"help": argparse.SUPPRESS},
    "cpus_per_node": positive_number,
    "demo gpus": {"dest": "what", "choices": ("gpus", "nodes")},
    "demo gpus_per_node": positive_number,
    "exec command": {"nargs": argparse.REMAINDER},
    "filter": {"action": _AllOf},
    "from RUN[:STEP]": {"dest": "start_from"},
    "from STEP": {"dest": "from_step", "type": positive_number},
    "for_at_most": time_span,
    "freeze": {"default": None},
    "gpus_per_node": whole_number,
    "host HOST:PORT": {"dest": "place"},
    "join_timeout": seconds,
    "max_side": positive_number,
    "mirror": mirror,
    "node N": positive_number,
    "no_freeze": {"dest": "freeze", "action": "store_false", "default": None},
    "nodes N": positive_number,
    "num_nodes": positive_number,
    "o": {"dest": "output"},
    "o FILE.beton": {"required": True},
    "on_stall": stall_action,
    "page_size": positive_number,
    "port": port_number,
    "priority": any_number,
    "quality": positive_number,
    "profile ranks": str,
    "profile steps": positive_number,
    "queue move to": positive_number,
    "rank": rank_name,
    "reduction": positive_number,
    "rerun from": {"dest": "from_step", "type": positive_number, "required": True},
    "rerun rank": whole_number,
    "rerun to": {"type": positive_number, "required": True},
    "rerun with": {"dest": "instrument"},
    "restarts": whole_number,
    "rounds": positive_number,
    "rung": positive_number,
    "seconds": positive_number,
    "seed": whole_number,
    "seeds": positive_number,
    "serve port": tcp_port,
    "set": {"dest": "overrides"},
    "since": whole_number,
    "slots": positive_number,
    "sweep append set": {"dest": "set"},
    "sweep narrow set": {"dest": "set", "required": True},
    "sweep start set": {"dest": "set"},
    "trials": positive_number,
    "stop_signal": {"choices": STOP_SIGNALS},
    "tag TAG": {"dest": "tags"},
    "timeout": seconds,
    "workers": positive_number,
    "workers N,N,...": worker_counts,
    # So that the option before the verb counts, too: `ltui queue --json hold RUN`.
    **{
        f"queue {verb} json": {"default": argparse.SUPPRESS}
        for verb in ("move", "hold", "release", "edit", "retry", "remove")
    },
}
"""Type, or arguments of ``add_argument``, by the name of an argument, its name and metavar, or its
command and name; those of a command override the others."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "queue hold": {"held": True},
    "queue release": {"held": False},
    "resume": {"python": None},
    "submit": {"command": []},
    "sweep start": {"command": []},
}
"""Values of arguments that a command lacks, but another command of the same function has."""


# The whole command line ---------------------------------------------------------------------------


def with_verb(argv: list[str]) -> list[str]:
    """Return a command line in which ``start`` follows ``sweep`` if no other verb does."""
    names = [one.name.split() for one in read_commands(queue_arguments.COMMANDS)]
    verbs = {name[1] for name in names if name[0] == "sweep" and name[1:]} | {"-h", "--help"}
    if argv[:1] != ["sweep"] or argv[1:2] == [] or argv[1] in verbs:
        return argv
    return ["sweep", "start", *argv[1:]]


def with_time(argv: list[str]) -> list[str]:
    """Return a command line in which a time behind ``--at`` may begin with a minus sign."""
    for place in range(len(argv) - 1):
        if argv[:1] == ["attach"] and argv[place] == "--at":
            return [*argv[:place], f"--at={argv[place + 1]}", *argv[place + 2 :]]
    return argv


def build_parser(only: str | None = None) -> Parser:
    """Return the parser, whose ``parse_args`` gives ``do`` (``module:function``) and the options.

    If ``only`` is a command, the others are left out: to build them all takes 10 ms.
    """
    parser = Parser(prog="ltui", description=_ABOUT, epilog=_EPILOG)
    parser.add_argument("--version", action=_Version)
    add_arguments(parser, READONLY)
    parser.set_defaults(do="dashboard:open_dashboard", run=None)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", prog="ltui")
    groups = {"": commands}
    every = all_commands()
    wanted = [one for one in every if one.name.partition(" ")[0] == only] or every
    for one in wanted:
        added = add_command(groups[one.name.rpartition(" ")[0]], one)
        if one.do.startswith("-"):
            groups[one.name] = added
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
