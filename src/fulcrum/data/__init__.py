"""Images as one uint8 tensor, the plan of an epoch, and batched augmentation: no loader processes, no files in a step."""

from .dataset import Data, Images, Splits
from .feed import Batch, Feed
from .sources import Cifar10, ImageFolder, Synthetic

__all__ = ["Batch", "Cifar10", "Data", "Feed", "ImageFolder", "Images", "Splits", "Synthetic"]
