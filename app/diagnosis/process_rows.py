"""The processes of a diagnosis as rows: ranks, their DataLoader workers, the machine. Pure.

Up to eight ranks have a row each. Of more ranks, the culprits have a row each and the others share
rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ltui.training.diagnosis.evidence import (
    Evidence,
    Frame,
    HostEvidence,
    ProcessActivity,
    RankEvidence,
    StackGroup,
    WorkerEvidence,
)
from ltui.training.diagnosis.verdict_words import NO_MACHINES, ranks_text
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell, ProcessRow

USER_CODE_MARK = "▸ "
"""Mark before a call in the user's own code."""
_IMPORTING = "<frozen importlib"
MAX_CALLS_BELOW = 3
"""Number of library calls shown of those that the user's code called; the rest is folded."""
MAX_CALLERS = 1
"""Number of library calls shown of those that called the user's code."""
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/(?P<rest>.+)")
_STANDARD_LIBRARY = re.compile(r".*/lib(?:64)?/python3(?:\.\d+)?/(?P<rest>.+)")
_RANK_SIDE = re.compile(r".*/rank-side/[^/]+/(?P<rest>ltui/.+)")
_OF_PRESETS = re.compile(r"ltui/training/(?:models|data)/.+")
"""Modules that the shipped presets train. For a person who runs a preset they are the user's
code."""


def in_library(path: str) -> str | None:
    """Return the path inside an installed package, Python or ltui, or None for the user's code."""
    for pattern in (_RANK_SIDE, _PACKAGES, _STANDARD_LIBRARY):
        if (match := pattern.fullmatch(path)) is not None:
            return None if _OF_PRESETS.fullmatch(match["rest"]) else match["rest"]
    return path if path.startswith("<") or path.endswith((".so", ".c", ".cpp")) else None


def frame_location(frame: Frame, *, full_paths: bool = False) -> str:
    """Return ``data/augment.py:88 __call__``. With ``full_paths``, user code has its complete
    path."""
    inside = in_library(frame.file)
    if inside is not None:
        path = inside
    elif full_paths:
        path = frame.file
    else:
        path = "/".join(frame.file.rsplit("/", 2)[-2:])
    where = f"{clean_name(path)}:{frame.line}" if frame.line > 0 else clean_name(path)
    return f"{where} {clean_name(frame.function)}"


def stack_lines(frames: Sequence[Frame], *, full_paths: bool = False) -> tuple[Cell, ...]:
    """Return the lines of a stack, innermost call first. In a report nothing is folded."""
    lines: list[Cell] = []
    library: list[Frame] = []
    user_code_seen = False

    def fold(shown_calls: int) -> None:
        informative = [f for f in library if not f.file.startswith(_IMPORTING)]
        folds = not full_paths and len(library) > shown_calls + 1
        shown = informative[:shown_calls] if folds else library
        lines.extend(
            Cell(text=f"  {frame_location(f, full_paths=full_paths)}", tone=Tone.DIM) for f in shown
        )
        if len(shown) < len(library):
            hidden = [f for f in library if f not in shown]
            lines.append(
                Cell(text=f"  … {len(hidden)} calls in {_package_names(hidden)}", tone=Tone.DIM)
            )
        library.clear()

    for frame in frames:
        if in_library(frame.file) is not None:
            library.append(frame)
            continue
        fold(MAX_CALLERS if user_code_seen else MAX_CALLS_BELOW)
        user_code_seen = True
        lines.append(
            Cell(
                text=f"{USER_CODE_MARK}{frame_location(frame, full_paths=full_paths)}",
                tone=Tone.ACCENT,
            )
        )
    fold(MAX_CALLERS if user_code_seen else MAX_CALLS_BELOW)
    return tuple(lines)


def _package_names(frames: Sequence[Frame]) -> str:
    """Return the packages of some calls in order of appearance: ``torch, lightning``."""
    names = (clean_name((in_library(f.file) or f.file).lstrip("/").split("/")[0]) for f in frames)
    plain = (re.sub(r"^<frozen ([\w]+).*", r"\1", name).removesuffix(".py") for name in names)
    shown = list(dict.fromkeys(plain))
    return ", ".join(shown[:3]) + (", ..." if len(shown) > 3 else "")


def stack_title(group: StackGroup, culprits: set[int]) -> str:
    """Return ``! rank 1``, ``ranks 0, 2, 3 alike`` or ``worker 4711 of rank 1``."""
    sign = "! " if culprits & set(group.ranks) else ""
    plain = all(re.fullmatch(r"rank \d+", who) for who in group.who)
    if plain and group.ranks:
        alike = " alike" if len(set(group.ranks)) > 1 else ""
        return f"{sign}{formats.rank_words(group.ranks)}{alike}"
    named = [clean_name(who) for who in group.who]
    more = f" and {len(named) - 4} more" if len(named) > 4 else ""
    suffix = " alike" if len(named) > 1 else ""
    return f"{sign}{', '.join(named[:4])}{more}{suffix}"


MAX_SINGLE_ROWS = 8
"""Maximum number of processes of one kind with a row of their own."""
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting for I/O",
    "T": "STOPPED",
    "t": "STOPPED by a debugger",
    "Z": "zombie",
    "X": "DEAD",
    "I": "idle",
}
"""The state letters of ``/proc/PID/stat`` as words."""


def process_rows(
    evidence: Evidence,
    culprits: set[int],
    waiting: set[int],
    machines: Mapping[int, str] = NO_MACHINES,
) -> tuple[ProcessRow, ...]:
    """Return the rows of all processes, the culprits first.

    ``machines`` is rank -> name of its machine, in a run on several.
    """
    ranks = sorted(evidence.ranks.values(), key=lambda r: r.rank)
    all_fit = len(ranks) <= MAX_SINGLE_ROWS
    named = sorted(culprits)[:MAX_SINGLE_ROWS]
    single = [r for r in ranks if all_fit or r.rank in named]
    rows: list[ProcessRow] = []
    for rank in sorted(single, key=lambda r: (r.rank not in culprits, r.rank)):
        rows.append(_rank_row(rank, culprits, waiting, machines))
        rows += _worker_rows(rank, rank.rank in culprits)
    rows += _merged_rows([r for r in ranks if r not in single])
    return tuple(rows)


def _rank_row(
    rank: RankEvidence, culprits: set[int], waiting: set[int], machines: Mapping[int, str]
) -> ProcessRow:
    marked = rank.rank in culprits
    sign = "! " if marked else "… " if rank.rank in waiting else "  "
    where = [clean_name(rank.phase or "", 60)]
    if rank.barrier:
        where.append(f"barrier {clean_name(rank.barrier, 60)}")
    if rank.still_s is not None and rank.still_s >= 1 and rank.alive is not False:
        where.append(f"for {formats.age(rank.still_s)}")
    notes = [" ".join(w for w in where if w), _gil_note(rank), _wait_note(rank.process)]
    return _process_row(
        f"{sign}{clean_name(ranks_text((rank.rank,), machines), 60)}",
        rank.process,
        rank.pid,
        _end_text(rank),
        ", ".join(n for n in notes if n),
        bad=marked,
        marked=marked,
    )


def _end_text(rank: RankEvidence) -> str | None:
    """Return how the rank's process ended, or None if it is alive."""
    if rank.alive is not False:
        return None
    return clean_line(rank.how_ended, 120) if rank.how_ended else "gone"


def _gil_note(rank: RankEvidence) -> str:
    """Return a note if the rank's heartbeat thread has not run: a C call keeps the GIL."""
    stopped = rank.process is not None and rank.process.state in ("T", "t")
    if rank.alive is False or stopped or rank.beat_age_s is None or rank.beat_age_s < 3:
        return ""
    return f"no Python code ran for {formats.age(rank.beat_age_s)}"


def _wait_note(process: ProcessActivity | None) -> str:
    if process is None:
        return ""
    parts = []
    if process.run_delay_share is not None and process.run_delay_share >= 0.2:
        parts.append(f"waits {formats.percent(process.run_delay_share)} of the time for a CPU core")
    if process.wait_channel and process.wait_channel != "0":
        # The suffix that the compiler adds to a function's name is of no use to a reader.
        parts.append(f"in {clean_name(process.wait_channel.split('.')[0], 40)}")
    return " ".join(parts)


def _process_state(process: ProcessActivity | None, *, marked: bool) -> str:
    """Return the state of a process, such as ``sleeping, FROZEN``.

    FROZEN means that it neither switched context nor computed while it was observed. Only culprits
    and their workers are marked so, because a rank that waits for another one is just as idle.
    """
    state = process.state if process is not None else None
    word = _STATES.get(state or "", state or formats.NA)
    frozen = marked and process is not None and process.frozen and state in ("S", "R")
    return f"{word}, FROZEN" if frozen else word


def _process_row(
    who: str,
    process: ProcessActivity | None,
    pid: int | None,
    ended: str | None,
    note: str,
    *,
    bad: bool = False,
    marked: bool,
) -> ProcessRow:
    doing = ended or _process_state(process, marked=marked)
    loud = bad or doing.startswith(("STOPPED", "DEAD", "waiting for I/O"))
    share = process.cpu_share if process is not None else None
    return ProcessRow(
        owner=who,
        pid=formats.NA if pid is None else str(pid),
        state=Cell(text=clean_name(doing), tone=Tone.BAD if loud else Tone.PLAIN),
        cpu=formats.percent(share),
        memory=formats.size(process.rss_bytes if process is not None else None),
        note=note,
    )


def _worker_rows(rank: RankEvidence, marked: bool) -> list[ProcessRow]:
    """Return the DataLoader workers of a rank: unusual ones alone, the others in one row."""
    unusual = [w for w in rank.workers if w.gone or (w.process.state or "S") in "TtDZX"]
    if marked and len(rank.workers) <= MAX_SINGLE_ROWS:
        unusual = list(rank.workers)
    rows = [_worker_row(worker, marked) for worker in unusual[:MAX_SINGLE_ROWS]]
    usual = [w for w in rank.workers if w not in unusual]
    if usual:
        owner = f"    {len(usual)} {'workers' if len(usual) > 1 else 'worker'}"
        rows.append(_shared_row(owner, "", "normal", [w.process for w in usual]))
    return rows


def _worker_row(worker: WorkerEvidence, marked: bool) -> ProcessRow:
    kind = "worker" if worker.loader else clean_name(worker.process.name or "child", 16)
    ended = (worker.exit_reason or "gone") if worker.gone else None
    return _process_row(
        f"    {kind}",
        worker.process,
        worker.process.pid,
        clean_line(ended, 120) if ended else None,
        _wait_note(worker.process),
        marked=marked,
    )


def _shared_row(
    owner: str, pid: str, state: str, processes: Sequence[ProcessActivity], note: str = ""
) -> ProcessRow:
    """Return one row for several processes, with the largest of their values."""
    shares = [p.cpu_share for p in processes if p.cpu_share is not None]
    sizes = [p.rss_bytes for p in processes if p.rss_bytes is not None]
    return ProcessRow(
        owner=owner,
        pid=pid,
        state=Cell(text=state),
        cpu=formats.percent(max(shares, default=None)),
        memory=formats.size(max(sizes, default=None)),
        note=note,
    )


def _merged_rows(ranks: Sequence[RankEvidence]) -> list[ProcessRow]:
    """Return one row for each group of ranks in the same state."""
    ranks_by_state: dict[tuple[str, str], list[RankEvidence]] = {}
    for rank in ranks:
        doing = _end_text(rank) or _process_state(rank.process, marked=False)
        ranks_by_state.setdefault((doing, clean_name(rank.phase or "", 60)), []).append(rank)
    rows = []
    by_size = sorted(ranks_by_state.items(), key=lambda item: -len(item[1]))
    for (doing, phase), members in by_size[:MAX_SINGLE_ROWS]:
        processes = [r.process for r in members if r.process is not None]
        owner = f"  {formats.rank_words([r.rank for r in members])}"
        rows.append(_shared_row(owner, f"×{len(members)}", doing, processes, phase))
    hidden = sum(len(members) for _, members in by_size[MAX_SINGLE_ROWS:])
    if hidden:
        state = Cell(text="other states")
        rows.append(ProcessRow(owner="  others", pid=str(hidden), state=state, cpu="", memory=""))
    return rows


def machine_lines(host: HostEvidence) -> tuple[str, ...]:
    """Return one line about the machine: cores, load, memory and shared memory."""
    parts = []
    if host.cores is not None:
        load = "" if host.load is None else f", load average {formats.significant(host.load, 2)}"
        parts.append(f"{host.cores} cores{load}")
    if host.memory_total_bytes is not None:
        free = formats.size_of(host.memory_available_bytes, host.memory_total_bytes)
        parts.append(f"memory free: {free}")
    if host.memory_limit_bytes is not None:
        used = formats.size_of(host.memory_used_bytes, host.memory_limit_bytes)
        parts.append(f"memory limit used: {used}")
    if host.shm_total_bytes is not None:
        free = formats.size_of(host.shm_free_bytes, host.shm_total_bytes)
        parts.append(f"shared memory free: {free}")
    if host.oom_kills:
        parts.append(f"processes killed by the out-of-memory killer: {host.oom_kills}")
    name = f" {clean_name(host.host)}" if host.host else ""
    return (f"machine{name}: {', '.join(parts)}",) if parts else ()
