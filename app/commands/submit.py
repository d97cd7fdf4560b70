"""``ltui submit``: hand a run over to SLURM."""

from __future__ import annotations

import time
from argparse import Namespace

from msgspec import convert
from msgspec.structs import replace

from ltui.app.actions.start_runs import (
    LaunchOptions,
    StartedRun,
    command_spec,
    label_files,
    with_run_options,
)
from ltui.app.command_output import EXIT_DONE, OneOf, print_envelope
from ltui.training.config.device_selection import UNKNOWN_MACHINE, Machine
from ltui.training.config.preflight import overridden_paths
from ltui.training.config.run_spec import RunSpec
from ltui.training.problem import ProblemError
from ltui.training.slurm.batch_script import (
    JobOptions,
    check_options,
    parse_extra,
    signal_lead_s,
    time_limit_s,
)
from ltui.training.slurm.slurm_client import require_sbatch
from ltui.training.store.run_directory import ltui_home, new_run_id

DATA = {"submit": OneOf((StartedRun, {"script": str}))}


def submit(options: Namespace) -> int:
    """Run ``ltui submit PRESET|FILE`` or ``ltui submit -- COMMAND...``."""
    # Imported here: a wrong option is reported without it.
    from ltui.app.launch.queue_changes import dependencies
    from ltui.app.slurm.job_submission import batch_script, submit_run

    job = job_options(options)
    check_options(job)
    if not options.print:
        require_sbatch()
    home = ltui_home()
    # The number of nodes is that of the job, and its order is that of SLURM.
    launch = convert({**vars(options), "nodes": None, "after": ()}, LaunchOptions)
    labels = label_files(launch)
    after = dependencies(home, options.after)
    spec = _spec(options, launch, job)
    if options.print:
        script = batch_script(spec, home, job, "0" * 16).text()
        print_envelope({"script": script}) if options.json else print(script, end="")
        return EXIT_DONE
    run_dir, job_id = submit_run(spec, home, job, labels, after)
    if options.json:
        print_envelope(StartedRun(id=run_dir.id, job=job_id), [f"ltui wait {run_dir.id}"])
        return EXIT_DONE
    print(f"{run_dir.id} is queued in SLURM as job {job_id}.")
    print(f"  To watch it: ltui attach {run_dir.id}    To cancel it: ltui stop {run_dir.id}")
    return EXIT_DONE


def job_options(options: Namespace) -> JobOptions:
    """Return what the options of the command line request. Raises ``ProblemError``."""
    job = JobOptions(
        nodes=options.nodes,
        gpus_per_node=options.gpus_per_node or None,
        cpus_per_node=options.cpus_per_node,
        time=options.time,
        partition=options.partition,
        account=options.account,
        extra=parse_extra(options.sbatch),
    )
    limit_s = None if options.time is None else time_limit_s(options.time)
    warn_s = signal_lead_s(options.checkpoint_time, None, limit_s)
    return replace(job, warn_s=warn_s)


def _spec(options: Namespace, launch: LaunchOptions, job: JobOptions) -> RunSpec:
    """Return the specification of the run. Raises ``ProblemError`` with every problem found."""
    # Imported here: a wrong option is reported without it.
    from ltui.training.lifecycle.launch_run import check_start, several_machines

    if options.command and options.preset:
        raise ProblemError.of(
            where=f"ltui submit {options.preset}",
            what="a preset and a command are given.",
            remedy="Give either a preset, or a command after two dashes.",
        )
    if options.preset is None and not options.command:
        raise ProblemError.of(
            where="ltui submit",
            what="there is nothing to run.",
            remedy="Give a preset, a configuration file, or a command: "
            "ltui submit -- python train.py",
        )
    spec = _command_spec(options, launch) if options.command else _preset_spec(options, job)
    spec = with_run_options(spec, launch)
    if spec.freeze and job.nodes > 1:
        raise several_machines()
    check_start(spec, interpreter_checked=not options.command)
    return spec


def _command_spec(options: Namespace, launch: LaunchOptions) -> RunSpec:
    if options.overrides:
        raise ProblemError.of(
            where="--set",
            what="a command has no configuration that --set could change.",
            remedy="Give it as an argument of the command.",
        )
    return command_spec(launch, ltui_home(), UNKNOWN_MACHINE)


def _preset_spec(options: Namespace, job: JobOptions) -> RunSpec:
    # Imported here: a command does not need it.
    from ltui.app.launch.build_spec import prepare_launch

    set_keys = overridden_paths(options.overrides)
    overrides = list(options.overrides)
    if "trainer.num_nodes" in set_keys:
        raise ProblemError.of(
            where="--set trainer.num_nodes",
            what="the number of nodes is that of the job.",
            remedy="Use --nodes.",
        )
    if job.nodes > 1:
        overrides.append(f"trainer.num_nodes={job.nodes}")
    if job.gpus_per_node is not None and "trainer.devices" not in set_keys:
        overrides.append(f"trainer.devices={job.gpus_per_node}")
    # The configuration is for a node of the job. What this machine has does not matter.
    machine = Machine(gpus=job.gpus_per_node or 0)
    request = prepare_launch(options.preset, overrides, options.python, machine)
    run_id, name = new_run_id(ltui_home(), options.name)
    spec = request.spec(run_id, name, time.time())
    trains_on = (spec.config or {}).get("trainer", {}).get("accelerator")
    if job.gpus_per_node is not None and trains_on == "cpu":
        raise ProblemError.of(
            where=f"--gpus-per-node {job.gpus_per_node}",
            what="this configuration trains on the CPU.",
            remedy="Add --set trainer.accelerator=gpu, or leave out --gpus-per-node.",
        )
    return spec
