"""Teachers from settings: whose tokenizer fits, and what their engines are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import teaching
from headrace.config import from_dict
from headrace.errors import ModelError
from headrace.models.loading import load_model, make_tiny_model

BPE = {"a": 0, "b": 1}
END = {"content": "<end>", "id": 2}


@pytest.fixture
def make_directory(tmp_path):
    """A model's folder with this vocabulary; None: without a tokenizer."""

    def make(name, vocabulary, added=(END,), config=None):
        folder = tmp_path / name
        folder.mkdir()
        if vocabulary is not None:
            content = {"model": {"vocab": vocabulary}, "added_tokens": list(added)}
            (folder / "tokenizer.json").write_text(json.dumps(content))
        (folder / "config.json").write_text(json.dumps(config or {"vocab_size": 4}))
        return str(folder)

    return make


def settings(student: str, **distill) -> object:
    return from_dict({"model.path": student, **{f"distill.{name}": value for name, value in distill.items()}})


@pytest.mark.parametrize(
    ("vocabulary", "added"),
    [
        (BPE, (END,)),
        ([["a", -1.0], ["b", -2.0]], (END,)),  # as unigram tokenizers list them
        ({**BPE, "c": 3}, (END, {"content": "<think>", "id": 4})),
        (None, ()),
    ],
    ids=["same", "list", "more", "unknown"],
)
def test_a_teacher_that_has_every_token_of_the_student_fits(make_directory, vocabulary, added):
    chosen = settings(make_directory("student", BPE), teachers={"t": make_directory("t", vocabulary, added)})
    teaching.check_tokenizers(chosen)


@pytest.mark.parametrize(
    ("vocabulary", "added", "says"),
    [
        ({"b": 0, "a": 1}, (END,), r"token 0 \('a'\)"),
        (BPE, (), r"token 2 \('<end>'\)"),
    ],
    ids=["other-order", "fewer"],
)
def test_any_other_is_named(make_directory, vocabulary, added, says):
    chosen = settings(make_directory("student", BPE), teachers={"t": make_directory("t", vocabulary, added)})
    with pytest.raises(
        ModelError, match=r"distill\.teachers: t has another tokenizer than model\.path.*" + says
    ):
        teaching.check_tokenizers(chosen)


def test_engines_are_told_who_they_are(make_directory):
    student, teacher = make_directory("student", BPE), make_directory("t", BPE)
    told = {"settings": {}, "model": student, "segments": "s"}
    chosen = settings(student, teachers={"t": teacher, "earlier": "snapshot:3"})
    made = teaching.told_teachers(chosen, told)
    assert list(made) == ["t", "earlier"] == list(teaching.names(chosen))
    assert (made["t"]["name"], made["t"]["model"], made["t"]["version"]) == ("teacher-t", teacher, 0)
    assert made["earlier"]["name"] == "teacher-earlier"
    assert (made["earlier"]["model"], made["earlier"]["version"]) == (student, -1)
    assert made["earlier"]["follows"] and not made["t"].get("follows")
    assert teaching.told_teachers(settings(student), told) == {}
    assert teaching.distillation(settings(student)) is None


def test_the_size_of_a_vocabulary_may_lie_deeper(make_directory):
    nested = make_directory("nested", None, config={"text_config": {"vocab_size": 9}})
    assert teaching._vocab_size(Path(nested)) == 9
    assert teaching._vocab_size(Path(nested).parent) is None


def tiny(directory: Path, **changes: object) -> Path:
    make_tiny_model(directory, **{"vocab_size": 20, "hidden_size": 16, "num_layers": 1, **changes})
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": BPE}}))
    return directory


def test_a_model_that_may_take_anothers_place_has_its_shape_and_tokens(tmp_path):
    old, new = tiny(tmp_path / "old"), tiny(tmp_path / "new", seed=1)
    teaching.check_alike(old, new)
    load_model(new).to(torch.bfloat16).save_pretrained(new)
    teaching.check_alike(old, new)


def test_a_model_that_may_not_is_told_why(tmp_path):
    old = tiny(tmp_path / "old")
    with pytest.raises(
        ModelError, match=r"wide has a configuration unlike that of .*old \(head_dim, hidden_size"
    ):
        teaching.check_alike(old, tiny(tmp_path / "wide", hidden_size=32))
    cut = tiny(tmp_path / "cut")
    tensors = load_file(cut / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, cut / "model.safetensors")
    with pytest.raises(ModelError, match=r"cut has a set of tensors unlike that of .*model\.norm\.weight"):
        teaching.check_alike(old, cut)
    (cut / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match="cut has a set of tensors that cannot be read"):
        teaching.check_alike(old, cut)
    foreign = tiny(tmp_path / "foreign")
    (foreign / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0, "a": 1}}}))
    with pytest.raises(ModelError, match=r"foreign has a tokenizer unlike that of .*old \(a, b\)"):
        teaching.check_alike(old, foreign)
    with pytest.raises(ModelError, match=r"gone has no config\.json"):
        teaching.check_alike(old, tmp_path / "gone")
