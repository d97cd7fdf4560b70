"""While a request waits for a rank, the run says for which one and on which machine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tests.live_processes import wait_until_gone
from tests.nodes.two_homes import TwoHomes

_LATE = """
import pathlib
import time

import lightning.pytorch as pl


class Late(pl.Callback):
    def on_train_batch_end(self, trainer, *_):
        while trainer.global_rank == 1 and pathlib.Path("late").exists():
            time.sleep(0.1)

    # Ranks act there, too.
    on_validation_batch_end = on_train_epoch_end = on_train_batch_end
"""


def test_a_request_names_the_rank_for_which_it_waits(two_homes: TwoHomes) -> None:
    head = two_homes.head
    (head.cwd / "late.py").write_text(_LATE)
    is_late = head.cwd / "late"
    two_homes.run(
        "trainer.max_epochs=2000",
        "data.init_args.loader=torch",
        'trainer.callbacks=[{"class_path": "late.Late"}]',
    )
    name = head.wait_for_step(20)["nodes"][1]["name"]
    missing = f"rank 1 on {name} is missing"

    def detail(request: str) -> str:
        """Return the detail of the run while a request waits for rank 1."""
        is_late.touch()
        with ThreadPoolExecutor() as pool:
            command = pool.submit(head, request, "last")
            found = head.wait(lambda s: missing in (s["detail"] or ""))
            is_late.unlink()
            command.result()
        return str(found["detail"])

    assert detail("checkpoint") == f"saving a checkpoint: {missing}"
    head.wait(lambda s: s["checkpoints"] and s["detail"] is None)
    assert detail("pause") == f"pausing: {missing}"
    head.wait(lambda s: s["state"] == "paused")
    head("continue", "last")
    head.wait(lambda s: s["state"] == "running")
    assert detail("stop").endswith(f"; {missing}")
    assert head.wait(lambda s: s["state"] == "stopped")["checkpoints"][-1]["ok"]
    wait_until_gone(two_homes.processes)
