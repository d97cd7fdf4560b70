"""Sample the stacks of a slow rank, of a normal one and of their workers: why is it slow?

A user asks for it (``ltui diagnose --sample``), and the supervisor does it once for each verdict on
a straggler. The ranks and workers sample themselves (``rank/stack_sampler.py``). Ranks of a run on
several machines are not sampled.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.diagnosis.evidence import ThreadStack
from ltui.training.diagnosis.judge import Judgement
from ltui.training.diagnosis.sample_report import SampleReport
from ltui.training.diagnosis.stack_samples import SampledRank, StackSamples, compare
from ltui.training.json_codec import from_json, parse_json, to_json
from ltui.training.process.stack_dumps import dump_by_signal, request_samples
from ltui.training.shared.defaults import SAMPLE_S
from ltui.training.shared.regular_files import read_regular
from ltui.training.state.run_snapshot import RunState, Verdict
from ltui.training.state.verdicts import VerdictKind
from ltui.training.store.run_directory import RunDir, write_atomically
from ltui.training.supervise.evidence_collector import EvidenceCollector
from ltui.training.supervise.health_monitor import evidence_dir
from ltui.training.tensor_queue.heartbeat_table import BEAT_S, LATE_S, HeartbeatTable

if TYPE_CHECKING:
    from ltui.training.supervise.live_attempt import LiveAttempt

_GRACE_S = 3.0
"""Seconds after the end of the samples within which a process must have written them."""
_HELD_S = 2 * LATE_S
"""Age of a rank's heartbeat, in seconds, from which on its stack is read by a signal instead."""
_LATE_S = 8.0
"""Seconds for which a rank is waited for in addition if no Python ran in it at first."""
_POLL_S = 0.1
_MAX_BYTES = 16 << 20
_MAX_WORKERS = 4
"""Maximum number of workers of one rank that are sampled."""


class _Target(Struct, frozen=True):
    """One rank to sample, and the pids of its process and of its workers."""

    rank: int
    pid: int
    workers: tuple[int, ...]


class RankSampler:
    """The samples of one attempt: one sampling at a time, in a thread of its own or of a client."""

    def __init__(self, run_dir: RunDir, attempt: int, evidence: EvidenceCollector) -> None:
        """The last report is put into ``evidence``."""
        self._folder = evidence_dir(run_dir, attempt)
        self._table = HeartbeatTable(run_dir.queue_dir(attempt))
        self._evidence = evidence
        self._busy = threading.Lock()
        self._reports: dict[tuple[int, float | None], SampleReport | None] = {}
        """Rank and begin of a verdict on a straggler -> its report; None if there is none yet."""

    @property
    def is_sampling(self) -> bool:
        """Whether ranks are being sampled now."""
        return self._busy.locked()

    def explain(self, judgement: Judgement, live: LiveAttempt) -> Judgement:
        """Return the judgement with what the samples say about stragglers.

        A straggler that has not been sampled since it is one is now. Called by the supervisor's
        loop.
        """
        straggler = _straggler(judgement.verdicts)
        can_sample = live.state is RunState.RUNNING and live.profiles.active is None
        if (
            straggler is not None
            and _key(straggler) not in self._reports
            and can_sample
            and not self.is_sampling
        ):
            self._reports[_key(straggler)] = None
            threading.Thread(
                target=self._sample_straggler, args=(live, straggler), name="samples", daemon=True
            ).start()

        def explained(verdict: Verdict) -> Verdict:
            report = self._reports.get(_key(verdict)) if _is_straggler(verdict) else None
            if report is None or not report.differs:
                return verdict
            sentence = report.sentence[:1].upper() + report.sentence[1:]
            return replace(verdict, cause=f"{verdict.cause}. {sentence}")

        return replace(
            judgement,
            verdicts=tuple(map(explained, judgement.verdicts)),
            ended=tuple(map(explained, judgement.ended)),
        )

    def _sample_straggler(self, live: LiveAttempt, straggler: Verdict) -> None:
        try:
            self._sample(live, straggler)
        except ValueError:
            pass  # what a user would be told; the verdict does without
        except Exception as error:  # noqa: BLE001 - the thread's top: the verdict does without
            print(f"the samples of ranks failed: {error!r:.200}", flush=True)

    def answer(self, live: LiveAttempt) -> dict[str, Any]:
        """Return the answer to a client's request for samples, in its thread.

        Raises ``ValueError`` if the ranks cannot be sampled.
        """
        if live.state is not RunState.RUNNING:
            raise ValueError(f"it is {live.state.value}; only a run that trains can be sampled.")
        report = self._sample(live, _straggler(live.snapshot.verdicts))
        return {"ok": True, "samples": to_json(report)}

    def _sample(self, live: LiveAttempt, straggler: Verdict | None) -> SampleReport:
        """Sample the slowest rank and a normal one. Raises ``ValueError``.

        If they are being sampled already, wait for the report.
        """
        asked_at = time.time()
        with self._busy:
            last = self._evidence.samples
            if last is not None and last.taken_at > asked_at:
                return last
            if live.spec.nodes is not None:
                raise ValueError("its ranks are on several machines, so they cannot be sampled.")
            if (profile := live.profiles.active) is not None:
                raise ValueError(f"profile {profile.number} is running. Wait until it is over.")
            targets = self._choose(live, straggler)
            ranks = [target.rank for target in targets]
            try:
                request = self._table.request_samples((ranks[0], ranks[-1]))
            except OSError as error:
                raise ValueError(f"its ranks cannot be asked ({error.strerror}).") from error
            sampled = self._collect(targets, request)
            report = compare(sampled[0], sampled[1] if len(sampled) > 1 else None, time.time())
            if straggler is not None and straggler.culprits == (ranks[0],):
                self._reports[_key(straggler)] = report
            self._evidence.samples = report
            return report

    def _choose(self, live: LiveAttempt, straggler: Verdict | None) -> list[_Target]:
        """Return the rank to explain and a normal one, if there is one. Raises ``ValueError``."""
        alive = self._table.read().keys() & live.local_ranks()
        order = [rank for rank in live.limits.slowest_first(live.fold) if rank in alive]
        slow = straggler.culprits[0] if straggler is not None else next(iter(order), None)
        if slow not in order:
            raise ValueError("its ranks send nothing to ltui, so they cannot be sampled.")
        order.remove(slow)
        return [
            _Target(rank, live.machine.rank_processes[rank].pid, self._evidence.workers_of(rank))
            for rank in (slow, *order[len(order) // 2 :][:1])
        ]

    def _collect(self, targets: Sequence[_Target], request: int) -> list[SampledRank]:
        """Wait for the samples of the ranks and of their workers."""
        missing: dict[int, str] = {}
        waiting = {target.pid for target in targets}
        for pid in [pid for target in targets for pid in target.workers[:_MAX_WORKERS]]:
            write_atomically(self._folder / f"sample-{pid}", str(request).encode())
            reason = request_samples(pid, self._folder)
            missing[pid] = reason or "it did not answer"
            waiting |= set() if reason else {pid}
        samples: dict[int, StackSamples] = {}
        held: dict[int, ThreadStack] = {}
        deadline_s = time.monotonic() + SAMPLE_S + BEAT_S + _GRACE_S
        while len(samples) < len(waiting) and time.monotonic() < deadline_s + _LATE_S * bool(held):
            time.sleep(_POLL_S)
            for pid in waiting - samples.keys():
                answer = self._read(pid)
                if answer is not None and answer.request == request:
                    samples[pid] = answer
            for target in targets:
                if target.pid not in samples and target.rank not in held:
                    self._read_held(target, held)
        for pid in missing:
            (self._folder / f"sample-{pid}").unlink(missing_ok=True)
        return [
            SampledRank(
                rank=target.rank,
                main=samples.get(target.pid),
                held_at=held.get(target.rank),
                workers=tuple(samples[pid] for pid in target.workers if pid in samples),
                missing=_missing(target, samples, held, missing),
            )
            for target in targets
        ]

    def _read_held(self, target: _Target, held: dict[int, ThreadStack]) -> None:
        """Read the stack of a rank in which no Python runs, by a signal."""
        beat = self._table.read().get(target.rank)
        if beat is None or time.monotonic_ns() - beat.beat_ns < _HELD_S * 1e9:
            return
        stacks = dump_by_signal(target.pid, self._folder, python_stands=True)
        for stack in stacks if isinstance(stacks, tuple) else ():
            if stack.main and stack.frames:
                held[target.rank] = stack

    def _read(self, pid: int) -> StackSamples | None:
        try:
            document = parse_json(read_regular(self._folder / f"samples-{pid}.json", _MAX_BYTES))
            return from_json(StackSamples, document, tolerant=True)
        except (OSError, ValueError):
            return None


def _missing(
    target: _Target,
    samples: Mapping[int, StackSamples],
    held: Mapping[int, ThreadStack],
    reasons: Mapping[int, str],
) -> tuple[str, ...]:
    """Return what could not be sampled of a rank, and why."""
    missing = []
    if target.pid not in samples:
        reason = "no Python ran in it" if target.rank in held else "it did not answer"
        missing.append(f"no samples, because {reason}")
    chosen = target.workers[:_MAX_WORKERS]
    for reason in dict.fromkeys(reasons[pid] for pid in chosen if pid not in samples):
        missing.append(f"a worker was not sampled: {reason}")
    if len(target.workers) > len(chosen):
        missing.append(f"only {len(chosen)} of its {len(target.workers)} workers were sampled")
    return tuple(missing)


def _straggler(verdicts: Sequence[Verdict]) -> Verdict | None:
    return next((verdict for verdict in verdicts if _is_straggler(verdict)), None)


def _is_straggler(verdict: Verdict) -> bool:
    return verdict.kind == VerdictKind.STRAGGLER and len(verdict.culprits) == 1


def _key(verdict: Verdict) -> tuple[int, float | None]:
    return verdict.culprits[0], verdict.began
