"""Record what code an attempt is started with: commit, changes, packages, command, host and user.

The supervisor does this in a thread of the lowest priority, after the engine was started, so that
training does not wait for it. It asks ``git`` and the interpreter of the ranks, both within a time
limit, and never fails the run: what could not be found out is unknown.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec.structs import replace

from ltui.training.config.run_spec import RunSpec
from ltui.training.json_codec import to_json
from ltui.training.shared.regular_files import read_regular
from ltui.training.store.code_record import (
    CodeRecord,
    first_with_identity,
    read_diff,
    read_record,
    write_record,
)
from ltui.training.store.frozen_code import listed
from ltui.training.store.run_directory import RunDir
from ltui.training.store.secret_files import LEFT_OUT, holds_secret, is_secret

GIT_S = 2.0
"""Seconds that all questions to git may take together."""
PACKAGES_S = 5.0
"""Seconds that the interpreter of the ranks may take to name its packages."""
DIFF_BYTES = 256 << 10
"""Bytes of uncommitted changes that are kept."""
FILES_KEPT = 100
"""Number of names of changed files that are kept."""

_PACKAGES = """
torch lightning pytorch-lightning lightning-fabric lightning-utilities torchmetrics torchvision
torchaudio torchtext torchdata torchao torchtitan triton numpy scipy pandas scikit-learn pyarrow
pillow jsonargparse hydra-core omegaconf transformers datasets tokenizers accelerate peft trl
safetensors timm einops diffusers deepspeed bitsandbytes flash-attn xformers transformer-engine
sentence-transformers monai torch-geometric webdataset ffcv wandb mlflow tensorboard tensorboardX
nvidia-nccl-cu12 nvidia-nccl-cu13 nvidia-cudnn-cu12 nvidia-cudnn-cu13 nvidia-cublas
nvidia-cublas-cu12
""".split()  # noqa: SIM905 - easier to read than a list of strings

VERSIONS_SCRIPT = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
found = {"python": platform.python_version()}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
"""Program that prints the versions of Python and of the packages that its arguments name."""


class UnknownError(Exception):
    """A program did not answer; ``str()`` is the reason."""


def start_recording(run_dir: RunDir, spec: RunSpec, attempt: int) -> threading.Thread:
    """Record the code of an attempt in a thread, which does not keep the process alive."""

    def record() -> None:
        with contextlib.suppress(OSError):
            # On Linux this is the priority of the thread, which its child processes inherit.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        record_code(run_dir, spec, attempt)

    thread = threading.Thread(target=record, name="record-code", daemon=True)
    thread.start()
    return thread


def record_code(run_dir: RunDir, spec: RunSpec, attempt: int) -> None:
    """Write the record of an attempt. Does nothing if the run directory cannot be written.

    That of frozen code is what was recorded when the code was frozen.
    """
    record, diff = code_now(spec, attempt)
    if spec.freeze and (then := read_record(run_dir, spec.code_copy)) is not None:
        record = replace(then, attempt=attempt, recorded_at=record.recorded_at)
        diff = read_diff(run_dir, spec.code_copy).encode()
    with contextlib.suppress(UnknownError):
        record = replace(record, packages=_packages(record.python))
    if record.commit is not None and record.diff_complete:
        record = replace(record, identity=_identity(spec, record.commit, diff))
        if attempt <= 1 and record.identity is not None:
            record = replace(record, repeats=first_with_identity(run_dir, record.identity))
    with contextlib.suppress(OSError):
        write_record(run_dir, record, diff)


def code_now(spec: RunSpec, attempt: int) -> tuple[CodeRecord, bytes]:
    """Return the record of the code as it is now, without packages, and the uncommitted changes."""
    record = CodeRecord(
        attempt=attempt,
        recorded_at=time.time(),
        command=_command(spec),
        host=socket.gethostname(),
        user=_user(),
        ltui=_ltui_version(),
        python=_interpreter(spec),
    )
    try:
        return _with_repository(record, code_folder(spec))
    except UnknownError as error:
        return replace(record, note=str(error)), b""


def code_folder(spec: RunSpec) -> Path:
    """Return the folder of the user's code: that of the script or configuration file, or the
    working directory."""
    if spec.command is None and spec.python_path:
        return Path(spec.python_path[0])
    script = named_script(spec)
    return Path(spec.cwd) if script is None else script.parent


def named_script(spec: RunSpec) -> Path | None:
    """Return the first script of Python or the shell that the command names."""
    paths = (Path(spec.cwd, word) for word in spec.command or () if word.endswith((".py", ".sh")))
    return next((path for path in paths if path.is_file()), None)


def _command(spec: RunSpec) -> tuple[str, ...]:
    if spec.command is not None:
        return spec.command
    options = [word for override in spec.overrides for word in ("--set", override)]
    return ("ltui", "run", spec.preset or spec.id, *options)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # the account has no name, as in some containers
        return str(os.getuid())


def _ltui_version() -> str | None:
    try:
        return version("ltui-train")
    except PackageNotFoundError:
        return None


def _interpreter(spec: RunSpec) -> str | None:
    """Return the interpreter of the ranks; None if it is not known which one a command uses."""
    if spec.command is None:
        return spec.python
    program = shutil.which(
        os.path.join(spec.cwd, spec.command[0]) if os.sep in spec.command[0] else spec.command[0],
        path=spec.env.get("PATH", os.environ.get("PATH")),
    )
    if program is None or os.path.basename(program).startswith("python"):
        return program
    try:
        with open(program, "rb") as file:
            first_line = file.readline(512).decode("utf-8", "replace").split()
    except OSError:
        return None
    # Programs such as torchrun are scripts that name the interpreter of their environment.
    name = first_line[0].removeprefix("#!") if first_line else ""
    return name if os.path.basename(name).startswith("python") else None


def _packages(python: str | None) -> dict[str, str]:
    if python is None:
        return {}
    program = [python, "-I", "-c", VERSIONS_SCRIPT, *_PACKAGES]
    answer, _ = _ask(program, Path("/"), time.monotonic() + PACKAGES_S)
    try:
        return {str(name): str(number) for name, number in json.loads(answer).items()}
    except (ValueError, AttributeError) as error:
        raise UnknownError("its packages could not be read") from error


def top_folder(folder: Path, deadline: float) -> str:
    """Return the top folder of the repository that has ``folder``. Raise ``UnknownError``."""
    if not any((parent / ".git").exists() for parent in (folder, *folder.parents)):
        raise UnknownError(f"{folder} is in no git repository")
    top = ask_git(folder, deadline, "rev-parse", "--show-toplevel")[0]
    return top.decode("utf-8", "replace").rstrip("\n")


def _with_repository(record: CodeRecord, folder: Path) -> tuple[CodeRecord, bytes]:
    """Return the record with commit, branch and changed files, and the uncommitted changes."""
    deadline = time.monotonic() + GIT_S
    record = replace(record, repository=top_folder(folder, deadline))
    try:
        commit = ask_git(folder, deadline, "rev-parse", "--verify", "-q", "HEAD")[0]
    except UnknownError:
        return replace(record, note="the repository has no commit yet"), b""
    record = replace(record, commit=commit.decode().strip())
    with contextlib.suppress(UnknownError):  # no branch: the head is detached
        branch = ask_git(folder, deadline, "symbolic-ref", "-q", "--short", "HEAD")[0]
        record = replace(record, branch=branch.decode("utf-8", "replace").strip())
    # Each file has a part of its own, so that one can be left out.
    diff_options = ("diff", "HEAD", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color")
    prefixes = ("--src-prefix=a/", "--dst-prefix=b/", "--submodule=short")
    try:
        text = ask_git(folder, deadline, *diff_options, "--name-only", "-z")[0]
        changed = [name.decode("utf-8", "replace") for name in text.split(b"\0") if name]
        record = replace(
            record, changed_files=tuple(changed[:FILES_KEPT]), changed_count=len(changed)
        )
        diff, complete = ask_git(folder, deadline, *diff_options, *prefixes)
    except UnknownError as error:
        return replace(record, note=str(error)), b""
    notes = [] if complete else [f"the changes are longer than {DIFF_BYTES >> 10} KiB"]
    if not complete:  # no part of a key, which would not be recognized
        diff = diff[: diff.rfind(b"\n") + 1]
    diff, left_out = _without_secrets(diff, Path(record.repository or ""))
    if left_out:
        names = listed(left_out, len(left_out))
        notes.append(f"the changes of {names} may hold a secret, and are left out")
    return replace(
        record,
        diff_bytes=len(diff),
        diff_complete=not notes,
        note="; ".join(notes) or None,
    ), diff


def _without_secrets(diff: bytes, top: Path) -> tuple[bytes, list[str]]:
    """Return a diff without the changes of files that may hold a secret, and their names."""
    kept, left_out = [], []
    for part in re.split(rb"^(?=diff --git )", diff, flags=re.MULTILINE):
        title, _, changes = part.partition(b"\n")
        both = title.removeprefix(b"diff --git ").decode("utf-8", "replace")
        # The same name twice. Git quotes and escapes unusual ones.
        name = both[: len(both) // 2].strip('"').removeprefix("a/")
        texts = [re.sub(rb"^[-+ ]", b"", changes, flags=re.MULTILINE)]
        with contextlib.suppress(OSError):
            texts.append(read_regular(top / name))  # of which the changes may be a part of a key
        if is_secret(name) or any(map(holds_secret, texts)):
            left_out.append(name)
            part = title + f"\n({LEFT_OUT}, and is left out)\n".encode()
        kept.append(part)
    return b"".join(kept), left_out


def ask_git(
    folder: Path, deadline: float, *arguments: str, most_bytes: int | None = None
) -> tuple[bytes, bool]:
    """Return what git prints, and whether that is all of it. Raise ``UnknownError``."""
    # The repository must not start programs of its own, and an index that others use is not locked.
    options = ["-c", "core.fsmonitor=false", "--no-optional-locks"]
    return _ask(["git", *options, *arguments], folder, deadline, most_bytes)


def _ask(
    argv: Sequence[str], folder: Path, deadline: float, most_bytes: int | None = None
) -> tuple[bytes, bool]:
    """Return a program's output, at most ``DIFF_BYTES`` of it by default, and whether that is all.

    Raise ``UnknownError`` if it cannot be started, fails, or is not done at ``deadline``.
    """
    name = os.path.basename(argv[0])
    try:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            # Without what would make git read another repository.
            env={name: text for name, text in os.environ.items() if not name.startswith("GIT_")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise UnknownError(f"{name} is not installed") from error
    except OSError as error:
        raise UnknownError(f"{name} could not be started ({error.strerror})") from error
    assert process.stdout is not None
    data = bytearray()
    complete = False
    limit = DIFF_BYTES if most_bytes is None else most_bytes
    try:
        while len(data) <= limit:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                raise UnknownError(f"{name} did not answer in time")
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                complete = True
                break
            data += piece
    finally:
        if not complete:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        code = process.wait()
    if complete and code:
        raise UnknownError(f"{name} failed with exit code {code}")
    return bytes(data[:limit]), complete


def _identity(spec: RunSpec, commit: str, diff: bytes) -> str:
    """Return a digest that is equal for runs of the same configuration and code."""
    parts = {
        "config": spec.config,
        "command": spec.command,
        "after_fit": spec.after_fit,
        "start_from": spec.start_from,
        "ranks": [spec.nproc, 1 if spec.nodes is None else spec.nodes.count],
        "commit": commit,
        "diff": hashlib.sha256(diff).hexdigest(),
    }
    return hashlib.sha256(json.dumps(to_json(parts), sort_keys=True).encode()).hexdigest()
