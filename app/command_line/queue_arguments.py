"""The arguments of the commands of the run queue, and of sweeps, whose trials wait in it."""

from __future__ import annotations

from ltui.app.command_line.launch_arguments import JSON, RUN, RUNS, SET

_SWEEP = "SWEEP  the name of a sweep, or `last`\n"

COMMANDS = f"""\
=== queue  -queue:list_all  print the run queue: what waits to be started, and for what
{JSON}
Runs come here by `ltui run --queue`, `ltui exec --queue` and `ltui resume --queue`.
Those with a higher priority start first, then those that were queued first.

examples:
  ltui queue
  ltui queue move brave-owl --to 1
  ltui queue hold brave-owl calm-fox
  ltui queue edit brave-owl --set trainer.max_epochs=60 --after calm-fox:ok

=== queue move  queue:move  give a queued run another place
{RUN}{JSON}\
one of:
--to N        the place in the order, from 1; it takes the priority of that place
--priority N  another priority

=== queue hold  queue:hold  keep queued runs from starting
{RUNS}{JSON}
=== queue release  queue:hold  let held runs start again
{RUNS}{JSON}
=== queue edit  queue:edit  change a queued run
{RUN}{SET}{JSON}\
--priority N  another priority
--after RUN[:ok] ...
    start when this run has ended; with :ok, if it finished; can be repeated; `none` for no run
--not-before TIME
    start at 18:30, or after +20min, +2h, +1d at the earliest; `none` for at once
--slots N  the slots of this machine that it uses

=== queue retry  queue:retry  let runs wait again that could not be started or were removed
{RUNS}{JSON}
=== queue remove  queue:remove  take runs out of the run queue
{RUNS}{JSON}
A run that was never started is then stopped; `ltui queue retry` puts it back.

=== sweep  -  try many settings of one program, as runs of a group

`ltui sweep PRESET|FILE --set ...` and `ltui sweep --set ... -- COMMAND` start a
sweep; `ltui sweep start --help` lists the options.

examples:
  ltui sweep quickstart --set 'model.init_args.lr=choice(0.1, 0.01)' --metric val/loss
  ltui sweep show last
  ltui sweep stop last
  ltui sweep retry last --failed

=== sweep start  sweep:start  start a sweep
[PRESET|FILE]
    the name of a preset, a LightningCLI configuration file, or a file with a section `sweep:`; or a
    command after `--`
--set KEY=VALUES ...
    the values of a key: choice(a,b), range(1,10[,step]) with both ends, or
    interval(1e-4,1e-1[,log]); KEY=VALUE sets it for all trials; can be repeated
--metric NAME    the metric that is optimised, such as val/loss
--mode {{min,max}}
    whether a lower (default) or a higher value of the metric is better
--trials N       try so many combinations (default: all of a grid)
--seeds N        run each combination with so many seeds: 1, 2, ...
--at-once N      trials that wait in the run queue or train at once (default: 1)
--sampler {{grid,random,tpe}}
    how combinations are chosen (default: grid, or tpe if there is an interval); random and tpe need
    the package optuna
--seed N         seed of the sampler (default: 0)
--prune {{asha,median}}
    stop bad trials with a checkpoint, and resume them if they prove good enough after all
--rung N         for --prune: compare trials at N steps first
--reduction N    for --prune asha: each rung has N times the steps of the one before (default: 3)
--arguments {{flags,hydra}}
    how a command without {{KEY}} in it gets its values: --KEY VALUE (default) or KEY=VALUE
--gpus free:N    each trial of a command waits until N GPUs are free, and sees only these
--metrics-pattern PATTERN
    read metrics from what a command prints, as `ltui exec` does
--no-freeze      train with the code as it is when each trial starts
{JSON}--name NAME      name of the sweep, which is the group of its runs (default: two random words)
--python PATH
    the Python interpreter that trains (default: that of the active virtual environment)

Trials are ordinary runs of the run queue: they can be watched, stopped and
resumed. They train with the code of the moment at which the sweep was started.

examples:
  ltui sweep quickstart --set 'model.init_args.lr=choice(0.1, 0.01)' --metric val/loss
  ltui sweep quickstart --set 'model.init_args.lr=interval(1e-4, 1e-1, log)' --trials 20 \
      --at-once 4 --metric val/loss --prune asha --rung 200
  ltui sweep --set 'lr=choice(0.1, 0.01)' --metric loss -- python train.py --lr {{lr}}
  ltui sweep my-sweep.yaml

=== sweep list  sweep:list_all  list the sweeps
{JSON}
=== sweep show  sweep:show  show the trials of a sweep, on a terminal as a screen
{_SWEEP}--plain  print a table
{JSON}
=== sweep stop  sweep:stop  stop a sweep, its trials with a checkpoint
{_SWEEP}{JSON}
=== sweep resume  sweep:resume  continue a stopped sweep and its stopped trials
{_SWEEP}{JSON}
=== sweep retry  sweep:retry  run trials again that did not finish
{_SWEEP}[NUMBER ...]  only these trials: their numbers, cells or runs
--failed      those that failed (default)
--missing     those whose run was deleted
--stopped     those that a person stopped
--all         all of them, and those that ran out of memory or whose loss was NaN
{JSON}
A trial continues from its last good checkpoint; without one, it begins anew.

examples:
  ltui sweep retry last --failed --missing
  ltui sweep retry lr-sweep 7

=== sweep append  sweep:append  add trials or values to a sweep
{_SWEEP}--trials N  try N more combinations
--set KEY=VALUES ...
    more values of a key; those of an interval or a range are widened
{JSON}
=== sweep narrow  sweep:narrow  leave values out of later trials
{_SWEEP}--set KEY=VALUES ...
    values of a key that are within those of the sweep
{JSON}"""
