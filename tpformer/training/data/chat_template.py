"""A conversation as the text or the tokens that a model reads: chat templates, rendered as transformers renders them.

Templates come from other people, so each runs in a process of its own (render.py): in jinja2's sandbox, where it reads
what it is given, changes nothing and imports nothing, and with limits of time and memory.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from tpformer.words import printable

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

    A template writes its special tokens itself, so the tokenizer adds none; without one the text begins as a document
    does. Errors: those of render_chat.
    """
    template, encode = tokenizer.chat_template, tokenizer.encode
    if template is None:
        template, encode = PLAIN_TEMPLATE, tokenizer.encode_prompt
    return encode(
        render_chat(template, messages, tokenizer.special_tokens, add_generation_prompt=add_generation_prompt)
    )


def render_chat(
    template: str, messages: Sequence[Message], special_tokens: Mapping[str, str], *, add_generation_prompt: bool = True
) -> str:
    """The conversation as the template writes it. The template sees the special tokens by role (`eos_token`).

    ValueError with the template's own words where it refuses the conversation, has a mistake, reaches for what the
    sandbox forbids, or takes more time, memory or text than SECONDS, MEMORY and CHARACTERS of render.py.
    ImportError without jinja2 or with a version whose sandbox has known holes.
    """
    given = {
        "template": template,
        "values": {
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            **special_tokens,
        },
    }
    command = [sys.executable, "-P", str(Path(__file__).with_name("render.py"))]
    done = subprocess.run(command, input=json.dumps(given).encode(), capture_output=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:  # the system has ended it
        answer = {"refused": "it takes too much time or memory"}
    if "missing" in answer:
        raise ImportError(answer["missing"])
    if "refused" in answer:
        raise ValueError(f"the chat template refuses this conversation: {printable(answer['refused'], 300)}")
    return answer["text"]
