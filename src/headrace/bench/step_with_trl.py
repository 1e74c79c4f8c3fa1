"""The same whole step with TRL's GRPOTrainer and vLLM on the same GPU, in a process of its own.

In: a checkpoint, the size of a step, and how TRL is set up. Out: seconds a step after two to settle, the most GPU
memory in use, and how far TRL's log-probabilities were from those vLLM sampled with. TRL is run with gradient
checkpointing and without, where that fits, and its better time counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headrace.bench import peers
from headrace.bench.gpu_memory import MemoryWatch
from headrace.bench.step_workload import StepWorkload

_SETTLING_STEPS = 2
_DEADLINE_S = 1200


def check_installed(python: Path | None = None) -> None:
    peers.need("trl", ["trl", "vllm"], "the extras bench and vllm", python)


def run(
    model: Path,
    workload: StepWorkload,
    *,
    steps: int,
    microbatch: int = 32,
    checkpointing: bool = True,
    python: Path | None = None,
) -> dict[str, Any]:
    """Figures of one set-up; raises ConfigError where the run fails."""
    told = {
        "model": str(model),
        "workload": asdict(workload),
        "steps": steps,
        "microbatch": microbatch,
        "checkpointing": checkpointing,
    }
    with tempfile.TemporaryDirectory() as directory, MemoryWatch() as memory:
        out = Path(directory) / "figures.json"
        peers.run("trl", __name__, [json.dumps(told), str(out)], out, python=python, deadline_s=_DEADLINE_S)
        figures: dict[str, Any] = json.loads(out.read_text())
    return {**figures, "peak_bytes": memory.peak_bytes}


def _measure(told: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    workload = StepWorkload(**told["workload"])
    num_samples = workload.num_groups * workload.group_size
    ends: list[float] = []
    mismatch: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())

        def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
            value = (logs or {}).get("sampling/sampling_logp_difference/mean")
            if value is not None:
                mismatch.append(float(value))

    def first_token_is_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(ids[0] % 2 == 0) for ids in completion_ids]

    rng = np.random.default_rng(0)
    letters = np.array(["a", "b"])
    prompts = ["".join(letters[rng.integers(0, 2, workload.prompt_tokens)]) for _ in range(4096)]
    with tempfile.TemporaryDirectory() as directory:
        config = trl.GRPOConfig(
            output_dir=directory,
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.25,
            vllm_max_model_length=workload.prompt_tokens + workload.completion_tokens,
            num_generations=workload.group_size,
            max_completion_length=workload.completion_tokens,
            # The random model's tokens are no text, and nobody reads them: vLLM need not make any.
            generation_kwargs={"ignore_eos": True, "detokenize": False},
            per_device_train_batch_size=told["microbatch"],
            gradient_accumulation_steps=num_samples // told["microbatch"],
            gradient_checkpointing=told["checkpointing"],
            bf16=True,
            beta=0.0,
            temperature=1.0,
            learning_rate=1e-6,
            max_steps=told["steps"] + _SETTLING_STEPS,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(told["model"], dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(told["model"])
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=first_token_is_even,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
    taken = [b - a for a, b in zip(ends[_SETTLING_STEPS - 1 : -1], ends[_SETTLING_STEPS:], strict=True)]
    return {
        "version": trl.__version__,
        "seconds": statistics.median(taken),
        "all_seconds": taken,
        "mismatch_mean": statistics.median(mismatch) if mismatch else None,
        "microbatch": told["microbatch"],
        "checkpointing": told["checkpointing"],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("told", type=json.loads)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.write_text(json.dumps(_measure(options.told)))


if __name__ == "__main__":
    main()
