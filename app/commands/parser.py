"""The arguments of every command, with their help texts. Imports nothing heavy.

A command names its function as ``module:function``. ``ltui.app.cli`` imports that module only when
the command is known, so that ``ltui --version`` and the help load nothing else.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ltui.app.commands.data_arguments import (
    add_bench,
    add_command,
    add_config,
    add_data,
    add_flag,
    add_json_option,
    positive_number,
)
from ltui.app.commands.runs_arguments import (
    add_compare,
    add_export,
    add_import,
    add_label_commands,
    add_label_options,
    add_prune_command,
    add_restore_command,
    add_runs_command,
)
from ltui.app.exit_codes import EXIT_BAD_INPUT
from ltui.training.shared.defaults import MIRROR_PATTERN, STOP_TIMEOUT_S
from ltui.training.state.stop_conditions import strip_digit_grouping

STOP_SIGNAL_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")
SHELLS = ("bash", "zsh", "fish", "tcsh")
NAMES = ("metrics", "keys")
"""What the scripts of ``ltui completion`` ask for, in place of a shell."""
RUN_HELP = "the id of a run, a unique prefix of it, its name, or `last`"
EXIT_CODES = """\
exit codes:
  0  success: the run finished, or ended by your Ctrl-C without a checkpoint
  1  the run failed, or the request was not carried out
  2  bad input: nothing was started or changed
  3  the run stopped and can be resumed
"""


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, with the nearest correct word."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        options.setdefault("allow_abbrev", False)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        # Imported here: only an error needs it. The message has what was typed, or pasted.
        from ltui.widgets.sanitise import clean_line

        line = clean_line(f"{self.prog}: {_explain(message)} See `{self.prog} --help`.")
        sys.stderr.write(f"{line}\n")
        raise SystemExit(EXIT_BAD_INPUT)


def _explain(message: str) -> str:
    choice = re.match(r"argument [^:]*: invalid choice: '?(.*?)'? \(choose from (.*)\)$", message)
    if choice is None:
        return message.rstrip(".") + "."
    choices = re.findall(r"[\w-]+", choice[2])
    hint = _choice_hint(choice[1], choices, ", ".join(choices))
    return f"`{choice[1]}` is not a valid choice. {hint}"


def _choice_hint(word: str, choices: Sequence[str], listed: str) -> str:
    """Return a sentence with the choice that is nearest to ``word``, or with all ``listed``."""
    close_matches = difflib.get_close_matches(word, choices, n=1)
    return f"Did you mean `{close_matches[0]}`?" if close_matches else f"Choose from: {listed}."


def seconds(text: str) -> float:
    """Return a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"`{text}` is not a positive number of seconds.")
    return value


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


def whole_number(text: str) -> int:
    """Return a whole number of 0 or more. Digit groups as printed by the dashboard are accepted:
    ``3 157``."""
    plain = strip_digit_grouping(text)
    if not plain.isdecimal():
        raise argparse.ArgumentTypeError(f"`{text}` is not a whole number of 0 or more.")
    return int(plain)


def rank_name(text: str) -> str:
    """Return the name of a rank, ``12`` or ``gpu-b:12``."""
    machine, colon, number = text.rpartition(":")
    plain = strip_digit_grouping(number)
    if not plain.isdecimal() or (colon and not machine):
        raise argparse.ArgumentTypeError(
            f"`{text}` is not a whole number of 0 or more, with or without a machine: gpu-b:12."
        )
    return f"{machine}{colon}{plain}"


AddCommand = Callable[..., Any]


class _LeftOut:
    """Takes the arguments of a command that is left out of the parser."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self


def build_parser(only: str | None = None) -> Parser:
    """Return the parser, whose ``parse_args`` gives ``do`` (``module:function``) and the options.

    If ``only`` is a command, the others are left out: to build them all takes 10 ms.
    """
    parser = Parser(prog="ltui", description=_ABOUT, epilog=_EPILOG)
    parser.add_argument("--version", action=_Version)
    _add_readonly_option(parser)
    parser.set_defaults(do="dashboard:open_dashboard", run=None)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", prog="ltui")

    def add(name: str, do: str, about: str, examples: str = "") -> Any:
        left_out = only is not None and name != only
        return _LeftOut() if left_out else add_command(commands, name, about, examples, do)

    _add_launch_commands(add)
    _add_inspection_commands(add)
    _add_control_commands(add)
    add_label_commands(add, RUN_HELP)
    add_prune_command(add)
    add_restore_command(add)
    _add_setup_commands(add)
    if only in commands.choices:
        return parser
    add_data(commands)
    bench = add_bench(commands)
    _add_preset_argument(bench)
    _add_set_option(bench)
    return parser if only is None else build_parser()


class _Version(argparse.Action):
    """Prints the version. It reads the package's metadata only when needed."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        # Local: reading the metadata takes longer than the rest of the start.
        from importlib.metadata import version

        print(f"ltui {version('ltui-train')}")
        parser.exit()


def _add_readonly_option(parser: Parser) -> None:
    add_flag(parser, "--readonly", "open the dashboard without any control over runs")


def _add_run_argument(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)


def _add_launch_options(parser: Parser) -> None:
    parser.add_argument("--name", help="a name for the run (default: two random words)")
    add_label_options(parser)
    _add_detach_options(parser)
    parser.add_argument(
        "--python",
        metavar="PATH",
        help="the Python interpreter that trains (default: that of the active virtual environment)",
    )


def stall_action(text: str) -> tuple[str, int | None]:
    """Return the action and the count of ``nothing``, ``stop``, ``restart`` or ``restart:N``."""
    word, colon, count = text.partition(":")
    counted = word == "restart" and bool(colon) and count.isdecimal()
    if word in ("nothing", "stop", "restart") and (not colon or counted):
        return word, int(count) if counted else None
    listed = "nothing, stop, restart, restart:N"
    hint = _choice_hint(word, ("nothing", "stop", "restart"), listed)
    raise argparse.ArgumentTypeError(f"`{text}` is not a valid choice. {hint}")


def _add_stall_options(parser: Parser) -> None:
    parser.add_argument(
        "--on-stall",
        type=stall_action,
        metavar="WHAT",
        help="what to do when a stall has lasted for 30 s: nothing (default), stop, restart or "
        "restart:N (kill the run and resume from the last good checkpoint, at most N times)",
    )
    parser.add_argument(
        "--on-verdict",
        metavar="COMMAND|URL",
        help="what to call when a rank stalls or dies: a command, which gets the verdict as JSON "
        "on standard input, or a webhook, which gets it by POST",
    )


def _add_detach_options(parser: Parser) -> None:
    add_flag(parser, "--detach", "start the run, print how to watch it, and return at once")
    add_flag(parser, "--plain", "print lines instead of opening the dashboard")


def _add_set_option(parser: Parser) -> None:
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set a key of the configuration, such as trainer.max_epochs=3; can be repeated",
    )


def mirror(text: str) -> str:
    """Return ``tensorboard`` or ``tensorboard:FOLDER``."""
    if re.fullmatch(MIRROR_PATTERN, text) is None:
        raise argparse.ArgumentTypeError(f"`{text}` is not tensorboard or tensorboard:FOLDER.")
    return text


def _add_run_options(parser: Parser, otherwise: str) -> None:
    """Add ``--restarts`` and ``--mirror``. ``otherwise`` describes the default of the first."""
    parser.add_argument(
        "--mirror",
        type=mirror,
        metavar="tensorboard[:FOLDER]",
        help="also write the metrics as TensorBoard event files while the run goes on: into "
        "FOLDER/RUN, or the folder `tensorboard` of the run directory",
    )
    parser.add_argument(
        "--restarts",
        type=whole_number,
        metavar="N",
        help="after a crash, resume from the last good checkpoint, at most N times "
        f"(default: {otherwise})",
    )


def _add_preset_argument(parser: Parser) -> None:
    parser.add_argument(
        "preset",
        metavar="PRESET|FILE",
        help="the name of a preset, or a LightningCLI configuration file",
    )


def _add_launch_commands(add: AddCommand) -> None:
    about = "train a preset or a LightningCLI configuration file"
    run = add("run", "launch:run", about, _RUN_EPILOG)
    _add_preset_argument(run)
    _add_set_option(run)
    _add_launch_options(run)
    _add_run_options(run, "the value in the preset or the configuration file, or 0")
    run.add_argument(
        "--from",
        dest="start_from",
        metavar="RUN[:STEP]",
        help="start from a checkpoint of another run: its last good one, or that of a step",
    )
    _add_stall_options(run)
    _add_node_options(run)
    execute = add("exec", "launch:execute", "run your own command as a run", _EXEC_EPILOG)
    _add_launch_options(execute)
    _add_run_options(execute, "that of the configuration file, or 0")
    execute.add_argument(
        "--keep-best",
        metavar="METRIC[:max][:N]",
        help="keep the N best checkpoints by a metric, such as val/acc:max:3 (default: 1 "
        "checkpoint; lower is better unless `max` is given)",
    )
    execute.add_argument(
        "--stop-signal",
        choices=STOP_SIGNAL_NAMES,
        default="SIGTERM",
        metavar="SIGNAL",
        help="the signal by which `ltui stop` ends a program that has not told ltui how to save: "
        f"{', '.join(STOP_SIGNAL_NAMES)} (default: SIGTERM)",
    )
    execute.add_argument(
        "--metrics-pattern",
        metavar="PATTERN",
        help="read metrics from what a program without Lightning prints: `json` (lines of JSON), "
        "`pairs` (loss 0.5, loss=0.5, loss: 0.5), or a regular expression with named groups",
    )
    _add_stall_options(execute)
    execute.add_argument(
        "--gpus",
        metavar="free:N",
        help="wait until N GPUs are free, and let the command see only these",
    )
    _add_node_options(execute)
    execute.add_argument(
        "--num-nodes",
        type=positive_number,
        metavar="N",
        help="the command runs on N machines (default: the number that torchrun's --nnodes or "
        "the launcher gives, or 1)",
    )
    execute.add_argument(
        "command", metavar="COMMAND", nargs=argparse.REMAINDER, help="the command, after `--`"
    )
    _add_join(add)
    _add_submit(add)
    _add_resume(add)
    about = "open the dashboard at a run"
    attach = add("attach", "dashboard:open_dashboard", about, _ATTACH_EPILOG)
    attach.add_argument(
        "run",
        metavar="RUN",
        nargs="?",
        default="last",
        help=f"{RUN_HELP}; HOST:RUN for a run of another machine, by ssh",
    )
    _add_readonly_option(attach)
    _add_serve(add)


def _add_resume(add: AddCommand) -> None:
    resume = add(
        "resume", "launch:resume", "continue an ended run from its checkpoint", _RESUME_EPILOG
    )
    _add_run_argument(resume)
    resume.add_argument(
        "--from",
        dest="from_step",
        type=positive_number,
        metavar="STEP",
        help="the checkpoint of this step (default: the last good one, which is from before the "
        "first NaN); `ltui show` lists them",
    )
    _add_set_option(resume)
    _add_run_options(resume, "that of the run")
    _add_detach_options(resume)
    _add_node_options(resume)
    resume.set_defaults(python=None)


def _add_serve(add: AddCommand) -> None:
    serve = add("serve", "serve:serve", "show the dashboard in a browser", _SERVE_EPILOG)
    serve.add_argument("run", metavar="RUN", nargs="?", help=f"open this run: {RUN_HELP}")
    add_flag(serve, "--control", "let the browser start, stop and change runs")
    serve.add_argument(
        "--port", type=tcp_port, default=8765, metavar="N", help="the port (default: 8765)"
    )
    serve.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="an address of the loopback interface (default: 127.0.0.1)",
    )


def _add_node_options(parser: Parser) -> None:
    nodes = parser.add_argument_group(
        "several machines (docs/several-machines.md; this one is node 0)"
    )
    nodes.add_argument(
        "--nodes",
        metavar="HOST,HOST,...",
        help="start these machines by ssh; this one may be in the list or not",
    )
    nodes.add_argument(
        "--address",
        metavar="ADDRESS",
        help="the address of this machine at which the others reach it (default: that of the "
        "default route)",
    )
    nodes.add_argument(
        "--port",
        type=port_number,
        metavar="N",
        help="the others connect to port N (torch) and N + 1 (ltui) of this machine (default: "
        "MASTER_PORT, or the first free pair from 29500)",
    )
    nodes.add_argument(
        "--key-file",
        metavar="PATH",
        help="the key of the run, created if it does not exist; for launchers, in a folder that "
        "the machines share (default: LTUI_NODE_KEY, or a new key)",
    )
    nodes.add_argument(
        "--join-timeout",
        type=seconds,
        metavar="S",
        help="seconds to wait for the other machines (default: 600)",
    )
    add_flag(
        nodes,
        "--allow-fewer-nodes",
        "let an automatic restart continue without a machine that is gone",
    )
    nodes.add_argument(
        "--remote-ltui",
        metavar="PATH",
        help="with --nodes: the ltui program on the other machines (default: the path of this one)",
    )


def _add_join(add: AddCommand) -> None:
    join = add(
        "join", "join:join", "make this machine a node of a run on another one", _JOIN_EPILOG
    )
    join.add_argument(
        "place", metavar="HOST:PORT", help="where node 0 listens, as its `ltui run` prints it"
    )
    join.add_argument(
        "--key-file",
        metavar="PATH",
        help="the key of the run, or a copy of it; `-` reads standard input (default: the "
        "variable LTUI_NODE_KEY)",
    )
    join.add_argument(
        "--node",
        type=positive_number,
        metavar="N",
        help="become node N (default: the lowest number that is free)",
    )
    join.add_argument(
        "--python",
        metavar="PATH",
        help="the Python interpreter that trains here (default: the path of that of node 0)",
    )
    join.add_argument(
        "--cwd",
        metavar="DIRECTORY",
        help="the working directory of the ranks here (default: the path of that of node 0)",
    )
    add_flag(join, "--detach", "return as soon as this machine has joined")
    add("key", "join:print_key", "print a new key for the variable LTUI_NODE_KEY")


def _add_submit(add: AddCommand) -> None:
    submit = add("submit", "submit:submit", "hand a run over to SLURM", _SUBMIT_EPILOG)
    submit.add_argument(
        "preset",
        metavar="PRESET|FILE",
        nargs="?",
        help="the name of a preset, or a LightningCLI configuration file; or a command after `--`",
    )
    _add_set_option(submit)
    submit.add_argument("--name", help="a name for the run (default: two random words)")
    add_label_options(submit)
    submit.add_argument(
        "--python",
        metavar="PATH",
        help="the Python interpreter that trains, as the nodes see it (default: that of the "
        "active virtual environment)",
    )
    _add_run_options(submit, "the value in the preset or the configuration file, or 0")
    submit.add_argument(
        "--nodes", type=positive_number, metavar="N", default=1, help="nodes (default: 1)"
    )
    submit.add_argument(
        "--gpus-per-node",
        type=whole_number,
        metavar="G",
        help="GPUs, and so ranks, on each node (default: none; the run trains on the CPU)",
    )
    submit.add_argument(
        "--cpus-per-node",
        type=positive_number,
        metavar="C",
        help="CPU cores on each node (default: what the cluster gives, often one)",
    )
    submit.add_argument(
        "--time", metavar="TIME", help="time limit of one job, such as 4:00:00 or 2-12"
    )
    submit.add_argument("--partition", metavar="P", help="the partition")
    submit.add_argument("--account", metavar="A", help="the account that pays")
    submit.add_argument(
        "--sbatch",
        metavar="OPTION[=VALUE]",
        action="append",
        default=[],
        help="another option of sbatch, such as --sbatch=qos=high; can be repeated",
    )
    submit.add_argument(
        "--checkpoint-time",
        type=seconds,
        metavar="S",
        help="seconds that a checkpoint takes (default: 60); the run stops at least twice this "
        "time before the time limit",
    )
    add_flag(submit, "--print", "only print the batch script")
    submit.set_defaults(command=[], gpus=None, keep_best=None)
    submit.set_defaults(metrics_pattern=None, stop_signal="SIGTERM")


def _add_inspection_commands(add: AddCommand) -> None:
    add_runs_command(add)
    show = add("show", "runs:show", "show one run: state, ranks, metrics, checkpoints")
    _add_run_argument(show)
    add_flag(
        show,
        "--code",
        "print what code it was started with: commit, uncommitted changes, packages, command",
    )
    add_json_option(show)
    diagnose = add(
        "diagnose",
        "diagnose:diagnose",
        "find out which rank stalls, where, why and what to do",
        _DIAGNOSE_EPILOG,
    )
    _add_run_argument(diagnose)
    add_json_option(diagnose)
    diagnose.add_argument(
        "-o",
        dest="output",
        metavar="FILE",
        help="write the report to a file, for example for a bug report",
    )
    add_flag(diagnose, "--force", "replace the file if it exists")
    logs = add("logs", "logs:print_logs", "print the logs of a run", _LOGS_EPILOG)
    _add_run_argument(logs)
    logs.add_argument(
        "--rank",
        type=rank_name,
        metavar="N",
        help="only this rank: its number, or machine and number (gpu-b:12)",
    )
    logs.add_argument(
        "--node",
        metavar="NODE",
        help="only the ranks and the launcher of this machine, by number or name",
    )
    logs.add_argument(
        "--attempt",
        type=whole_number,
        metavar="N",
        help="the logs of attempt N (default: the latest attempt)",
    )
    add_flag(logs, "--follow", "keep printing until the run ends")
    add_compare(add, RUN_HELP)
    add_export(add, RUN_HELP)
    add_import(add)


def _add_control_commands(add: AddCommand) -> None:
    stop = add(
        "stop",
        "stop_and_pause:stop",
        "stop a run, with a checkpoint if it can save one",
        _STOP_EPILOG,
    )
    _add_run_argument(stop)
    stop.add_argument(
        "--timeout",
        type=seconds,
        default=STOP_TIMEOUT_S,
        metavar="S",
        help="seconds for the ranks to save a checkpoint and exit; after that they are "
        f"interrupted, then killed (default: {STOP_TIMEOUT_S:g})",
    )
    add_flag(stop, "--kill", "kill at once, without a checkpoint")
    add_flag(stop, "--requeue", "give the SLURM job's nodes back, and continue in a later job")
    later = stop.add_argument_group(
        "schedule a stop and return at once (the first condition that is met stops the run)"
    )
    later.add_argument("--at-step", type=whole_number, metavar="N", help="at exactly step N")
    add_flag(later, "--at-epoch-end", "at the end of the current epoch")
    later.add_argument(
        "--when",
        metavar="METRIC<VALUE",
        action="append",
        default=[],
        help="when a metric passes a value (<, <=, >, >=); can be repeated",
    )
    later.add_argument(
        "--at", metavar="TIME", help="at a time such as 18:30, or after +90s, +20min, +2h, +1d"
    )
    add_flag(later, "--cancel", "cancel every scheduled stop")
    _add_run_argument(add("pause", "stop_and_pause:pause", "pause a run between two steps"))
    _add_run_argument(add("continue", "stop_and_pause:continue_run", "continue a paused run"))
    _add_run_argument(
        add("checkpoint", "stop_and_pause:checkpoint", "save a checkpoint now and keep training")
    )
    delete = add("delete", "prune:delete", "move runs to the bin, where they can be restored")
    delete.add_argument("runs", metavar="RUN", nargs="+", help=RUN_HELP)
    add_flag(delete, "--now", "remove them for ever, with history, logs and checkpoints")
    add_flag(delete, "--dry-run", "only print what would be deleted, with its disk use")


def _add_setup_commands(add: AddCommand) -> None:
    add_json_option(add("presets", "presets_and_check:list_all", "list the presets"))
    check = add(
        "check",
        "presets_and_check:check",
        "check a configuration without starting a run",
        _CHECK_EPILOG,
    )
    _add_preset_argument(check)
    _add_set_option(check)
    check.add_argument(
        "--python",
        metavar="PATH",
        help="the Python interpreter that loads the model and data classes",
    )
    add_flag(check, "--quick", "only the checks that do not import torch")
    add_json_option(
        add(
            "doctor",
            "doctor:examine",
            "check this machine and name what is missing",
            _DOCTOR_EPILOG,
        )
    )
    add_config(add)
    demo = add(
        "demo",
        "dashboard:show_demo",
        "show the dashboard with simulated GPUs or machines",
        _DEMO_EPILOG,
    )
    demo.add_argument(
        "what",
        choices=("gpus", "nodes"),
        metavar="gpus|nodes",
        help="the GPU panels, or the screen of a run on several machines",
    )
    demo.add_argument(
        "--nodes",
        type=positive_number,
        metavar="N",
        help="simulated machines of `ltui demo nodes` (default: 4)",
    )
    demo.add_argument(
        "--gpus-per-node",
        type=positive_number,
        metavar="G",
        help="GPUs, and so ranks, on each of them (default: 8)",
    )
    demo.add_argument(
        "--recording",
        metavar="FILE",
        help="readings that `ltui demo gpus` plays instead of its own; `make gpu` records them",
    )
    completion = add(
        "completion",
        "completion:print_script",
        "print the completion script for a shell",
        _COMPLETION_EPILOG,
    )
    completion.add_argument(
        "what", metavar="SHELL", choices=(*SHELLS, *NAMES), help=f"one of {', '.join(SHELLS)}"
    )
    completion.add_argument("words", nargs="*", help=argparse.SUPPRESS)


_ABOUT = """\
A terminal dashboard for training: launch, watch, stop and resume distributed
PyTorch Lightning runs. Without a command, ltui opens the dashboard.

RUN is the id of a run, a unique prefix of it, its name, or `last`."""

_EPILOG = (
    """\
examples:
  ltui run quickstart                         train on handwritten digits with two ranks
  ltui run my.yaml --set trainer.devices=4    your own LightningCLI configuration
  ltui exec -- torchrun --nproc-per-node 2 train.py
  ltui attach last                            open the dashboard at the latest run
  ltui stop last && ltui resume last

"""
    + EXIT_CODES
    + """
Runs are stored in $LTUI_HOME (default: the user's data directory).
Shell completion: ltui completion bash|zsh|fish|tcsh (`ltui completion --help`)."""
)

_RUN_EPILOG = (
    """\
On a terminal this opens the dashboard; without one, or with --plain, it prints
lines, and the first Ctrl-C stops the run, with a checkpoint if its program can
save one; the second kills it. In the dashboard Ctrl-C asks: stop, close or stay.
The command ends when the run ends. The run keeps running if you leave the
dashboard with q (exit code 0), close the terminal (129), or end this process
with SIGTERM (143); `ltui attach RUN` opens the dashboard again.

examples:
  ltui run quickstart
  ltui run cifar10-cnn --set trainer.max_epochs=2 --name short --detach
  ltui run conf/my.yaml --python ~/venvs/vision/bin/python
  ltui run conf/my.yaml --set trainer.devices=free:2
  ltui run quickstart --from brave-owl:1204 --restarts 3
  ltui run quickstart --mirror tensorboard:boards
  ltui run gpt-fsdp --set trainer.num_nodes=2
  ltui run gpt-fsdp --nodes gpu-02,gpu-03

trainer.devices is a count (2), a list (0,2), auto, or free:2. With free:2 the run
waits in the state `queued` until two GPUs are unused, and takes those with the
most free memory. `ltui stop` ends the wait.

"""
    + EXIT_CODES
)

_EXEC_EPILOG = """\
The command runs unchanged and is looked up on PATH, as in a shell. A Lightning
script, also under torchrun, shows its ranks, steps and loss; any other program
with PyTorch shows its ranks, steps and what it logs by TensorBoard, Weights &
Biases, trackio, MLflow or the Hugging Face Trainer; any other command shows its
state, logs and process readings. With --python, the folder of that interpreter
comes first on the command's PATH.

On a terminal this opens the dashboard; without one, or with --plain, it prints
lines. Ctrl-C and the exit codes are those of `ltui run`, but ltui saves a
checkpoint of Lightning, the Hugging Face Trainer, and programs that call
ltui_rank.on_checkpoint only. Ctrl-C ends any other program by SIGTERM, or by
the signal of --stop-signal; the first line, or the dashboard, says which.

examples:
  ltui exec -- python train.py --lr 0.1
  ltui exec --name sweep-3 --detach -- torchrun --nproc-per-node 2 train.py
"""

_JOIN_EPILOG = """\
`ltui run X --set trainer.num_nodes=2` on the first machine prints this command. The
machine gets the specification of the run from there and checks that it can run it.
Ctrl-C stops the whole run with a checkpoint; a second one kills the ranks here.

examples:
  ltui join 10.0.0.5:29501 --key-file node.key
  ltui join gpu-01:29501 --detach      (with the key in LTUI_NODE_KEY)
"""

_SUBMIT_EPILOG = """\
ltui writes a batch script into a new run directory and submits it with sbatch. The
run is listed as queued until SLURM starts it. Before the time limit and when the
job is preempted, the ranks stop with a checkpoint and the job is requeued; each
start of the job is an attempt of the same run. Options come before the two dashes.

examples:
  ltui submit gpt-fsdp --nodes 2 --gpus-per-node 8 --time 4:00:00 --partition gpu
  ltui submit conf/my.yaml --gpus-per-node 4 --sbatch=qos=high --sbatch=exclusive
  ltui submit --gpus-per-node 1 --time 90 -- python train.py --lr 0.1
  ltui submit quickstart --time 30 --print
"""

_RESUME_EPILOG = """\
A resume is a new attempt of the same run: its curves continue. On a terminal this
opens the dashboard, as `ltui run` does.

examples:
  ltui resume last
  ltui resume brave-owl --set trainer.max_epochs=60
  ltui resume brave-owl --from 1200
  ltui resume brave-owl --restarts 3
"""

_ATTACH_EPILOG = """\
examples:
  ltui attach                 open the latest run
  ltui attach brave-owl --readonly
  ltui attach gpu-02:last
"""

_SERVE_EPILOG = """\
Needs the package textual-serve. The server listens on this machine only, and
every page needs the token in the address that is printed. The dashboard is
read-only unless --control is given: then whoever has the address can run any
program as you. docs/serve.md says what protects what.

examples:
  ltui serve                    then open the printed address
  ltui serve last --port 0
  ssh -L 8765:127.0.0.1:8765 gpu-02      (on the machine with the browser)
"""

_LOGS_EPILOG = """\
Without --rank, each line of a rank begins with the rank (r0, r1, ...), on several
machines with the machine and the rank (gpu-b:12, ...). Lines that
begin with a date and a time are merged by it; a line without one stays behind the
line before it, and a log without any is printed whole. On a terminal, control
sequences are removed; into a pipe or a file, the bytes are copied unchanged.

examples:
  ltui logs last --follow
  ltui logs brave-owl --rank 1 --attempt 2
  ltui logs brave-owl --node gpu-b
"""

_DIAGNOSE_EPILOG = """\
Works at any time. For a live run, ltui examines every rank, which takes a few
seconds and does not disturb training: which rank stalls, which ranks wait, the
collective and the line of code where each rank is, and what to do. For a run
that has ended: which rank died first and why, from the evidence kept then.

examples:
  ltui diagnose last
  ltui diagnose brave-owl -o report.txt
  ltui diagnose last --json
"""

_STOP_EPILOG = """\
All ranks agree on a step, save a checkpoint there and exit. If they do not do so
within the timeout, they are interrupted, then killed, and ltui reports it.

A scheduled stop stays in force until it happens or is cancelled, even if nobody
watches the run. A new one replaces one of the same kind (step, epoch, time, or
the same metric).

examples:
  ltui stop last
  ltui stop brave-owl --timeout 300
  ltui stop last --at-step 500
  ltui stop last --when 'val/loss<0.2' --at 18:30
  ltui stop last --cancel
"""

_CHECK_EPILOG = """\
First the structure, keys, types and ranges are checked. Then the model and data
classes are loaded in the interpreter that would train, which takes some seconds.

examples:
  ltui check my.yaml
  ltui check quickstart --set trainer.max_epoch=3
"""

_DOCTOR_EPILOG = """\
Checks the interpreter that would train (packages, malicious releases), the GPUs,
the terminal and the disk, and prints the command that installs what is missing.
"""

_DEMO_EPILOG = """\
`gpus` shows the GPU panels on a machine without a GPU. Eight simulated GPUs
overheat, wait in a collective, run out of memory and report errors.

`nodes` shows the screen of a run on several machines without any. A rank of one
machine stalls, a GPU of another one overheats, and the link to the last one is
cut. The script takes three minutes and repeats.

examples:
  ltui demo gpus
  ltui demo nodes
  ltui demo nodes --nodes 128
"""

_COMPLETION_EPILOG = """\
examples:
  ltui completion bash > ~/.local/share/bash-completion/completions/ltui
  ltui completion zsh > ~/.zfunc/_ltui          (with ~/.zfunc in $fpath)
  ltui completion fish > ~/.config/fish/completions/ltui.fish
  ltui completion tcsh > ~/.ltui.complete.tcsh  (sourced in ~/.tcshrc)
"""
