"""Exports a finished run, and compares what was written with the run.

python scripts/export.py RUN --format safetensors    plain weights, adapters merged
python scripts/export.py RUN --format torch          torch.export: from uint8 images, any number of them, to logits
python scripts/export.py RUN --format peft           the adapter as peft reads it
"""

import argparse
import sys
from pathlib import Path

import torch

from fulcrum import adapters, export, peft_files, tensorfile
from fulcrum.finished import Finished, reopen
from fulcrum.levers import Lora
from fulcrum.refusal import Refusal

NAMES = {"safetensors": "weights.safetensors", "torch": "network.pt2", "peft": "peft"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--format", choices=NAMES, required=True)
    parser.add_argument("--out", type=Path, help="RUN/export/… where it is not given")
    typed = parser.parse_args()
    out = typed.out or typed.run / "export" / NAMES[typed.format]
    try:
        run = reopen(typed.run)
        if typed.format == "peft" and not isinstance(run.experiment.lora, Lora):
            raise Refusal(f"RUN={typed.run} has no adapters; use --format safetensors")
    except Refusal as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        sys.exit(2)
    out.parent.mkdir(parents=True, exist_ok=True)
    written = {"safetensors": write_weights, "torch": write_program, "peft": write_peft}[typed.format](run, out)
    images_NCHW = export.examples(16, run.experiment.data.image_size)
    largest = max(export.difference(run.classifier(run.network), written, images_NCHW[:count]) for count in (1, 16))
    print(f"{out}: outputs differ from the run's by {largest:.1e} of the largest, on {len(images_NCHW)} images")
    if largest > export.TOLERANCE:
        sys.exit("that is too much: do not use it")


def write_weights(run: Finished, out: Path) -> torch.nn.Module:
    tensorfile.write(out, export.merged(run.network).state_dict(), run.about())
    return run.classifier(export.read_weights(out, adapters.build(run.about()["model"])))


def write_program(run: Finished, out: Path) -> torch.nn.Module:
    export.write_program(out, run.classifier(export.merged(run.network)), image_size=run.experiment.data.image_size)
    return torch.export.load(out).module()


def write_peft(run: Finished, out: Path) -> torch.nn.Module:
    assert isinstance(run.experiment.lora, Lora)
    peft_files.write(run.network, run.experiment.lora, run.about(), out)
    network = adapters.build(run.about()["model"])
    adapters.onto(network, run.checkpoint["model"], peft_files.read(out, key="--out"), source=f"--out={out}")
    return run.classifier(network.eval())


if __name__ == "__main__":
    main()
