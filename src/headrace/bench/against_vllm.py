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
from pathlib import Path
from typing import Any

from headrace.bench import peers
from headrace.bench.rollout_workload import Workload
from headrace.errors import ConfigError

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


def run(
    shape: str, *, repeats: int, seed: int = 0, rounds: int = 1, python: Path | None = None
) -> dict[str, Any]:
    """Figures of vLLM on the rollout workload; raises ConfigError where there are none."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "figures.json"
        told = [shape, str(out), str(repeats), str(seed), str(rounds)]
        deadline_s = _START_S + (repeats + 1) * rounds * _ROUND_S
        peers.run("vllm", __name__, told, out, python=python, deadline_s=deadline_s)
        figures: dict[str, Any] = json.loads(out.read_text())
    # Where it has an environment of its own, the Headrace there may be another.
    if figures.get("workload") != Workload(seed=seed, rounds=rounds).digest():
        raise ConfigError(
            "--peer-python: the Headrace installed there makes other prompts or lengths; install this one there"
        )
    return figures


def _measure(shape: str, repeats: int, seed: int, rounds: int) -> dict[str, Any]:
    import vllm
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from headrace.bench.shapes import shape_config

    workload = Workload(seed=seed, rounds=rounds)
    config = shape_config(shape)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = "bfloat16"
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        llm = vllm.LLM(directory, load_format="dummy", skip_tokenizer_init=True, **SETTINGS)
        ready_s = peers.process_age_s()
        lengths = workload.lengths()
        sampling = [
            vllm.SamplingParams(
                max_tokens=int(n), temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False
            )
            for n in lengths
        ]
        seconds = []
        for repeat in range(repeats + 1):
            llm.reset_prefix_cache()
            prompts = workload.prompts(config.vocab_size, repeat)
            inputs = [
                {"prompt_token_ids": prompts[i // workload.group_size].tolist()} for i in range(len(lengths))
            ]
            start = time.perf_counter()
            outputs = llm.generate(inputs, sampling, use_tqdm=False)
            taken = time.perf_counter() - start
            produced = sum(len(output.outputs[0].token_ids) for output in outputs)
            assert produced == lengths.sum(), f"{produced} tokens for {lengths.sum()}"
            if repeat:
                seconds.append(taken)
    return {
        "version": vllm.__version__,
        "workload": workload.digest(),
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "ready_s": ready_s,
        "settings": SETTINGS,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape")
    parser.add_argument("out", type=Path)
    parser.add_argument("repeats", type=int)
    parser.add_argument("seed", type=int)
    parser.add_argument("rounds", type=int)
    told = parser.parse_args()
    told.out.write_text(json.dumps(_measure(told.shape, told.repeats, told.seed, told.rounds)))


if __name__ == "__main__":
    main()
