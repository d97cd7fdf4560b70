"""View models of GPUs: rows, findings, and all readings of one GPU. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace
from rich.text import Text

from ltui.app.live.frame import Frame
from ltui.app.live.gpu_history import GpuSeries
from ltui.app.presentation.machines import machine_names
from ltui.app.presentation.snapshot_text import gpu_label, gpu_name, percent_of_time
from ltui.app.state_words import open_verdicts
from ltui.training.state.run_snapshot import LIVE, GpuProcessSnapshot, GpuSnapshot, Verdict
from ltui.training.state.verdicts import is_gpu_kind
from ltui.widgets import formats
from ltui.widgets.columns import LazyRows
from ltui.widgets.run_tables import BELOW, SIGNS
from ltui.widgets.sanitise import clean_line, clean_name
from ltui.widgets.tone import Tone
from ltui.widgets.view_models import Cell, GpuRow

STALE_AFTER_S = 5.0
"""Seconds after which a reading is shown with its age."""
HOT_C = 85.0
"""Degrees Celsius that count as hot for a GPU that does not report its slowdown temperature."""
FULL_SCALE_C = 100.0
"""Degrees Celsius of a full bar for such a GPU."""
HOT_MARGIN_C = 3.0
"""Degrees Celsius below the slowdown temperature from which a GPU counts as hot."""
HEAT_STRIP_MIN_GPUS = 9
"""Number of GPUs from which they are also shown as a heat strip: fewer have a row each."""
MANY_GPUS = 16
"""Number of GPUs on several machines above which those with a problem are listed first."""
OWNERS = {
    "rank": "rank",
    "run": "this run",
    "foreign": "foreign",
    "display": "display",
    "unseen": "not visible from here",
}
"""Words for the owners of processes on a GPU."""


def active_findings(frame: Frame) -> tuple[Verdict, ...]:
    """Return the active findings about GPUs, serious ones first."""
    if frame.snapshot.state not in LIVE:
        return ()
    findings = [v for v in open_verdicts(frame.snapshot) if is_gpu_kind(v.kind)]
    return tuple(sorted(findings, key=lambda v: not v.evidence.get("serious")))


def tone_by_gpu(frame: Frame) -> dict[int, Tone]:
    """Return the tone of each GPU that has an active finding, by number of the GPU."""
    tones: dict[int, Tone] = {}
    for finding in reversed(active_findings(frame)):
        tone = _finding_tone(finding)
        tones |= {gpu.number: tone for gpu in frame.snapshot.gpus if _is_about(finding, gpu)}
    return tones


def _is_about(finding: Verdict, gpu: GpuSnapshot) -> bool:
    """Return whether a finding names a GPU. Without machines it is about node 0."""
    gpus = finding.evidence.get("gpus")
    if not isinstance(gpus, (list, tuple)) or gpu.index not in gpus:
        return False
    return gpu.node in (finding.nodes or (0,))


def _finding_tone(finding: Verdict) -> Tone:
    return Tone.BAD if finding.evidence.get("serious") else Tone.WARN


def gpu_rows(frame: Frame) -> Sequence[GpuRow]:
    """Return one row per GPU or MIG slice, slices below their GPU."""
    tones = tone_by_gpu(frame)
    names = machine_names(frame.snapshot)
    many = bool(names) and len(frame.snapshot.gpus) > MANY_GPUS
    gpus = sorted(
        frame.snapshot.gpus, key=lambda gpu: (_place(gpu, tones, many=many), _sort_key(gpu))
    )
    with_slices = {(g.node, g.mig_parent) for g in gpus if g.mig_parent is not None}

    def row(index: int) -> GpuRow:
        gpu = gpus[index]
        return _gpu_row(
            gpu,
            labels[index],
            frame.gpu_series.get(gpu.number, GpuSeries()),
            tones.get(gpu.number, Tone.PLAIN),
            old_s=stale_age_s(gpu, frame),
            sliced=(gpu.node, gpu.index) in with_slices,
        )

    labels = [gpu_label(gpu, names) for gpu in gpus]
    if not many:
        return tuple(map(row, range(len(gpus))))
    return LazyRows(labels, row, [max(range(len(gpus)), key=lambda index: len(labels[index]))])


def gpu_blocks(frame: Frame, rows: Sequence[GpuRow]) -> tuple[GpuRow, ...]:
    """Return the rows of GPUs, each with its findings and its processes below it.

    A finding about several GPUs is below the first of them; the others have its sign.
    """
    names = machine_names(frame.snapshot)
    by_label = {gpu_label(gpu, names): gpu for gpu in frame.snapshot.gpus}
    findings = list(active_findings(frame))
    blocks: list[GpuRow] = []
    for row in rows:
        gpu = by_label[row.index]
        own = [finding for finding in findings if _is_about(finding, gpu)]
        findings = [finding for finding in findings if finding not in own]
        lines = [_finding_line(finding) for finding in own]
        note = row.note or (f"throttled: {row.throttle}" if row.throttle and not own else "")
        if note and not any(note in line.text for line in lines):
            lines.insert(0, Cell(text=note, tone=row.tone if row.tone in SIGNS else Tone.WARN))
        for process in sorted(gpu.processes or (), key=lambda p: -(p.memory_bytes or 0)):
            tone = Tone.WARN if process.owner == "foreign" else Tone.DIM
            lines.append(Cell(text=_process_line(process), tone=tone))
        blocks.append(replace(row, in_block=True))
        blocks += [
            replace(row, index=f"{row.index}{BELOW}{n}", line=(Cell(text=" " * 8), cell))
            for n, cell in enumerate(lines)
        ]
    return tuple(blocks)


def _finding_line(finding: Verdict) -> Cell:
    tone = _finding_tone(finding)
    cause = clean_line(finding.cause)
    about = re.match(r"GPU \S+: ", cause)
    text = cause[about.end() :] if about is not None else cause
    return Cell(text=f"{SIGNS[tone]} {text}{_rank_suffix(finding)}", tone=tone)


def note_text(frame: Frame) -> Text:
    """Return a problem with the driver, as the findings below the rows begin with it."""
    note = frame.snapshot.gpu_note
    return Text(f"! {clean_line(note)}", "bold") if note and frame.snapshot.gpus else Text()


def _place(gpu: GpuSnapshot, tones: dict[int, Tone], *, many: bool) -> int:
    """Return 0 for a GPU with a problem if there are too many GPUs to look through them all."""
    return 0 if many and (gpu.error or tones.get(gpu.number, Tone.PLAIN) in SIGNS) else 1


def _sort_key(gpu: GpuSnapshot) -> tuple[int, int, int]:
    if gpu.mig_parent is None:
        return gpu.node, gpu.index, -1
    return gpu.node, gpu.mig_parent, gpu.index


def _gpu_row(
    gpu: GpuSnapshot,
    label: str,
    history: GpuSeries,
    tone: Tone,
    *,
    old_s: float | None,
    sliced: bool,
) -> GpuRow:
    use = gpu.utilisation_percent
    return GpuRow(
        index=label,
        name=gpu_name(gpu.name),
        ranks=f"r{formats.ranks(gpu.ranks)}" if gpu.ranks else "",
        utilisation=None if use is None else use / 100,
        utilisation_text="MIG" if sliced and use is None else percent_of_time(use),
        memory=_ratio(gpu.memory_used_bytes, gpu.memory_total_bytes),
        memory_text=formats.size_of(gpu.memory_used_bytes, gpu.memory_total_bytes),
        power_text=formats.power(gpu.power_w, gpu.power_limit_w),
        temperature=_temperature_cell(gpu),
        power=_ratio(gpu.power_w, gpu.power_limit_w),
        temperature_share=_ratio(gpu.temperature_c, gpu.slowdown_temperature_c or FULL_SCALE_C),
        clock_text=formats.clock(gpu.sm_clock_mhz),
        strip=history.strip,
        heat=history.heat,
        note=clean_name(gpu.error or ("" if old_s is None else f"{formats.age(old_s)} old")),
        stale=old_s is not None,
        sm_text=formats.percent(gpu.sm_activity),
        tensor_text=formats.percent(gpu.tensor_activity),
        dram_text=formats.percent(gpu.dram_activity),
        throttle=clean_name(", ".join(gpu.throttle_reasons or ())),
        tone=Tone.BAD if gpu.error and tone is Tone.PLAIN else tone,
    )


def _temperature_cell(gpu: GpuSnapshot) -> Cell:
    limit = gpu.slowdown_temperature_c
    least = HOT_C if limit is None else limit - HOT_MARGIN_C
    hot = gpu.temperature_c is not None and gpu.temperature_c >= least
    text = formats.temperature(gpu.temperature_c)
    return Cell(text=f"{text}!" if hot else text, tone=Tone.WARN if hot else Tone.PLAIN)


def stale_age_s(gpu: GpuSnapshot, frame: Frame) -> float | None:
    """Return the age of readings that are old, such as those of a machine that does not report.

    None if they are current. Readings of an ended run are not called old.
    """
    if gpu.sampled_at is None or frame.snapshot.state not in LIVE:
        return None
    age_s = frame.now - gpu.sampled_at
    return age_s if age_s > STALE_AFTER_S else None


def _ratio(part: float | None, total: float | None) -> float | None:
    return None if part is None or not total else part / total


def findings_text(frame: Frame, max_lines: int, *, more: str = ": d diagnose") -> Text:
    """Return the findings below the rows, one per line, with a problem of the driver first.

    ``more`` names the key that shows the others if there are more than ``most``.
    """
    lines: list[tuple[str, str]] = []
    if frame.snapshot.gpu_note and frame.snapshot.gpus:
        lines.append((f"! {clean_line(frame.snapshot.gpu_note)}", "bold"))
    for finding in active_findings(frame):
        tone = _finding_tone(finding)
        style = "bold" if tone is Tone.BAD else ""
        lines.append((f"{SIGNS[tone]} {clean_line(finding.cause)}{_rank_suffix(finding)}", style))
    out = Text()
    shown = lines if len(lines) <= max_lines else lines[: max(1, max_lines - 1)]
    for i, (line, style) in enumerate(shown):
        out.append("\n" if i else "")
        out.append(line, style)
    if len(shown) < len(lines):
        out.append(f"\nand {len(lines) - len(shown)} more{more}", "dim")
    return out


def _rank_suffix(finding: Verdict) -> str:
    if not finding.culprits or "rank" in finding.cause:
        return ""
    return f" ({formats.rank_words(finding.culprits)})"


def gpus_title(frame: Frame) -> str:
    """Return ``8 × H100 80GB HBM3``, or the count of each model."""
    counts: dict[str, int] = {}
    for gpu in frame.snapshot.gpus:
        if gpu.mig_parent is None:
            name = gpu_name(gpu.name or "unknown model")
            counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{n} × {name}" for name, n in counts.items())


# -- one GPU ---------------------------------------------------------------------------------------


def find_gpu(frame: Frame, name: str) -> GpuSnapshot | None:
    """Return the GPU with this label."""
    names = machine_names(frame.snapshot)
    return next((gpu for gpu in frame.snapshot.gpus if gpu_label(gpu, names) == name), None)


def readings_text(gpu: GpuSnapshot, frame: Frame) -> Text:
    """Return all readings of one GPU with their units; a reading that the driver refuses is n/a."""
    out = Text()
    if gpu.error:
        out.append(f"! {clean_line(gpu.error)}\n", "bold")
    for finding in active_findings(frame):
        if _is_about(finding, gpu):
            out.append(f"{SIGNS[_finding_tone(finding)]} {clean_line(finding.cause)}\n", "bold")
    for title, lines in _reading_groups(gpu, frame.now).items():
        out.append(f"{title}\n", "bold")
        for label, value in lines:
            out.append(f"  {label:<22}", "dim")
            out.append(f"{value}\n")
    _append_processes(out, gpu)
    return out


Lines = list[tuple[str, str]]


def _reading_groups(gpu: GpuSnapshot, now: float) -> dict[str, Lines]:
    age = None if gpu.sampled_at is None else max(0.0, now - gpu.sampled_at)
    return {
        "GPU": [
            ("model", clean_name(gpu.name or formats.NA)),
            ("UUID", clean_name(gpu.uuid or formats.NA)),
            ("ranks", formats.ranks(gpu.ranks) if gpu.ranks else "none"),
            ("sampled", formats.ago(age)),
        ],
        "work": _work_lines(gpu),
        "power and heat": _heat_lines(gpu),
        "links": _link_lines(gpu),
        "memory health": _health_lines(gpu),
    }


def _work_lines(gpu: GpuSnapshot) -> Lines:
    use = None if gpu.utilisation_percent is None else percent_of_time(gpu.utilisation_percent)
    return [
        ("utilisation", formats.NA if use is None else f"a kernel was running {use} of the time"),
        ("SM activity", formats.percent(gpu.sm_activity)),
        ("SM occupancy", formats.percent(gpu.sm_occupancy)),
        ("tensor-core activity", formats.percent(gpu.tensor_activity)),
        ("DRAM bandwidth", formats.percent(gpu.dram_activity)),
        ("memory controller", percent_of_time(gpu.memory_utilisation_percent)),
        ("memory", formats.size_of(gpu.memory_used_bytes, gpu.memory_total_bytes)),
    ]


def _heat_lines(gpu: GpuSnapshot) -> Lines:
    reasons = gpu.throttle_reasons
    held = formats.NA if reasons is None else ", ".join(reasons) or "nothing"
    state = gpu.performance_state
    limit = formats.temperature(gpu.slowdown_temperature_c)
    return [
        ("power", formats.power(gpu.power_w, gpu.power_limit_w)),
        ("temperature", f"{formats.temperature(gpu.temperature_c)}, slows down at {limit}"),
        ("memory temperature", formats.temperature(gpu.memory_temperature_c)),
        ("fan", percent_of_time(gpu.fan_percent)),
        ("SM clock", _value_of(gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, "MHz")),
        ("memory clock", formats.clock(gpu.memory_clock_mhz)),
        ("throttled by", clean_name(held)),
        ("performance state", formats.NA if state is None else f"P{state} (P0 is fastest)"),
    ]


def _value_of(value: float | None, maximum: float | None, unit: str) -> str:
    text = formats.count(value)
    return f"{text} {unit}" if maximum is None else f"{text} of {formats.count(maximum)} {unit}"


def _link_lines(gpu: GpuSnapshot) -> Lines:
    up = formats.NA if gpu.nvlinks is None else f"{formats.count(gpu.nvlinks_up)} of {gpu.nvlinks}"
    generation = _value_of_max(gpu.pcie_generation, gpu.pcie_generation_max)
    lanes = _value_of_max(gpu.pcie_width, gpu.pcie_width_max)
    return [
        ("PCIe", f"generation {generation}, {lanes} lanes"),
        ("PCIe out, in", _rate_pair(gpu.pcie_tx_bytes_per_s, gpu.pcie_rx_bytes_per_s)),
        ("NVLinks up", up),
        ("NVLink out, in", _rate_pair(gpu.nvlink_tx_bytes_per_s, gpu.nvlink_rx_bytes_per_s)),
        ("NVLink errors", formats.count(gpu.nvlink_errors)),
    ]


def _value_of_max(value: int | None, maximum: int | None) -> str:
    if value is None:
        return formats.NA
    return f"{value} of {maximum}" if maximum is not None else str(value)


def _rate_pair(out: float | None, into: float | None) -> str:
    return f"{formats.quantity(out, 'B/s')}, {formats.quantity(into, 'B/s')}"


def _health_lines(gpu: GpuSnapshot) -> Lines:
    repair = {None: formats.NA, False: "none", True: "yes, at the next reset"}
    failed = " (a repair failed)" if gpu.repair_failed else ""
    xid = "none seen" if gpu.xid_code is None else f"XID {gpu.xid_code}"
    return [
        ("ECC corrected", formats.count(gpu.ecc_corrected)),
        ("ECC uncorrected", formats.count(gpu.ecc_uncorrected)),
        ("retired pages", formats.count(gpu.retired_pages)),
        ("remapped rows", formats.count(gpu.remapped_rows)),
        ("repair pending", f"{repair[gpu.repair_pending]}{failed}"),
        ("last driver error", xid),
    ]


def _append_processes(out: Text, gpu: GpuSnapshot) -> None:
    out.append("processes\n", "bold")
    if gpu.processes is None:
        out.append(f"  {formats.NA}\n")
    elif not gpu.processes:
        out.append("  none\n")
    for process in sorted(gpu.processes or (), key=lambda p: -(p.memory_bytes or 0)):
        out.append(f"  {_process_line(process)}\n", "bold" if process.owner == "foreign" else "")


def _process_line(process: GpuProcessSnapshot) -> str:
    owner = OWNERS.get(process.owner, clean_name(process.owner))
    if process.rank is not None:
        owner = f"rank {process.rank}"
    user = f", user {clean_name(process.user)}" if process.user else ""
    name = clean_name(process.name or formats.NA)
    memory = formats.size(process.memory_bytes)
    return f"pid {process.pid:<9} {memory:>9}  {owner}: {name}{user}"
