"""Teachers from settings: whose tokenizer fits, and what their engines are told."""

from __future__ import annotations

import json
import shutil
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
    check = teaching.likeness(old)
    check(new)
    load_model(new).to(torch.bfloat16).save_pretrained(new)
    check(new)
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps({**config, "_name_or_path": "elsewhere"}))
    check(new)


def test_the_model_whose_place_is_taken_may_be_gone(tmp_path):
    """Who writes checkpoints in turn removes the last one as soon as the link points to the next."""
    old, new = tiny(tmp_path / "old"), tiny(tmp_path / "new", seed=1)
    check = teaching.likeness(old)
    shutil.rmtree(old)
    check(new)
    with pytest.raises(ModelError, match="wide has a configuration unlike that of"):
        check(tiny(tmp_path / "wide", hidden_size=32))


def test_an_adapter_may_take_the_place_of_one_of_its_shape(tmp_path):
    def adapter(name, rank, start=0.0):
        (tmp_path / name).mkdir()
        told = {"base_model_name_or_path": "base", "r": rank}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(told))
        save_file({"a": torch.full((rank, 3), start)}, tmp_path / name / "adapter_model.safetensors")
        return tmp_path / name

    check = teaching.likeness(adapter("old", 2))
    check(adapter("new", 2, start=1.0))
    with pytest.raises(ModelError, match=r"wide has a configuration unlike that of .*old \(r\)"):
        check(adapter("wide", 4))


def test_a_model_that_may_not_is_told_why(tmp_path):
    check = teaching.likeness(tiny(tmp_path / "old"))
    with pytest.raises(
        ModelError, match=r"wide has a configuration unlike that of .*old \(head_dim, hidden_size"
    ):
        check(tiny(tmp_path / "wide", hidden_size=32))
    cut = tiny(tmp_path / "cut")
    tensors = load_file(cut / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, cut / "model.safetensors")
    with pytest.raises(ModelError, match=r"cut has a set of tensors unlike that of .*model\.norm\.weight"):
        check(cut)
    (cut / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ModelError, match="cut has a set of tensors that cannot be read"):
        check(cut)
    foreign = tiny(tmp_path / "foreign")
    (foreign / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0, "a": 1}}}))
    with pytest.raises(ModelError, match=r"foreign has a tokenizer unlike that of .*old \(a, b\)"):
        check(foreign)
    with pytest.raises(ModelError, match="gone has no configuration"):
        check(tmp_path / "gone")
