"""Adapters in peft's own file format: a directory with adapter_config.json and adapter_model.safetensors.

`peft.PeftModel.from_pretrained(plain_network, DIR)` reads it. What trains or moves besides the adapters goes by peft's
`modules_to_save`, whole modules: the head, and every BatchNorm layer, for its statistics. peft then also holds copies of
the frozen scales and shifts of those layers; with `is_trainable=True` it would train them, which Fulcrum does not.
"""

import json
import re
from pathlib import Path
from typing import Any

from torch import nn

from . import tensorfile
from .adapters import Adapter, of_network
from .levers import Lora
from .models import HEAD
from .refusal import Refusal

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's wrappers around the network
# Ways to start that leave the base as it was; others, such as pissa, change it, and their files do not say how.
STARTS = (True, False, "gaussian", "orthogonal", "eva")


def write(network: nn.Module, lora: Lora, about: dict[str, Any], folder: Path) -> None:
    """The adapter of a network that `lora` was applied to, for peft."""
    adapter = of_network(network, lora)
    saved = [HEAD, *(name for name, module in network.named_modules() if module._buffers)]
    state = network.state_dict()
    whole = {name: tensor for name, tensor in state.items() if name.rpartition(".")[0] in saved}
    config = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": "|".join(map(re.escape, adapter.layers())),  # a list would match ends of names
        "modules_to_save": saved,
        "bias": "none",
        "inference_mode": True,
    }
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {PREFIX + name: tensor for name, tensor in {**adapter.tensors, **whole}.items()}
    tensorfile.write(folder / WEIGHTS, tensors, {**about, "base_sha256": adapter.base_sha256})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def read(folder: Path, *, key: str) -> Adapter:
    """The adapter in a directory that peft or `write` has written. Refuses what a plain low-rank branch cannot be."""
    try:
        config = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise Refusal(f"{key}={folder} holds no {CONFIG} of peft's ({error}); give an adapter's file or directory") from error
    expected = {"peft_type": "LORA", "bias": "none", "rank_pattern": {}, "alpha_pattern": {}, "fan_in_fan_out": False}
    others = [name for name, value in expected.items() if (config.get(name) or value) != value]
    if config.get("init_lora_weights", True) not in STARTS:
        others.append("init_lora_weights")
    if others:
        raise Refusal(f"{key}={folder}: {others[0]}={config[others[0]]} is not read; use a LoRA of one rank and no biases")
    tensors, about = tensorfile.read(folder / WEIGHTS, key=key)
    rank, alpha = config["r"], config["lora_alpha"]
    return Adapter(
        tensors={name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()},
        rank=rank,
        alpha=alpha * rank**0.5 if config.get("use_rslora") else alpha,  # alpha / √r in front of the branch
        dropout=config.get("lora_dropout", 0.0),
        base_sha256=about.get("base_sha256"),
    )
