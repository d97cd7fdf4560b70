"""``torch_engine.py RANKS [key=value ...]``: real Lightning ranks, forked from one process that has
imported torch already, so that a start costs one import whatever the number of ranks.

Rank ``r`` is told from the others by its process name, ``rank-r``.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "faults" / "scripts"))

import hollow

hollow.hide()

import lightning.pytorch as pl  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

BATCHES = 200


class Model(pl.LightningModule):
    def __init__(self, step_s: float) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(512, 1)
        )
        self.step_s = step_s

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        time.sleep(self.step_s)
        rows, targets = batch
        return torch.nn.functional.mse_loss(self.layers(rows).squeeze(-1), targets)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def rank_main(rank: int, ranks: int, options: dict[str, str]) -> None:
    Path("/proc/self/comm").write_text(f"rank-{rank}")
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.manual_seed(rank)
    rows = torch.randn(16 * BATCHES, 8, generator=torch.Generator().manual_seed(0))
    data = DataLoader(TensorDataset(rows, rows.sum(1)), batch_size=8, shuffle=True)
    trainer = pl.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp", max_epochs=int(options.get("epochs", 40)),
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=os.environ["LTUI_RUN_DIR"],
    )  # fmt: skip
    trainer.fit(Model(float(options.get("step_s", 0.01))), data)


def main() -> int:
    ranks = int(sys.argv[1])
    options = dict(word.split("=", 1) for word in sys.argv[2:])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(
        {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
         "NODE_RANK": "0", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    )  # fmt: skip
    children = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                rank_main(rank, ranks, options)
                code = 0
            except SystemExit as left:
                code = int(left.code or 0)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        children.append(pid)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    worst = 0
    while children:
        pid, status = os.wait()
        if pid not in children:
            continue
        children.remove(pid)
        code = os.waitstatus_to_exitcode(status)
        if code and not worst:
            # As launchers do: one failed, so the others are ended.
            worst = 1
            for other in children:
                os.kill(other, signal.SIGKILL)
    return worst


if __name__ == "__main__":
    sys.exit(main())
