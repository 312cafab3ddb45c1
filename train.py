"""Trains one network with the levers you pull, and tells what they cost.

python train.py experiment=quickstart
python train.py precision=bf16 accumulation=x4 checkpointing=block lora=r8
python train.py parallelism=ddp                                   starts torchrun itself
torchrun --nproc_per_node=2 train.py parallelism=ddp
python train.py -m precision=fp32,bf16 accumulation=none,x4
python train.py --help                                            every group, option and key
"""

import hydra
from omegaconf import DictConfig

from fulcrum import launch


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def train(composed: DictConfig) -> dict[str, object]:
    return launch.start(composed)


if __name__ == "__main__":
    launch.main(train)
