"""Worker entry for presets, started by torch elastic.

``python -m ltui.training.rank.train_preset CONFIG.json``

``CONFIG.json`` is ``{"config": {...}, "after_fit": ["test"], "python_path": [...]}`` where
``config`` is what LightningCLI itself accepts: ``seed_everything``, ``trainer``, ``model``,
``data``, ``optimizer``, ``lr_scheduler``. With ``--check`` the classes are instantiated and
nothing is trained; problems are printed as JSON lines ``{"where", "what", "remedy"}``. Exit code 2
where the configuration is wrong.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from ltui.training.rank.config_errors import ConfigError, to_config_error
from ltui.training.rank.coordination.stop_exception import RunStopped
from ltui.training.rank.log_call_check import find_log_call_warnings

AFTER_FIT = ("validate", "test")
_PR_SET_PDEATHSIG = 1
_TRAINER_DEFAULTS = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


def main(arguments: list[str] | None = None) -> int:
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
    try:
        document = json.loads(Path(paths[0]).read_text())
        sys.path[:0] = document.get("python_path") or []
        cli = build(document["config"], train=not check)
        after = check_after_fit(document.get("after_fit") or [])
    except (Exception, SystemExit) as error:  # everything before fit is configuration
        mistake = to_config_error(error)
        print(json.dumps(mistake.to_document()) if check else mistake, file=_out(check))
        if os.environ.get("LTUI_TRACEBACK"):
            raise
        return 2
    if check:
        _tell_cautions(cli)
    else:
        run(cli, after)
    return 0


def _tell_cautions(cli: Any) -> None:
    """JSON lines ``{"where", "what", "remedy"}`` of what the module does that freezes ranks."""
    for caution in find_log_call_warnings(type(cli.model)):
        document = {"where": "model", "what": caution.what, "remedy": caution.remedy}
        print(json.dumps(document))


def _out(check: bool) -> Any:
    return sys.stdout if check else sys.stderr


def die_with_parent() -> None:
    """Have the kernel kill this rank when its agent dies, so that no rank is left behind."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before the kernel was asked


def build(config: dict[str, Any], *, train: bool) -> Any:
    """The LightningCLI with its classes instantiated."""
    sys.argv[1:] = []  # LightningCLI warns of arguments that it is not meant to read
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
    """``config`` with what is good for a watched run where it says nothing, and the devices it was
    given."""
    trainer = {**_TRAINER_DEFAULTS, **(config.get("trainer") or {})}
    if has_checkpoint_callback(trainer):
        trainer["enable_checkpointing"] = True
    if run_dir := os.environ.get("LTUI_RUN_DIR"):
        trainer.setdefault("default_root_dir", run_dir)
    if fit_to_world and "LOCAL_WORLD_SIZE" in os.environ:
        trainer["devices"] = resolve_devices(
            trainer.get("devices"), int(os.environ["LOCAL_WORLD_SIZE"])
        )
        trainer["num_nodes"] = int(os.environ.get("GROUP_WORLD_SIZE") or 1)
    return {**config, "trainer": trainer}


def has_checkpoint_callback(trainer: dict[str, Any]) -> bool:
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    names = [c.get("class_path", "") if isinstance(c, dict) else str(c) for c in callbacks]
    return any(name.rpartition(".")[2].endswith("Checkpoint") for name in names)


def resolve_devices(asked: Any, local_world_size: int) -> Any:
    """The launcher has decided how many ranks there are; a list of that many devices is kept."""
    if isinstance(asked, list) and len(asked) == local_world_size:
        return asked
    return local_world_size


def check_after_fit(names: list[str]) -> list[str]:
    for name in names:
        if name not in AFTER_FIT:
            raise ConfigError(
                where="after_fit",
                what=f"{name!r} can't be run after fit.",
                remedy=f"Use {' or '.join(AFTER_FIT)}.",
            )
    return names


def run(cli: Any, after: list[str]) -> None:
    try:
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        for name in after:
            getattr(cli.trainer, name)(cli.model, datamodule=cli.datamodule, verbose=False)
    except RunStopped:
        leave(cli)
        raise
    leave(cli)


def leave(cli: Any) -> None:
    """End what threads of C++ still do, in order. Left to Python's own end they may abort it.

    Not after an error: other ranks may be gone, and ending the process group could wait for them.
    """
    import torch

    close = getattr(cli.datamodule, "close", None)
    if callable(close):
        close()
    gc.collect()  # iterators in cycles, with their workers and threads
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
