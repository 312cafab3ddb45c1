"""Writes a plain checkpoint whose outputs are those of an adapted network: adapters go into the weights of their layers.

python scripts/merge.py RUN [--out FILE]
python scripts/merge.py RUN --adapter FILE         another adapter, peft's directories too, on the base inside RUN

The file is what `lora.base` and any plain network of the same settings can load.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from fulcrum.export import TOLERANCE, difference, examples, merged
from fulcrum.finished import reopen
from fulcrum.levers.lora import split_state
from fulcrum.refusal import Refusal
from fulcrum.saving import FOLDER, write_atomically


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, help=f"RUN/{FOLDER}/merged.pt where it is not given")
    parser.add_argument("--base", help="weights to put RUN's adapter onto instead of its own")
    parser.add_argument("--adapter")
    typed = parser.parse_args()
    out = typed.out or typed.run / FOLDER / "merged.pt"
    try:
        run = reopen(typed.run, base=typed.base, adapter=typed.adapter)
        if not split_state(run.network.state_dict())[1]:
            raise Refusal(f"RUN={typed.run} has no adapters, its checkpoints are plain already; use {typed.run / FOLDER}/last.pt")
    except Refusal as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        sys.exit(2)
    plain = merged(run.network)
    images_NCHW = examples(16, run.experiment.data.image_size)
    largest = difference(run.classifier(run.network), run.classifier(plain), images_NCHW)
    if largest > TOLERANCE:
        sys.exit(f"the merged network's outputs differ by {largest:.1e} of the largest; nothing was written")
    # Its optimizer knew adapters, which are gone: there is no state to go on with.
    nothing: dict[str, Any] = {"state": {}, "param_groups": []}
    write_atomically({**run.checkpoint, "model": plain.state_dict(), "adapter": {}, "optimizer": nothing}, out)
    print(f"{out}: outputs differ from the adapted network's by {largest:.1e} of the largest, on {len(images_NCHW)} images")


if __name__ == "__main__":
    main()
