"""Runs a finished run again from its own files, and says whether the weights came out the same, bit for bit.

python scripts/rerun.py RUN [--out DIR]

Names first what is different from then: versions, threads, source code, data. Exit code 0: the same weights; 1: others.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from omegaconf import OmegaConf

from fulcrum import record, saving
from fulcrum.logbook import Summary
from fulcrum.processes import COMMAND, TRAIN
from fulcrum.refusal import Refusal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, help="RUN-again where it is not given")
    typed = parser.parse_args()
    folder = typed.run.absolute()
    out = (typed.out or folder.with_name(f"{folder.name}-again")).absolute()
    try:
        before = weights(folder, key="RUN")
        words = record.overrides(folder)
        if (status := Summary.read(folder)["status"]) != "completed":
            raise Refusal(f"RUN={typed.run} is {status}; give a run that is completed")
        os.chdir(OmegaConf.load(folder / ".hydra" / "hydra.yaml").hydra.runtime.cwd)  # paths were typed from there
        for line in record.differences(folder):
            print(line)
    except (Refusal, OSError) as refusal:
        print(f"refused: {refusal}", file=sys.stderr)
        sys.exit(2)
    environment = {**os.environ, COMMAND: f"python scripts/rerun.py {typed.run}"}
    command = [sys.executable, str(TRAIN), *words, f"hydra.run.dir={record.quoted(str(out))}"]
    if code := subprocess.run(command, env=environment).returncode:
        sys.exit(code)
    after = weights(out, key="--out")
    differing = [name for name in before if not torch.equal(before[name], after[name])]
    if differing:
        largest = max((before[name].double() - after[name].double()).abs().max().item() for name in differing)
        print(f"other weights: {len(differing)} of {len(before)} tensors differ, by {largest:.1e} at most")
        sys.exit(1)
    print(f"the same weights, bit for bit: {len(before)} tensors")


def weights(folder: Path, *, key: str) -> dict[str, torch.Tensor]:
    checkpoint = saving.read(saving.find(str(folder), key=key), key=key)
    return {**checkpoint["model"], **checkpoint["adapter"]}


if __name__ == "__main__":
    main()
