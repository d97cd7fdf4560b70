"""The arguments of the commands that start, join and show runs, and of those that need no run.

Imports nothing at all. ``parser.py`` describes the form of the texts.
"""

from __future__ import annotations

RUN_HELP = "the id of a run, a unique prefix of it, its name, or `last`"
RUN, RUNS = f"RUN  {RUN_HELP}\n", f"RUN ...  {RUN_HELP}\n"
SHELLS = ("bash", "zsh", "fish", "tcsh")
COMPLETED_NAMES = ("metrics", "keys")
"""What the scripts of ``ltui completion`` ask for, in place of a shell."""
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")
JSON = "--json  print one JSON document and nothing else\n"
EXIT_CODES = """\
exit codes:
  0  success: the run finished, or ended by your Ctrl-C without a checkpoint
  1  the run failed, or the request was not carried out
  2  bad input: nothing was started or changed
  3  the run stopped and can be resumed
"""
READONLY = "--readonly  open the dashboard without any control over runs\n"
PRESET = "PRESET|FILE  the name of a preset, or a LightningCLI configuration file\n"
SET = """\
--set KEY=VALUE ...
    set a key of the configuration, such as trainer.max_epochs=3; can be repeated
"""
_NAME_AND_LABELS = """\
--name NAME    a name for the run (default: two random words)
--tag TAG ...  a tag for the run, or several with commas between them; can be repeated
--group GROUP  the group of the run
--note TEXT    a note about the run, one line
"""
_DETACH = """\
--detach  start the run, print how to watch it, and return at once
--plain   print lines instead of opening the dashboard
--json    as --detach, and print one JSON document and nothing else
"""
_LAUNCH = f"""\
{_NAME_AND_LABELS}{_DETACH}\
--python PATH
    the Python interpreter that trains (default: that of the active virtual environment)
"""
_RESTARTS = """\
--mirror tensorboard[:FOLDER]
    also write the metrics as TensorBoard event files while the run goes on: into FOLDER/RUN, or
    the folder `tensorboard` of the run directory
--restarts N
    after a crash, resume from the last good checkpoint, at most N times (default: {})
"""
_FREEZE = """\
one of:
--freeze     train with a copy of the code as it is now, also after restarts and resumes (default of
             a queued run)
--no-freeze
    train with the code as it is at each start (default, unless the preset or the configuration
    file says otherwise)
any of:
"""
_QUEUE = """\
run queue (docs/queue.md):
--queue        put the run into the run queue: it starts when it is its turn
--priority N   with --queue: higher priorities start first (default: 0)
--after RUN[:ok] ...
    with --queue: start when this run has ended; with :ok, if it finished; can be repeated
--not-before TIME
    with --queue: start at 18:30, or after +20min, +2h, +1d at the earliest
--slots N
    the slots of this machine that the run uses while it has no GPUs of --gpus (default: 1)
"""
_STALL = """\
--on-stall WHAT
    what to do when a stall has lasted for 30 s: nothing (default), stop, restart or restart:N
    (kill the run and resume from the last good checkpoint, at most N times)
--on-verdict COMMAND|URL
    what to call when a rank stalls or dies: a command, which gets the verdict as JSON on standard
    input, or a webhook, which gets it by POST
"""
_NODES = """\
several machines (docs/several-machines.md; this one is node 0):
--nodes HOST,HOST,...
    start these machines by ssh; this one may be in the list or not
--address ADDRESS
    the address of this machine at which the others reach it (default: that of the default route)
--port N
    the others connect to port N (torch) and N + 1 (ltui) of this machine (default: MASTER_PORT, or
    the first free pair from 29500)
--key-file PATH
    the key of the run, created if it does not exist; for launchers, in a folder that the machines
    share (default: LTUI_NODE_KEY, or a new key)
--join-timeout S
    seconds to wait for the other machines (default: 600)
--allow-fewer-nodes
    let an automatic restart continue without a machine that is gone
--remote-ltui PATH
    with --nodes: the ltui program on the other machines (default: the path of this one)
"""
_PYTHON = "--python PATH  the Python interpreter that trains\n"
_WORKERS = f"--workers N  the number of workers (default: one per core)\n{_PYTHON}{JSON}"

COMMANDS = f"""\
=== run  launch:run  train a preset or a LightningCLI configuration file
{PRESET}{SET}{_LAUNCH}{_RESTARTS.format("the value in the preset or the configuration file, or 0")}\
--from RUN[:STEP]
    start from a checkpoint of another run: its last good one, or that of a step
{_FREEZE}{_STALL}{_QUEUE}\
--gpus N
    with --queue, 1 or more: the same as --set trainer.devices=free:N
{_NODES}
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

{EXIT_CODES}
=== exec  launch:execute  run your own command as a run
{_LAUNCH}{_RESTARTS.format("that of the configuration file, or 0")}\
--keep-best METRIC[:max][:N]
    keep the N best checkpoints by a metric, such as val/acc:max:3 (default: 1 checkpoint; lower is
    better unless `max` is given)
--stop-signal SIGNAL = SIGTERM
    the signal by which `ltui stop` ends a program that has not told ltui how to save:
    {", ".join(STOP_SIGNALS)} (default: SIGTERM)
--metrics-pattern PATTERN
    read metrics from what a program without Lightning prints: `json` (lines of JSON), `pairs`
    (loss 0.5, loss=0.5, loss: 0.5), or a regular expression with named groups
{_FREEZE}{_STALL}\
--gpus free:N
    wait until N GPUs are free, and let the command see only these; with --queue also N
--num-nodes N
    the command runs on N machines (default: the number that torchrun's --nnodes or the launcher
    gives, or 1)
COMMAND  the command, after `--`
{_QUEUE}{_NODES}
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
  ltui exec --queue --after sweep-3:ok -- python evaluate.py

=== join  join:join  make this machine a node of a run on another one
HOST:PORT  where node 0 listens, as its `ltui run` prints it
--key-file PATH
    the key of the run, or a copy of it; `-` reads standard input (default: the variable
    LTUI_NODE_KEY)
--node N   become node N (default: the lowest number that is free)
--python PATH
    the Python interpreter that trains here (default: the path of that of node 0)
--cwd DIRECTORY
    the working directory of the ranks here (default: the path of that of node 0)
--detach   return as soon as this machine has joined

`ltui run X --set trainer.num_nodes=2` on the first machine prints this command. The
machine gets the specification of the run from there and checks that it can run it.
Ctrl-C stops the whole run with a checkpoint; a second one kills the ranks here.

examples:
  ltui join 10.0.0.5:29501 --key-file node.key
  ltui join gpu-01:29501 --detach      (with the key in LTUI_NODE_KEY)

=== key  join:print_key  print a new key for the variable LTUI_NODE_KEY

=== submit  submit:submit  hand a run over to SLURM
[PRESET|FILE]
    the name of a preset, or a LightningCLI configuration file; or a command after `--`
{SET}{_NAME_AND_LABELS}\
--python PATH
    the Python interpreter that trains, as the nodes see it (default: that of the active virtual
    environment)
{_RESTARTS.format("the value in the preset or the configuration file, or 0")}\
--nodes N = 1    nodes (default: 1)
--gpus-per-node G
    GPUs, and so ranks, on each node (default: none; the run trains on the CPU)
--cpus-per-node C
    CPU cores on each node (default: what the cluster gives, often one)
--time TIME      time limit of one job, such as 4:00:00 or 2-12
--partition P    the partition
--account A      the account that pays
--sbatch OPTION[=VALUE] ...
    another option of sbatch, such as --sbatch=qos=high; can be repeated
--checkpoint-time S
    seconds that a checkpoint takes (default: 60); the run stops at least twice this time before
    the time limit
{_FREEZE}\
--after RUN[:ok] ...
    start when the SLURM job of this run has ended; with :ok, if it succeeded; can be repeated
--print          only print the batch script
{JSON}
ltui writes a batch script into a new run directory and submits it with sbatch. The
run is listed as queued until SLURM starts it. Before the time limit and when the
job is preempted, the ranks stop with a checkpoint and the job is requeued; each
start of the job is an attempt of the same run. Options come before the two dashes.

examples:
  ltui submit gpt-fsdp --nodes 2 --gpus-per-node 8 --time 4:00:00 --partition gpu
  ltui submit conf/my.yaml --gpus-per-node 4 --sbatch=qos=high --sbatch=exclusive
  ltui submit --gpus-per-node 1 --time 90 -- python train.py --lr 0.1
  ltui submit quickstart --time 30 --print

=== resume  launch:resume  continue an ended run from its checkpoint
RUN  {RUN_HELP}
--from STEP
    the checkpoint of this step (default: the last good one, which is from before the first NaN);
    `ltui show` lists them
--code {{now,then}}
    of a run with frozen code: train with a copy of the code of now, or go on with the one that the
    run has (default: then)
{SET}{_RESTARTS.format("that of the run")}{_DETACH}{_QUEUE}{_NODES}
A resume is a new attempt of the same run: its curves continue. On a terminal this
opens the dashboard, as `ltui run` does.

examples:
  ltui resume last
  ltui resume brave-owl --set trainer.max_epochs=60
  ltui resume brave-owl --from 1200
  ltui resume brave-owl --restarts 3

=== attach  dashboard:open_dashboard  open the dashboard at a run
[RUN] = last  {RUN_HELP}; HOST:RUN for a run of another machine, by ssh
{READONLY}\
--at TIME  open it at a moment of its past: 03:12 or 2026-11-26T03:12, -12m (before now, or
    before its end), 'step 4000'

examples:
  ltui attach                 open the latest run
  ltui attach brave-owl --readonly
  ltui attach brave-owl --at 03:12
  ltui attach gpu-02:last

=== serve  serve:serve  show the dashboard in a browser
[RUN]           open this run: {RUN_HELP}
--control       let the browser start, stop and change runs
--port N = 8765  the port (default: 8765)
--host ADDRESS = 127.0.0.1
    an address of the loopback interface (default: 127.0.0.1)

Needs the package textual-serve. The server listens on this machine only, and
every page needs the token in the address that is printed. The dashboard is
read-only unless --control is given: then whoever has the address can run any
program as you. docs/serve.md says what protects what.

examples:
  ltui serve                    then open the printed address
  ltui serve last --port 0
  ssh -L 8765:127.0.0.1:8765 gpu-02      (on the machine with the browser)
"""
SETUP_COMMANDS = f"""\
=== presets  presets_and_check:list_all  list the presets
{JSON}
=== check  presets_and_check:check  check a configuration without starting a run
{PRESET}{SET}\
--python PATH  the Python interpreter that loads the model and data classes
--quick        only the checks that do not import torch

First the structure, keys, types and ranges are checked. Then the model and data
classes are loaded in the interpreter that would train, which takes some seconds.

examples:
  ltui check my.yaml
  ltui check quickstart --set trainer.max_epoch=3

=== doctor  doctor:examine  check this machine and name what is missing
{JSON}
Checks the interpreter that would train (packages, malicious releases), the GPUs,
the terminal and the disk, and prints the command that installs what is missing.

=== config  config:config  print, edit or check the configuration file
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

=== demo  dashboard:show_demo  show the dashboard with simulated GPUs or machines
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

=== completion  completion:print_script  print the completion script for a shell
SHELL  one of {", ".join(SHELLS)}
[WORD ...]

examples:
  ltui completion bash > ~/.local/share/bash-completion/completions/ltui
  ltui completion zsh > ~/.zfunc/_ltui          (with ~/.zfunc in $fpath)
  ltui completion fish > ~/.config/fish/completions/ltui.fish
  ltui completion tcsh > ~/.ltui.complete.tcsh  (sourced in ~/.tcshrc)

=== schema  for_programs:schema  print the JSON schema of what --json prints
[COMMAND ...]  only the data of this command (default: of every one)

It is the schema of the answer, {{"schema": 1, "ok": ..., "data": ..., "next": [...],
"truncated": ..., "error": ...}}, with that of each command's data (docs/api.md).

=== skill  for_programs:skill  print a short page about ltui for coding agents
--install DIRECTORY
    write it to DIRECTORY/ltui/SKILL.md; `claude` is .claude/skills, `agents` .agents/skills
--force  replace another page

=== data  -  build, inspect and verify .beton files, which FFCV reads

examples:
  ltui data build photos/ -o photos.beton --max-side 512
  ltui data info photos.beton
  ltui data verify photos.beton

=== data build  data:build  write a dataset as a .beton file
SOURCE  an image folder, torchvision:NAME, or a class path
-o FILE.beton    the file to write
--force          replace the file if it exists
--images {{jpeg,raw,mixed}} = jpeg
    how images are stored; mixed stores every other image raw (default: jpeg)
--max-side N     shrink larger images to N pixels
--quality N = 90
    JPEG quality of images that are encoded again (default: 90)
--page-size MIB = 8
    page size in MiB; a sample must fit into one page (default: 8)
--skip-bad       leave out samples that cannot be read
{_WORKERS}
SOURCE is one of
  photos/                           folder/class/image, with classes in alphabetical order
  torchvision:CIFAR10?train=true    a torchvision dataset, downloaded if necessary
  my_data.Scans?split=train         a class or function that returns an indexed dataset

JPEGs that are small enough are copied byte for byte. The file appears when it is
complete. If a sample cannot be read, it is named, nothing is written and the
exit code is 2; --skip-bad leaves such samples out instead.

=== data info  data:info  show what a .beton file contains
FILE
{JSON}
=== data verify  data:verify  decode every sample and name the damaged ones
FILE
{_WORKERS}
=== bench  -  measure the data loader of a preset alone

=== bench data  data:bench  measure the loader of a preset and torch's DataLoader
--workers N,N,...  the worker counts to try
--seconds S = 4    seconds to read each loader in each round (default: 4)
--rounds N = 3     the number of rounds (default: 3)
{JSON}{_PYTHON}{PRESET}{SET}
Reads the loader alone, and the same data through torch's DataLoader. They take
turns, so that all are measured under the same load of the machine.

examples:
  ltui bench data cifar10-ffcv-resnet18
  ltui bench data my.yaml --set data.init_args.batch_size=256 --workers 1,4,8
"""
