"""The arguments of the commands that look at runs and change them. Imports nothing heavy."""

from __future__ import annotations

from ltui.app.command_line.launch_arguments import JSON, RUN, RUN_HELP, RUNS
from ltui.app.command_output import EXPORT_FORMATS
from ltui.training.shared.defaults import STOP_TIMEOUT_S
from ltui.training.shared.profile_request import DEFAULT_RANKS, DEFAULT_STEPS

FILTER_HELP = """\
filter:
  fox quickstart            both words occur in name, program, state, tags, group or note
  tag:base* name:/^a.*9$/   a field matches a pattern (* ? [abc]), a part or an expression
  state=failed epoch>=3     = != < <= > >= on fields and metrics
  val/loss<0.2 lr.max<1e-3  a metric's last value; .min and .max are its extremes
  started>3d ago            a time; also 2026-11-20 or 2026-11-20T18:30
  elapsed<1h30m size>5GB    durations and sizes
  config.lr<1e-3 config.optimizer:adam*  settings, by their name or its end
  has:note not has:star     the run has a value
  (a or b) and not c        terms next to each other are joined by `and`, as repeated --filter are

fields: id name program state tag group note detail star running created started ended
elapsed step epoch attempt ranks exit progress speed metric size goodput; config.NAME is a
setting or hyperparameter; other names are metrics.
"""

COMMANDS = f"""\
=== runs  runs:list_all  list the runs, newest first
--filter EXPR        only the runs that match, see below
--sort FIELD
    sort by a field, metric or setting, lowest first; --sort=-FIELD: highest first
--columns FIELD,...  print the id and these fields, metrics or settings
{JSON}
{FILTER_HELP}
examples:
  ltui runs --filter 'tag:baseline val/loss<0.2' --sort val/loss
  ltui runs --filter 'state=failed started>2d ago' --columns program,step,detail
  ltui runs --columns size,tag --sort=-size --json
  ltui runs --columns config.lr,val/acc --sort=-val/acc

=== show  runs:show  show one run: state, ranks, metrics, checkpoints
{RUN}\
--code
    print what code it was started with: commit, uncommitted changes, packages, command
--code-diff
    print how the code differs now from the frozen code of the run
--time
    print where its wall-clock time went, by attempt, machine and rank, and what would be faster
{JSON}
=== diagnose  diagnose:diagnose  find out which rank stalls, where, why and what to do
{RUN}{JSON}\
--sample  also find out why a rank is slow: sample the stacks of two ranks for 10 s
-o FILE   write the report to a file, for example for a bug report
--force   replace the file if it exists

Works at any time. For a live run, ltui examines every rank, which takes a few
seconds and does not disturb training: which rank stalls, which ranks wait, the
collective and the line of code where each rank is, and what to do. For a run
that has ended: which rank died first and why, from the evidence kept then.

--sample compares where the Python of the slowest rank, of a normal one and of
their DataLoader workers spends its time, while they train on. It takes no profiler.

examples:
  ltui diagnose last
  ltui diagnose last --sample
  ltui diagnose brave-owl -o report.txt
  ltui diagnose last --json

=== profile  profile:profile  profile some steps of a live run: what takes the time, and what to do
{RUN}\
--ranks LIST = {DEFAULT_RANKS}
    ranks by number, slowest or median, with commas (default: {DEFAULT_RANKS})
--steps N = {DEFAULT_STEPS}
    steps that are measured, after one to warm up (default: {DEFAULT_STEPS})
--memory  also record what the operators allocate, in the trace
--show  profile nothing: print the last profile
{JSON}
torch.profiler runs in the chosen ranks for these steps. They are slower, and the other
ranks wait for them. The steps do not count for throughput, step times and stragglers.
The losses stay the same. docs/profile.md says more.

examples:
  ltui profile last
  ltui profile brave-owl --ranks slowest,3 --steps 10 --json
  ltui profile last --show

=== incident  incident:incident  put minutes of a run into a file for other people
{RUN}\
--around MOMENT
    verdict:N, or a time such as 03:12 or 2026-11-26T03:12 (default: the last verdict)
-o FILE  write to this file (default: RUN.ltui)
--force  replace the file if it exists
--yes    do not ask
{JSON}
The file has ten minutes of the run: 8 before the moment and 2 after it. It holds
metrics, GPU readings, events, verdicts with stacks, versions, and the end of each
log. Secrets and your folders are replaced; what the file will hold is printed
before it is written. Look through it before you give it to others.

examples:
  ltui incident last
  ltui incident brave-owl --around verdict:2 -o hang.ltui

=== open  incident:open_file  look at an incident file
FILE         a file that `ltui incident` wrote
--plain      print a report, as without a terminal
--to FOLDER  write what it holds to FOLDER, which becomes an LTUI_HOME for other commands

The file is looked at with the screens of a run, read-only. It may come from
anybody: nothing in it is executed. A file that was cut opens as far as it goes.

examples:
  ltui open hang.ltui
  ltui open hang.ltui --to hang && LTUI_HOME=$PWD/hang ltui export last -o hang.csv

=== logs  logs:print_logs  print the logs of a run
{RUN}\
--rank N     only this rank: its number, or machine and number (gpu-b:12)
--node NODE  only the ranks and the launcher of this machine, by number or name
--attempt N  the logs of attempt N (default: the latest attempt)
--follow     keep printing until the run ends

Without --rank, each line of a rank begins with the rank (r0, r1, ...), on several
machines with the machine and the rank (gpu-b:12, ...). Lines that
begin with a date and a time are merged by it; a line without one stays behind the
line before it, and a log without any is printed whole. On a terminal, control
sequences are removed; into a pipe or a file, the bytes are copied unchanged.

examples:
  ltui logs last --follow
  ltui logs brave-owl --rank 1 --attempt 2
  ltui logs brave-owl --node gpu-b

=== compare  compare:compare  compare runs: metrics, speed, settings
[RUN ...]        {RUN_HELP}; a pattern such as 'sweep-*' is every run whose id matches
--filter EXPR    also the runs that match, such as 'group:sweep'; see `ltui runs --help`
--metric GLOB ...
    compare the metrics whose name matches, such as 'val/*'; can be repeated (default: the loss
    and the results of validation)
--by {{step,epoch,time}} = step
    compare curves at the same step, epoch or training time (default: step)
--group-by KEY ...
    runs with the same value of a setting are a group; can be repeated (default: runs that differ
    only in the seed)
--ignore KEY ...
    runs that differ only in the seed and in this setting are a group; can be repeated
--band {{minmax,std,stderr,ci95}} = minmax
    the band of a group: minimum to maximum (default), standard deviation, standard error, or
    95 %% interval of the mean
--watch          open the comparison in the dashboard; live runs go on growing
{JSON}
For each metric: its final and its best value and the step of that, and the value
at the last step, epoch or time that all these runs have reached. The step of an
old value is written ~4128 if the history holds only a window of steps around it.
Settings are those of the configuration, or the options of a command (`--lr 0.1`
is the setting lr). KEY is a name, the end of a name, or a pattern.

--json prints, among others, `parameters`: for each run the settings that differ,
and the final and the best value of each metric, for example for pandas.

examples:
  ltui compare brave-owl calm-fox
  ltui compare 'sweep-*' --metric val/acc --by epoch
  ltui compare 'seed-*' --band ci95
  ltui compare --filter 'group:sweep val/acc>0.9'
  ltui compare 'sweep-*' --group-by lr --json
  ltui compare brave-owl calm-fox --watch

=== rerun  rerun:rerun  execute steps of a run again, to compare, to find a NaN, to debug
{RUN}\
--from STEP  the first of the steps
--to STEP    the last of the steps
--with {{compare,nan,profile,memory,pdb}} = compare
    compare: the first step whose loss is not the one in the history, bit for bit (default); nan:
    the first module, rank and tensor that is NaN; profile, memory: the operators that compute the
    longest or allocate the most; pdb: a debugger in the first step
--rank N = 0  with pdb: the rank in which it stops (default: 0)
{JSON}
A shadow run begins at the nearest checkpoint before the first step, or at the beginning
of the training, and ends after the last step. It has a folder and a history of its own;
the run itself stays as it is. Loggers and checkpoints of the program write nothing. What
else it may write or send is named before it starts. docs/rerun.md says more.

exit codes:
  0  the losses are equal, or there is no NaN
  1  a loss differs, there is a NaN, or the program ended before the last step
  2  bad input: nothing was started

examples:
  ltui rerun last --from 4180 --to 4200
  ltui rerun brave-owl --from 4190 --to 4192 --with nan --json
  ltui rerun brave-owl --from 4192 --to 4192 --with pdb --rank 3

=== export  export_and_import:export  write the metrics of runs to a file
{RUNS}\
--to, --format {{{",".join(EXPORT_FORMATS)}}} = csv
    the format (default: csv); parquet and tensorboard need the packages pyarrow and tensorboard
--metric GLOB ...
    only metrics whose name matches, such as 'val/*'; can be repeated
--follow
    with --to tensorboard: write the values of a live run as they arrive, until it ends
-o FILE
    write to a file, which appears when it is complete; a folder for tensorboard
--force  replace the file if it exists

--to csv, json and parquet write one table, a row for each metric, step and rank:

  metric,step,epoch,time,rank,value,first_step,min,max,count

The time is in unix seconds; epochs count from 1, as everywhere in ltui. A step
that was repeated after a resume appears once.
A value that was logged as NaN is NaN in CSV and Parquet; in JSON, which has no such
numbers, it is "NaN", and an infinite one "Infinity" or "-Infinity". The table of
several runs begins with a column run.

--metric also takes the measurements of each step (step/*) and, for all ranks
together, throughput/samples_per_s, whose rank is empty.

--to tensorboard writes event files: FOLDER/RUN for rank 0, FOLDER/RUN/rank-1 and so
on for the others. They hold numbers of 32 bits, as all scalars of TensorBoard do.

The export holds every step that is stored. Of a long run (more than 200,000
steps) ltui stores the oldest steps as windows of 64 steps or more. Such a row
holds the mean of a window as its value, at its last step, and also first_step,
min, max and count; in all other rows count is 1 and these are empty. The range
of these steps is printed on standard error.

Without --metric, every logged metric and the loss are exported. The loss, the
learning rate, the time, the wait for data and the samples of each step are exported
with --metric 'step/*'; the parts of its time and its memory are shown, not exported.

examples:
  ltui export last -o run.csv
  ltui export last --metric 'train/*' --metric val/acc --to json
  ltui export brave-owl calm-fox --to parquet -o both.parquet
  ltui export brave-owl calm-fox --to tensorboard -o events
  ltui export last --to tensorboard -o events --follow

=== import  export_and_import:import_all  make runs of other tools' metrics
FOLDER ...   the folder of a logger, or one that contains such folders
--name NAME  a name for the runs (default: the name of the folder)

Reads the metrics.csv of Lightning's CSVLogger, and TensorBoard event files (this
needs the package tensorboard). Every folder with such a file
becomes an ended run with the tag `imported`, which can be shown, compared and
exported like any other. The folder itself is not changed.

A metrics.csv holds no times, so the curves of such a run have none.

examples:
  ltui import lightning_logs
  ltui import lightning_logs/version_3 --name baseline

=== stop  stop_and_pause:stop  stop a run, with a checkpoint if it can save one
{RUN}\
--timeout S = {STOP_TIMEOUT_S}
    seconds for the ranks to save a checkpoint and exit; after that they are interrupted, then
    killed (default: {STOP_TIMEOUT_S:g})
--kill      kill at once, without a checkpoint
{JSON}\
--requeue   give the SLURM job's nodes back, and continue in a later job
schedule a stop and return at once (the first condition that is met stops the run):
--at-step N     at exactly step N
--at-epoch-end  at the end of the current epoch
--when METRIC<VALUE ...
    when a metric passes a value (<, <=, >, >=); can be repeated
--at TIME       at a time such as 18:30, or after +90s, +20min, +2h, +1d
--cancel        cancel every scheduled stop

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

=== wait  wait:wait  sleep until runs end or meet a condition
{RUNS}\
--until CONDITION ...
    wait for this, see below; can be repeated, and any of them is enough (default: ended)
--for-at-most TIME  no longer than 90 (seconds), 9m or 2h
{JSON}\
one of:
--all  until it is decided for every run (default)
--any  until one run meets a condition

For programs that start runs: one sleeping process instead of many questions. It
prints one line for each run and says by its exit code why it ended.

conditions:
  ended           the run has ended
  stalled         a rank stalls or is dead, and the run does not go on
  resolved        no rank stalls
  nan             the loss is NaN or infinite
  step>=500       the run has made so many steps
  epoch>=3        the run is in this epoch, counted from 1, or was
  val/loss<0.2    a value of a metric, also an earlier one
  event:NAME      an event after the begin of the wait, as `ltui events` names it

exit codes, of several runs the last in this order (with --any the first):
  0  a condition is met; for `ended`: the run finished
  4  it still runs and the time is over
  3  it stopped
  5  it stalls, which ends each wait but one for `resolved`; or it is in the run queue
     and never starts
  1  it failed, or finished before a condition was met
  6  it is lost: no process of it is alive, or its files cannot be read
  2  bad input

examples:
  ltui wait last --for-at-most 9m
  ltui wait last --until 'val/loss<0.2' --until nan --json
  ltui wait brave-owl calm-fox --any

=== events  wait:events  print what happened in a run, as JSON lines
{RUN}\
--since CURSOR  only events after this one: the `cursor` of the last line that was read
--follow        go on until the run ends

Keys: cursor, attempt, rank (null for the whole run), t (unix time), kind, text, data.
A cursor stays valid over restarts and resumes.

examples:
  ltui events last
  ltui events brave-owl --since 42 --follow

=== pause  stop_and_pause:pause  pause a run between two steps
{RUN}{JSON}
=== continue  stop_and_pause:continue_run  continue a paused run
{RUN}{JSON}
=== checkpoint  stop_and_pause:checkpoint  save a checkpoint now and keep training
{RUN}{JSON}
=== delete  prune:delete  move runs to the bin, where they can be restored
{RUNS}\
--now      remove them for ever, with history, logs and checkpoints
--dry-run  only print what would be deleted, with its disk use

=== tag  labels:tag  print, add and remove the tags of runs
{RUNS}\
--add TAG ...     add a tag, or several with commas between them; can be repeated
--remove TAG ...  remove a tag, or several with commas between them; can be repeated

A tag has at most 40 letters, digits and . : / = + @ - _ without blanks. Without an
option, the tags are printed.

examples:
  ltui tag last --add baseline,v2
  ltui tag brave-owl calm-fox --add keep --remove draft

=== group  labels:group  print or set the group of runs
{RUNS}\
one of:
--name GROUP  put the runs into this group
--remove      take the runs out of their group

A run is in one group or in none. Without an option, the group is printed.

examples:
  ltui group brave-owl calm-fox --name lr-sweep
  ltui group brave-owl --remove

=== rename  labels:rename  give a run another name
{RUN}NAME  the name; '' restores that of the id

A name may have any characters. The id of the run stays, and both name it in commands.

examples:
  ltui rename brave-owl 'ResNet, rate 0.1 (best)'
  ltui rename brave-owl ''

=== note  labels:note  print or set the note of a run
{RUN}[TEXT]  the note; '' removes it

examples:
  ltui note last 'the first one with the cleaned labels'
  ltui note last ''

=== star  labels:star  mark runs that are kept and easy to find
{RUNS}--remove  take the star away

`ltui prune` never deletes a run with a star.

examples:
  ltui star brave-owl
  ltui star brave-owl --remove

=== prune  prune:prune  delete the ended runs that match a filter
--filter EXPR  which runs, see below
--now          free the space at once; the runs can't be restored
--bin          remove the deleted runs in the bin for ever
--dry-run      only print what would be deleted, with its disk use

Live runs, runs with a star and runs that cannot be read are never deleted. A deleted
run is in the bin for a week, from which `ltui restore RUN` brings it back.

{FILTER_HELP}
examples:
  ltui prune --filter 'state=failed ended<30d ago' --dry-run
  ltui prune --filter 'size>10GB not has:tag' --now
  ltui prune --bin

=== restore  prune:restore  bring deleted runs back, or list the bin
[RUN ...]  id, name or a prefix; without it, list the bin
"""  # noqa: S608 - a help text
