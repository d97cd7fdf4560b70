"""``ltui doctor``: report what this machine and the training interpreter have, and what is
missing."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from ltui.app.command_output import EXIT_DONE, print_envelope
from ltui.app.launch.local_machine import (
    DRIVER_TIMEOUT_S,
    SHARED_MEMORY,
    call_with_timeout,
    usable_cores,
)
from ltui.app.launch.training_interpreter import (
    REQUIRED_PACKAGES,
    InterpreterReport,
    choose_python,
    install_command,
    installed_version,
    malicious_packages,
    pip_names,
    probe_cuda,
    probe_interpreter,
)
from ltui.app.presentation.run_report import columns
from ltui.training.lifecycle.delete_runs import ended_agents
from ltui.training.problem import ProblemError
from ltui.training.store.find_run import deleted_runs
from ltui.training.store.history_place import left_histories, local_temporary_folders, own_folder
from ltui.training.store.run_directory import disk_use, list_runs, ltui_home
from ltui.widgets.formats import NA, size

_FINDING = {"what": str, "value": str, "ok": bool, "needed": bool, "remedy": str | None}
DATA = {"examine": {"ok": bool, "findings": [_FINDING]}}
_USEFUL = {
    "torchvision": "the vision presets",
    "torchmetrics": "presets that measure accuracy",
    "sklearn": "the quickstart preset",
    "ffcv": "the FFCV presets",
}
"""Module to its purpose, for modules that not every run needs."""
_EXTRAS = {
    "serve": ("textual_serve", "textual-serve>=1.1.3,<1.2", "ltui serve"),
    "png": ("PIL", "pillow>=10.1", "charts saved as PNG"),
    "parquet": ("pyarrow", "pyarrow>=14", "ltui export --to parquet"),
    "tensorboard": ("tensorboard", "tensorboard>=2.14", "event files: export, import, --mirror"),
}
"""Extra of ltui to its module, its requirement and its purpose."""
SHM_NEEDED_BYTES = 1 << 30
"""Free shared memory below which a note is printed."""
DISK_NEEDED_BYTES = 5 << 30
"""Free disk space below which a note is printed."""


class Finding(Struct, frozen=True):
    """One line of the report."""

    what: str
    value: str
    ok: bool = True
    remedy: str | None = None
    needed: bool = False
    """Nothing trains without it."""
    danger: bool = False
    """It must be removed before anything is trained."""


def examine(options: Namespace) -> int:
    """Run ``ltui doctor``."""
    gpus = _check_gpus()
    findings = [
        *_check_ltui(),
        *_check_interpreter(),
        *gpus,
        *_check_cuda(gpus),
        *_check_machine(),
        *_check_terminal(),
    ]
    healthy = all(finding.ok for finding in findings if finding.needed)
    if options.json:
        document = {
            "ok": healthy,
            "findings": [{name: getattr(f, name) for name in _FINDING} for f in findings],
        }
        print_envelope(document)
    else:
        print("\n".join(_report_lines(findings)))
    return EXIT_DONE


def _report_lines(findings: list[Finding]) -> list[str]:
    rows = [(_status_word(finding), finding.what, finding.value) for finding in findings]
    lines = []
    for finding, line in zip(findings, columns(rows), strict=True):
        lines.append(line)
        if finding.remedy and not finding.ok:
            lines.append(f"         {finding.remedy}")
    return lines


def _status_word(finding: Finding) -> str:
    if finding.ok:
        return "ok"
    if finding.danger:
        return "DANGER"
    return "MISSING" if finding.needed else "note"


def _check_ltui() -> list[Finding]:
    version_finding = Finding(
        "ltui", f"{version('ltui-train')} on Python {platform.python_version()}"
    )
    try:
        home = ltui_home()
    except ProblemError as error:
        problem = error.problems[0]
        return [version_finding, Finding("runs", problem.what, False, problem.remedy, needed=True)]
    free = shutil.disk_usage(home).free
    enough = free >= DISK_NEEDED_BYTES
    remedy = "Checkpoints and histories may not fit. Set LTUI_HOME to a folder on a larger disk."
    runs = Finding("runs", f"{home}, {size(free)} free", enough, remedy)
    leftovers = [*_kept_on_disk(home), *_check_leftovers(home)]
    return [version_finding, runs, *leftovers, _check_py_spy(), *_check_extras()]


def _check_extras() -> list[Finding]:
    """Return a finding for each optional part of ltui itself."""
    return [
        Finding(
            f"ltui[{extra}]",
            "installed" if find_spec(module) is not None else f"not installed (used by {use})",
            find_spec(module) is not None,
            install_command(sys.executable, [requirement]),
        )
        for extra, (module, requirement, use) in _EXTRAS.items()
    ]


def _kept_on_disk(home: Path) -> Iterator[Finding]:
    """Yield what the checkpoints, the frozen code and the deleted runs occupy, and a finding about
    deleted runs, if there are any."""
    runs, deleted = list_runs(home), deleted_runs(home)
    uses = {
        "checkpoints": sum(disk_use(run.checkpoints_dir) for run in runs),
        "frozen code": sum(disk_use(run.code_dir) for run in runs),
        "bin": sum(disk_use(run.path) for run in deleted),
    }
    parts = {name: size(use) for name, use in uses.items()}
    yield Finding("kept on disk", ", ".join(f"{name} {use}" for name, use in parts.items()))
    if deleted:
        count = "1 deleted run" if len(deleted) == 1 else f"{len(deleted)} deleted runs"
        remedy = "`ltui restore` lists them, `ltui prune --bin` removes them"
        yield Finding("bin", f"{count}, {parts['bin']}: {remedy}")


def _check_leftovers(home: Path) -> list[Finding]:
    """Return a finding about what runs on several machines have left on this one, if anything."""
    homes = dict.fromkeys([home, *(own_folder(folder) for folder in local_temporary_folders())])
    agents = [left.path for where in homes for left in ended_agents(where)]
    histories = [left.folder for left in left_histories() if not left.is_live]
    if not agents and not histories:
        return []
    total = sum(disk_use(folder) for folder in (*agents, *histories))
    return [
        Finding(
            "left by runs",
            f"{len(agents)} folders of nodes, {len(histories)} histories, {size(total)}: kept for "
            "14 days as evidence, or until their run is resumed here or deleted",
        )
    ]


def _check_py_spy() -> Finding:
    """Return the finding about py-spy, a separate program that ltui's supervisor runs."""
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    remedy = install_command(sys.executable, ["py-spy"])
    missing = "not installed (shows the stacks of a frozen rank)"
    return Finding("py-spy", program or missing, program is not None, remedy)


def _check_interpreter() -> list[Finding]:
    try:
        python = choose_python(None, os.environ)
        report = probe_interpreter(python, [*REQUIRED_PACKAGES, *_USEFUL])
    except ProblemError as error:
        problem = error.problems[0]
        return [Finding("Python", str(problem), False, problem.remedy, needed=True)]
    rows = [Finding("Python", f"{python}, Python {report.version}")]
    rows += [
        _check_package(report, module, pip_name, _USEFUL.get(module))
        for module, pip_name in pip_names([*REQUIRED_PACKAGES, *_USEFUL]).items()
    ]
    rows += [
        Finding("lightning", problem.what, False, problem.remedy, needed=True, danger=True)
        for problem in malicious_packages(report)
    ]
    return rows


def _check_package(
    report: InterpreterReport, module: str, pip_name: str, purpose: str | None
) -> Finding:
    version = installed_version(report, module)
    if version is not None:
        return Finding(module, version, needed=purpose is None)
    use = f"not installed (used by {purpose})" if purpose else "not installed (every run needs it)"
    remedy = install_command(report.python, [pip_name])
    if module == "ffcv":
        remedy += "   (first: apt-get install libopencv-dev libturbojpeg0-dev pkg-config g++)"
    return Finding(module, use, False, remedy, needed=purpose is None)


def _check_gpus() -> list[Finding]:
    silent = Finding("GPU", "the driver does not answer", False, "See: dmesg | grep -i nvrm")
    return call_with_timeout(DRIVER_TIMEOUT_S, _list_gpus) or [silent]


def _check_cuda(gpus: list[Finding]) -> list[Finding]:
    """Return whether torch can use the GPUs, if the driver lists any."""
    if not any(finding.what == "GPU 0" for finding in gpus):
        return []
    try:
        python = choose_python(None, os.environ)
    except ProblemError:
        return []  # reported with the interpreter
    report = probe_cuda(python)
    if report is None:
        return []  # there is no torch, which is reported with the interpreter
    if report.devices:
        return [Finding("torch on GPUs", f"{report.versions()}, {report.devices} usable")]
    remedy = "Runs train on the CPU. Install a torch that this driver supports: pytorch.org"
    return [Finding("torch on GPUs", f"none usable, {report.why_no_device()}", False, remedy)]


def _list_gpus() -> list[Finding]:
    # Local: the other findings must be printed even if the binding of NVML is broken.
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return [Finding("GPU", f"none ({error}); runs train on the CPU", False)]
    try:
        driver = _decode(pynvml.nvmlSystemGetDriverVersion())
        rows = [Finding("GPU driver", driver)]
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            name = _decode(pynvml.nvmlDeviceGetName(handle))
            free = f"{size(memory.free)} of {size(memory.total)} free"
            rows.append(Finding(f"GPU {index}", f"{name}, {free}"))
        return rows
    except pynvml.NVMLError as error:
        return [Finding("GPU", f"cannot be read: {error}", False)]
    finally:
        pynvml.nvmlShutdown()


def _decode(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _check_machine() -> list[Finding]:
    rows = [Finding("processors", f"{usable_cores()} usable")]
    if Path(SHARED_MEMORY).is_dir():
        total, _, free = shutil.disk_usage(SHARED_MEMORY)
        remedy = "DataLoader workers may crash. In a container, start it with --shm-size=8g."
        text = f"{size(free)} of {size(total)} free"
        rows.append(Finding(SHARED_MEMORY, text, free >= SHM_NEEDED_BYTES, remedy))
    else:
        rows.append(Finding(SHARED_MEMORY, "missing", False, "DataLoader workers need it."))
    return rows


def _check_terminal() -> list[Finding]:
    term = os.environ.get("TERM", "")
    if not sys.stdout.isatty():
        return [Finding("terminal", "the output is not a terminal; the dashboard needs one")]
    columns_, lines = shutil.get_terminal_size()
    large = columns_ >= 80 and lines >= 24
    return [
        Finding(
            "terminal",
            f"{columns_}x{lines}, TERM={term or NA}, {_colour_support(term)}",
            large,
            "The dashboard needs at least 80x24 to show every panel.",
        )
    ]


def _colour_support(term: str) -> str:
    if os.environ.get("NO_COLOR"):
        return "no colours (NO_COLOR)"
    if os.environ.get("COLORTERM") in ("truecolor", "24bit"):
        return "true colour"
    return "256 colours" if "256" in term else "16 colours"
