"""A process-reward model that reads in pieces scores as one that reads the whole, in any order and out of memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from headrace.errors import ModelError, TaskError
from headrace.scoring.process_model import ProcessModel, kv_tokens_in, load_process_model
from headrace.types import StepQuestion, Task

VOCAB = 40
TASK = Task(id="0", prompt="p")
TEXT = np.random.default_rng(0).integers(0, VOCAB, 90).astype(np.int32)
ENDS = np.array([9, 10, 31, 60, 90])
KINDS = {
    "causal": AutoModelForCausalLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}


def tiny(kind="causal", family="llama", *, labels=2, **settings):
    small = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "num_labels": labels,
        "pad_token_id": 0,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**small, **settings})
    return KINDS[kind].from_config(config).eval()


def process_model(kind="causal", family="llama", *, kv_tokens=10_000, marker=(), labels=2, **settings):
    pair = (5, 6) if kind == "causal" else None
    model = tiny(kind, family, labels=labels, **settings)
    return ProcessModel(model, kv_tokens=kv_tokens, pair=pair, marker=marker)


def ask(model, ids, ends, *, attempt="0/0", num_known=0, last=False):
    """The answer to one question; raises where there is none."""
    (answer,) = model.score([question(ids, ends, attempt=attempt, num_known=num_known, last=last)])
    if isinstance(answer, Exception):
        raise answer
    return answer.scores


def question(ids, ends, *, attempt="0/0", num_known=0, last=False):
    return StepQuestion(
        attempt=attempt,
        task=TASK,
        token_ids=ids,
        num_prompt=4,
        ends=ends,
        num_known=num_known,
        last=last,
    )


def in_pieces(model, attempt="0/0"):
    """As a run asks: after some steps, with tokens of the next one in sight."""
    scores, known = [], 0
    for seen, num_steps in ((12, 2), (33, 3), (90, 5)):
        last = num_steps == len(ENDS)
        asked = {"attempt": attempt, "num_known": known, "last": last}
        scores.append(ask(model, TEXT[:seen], ENDS[:num_steps], **asked))
        known = num_steps
    return np.concatenate(scores)


CASES = [
    ("causal", "llama", {}),
    ("causal", "llama", {"marker": (7, 8)}),
    ("causal", "gemma2", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
    ("causal", "gpt2", {}),
    ("sequence", "llama", {"labels": 1}),
    ("sequence", "qwen2", {"marker": (7,)}),
    ("token", "llama", {"labels": 3}),
    ("token", "gpt2", {}),
]


@pytest.mark.parametrize(("kind", "family", "options"), CASES)
def test_scores_read_in_pieces_are_those_of_the_whole_text(kind, family, options):
    whole = ask(process_model(kind, family, **options), TEXT, ENDS)
    model = process_model(kind, family, **options)
    np.testing.assert_allclose(in_pieces(model), whole, atol=1e-5)
    assert whole.shape == (5,)
    assert np.ptp(whole) > 1e-3, "steps are told apart"
    num_read = len(TEXT) + 5 * len(options.get("marker", ()))
    assert model.counters()["read_tokens"] == num_read, "no token is read twice"
    assert model.counters()["held_attempts"] == 0, "nothing is kept of what has ended"


def test_many_attempts_in_one_pass_are_scored_as_each_alone():
    """Of all lengths, begun and continued, with and without a memory, and one that is at fault."""
    draw = np.random.default_rng(1)
    texts = [draw.integers(0, VOCAB, n).astype(np.int32) for n in (7, 90, 33, 51, 12, 64)]
    ends = [np.array([3, len(text)]) for text in texts]
    alone = [ask(process_model(), text, end) for text, end in zip(texts, ends, strict=True)]
    model = process_model()
    model.score(
        [
            question(t[:3], e[:1], attempt=str(i))
            for i, (t, e) in enumerate(zip(texts, ends, strict=True))
            if i % 2
        ]
    )
    asked = [question(t, e, attempt=str(i)) for i, (t, e) in enumerate(zip(texts, ends, strict=True))]
    *answers, fault = model.score([*asked, question(TEXT + np.int32(VOCAB), ENDS, attempt="bad")])
    assert isinstance(fault, TaskError)
    for answer, wanted in zip(answers, alone, strict=True):
        np.testing.assert_allclose(answer.scores, wanted, atol=1e-5)


def test_a_pass_holds_no_more_than_it_may(monkeypatch):
    monkeypatch.setattr("headrace.scoring.process_model.PASS_TOKENS", 100)
    texts = [TEXT[:n] for n in (90, 60, 31, 20)]
    asked = [question(t, np.array([5, len(t)]), attempt=str(i)) for i, t in enumerate(texts)]
    for text, answer in zip(texts, process_model().score(asked), strict=True):
        np.testing.assert_allclose(
            answer.scores, ask(process_model(), text, np.array([5, len(text)])), atol=1e-5
        )


def test_the_score_is_that_of_the_model_itself():
    """Against plain calls of transformers on the text up to each step."""
    model = tiny("sequence", labels=2)
    scores = ask(ProcessModel(model, kv_tokens=100), TEXT, ENDS)
    with torch.no_grad():
        for score, end in zip(scores, ENDS, strict=True):
            ids = torch.tensor(TEXT[:end], dtype=torch.long)[None]
            logits = model.score(model.model(ids).last_hidden_state[0, -1])
            bad, good = torch.softmax(logits, -1).tolist()
            assert score == pytest.approx(good - bad, abs=1e-5)
    causal = tiny("causal")
    scores = ask(ProcessModel(causal, kv_tokens=100, pair=(5, 6)), TEXT, ENDS)
    with torch.no_grad():
        logits = causal(torch.tensor(TEXT, dtype=torch.long)[None]).logits[0, ENDS - 1]
    pairs = torch.softmax(logits[:, [5, 6]], -1)
    np.testing.assert_allclose(scores, (pairs[:, 0] - pairs[:, 1]).numpy(), atol=1e-5)


def test_attempts_beyond_the_budget_are_forgotten_and_read_again_with_the_same_scores():
    whole = ask(process_model(), TEXT, ENDS)
    model = process_model(kv_tokens=70)
    first = ask(model, TEXT[:60], ENDS[:4])
    ask(model, TEXT[:31], ENDS[:3], attempt="0/1")
    assert model.counters()["evictions"] == 1
    assert model.counters()["held_tokens"] == 31
    rest = ask(model, TEXT, ENDS, num_known=4)
    np.testing.assert_allclose(np.concatenate([first, rest]), whole, atol=1e-5)
    assert model.counters()["recomputed_tokens"] == 60
    assert model.counters()["held_tokens"] <= 70


def test_an_attempt_longer_than_the_budget_is_scored_all_the_same():
    whole = ask(process_model(), TEXT, ENDS)
    np.testing.assert_allclose(in_pieces(process_model(kv_tokens=5)), whole, atol=1e-5)


def test_other_tokens_under_the_same_name_are_read_anew():
    model, other = process_model(), TEXT[::-1].copy()
    ask(model, TEXT[:31], ENDS[:3])
    np.testing.assert_allclose(ask(model, other, ENDS), ask(process_model(), other, ENDS), atol=1e-5)


@pytest.mark.parametrize("marker", [(), (7, 8)])
def test_the_steps_of_a_second_turn_are_not_taken_for_those_of_the_first(marker):
    """Its prompt repeats the first turn, whose text is remembered and whose steps lie elsewhere."""
    model, second = process_model(marker=marker), np.array([60, 75, 90])
    ask(model, TEXT[:50], np.array([9, 30, 50]))
    wanted = ask(process_model(marker=marker), TEXT, second)
    np.testing.assert_allclose(ask(model, TEXT, second, last=True), wanted, atol=1e-5)
    if not marker:
        assert model.counters()["read_tokens"] == len(TEXT), "what was read of the first turn is used"


def test_steps_inside_what_was_read_without_judging_them_are_read_again():
    model, others = process_model(), np.array([20, 40, 90])
    ask(model, TEXT[:60], ENDS[:4])
    np.testing.assert_allclose(ask(model, TEXT, others), ask(process_model(), TEXT, others), atol=1e-5)


def test_an_answer_that_was_lost_is_given_again_without_reading():
    model = process_model()
    once = ask(model, TEXT[:31], ENDS[:3])
    read = model.counters()["read_tokens"]
    np.testing.assert_array_equal(ask(model, TEXT[:31], ENDS[:3]), once)
    assert model.counters()["read_tokens"] == read


def test_long_texts_are_read_in_chunks(monkeypatch):
    whole = ask(process_model(), TEXT, ENDS)
    monkeypatch.setattr("headrace.scoring.process_model.CHUNK_TOKENS", 7)
    np.testing.assert_allclose(ask(process_model(), TEXT, ENDS), whole, atol=1e-5)


def test_nothing_has_ended_yet():
    assert ask(process_model(), TEXT, np.zeros(0, np.int64)).shape == (0,)


def test_a_model_that_looks_ahead_is_refused():
    with pytest.raises(ModelError, match="causal attention"):
        process_model("sequence", "bert", is_decoder=False)


def test_bad_input_is_named():
    with pytest.raises(TaskError, match=r"token 40 is beyond the model's vocabulary of 40.*tokenizer"):
        ask(process_model(), TEXT + np.int32(1), ENDS)
    with pytest.raises(ModelError, match="needs the two tokens that mean good and bad"):
        ProcessModel(tiny("causal"), kv_tokens=10)
    with pytest.raises(ModelError, match="leave good and bad out"):
        ProcessModel(tiny("token"), kv_tokens=10, pair=(1, 2))


def test_models_are_loaded_by_what_they_are(tmp_path):
    for kind in KINDS:
        tiny(kind).save_pretrained(tmp_path / kind)
        loaded = load_process_model(str(tmp_path / kind), dtype="float32", device="cpu")
        assert type(loaded) is type(tiny(kind))
    assert kv_tokens_in(loaded, 2**20) == 2**20 // (2 * 2 * 2 * 8 * 4)
    config = AutoConfig.for_model("llama", architectures=["LlamaForGuessing"])
    config.save_pretrained(tmp_path / "odd")
    with pytest.raises(ModelError, match=r"LlamaForGuessing; give a causal model"):
        load_process_model(str(tmp_path / "odd"), dtype="float32", device="cpu")
