"""A tokenizer with one token a character, for demos, tests and examples.

In: an alphabet. Out: a folder with ``tokenizer.json`` and ``tokenizer_config.json`` that ``Renderer`` and
transformers' ``AutoTokenizer`` both load. Invariant: ids 0 to 3 are ``<pad>``, ``<bos>``, ``<eos>`` and
``<unk>``, where Llama's default configuration expects them, and the alphabet follows in its order.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>")


def make_char_tokenizer(directory: str | Path, alphabet: str, *, chat_template: str | None = None) -> int:
    """Write the tokenizer into ``directory`` (made if need be); returns the vocabulary's size."""
    directory = Path(directory)
    characters = list(dict.fromkeys(alphabet))
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(""), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "clean_up_tokenization_spaces": False,
    }
    if chat_template is not None:
        settings["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return len(vocabulary)
