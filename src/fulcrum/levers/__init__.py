"""The five levers, one file each: settings and behaviour side by side. `run.build_model` holds the order they act in."""

from .accumulation import Accumulation
from .checkpointing import BlockCheckpointing, Checkpointing, StageCheckpointing
from .lora import Lora, NoLora
from .parallelism import Ddp, Parallelism
from .precision import Bf16, Fp16, Precision, Tf32

__all__ = [
    "Accumulation",
    "Bf16",
    "BlockCheckpointing",
    "Checkpointing",
    "Ddp",
    "Fp16",
    "Lora",
    "NoLora",
    "Parallelism",
    "Precision",
    "StageCheckpointing",
    "Tf32",
]
