"""A usual Hydra project: groups of configuration, instantiated by Hydra."""

from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import seed_everything
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path="../configs", config_name="train")
def main(config: DictConfig) -> None:
    seed_everything(config.seed)
    output = Path(HydraConfig.get().runtime.output_dir)
    trainer = hydra.utils.instantiate(config.trainer)
    model = hydra.utils.instantiate(config.model)
    trainer.fit(model, hydra.utils.instantiate(config.data))
    (output / f"rank-{trainer.global_rank}.txt").write_text(
        f"{HydraConfig.get().job.name} {trainer.global_step}"
    )


if __name__ == "__main__":
    main()
