"""Decoder layers, compiled on a GPU and recomputed in the backward where memory asks for it.

In: a model and the tokens of the longest row to come. Out: the same model, whose layers share one compiled
graph for rows of any length, and of which the first few keep nothing but their input for the backward.
How many follows from the bytes a short probe row leaves behind, and from the memory that is free. The others
keep what only matrix products and attention can give; norms and activations are computed again where the
backward reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
import torch._functorch.config as partitioning
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from headrace.data.packing import pack
from headrace.models.float_residual import residual_dtype
from headrace.trainers.forward_check import probe_sample
from headrace.trainers.logprobs import RowTensors, decoder_output, head_bytes, row_tensors, slope_tokens
from headrace.trainers.ranks import ALONE, Ranks
from headrace.trainers.streamed_adamw import MOMENTS

_TellRoom = Callable[[int], None]
PROBE_TOKENS = 1024
MAX_GRAPHS = 64
USABLE_SHARE = 0.92
"""Of the memory that is free; the rest is lost between blocks of memory of different sizes."""
ROOM_SHARE = 0.7
"""Of what a backward has let go of: with more, so few of its large pieces would stay whole that layers still to come
would be given new ones (by a simulation of the allocator; docs/decisions/0015)."""


class DecoderBlocks:
    """The layers of ``model``, whose forwards are replaced; its weights and their names stay."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        compiled: bool,
        ranks: Ranks = ALONE,
        hidden: Callable[[RowTensors], torch.Tensor] | None = None,
    ) -> None:
        """``hidden`` computes a row up to the head (None: the model does). All ``ranks`` recompute the same
        layers, since what they exchange inside a layer is exchanged again."""
        self.num_recomputed = 0
        self.slope_tokens = 0
        """Loss tokens of a row for whose slopes of logits there is memory besides."""
        self._tell_room: _TellRoom | None = None
        self._model, self._ranks = model, ranks
        self._device = ranks.device or model.device
        self._hidden = hidden or partial(decoder_output, model)
        self._layers = decoder_layers(model)
        self.bytes_per_token: float | None = None
        """What all layers keep of a token, as a probe found it; None: nothing was probed yet."""
        if compiled:
            _allow_graphs()
        for index, layer in enumerate(self._layers):
            forward = compile_lean(layer.forward) if compiled else layer.forward
            layer.forward = self._recomputing(index, forward)

    def fit(self, num_tokens: int, *, reserved_bytes: int, slope_bytes: int) -> None:
        """Recompute as many layers as rows of ``num_tokens`` need on this GPU, and no more; ``reserved_bytes`` are
        spoken for. What is left over is for slopes of logits, ``slope_bytes`` a token."""
        embeddings, on_gpu = self._model.get_input_embeddings(), self._device.type == "cuda"
        self.slope_tokens = slope_tokens(num_tokens, vocab_size=embeddings.num_embeddings, on_gpu=on_gpu)
        if not on_gpu:
            return
        if self.bytes_per_token is None:
            self.bytes_per_token = self._probe()
        free_bytes = USABLE_SHARE * (free_gpu_bytes(self._device) - reserved_bytes)
        needed = layers_to_recompute(
            num_tokens,
            num_layers=len(self._layers),
            bytes_per_token=self.bytes_per_token,
            input_bytes=embeddings.embedding_dim * residual_dtype(self._model).itemsize,
            free_bytes=free_bytes,
        )
        self.num_recomputed = int(self._ranks.largest(needed)[0])
        spare = free_bytes - self.bytes_per_token * num_tokens
        self.slope_tokens = min(self.slope_tokens, max(int(spare // slope_bytes), 0))

    def _probe(self) -> float:
        """Bytes that all layers together keep for the backward, per token."""
        self.num_recomputed = 0
        vocab_size = self._model.get_input_embeddings().num_embeddings
        # The last token of a sequence is not computed.
        sample = probe_sample(np.arange(PROBE_TOKENS + 1) % vocab_size)
        tensors = row_tensors(pack([sample], row_tokens=PROBE_TOKENS + 1)[0], device=self._device)
        self._hidden(tensors)  # compiles
        before = torch.cuda.memory_allocated()
        kept = self._hidden(tensors)
        bytes_kept = torch.cuda.memory_allocated() - before
        del kept
        return bytes_kept / PROBE_TOKENS

    @contextmanager
    def telling_room(
        self, told: Callable[[int], None], *, num_tokens: int, slope_bytes: int, gradient_bytes: int
    ) -> Iterator[None]:
        """Around the forward of a row of ``num_tokens``, which keeps ``slope_bytes`` for the backward of the head, and
        whose backward makes new gradients of ``gradient_bytes``. As it comes to each layer it tells how much of what
        the forward had kept is free by then, and will not be needed: less two layers' shares, which a layer's backward
        may take, or compute again."""
        layer_bytes = (self.bytes_per_token or 0.0) * num_tokens / max(len(self._layers), 1)

        def tell(index: int) -> None:
            num_done = len(self._layers) - 1 - max(index, self.num_recomputed - 1)
            free_bytes = slope_bytes - gradient_bytes + layer_bytes * (num_done - 2)
            told(max(0, int(ROOM_SHARE * free_bytes)))

        self._tell_room = tell
        try:
            yield
        finally:
            self._tell_room = None

    def _recomputing(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if index >= self.num_recomputed or not torch.is_grad_enabled():
                out = forward(*args, **kwargs)
            else:
                out = checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            hidden = out if isinstance(out, torch.Tensor) else out[0]
            if (tell := self._tell_room) is not None and hidden.requires_grad:
                hidden.register_hook(lambda _: tell(index))
            return out

        return call


def compile_lean(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled for inputs of any length, its backward fed from as few bytes as the compiler can arrange without
    computing a matrix product or attention twice."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True, backend=_compile_graph)
    return compiled


def _compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """By default what a matrix product of the backward reads is kept from the forward, since it would have to be
    written a second time. Of a gated layer that is a third of all that is kept, and writing it takes a
    hundredth of the time of the products around it. One function for all layers, so that they share graphs."""
    # Imported where it is used: it takes seconds, and most processes compile nothing.
    from torch._dynamo.backends.inductor import inductor

    with partitioning.patch(ban_recompute_materialized_backward=False):
        return inductor(graph, inputs)


def _allow_graphs() -> None:
    """An engine in this process compiles the same layers for its batch sizes; past the limit on the graphs
    of one function, layers would silently run uncompiled."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    lists = [module for module in model.get_decoder().children() if isinstance(module, nn.ModuleList)]
    return list(lists[0]) if lists else []


def layers_to_recompute(
    num_tokens: int, *, num_layers: int, bytes_per_token: float, input_bytes: float, free_bytes: float
) -> int:
    """``bytes_per_token`` is what all layers keep for a token, ``input_bytes`` what one layer's input takes."""
    kept = bytes_per_token * num_tokens
    if kept <= free_bytes or not num_layers:
        return 0
    layer = kept / num_layers
    # A layer that is being recomputed needs its whole share once more.
    saved = layer - input_bytes * num_tokens
    return min(math.ceil((kept + layer - free_bytes) / saved), num_layers) if saved > 0 else num_layers


def bytes_of_a_step(
    model: nn.Module,
    head_VH: torch.Tensor,
    optimizer: torch.optim.Optimizer | None,
    *,
    num_tokens: int,
    dtype: torch.dtype,
    on_gpu: bool,
    own_gradient: bool = True,
    host_moments: Sequence[str] = (),
) -> int:
    """What a step with rows of ``num_tokens`` allocates besides the layers' activations: gradients, moments that are
    not yet there and not ``host_moments`` (no optimizer: there will be none), and what the output head ``head_VH``
    needs, computed in ``dtype``, with its ``own_gradient`` or with that of a master. Of weights that are spread over
    ranks only this rank's part counts."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(4 * _own_numel(weight) for weight in weights)
    moments = 0
    if optimizer is not None:
        each = 4 * (len(MOMENTS) - len(host_moments))
        moments = sum(each * _own_numel(weight) for weight in weights if weight not in optimizer.state)
    head = head_bytes(
        num_tokens,
        vocab_size=head_VH.shape[0],
        hidden_size=head_VH.shape[1],
        dtype=dtype,
        on_gpu=on_gpu,
        own_gradient=own_gradient and head_VH.requires_grad,
    )
    return gradients + moments + head


def _own_numel(weight: torch.Tensor) -> int:
    return weight.to_local().numel() if isinstance(weight, DTensor) else weight.numel()


def free_gpu_bytes(device: torch.device) -> int:
    """Free on the device, or held by this process without use."""
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
