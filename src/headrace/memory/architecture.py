"""A model's sizes from its configuration alone: no weight is ever made.

In: a configuration. Out: how many weights there are, what each layer keeps of a token in the key-value cache, and
what a token leaves behind until the backward has passed. The model's own code is run over a short row of
tensors that have shapes and no memory, so that any architecture the trainer takes is counted.

Uncompiled layers keep what autograd asks to keep, which is counted as it asks. Compiled layers keep less: what
only a matrix product or attention could give again, which is the inputs of norms, what an activation reads and
is multiplied with, and what attention needs. Everything in between is recomputed (``blocks.compile_lean``).
Experts are counted by their widths, since which tokens they get depends on values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from headrace.engines.checks import context_tokens
from headrace.engines.device_model import LayerShape
from headrace.errors import ModelError
from headrace.models.float_residual import keep_float_residual, residual_dtype
from headrace.models.gated_layer import has_gated_forward, is_computed_gated
from headrace.models.lora import LoraSpec, target_experts, target_linears
from headrace.models.packed_attention import (
    PACKED_ATTENTION,
    build_layout,
    packed_attention,
    use_packed_attention,
)
from headrace.trainers.blocks import decoder_layers
from headrace.trainers.expert_parallel import expert_modules

_PROBE_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """What a token leaves behind until the backward has passed."""

    layers: float
    """In all decoder layers together."""
    widest_layer: float
    """In the layer that keeps most."""
    layer_input: float
    """Of a layer that is recomputed."""
    outside: float
    """Before and after the layers, up to the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    name: str
    num_weights: int
    num_layer_weights: int
    """Of the layer that has most."""
    vocab_size: int
    hidden_size: int
    attention: tuple[LayerShape, ...]
    """One for each layer."""
    pass_bytes: float
    """Of a token at most, in the layer that needs most, while nothing is kept for a backward."""
    context_tokens: int
    compiled: TokenBytes
    eager: TokenBytes
    num_adapter_weights: int = 0
    """Of the adapter that is trained instead; 0: the model itself is."""

    @property
    def num_layers(self) -> int:
        return len(self.attention)

    @property
    def num_outside_weights(self) -> int:
        """At least: embeddings and head, which are of no layer."""
        return self.num_weights - self.num_layers * self.num_layer_weights


def examine(config: PretrainedConfig, dtype: torch.dtype, lora: LoraSpec | None = None) -> Architecture:
    """The sizes of the model this configuration describes, computed in ``dtype``, and of the adapter that is
    trained for it."""
    with FakeTensorMode(allow_non_fake_inputs=True), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.tie_weights()
        keep_float_residual(model)
        if lora is not None:
            _give_up_gated(model, lora)
        text = model.config.get_text_config()
        layers, head = decoder_layers(model), model.get_output_embeddings()
        if not layers or not isinstance(head, nn.Linear):
            raise ModelError(
                f"model: {type(model).__name__} is no decoder with a linear head; choose another model"
            )
        for module in expert_modules(model).values():
            module.forward = _without_values
        attention, pass_bytes, compiled, eager = _token_bytes(model)
        return Architecture(
            name=type(model).__name__,
            num_weights=_num_weights(model),
            num_layer_weights=max(_num_weights(layer) for layer in layers),
            vocab_size=head.weight.shape[0],
            hidden_size=head.weight.shape[1],
            attention=attention,
            pass_bytes=pass_bytes,
            context_tokens=context_tokens(text),
            compiled=compiled,
            eager=eager,
            num_adapter_weights=0 if lora is None else count_adapter_weights(model, lora),
        )


def _give_up_gated(model: PreTrainedModel, lora: LoraSpec) -> None:
    """Layers with an adapter in one of their parts compute as their class does."""
    for name in target_linears(model, lora.targets):
        layer = model.get_submodule(name.rpartition(".")[0])
        if has_gated_forward(layer):
            del layer.forward


def count_adapter_weights(model: PreTrainedModel, lora: LoraSpec) -> int:
    """Of the adapter that is trained for the model."""
    linears = [model.get_submodule(name) for name in target_linears(model, lora.targets)]
    experts = [model.get_parameter(name) for name in target_experts(model, lora.targets, dora=lora.dora)]
    shapes = [(1, *linear.weight.shape) for linear in linears if isinstance(linear, nn.Linear)]
    shapes += [tuple(weight.shape) for weight in experts]
    return sum(count * (lora.rank * (rows + columns) + rows * lora.dora) for count, rows, columns in shapes)


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _without_values(
    hidden_TH: torch.Tensor, _experts_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    """In place of experts: a result of the right shape that depends on what theirs does."""
    return hidden_TH * weights_TK.sum(-1, keepdim=True).to(hidden_TH.dtype)


class _Kept:
    """Bytes of distinct pieces of memory, however many tensors show them."""

    def __init__(self) -> None:
        self._memory: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: torch.Tensor) -> None:
        memory = tensor.untyped_storage()
        self._memory[memory._cdata] = memory

    def num_bytes(self, without: _Kept | None = None) -> int:
        known = {} if without is None else without._memory
        return sum(memory.nbytes() for key, memory in self._memory.items() if key not in known)


def _token_bytes(
    model: PreTrainedModel,
) -> tuple[tuple[LayerShape, ...], float, TokenBytes, TokenBytes]:
    """What each layer asks of its attention, the bytes of a pass through the widest one, and what compiled and
    uncompiled layers keep."""
    layers, own = decoder_layers(model), _Kept()
    for tensor in (*model.parameters(), *model.buffers()):
        own.add(tensor)
    ruled, fed, asked = ([_Kept() for _ in layers] for _ in range(3))
    outside = _Kept()
    with _listening(layers, ruled, fed, asked, outside):
        attention = _forward(model)
    input_bytes = float(model.get_input_embeddings().embedding_dim * residual_dtype(model).itemsize)

    def token_bytes(of_layers: list[float]) -> TokenBytes:
        return TokenBytes(
            layers=sum(of_layers),
            widest_layer=max(of_layers, default=0.0),
            layer_input=input_bytes,
            outside=outside.num_bytes(own) / _PROBE_TOKENS,
        )

    experts = [_expert_bytes(layer, model) for layer in layers]
    attending = [
        (shape.row_width + shape.num_heads * (shape.key_dim + shape.value_dim)) * model.dtype.itemsize
        + shape.num_heads * torch.float32.itemsize
        for shape in attention
    ]
    compiled = [
        kept.num_bytes(own) / _PROBE_TOKENS + a + e
        for kept, a, e in zip(ruled, attending, experts, strict=True)
    ]
    # A pass holds no more than what all its products read beside that.
    passing = [
        kept + given.num_bytes(known) / _PROBE_TOKENS
        for kept, given, known in zip(compiled, fed, ruled, strict=True)
    ]
    eager = [kept.num_bytes(own) / _PROBE_TOKENS + e for kept, e in zip(asked, experts, strict=True)]
    return attention, max(passing), token_bytes(compiled), token_bytes(eager)


def _expert_bytes(layer: nn.Module, model: PreTrainedModel) -> float:
    """Each chosen expert keeps its input, the two halves of its gated layer, their product and its result."""
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", 0)
    return float(
        sum(
            chosen * (3 * vars(module)["intermediate_dim"] + 2 * vars(module)["hidden_dim"])
            for module in expert_modules(layer).values()
        )
        * model.dtype.itemsize
    )


def _forward(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """One row through the layers; what they asked of their attention."""
    shapes: list[LayerShape] = []

    def noting(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        shapes.append(LayerShape(query.shape[1], key.shape[1], key.shape[3], value.shape[3]))
        return packed_attention(module, query, key, value, *args, **kwargs)

    use_packed_attention(model)
    AttentionInterface.register(PACKED_ATTENTION, noting)
    try:
        model.get_decoder()(
            input_ids=torch.zeros((1, _PROBE_TOKENS), dtype=torch.int64),
            position_ids=torch.arange(_PROBE_TOKENS)[None],
            use_cache=False,
            packed_layout=build_layout([_PROBE_TOKENS]),
        )
    finally:
        AttentionInterface.register(PACKED_ATTENTION, packed_attention)
    return tuple(shapes)


@contextmanager
def _listening(
    layers: list[nn.Module], ruled: list[_Kept], fed: list[_Kept], asked: list[_Kept], outside: _Kept
) -> Iterator[None]:
    """Collects what each layer keeps, ``ruled`` by the compiler's rule and ``asked`` for by autograd, and what its
    matrix products are ``fed``."""
    current = [outside]
    hooks = []
    for layer, by_rule, read, by_autograd in zip(layers, ruled, fed, asked, strict=True):
        hooks += _rule_hooks(layer, by_rule, read)
        hooks.append(layer.register_forward_pre_hook(lambda *_, kept=by_autograd: current.append(kept)))
        hooks.append(layer.register_forward_hook(lambda *_: _leave(current)))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        current[-1].add(tensor)
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _leave(current: list[_Kept]) -> None:
    current.pop()


def _rule_hooks(layer: nn.Module, kept: _Kept, fed: _Kept) -> list[Any]:
    hooks = []
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            hooks.append(module.register_forward_pre_hook(lambda _, given: fed.add(given[0])))
        if "Norm" in type(module).__name__:
            # A sum in float32 is kept as it is; what a norm added to it is narrow, and then enough.
            whole = module is not getattr(layer, "pre_feedforward_layernorm", None)
            hooks.append(
                module.register_forward_pre_hook(
                    lambda norm, given, whole=whole: kept.add(
                        given[0] if whole else given[0].to(norm.weight.dtype)
                    )
                )
            )
        children = dict(module.named_children())
        if is_computed_gated(module):
            hooks.append(
                module.register_forward_hook(lambda gated, given, _: _count_gated(gated, given[0], kept, fed))
            )
        elif "act_fn" in children:
            width = min((c.in_features for c in children.values() if isinstance(c, nn.Linear)), default=0)
            for child in children.values():
                # What the activation reads, and what it is multiplied with.
                if isinstance(child, nn.Linear) and child.in_features == width:
                    hooks.append(child.register_forward_hook(lambda _, __, made: kept.add(made)))
    return hooks


def _count_gated(layer: Any, x: torch.Tensor, kept: _Kept, fed: _Kept) -> None:
    """Its parts are not called: gate and up are kept side by side, and what is made of them feeds its last product."""
    rows, width = x.shape[:-1], layer.gate_proj.out_features
    kept.add(x.new_empty((*rows, 2 * width)))
    fed.add(x)
    fed.add(x.new_empty((*rows, width)))
