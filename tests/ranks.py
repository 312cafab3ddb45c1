"""What each rank of helpers.run_on_ranks does: the runs of its command line, in order."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from helpers import run_here


def main() -> None:
    torch.set_default_dtype(getattr(torch, sys.argv[1]))
    dist.init_process_group("gloo")
    for word in sys.argv[2:]:
        overrides, folder = json.loads(word)
        summary = run_here(overrides, Path(folder))
        assert summary.status == "completed", (overrides, summary.error)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
