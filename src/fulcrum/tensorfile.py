"""Weights to share: safetensors files, which hold tensors and plain data and never run code when they are read."""

import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from .refusal import Refusal

ABOUT = "fulcrum"  # the key of the file's metadata that holds ours


def write(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Whole under its own name, or not at all. about: plain data that is kept with the tensors, as JSON."""
    from safetensors.torch import save

    temporary = path.with_name(f"{path.name}.partial")
    try:
        contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with open(temporary, "wb") as file:  # not save_file, whose files nobody else may read
            file.write(save(contiguous, metadata={"format": "pt", ABOUT: json.dumps(about)}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read(path: Path, *, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, about); nothing is known about a file of another program. Refuses, naming `key`, what cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return tensors, json.loads((file.metadata() or {}).get(ABOUT, "{}"))
    except (OSError, ValueError, SafetensorError) as error:
        raise Refusal(f"{key}={path} cannot be read as a safetensors file ({error}); use another one") from error
