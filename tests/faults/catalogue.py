"""Every fault of the zoo."""

from __future__ import annotations

from tests.faults.fault import GRAVE, Expected, Fault, dead, one

_SAVES = {"ZOO_SAVE_EVERY": "4"}
_SLOW = ("slow",)


FAULTS: tuple[Fault, ...] = (
    # The rank's process.
    Fault(id="sigstop", title="SIGSTOP to a rank", expected=one("stopped")),
    Fault(id="sigkill", title="SIGKILL to a rank", expected=dead("SIGKILL"), bound_s=1),
    Fault(
        id="sigkill0",
        title="SIGKILL to rank 0",
        bound_s=1,
        expected=dead("SIGKILL", culprits=(0,)),
    ),
    Fault(
        id="segv", title="null pointer in a rank", expected=dead("SIGSEGV|segmentation"), bound_s=1
    ),
    Fault(
        id="exit_early",
        title="os._exit(3) in a rank",
        expected=dead(r"exit\w* (code|with|status)?.*3"),
        bound_s=1,
    ),
    Fault(
        id="exit_clean",
        title="os._exit(0) in the middle of training",
        expected=dead(r"exit|ended|left"),
        bound_s=1,
    ),
    Fault(
        id="exc_one_rank",
        title="exception in one rank",
        bound_s=1,
        expected=dead("raised ValueError", "the zoo's own mistake"),
    ),
    Fault(
        id="exc_swallow",
        title="None returned from training_step",
        bound_s=1,
        expected=dead("training_step", "None"),
    ),
    Fault(
        id="sys_exit",
        title="SystemExit in one rank",
        bound_s=1,
        expected=dead(r"SystemExit.*4|exit\w* (code|with|status)?.*4"),
    ),
    Fault(
        id="oom_rank",
        title="rank out of memory",
        needs=("cgroup",),
        bound_s=2,
        expected=dead("out.of.memory|OOM|memory limit"),
        ranks=2,
    ),
    Fault(
        id="term_forward",
        title="SIGTERM to one rank",
        expected=(),
        ends="stopped",
    ),
    # The data.
    Fault(
        id="data_sleep",
        title="stuck in the dataset",
        expected=one("dataset|__getitem__|data", line="data_sleep"),
    ),
    Fault(
        id="data_socket",
        title="a server that does not answer the dataset",
        expected=one("dataset|__getitem__|data", line="data_socket"),
    ),
    Fault(
        id="all_frozen",
        title="all ranks stuck in the dataset",
        expected=one("dataset|__getitem__|data", line="all_frozen", culprits=(0, 1, 2)),
    ),
    Fault(
        id="single_frozen",
        title="the only rank stuck in the dataset",
        inject="all_frozen",
        ranks=1,
        expected=one("dataset|__getitem__|data", line="all_frozen", culprits=(0,)),
    ),
    Fault(id="data_gil", title="GIL held in C", expected=one("GIL", line="data_gil")),
    Fault(
        id="data_spin",
        title="busy loop in the dataset",
        expected=one("busy|loop|CPU|comput|processor", line="data_spin"),
    ),
    Fault(
        id="data_lock",
        title="deadlocked lock in the dataset",
        expected=one("lock|futex", line="data_lock"),
    ),
    Fault(
        id="data_slow",
        title="slow data on one rank",
        expected=one("data|dataset|fetch", levels=_SLOW),
    ),
    Fault(
        id="data_crawl",
        title="very slow data on one rank",
        expected=one("data|dataset|fetch", levels=_SLOW, line="all_slow"),
    ),
    Fault(
        id="all_slow",
        title="slow data on all ranks",
        expected=one("data", levels=("slow", "warning"), culprits=(), also=((0, 1, 2),)),
    ),
    Fault(
        id="worker_sleep",
        title="DataLoader worker stuck",
        expected=one("worker", line="data_sleep"),
    ),
    Fault(
        id="worker_spin",
        title="DataLoader worker in a busy loop",
        expected=one("worker", "busy|loop|CPU|comput|processor", line="data_spin"),
    ),
    Fault(
        id="worker_lock",
        title="deadlocked lock in a worker",
        expected=one("worker", "lock|futex", line="data_lock"),
    ),
    Fault(id="worker_stop", title="DataLoader worker stopped", expected=one("worker", "stopped")),
    Fault(
        id="worker_kill",
        title="DataLoader worker killed",
        expected=one("worker", "SIGKILL|killed|exited unexpectedly", levels=GRAVE),
    ),
    Fault(
        id="worker_oom",
        title="DataLoader worker out of memory",
        needs=("cgroup",),
        ranks=2,
        expected=one("worker", "out.of.memory|OOM|memory limit", levels=GRAVE),
    ),
    Fault(
        id="worker_spawn",
        title="spawned worker stuck",
        inject="worker_sleep+spawn",
        expected=one("worker"),
        patience_s=60,
    ),
    Fault(
        id="worker_forkserver",
        title="worker of a fork server stuck",
        inject="worker_sleep+forkserver",
        expected=one("worker", line="data_sleep"),
        patience_s=60,
    ),
    Fault(
        id="shm_full",
        title="shared memory full",
        needs=("shm",),
        ranks=2,
        expected=one("shared memory|/dev/shm", levels=(*GRAVE, "warning")),
    ),
    # Computing.
    Fault(
        id="forward_sleep",
        title="stuck in training_step",
        expected=one("training_step|forward", line="forward_sleep"),
    ),
    Fault(
        id="polls_file",
        title="waits for a file that never comes",
        expected=one("training_step|forward", line="polls_file", levels=("stalled", "slow")),
    ),
    Fault(
        id="child_program",
        title="waits for a program that does not end",
        expected=one("training_step|forward", "program|process", line="child_program"),
    ),
    Fault(
        id="logger_sleep",
        title="stuck after a batch on rank 0",
        expected=one("batch", line="logger_sleep", culprits=(0,)),
    ),
    Fault(id="setup_sleep", title="stuck in setup", expected=one("setup", line="setup_sleep")),
    Fault(
        id="exit_stuck",
        title="a rank that does not exit after training",
        env={"ZOO_BATCHES": "40"},
        expected=one("end|finish|exit", line="exit_stuck", levels=("stalled", "warning")),
        bound_s=20,
    ),
    Fault(
        id="one_compute",
        title="endless computing in one rank",
        expected=one("busy|loop|CPU|comput|processor", line="one_compute"),
    ),
    Fault(
        id="compute_slow",
        title="slow computing on one rank",
        expected=one("comput|forward", levels=_SLOW),
    ),
    Fault(
        id="all_compute",
        title="25 s of computing on all ranks",
        expected=one(
            "comput|CPU|busy|processor", levels=("slow", "warning"), culprits=(), also=((0, 1, 2),)
        ),
    ),
    Fault(
        id="contended",
        title="other processes on a rank's core",
        ranks=2,
        expected=one("process|processor|CPU|core|contend", levels=_SLOW),
    ),
    # Collectives.
    Fault(
        id="rank0_barrier",
        title="barrier on rank 0 only",
        expected=one(
            "barrier", "only|match|differ|mismatch|other", culprits=(0,), line="rank0_barrier"
        ),
    ),
    Fault(
        id="log_rank0",
        title="log(sync_dist) on rank 0 only",
        expected=one(
            "only|match|differ|mismatch|other", culprits=(0,), line="log_rank0", levels=GRAVE
        ),
    ),
    Fault(
        id="mismatch_op",
        title="another collective on one rank",
        expected=one("broadcast", "all_reduce", line="mismatch_op", levels=GRAVE),
    ),
    Fault(
        id="mismatch_shape",
        title="another shape on one rank",
        expected=one("size|shape", levels=GRAVE),
    ),
    Fault(
        id="unused_params",
        title="parameter unused on one rank",
        expected=one("unused|find_unused_parameters|no gradient", levels=GRAVE),
    ),
    Fault(
        id="p2p_recv",
        title="a receive that nobody sends to",
        expected=one("recv", line="p2p_recv"),
    ),
    Fault(
        id="group_order",
        title="two groups in another order on one rank",
        expected=one("group|order|match|differ", line="group_order", levels=GRAVE),
    ),
    Fault(
        id="call_sites",
        title="save_checkpoint on rank 0 only",
        expected=one(
            "call_sites|_save_on_rank_0|call site|different",
            culprits=(0,),
            line="call_sites",
            levels=(*GRAVE, "warning"),
        ),
    ),
    # Checkpoints and disks.
    Fault(
        id="ckpt_slow",
        title="checkpoint stuck on rank 0",
        env=_SAVES,
        expected=one("checkpoint", culprits=(0,), levels=("stalled", "slow"), line="ckpt_slow"),
    ),
    Fault(
        id="ckpt_bigwrite",
        title="checkpoint slow on rank 0",
        env=_SAVES,
        expected=one("checkpoint", "writ|moving", culprits=(0,), levels=("slow", "warning")),
        patience_s=60,
        bound_s=60,
    ),
    Fault(
        id="frozen_disk",
        title="frozen disk",
        env=_SAVES,
        needs=("mount",),
        ranks=2,
        expected=one(r"uninterruptible|disk|I/O|file system", culprits=(0,)),
    ),
    # The loops.
    Fault(
        id="uneven",
        title="a batch early out of the training, process ends",
        expected=one("early|batches|ended|finished|left", levels=(*GRAVE, "warning")),
    ),
    Fault(
        id="uneven_ckpt",
        title="a batch early out of an epoch, then a checkpoint",
        env={"ZOO_EPOCHS": "3"},
        expected=one(r"epoch 0", r"10 batches|batch counts? differ", levels=(*GRAVE, "warning")),
    ),
    Fault(
        id="uneven_drift",
        title="uneven epochs",
        env={"ZOO_EPOCHS": "200"},
        expected=one("epoch", levels=(*GRAVE, "warning"), also=((0, 2), (0, 1, 2))),
    ),
    Fault(
        id="val_uneven",
        title="a batch early out of the validation",
        env={"ZOO_BATCHES": "20", "ZOO_EPOCHS": "3"},
        expected=one("validation|val", levels=GRAVE),
    ),
    Fault(
        id="val_sleep",
        title="stuck in the validation's dataset",
        env={"ZOO_BATCHES": "20", "ZOO_VAL_BATCHES": "8", "ZOO_EPOCHS": "3"},
        expected=one("validation|val", line="data_sleep"),
    ),
    Fault(
        id="val_end_sleep",
        title="stuck at the end of the validation",
        env={"ZOO_BATCHES": "20", "ZOO_VAL_BATCHES": "8", "ZOO_EPOCHS": "3"},
        expected=one("validation|val", line="val_end_sleep"),
    ),
    Fault(
        id="stop_one",
        title="should_stop on one rank",
        expected=one("left_early", "left epoch 0 early", "of 3000 planned", levels=GRAVE),
    ),
    Fault(
        id="swallowed",
        title="swallowed error ends an epoch of one rank",
        env={"ZOO_EPOCHS": "3"},
        expected=one("left epoch 0 early", "8 of 3000", levels=(*GRAVE, "warning")),
    ),
    Fault(
        id="nan",
        title="loss is NaN from one rank",
        expected=one(
            "loss", "not a finite number|NaN", "step [789]", levels=("warning",), also=((0, 1, 2),)
        ),
    ),
    # The machine.
    Fault(
        id="netdown",
        title="network down between the ranks",
        needs=("network",),
        ranks=2,
        expected=one("network|transport|connection|acknowledged", culprits=(), also=((0, 1),)),
    ),
    Fault(
        id="no_rendezvous",
        title="a rank never joins",
        via="torchrun",
        ranks=2,
        expected=one("join|init_process_group|rendezvous"),
        patience_s=60,
    ),
    Fault(
        id="memory_low",
        title="memory about to run out",
        needs=("cgroup",),
        ranks=2,
        expected=one("memory", levels=("warning", "slow"), also=((), (0, 1))),
    ),
    # Two at once.
    Fault(
        id="two_faults",
        title="one rank stuck, another stopped",
        inject="data_sleep+sigstop3",
        ranks=4,
        expected=(
            Expected(words=("dataset|__getitem__|data",), line="data_sleep"),
            Expected(words=("stopped",), culprits=(3,)),
        ),
    ),
    Fault(
        id="two_faults_b",
        title="GIL held in one, a worker stopped in another",
        inject="data_gil+worker_stop2",
        ranks=4,
        expected=(
            Expected(words=("GIL",), line="data_gil"),
            Expected(words=("worker", "stopped"), culprits=(2,)),
        ),
    ),
    # The same through torchrun and through a preset.
    Fault(
        id="torchrun_kill",
        title="SIGKILL under torchrun",
        inject="sigkill",
        via="torchrun",
        ranks=2,
        expected=dead("SIGKILL"),
        bound_s=1,
    ),
    Fault(
        id="torchrun_data",
        title="stuck in the dataset, torchrun",
        inject="data_sleep",
        via="torchrun",
        ranks=2,
        expected=one("dataset|__getitem__|data", line="data_sleep"),
    ),
    Fault(
        id="preset_stop",
        title="SIGSTOP, a preset's rank",
        inject="sigstop",
        via="preset",
        ranks=2,
        expected=one("stopped"),
    ),
    Fault(
        id="preset_worker",
        title="worker stuck, a preset's rank",
        inject="worker_sleep",
        via="preset",
        ranks=2,
        expected=one("worker", line="data_sleep"),
    ),
    Fault(
        id="preset_raise",
        title="exception, a preset's rank",
        inject="exc_one_rank",
        via="preset",
        ranks=2,
        expected=dead("raised ValueError"),
        bound_s=1,
    ),
)

BY_ID: dict[str, Fault] = {fault.id: fault for fault in FAULTS}
