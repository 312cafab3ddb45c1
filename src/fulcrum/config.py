"""The configuration as typed objects: one field a group, one class an option, checked against each other before work.

Each option's YAML names its class in its first line (`/schema/<group>/<Class>@_here_`), so Hydra refuses a wrong key or
type while composing. All options of a group share one set of keys: a sweep over the group can set any of them.
"""

import sys
from dataclasses import dataclass, field, fields
from enum import Enum

import torch
from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

from . import levers, saving
from .data import Cifar10, Data, ImageFolder, Synthetic
from .models import CifarResNet, Model, TorchvisionResNet
from .optimizer import AdamW, Optimizer, Sgd
from .refusal import Refusal, above, at_least, did_you_mean
from .saving import SaveAll, SaveLast, Saving
from .schedule import Cosine, MultiStep, OneCycle, Schedule


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass(kw_only=True, slots=True)
class BatchSize:
    """`effective` samples make one optimizer step; `per_device` fixes what one forward pass sees instead."""

    effective: int | None = 128
    per_device: int | None = None


@dataclass(kw_only=True, slots=True)
class Logging:
    every_steps: int = 10


@dataclass(kw_only=True, slots=True)
class Experiment:
    """Everything one run is made of."""

    precision: levers.Precision = MISSING
    parallelism: levers.Parallelism = MISSING
    accumulation: levers.Accumulation = MISSING
    checkpointing: levers.Checkpointing = MISSING
    lora: levers.NoLora = MISSING
    model: Model = MISSING
    data: Data = MISSING
    optimizer: Optimizer = MISSING
    schedule: Schedule = MISSING
    saving: Saving = MISSING
    batch: BatchSize = field(default_factory=BatchSize)
    logging: Logging = field(default_factory=Logging)
    seed: int | None = 0
    epochs: int = 10
    max_steps: int | None = None
    target_accuracy: float | None = None
    eval_every_epochs: int = 1
    device: Device = Device.auto
    threads: int | None = None
    memory_limit_mib: float | None = None
    resume: str = "none"
    skip_refused: bool = False
    deterministic: bool = False

    def resolved_device(self) -> torch.device:
        """cuda where it was asked for or is there, else cpu."""
        if self.device is Device.cpu or (self.device is Device.auto and not torch.cuda.is_available()):
            return torch.device("cpu")
        return torch.device("cuda")

    def batch_sizes(self, num_processes: int) -> tuple[int, int]:
        """(effective, per device). Refuses an effective batch that does not divide."""
        parts = num_processes * self.accumulation.steps
        if self.batch.per_device is not None:
            return self.batch.per_device * parts, self.batch.per_device
        if self.batch.effective is None:
            raise Refusal("batch.effective=null needs batch.per_device; give one of the two")
        if self.batch.effective % parts:
            raise Refusal(
                f"batch.effective={self.batch.effective} does not divide into accumulation.steps="
                f"{self.accumulation.steps} x {num_processes} processes; use a multiple of {parts}"
            )
        return self.batch.effective, self.batch.effective // parts


GROUPS: dict[str, tuple[type, ...]] = {
    "precision": (levers.Precision, levers.Tf32, levers.Fp16, levers.Bf16),
    "parallelism": (levers.Parallelism, levers.Ddp),
    "accumulation": (levers.Accumulation,),
    "checkpointing": (levers.Checkpointing, levers.BlockCheckpointing, levers.StageCheckpointing),
    "lora": (levers.NoLora, levers.Lora),
    "model": (CifarResNet, TorchvisionResNet),
    "data": (Cifar10, ImageFolder, Synthetic),
    "optimizer": (Sgd, AdamW),
    "schedule": (Schedule, Cosine, OneCycle, MultiStep),
    "saving": (Saving, SaveLast, SaveAll),
}


def register() -> None:
    """Makes the classes known to Hydra under schema/<group>/<Class>."""
    store = ConfigStore.instance()
    store.store(group="schema", name="Experiment", node=Experiment)
    for group, classes in GROUPS.items():
        for cls in classes:
            store.store(group=f"schema/{group}", name=cls.__name__, node=cls)


def load(composed: DictConfig) -> Experiment:
    """The composed configuration as an Experiment. Refuses a key of its own making (+key=value)."""
    known = [field.name for field in fields(Experiment)]
    for key in map(str, composed):
        if key not in known:
            raise Refusal(f"+{key}: there is no key '{key}'; " + did_you_mean(key, known))
    experiment = OmegaConf.to_object(composed)
    assert isinstance(experiment, Experiment)
    return experiment


def check(experiment: Experiment, *, num_processes: int, typed: dict[str, str]) -> list[str]:
    """Refuses what cannot work, alone or in combination, before any image is read; returns warnings, a sentence each.

    typed: the overrides of the command line, {key: value}.
    """
    device = _check_device(experiment)
    for key, value in (
        ("epochs", experiment.epochs),
        ("max_steps", experiment.max_steps),
        ("eval_every_epochs", experiment.eval_every_epochs),
        ("logging.every_steps", experiment.logging.every_steps),
        ("threads", experiment.threads),
        ("batch.effective", experiment.batch.effective),
        ("batch.per_device", experiment.batch.per_device),
    ):
        at_least(key, value, 1)
    at_least("seed", experiment.seed, 0)
    _check_limit(experiment.memory_limit_mib, device)
    if experiment.target_accuracy is not None and not 0 < experiment.target_accuracy <= 1:
        raise Refusal(f"target_accuracy={experiment.target_accuracy:g} must lie in (0, 1]; use a fraction such as 0.8")
    experiment.precision.check(device)
    experiment.parallelism.check(device)
    experiment.accumulation.check()
    experiment.lora.check()
    experiment.model.check()
    experiment.optimizer.check()
    experiment.schedule.check(experiment.epochs)
    experiment.saving.check()
    experiment.data.check()
    _check_batch(experiment, num_processes, typed)
    _check_targets(experiment)
    _check_paths(experiment)
    return _warnings(experiment, device, typed)


def _check_device(experiment: Experiment) -> torch.device:
    if experiment.device is Device.cuda and not torch.cuda.is_available():
        raise Refusal("device=cuda asks for an NVIDIA GPU and this machine shows none; use device=cpu or device=auto")
    return experiment.resolved_device()


def _check_limit(limit_mib: float | None, device: torch.device) -> None:
    above("memory_limit_mib", limit_mib, 0)
    if limit_mib is not None and device.type == "cpu" and sys.platform != "linux":
        raise Refusal(f"memory_limit_mib={limit_mib:g} works on CUDA devices and on Linux only; use memory_limit_mib=null")


def _check_batch(experiment: Experiment, num_processes: int, typed: dict[str, str]) -> None:
    effective, per_device = experiment.batch_sizes(num_processes)
    if "batch.effective" in typed and experiment.batch.effective not in (effective, None):
        raise Refusal(
            f"batch.effective={experiment.batch.effective} is not batch.per_device={per_device} x accumulation.steps="
            f"{experiment.accumulation.steps} x {num_processes} processes = {effective}; give one of the two"
        )
    train_size = experiment.data.train_size
    if experiment.data.drop_last and isinstance(experiment.data, Synthetic) and train_size < effective:
        raise Refusal(_nothing_left(train_size, effective, num_processes))


def check_num_steps(experiment: Experiment, *, num_steps: int, num_images: int, num_processes: int) -> None:
    """Refuses an epoch without a single optimizer step, once the number of images is known."""
    if num_steps == 0:
        effective, _ = experiment.batch_sizes(num_processes)
        raise Refusal(_nothing_left(num_images, effective, num_processes))


def _nothing_left(num_images: int, effective: int, num_processes: int) -> str:
    return (
        f"data.drop_last=true leaves nothing of {num_images} training images with batch.effective={effective} on "
        f"{num_processes} processes; use a smaller batch or data.drop_last=false"
    )


def _check_targets(experiment: Experiment) -> None:
    """Builds the network without memory, to find the layers that adapters are meant for."""
    if isinstance(experiment.lora, levers.Lora) and experiment.lora.targets:
        with torch.device("meta"):
            experiment.lora.targeted(experiment.model.build(experiment.data.num_classes()))


def _check_paths(experiment: Experiment) -> None:
    if experiment.resume not in ("none", "auto"):
        saving.find(experiment.resume, key="resume")
    if isinstance(experiment.lora, levers.Lora) and experiment.lora.base is not None:
        saving.find(experiment.lora.base, key="lora.base")


def _warnings(experiment: Experiment, device: torch.device, typed: dict[str, str]) -> list[str]:
    """What was typed and will have no effect, or another one than its name says."""
    warnings = []
    for group in GROUPS:
        option = getattr(experiment, group)
        for key in getattr(option, "unused", ()):
            if f"{group}.{key}" in typed:
                warnings.append(f"{group}.{key}={typed[f'{group}.{key}']} has no effect with this option of {group}")
    if experiment.precision.in_force(device) != experiment.precision.name:
        warnings.append(
            f"precision={experiment.precision.name} has no effect on this device; "
            f"{experiment.precision.in_force(device)} is in force"
        )
    if experiment.precision.name == "fp16" and device.type == "cpu":
        warnings.append("precision=fp16 is emulated on most CPUs and many times slower than fp32; good for numerics only")
    if isinstance(experiment.schedule, OneCycle) and experiment.schedule.warmup_epochs:
        warnings.append("schedule.warmup_epochs comes on top of the rise of onecycle")
    return warnings
