"""The files of a sweep, in ``sweeps/NAME``: its record, the specification that its trials have in
common, and the environment in which they start.

Commands and the process that advances the sweep change the record, each under the lock.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from ltui.training.config.run_spec import RunSpec
from ltui.training.json_codec import from_json, parse_json, to_json
from ltui.training.problem import ProblemError
from ltui.training.shared.file_lock import file_lock
from ltui.training.shared.regular_files import read_regular
from ltui.training.store.run_directory import (
    make_private_folders,
    paths_in,
    read_json,
    remove_leftovers,
    write_atomically,
    write_json,
)
from ltui.training.store.spec_file import read_spec_file, spec_text
from ltui.training.sweep.record import State, Sweep

MOST_BYTES = 64 << 20
"""Maximum size of a record: some 100,000 trials."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,29}")


class SweepDir(Struct, frozen=True):
    """Paths of one sweep. Creating it touches no file."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def home(self) -> Path:
        return self.path.parent.parent

    @property
    def record_path(self) -> Path:
        return self.path / "sweep.json"

    @property
    def template_path(self) -> Path:
        """Specification of a trial without its parameters."""
        return self.path / "spec.yaml"

    @property
    def active_path(self) -> Path:
        """Exists as long as the sweep is to be advanced; holds the name of the machine."""
        return self.path / "active"

    def template(self) -> RunSpec:
        """Read the specification that all trials have in common. Raise ``ProblemError``."""
        return read_spec_file(self.template_path)

    def environment(self) -> dict[str, str] | None:
        """Return the environment in which the sweep was started; None if it cannot be read."""
        saved = read_json(self.path / "environment.json")
        return None if saved is None else {str(k): str(v) for k, v in saved.items()}

    def read(self) -> Sweep:
        """Return the record. Raise ``ProblemError`` if it cannot be read."""
        try:
            status = self.record_path.stat()
            sweep = _read(self.record_path, status.st_mtime_ns, status.st_ino)
            if sweep.name != self.name:
                raise ValueError("it is that of another sweep")
            return sweep
        except (OSError, ValueError) as error:
            raise ProblemError.of(
                where=str(self.record_path),
                what=f"the sweep cannot be read ({error}).",
                remedy="Restore the file or remove its folder.",
            ) from error

    def change(self, change: Callable[[Sweep], Sweep]) -> Sweep:
        """Replace the record by ``change(record)`` and return it, after other writers."""
        try:
            with file_lock(self.path / "sweep.lock"):
                before = self.read()
                after = change(before)
                is_active = after.state() in (State.RUNNING, State.STOPPING)
                if is_active and not self.active_path.exists():
                    write_atomically(self.active_path, after.host.encode())
                if after != before:
                    write_json(self.record_path, to_json(after))
                if not is_active:
                    self.active_path.unlink(missing_ok=True)
        except OSError as error:
            raise ProblemError.of(
                where=str(self.path),
                what=f"it cannot be written ({error.strerror}).",
                remedy="Make room. `ltui stop` stops the runs of its trials meanwhile.",
            ) from error
        return after


@lru_cache(maxsize=32)
def _read(path: Path, changed_ns: int, inode: int) -> Sweep:  # noqa: ARG001 - keys of the cache
    return from_json(Sweep, parse_json(read_regular(path, MOST_BYTES)), tolerant=True)


def check_name(home: Path, name: str) -> None:
    """Raise ``ProblemError`` if a new sweep cannot have this name."""
    if _NAME.fullmatch(name) is None or name == "last":
        raise ProblemError.of(
            where="--name",
            what=f"{name!r} cannot name a sweep.",
            remedy="Use at most 30 letters, digits and . _ -, and not `last`.",
        )
    if (home / "sweeps" / name).exists():
        raise ProblemError.of(
            where="--name",
            what=f"there is a sweep {name} already.",
            remedy=f"Choose another name, or add trials to it: ltui sweep append {name}",
        )


def create_sweep(
    home: Path,
    sweep: Sweep,
    template: RunSpec,
    environment: Mapping[str, str],
    fill: Callable[[SweepDir], object] = lambda _: None,
) -> SweepDir:
    """Create the folder of a sweep, completely or not at all. Raise ``ProblemError``.

    ``fill`` is called with the folder before it appears under its name.
    """
    made = SweepDir(home / "sweeps" / sweep.name)
    temporary = SweepDir(made.path.with_name(f".new-{sweep.name}-{os.getpid()}"))
    try:
        make_private_folders(made.path.parent)
        remove_leftovers(made.path.parent)
        temporary.path.mkdir(mode=0o700)
        write_atomically(temporary.template_path, spec_text(template).encode())
        write_atomically(
            temporary.path / "environment.json", json.dumps(dict(environment)).encode()
        )
        write_json(temporary.record_path, to_json(sweep))
        write_atomically(temporary.active_path, sweep.host.encode())
        fill(temporary)
        os.rename(temporary.path, made.path)
    except BaseException as error:
        shutil.rmtree(temporary.path, ignore_errors=True)
        if isinstance(error, OSError):
            what = f"it cannot be written ({error.strerror or error})."
            raise ProblemError.of(where=str(made.path), what=what) from error
        raise
    return made


def active_sweeps(home: Path) -> list[SweepDir]:
    """Return the sweeps that are to be advanced on this machine. Reads a small file of each."""
    found = []
    # Without the order of ``list_sweeps``: every live supervisor asks for it again and again.
    for sweep in map(SweepDir, paths_in(home / "sweeps")):
        with contextlib.suppress(OSError):
            if read_regular(sweep.active_path, 1000).decode() == os.uname().nodename:
                found.append(sweep)
    return [sweep for sweep in found if _NAME.fullmatch(sweep.name)]


def list_sweeps(home: Path) -> list[SweepDir]:
    """Return the sweeps, the one that was created last first."""
    found = [SweepDir(path) for path in paths_in(home / "sweeps") if _NAME.fullmatch(path.name)]
    created = {one: _changed(one.template_path) for one in found}
    return sorted((one for one in found if created[one]), key=lambda one: -created[one])


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def find_sweep(home: Path, text: str) -> SweepDir:
    """Return the sweep of this name, or the ``last`` one. Raise ``ProblemError``."""
    sweeps = list_sweeps(home)
    named = {sweep.name: sweep for sweep in sweeps}
    if text == "last" and sweeps:
        return sweeps[0]
    if text in named:
        return named[text]
    near = difflib.get_close_matches(text, list(named), n=1, cutoff=0.5)
    remedy = f"Did you mean {near[0]}?" if near else "ltui sweep list lists them."
    raise ProblemError.of(where=text, what="there is no such sweep.", remedy=remedy)
