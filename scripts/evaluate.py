"""Evaluates a finished run from its files, in a process of its own: one JSON line.

python scripts/evaluate.py outputs/runs/<date>/<time>
"""

import json
import sys
from pathlib import Path

import torch

from fulcrum import launch, saving
from fulcrum.distributed import World
from fulcrum.levers import Parallelism
from fulcrum.logbook import Summary
from fulcrum.refusal import Refusal
from fulcrum.restoring import restore
from fulcrum.run import build_feeds, build_model
from fulcrum.trainer import evaluate


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    try:
        checkpoint = saving.read(saving.find(str(folder), key="RUN"), key="RUN")
        experiment = launch.experiment_of(folder)
        record = Summary.read(folder)
        device = experiment.resolved_device()
        experiment.parallelism = Parallelism()
        experiment.precision.configure(device)
        network, _ = build_model(experiment, device)
        restore(network, checkpoint, f"RUN={folder}")
        splits = experiment.data.load(record["seed"])
    except Refusal as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        sys.exit(2)
    _, test_feed = build_feeds(experiment, splits, device, World(), record["batch"]["effective"], record["seed"])
    loss, correct = evaluate(network, test_feed, experiment.precision, experiment.parallelism, torch.device(device))
    print(json.dumps({"eval_accuracy": correct / len(test_feed.images), "eval_loss": loss}))


if __name__ == "__main__":
    main()
