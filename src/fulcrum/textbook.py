"""The memory of training by the textbook: bytes for each parameter, and activations as given. Knows no network.

Weights, gradients and optimizer state are counted from the number of parameters alone; activations depend on the
network and the batch, so they are given by hand, or left out and said to be. estimate.py traces a network instead.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from .refusal import Refusal, above, did_you_mean

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Bytes that one trained parameter takes with Adam, whose two moments are fp32 throughout."""

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    assumption: str


# A copy of the weights in fp32 is what 16-bit weights are updated in (Micikevicius et al., "Mixed precision training",
# 2018, section 3.1); with Adam: 2 + 2 + 12 bytes (Rajbhandari et al., "ZeRO: Memory optimizations toward training
# trillion parameter models", 2020, section 3.1). Gradients added up in fp32 take 2 bytes more.
RECIPES = {
    "fp32": Recipe(
        weight_bytes=4,
        gradient_bytes=4,
        optimizer_bytes=8,
        assumption="16 bytes each: weights, gradients and both moments of Adam in fp32, under autocast (AMP) too",
    ),
    "mixed": Recipe(
        weight_bytes=2,
        gradient_bytes=2,
        optimizer_bytes=12,
        assumption="16 bytes each: weights and gradients in 16 bits; Adam's copy of the weights and both moments in fp32",
    ),
    "mixed-fp32-gradients": Recipe(
        weight_bytes=2,
        gradient_bytes=4,
        optimizer_bytes=12,
        assumption="18 bytes each: weights in 16 bits, gradients in fp32; Adam's copy of the weights and both moments in fp32",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Textbook:
    """The four blocks in GiB. activations_gib: None where they were not given; the total is without them then."""

    weights_gib: float
    gradients_gib: float
    optimizer_gib: float
    activations_gib: float | None
    recipe: Recipe

    @property
    def total_gib(self) -> float:
        return self.weights_gib + self.gradients_gib + self.optimizer_gib + (self.activations_gib or 0.0)


def textbook(
    parameters: float,
    *,
    recipe: str = "fp32",
    activations_gib: float | None = None,
    autocast: bool = False,
    adapter_parameters: float | None = None,
) -> Textbook:
    """The four blocks of a network with so many parameters, trained by Adam.

    recipe: one of RECIPES. activations_gib: what forward keeps for backward in fp32; autocast (AMP) halves it, and
    nothing else, since weights stay fp32 (Micikevicius et al., section 3.1: activations dominate, and halve).
    adapter_parameters: with LoRA, which adds these and freezes all others: a frozen parameter has no gradient and no
    optimizer state (Hu et al., "LoRA", 2021, section 4.2).
    """
    if recipe not in RECIPES:
        raise Refusal(f"recipe={recipe} is not known; {did_you_mean(recipe, RECIPES)}")
    above("parameters", parameters, 0)
    above("activations_gib", activations_gib, 0)
    above("adapter_parameters", adapter_parameters, 0)
    each = RECIPES[recipe]
    trained = parameters if adapter_parameters is None else adapter_parameters
    return Textbook(
        weights_gib=(parameters + (adapter_parameters or 0)) * each.weight_bytes / GIB,
        gradients_gib=trained * each.gradient_bytes / GIB,
        optimizer_gib=trained * each.optimizer_bytes / GIB,
        activations_gib=activations_gib / 2 if activations_gib is not None and autocast else activations_gib,
        recipe=each,
    )


def lora_parameters(matrices: Iterable[tuple[int, int]], *, rank: int) -> int:
    """What adapters of this rank add to weights of (out, in) rows and columns: B is out x rank, A is rank x in (Hu et al.,
    section 4.1)."""
    total = 0
    for num_out, num_in in matrices:
        if not 1 <= rank <= min(num_out, num_in):
            raise Refusal(f"rank={rank} must lie in [1, {min(num_out, num_in)}] for a {num_out} x {num_in} matrix")
        total += rank * (num_out + num_in)
    return total


def rows(blocks: Textbook) -> list[tuple[str, str]]:
    """(block, GiB) lines of a table, the total last."""
    lines = [
        ("weights", blocks.weights_gib),
        ("gradients", blocks.gradients_gib),
        ("optimizer state", blocks.optimizer_gib),
        ("activations", blocks.activations_gib),
        ("all" if blocks.activations_gib is not None else "all but activations", blocks.total_gib),
    ]
    return [(name, "not given" if gib is None else f"{gib:.2f}") for name, gib in lines]
