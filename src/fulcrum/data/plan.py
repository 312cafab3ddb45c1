"""The plan of an epoch: order and augmentation as functions of (seed, epoch, sample index) alone.

Every draw of an epoch is made at once, for all samples, and looked up by sample index. Neither the rank nor the
micro-batch nor the place where a run was resumed can change it: two processes see exactly what one would have seen.
"""

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EpochPlan:
    """order_N: the sample at each place; offsets_N2: rows and columns cut off; flips_N: mirrored or not (by sample)."""

    order_N: Tensor
    offsets_N2: Tensor
    flips_N: Tensor


def plan_epoch(seed: int, epoch: int, num_samples: int, *, padding: int, device: torch.device) -> EpochPlan:
    """Draws on the CPU, so that every device gets the same plan. padding: pixels around an image before it is cropped."""
    generator = torch.Generator().manual_seed(derived_seed(seed, "epoch", epoch))
    return EpochPlan(
        order_N=torch.randperm(num_samples, generator=generator).to(device),
        offsets_N2=torch.randint(0, 2 * padding + 1, (num_samples, 2), generator=generator).to(device),
        flips_N=(torch.randint(0, 2, (num_samples,), generator=generator) == 1).to(device),
    )


def derived_seed(seed: int, *purpose: object) -> int:
    """A seed for one purpose: different purposes and seeds give unrelated streams (a hash, not a sum)."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
