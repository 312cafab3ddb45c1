"""Every pair of options over all groups takes two steps; LoRA with every other lever moves every adapter."""

from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from PIL import Image

from fulcrum.config import GROUPS
from fulcrum.data import Images, Splits
from fulcrum.data.sources import _write_cache
from fulcrum.run import build_model
from helpers import ROOT, TINY, checkpoint, composed, run_here, run_on_ranks, summary

OPTIONS = {group: sorted(path.stem for path in (ROOT / "conf" / group).glob("*.yaml")) for group in GROUPS}


def covering_rows() -> list[dict[str, str]]:
    """Rows of one option a group in which every pair of options of two groups stands at least once (greedy)."""
    pairs = {frozenset([(a, x), (b, y)]) for a, b in combinations(OPTIONS, 2) for x, y in product(OPTIONS[a], OPTIONS[b])}
    rows = []
    while pairs:
        row = dict(sorted(min(pairs, key=sorted)))
        for group in OPTIONS:
            if group not in row:
                row[group] = max(OPTIONS[group], key=lambda o, g=group: sum(
                    frozenset([(g, o), item]) in pairs for item in row.items()
                ))  # fmt: skip
        pairs -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        rows.append(row)
    return rows


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """The smallest CIFAR-10 (8x8 pixels, as its tensor file) and the smallest image folder, in one place."""
    folder = tmp_path_factory.mktemp("images")
    split = Images(torch.randint(0, 256, (32, 3, 8, 8), dtype=torch.uint8), torch.arange(32) % 10)
    _write_cache(folder / "cifar-10.pt", "cifar-10", Splits(split, split, torch.full((3,), 128.0), torch.full((3,), 64.0)))
    for half, name, index in product(("train", "test"), ("cat", "dog"), range(16)):
        (folder / half / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (index * 15, 0, 0)).save(folder / half / name / f"{index}.png")
    return folder


def overrides(row: dict[str, str], images: Path) -> list[str]:
    small = ["data.image_size=8", "data.train_size=32", "data.test_size=4", "batch.effective=32", "threads=1"]
    ends = [
        "max_steps=2",
        "epochs=2",
        "device=cpu",
        f"data.root={images}",
        "precision.init_scale=256",
        "optimizer.lr=0.01",
    ]
    if row["precision"] == "fp16":  # one sample a micro-batch has no batch statistics, and its gradients overflow
        small.append("model.norm=group")
    return [*(f"{group}={option}" for group, option in row.items()), *small, *ends]


def test_every_pair_of_options_takes_two_steps_and_completes(tmp_path, images):
    rows = covering_rows()
    jobs = [(overrides(row, images), tmp_path / str(number)) for number, row in enumerate(rows)]
    together = [job for job, row in zip(jobs, rows, strict=True) if row["parallelism"] == "ddp"]
    alone = [job for job, row in zip(jobs, rows, strict=True) if row["parallelism"] == "single"]
    run_on_ranks(together, ranks=2)
    for words, folder in alone:
        run_here(words, folder)
    ends = {str(row): summary(folder) for row, (_, folder) in zip(rows, jobs, strict=True)}
    assert {end["status"] for end in ends.values()} == {"completed"}, ends
    assert {end["optimizer_steps"] for end in ends.values()} == {2}


def test_lora_with_checkpointing_accumulation_ddp_and_each_precision_moves_every_adapter(tmp_path):
    jobs = []
    for precision, checkpointing in product(OPTIONS["precision"], ("block", "stage")):
        levers = [
            "lora=r4",
            "accumulation=x2",
            "parallelism=ddp",
            f"checkpointing={checkpointing}",
            f"precision={precision}",
        ]
        words = [*TINY, *levers, "precision.init_scale=256", "max_steps=2", "optimizer.weight_decay=0"]
        jobs.append((words, tmp_path / f"{precision}-{checkpointing}"))
    run_on_ranks(jobs, ranks=2)
    torch.manual_seed(0)
    start = build_model(composed([*TINY, "lora=r4"])[0], torch.device("cpu"))[0].state_dict()
    for words, folder in jobs:
        adapter = checkpoint(folder)["adapter"]
        assert len(adapter) == 14
        unmoved = [name for name, tensor in adapter.items() if torch.equal(tensor, start[name])]
        assert not unmoved, (words, unmoved)
