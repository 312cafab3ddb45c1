"""The memory of a run before it starts: its own code, traced on fake tensors.

A fake tensor has a shape, a type and a device but no data, so `build_model`, `Feed`, `Trainer.step` and `evaluate` run as
they will in training, in a second and for any size, while their storages are counted as they come and go: a step with
the optimizer's state in place and an evaluation batch, as `MemoryMeter` hears them. What a kernel takes while it runs no
trace can see; `temporary_bytes` has the kernels in which it matters.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from .config import Experiment, check_num_steps
from .data import Batch, Cifar10, Data, Images, Splits, Synthetic
from .data.sources import SUFFIXES
from .distributed import World
from .levers import Accumulation, Parallelism
from .levers.precision import LossScaler
from .logbook.summary import BLOCKS
from .meters.memory import MIB, blocks_mib, tensor_mib
from .run import build_feeds, build_model
from .trainer import Trainer, evaluate

aten = torch.ops.aten


@dataclass(frozen=True)
class Sizes:
    """How many images a run has, and how many pixels they are high and wide."""

    num_train: int
    num_test: int
    image_size: int


@dataclass(frozen=True)
class Held:
    """What the forward pass of one micro-batch leaves for its backward pass, by who made it: a layer's dotted name (or
    network, input, loss), and the operation."""

    layer: str
    operation: str
    mib: float


@dataclass(frozen=True)
class Moment:
    """What is there while one operation runs."""

    phase: str
    mib: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The predicted blocks of memory, with the names and definitions of summary.json's `memory`.

    held: the activation block in parts; timeline: a step and an evaluation batch, operation by operation; flops_per_image:
    products and sums of one image in a step, recomputation included.
    """

    peak_mib: float
    parameters_mib: float
    gradients_mib: float
    optimizer_mib: float
    activations_mib: float
    buffers_mib: float
    data_mib: float
    held: list[Held]
    timeline: list[Moment]
    flops_per_image: float

    def blocks(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in BLOCKS}


def sizes_of(data: Data) -> Sizes:
    """Known without reading an image."""
    if isinstance(data, Cifar10):
        return Sizes(50_000, 10_000, 32)
    if isinstance(data, Synthetic):
        return Sizes(data.train_size, data.test_size, data.image_size)
    train, test = (
        sum(path.suffix.lower() in SUFFIXES for path in (Path(data.root) / split).glob("*/*")) for split in ("train", "test")
    )
    return Sizes(train, test, data.image_size)


def estimate(
    experiment: Experiment, *, num_processes: int = 1, device: torch.device | None = None, sizes: Sizes | None = None
) -> Estimate:
    """What one of the processes of a run will need, without allocating any of it. model.compile is left out: what a
    compiler fuses is known once it has compiled. A CUDA device has to be there: autograd asks for it."""
    device = device or experiment.resolved_device()
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)  # what fake tensors say
    sizes = sizes or sizes_of(experiment.data)
    tracer = Tracer(device)
    with fake_tensors(), tracer, tracer.names_layers():
        trainer = build_trainer(experiment, num_processes, device, sizes, tracer)
        num_in_epoch = trainer.train_feed.num_steps
        check_num_steps(experiment, num_steps=num_in_epoch, num_images=sizes.num_train, num_processes=num_processes)
        tracer.start()
        if experiment.max_steps != 1:
            update(trainer.optimizer)
        for batch in islice(trainer.train_feed.epoch(0), 1):
            tracer.start_step()
            trainer.step(batch)
        timeline, flops, num_traced = tracer.timeline, tracer.flops, tracer.num_samples
        del batch
        tracer.phase = "evaluation"
        network, feed = trainer.network, trainer.test_feed
        evaluate(network, feed, experiment.precision, Parallelism(), device, batches=first_of_two(feed.in_order()))
        resident = [images for images in (trainer.train_feed.images, feed.images) if images.labels_N.device == device]
        return Estimate(
            peak_mib=tracer.peak_bytes / MIB,
            activations_mib=sum(tracer.held_bytes.values()) / MIB,
            **blocks_mib(network, trainer.optimizer),
            data_mib=tensor_mib(t for images in resident for t in (images.images_NCHW, images.labels_N)),
            held=[Held(layer, operation, size / MIB) for (layer, operation), size in tracer.held_bytes.items()],
            timeline=timeline,
            flops_per_image=flops / num_traced,
        )


def update(optimizer: torch.optim.Optimizer) -> None:
    """The first step as far as later ones see it: the optimizer's state is there."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def first_of_two(batches: Iterator[Any]) -> Iterator[Any]:
    """The first batch; the second is prepared while the first is held, and used for nothing."""
    yield next(batches)
    next(batches, None)


def build_trainer(experiment: Experiment, num_processes: int, device: torch.device, sizes: Sizes, tracer: "Tracer") -> Trainer:
    """The trainer of `run.train` as far as `step` uses it."""
    plain = replace(
        experiment,
        lora=replace(experiment.lora, base=None),  # the same shapes
        model=replace(experiment.model, compile=False),
        parallelism=Parallelism(),
    )
    effective, _ = experiment.batch_sizes(num_processes)
    network, model = build_model(plain, device)
    tracer.name(network)
    trainable = [parameter for parameter in network.parameters() if parameter.requires_grad]
    splits = fake_splits(sizes)
    train_feed, test_feed = build_feeds(experiment, splits, device, World(size=num_processes), effective, seed=0)
    scaler = experiment.precision.scaler(network, device)
    if isinstance(scaler, LossScaler):  # which gradients overflow no trace can know: every step is applied
        scaler.scaler.step = lambda optimizer: optimizer.step()  # type: ignore[method-assign, misc]
        scaler.value = 0.0  # the scale reads as 1, so it does not fall
    nobody: Any = None  # step does not use them
    return Trainer(
        model=model,
        network=network,
        optimizer=experiment.optimizer.build(trainable, experiment.optimizer.lr),
        scaler=scaler,
        peak_lr=experiment.optimizer.lr,
        clip_norm=experiment.optimizer.clip_norm,
        schedule=experiment.schedule,
        precision=experiment.precision,
        parallelism=Traced(tracer, trainable if experiment.parallelism.distributed else []),
        accumulation=Shortened(steps=experiment.accumulation.steps, tracer=tracer),
        train_feed=train_feed,
        test_feed=test_feed,
        epochs=experiment.epochs,
        device=device,
        seed=0,
        rank=0,
        logbook=nobody,
        stopwatch=nobody,
        clock=nobody,
        memory=nobody,
    )


@dataclass(frozen=True)
class Made:
    """A storage that is there. by: the layer and the operation that made it."""

    storage: weakref.ref
    size: int
    number: int
    by: tuple[str, str]


class Tracer(TorchDispatchMode):
    """Counts the storages that the operations of a trace make, and tells when the last tensor lets go of one."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.granule = 512 if device.type == "cuda" else 1  # CUDA's allocator rounds up to it
        self.storages: dict[int, Made] = {}
        self.num_made = 0
        self.current_bytes = self.peak_bytes = 0
        self.layers: list[str] = []
        self.layer_names: dict[nn.Module, str] = {}
        self.held_bytes: dict[tuple[str, str], int] = defaultdict(int)
        self.phase = "setup"

    def name(self, network: nn.Module) -> None:
        self.layer_names = {module: name or "network" for name, module in network.named_modules()}

    def start(self) -> None:
        """What was needed to build the model is gone."""
        self.peak_bytes = self.current_bytes

    def start_step(self) -> None:
        self.phase = "input"
        self.num_made_before = self.num_made
        self.timeline: list[Moment] = []
        self.flops = self.num_samples = 0

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self.phase = "forward"
        yield
        self.phase = "update" if last else "input"

    def _start_backward(self) -> None:
        self.phase = "backward"
        if self.held_bytes:
            return  # only the first, largest micro-batch of a step: from the second on gradients are there too
        for made in self.storages.values():
            if made.number > self.num_made_before:
                self.held_bytes[made.by] += made.size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return 1.0  # a number that the host reads: the loss scale, or the count of AdamW's steps
        if func is aten._pin_memory.default:
            return args[0]  # memory of the host
        if func is aten._fused_sgd_.default:
            return None  # in place, and not known to fake tensors
        if func is torch.ops.prim.device.default:
            return func(*args)  # the question where a fake tensor would be
        if self.phase == "forward" and torch._C._current_autograd_node() is not None:
            self._start_backward()
        if self.phase == "backward" and func is aten.add.Tensor and not torch.is_grad_enabled():
            func = aten.add_.Tensor  # where branches meet autograd adds up gradients: in place, where tensors are real
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._add(tensor, func)
        extra_bytes = temporary_bytes(func, args, result) if self.device.type == "cpu" else 0
        self.peak_bytes = max(self.peak_bytes, self.current_bytes + extra_bytes)
        if self.phase != "setup":
            self.timeline.append(Moment(self.phase, (self.current_bytes + extra_bytes) / MIB))
            if flops := flop_registry.get(func.overloadpacket):
                self.flops += flops(*args, **kwargs, out_val=result)
        return result

    def _add(self, tensor: Tensor, func: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.storages or tensor.device != self.device:
            return
        size = -(-storage.nbytes() // self.granule) * self.granule
        outside = "loss" if self.phase == "forward" else self.phase
        by = (self.layers[-1] if self.layers else outside, func.overloadpacket.__name__)
        self.num_made += 1
        self.storages[key] = Made(weakref.ref(storage, partial(self._release, key)), size, self.num_made, by)
        self.current_bytes += size

    def _release(self, key: int, reference: weakref.ref) -> None:
        self.current_bytes -= self.storages.pop(key).size

    @contextmanager
    def names_layers(self) -> Iterator[None]:
        """Inside, `layers` ends with the layer that runs."""

        def enter(module: nn.Module, inputs: Any) -> None:
            self.layers.append(self.layer_names[module])

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            self.layers.pop()

        # always: a recomputation stops with an exception as soon as it has what backward needs
        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def tensors_in(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from tensors_in(part)


class Traced(Parallelism):
    """Tells the tracer where a micro-batch begins and ends, and stands in for DDP, whose reducer needs real tensors.

    buckets: in the last micro-batch of a step DDP copies each gradient into its place in a bucket as soon as it is made, and
    the buckets stay (gradient_as_bucket_view=True).
    """

    def __init__(self, tracer: Tracer, bucketed: list[nn.Parameter]) -> None:
        self.tracer = tracer
        self.is_last = False
        for parameter in bucketed:
            parameter.register_post_accumulate_grad_hook(partial(self._move, torch.empty_like(parameter)))

    def sync(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        self.is_last = last
        return self.tracer.micro_batch(last=last)

    def _move(self, place: Tensor, parameter: Tensor) -> None:
        if self.is_last:
            parameter.grad = place


@dataclass(kw_only=True)
class Shortened(Accumulation):
    """The first two micro-batches and the last: in the others everything is as it is in the second."""

    tracer: Tracer

    def split(self, batch: Batch) -> Iterator[tuple[Batch, float, bool]]:
        parts = list(super().split(batch))
        for part in parts if len(parts) < 4 else [*parts[:2], parts[-1]]:
            self.tracer.num_samples += len(part[0])
            yield part


def fake_tensors() -> FakeTensorMode:
    """The mode, without its memory of which fake tensor stands for which: `Module.to` refuses to move remembered ones."""
    mode = FakeTensorMode(allow_fallback_kernels=False)  # a fallback would allocate
    mode.fake_tensor_converter.set_tensor_memo = lambda t, v: None  # type: ignore[method-assign]
    return mode


def fake_splits(sizes: Sizes) -> Splits:
    train, test = (
        Images(
            torch.empty((number, 3, sizes.image_size, sizes.image_size), dtype=torch.uint8),
            torch.empty(number, dtype=torch.int64),
        )
        for number in (sizes.num_train, sizes.num_test)
    )
    return Splits(train, test, torch.empty(3), torch.empty(3))


def temporary_bytes(func: Any, args: Any, result: Any) -> int:
    """What a kernel of the CPU takes beyond its result while it runs. Found by comparing each operation of real steps with the
    allocator's events; scratch space and sums a channel, which depend on the number of threads, are too small to matter.
    """
    kernel = KERNELS.get(func.overloadpacket)
    return kernel(args, result) if kernel else 0


def convolution(args: Any, result: Tensor) -> int:
    """oneDNN reorders the weight to blocks of channels. A contiguous input is reordered too, and the result back, in 16 bits
    by way of another copy."""
    images, weight = args[:2]
    if is_channels_last(images) or is_channels_last(weight):
        return weight.nbytes
    is_16_bit = result.element_size() == 2
    return max(images.nbytes + weight.nbytes, result.nbytes * (1 + is_16_bit))


def convolution_backward(args: Any, result: tuple[Tensor | None, ...]) -> int:
    """The gradient of the weight is made in blocks and reordered twice, that of the input needs the weight in blocks. In a
    contiguous network both operands and the gradient of the input are reordered too."""
    gradient, images, weight = args[:3]
    if is_channels_last(images) or is_channels_last(weight):
        return weight.nbytes * (1 if result[1] is None else 2)
    if result[0] is None:
        return gradient.nbytes + weight.nbytes
    return images.nbytes + max(images.nbytes, gradient.nbytes) + weight.nbytes


def native_batch_norm_backward(args: Any, result: tuple[Tensor | None, ...]) -> int:
    """The gradient of the input is made twice."""
    return args[1].nbytes


def mean(args: Any, result: Tensor) -> int:
    """16-bit numbers are added up as a copy in fp32."""
    return (args[0].numel() + result.numel()) * 4 if args[0].element_size() < 4 else 0


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


KERNELS: dict[Any, Callable[[Any, Any], int]] = {
    aten.convolution: convolution,
    aten.convolution_backward: convolution_backward,
    aten.native_batch_norm_backward: native_batch_norm_backward,
    aten.mean: mean,
}
