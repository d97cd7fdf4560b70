"""What is true of a run, whoever of its processes died: for front ends, without a supervisor.

The supervisor's own word is taken while it is alive. After that the store, the lock, the pulses and
``/proc`` tell whether the ranks go on without it, or how far the run had come.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

from ltui.training.queue.records import PulseState
from ltui.training.run.fold import Fold
from ltui.training.run.progress import progress, rank_snapshots
from ltui.training.run.snapshot import (
    LIVE,
    RankSnapshot,
    RankState,
    RunSnapshot,
    RunState,
)
from ltui.training.store.home import RunDir
from ltui.training.store.manifest import checkpoints
from ltui.training.store.reader import RunStore
from ltui.training.supervise.alive import ProcessMark, boot_id, lock_holder
from ltui.training.supervise.client import ControlClient
from ltui.training.supervise.ending import Facts, ending
from ltui.training.supervise.marks import engine_exit, keeper_mark, latest_attempt
from ltui.training.supervise.watch import rank_alive, read_pulses


def true_snapshot(run_dir: RunDir) -> RunSnapshot:
    """The run as it is now. ``StoreError`` or ``ProblemError`` where its files can't be read."""
    holder = lock_holder(run_dir.lock_path)
    if holder is not None:
        answer = ControlClient(run_dir).status(timeout_s=1.0)
        if answer is not None:
            return answer
    stored = _stored(run_dir)
    if stored.state not in LIVE:
        return replace(stored, supervisor_pid=None)
    pulses = read_pulses(run_dir.queue_dir(stored.attempt))
    now = _moved(stored, pulses)
    if holder is not None and holder.alive():
        return replace(
            now,
            detail=f"the supervisor (pid {holder.pid}) does not answer",
            supervisor_pid=holder.pid,
        )
    return _unsupervised(run_dir, now, pulses)


def _stored(run_dir: RunDir) -> RunSnapshot:
    """As last written; where nothing was yet, what the specification says."""
    if run_dir.db_path.exists() and run_dir.db_path.stat().st_size:
        with RunStore(run_dir) as store:
            return store.snapshot()
    spec = run_dir.read_spec()
    return RunSnapshot(
        id=run_dir.id,
        name=spec.name,
        state=RunState.QUEUED,
        preset=spec.preset,
        command=spec.command,
        created_at=spec.created_at,
        world_size=spec.nproc or None,
        run_dir=str(run_dir.path),
        log_dir=str(run_dir.logs_dir(1)),
    )


def _moved(stored: RunSnapshot, pulses: Mapping[int, PulseState | None]) -> RunSnapshot:
    """``stored``, where the ranks are now as far as pulses tell."""
    found = progress(Fold(), pulses, time.monotonic_ns())
    return replace(
        stored,
        taken_at=time.time(),
        epoch=stored.epoch if found.epoch is None else found.epoch,
        global_step=stored.global_step if found.global_step is None else found.global_step,
    )


def _unsupervised(
    run_dir: RunDir, stored: RunSnapshot, pulses: Mapping[int, PulseState | None]
) -> RunSnapshot:
    keeper = keeper_mark(run_dir)
    alive = {r for r, p in pulses.items() if p is not None and rank_alive(p)}
    ranks = _ranks(stored, pulses, alive)
    exit_ = engine_exit(run_dir, latest_attempt(run_dir) or stored.attempt)
    if keeper is not None and keeper.alive():
        detail = "its supervisor died; the keeper starts another"
        return replace(stored, supervisor_pid=None, ranks=ranks, detail=detail)
    if alive:
        detail = f"its supervisor died; {len(alive)} ranks go on without one"
        return replace(stored, supervisor_pid=None, ranks=ranks, detail=detail)
    found = ending(
        Facts(
            exit=exit_,
            keeper_died=False,
            pulses=pulses,
            rebooted=_rebooted(run_dir, keeper),
            checkpoints=tuple(checkpoints(run_dir.checkpoints_dir)),
            foreign=stored.command is not None,
            global_step=stored.global_step,
        )
    )
    return replace(
        stored,
        supervisor_pid=None,
        ranks=tuple(replace(r, state=_final(r)) for r in ranks),
        state=found.state,
        detail=found.detail,
        exit_code=found.exit_code,
        ended_at=exit_.ended_at if exit_ else stored.taken_at,
        eta_s=None,
        verdicts=(),
    )


def _rebooted(run_dir: RunDir, keeper: ProcessMark | None) -> bool:
    """Whether the run's processes belong to an earlier boot of the machine."""
    try:
        lines = run_dir.lock_path.read_text().split("\n")
    except OSError:
        return False
    return keeper is None and len(lines) > 2 and lines[2] not in ("", boot_id())


def _ranks(
    stored: RunSnapshot, pulses: Mapping[int, PulseState | None], alive: set[int]
) -> tuple[RankSnapshot, ...]:
    """The stored ranks, moved to where their pulses are."""
    states = {
        rank: RankState.OK if rank in alive else RankState.DEAD
        for rank, pulse in pulses.items()
        if pulse is not None
    }
    fresh = {r.rank: r for r in rank_snapshots(Fold(), pulses, states, time.monotonic_ns())}
    known = {r.rank: r for r in stored.ranks}
    merged = []
    for rank in sorted({*fresh, *known}):
        old, new = known.get(rank), fresh.get(rank)
        if old is None or new is None:
            merged.append(old or new)
            continue
        merged.append(
            replace(
                old,
                pid=new.pid,
                state=new.state,
                phase=new.phase,
                epoch=new.epoch,
                batch=new.batch,
                global_step=new.global_step,
                age_s=new.age_s,
                cpu_percent=None,
                rss_bytes=None,
                samples_per_s=None,
            )
        )
    return tuple(rank for rank in merged if rank is not None)


def _final(rank: RankSnapshot) -> RankState:
    return RankState.ENDED if rank.state is RankState.ENDED else RankState.DEAD
