from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from headrace.data.rendering import Renderer, make_char_tokenizer
from headrace.errors import ModelError, TaskError
from headrace.types import Task

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789 +=-<>|/{}[]():,.\"'\n_"

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set messages_left = messages[1:] %}
<|{{ messages[0].content }}|>
{%- else %}
    {%- set messages_left = messages %}
{%- endif %}
{% for message in messages_left %}
    {% if message.role == 'tool' %}
        {% continue %}
    {% endif %}
    {% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {% elif message.content is string %}
[{{ message.role }}]{{ message.content | trim }}
    {% else %}
{{ message.content | tojson }}
    {% endif %}
{% endfor %}
{% if tools is none and documents is not none %}{{ raise_exception('tools') }}{% endif %}
{% if add_generation_prompt %}
[assistant]{% if enable_thinking is defined and not enable_thinking %}<nothing>{% endif %}
{% endif %}
"""

CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "  add 1 + 2  "}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a<b>\n\nc"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "tool", "content": "ignored"},
        {"role": "user", "content": [{"type": "text", "text": "it's <three>"}]},
    ],
]


def chat(messages: list[dict[str, Any]]) -> Task:
    return Task(id="chat/0", prompt=tuple(messages))


def text(prompt: str) -> Task:
    return Task(id="text/0", prompt=prompt)


def write_bpe(directory: Path, **settings: Any) -> None:
    """A byte-level tokenizer that starts every text with <s>, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog, the end"] * 3, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    tokenizer.enable_truncation(4)
    directory.mkdir(exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "pad_token": "<pad>",
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def auto_tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(directory))


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("where", ["tokenizer_config", "jinja file"])
def test_chat_prompts_match_transformers(tmp_path: Path, messages: list[dict[str, Any]], where: str) -> None:
    if where == "jinja file":
        make_char_tokenizer(tmp_path, ALPHABET, chat_template="{{ raise_exception('the file wins') }}")
        (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    else:
        make_char_tokenizer(tmp_path, ALPHABET, chat_template=CHAT_TEMPLATE)
    theirs = auto_tokenizer(tmp_path).apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    ours = Renderer.from_directory(tmp_path).prompt_ids(chat(messages))
    assert ours.dtype == np.int32
    assert ours.tolist() == theirs
    assert len(theirs) > 10


def test_template_options_reach_the_template(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path, ALPHABET, chat_template=CHAT_TEMPLATE)
    theirs = auto_tokenizer(tmp_path).apply_chat_template(
        CONVERSATIONS[0], add_generation_prompt=True, enable_thinking=False
    )
    ours = Renderer.from_directory(tmp_path, template_options={"enable_thinking": False})
    assert ours.prompt_ids(chat(CONVERSATIONS[0])).tolist() == theirs["input_ids"]
    assert "<nothing>" in ours.decode(theirs["input_ids"])


@pytest.mark.parametrize(
    "settings",
    [{}, {"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}, {"add_eos_token": False}],
)
def test_text_prompts_follow_the_tokenizers_special_token_rules(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    write_bpe(tmp_path, **settings)
    prompt = "the quick fox, naïve\n 12"
    theirs = auto_tokenizer(tmp_path)(prompt, truncation=False)["input_ids"]
    renderer = Renderer.from_directory(tmp_path)
    assert renderer.prompt_ids(text(prompt)).tolist() == theirs
    assert renderer.decode(renderer.encode(prompt)) == prompt


def test_named_default_template_is_chosen(tmp_path: Path) -> None:
    templates = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ messages[0].content }}!"},
    ]
    write_bpe(tmp_path, chat_template=templates)
    renderer = Renderer.from_directory(tmp_path)
    assert renderer.decode(renderer.prompt_ids(chat(CONVERSATIONS[1]))) == "be brief!"


def test_char_tokenizer_round_trips_and_loads_in_transformers(tmp_path: Path) -> None:
    size = make_char_tokenizer(tmp_path / "new" / "folder", "ab+ab")
    renderer = Renderer.from_directory(tmp_path / "new" / "folder")
    theirs = auto_tokenizer(tmp_path / "new" / "folder")
    assert size == renderer.vocab_size == len(theirs) == 7
    assert renderer.encode("a+b").tolist() == [4, 6, 5] == theirs("a+b")["input_ids"]
    assert renderer.decode([1, 4, 6, 5, 2]) == "a+b"
    assert (renderer.pad_id, renderer.stop_ids) == (0, (2,))
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id) == (0, 1, 2)
    assert renderer.encode("z").tolist() == [3]


def test_stop_ids_come_from_every_place_that_names_them(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path, "abc")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4, "max_position_embeddings": 128}))
    renderer = Renderer.from_directory(tmp_path)
    assert renderer.stop_ids == (2, 4)
    assert renderer.max_context == 128
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert Renderer.from_directory(tmp_path).stop_ids == (2, 5)


def test_max_context_of_nested_and_silent_configurations(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path, "abc")
    assert Renderer.from_directory(tmp_path).max_context is None
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"max_position_embeddings": 64}}))
    assert Renderer.from_directory(tmp_path).max_context == 64


def test_single_token_ids(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path, "abc\n")
    renderer = Renderer.from_directory(tmp_path)
    assert renderer.single_token_ids(["\n", "<bos>"]) == (7, 1)
    with pytest.raises(ModelError, match="'ab' is 2 tokens"):
        renderer.single_token_ids(["ab"])


def rewrite_settings(directory: Path, **changes: Any) -> None:
    path = directory / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"eos_token": None}, ["end-of-sequence", "eos_token", "tokenizer_config.json"]),
        ({"pad_token": None}, ["padding", "pad_token", "tokenizer_config.json"]),
        ({"eos_token": "<absent>"}, ["eos_token", "'<absent>'", "vocabulary"]),
        ({"chat_template": "{% for %}"}, ["chat template", "line 1"]),
    ],
)
def test_incomplete_tokenizers_are_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    make_char_tokenizer(tmp_path, "abc")
    rewrite_settings(tmp_path, **changes)
    with pytest.raises(ModelError) as caught:
        Renderer.from_directory(tmp_path)
    for word in words:
        assert word in str(caught.value)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="absent does not exist"):
        Renderer.from_directory(tmp_path / "absent")
    with pytest.raises(ModelError, match=r"no tokenizer\.json: write it with"):
        Renderer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        Renderer.from_directory(tmp_path)
    make_char_tokenizer(tmp_path, "abc")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read as JSON"):
        Renderer.from_directory(tmp_path)


def test_chat_prompt_without_a_template(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path, "abc")
    with pytest.raises(ModelError, match=r"task chat/0 has chat messages but .* no chat template"):
        Renderer.from_directory(tmp_path).prompt_ids(chat(CONVERSATIONS[0]))


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ messages + 'roles' }}"]
)
def test_messages_the_template_refuses_name_the_task(tmp_path: Path, template: str) -> None:
    make_char_tokenizer(tmp_path, "abc", chat_template=template)
    with pytest.raises(TaskError, match=r"task chat/0.*(roles must alternate|can only concatenate)"):
        Renderer.from_directory(tmp_path).prompt_ids(chat(CONVERSATIONS[0]))


def test_templates_run_in_a_sandbox(tmp_path: Path) -> None:
    make_char_tokenizer(
        tmp_path, "abc", chat_template="{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"
    )
    with pytest.raises(TaskError, match=r"unsafe|not safely callable"):
        Renderer.from_directory(tmp_path).prompt_ids(chat(CONVERSATIONS[0]))


def test_empty_prompt_is_refused(tmp_path: Path) -> None:
    make_char_tokenizer(tmp_path, "abc")
    with pytest.raises(TaskError, match="task text/0 has an empty prompt"):
        Renderer.from_directory(tmp_path).prompt_ids(text(""))


def test_rendering_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, headrace.data.rendering, headrace.data.tasks\n"
        "assert not {'torch', 'transformers', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
