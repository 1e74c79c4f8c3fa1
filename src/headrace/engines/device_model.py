"""A transformers model as the device executor calls it: rows in, float32 logits out.

In: token ids and positions of a flat pass, and an ``Attending`` that holds its keys and values. Out: float32
logits of the rows asked for. Decoder layers are compiled one by one, all from one piece of code that does
not depend on how many rows there are; everything can be captured in a CUDA graph.

Shape legend: T rows of a pass, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, cast

import torch
from transformers import PreTrainedModel

from headrace.errors import ModelError
from headrace.kernels.rotation import Rotation, rotated
from headrace.models.adapter_bank import AdapterBank
from headrace.models.device_attention import DEVICE, Attending, LayerOptions, attending, register
from headrace.models.head import float_logits
from headrace.models.joined_linear import join_linears
from headrace.models.lora import LoraSpec
from headrace.models.low_rank import serving
from headrace.models.merged_layer import merge_layers
from headrace.models.route_recording import recorder

_PROBE_ROWS = 8


class LayerShape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int

    @property
    def row_width(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim)


class DeviceModel:
    """The model's attention is replaced for good."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compiled: bool,
        lora: LoraSpec | None = None,
        num_adapters: int = 1,
        routed_rows: int = 0,
    ) -> None:
        """``routed_rows``: most rows of a pass whose routes are recorded; 0: none are."""
        register()
        model.set_attn_implementation(DEVICE)
        if model.config._attn_implementation != DEVICE:
            raise ModelError(
                f"{type(model).__name__} does not use transformers' attention interface; choose another model."
            )
        join_linears(model)
        self.bank = None if lora is None else AdapterBank(model, lora, num_adapters)
        self.recorder = recorder(model, max(routed_rows, _PROBE_ROWS), model.device) if routed_rows else None
        self._model = model
        self._head = model.get_output_embeddings()
        # Four dimensions make transformers pass a mask along as it is instead of building one.
        self._no_mask = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=model.device)
        self._is_compiled = False
        self._bare_head = False
        self.layers, options, self._bare_head = self._probe()
        merge_layers(model, options)
        if compiled:
            _compile(model)
            self._is_compiled = True

    @property
    def capturable(self) -> bool:
        """False where a pass waits for the host: experts are told apart there unless they are bfloat16."""
        config = self._model.config.get_text_config()
        num_experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
        return not num_experts or self._model.dtype == torch.bfloat16

    @property
    def vocab_size(self) -> int:
        return int(self._head.weight.shape[0])

    def logits(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        passing: Attending,
        wanted_R: torch.Tensor | None = None,
        out_RV: torch.Tensor | None = None,
        adapters_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 [R, V] of the wanted rows, or of all in order. ``adapters_T``: of the rows; None: no row has one."""
        adapted = None if self.bank is None or adapters_T is None else self.bank.rows(adapters_T)
        inputs = {
            "input_ids": token_ids_T.unsqueeze(0),
            "position_ids": positions_T.unsqueeze(0),
            "attention_mask": self._no_mask,
            "use_cache": False,
        }
        with torch.no_grad(), attending(passing), serving(adapted), self._compiling():
            if self._bare_head:
                hidden_TD = self._model.base_model(**inputs).last_hidden_state[0]
                kept_RD = hidden_TD if wanted_R is None else hidden_TD[wanted_R]
                return float_logits(kept_RD, self._head.weight, out_RV)
            keep = 0 if wanted_R is None else wanted_R
            logits_RV = self._model(**inputs, logits_to_keep=keep).logits[0].float()
            return logits_RV if out_RV is None else out_RV.copy_(logits_RV)

    def _compiling(self) -> AbstractContextManager[None]:
        """Around a call that may compile. A model's floats, such as the scale of its attention, are constants: as
        inputs of a graph they make the compiler trace every layer twice, whatever its cache holds."""
        if not self._is_compiled:
            return nullcontext()
        return cast(AbstractContextManager[None], torch._dynamo.config.patch(specialize_float=True))

    def _probe(self) -> tuple[list[LayerShape], list[LayerOptions], bool]:
        """What each layer's attention is given and asked, and whether logits are the output layer's alone."""
        ids_T = torch.arange(_PROBE_ROWS, device=self._model.device)
        probe = _Probe(self._model.config.get_text_config().num_hidden_layers)
        whole = self.logits(ids_T, ids_T, probe)
        layers, options = probe.layers, probe.options
        self._bare_head = getattr(self._head, "bias", None) is None
        probe.layers, probe.options = [], []
        bare = self.logits(ids_T, ids_T, probe)
        tolerance = 1e-4 if self._model.dtype == torch.float32 else 0.05
        spread = float(whole.abs().max())
        alike = float((whole - bare).abs().max()) <= tolerance * max(1.0, spread)
        return layers, options, self._bare_head and alike


class _Probe:
    """Attends within the pass alone and notes the shapes."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.layers: list[LayerShape] = []
        self.options: list[LayerOptions] = []

    def attend(
        self,
        layer: int,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKE: torch.Tensor,
        rotation: Rotation | None,
        options: LayerOptions,
    ) -> torch.Tensor:
        if rotation is not None:
            query_THD, key_TKD = rotated(query_THD, rotation), rotated(key_TKD, rotation)
        shape = LayerShape(query_THD.shape[1], key_TKD.shape[1], key_TKD.shape[2], value_TKE.shape[2])
        self.layers.append(shape)
        self.options.append(options)
        out = torch.nn.functional.scaled_dot_product_attention(
            query_THD.transpose(0, 1),
            key_TKD.transpose(0, 1),
            value_TKE.transpose(0, 1),
            is_causal=True,
            scale=options.scale,
            enable_gqa=True,
        )
        return out.transpose(0, 1).contiguous()


def _compile(model: PreTrainedModel) -> None:
    base = model.base_model
    for layer in getattr(base, "layers", ()):
        # What is hooked to a layer stays outside, so that all layers share one piece of code.
        layer.forward = torch.compile(layer.forward, dynamic=True)
    for name in ("norm", "rotary_emb"):
        if isinstance(part := getattr(base, name, None), torch.nn.Module):
            part.compile(dynamic=True)
