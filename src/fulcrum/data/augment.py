"""Crop, flip and normalisation as tensor operations on a whole batch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def crop_and_flip(images_NCHW: Tensor, offsets_N2: Tensor, flips_N: Tensor, *, padding: int) -> Tensor:
    """Pads with black, cuts the window at each sample's offset back to the old size, mirrors where asked."""
    height, width = images_NCHW.shape[2:]
    padded = F.pad(images_NCHW, (padding,) * 4)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # N C 2p+1 2p+1 H W: a view
    samples = torch.arange(len(images_NCHW), device=images_NCHW.device)
    cropped = windows[samples, :, offsets_N2[:, 0], offsets_N2[:, 1]]
    return torch.where(flips_N[:, None, None, None], cropped.flip(3), cropped)


def normalise(images_NCHW: Tensor, mean_C: Tensor, std_C: Tensor) -> Tensor:
    """uint8 pixels as numbers of mean_C's type, with mean 0 and standard deviation 1 a channel over the training set."""
    return (images_NCHW.to(mean_C.dtype) - mean_C[:, None, None]) / std_C[:, None, None]
