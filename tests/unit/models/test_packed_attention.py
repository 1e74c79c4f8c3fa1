"""A packed row gives what each sequence gives alone, values and gradients, for every kind of attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, masking_utils

from headrace.errors import ModelError
from headrace.models.packed_attention import build_layout, use_packed_attention

COMMON = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.25,
    "pad_token_id": 0,
}
WINDOWED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma2": {**WINDOWED, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {**WINDOWED, "query_pre_attn_scalar": 8},
    "qwen3_moe": EXPERTS,
    "gpt_oss": {**WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
}
LENGTHS = {"ragged": [3, 17, 9, 1, 17], "equal": [7, 7, 7], "split": [100, 3, 90, 12, 70], "one": [11]}


def tiny(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **COMMON, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_equals_its_sequences_alone(family: str, lengths: list[int]) -> None:
    model = tiny(family)
    sequences = [torch.from_numpy(np.random.default_rng(n).integers(1, 48, n)) for n in lengths]
    alone = torch.cat([model.model(ids[None], use_cache=False).last_hidden_state[0] for ids in sequences])
    weights = torch.randn(alone.shape, generator=torch.Generator().manual_seed(1))
    (alone * weights).sum().backward()
    expected = gradients(model)

    use_packed_attention(model)
    packed = model.model(
        torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
        use_cache=False,
        packed_layout=build_layout(lengths),
    ).last_hidden_state[0]
    (packed * weights).sum().backward()
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=2e-5)
    for name, gradient in gradients(model).items():
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(gradient, expected[name], atol=2e-5 * max(scale, 1.0), rtol=0, msg=name)


def test_the_layout_limits_padding_of_long_sequences() -> None:
    layout = build_layout([100, 3, 90, 12, 70])
    assert [(r.num_sequences, r.length) for r in layout.rectangles] == [(2, 100), (1, 70), (2, 12)]
    covered = torch.cat([r.tokens for r in layout.rectangles]).sort().values
    assert torch.equal(covered, torch.arange(275))
    assert len(build_layout([60, 3, 20]).rectangles) == 1
    assert build_layout([5, 5]).is_one_block and not build_layout([5, 4]).is_one_block


def test_a_forward_without_the_layout_is_refused() -> None:
    model = tiny("llama")
    use_packed_attention(model)
    with pytest.raises(ModelError, match="packed_layout"):
        model(torch.ones(1, 4, dtype=torch.long))


def test_a_model_outside_the_attention_interface_is_refused() -> None:
    config = AutoConfig.for_model("bloom", vocab_size=32, hidden_size=16, n_layer=1, n_head=2)
    with pytest.raises(ModelError, match="attention interface"):
        use_packed_attention(AutoModelForCausalLM.from_config(config))


def test_an_argument_that_would_be_ignored_is_refused() -> None:
    model = tiny("llama")
    use_packed_attention(model)
    with pytest.raises(ModelError, match="position_bias"):
        model(
            torch.ones(1, 4, dtype=torch.long),
            packed_layout=build_layout([4]),
            position_bias=torch.zeros(1, 4, 4, 4),
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_no_value_on_the_device_is_waited_for_to_make_a_mask(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers looks for packed sequences in the positions, and would have to wait for a GPU at every row."""
    model = tiny(family)
    use_packed_attention(model)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda *_: pytest.fail("it looked"))
    lengths = [3, 5]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    layout = build_layout(lengths)
    model(torch.arange(8)[None], position_ids=positions, packed_layout=layout, use_cache=False)
