"""``ltui run``, ``exec`` and ``resume``: start a run, and show it unless it is detached.

People wait for the first training step, so each function imports only what it needs itself.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from ltui.app.command_output import EXIT_DONE
from ltui.app.interrupt_signals import ReceivedSignals
from ltui.training.config.run_spec import CheckpointPolicy, Nodes, RunSpec
from ltui.training.problem import ProblemError
from ltui.training.store.find_run import find_run
from ltui.training.store.run_directory import RunDir, ltui_home, new_run_id

if TYPE_CHECKING:
    from ltui.training.config.device_selection import Machine
    from ltui.training.state.run_snapshot import CheckpointInfo


def run(options: Namespace) -> int:
    """Run ``ltui run PRESET|FILE``."""
    return _launch(options, _preset_spec)


def execute(options: Namespace) -> int:
    """Run ``ltui exec -- COMMAND...``."""
    return _launch(options, _command_spec)


def _launch(
    options: Namespace,
    spec_of: Callable[[Namespace, Path, Machine, Sequence[str] | None], RunSpec],
) -> int:
    """Start the run that ``spec_of`` specifies, or join it if a launcher has started it."""
    from ltui.app.commands.labels import label_files
    from ltui.app.nodes.node_options import (
        agent_nodes,
        check_fewer_nodes,
        launch_machine,
        listed_hosts,
        with_node_options,
    )
    from ltui.training.lifecycle.launch_run import launch

    home = ltui_home()
    labels = label_files(options)
    hosts = listed_hosts(options.nodes)
    machine = launch_machine(options, hosts)
    nodes = agent_nodes(options, machine, getattr(options, "overrides", ()))
    if nodes is not None:
        return _join_and_follow(nodes, options, home)
    spec = with_node_options(spec_of(options, home, machine, hosts), options, hosts)
    if spec.nodes is not None and spec.nodes.rank > 0:
        return _join_and_follow(spec.nodes, options, home)
    spec = with_run_options(spec, options)
    start_from: CheckpointInfo | None = None
    if spec.config is not None and options.start_from is not None:
        from ltui.app.launch.build_spec import apply_start_from

        spec, start_from = apply_start_from(home, spec, options.start_from)
    spec = check_fewer_nodes(with_stall_options(spec, options.on_stall, options.on_verdict))
    if spec.config is not None:
        from ltui.app.launch.local_machine import freeze_warnings, print_warnings

        print_warnings(freeze_warnings(spec))
    return _launch_and_follow(
        spec,
        options,
        home,
        lambda files: launch(
            spec,
            home,
            start_from,
            interpreter_checked=spec.config is not None,
            private_files={**labels, **files},
        ),
    )


def _preset_spec(
    options: Namespace, home: Path, machine: Machine, hosts: Sequence[str] | None
) -> RunSpec:
    from ltui.app.launch.build_spec import prepare_launch
    from ltui.app.nodes.node_options import node_overrides

    overrides = node_overrides(options.overrides, hosts)
    request = prepare_launch(options.preset, overrides, options.python, machine)
    run_id, name = new_run_id(home, options.name)
    return request.spec(run_id, name, time.time())


def _command_spec(
    options: Namespace, home: Path, machine: Machine, hosts: Sequence[str] | None
) -> RunSpec:
    from ltui.app.nodes.node_options import command_nodes

    spec = command_spec(options, home)
    return spec.with_changes(nodes=command_nodes(options, machine, hosts, spec.command or ()))


def command_spec(options: Namespace, home: Path) -> RunSpec:
    """Return the specification of a user's command. Raises ``ProblemError``."""
    from ltui.app.launch.launch_defaults import launch_defaults

    command = tuple(options.command)
    if not command:
        raise ProblemError.of(
            where="ltui exec",
            what="the command is missing.",
            remedy="Put it after two dashes: ltui exec -- python train.py",
        )
    path = os.environ.get("PATH", os.defpath)
    python = sys.executable
    if options.python is not None:
        from ltui.app.launch.training_interpreter import choose_python

        python = choose_python(options.python, os.environ)
        path = f"{Path(python).parent}{os.pathsep}{path}"
    if shutil.which(command[0], path=path) is None:
        raise ProblemError.of(
            where=f"ltui exec -- {command[0]}",
            what="no executable program of that name was found.",
            remedy="Give its path, or activate the environment that contains it.",
        )
    gpus = None if options.gpus is None else _free_gpus(options.gpus)
    defaults = launch_defaults()
    run_id, name = new_run_id(home, options.name)
    return RunSpec(
        id=run_id,
        name=name,
        created_at=time.time(),
        cwd=str(Path.cwd()),
        python=python,
        command=command,
        nproc=0,
        # Kept, so that a resume from another shell finds the same program.
        env={"PATH": path},
        restarts=defaults.restarts,
        mirror=defaults.mirror,
        checkpoint=_checkpoint_policy(options.keep_best, defaults.checkpoint),
        stall=defaults.stall,
        stop_signal=options.stop_signal,
        metrics_pattern=_checked_pattern(options.metrics_pattern),
        gpus=gpus,
    )


def _checked_pattern(text: str | None) -> str | None:
    """Return the value of ``--metrics-pattern`` if it can be used. Raises ``ProblemError``."""
    # Imported here, because most runs have no pattern.
    from ltui.training.rank.program.printed_values import metric_pattern

    if text is not None:
        try:
            metric_pattern(text)
        except ValueError as error:
            raise ProblemError.of(
                where=f"--metrics-pattern {text}",
                what=f"{error}.",
                remedy="Give `json`, `pairs` or a regular expression with named groups.",
            ) from error
    return text


def with_run_options(spec: RunSpec, options: Namespace) -> RunSpec:
    """Return ``spec`` with ``--restarts`` and ``--mirror``, which override the preset."""
    given = {"restarts": options.restarts, "mirror": options.mirror}
    return spec.with_changes(**{name: v for name, v in given.items() if v is not None})


def with_stall_options(
    spec: RunSpec, on_stall: tuple[str, int | None] | None, on_verdict: str | None
) -> RunSpec:
    """Return ``spec`` with ``--on-stall`` and ``--on-verdict``, which override the preset."""
    stall = spec.stall
    if on_stall is not None:
        action, count = on_stall
        stall = replace(stall, then=action, restarts=stall.restarts if count is None else count)
    if on_verdict is not None:
        stall = replace(stall, on_verdict=_verdict_hook(on_verdict))
    return spec.with_changes(stall=stall)


def _verdict_hook(text: str) -> tuple[str, ...] | str:
    """Return the URL of a webhook unchanged, or a command split into words as by a shell."""
    from ltui.training.config.ltui_section import on_verdict_fault

    where = f"--on-verdict {text}"
    if "://" in text.split(" ", 1)[0]:
        if (fault := on_verdict_fault(text)) is not None:
            raise ProblemError.of(where=where, what=fault)
        return text
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        message = f"the command cannot be split into words ({error})."
        raise ProblemError.of(where=where, what=message) from error
    if not words:
        raise ProblemError.of(where="--on-verdict", what="the command is empty.")
    return words


def _checkpoint_policy(text: str | None, default: CheckpointPolicy) -> CheckpointPolicy:
    """Return ``default`` with ``METRIC[:max][:N]``, such as ``val/acc:max:3``, if it is given."""
    if text is None:
        return default
    metric, *options = text.split(":")
    mode = options.pop(0) if options and options[0] in ("min", "max") else "min"
    number = options.pop(0) if options else "1"
    if not metric or options or not number.isdecimal() or int(number) < 1:
        raise ProblemError.of(
            where=f"--keep-best {text}",
            what="invalid value.",
            remedy="Use METRIC[:max][:N], such as val/acc:max:3",
        )
    return replace(default, best=metric, mode=mode, keep_best=int(number))


def _free_gpus(text: str) -> str:
    """Return ``free:2`` as a specification holds it."""
    from ltui.training.config.device_selection import free_count

    count = free_count(text)
    if count is None:
        raise ProblemError.of(
            where=f"--gpus {text}",
            what="the value must be free:N, such as free:2.",
            remedy="To choose GPUs by number, set CUDA_VISIBLE_DEVICES.",
        )
    return f"free:{count}"


def resume(options: Namespace) -> int:
    """Run ``ltui resume RUN``."""
    from ltui.app.launch.build_spec import changed_spec
    from ltui.app.nodes.node_options import (
        launch_machine,
        listed_hosts,
        resumed_spec,
        resuming_agent,
    )
    from ltui.app.slurm.job_submission import is_submitted, resubmit_run
    from ltui.training.lifecycle.resume_run import resume as resume_run
    from ltui.training.nodes.link_key import KEY_FILE_NAME

    home = ltui_home()
    hosts = listed_hosts(options.nodes)
    joined = None if hosts is not None else resuming_agent(options, launch_machine(options, None))
    if joined is not None:
        return _join_and_follow(joined, options, home)
    run_dir = find_run(home, options.run)
    spec: RunSpec | None = None
    if options.overrides:
        spec = changed_spec(run_dir.read_spec(), options.overrides)
    if (options.restarts, options.mirror) != (None, None):
        spec = with_run_options(spec or run_dir.read_spec(), options)

    if is_submitted(run_dir):
        if options.from_step is not None:
            raise ProblemError.of(
                where=f"--from {options.from_step}",
                what="a run of `ltui submit` continues from its last good checkpoint.",
                remedy=f"Start a new run from it: --from {run_dir.id}:{options.from_step}",
            )
        return resubmit_run(run_dir, spec)
    checkpoint = None
    if options.from_step is not None:
        checkpoint = _checkpoint_to_resume(run_dir, options.from_step)
    if (several := spec or run_dir.read_spec()).nodes is not None:
        # Imported here, because most runs use one machine.
        from ltui.app.nodes.start_head import prepare_next_attempt

        new_spec = resumed_spec(several, options, hosts)

        def start_nodes(files: Mapping[str, str]) -> RunDir:
            prepare_next_attempt(run_dir, files)
            resume_run(run_dir, spec=new_spec, checkpoint=checkpoint)
            return run_dir

        key_file = run_dir.path / KEY_FILE_NAME
        assert new_spec.nodes is not None
        if new_spec.nodes.start in ("by hand", "ssh") and key_file.exists():
            # Copies of it stay valid.
            options.key_file = options.key_file or str(key_file)
        return _launch_and_follow(new_spec, options, home, start_nodes)

    def start() -> RunDir:
        resume_run(run_dir, spec=spec, checkpoint=checkpoint)
        return run_dir

    return _start_and_follow(start, options)


def _checkpoint_to_resume(run_dir: RunDir, step: int) -> Path:
    """Return the checkpoint of ``--from STEP``. Say which steps it replaces, and warn if its
    weights are not good."""
    from ltui.training.lifecycle.resume_run import checkpoint_of_step, replaced_steps
    from ltui.training.lifecycle.run_status import nan_step
    from ltui.training.state.good_checkpoints import badness

    checkpoint = checkpoint_of_step(run_dir, step, f"--from {step}")
    if (reason := badness(checkpoint, nan_step(run_dir))) is not None:
        sys.stderr.write(f"Warning: the checkpoint of step {step} {reason}.\n")
    for sentence in replaced_steps(run_dir, [checkpoint]).values():
        print(sentence, flush=True)
    return Path(checkpoint.path)


def _launch_and_follow(
    spec: RunSpec,
    options: Namespace,
    home: Path,
    start: Callable[[Mapping[str, str]], RunDir],
) -> int:
    """Start a run, on several machines as their node 0, and follow it."""
    if spec.nodes is None:
        return _start_and_follow(lambda: start({}), options)
    # Imported here, because most runs use one machine.
    from ltui.app.nodes.start_head import start_head

    signals = ReceivedSignals(stop_on_terminate=spec.nodes.start in ("srun", "launcher"))
    return _start_and_follow(lambda: start_head(spec, options, home, start), options, signals)


def _join_and_follow(nodes: Nodes, options: Namespace, home: Path) -> int:
    """Join the run that a launcher starts on all nodes, and wait until this node has ended."""
    from ltui.app.nodes.join_run import follow_agent, join_by_launcher, joined_line

    joined = join_by_launcher(nodes, options.key_file, options.python, home)
    print(joined_line(joined), flush=True)
    if options.detach:
        return EXIT_DONE
    with ReceivedSignals(stop_on_terminate=True).catching() as signals:
        left = follow_agent(joined, signals) >= 128
    # Node 0 reports how the run ended. Another code here would make a launcher kill node 0.
    return 128 + (signals.leave or 0) if left else EXIT_DONE


def _start_and_follow(
    start: Callable[[], RunDir], options: Namespace, signals: ReceivedSignals | None = None
) -> int:
    if options.detach:
        run_dir = start()
        # Imported here: only a detached run needs it.
        from ltui.app.presentation.notifications import started_line

        print(started_line(run_dir.id))
        return EXIT_DONE
    with (signals or ReceivedSignals()).catching() as caught:
        run_dir = start()
        # Imported here, so that the run's processes start at the same time.
        from ltui.app.foreground.follow_run import follow_run

        return follow_run(run_dir, caught, plain=options.plain)
