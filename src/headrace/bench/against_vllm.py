"""The same rollouts with vLLM, in a process of its own: both sides want the whole GPU.

In: a model shape and a workload. Out: seconds of each run after a warm-up, with the settings they were taken
with. vLLM gets what serves it best here: graphs up to the batch, asynchronous scheduling, prefix caching, large
prefill batches, and log-probabilities of the sampled token alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench import peers
from headrace.bench.rollout_workload import Workload
from headrace.types import Request

SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_num_seqs": 512,
    "max_num_batched_tokens": 16384,
    "gpu_memory_utilization": 0.9,
    "enable_prefix_caching": True,
    "async_scheduling": True,
    "max_model_len": 4096,
}
_START_S, _ROUND_S = 600, 120


def check_installed(python: Path | None = None) -> None:
    peers.need("vllm", ["vllm"], "the extra vllm", python)


def run(shape: str, workload: Workload, *, repeats: int, python: Path | None = None) -> dict[str, Any]:
    """Figures of vLLM on the rollout workload; raises ConfigError where there are none."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "figures.json"
        told = [shape, str(out), str(repeats), json.dumps(asdict(workload))]
        deadline_s = _START_S + (repeats + 1) * workload.rounds * _ROUND_S
        peers.run("vllm", __name__, told, out, python=python, deadline_s=deadline_s)
        figures: dict[str, Any] = json.loads(out.read_text())
    return figures


def _measure(shape: str, workload: Workload, repeats: int) -> dict[str, Any]:
    import vllm
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from headrace.bench.shapes import shape_config

    config = shape_config(shape)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = "bfloat16"
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        llm = vllm.LLM(directory, load_format="dummy", skip_tokenizer_init=True, **SETTINGS)
        ready_s = peers.process_age_s()
        seconds = []
        for repeat in range(repeats + 1):
            llm.reset_prefix_cache()
            taken = _generate(llm, workload, config.vocab_size, repeat)
            if repeat:
                seconds.append(taken)
    return {
        "version": vllm.__version__,
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "ready_s": ready_s,
        "settings": SETTINGS,
    }


def _generate(llm: Any, workload: Workload, vocab_size: int, repeat: int) -> float:
    """Seconds: of its own ``generate``, or where samples have several turns of its engine's steps."""
    first = workload.requests(vocab_size, repeat)
    asked = [_asked(request) for request in first]
    start = time.perf_counter()
    if workload.turns == 1:
        outputs = llm.generate(*zip(*asked, strict=True), use_tqdm=False)
        taken, produced = time.perf_counter() - start, sum(len(o.outputs[0].token_ids) for o in outputs)
    else:
        for request, (prompt, params) in zip(first, asked, strict=True):
            llm.llm_engine.add_request(request.id, prompt, params)
        produced = _take_turns(llm.llm_engine, workload, {r.id: r for r in first}, vocab_size)
        taken = time.perf_counter() - start
    assert produced == workload.num_tokens, f"{produced} tokens for {workload.num_tokens}"
    return taken


def _take_turns(engine: Any, workload: Workload, running: dict[str, Request], vocab_size: int) -> int:
    """Steps until all turns are over; how many tokens they had."""
    produced = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if not output.finished:
                continue
            sampled = np.asarray(output.outputs[0].token_ids)
            produced += len(sampled)
            following = workload.next_request(running.pop(output.request_id), sampled, vocab_size)
            if following is not None:
                running[following.id] = following
                engine.add_request(following.id, *_asked(following))
    return produced


def _asked(request: Request) -> tuple[dict[str, Any], Any]:
    """The prompt and the parameters of one request, as vLLM takes them."""
    import vllm

    params = vllm.SamplingParams(
        max_tokens=request.sampling.max_tokens, temperature=1.0, ignore_eos=True, logprobs=0,
        detokenize=False, output_kind=vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    return {"prompt_token_ids": request.prompt_ids.tolist()}, params


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    parser.add_argument("out", type=Path)
    parser.add_argument("repeats", type=int)
    parser.add_argument("workload", type=json.loads)
    told = parser.parse_args()
    told.out.write_text(json.dumps(_measure(told.shape, Workload(**told.workload), told.repeats)))


if __name__ == "__main__":
    main()
