"""The story of one run, and `build_model`: the order in which the levers act."""

import re
import traceback
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import adapters, config
from .config import Experiment
from .data import Feed, Splits
from .data.feed import fits
from .distributed import World, main_process_first, process_group, report_end, reported_end, world
from .logbook import Logbook, Summary
from .logbook.card import card, describe, environment, hparams
from .logbook.source import source
from .meters.memory import MemoryMeter, blocks_mib, limited, return_memory_at_once, tensor_mib
from .meters.time import StepClock, Stopwatch, process_age_s
from .refusal import Refusal
from .restoring import checkpoint, load_base, normalisation, resume
from .saving import Writer
from .signals import Interrupted, Stop, ignore_signals, signals_ask_to_stop
from .trainer import Diverged, Progress, Trainer


@dataclass(frozen=True)
class Invocation:
    """How a run was asked for."""

    choices: dict[str, str]
    overrides: list[str]
    command: str
    seed: int
    warnings: list[str]
    predicted: dict[str, Any] = field(default_factory=dict)  # keys of the summary's memory


# What allocators other than torch's own say: the CPU's, CUDA's, cuBLAS's and cuDNN's, C++'s and oneDNN's.
OUT_OF_MEMORY = re.compile(
    "can't allocate memory|out of memory|ALLOC_FAILED|bad_alloc|could not create a memory|"
    "could not (create|execute) a primitive(?! descriptor)"  # a descriptor fails where a layer is not supported
)


def run(experiment: Experiment, folder: Path, invocation: Invocation) -> Summary:
    """Trains in this process, alone or as one of several, and returns what came out; `folder` holds the rest.

    Never raises for what happens to the run: `status` and `error` of the summary tell.
    """
    here = world()
    device = pick_device(experiment, here)
    stopwatch, clock = Stopwatch(device, first_section="setup"), StepClock(device)
    summary = Summary(
        choices=invocation.choices,
        overrides=invocation.overrides,
        command=invocation.command,
        seed=invocation.seed,
        started=datetime.now(timezone.utc).isoformat(timespec="microseconds"),
        target_accuracy=experiment.target_accuracy,
    )
    summary.time["startup_s"] = process_age_s()
    summary.memory.update(invocation.predicted)
    logbook = Logbook(folder, summary, is_main=here.is_main)
    if here.is_main:
        try:
            summary.claim(folder, again=experiment.resume == "auto" or here.restarts > 0)
        except Refusal as refusal:
            summary.status, summary.error = "refused", str(refusal)
            return summary  # that directory is another run's: nothing of it is touched
    for warning in invocation.warnings:
        logbook.warn(warning)
    with signals_ask_to_stop() as stop:
        try:
            with process_group(experiment.parallelism.backend_for(device), device):
                train(experiment, folder, invocation, here, device, logbook, stopwatch, clock, stop)
            summary.status = "completed"
        except (Exception, Interrupted) as error:
            ignore_signals()  # a second one must not cut off the summary
            summary.status, summary.error = name_end(error)
            peers_end = reported_end()
            if peers_end and summary.status in ("failed", "interrupted"):
                summary.status, summary.error = peers_end  # this process only lost its connection
            elif summary.status not in ("refused", "interrupted"):
                report_end(summary.status, summary.error)
                if summary.status in ("failed", "oom"):
                    logbook.traceback(traceback.format_exc())
        logbook.close(stopwatch, clock.steady())
    return summary


def train(
    experiment: Experiment,
    folder: Path,
    invocation: Invocation,
    here: World,
    device: torch.device,
    logbook: Logbook,
    stopwatch: Stopwatch,
    clock: StepClock,
    stop: Stop,
) -> None:
    """Builds everything in order, tells what it is, and trains."""
    summary = logbook.summary
    configure_torch(experiment, device, here)
    memory = MemoryMeter(device)
    effective, _ = experiment.batch_sizes(here.size)
    peak_lr = experiment.optimizer.scaled_lr(effective)

    torch.manual_seed(invocation.seed)  # the same first weights on every process
    with memory.building():
        network, model = build_model(experiment, device)
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = experiment.optimizer.build(trainable, peak_lr)

    with main_process_first(experiment.parallelism.distributed):
        splits = experiment.data.load(invocation.seed)
    train_feed, test_feed = build_feeds(experiment, splits, device, here, effective, invocation.seed)
    config.check_num_steps(experiment, num_steps=train_feed.num_steps, num_images=len(splits.train), num_processes=here.size)
    trainer = Trainer(
        model=model,
        network=network,
        optimizer=optimizer,
        scaler=experiment.precision.scaler(network, device),
        peak_lr=peak_lr,
        clip_norm=experiment.optimizer.clip_norm,
        schedule=experiment.schedule,
        precision=experiment.precision,
        parallelism=experiment.parallelism,
        accumulation=experiment.accumulation,
        train_feed=train_feed,
        test_feed=test_feed,
        epochs=experiment.epochs,
        device=device,
        seed=invocation.seed,
        rank=here.rank,
        logbook=logbook,
        stopwatch=stopwatch,
        clock=clock,
        memory=memory,
    )
    resume(experiment, folder, trainer, restarts=here.restarts)

    record_setup(summary, experiment, network, splits, device, here)
    lines = card(
        summary,
        lr_batch=experiment.optimizer.lr_batch,
        lr_scaling=experiment.optimizer.lr_scaling.name,
        images=(len(splits.train), len(splits.test)),
        steps_per_epoch=train_feed.num_steps,
        epochs=experiment.epochs,
    )
    logbook.start(
        hparams(summary),
        lines,
        num_steps=experiment.max_steps or experiment.epochs * train_feed.num_steps,
        from_step=trainer.progress.step,
    )

    def not_saved(sentence: str) -> None:
        summary.failed_saves += 1
        logbook.warn(sentence)

    writer = Writer(experiment.saving, folder, on_failure=not_saved)

    def save(*, is_best: bool) -> None:
        record_progress(summary, trainer.progress)
        if here.is_main:
            with stopwatch.section("save"):
                writer.save(checkpoint(experiment, trainer, splits, summary), is_best=is_best)

    try:
        limit = limited(experiment.memory_limit_mib, device, trainer.held_bytes())
        with limit, stopwatch.section("train"):
            trainer.fit(
                max_steps=experiment.max_steps,
                log_every=experiment.logging.every_steps,
                eval_every=experiment.eval_every_epochs,
                saving=experiment.saving,
                save=save,
                stop=stop,
            )
        with stopwatch.section("save"):
            writer.finish()
            if here.is_main and experiment.saving.writes:
                adapters.write(experiment, network, normalisation(splits), folder)
        memory.agree()
    finally:
        with stopwatch.section("save"):
            writer.wait()
        memory.stop()
        record_progress(summary, trainer.progress)
        summary.memory.update(blocks_mib(network, optimizer))
        resident = [images for images in (train_feed.images, test_feed.images) if images.labels_N.device == device]
        data_mib = tensor_mib(t for images in resident for t in (images.images_NCHW, images.labels_N))
        summary.memory.update(memory.measured(), data_mib=data_mib)


def build_model(experiment: Experiment, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """(network, model): the network with every lever in place, and what the step calls. The order counts."""
    network = experiment.model.build(experiment.data.num_classes())
    load_base(experiment, network)  # before the adapters: a base is a plain network
    experiment.lora.apply(network)  # freezes, and DDP looks at requires_grad when it wraps
    experiment.checkpointing.apply(network)  # after LoRA: the adapters are recomputed with their layers
    network = network.to(device, memory_format=experiment.model.memory_format())  # type: ignore[call-overload]
    if experiment.model.compile:
        network.compile()  # in place, so that parameter names stay plain; sees the layers as they will run
    model = experiment.parallelism.wrap(network, device)  # last: its hooks belong to the final parameters
    return network, model


def build_feeds(
    experiment: Experiment, splits: Splits, device: torch.device, here: World, effective: int, seed: int
) -> tuple[Feed, Feed]:
    """The feeds of training and test images, both on the device where both fit."""
    shared: dict[str, Any] = {
        "mean_C": splits.mean_C,
        "std_C": splits.std_C,
        "device": device,
        "memory_format": experiment.model.memory_format(),
        "batch_size": effective,
        "seed": seed,
        "rank": here.rank,
        "num_processes": here.size,
        "resident": fits(splits.train.num_bytes + splits.test.num_bytes, device),
    }
    padding = experiment.data.padding if experiment.data.augment else None
    train_feed = Feed(splits.train, padding=padding, drop_last=experiment.data.drop_last, **shared)
    return train_feed, Feed(splits.test, **shared)


def record_setup(
    summary: Summary, experiment: Experiment, network: nn.Module, splits: Splits, device: torch.device, here: World
) -> None:
    """What is known of a run before its first step: what was asked for and what is in force."""
    effective, per_device = experiment.batch_sizes(here.size)
    summary.batch = {
        "effective": effective,
        "per_device": per_device,
        "world_size": here.size,
        "accumulation": experiment.accumulation.steps,
    }
    summary.learning_rate = {"base": experiment.optimizer.lr, "effective": experiment.optimizer.scaled_lr(effective)}
    in_force = experiment.precision.in_force(device)
    summary.precision = {
        "requested": experiment.precision.name,
        "in_force": in_force,
        "tf32": "on" if in_force == "tf32" else "off",
    }
    summary.device = describe(device)
    parameters = list(network.parameters())
    summary.model = {
        "parameters": sum(parameter.numel() for parameter in parameters),
        "trainable": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
    }
    summary.environment = environment(device)
    if here.is_main:
        summary.source = source()
        summary.data = describe_data(experiment, splits)


def describe_data(experiment: Experiment, splits: Splits) -> dict[str, int | str]:
    sizes = {"train": len(splits.train), "test": len(splits.test), "classes": experiment.data.num_classes()}
    return {**sizes, "sha256": splits.fingerprint()}


def record_progress(summary: Summary, progress: Progress) -> None:
    summary.optimizer_steps, summary.skipped_steps, summary.epochs = progress.step, progress.skipped, progress.epoch


def pick_device(experiment: Experiment, here: World) -> torch.device:
    device = experiment.resolved_device()
    return torch.device("cuda", here.local_rank) if device.type == "cuda" else device


def configure_torch(experiment: Experiment, device: torch.device, here: World) -> None:
    """The global switches of this process."""
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)
    if experiment.memory_limit_mib is not None and device.type == "cpu":
        return_memory_at_once()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    experiment.precision.configure(device)
    torch.backends.cudnn.benchmark = not experiment.deterministic
    torch.use_deterministic_algorithms(experiment.deterministic)


def name_end(error: BaseException) -> tuple[str, str]:
    """(status, error in one line)."""
    line = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, Refusal):
        return "refused", line
    if isinstance(error, Diverged):
        return "diverged", line
    if isinstance(error, Interrupted):
        return "interrupted", "stopped by a signal"
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or OUT_OF_MEMORY.search(line):
        return "oom", line
    return "failed", f"{type(error).__name__}: {line}"
