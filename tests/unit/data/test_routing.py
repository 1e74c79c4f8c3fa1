from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace import wire
from headrace.data import completions
from headrace.data.packing import PackedRow, pack
from headrace.data.routing import (
    check_routing,
    id_dtype,
    join_routing,
    merge_routing,
    router_shape,
    routing_tail,
)
from headrace.errors import RecordError
from headrace.models.loading import make_tiny_model
from headrace.models.routers import routers
from headrace.types import NO_KV, Completion, Routing, Sample

MODEL = {"num_layers": 2, "num_experts": 8, "top_k": 2}


def record(num_tokens: int, *, holes: tuple[int, ...] = (), mark: int = 0) -> Routing:
    """Of all tokens but the last and the holes; each row can be told by its position and ``mark``."""
    recorded = np.arange(num_tokens) < num_tokens - 1
    recorded[list(holes)] = False
    positions = np.flatnonzero(recorded)
    experts = np.stack([np.full((2, 2), [p % 7, 7]) for p in positions]).astype(np.uint8)
    experts[:, 1, 0] = mark
    return Routing(experts=experts, recorded=recorded)


def completion(num_tokens: int, routing: Routing | None) -> Completion:
    return Completion(
        token_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
        versions=np.zeros(num_tokens, np.int32),
        finish_reason="abort",
        kv_versions=NO_KV,
        routing=routing,
    )


def same(a: Routing | None, b: Routing | None) -> bool:
    assert a is not None and b is not None
    return np.array_equal(a.experts, b.experts) and np.array_equal(a.recorded, b.recorded)


def test_the_record_of_a_model_passes() -> None:
    check_routing(record(5), num_tokens=5, **MODEL)
    check_routing(record(5, holes=(1, 2)), num_tokens=5, **MODEL)
    check_routing(record(5), num_tokens=5)


def spoiled(what: str) -> Routing:
    good = record(5)
    experts, recorded = good.experts.copy(), good.recorded.copy()
    if what == "last":
        recorded = np.roll(recorded, 1)
    elif what == "count":
        recorded[0] = False
    elif what == "range":
        experts[2, 1, 0] = 8
    elif what == "twice":
        experts[3, 1] = 7
    elif what == "dtype":
        experts = experts.astype(np.int32)
    elif what == "layers":
        experts = np.repeat(experts, 2, axis=1)
    elif what == "width":
        experts = experts[..., :1]
    elif what == "tokens":
        recorded = np.append(recorded, False)
    return Routing(experts=experts, recorded=recorded)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("last", "the last token is marked"),
        ("count", "3 tokens are marked and 4 have experts"),
        ("range", "token 2 in layer 1 names expert 8 of 8"),
        ("twice", "token 3 in layer 1 names an expert twice"),
        ("dtype", "int32"),
        ("layers", "4 layers and the model has 2"),
        ("width", "1 experts a token and the model has 2"),
        ("tokens", "of 6 tokens and there are 5"),
    ],
)
def test_a_record_that_cannot_be_is_named(what: str, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        check_routing(spoiled(what), num_tokens=5, **MODEL)


def test_the_first_record_of_a_token_is_kept() -> None:
    first, later = record(4, holes=(1,), mark=1), record(7, mark=2)
    merged = merge_routing([(first, 4), (later, 7)], 7)
    assert merged is not None
    assert merged.recorded.tolist() == [True] * 6 + [False]
    assert merged.experts[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert merged.experts[:, 1, 0].tolist() == [1, 2, 1, 2, 2, 2]


def test_records_of_two_models_do_not_mix() -> None:
    other = Routing(experts=np.zeros((3, 5, 2), np.uint8), recorded=record(4).recorded)
    with pytest.raises(RecordError, match="layers and experts"):
        merge_routing([(record(4), 4), (other, 4)], 4)
    with pytest.raises(RecordError, match="of 4 tokens and there are 3"):
        merge_routing([(record(4), 3)], 5)


@pytest.mark.parametrize("cut", [0, 1, 3, 5])
def test_cutting_and_joining_loses_no_row(cut: int) -> None:
    """Three prompt tokens and six sampled ones, interrupted after ``cut``."""
    whole = completion(6, record(9))
    first = replace(
        completions.tail(whole, 0),
        token_ids=whole.token_ids[:cut],
        logprobs=whole.logprobs[:cut],
        versions=whole.versions[:cut],
        routing=record(3 + cut) if cut else None,
    )
    rest = completions.tail(whole, cut)
    joined = completions.join(first, rest)
    assert same(joined.routing, whole.routing)
    assert rest.routing is not None
    assert len(rest.routing.recorded) == (9 if cut == 0 else 6 - cut + 1)


def test_a_part_without_a_record_leaves_a_hole() -> None:
    joined = join_routing(record(4), None, 3)
    assert joined is not None
    assert joined.recorded.tolist() == [True, True, True, False, False, False, False]
    assert join_routing(None, None, 3) is None
    late = join_routing(Routing(experts=record(2).experts, recorded=record(2).recorded), record(7), 2)
    assert late is not None
    assert late.recorded.tolist() == [True] * 6 + [False]


def test_a_tail_has_its_own_rows() -> None:
    tail = routing_tail(record(6, holes=(3,)), 4)
    assert tail.recorded.tolist() == [True, False, True, False]
    assert tail.experts[:, 0, 0].tolist() == [2, 4]


def test_records_cross_the_wire_in_their_width() -> None:
    for dtype in (np.uint8, np.uint16):
        routing = Routing(experts=record(40).experts.astype(dtype), recorded=record(40).recorded)
        frame = wire.encode(completion(30, routing))
        assert same(wire.decode(frame).routing, routing)
        assert len(frame) < routing.experts.nbytes + 2000
    assert (id_dtype(256), id_dtype(257)) == (np.dtype(np.uint8), np.dtype(np.uint16))


@pytest.mark.parametrize("family", ["qwen3_moe", "olmoe", "deepseek_v3", "llama"])
def test_the_configuration_tells_what_routers_choose(family: Any, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, family=family, vocab_size=32, num_layers=3)
    shape, found = router_shape(tmp_path / "config.json"), routers(model)
    if family == "llama":
        assert shape is None and not found
        return
    some: Any = next(iter(found.values()))
    assert shape == (len(found), some.num_experts, some.top_k)


def test_dense_layers_are_not_counted(tmp_path: Path) -> None:
    config = {
        "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 6, "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert router_shape(tmp_path / "config.json") == (2, 8, 2)


def routed_sample(attempt: int, routing: Routing | None, *, sampled: int = 4, prompt: int = 41) -> Sample:
    num_tokens = prompt + sampled
    mask = np.arange(num_tokens) >= prompt
    zeros = np.zeros(num_tokens, np.float32)
    return Sample(
        group=0,
        attempt=attempt,
        token_ids=np.where(mask, attempt, np.arange(num_tokens)).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=zeros,
        versions=np.zeros(num_tokens, np.int32),
        advantages=zeros,
        temperature=1.0,
        kv_versions=NO_KV,
        routing=routing,
    )


def changed(routing: Routing, position: int) -> Routing:
    experts = routing.experts.copy()
    experts[position] = experts[position][..., ::-1] + 1
    return Routing(experts=experts, recorded=routing.recorded)


def assert_packed(row: PackedRow, samples: Sequence[Sample]) -> None:
    """Every token of every sample has its own record, wherever it lies."""
    assert row.routes is not None and row.routed is not None
    for b, index in enumerate(row.sample_index.tolist()):
        routing = samples[index].routing
        assert routing is not None
        (segment,) = (s for s in range(len(row.parents)) if _owner(row, s) == b and _is_last(row, s))
        spans = [segment] if row.parents[segment] < 0 else [int(row.parents[segment]), segment]
        at = np.concatenate([np.arange(row.cu_seqlens[s], row.cu_seqlens[s + 1]) for s in spans])
        np.testing.assert_array_equal(row.routed[at], routing.recorded)
        np.testing.assert_array_equal(row.routes[at][routing.recorded], routing.experts)
        np.testing.assert_array_equal(row.token_ids[at], samples[index].token_ids)


def _owner(row: PackedRow, segment: int) -> int:
    return int(row.sequence[row.cu_seqlens[segment]])


def _is_last(row: PackedRow, segment: int) -> bool:
    return segment not in row.parents


def test_rows_carry_the_record_of_every_token() -> None:
    samples = [routed_sample(n, record(45, holes=(n, 20), mark=n)) for n in range(3)]
    (row,) = pack(samples, row_tokens=500)
    assert_packed(row, samples)
    assert row.routes is not None and row.routes.dtype == np.uint8
    (bare,) = pack([replace(sample, routing=None) for sample in samples], row_tokens=500)
    assert bare.routes is None and bare.routed is None


def test_a_prompt_is_shared_as_far_as_its_routes_agree() -> None:
    """The second parts from the first at token 33, the third at token 3 and stays alone; the fourth joins the first."""
    good = record(45)
    samples = [routed_sample(n, r) for n, r in enumerate((good, changed(good, 33), changed(good, 3), good))]
    (row,) = pack(samples, row_tokens=500, share_prefixes=True)
    assert_packed(row, samples)
    assert sorted(np.diff(row.cu_seqlens)[row.parents < 0].tolist()) == [33, 45]
    (same,) = pack([routed_sample(n, good) for n in range(4)], row_tokens=500, share_prefixes=True)
    assert same.num_tokens == 40 + 4 * 5
    (mixed,) = pack(
        [routed_sample(n, None if n % 2 else good) for n in range(2)], row_tokens=500, share_prefixes=True
    )
    assert mixed.num_tokens == 90
