"""With a pass on its way while the next is launched, requests come out as they do one pass at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from headrace.engines.plain_executor import PlainExecutor
from headrace.engines.torch_engine import TorchEngine
from headrace.models.loading import load_model, make_tiny_model
from headrace.models.tensors import to_blobs
from headrace.timekeeping import ENGINE_ACTIVITIES, TimeLedger

LENGTHS = (3, 40, 17, 90, 1, 33, 65, 12)


class LateExecutor(PlainExecutor):
    """Hands over what it drew one pass late, but goes on from it at once, as a device does."""

    pipelined = True

    def launch(self, work):
        flight = super().launch(work)
        self.table.token_ids[flight.slots, self.table.length[flight.slots]] = flight.drawn.token_ids
        return flight


@dataclass
class Made:
    engine: TorchEngine
    num_blocks: int


@pytest.fixture
def make_late(tiny_checkpoint):
    def build(*, recompute_kv=False, **settings):
        given = {"max_running": 64, "block_size": 16, "kv_tokens": None, "prefill_tokens": 512, **settings}
        executor = LateExecutor(load_model(tiny_checkpoint), **given)
        engine = TorchEngine(
            executor,
            ledger=TimeLedger(ENGINE_ACTIVITIES),
            prefill_tokens=given["prefill_tokens"],
            recompute_kv=recompute_kv,
        )
        return Made(engine, executor.num_blocks)

    return build


@pytest.fixture
def crowd(make_request):
    return [
        make_request(f"r{i}", prompt=n, max_tokens=15 + 9 * i, stop_ids=(7, 13))
        for i, n in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize(
    "settings",
    [{}, {"prefill_tokens": 7}, {"block_size": 4}, {"max_running": 3}, {"kv_tokens": 192}],
    ids=["plain", "small chunks", "small blocks", "few slots", "preempted"],
)
def test_tokens_are_those_of_one_pass_at_a_time(
    make_engine, make_late, run_engine, crowd, same_bits, settings
):
    expected = run_engine(make_engine(), *crowd)
    late = make_late(**settings)
    got = run_engine(late.engine, *crowd)
    assert got.keys() == expected.keys()
    for name, completion in expected.items():
        assert same_bits(got[name], completion)
        assert got[name].finish_reason == completion.finish_reason
        np.testing.assert_array_equal(got[name].kv_versions, completion.kv_versions)
    assert {c.finish_reason for c in got.values()} == {"stop", "length"}
    assert late.engine.counters()["free_blocks"] == late.num_blocks - 1


def test_a_truncated_row_keeps_one_mask_a_token(make_engine, make_late, run_engine, make_request):
    crowd = [make_request(f"t{i}", prompt=30, max_tokens=50, top_k=9, top_p=0.8) for i in range(6)]
    expected = run_engine(make_engine(), *crowd)
    late = make_late(kv_tokens=192)
    got = run_engine(late.engine, *crowd)
    assert late.engine.counters()["preemptions"] > 0
    for name, completion in expected.items():
        np.testing.assert_array_equal(got[name].sampling_mask.token_ids, completion.sampling_mask.token_ids)
        np.testing.assert_array_equal(got[name].sampling_mask.offsets, completion.sampling_mask.offsets)


def test_tokens_bear_the_version_their_pass_was_launched_under(make_late, make_request, tmp_path):
    other = make_tiny_model(
        tmp_path, vocab_size=61, init_std=0.12, tie_embeddings=False, context_tokens=256, seed=1
    )
    engine = make_late().engine
    engine.submit(make_request("a", prompt=20, max_tokens=10))
    for _ in range(4):
        engine.step()
    engine.apply(5, list(to_blobs(other)))
    done = {}
    while engine.has_work:
        done.update(engine.step())
    assert done["a"].versions.tolist() == [0] * 4 + [5] * 6


def test_an_update_waits_for_no_pass(make_late, make_request, tiny_checkpoint):
    """Unless keys and values are computed anew, for which every sequence leaves its slot."""
    weights = list(to_blobs(load_model(tiny_checkpoint)))
    for recompute_kv in (False, True):
        engine = make_late(recompute_kv=recompute_kv).engine
        engine.submit(make_request("a", prompt=20, max_tokens=4))
        engine.step()
        engine.apply(1, weights)
        assert engine.counters()["generated_tokens"] == recompute_kv


def test_an_update_after_every_pass_costs_no_token(make_late, make_request, tiny_checkpoint):
    """Although all that was computed before it is computed anew."""
    weights = list(to_blobs(load_model(tiny_checkpoint)))
    engine = make_late(recompute_kv=True).engine
    for name in ("a", "b"):
        engine.submit(make_request(name, prompt=20, max_tokens=4))
    done, version = {}, 0
    while engine.has_work and version < 20:
        done.update(engine.step())
        version += 1
        engine.apply(version, weights)
    assert {name: completion.versions.tolist() for name, completion in done.items()} == {
        "a": [0, 1, 2, 3],
        "b": [0, 1, 2, 3],
    }


def test_an_abort_drops_only_the_token_on_its_way(
    make_engine, make_late, run_engine, make_request, same_bits
):
    request = make_request("a", prompt=20, max_tokens=40)
    whole = run_engine(make_engine(), request)["a"]
    late = make_late()
    late.engine.submit(request)
    for _ in range(9):
        late.engine.step()
    ((_, part),) = late.engine.abort(["a"])
    assert part.num_tokens == 8
    while late.engine.has_work:
        assert late.engine.step() == []
    resumed = make_request("a", prompt=20, max_tokens=40, prefix=part)
    assert same_bits(run_engine(late.engine, resumed)["a"], whole)
