"""A conversation as the text or the tokens that a model reads: chat templates, rendered as transformers renders them.

Only rendering belongs here. Templates come from other people, so they run in jinja2's sandbox: they read what they are
given, change nothing, and import nothing.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from .tokenizer import Tokenizer

# for a tokenizer without a template: a model that was trained on plain text continues this as text
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_STOP = "\nUser:"  # where such a model begins to write the other side's words

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": text}


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> np.ndarray:
    """The tokens of a conversation, int64 (n,), up to where the next answer begins.

    A template writes its special tokens itself, so the tokenizer adds none. Errors: those of render_chat.
    """
    template = PLAIN_TEMPLATE if tokenizer.chat_template is None else tokenizer.chat_template
    text = render_chat(template, messages, tokenizer.special_tokens, add_generation_prompt=add_generation_prompt)
    return tokenizer.encode(text)


def render_chat(
    template: str, messages: Sequence[Message], special_tokens: Mapping[str, str], *, add_generation_prompt: bool = True
) -> str:
    """The conversation as the template writes it. The template sees the special tokens by role (`eos_token`).

    ValueError with the template's own words where it refuses the conversation, has a mistake, or reaches for what the
    sandbox forbids. ImportError without jinja2 or with a version whose sandbox has known holes.
    """
    environment = _environment()
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **special_tokens,
        )
    except Exception as error:  # a template can fail as any program can
        raise ValueError(f"the chat template refuses this conversation: {type(error).__name__}: {error}") from error


def _environment() -> Any:
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ImportError("chat templates need the jinja2 package: pip install tpformer[hf]") from error
    if tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit()) < (3, 1, 6):
        raise ImportError(
            f"the sandbox of jinja2 {jinja2.__version__} has known holes: pip install --upgrade 'jinja2>=3.1.6'"
        )

    class Generation(Extension):
        """{% generation %} marks answers for those who train on them. Here it is only a block."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        # jinja2's own escapes characters for HTML
        options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
