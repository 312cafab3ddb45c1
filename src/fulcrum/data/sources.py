"""The three options of the group: CIFAR-10 itself, a folder of image files, and images made from the seed."""

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..refusal import Refusal
from .dataset import Data, Images, Splits, channel_statistics
from .plan import derived_seed

SUFFIXES = {".jpg", ".jpeg", ".png"}
CACHE_FORMAT = 1  # raise it when what a cache file holds changes


@dataclass(kw_only=True, slots=True)
class Cifar10(Data):
    """The original pixels (Krizhevsky, 2009), through torchvision, which verifies its download by checksum."""

    unused: ClassVar[tuple[str, ...]] = ("train_size", "test_size", "image_size", "classes")

    def check(self) -> None:
        Data.check(self)
        root = Path(self.root)
        has_files = (root / "cifar-10-batches-py").is_dir() or (root / "cifar-10.pt").is_file()
        if not self.download and not has_files:
            raise Refusal(f"data.root={self.root} holds no CIFAR-10; use data.download=true, or data=synthetic")

    def num_classes(self) -> int:
        return 10

    def load(self, seed: int) -> Splits:
        cache = Path(self.root) / "cifar-10.pt"
        return _read_cache(cache, "cifar-10") or _write_cache(cache, "cifar-10", self._read())

    def _read(self) -> Splits:
        import torchvision  # slow to import, and needed once

        try:
            halves = [torchvision.datasets.CIFAR10(self.root, train=train, download=self.download) for train in (True, False)]
        except (OSError, RuntimeError) as error:
            raise Refusal(
                f"data.root={self.root}: CIFAR-10 could not be had ({error}); "
                "check the connection, put the files there, or use data=synthetic"
            ) from error
        train, test = (
            Images(torch.from_numpy(half.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(half.targets)) for half in halves
        )
        return Splits(train, test, *channel_statistics(train.images_NCHW))


@dataclass(kw_only=True, slots=True)
class ImageFolder(Data):
    """train/<class>/*.jpg|png and test/<class>/…; each image is cut to a square in its middle and resized."""

    unused: ClassVar[tuple[str, ...]] = ("download", "train_size", "test_size", "classes")

    def check(self) -> None:
        Data.check(self)
        for split in ("train", "test"):
            if not (Path(self.root) / split).is_dir():
                raise Refusal(
                    f"data.root={self.root} has no folder '{split}'; it must hold train/<class>/ and test/<class>/ "
                    "with JPEG or PNG files"
                )
        if self.num_classes() < 2:
            raise Refusal(f"data.root={self.root}/train must hold a folder for each of at least 2 classes")

    def num_classes(self) -> int:
        return len(_class_names(Path(self.root) / "train"))

    def load(self, seed: int) -> Splits:
        root = Path(self.root)
        classes = _class_names(root / "train")
        if strangers := set(_class_names(root / "test")) - set(classes):
            raise Refusal(f"data.root={self.root}: test/{min(strangers)} has no counterpart in train/; remove it")
        files = {split: _list_files(root / split, classes) for split in ("train", "test")}
        for split, found in files.items():
            if not found:
                raise Refusal(f"data.root={self.root}: {split}/ holds no JPEG or PNG file; put images in its folders")
        cache = root / f".fulcrum-{self.image_size}.pt"
        fingerprint = _fingerprint(root, files)
        return _read_cache(cache, fingerprint) or _write_cache(cache, fingerprint, self._decode(files))

    def _decode(self, files: dict[str, list[tuple[Path, int]]]) -> Splits:
        train, test = (self._decode_split(split, found) for split, found in files.items())
        return Splits(train, test, *channel_statistics(train.images_NCHW))

    def _decode_split(self, split: str, files: list[tuple[Path, int]]) -> Images:
        from rich.progress import track

        size = self.image_size
        images_NHWC = torch.empty((len(files), size, size, 3), dtype=torch.uint8)
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # the decoder works outside Python's lock
            decoded = pool.map(lambda file: _decode(file[0], size), files)
            for index, pixels in enumerate(track(decoded, f"Decoding {split}", len(files), transient=True)):
                images_NHWC[index] = pixels
        labels_N = torch.tensor([label for _, label in files])
        return Images(images_NHWC.permute(0, 3, 1, 2).contiguous(), labels_N)


@dataclass(kw_only=True, slots=True)
class Synthetic(Data):
    """Smooth random patterns, one a class, under shifts, contrast, a distracting pattern and noise: a network has to
    find the pattern, and finds it. Both splits are functions of the seed and the settings alone."""

    unused: ClassVar[tuple[str, ...]] = ("root", "download")

    def num_classes(self) -> int:
        return self.classes

    def load(self, seed: int) -> Splits:
        generator = torch.Generator().manual_seed(derived_seed(seed, "synthetic"))
        patterns_KCHW = self._patterns(self.classes, generator)
        distractors_DCHW = self._patterns(4 * self.classes, generator)
        train, test = (
            self._split(size, patterns_KCHW, distractors_DCHW, generator) for size in (self.train_size, self.test_size)
        )
        return Splits(train, test, *channel_statistics(train.images_NCHW))

    def _patterns(self, count: int, generator: torch.Generator) -> Tensor:
        """Smooth random images with standard deviation 1, `count` × 3 × size × size."""
        coarse = torch.randn((count, 3, 6, 6), generator=generator)
        smooth = F.interpolate(coarse, size=self.image_size, mode="bicubic", align_corners=False)
        return smooth / smooth.std(dim=(1, 2, 3), keepdim=True)

    def _split(self, size: int, patterns: Tensor, distractors: Tensor, generator: torch.Generator) -> Images:
        labels_N = torch.arange(size) % self.classes
        images_NCHW = torch.empty((size, 3, self.image_size, self.image_size), dtype=torch.uint8)
        for part in torch.arange(size).split(1024):
            labels = labels_N[part]
            distracting = torch.randint(0, len(distractors), (len(part),), generator=generator)
            contrast = 0.4 + 0.6 * torch.rand((len(part), 1, 1, 1), generator=generator)
            noise = torch.randn((len(part), *images_NCHW.shape[1:]), generator=generator)
            pixels = contrast * self._shifted(patterns[labels], generator)
            pixels += 0.8 * self._shifted(distractors[distracting], generator) + 0.8 * noise
            images_NCHW[part] = (127.5 + 40 * pixels).clamp(0, 255).to(torch.uint8)
        return Images(images_NCHW, labels_N)

    def _shifted(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Each image moved around by up to a quarter of its size, coming in again on the other side."""
        count, size = len(images), self.image_size
        shifts = torch.randint(0, size // 4 + 1, (2, count, 1), generator=generator)
        rows, columns = (torch.arange(size) + shifts) % size
        return images[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _class_names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _list_files(folder: Path, classes: list[str]) -> list[tuple[Path, int]]:
    """(file, label) in an order that does not depend on the file system."""
    return [
        (path, label)
        for label, name in enumerate(classes)
        if (folder / name).is_dir()
        for path in sorted((folder / name).iterdir())
        if path.suffix.lower() in SUFFIXES
    ]


def _fingerprint(root: Path, files: dict[str, list[tuple[Path, int]]]) -> str:
    """Changes when a file comes, goes, moves to another class, or is written again."""
    digest = hashlib.blake2b(digest_size=16)
    for path, label in [entry for found in files.values() for entry in found]:
        stat = path.stat()
        digest.update(f"{path.relative_to(root)}|{label}|{stat.st_size}|{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _decode(path: Path, size: int) -> Tensor:
    """Pixels, size × size × 3, uint8."""
    import numpy as np
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            rgb = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise Refusal(f"data.root: {path} cannot be read as an image ({error}); replace or remove it") from error
    if rgb.size != (size, size):
        rgb = ImageOps.fit(rgb, (size, size), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(rgb))


def _read_cache(path: Path, fingerprint: str) -> Splits | None:
    """The cached tensors, mapped into memory and shared between processes; None where they are missing or stale."""
    try:
        cached: dict[str, Any] = torch.load(path, weights_only=True, mmap=True)
        if (cached["format"], cached["fingerprint"]) != (CACHE_FORMAT, fingerprint):
            return None
        train, test = (Images(cached[f"{split}_images"], cached[f"{split}_labels"]) for split in ("train", "test"))
        return Splits(train, test, cached["mean"], cached["std"])
    except Exception:  # whatever is wrong with a cache, it can be made again
        return None


def _write_cache(path: Path, fingerprint: str, splits: Splits) -> Splits:
    """Keeps the tensors beside the originals, under a temporary name first; a folder that cannot be written is fine."""
    cached: dict[str, Any] = {"format": CACHE_FORMAT, "fingerprint": fingerprint}
    cached |= {"mean": splits.mean_C, "std": splits.std_C}
    for split, images in (("train", splits.train), ("test", splits.test)):
        cached |= {f"{split}_images": images.images_NCHW, f"{split}_labels": images.labels_N}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        torch.save(cached, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError):  # torch says RuntimeError for a file it cannot open or finish
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return splits
