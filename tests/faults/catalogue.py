"""Every fault of the zoo."""

from __future__ import annotations

from tests.faults.fault import GRAVE, Expected, Fault, dead, one

_SAVES = {"ZOO_SAVE_EVERY": "4"}
_SLOW = ("slow",)


FAULTS: tuple[Fault, ...] = (
    # The rank's process.
    Fault("sigstop", "SIGSTOP to a rank", expected=one("stopped")),
    Fault("sigkill", "SIGKILL to a rank", expected=dead("SIGKILL"), bound_s=1),
    Fault("sigkill0", "SIGKILL to rank 0", bound_s=1, expected=dead("SIGKILL", culprits=(0,))),
    Fault("segv", "null pointer in a rank", expected=dead("SIGSEGV|segmentation"), bound_s=1),
    Fault("exit_early", "os._exit(3) in a rank", expected=dead(r"exit\w* (code|with|status)?.*3"),
        bound_s=1),
    Fault("exit_clean", "os._exit(0) in the middle of training", expected=dead(r"exit|ended|left"),
        bound_s=1),
    Fault("exc_one_rank", "exception in one rank", bound_s=1,
        expected=dead("raised ValueError", "the zoo's own mistake")),
    Fault("exc_swallow", "None returned from training_step", bound_s=1,
        expected=dead("training_step", "None")),
    Fault("sys_exit", "SystemExit in one rank", bound_s=1,
        expected=dead(r"SystemExit.*4|exit\w* (code|with|status)?.*4")),
    Fault("oom_rank", "rank out of memory", needs=("cgroup",), bound_s=2,
        expected=dead("out.of.memory|OOM|memory limit"), ranks=2),
    Fault("term_forward", "SIGTERM to one rank", expected=(), ends="stopped"),
    # The data.
    Fault("data_sleep", "stuck in the dataset",
        expected=one("dataset|__getitem__|data", line="data_sleep")),
    Fault("data_socket", "a server that does not answer the dataset",
        expected=one("dataset|__getitem__|data", line="data_socket")),
    Fault("all_frozen", "all ranks stuck in the dataset",
        expected=one("dataset|__getitem__|data", line="all_frozen", culprits=(0, 1, 2))),
    Fault("single_frozen", "the only rank stuck in the dataset", inject="all_frozen", ranks=1,
        expected=one("dataset|__getitem__|data", line="all_frozen", culprits=(0,))),
    Fault("data_gil", "GIL held in C", expected=one("GIL", line="data_gil")),
    Fault("data_spin", "busy loop in the dataset",
        expected=one("busy|loop|CPU|comput|processor", line="data_spin")),
    Fault("data_lock", "deadlocked lock in the dataset",
        expected=one("lock|futex", line="data_lock")),
    Fault("data_slow", "slow data on one rank", expected=one("data|dataset|fetch", levels=_SLOW)),
    Fault("data_crawl", "very slow data on one rank",
        expected=one("data|dataset|fetch", levels=_SLOW, line="all_slow")),
    Fault("all_slow", "slow data on all ranks",
        expected=one("data", levels=("slow", "warning"), culprits=(), also=((0, 1, 2),))),
    Fault("worker_sleep", "DataLoader worker stuck", expected=one("worker", line="data_sleep")),
    Fault("worker_spin", "DataLoader worker in a busy loop",
        expected=one("worker", "busy|loop|CPU|comput|processor", line="data_spin")),
    Fault("worker_lock", "deadlocked lock in a worker",
        expected=one("worker", "lock|futex", line="data_lock")),
    Fault("worker_stop", "DataLoader worker stopped", expected=one("worker", "stopped")),
    Fault("worker_kill", "DataLoader worker killed",
        expected=one("worker", "SIGKILL|killed|exited unexpectedly", levels=GRAVE)),
    Fault("worker_oom", "DataLoader worker out of memory", needs=("cgroup",), ranks=2,
        expected=one("worker", "out.of.memory|OOM|memory limit", levels=GRAVE)),
    Fault("worker_spawn", "spawned worker stuck", inject="worker_sleep+spawn",
        expected=one("worker"), patience_s=60),
    Fault("worker_forkserver", "worker of a fork server stuck", inject="worker_sleep+forkserver",
        expected=one("worker", line="data_sleep"), patience_s=60),
    Fault("shm_full", "shared memory full", needs=("shm",), ranks=2,
        expected=one("shared memory|/dev/shm", levels=(*GRAVE, "warning"))),
    # Computing.
    Fault("forward_sleep", "stuck in training_step",
        expected=one("training_step|forward", line="forward_sleep")),
    Fault("polls_file", "waits for a file that never comes",
        expected=one("training_step|forward", line="polls_file", levels=("stalled", "slow"))),
    Fault("child_program", "waits for a program that does not end",
        expected=one("training_step|forward", "program|process", line="child_program")),
    Fault("logger_sleep", "stuck after a batch on rank 0",
        expected=one("batch", line="logger_sleep", culprits=(0,))),
    Fault("setup_sleep", "stuck in setup", expected=one("setup", line="setup_sleep")),
    Fault("exit_stuck", "a rank that does not exit after training", env={"ZOO_BATCHES": "40"},
        expected=one("end|finish|exit", line="exit_stuck", levels=("stalled", "warning")),
        bound_s=20),
    Fault("one_compute", "endless computing in one rank",
        expected=one("busy|loop|CPU|comput|processor", line="one_compute")),
    Fault("compute_slow", "slow computing on one rank",
        expected=one("comput|forward", levels=_SLOW)),
    Fault(
        "all_compute",
        "25 s of computing on all ranks",
        expected=one(
            "comput|CPU|busy|processor", levels=("slow", "warning"), culprits=(), also=((0, 1, 2),)
        ),
    ),
    Fault("contended", "other processes on a rank's core", ranks=2,
        expected=one("process|processor|CPU|core|contend", levels=_SLOW)),
    # Collectives.
    Fault(
        "rank0_barrier",
        "barrier on rank 0 only",
        expected=one(
            "barrier", "only|match|differ|mismatch|other", culprits=(0,), line="rank0_barrier"
        ),
    ),
    Fault(
        "log_rank0",
        "log(sync_dist) on rank 0 only",
        expected=one(
            "only|match|differ|mismatch|other", culprits=(0,), line="log_rank0", levels=GRAVE
        ),
    ),
    Fault("mismatch_op", "another collective on one rank",
        expected=one("broadcast", "all_reduce", line="mismatch_op", levels=GRAVE)),
    Fault("mismatch_shape", "another shape on one rank", expected=one("size|shape", levels=GRAVE)),
    Fault("unused_params", "parameter unused on one rank",
        expected=one("unused|find_unused_parameters|no gradient", levels=GRAVE)),
    Fault("p2p_recv", "a receive that nobody sends to", expected=one("recv", line="p2p_recv")),
    Fault("group_order", "two groups in another order on one rank",
        expected=one("group|order|match|differ", line="group_order", levels=GRAVE)),
    Fault(
        "call_sites",
        "save_checkpoint on rank 0 only",
        expected=one(
            "call_sites|_save_on_rank_0|call site|different",
            culprits=(0,),
            line="call_sites",
            levels=(*GRAVE, "warning"),
        ),
    ),
    # Checkpoints and disks.
    Fault("ckpt_slow", "checkpoint stuck on rank 0", env=_SAVES,
        expected=one("checkpoint", culprits=(0,), levels=("stalled", "slow"), line="ckpt_slow")),
    Fault("ckpt_bigwrite", "checkpoint slow on rank 0", env=_SAVES,
        expected=one("checkpoint", "writ|moving", culprits=(0,), levels=("slow", "warning")),
        patience_s=60, bound_s=60),
    Fault("frozen_disk", "frozen disk", env=_SAVES, needs=("mount",), ranks=2,
        expected=one(r"uninterruptible|disk|I/O|file system", culprits=(0,))),
    # The loops.
    Fault("uneven", "a batch early out of the training, process ends",
        expected=one("early|batches|ended|finished|left", levels=(*GRAVE, "warning"))),
    Fault("uneven_ckpt", "a batch early out of an epoch, then a checkpoint",
        env={"ZOO_EPOCHS": "3"},
        expected=one(r"epoch 0", r"10 batches|batch counts? differ", levels=(*GRAVE, "warning"))),
    Fault("uneven_drift", "uneven epochs", env={"ZOO_EPOCHS": "200"},
        expected=one("epoch", levels=(*GRAVE, "warning"), also=((0, 2), (0, 1, 2)))),
    Fault("val_uneven", "a batch early out of the validation",
        env={"ZOO_BATCHES": "20", "ZOO_EPOCHS": "3"}, expected=one("validation|val", levels=GRAVE)),
    Fault("val_sleep", "stuck in the validation's dataset",
        env={"ZOO_BATCHES": "20", "ZOO_VAL_BATCHES": "8", "ZOO_EPOCHS": "3"},
        expected=one("validation|val", line="data_sleep")),
    Fault("val_end_sleep", "stuck at the end of the validation",
        env={"ZOO_BATCHES": "20", "ZOO_VAL_BATCHES": "8", "ZOO_EPOCHS": "3"},
        expected=one("validation|val", line="val_end_sleep")),
    Fault("stop_one", "should_stop on one rank",
        expected=one("left_early", "left epoch 0 early", "of 3000 planned", levels=GRAVE)),
    Fault("swallowed", "swallowed error ends an epoch of one rank", env={"ZOO_EPOCHS": "3"},
        expected=one("left epoch 0 early", "8 of 3000", levels=(*GRAVE, "warning"))),
    Fault(
        "nan",
        "loss is NaN from one rank",
        expected=one(
            "loss", "not a finite number|NaN", "step [789]", levels=("warning",), also=((0, 1, 2),)
        ),
    ),
    # The machine.
    Fault("netdown", "network down between the ranks", needs=("network",), ranks=2,
        expected=one("network|transport|connection|acknowledged", culprits=(), also=((0, 1),))),
    Fault("no_rendezvous", "a rank never joins", via="torchrun", ranks=2,
        expected=one("join|init_process_group|rendezvous"), patience_s=60),
    Fault("memory_low", "memory about to run out", needs=("cgroup",), ranks=2,
        expected=one("memory", levels=("warning", "slow"), also=((), (0, 1)))),
    # Two at once.
    Fault(
        "two_faults",
        "one rank stuck, another stopped",
        inject="data_sleep+sigstop3",
        ranks=4,
        expected=(
            Expected(words=("dataset|__getitem__|data",), line="data_sleep"),
            Expected(words=("stopped",), culprits=(3,)),
        ),
    ),
    Fault(
        "two_faults_b",
        "GIL held in one, a worker stopped in another",
        inject="data_gil+worker_stop2",
        ranks=4,
        expected=(
            Expected(words=("GIL",), line="data_gil"),
            Expected(words=("worker", "stopped"), culprits=(2,)),
        ),
    ),
    # The same through torchrun and through a preset.
    Fault("torchrun_kill", "SIGKILL under torchrun", inject="sigkill", via="torchrun", ranks=2,
        expected=dead("SIGKILL"), bound_s=1),
    Fault("torchrun_data", "stuck in the dataset, torchrun", inject="data_sleep", via="torchrun",
        ranks=2, expected=one("dataset|__getitem__|data", line="data_sleep")),
    Fault("preset_stop", "SIGSTOP, a preset's rank", inject="sigstop", via="preset", ranks=2,
        expected=one("stopped")),
    Fault("preset_worker", "worker stuck, a preset's rank", inject="worker_sleep", via="preset",
        ranks=2, expected=one("worker", line="data_sleep")),
    Fault("preset_raise", "exception, a preset's rank", inject="exc_one_rank", via="preset",
        ranks=2, expected=dead("raised ValueError"), bound_s=1),
)  # fmt: skip

BY_ID: dict[str, Fault] = {fault.id: fault for fault in FAULTS}
