"""Chat templates as transformers renders them, without transformers.

In: the template text a model ships and chat messages. Out: the text the model was trained to see. The
environment's options are transformers' own (see ``_compile_jinja_template`` there), so the text is
the same; templates are untrusted code and run in jinja2's sandbox, on plain copies of the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headrace.errors import ModelError


class ChatTemplate:
    """A compiled template and the values it may always name (special tokens, template options)."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template does not compile (line {error.lineno}): {error.message}"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation up to where the assistant is to speak; raises what the template raises."""
        return self._template.render(
            {
                "tools": None,
                "documents": None,
                **self._variables,
                "messages": [_plain(message) for message in messages],
                "add_generation_prompt": True,
            }
        )


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks what the assistant wrote; for rendering it is only its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _plain(value: Any) -> Any:
    """JSON types only: a template must not reach the methods of richer objects."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    return str(value)
