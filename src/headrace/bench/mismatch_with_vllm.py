"""The peer's log-probabilities: tokens vLLM samples, and what TRL's trainer makes of them, in a process of their own.

In: a checkpoint, and prompts with a number of tokens in an .npz file. Out: an .npz file with the tokens, the
log-probabilities they were sampled with, those of TRL's trainer, and the settings. vLLM is set up as TRL 1.16
sets it up on the trainer's own GPU; left out is what changes no arithmetic (its launcher, the tokenizer). TRL's side is
TRL's own head over the Hugging Face model, under bf16 autocast, in batches without padding. It is computed with
weights in bfloat16, and in float32, which TRL takes where it loads the model itself; the values are the same.

Shape legend: S samples, P prompt tokens, L sampled tokens, T = P + L.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.bench import peers

VLLM_SETTINGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.4,
    "max_num_batched_tokens": 4096,
    "logprobs_mode": "processed_logprobs",
    "seed": 0,
}
WEIGHTS = ("bfloat16", "float32")
_MICROBATCH = 32
_DEADLINE_S = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What the peer's process found."""

    token_ids_SL: np.ndarray
    """int32."""
    sampled_SL: np.ndarray
    """float32, vLLM's log-probabilities; not a number where it gave none."""
    trained_SL: Mapping[str, np.ndarray]
    """float32, TRL's log-probabilities by the type its weights are kept in."""
    about: Mapping[str, Any]
    """Versions and settings."""


def check_installed(python: Path | None = None) -> None:
    peers.need("vllm", ["vllm", "trl"], "the extras bench and vllm", python)


def run(checkpoint: Path, prompts_SP: np.ndarray, num_tokens: int, python: Path | None = None) -> Peer:
    """Raises ConfigError where the run fails."""
    with tempfile.TemporaryDirectory(prefix="headrace-mismatch-") as directory:
        given, found = Path(directory) / "prompts.npz", Path(directory) / "found.npz"
        np.savez(given, prompts=prompts_SP, num_tokens=num_tokens)
        told = [str(checkpoint), str(given), str(found)]
        peers.run("vllm", __name__, told, found, python=python, deadline_s=_DEADLINE_S)
        return read(found)


def write(path: Path, peer: Peer) -> None:
    arrays: dict[str, Any] = {f"trained_{name}": values for name, values in peer.trained_SL.items()}
    about = np.array(json.dumps(dict(peer.about)))
    np.savez(path, token_ids=peer.token_ids_SL, sampled=peer.sampled_SL, about=about, **arrays)


def read(path: Path) -> Peer:
    with np.load(path) as arrays:
        return Peer(
            token_ids_SL=arrays["token_ids"],
            sampled_SL=arrays["sampled"],
            trained_SL={
                name.removeprefix("trained_"): arrays[name]
                for name in arrays.files
                if name.startswith("trained_")
            },
            about=json.loads(str(arrays["about"])),
        )


def sample(checkpoint: Path, prompts_SP: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """[S, L] tokens of vLLM and their log-probabilities."""
    import vllm

    llm = vllm.LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        max_model_len=prompts_SP.shape[1] + num_tokens,
        max_num_seqs=len(prompts_SP),
        **VLLM_SETTINGS,
    )
    sampling = vllm.SamplingParams(
        max_tokens=num_tokens, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts_SP]
    outputs = [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
    token_ids_SL = np.array([list(output.token_ids) for output in outputs], dtype=np.int32)
    assert token_ids_SL.shape == (len(prompts_SP), num_tokens), f"vLLM sampled {token_ids_SL.shape}"
    sampled_SL = np.array(
        [
            [given[token].logprob for given, token in zip(output.logprobs, output.token_ids, strict=True)]
            for output in outputs
        ],
        dtype=np.float32,
    )
    return token_ids_SL, sampled_SL


def trained_logprobs(
    checkpoint: Path, prompts_SP: np.ndarray, token_ids_SL: np.ndarray, *, weights: str, device: str
) -> np.ndarray:
    """float32 [S, L] as TRL's GRPOTrainer computes them before a step."""
    import torch
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import add_fused_lm_head

    model = AutoModelForCausalLM.from_pretrained(str(checkpoint), dtype=getattr(torch, weights)).to(device)
    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
    tokens_ST = torch.from_numpy(np.concatenate([prompts_SP, token_ids_SL], axis=1)).long().to(device)
    num_tokens, parts = token_ids_SL.shape[1], []
    for batch_BT in tokens_ST.split(_MICROBATCH):
        labels_BT = batch_BT.clone()
        labels_BT[:, :-num_tokens] = -100
        with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
            outputs = model(
                input_ids=batch_BT,
                attention_mask=torch.ones_like(batch_BT),
                labels=labels_BT,
                fused_lm_head=True,
            )
        parts.append(outputs.log_probs[:, -num_tokens:].float().cpu())
    return torch.cat(parts).numpy()


def _measure(checkpoint: Path, prompts_SP: np.ndarray, num_tokens: int) -> Peer:
    import transformers
    import trl
    import vllm

    token_ids_SL, sampled_SL = sample(checkpoint, prompts_SP, num_tokens)
    trained_SL = {
        weights: trained_logprobs(checkpoint, prompts_SP, token_ids_SL, weights=weights, device="cuda")
        for weights in WEIGHTS
    }
    about = {
        "vllm": vllm.__version__,
        "trl": trl.__version__,
        "transformers": transformers.__version__,
        "vllm_settings": VLLM_SETTINGS,
        "microbatch": _MICROBATCH,
    }
    return Peer(token_ids_SL=token_ids_SL, sampled_SL=sampled_SL, trained_SL=trained_SL, about=about)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("checkpoint", "given", "found"):
        parser.add_argument(name, type=Path)
    told = parser.parse_args()
    with np.load(told.given) as given:
        prompts_SP, num_tokens = given["prompts"], int(given["num_tokens"])
    write(told.found, _measure(told.checkpoint, prompts_SP, num_tokens))


if __name__ == "__main__":
    main()
