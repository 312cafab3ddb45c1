"""Activation checkpointing: keep only the inputs of a part of the network and compute its inside again in backward.

Memory falls from every activation to the inputs of the parts plus the inside of one part; the price is at most one
more forward pass, about a third of a step (Chen et al., "Training deep nets with sublinear memory cost", 2016).
The result is bit-equal to the plain run: random numbers are replayed, autocast is restored, and BatchNorm statistics
move once, not twice. (`saving` is the group for checkpoints on disk.)
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..models import blocks, stages


@dataclass(kw_only=True, slots=True)
class Checkpointing:
    """No checkpointing, the harmless default."""

    def parts(self, model: nn.Module) -> Iterable[nn.Module]:
        return ()

    def apply(self, model: nn.Module) -> None:
        """Makes every part recompute its inside in backward. Parameter names stay as they are."""
        for part in self.parts(model):
            part.forward = _recomputed(part)


@dataclass(kw_only=True, slots=True)
class BlockCheckpointing(Checkpointing):
    """Every residual block: the inputs of all blocks are kept."""

    def parts(self, model: nn.Module) -> Iterable[nn.Module]:
        return blocks(model)


@dataclass(kw_only=True, slots=True)
class StageCheckpointing(Checkpointing):
    """Every stage (a run of blocks at one resolution): fewer inputs kept, more alive while one stage is recomputed."""

    def parts(self, model: nn.Module) -> Iterable[nn.Module]:
        return stages(model)


def _recomputed(part: nn.Module) -> Callable[..., Any]:
    """The forward of `part` under the non-reentrant variant, the only one that reaches adapters behind frozen layers."""
    forward = part.forward

    # Compiled code calls checkpoint() as it stands: the graph compiler cannot trace the contexts below.
    @torch.compiler.disable(recursive=False)
    def recomputed_forward(*inputs: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, context_fn=partial(_contexts, part))

    return recomputed_forward


def _contexts(part: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first forward: nothing. Around the recomputation: statistics go to copies that are thrown away."""
    return nullcontext(), _untouched_statistics(part)


@contextmanager
def _untouched_statistics(part: nn.Module) -> Iterator[None]:
    """Lends every normalisation layer copies of its buffers, so that running the forward again leaves no trace.

    Copies, and not a flag of the layer, because the recomputation has to save the same tensors as the first forward.
    """
    kept = [(module, name, buffer) for module in part.modules() for name, buffer in module._buffers.items()]
    try:
        for module, name, buffer in kept:
            module._buffers[name] = None if buffer is None else buffer.clone()
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer
