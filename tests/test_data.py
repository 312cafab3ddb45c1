"""Order and augmentation are functions of (seed, epoch, sample index); every source gives the images it should."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from fulcrum.data import Feed, ImageFolder, Images, Synthetic
from fulcrum.data.augment import crop_and_flip
from fulcrum.data.dataset import channel_statistics
from fulcrum.data.plan import plan_epoch
from fulcrum.refusal import Refusal

CPU = torch.device("cpu")


def feed(size: int = 53, *, batch_size: int = 24, rank: int = 0, num_processes: int = 1, seed: int = 0) -> Feed:
    """A split whose labels are its indices."""
    images = torch.arange(size * 3 * 64).reshape(size, 3, 8, 8).to(torch.uint8)
    return Feed(
        Images(images, torch.arange(size)),
        mean_C=torch.zeros(3),
        std_C=torch.ones(3),
        device=CPU,
        padding=4,
        batch_size=batch_size,
        seed=seed,
        rank=rank,
        num_processes=num_processes,
    )


def order(feed: Feed, epoch: int) -> list[int]:
    return [index for batch in feed.epoch(epoch) if batch.counts for index in batch.labels_N.tolist()]


def test_every_epoch_covers_every_sample_once_in_an_order_of_its_own():
    assert sorted(order(feed(), 0)) == list(range(53))
    assert order(feed(), 0) == order(feed(), 0)
    assert order(feed(), 0) != order(feed(), 1)
    assert order(feed(seed=1), 0) != order(feed(seed=2), 0)
    assert order(feed(seed=1), 1) != order(feed(seed=2), 0)


@pytest.mark.parametrize("num_processes", [2, 3, 4])
def test_ranks_share_each_step_of_the_single_process(num_processes):
    ranks = [list(feed(rank=rank, num_processes=num_processes).epoch(3)) for rank in range(num_processes)]
    for alone, *parts in zip(feed().epoch(3), *ranks, strict=True):
        together = torch.cat([part.labels_N for part in parts])
        assert torch.equal(alone.labels_N, together)
        assert torch.equal(feed().inputs(alone), torch.cat([feed().inputs(part) for part in parts]))


def test_an_epoch_resumed_in_its_middle_goes_on_as_it_would_have():
    assert [b.labels_N.tolist() for b in feed().epoch(1)][1:] == [b.labels_N.tolist() for b in feed().epoch(1, first_step=1)]


def test_augmentation_draws_differ_between_samples_and_epochs():
    first, second = (plan_epoch(0, epoch, 1000, padding=4, device=CPU) for epoch in (0, 1))
    assert (first.offsets_N2 != second.offsets_N2).any(dim=1).float().mean() > 0.9
    assert 400 < first.flips_N.sum() < 600
    assert first.offsets_N2.min() == 0
    assert first.offsets_N2.max() == 8


def test_batched_crop_and_flip_equal_one_image_at_a_time():
    images = torch.randint(0, 256, (20, 3, 8, 8), dtype=torch.uint8)
    plan = plan_epoch(0, 0, 20, padding=4, device=CPU)
    for index, result in enumerate(crop_and_flip(images, plan.offsets_N2, plan.flips_N, padding=4)):
        row, column = plan.offsets_N2[index]
        expected = F.pad(images[index], (4, 4, 4, 4))[:, row : row + 8, column : column + 8]
        assert torch.equal(result, expected.flip(2) if plan.flips_N[index] else expected)


def test_channel_statistics_are_those_of_all_pixels():
    images = torch.randint(0, 256, (1700, 3, 8, 8), dtype=torch.uint8)
    mean, std = channel_statistics(images)
    torch.testing.assert_close(mean, images.float().mean(dim=(0, 2, 3)))
    torch.testing.assert_close(std, images.double().std(dim=(0, 2, 3), correction=0).float())


def test_synthetic_images_are_a_function_of_seed_and_settings():
    one, again, other = (Synthetic(train_size=40, test_size=9, image_size=12, classes=3).load(s) for s in (1, 1, 2))
    assert one.train.images_NCHW.shape == (40, 3, 12, 12)
    assert one.train.labels_N.unique().tolist() == [0, 1, 2]
    assert torch.equal(one.train.images_NCHW, again.train.images_NCHW)
    assert not torch.equal(one.train.images_NCHW, other.train.images_NCHW)
    assert not torch.equal(one.train.images_NCHW[:9], one.test.images_NCHW)


@pytest.fixture
def folder(tmp_path):
    """Two classes, images of several sizes and kinds, lossless."""
    generator = np.random.default_rng(0)
    for split in ("train", "test"):
        for label, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for index, size in enumerate(((8, 8), (20, 12), (9, 30))):
                pixels = generator.integers(0, 256, (*size, 3), dtype=np.uint8) // 2 + 100 * label
                Image.fromarray(pixels).save(tmp_path / split / name / f"{index}.png")
    return tmp_path


def test_an_image_folder_gives_its_pixels_and_labels_in_order(folder):
    splits = ImageFolder(root=str(folder), image_size=8).load(0)
    assert splits.train.labels_N.tolist() == [0, 0, 0, 1, 1, 1]
    pixels = torch.from_numpy(np.array(Image.open(folder / "train" / "cat" / "0.png"))).permute(2, 0, 1)
    assert torch.equal(splits.train.images_NCHW[0], pixels)


def test_the_cache_is_used_and_is_made_again_when_a_file_changes(folder):
    data = ImageFolder(root=str(folder), image_size=8)
    first = data.load(0)
    cache = folder / ".fulcrum-8.pt"
    written = cache.stat().st_mtime_ns
    assert torch.equal(data.load(0).train.images_NCHW, first.train.images_NCHW)
    assert cache.stat().st_mtime_ns == written
    Image.new("RGB", (8, 8), "red").save(folder / "train" / "cat" / "0.png")
    assert data.load(0).train.images_NCHW[0, 0].unique().tolist() == [255]
    cache.write_bytes(cache.read_bytes()[:100])
    assert data.load(0).train.images_NCHW[0, 0].unique().tolist() == [255]


def test_an_unreadable_image_is_named(folder):
    (folder / "test" / "dog" / "1.png").write_bytes(b"not an image")
    with pytest.raises(Refusal, match=r"1\.png cannot be read as an image"):
        ImageFolder(root=str(folder), image_size=8).load(0)
