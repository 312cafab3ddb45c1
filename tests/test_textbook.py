"""The textbook estimator gives the figures of the papers and of the textbooks."""

import pytest

from fulcrum.refusal import Refusal
from fulcrum.textbook import GIB, lora_parameters, rows, textbook


def test_a_network_of_130_million_parameters_takes_1_94_gib_in_fp32():
    blocks = textbook(1.3e8)
    assert rows(blocks) == [
        ("weights", "0.48"),
        ("gradients", "0.48"),
        ("optimizer state", "0.97"),
        ("activations", "not given"),
        ("all but activations", "1.94"),
    ]


@pytest.mark.parametrize(
    ("recipe", "bytes_per_parameter", "gib"), [("fp32", 16, 104), ("mixed", 16, 104), ("mixed-fp32-gradients", 18, 117)]
)
def test_seven_billion_parameters_take_16_or_18_bytes_each(recipe, bytes_per_parameter, gib):
    blocks = textbook(7e9, recipe=recipe)
    assert blocks.total_gib == pytest.approx(bytes_per_parameter * 7e9 / GIB)
    assert round(blocks.total_gib) == gib
    assert blocks.recipe.assumption.startswith(f"{bytes_per_parameter} bytes each: ")


def test_autocast_halves_activations_and_nothing_else():
    plain, amp = (textbook(1.3e8, activations_gib=4.0, autocast=autocast) for autocast in (False, True))
    assert amp.activations_gib == 2.0
    assert plain.total_gib - amp.total_gib == pytest.approx(2.0)
    assert (plain.weights_gib, plain.gradients_gib, plain.optimizer_gib) == (
        amp.weights_gib,
        amp.gradients_gib,
        amp.optimizer_gib,
    )


def test_lora_of_rank_8_on_a_4096_square_trains_65536_of_16777216_parameters():
    adapters = lora_parameters([(4096, 4096)], rank=8)
    assert adapters == 65_536
    assert f"{100 * adapters / 4096**2:.2f} %" == "0.39 %"
    full, lora = textbook(4096**2), textbook(4096**2, adapter_parameters=adapters)
    assert lora.gradients_gib / full.gradients_gib == lora.optimizer_gib / full.optimizer_gib == 65_536 / 16_777_216
    assert lora.weights_gib == (16_777_216 + 65_536) * 4 / GIB


@pytest.mark.parametrize(
    ("estimate", "words"),
    [
        (lambda: textbook(0), "parameters=0 must be"),
        (lambda: textbook(float("nan")), "parameters=nan must be"),
        (lambda: textbook(7e9, recipe="mixd"), "recipe=mixd is not known; did you mean 'mixed'?"),
        (lambda: textbook(7e9, activations_gib=-1), "activations_gib=-1 must be"),
        (lambda: lora_parameters([(4, 8)], rank=5), "rank=5 must lie in [1, 4]"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(estimate, words):
    with pytest.raises(Refusal) as refusal:
        estimate()
    assert words in str(refusal.value)
