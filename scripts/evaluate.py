"""Evaluates a finished run from its files, in a process of its own: one JSON line.

python scripts/evaluate.py outputs/runs/<date>/<time>
python scripts/evaluate.py RUN --base BASE         RUN's adapter.safetensors on the base it was trained on
python scripts/evaluate.py RUN --adapter FILE      another adapter, peft's directories too, on the base inside RUN
"""

import argparse
import json
import sys
from pathlib import Path

from fulcrum.adapters import num_classes
from fulcrum.distributed import World
from fulcrum.finished import reopen
from fulcrum.refusal import Refusal
from fulcrum.run import build_feeds
from fulcrum.trainer import evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--base")
    parser.add_argument("--adapter")
    typed = parser.parse_args()
    try:
        run = reopen(typed.run, base=typed.base, adapter=typed.adapter)
        experiment, seed = run.experiment, run.record["seed"]
        here, there = num_classes(run.network.state_dict()), experiment.data.num_classes()
        if here != there:
            raise Refusal(
                f"--adapter={typed.adapter} tells {here} classes apart and the images of RUN={typed.run} are of {there}"
            )
        device = experiment.resolved_device()
        experiment.precision.configure(device)
        splits = experiment.data.load(seed)
    except Refusal as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        sys.exit(2)
    network = run.network.to(device, memory_format=experiment.model.memory_format())  # type: ignore[call-overload]
    if experiment.model.compile:
        network.compile()
    _, test_feed = build_feeds(experiment, splits, device, World(), run.record["batch"]["effective"], seed)
    loss, correct = evaluate(network, test_feed, experiment.precision, experiment.parallelism, device)
    print(json.dumps({"eval_accuracy": correct / len(test_feed.images), "eval_loss": loss}))


if __name__ == "__main__":
    main()
