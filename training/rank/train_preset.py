"""The worker process of a preset, started by torch elastic.

``python -m ltui.training.rank.train_preset CONFIG.json``

``CONFIG.json`` contains ``{"config": {...}, "after_fit": ["test"], "python_path": [...]}``. The
value of ``config`` is what LightningCLI itself accepts: ``seed_everything``, ``trainer``,
``model``, ``data``, ``optimizer``, ``lr_scheduler``. With ``--check`` the classes are instantiated
and nothing is trained; problems are printed as JSON lines ``{"where", "what", "remedy"}``. The exit
code is 2 if the configuration has an error.

Describe an error in a configuration in one sentence, from an exception of its loading. The
exceptions are those of imports and of jsonargparse.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ltui.training.rank.coordination.stop_signals import RunStopped
from ltui.training.rank.freeze_warnings import find_log_call_warnings


class ConfigError(ValueError):
    """An error in a run's configuration: where it is, what is wrong, and what to do."""

    def __init__(self, *, where: str, what: str, remedy: str | None = None) -> None:
        self.where, self.what, self.remedy = where, what, remedy
        super().__init__(f"{where}: {what}" + (f" {remedy}" if remedy else ""))

    def to_document(self) -> dict[str, str | None]:
        """Return the error as a JSON object."""
        return {"where": self.where, "what": self.what, "remedy": self.remedy}


_PIP_NAMES = {
    "sklearn": "scikit-learn",
    "cv2": "opencv-python",
    "PIL": "pillow",
    "yaml": "pyyaml",
}
"""Module name to pip name, where they differ."""
_PARSER_KEY = re.compile(r"""Parser key ['"]([\w.]+)['"]:\s*""")
_CLASS_PATH_PROBLEM = re.compile(
    r"- Problem with given class_path '([\w.]+)': (.*?)(?= - Expected a <class 'NoneType'>|$)"
)
_TYPE_REPR = re.compile(r"<class '(?:[\w.]+\.)?(\w+)'>")


def to_config_error(error: BaseException) -> ConfigError:
    """Return the root cause of ``error`` as a ``ConfigError``."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        if isinstance(cause, ConfigError):
            return cause
        if isinstance(cause, ModuleNotFoundError):
            return _missing_module(cause)
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    if missing := re.search(r"No module named '([\w.]+)'", text):
        return _missing_module(ModuleNotFoundError(name=missing.group(1)))
    return _from_jsonargparse(text, type(error).__name__)


def _from_jsonargparse(text: str, kind: str) -> ConfigError:
    """Read key and reason from a message of jsonargparse.

    The message begins with the key. If a class path is the cause, the reason is nested inside.
    """
    key = _PARSER_KEY.search(text)
    where = key.group(1) if key else "configuration"
    if problem := _CLASS_PATH_PROBLEM.search(text):
        path, reason = problem.groups()
        inner = _PARSER_KEY.match(reason)
        if inner:
            where = f"{where}.init_args.{inner.group(1)}"
            reason = reason[inner.end() :]
        else:
            where, reason = f"{where}.class_path", f"{path}: {reason}"
    else:
        reason = text[key.end() :] if key else text
    return ConfigError(where=where, what=_shorten(_TYPE_REPR.sub(r"\1", reason), kind))


def _missing_module(error: ModuleNotFoundError) -> ConfigError:
    name = error.name or str(error)
    root = name.partition(".")[0]
    return ConfigError(
        where="configuration",
        what=f"the module {name!r} can't be imported.",
        remedy=(
            "Install it in the interpreter of the run "
            f"(pip install {_PIP_NAMES.get(root, root)}), "
            "or put its file into the folder of the configuration file."
        ),
    )


def _shorten(text: str, kind: str, limit: int = 600) -> str:
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text if text.endswith((".", "…")) else f"{text}." if " " in text else f"{kind}: {text}."


_PR_SET_PDEATHSIG = 1
_TRAINER_DEFAULTS = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


def main(arguments: list[str] | None = None) -> int:
    """Run or check the configuration, and return the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    check = "--check" in arguments
    paths = [text for text in arguments if text != "--check"]
    if len(paths) != 1:
        print(
            "usage: python -m ltui.training.rank.train_preset [--check] CONFIG.json",
            file=sys.stderr,
        )
        return 2
    if not check:
        die_with_parent()
        # Registered first, it runs last.
        atexit.register(prepare_exit)
    try:
        document = json.loads(Path(paths[0]).read_text())
        extend_path(document.get("python_path") or [], document["config"])
        cli = build_cli(document["config"], train=not check)
        after = document.get("after_fit") or []
    except (Exception, SystemExit) as error:  # everything before fit is configuration
        problem = to_config_error(error)
        if check:
            print(json.dumps(problem.to_document()))
        else:
            print(problem, file=sys.stderr)
        if os.environ.get("LTUI_TRACEBACK"):
            raise
        return 2
    if check:
        for warning in find_log_call_warnings(type(cli.model)):
            problem = ConfigError(where="model", what=warning.what, remedy=warning.remedy)
            print(json.dumps(problem.to_document()))
    else:
        run(cli, after)
    return 0


def extend_path(folders: Sequence[str], config: Any) -> None:
    """Search ``folders`` first, and the current folder last if the configuration needs it.

    That is if it names, as a class or function, a module of the current folder that is not
    installed. Somebody else may have put files there, which must neither replace a module nor be
    what a library imports if it is there.
    """
    sys.path[:0] = folders
    for name in _dotted_names(config):
        here = Path(name), Path(f"{name}.py")
        if any(path.exists() for path in here) and importlib.util.find_spec(name) is None:
            sys.path.append(str(Path.cwd()))
            return


def _dotted_names(value: Any) -> set[str]:
    """Return the first part of each text in ``value`` that may be the path of a class."""
    if isinstance(value, str):
        words = value.split(".")
        return {words[0]} if len(words) > 1 and all(w.isidentifier() for w in words) else set()
    children = value.values() if isinstance(value, dict) else value
    return set().union(*map(_dotted_names, children)) if isinstance(value, (dict, list)) else set()


def die_with_parent() -> None:
    """Make the kernel kill this rank when its agent dies, so that no rank keeps running."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the agent died before the call


def build_cli(config: dict[str, Any], *, train: bool) -> Any:
    """Return the LightningCLI with its classes instantiated."""
    sys.argv[1:] = []  # LightningCLI warns about arguments that it does not read
    try:
        from lightning.pytorch.cli import LightningCLI
    except ModuleNotFoundError as missing:
        if missing.name not in ("lightning", "lightning.pytorch"):
            raise
        from pytorch_lightning.cli import LightningCLI  # type: ignore[assignment]
    return LightningCLI(
        args=add_trainer_defaults(config, fit_to_world=train),
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        parser_kwargs={"exit_on_error": False},
    )


def add_trainer_defaults(config: dict[str, Any], *, fit_to_world: bool) -> dict[str, Any]:
    """Return ``config`` with ltui's defaults for missing options, and with the run's devices.

    ``fit_to_world`` sets devices and nodes to what the launcher started.
    """
    trainer = {**_TRAINER_DEFAULTS, **(config.get("trainer") or {})}
    if has_checkpoint_callback(trainer):
        trainer["enable_checkpointing"] = True
    if run_dir := os.environ.get("LTUI_RUN_DIR"):
        trainer.setdefault("default_root_dir", run_dir)
    if fit_to_world and "LOCAL_WORLD_SIZE" in os.environ:
        ranks, devices = int(os.environ["LOCAL_WORLD_SIZE"]), trainer.get("devices")
        if not (isinstance(devices, list) and len(devices) == ranks):
            trainer["devices"] = ranks
        trainer["num_nodes"] = int(os.environ.get("GROUP_WORLD_SIZE") or 1)
    return {**config, "trainer": trainer}


def has_checkpoint_callback(trainer: dict[str, Any]) -> bool:
    """Return True if the Trainer's options contain a checkpoint callback."""
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    names = [c.get("class_path", "") if isinstance(c, dict) else str(c) for c in callbacks]
    return any(name.rpartition(".")[2].endswith("Checkpoint") for name in names)


def run(cli: Any, after: list[str]) -> None:
    """Train, then run the methods ``after``."""
    try:
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        for name in after:
            getattr(cli.trainer, name)(cli.model, datamodule=cli.datamodule, verbose=False)
    except RunStopped:
        shut_down(cli)
        raise
    shut_down(cli)


def shut_down(cli: Any) -> None:
    """End the C++ threads of loaders and of the process group in order.

    If they still run while Python exits, they may abort the process. Do not call this after an
    error: other ranks may have exited, and ending the process group could wait for them.
    """
    import torch

    close = getattr(cli.datamodule, "close", None)
    if callable(close):
        close()
    gc.collect()  # iterators in cycles, with their workers and threads
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
    global _is_shut_down
    _is_shut_down = True


_is_shut_down = False
"""True if training has ended without an error and its threads have ended."""


def prepare_exit() -> None:
    """Let Python exit quickly after training, and keep its last messages out of the rank's log.

    While Python exits it would search all objects for cycles again, for a second or more. Without
    that search, libraries such as Triton report every object as leaked, in dozens of lines. These
    go to ``rank-00000.exit`` beside the log.
    """
    if not _is_shut_down:
        return
    gc.freeze()
    with contextlib.suppress(OSError):
        log = Path(os.readlink("/proc/self/fd/2"))
        if log.suffix != ".log":
            return  # a terminal or a pipe
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        messages = os.open(log.with_suffix(".exit"), flags, 0o600)
        os.dup2(messages, 2)
        os.close(messages)


if __name__ == "__main__":
    sys.exit(main())
