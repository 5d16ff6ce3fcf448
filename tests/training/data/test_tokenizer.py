"""Tokenizers round-trip text and know the end of a document; what cannot be loaded is named with the remedy. Special
tokens, prompts and chat templates of a Hugging Face tokenizer folder are what transformers makes of them."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from made import byte_level

from tpformer.training.data import ByteTokenizer, JsonTokenizer, chat_ids, load_tokenizer, render_chat


def word_level_json(path: Path, end_of_document: str) -> Path:
    """A tokenizer.json of four words and one special token whose id leaves a gap."""
    vocabulary = {"[UNK]": 0, "red": 1, "green": 2, "blue": 3, end_of_document: 7}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}
    content = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    path.write_text(json.dumps(content | {"added_tokens": [{"id": 7, "content": end_of_document, **special}]}))
    return path


def test_bytes_are_their_own_ids() -> None:
    tokenizer = load_tokenizer("bytes")
    assert isinstance(tokenizer, ByteTokenizer) and (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)
    assert tokenizer.stop_tokens == (256,)
    text = "".join(map(chr, range(0x800, 0x900))) + "\0é🙂"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64 and ids.tolist() == list(text.encode()) and tokenizer.decode(ids) == text
    with pytest.raises(ValueError, match=r"a text has '\\ud800' at character 1: half of a surrogate pair, or a byte"):
        tokenizer.encode("a\ud800b")
    assert tokenizer.decode([104, 256, 105, 260, -1]) == "hi" and tokenizer.decode([104, 0xFF]) == "h\ufffd"


def test_json_tokenizer_and_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    for end_of_document in ("<|endoftext|>", "</s>", "<|end_of_text|>"):
        tokenizer = load_tokenizer(str(word_level_json(tmp_path / "tokenizer.json", end_of_document)))
        assert (tokenizer.vocab_size, tokenizer.end_of_document) == (8, 7)
    ids = tokenizer.encode("blue red mauve")
    assert ids.dtype == np.int64 and ids.tolist() == [3, 1, 0]
    assert tokenizer.encode("").dtype == np.int64
    assert tokenizer.decode(np.array([3, 1, 7])) == "blue red"
    # an ordinary token that is named special is one token
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "blue", "pad_token": "absent"}')
    tokenizer = load_tokenizer(tmp_path / "tokenizer.json")
    assert tokenizer.encode("redblue").tolist() == [1, 3] and tokenizer.decode([1, 3]) == "red"
    assert tokenizer.end_of_document == 3
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"a\.json has none of the end-of-document tokens .* 5 tokens"):
        JsonTokenizer(word_level_json(tmp_path / "a.json", "<stop>"))
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(ValueError, match=r"b\.json is not a tokenizer\.json"):
        JsonTokenizer(tmp_path / "b.json")
    for place, words in ((tmp_path, r"is a folder: give the file .*tokenizer\.json"), (tmp_path.parent, "without a")):
        with pytest.raises(ValueError, match=words):
            load_tokenizer(place)
    with pytest.raises(FileNotFoundError, match=r"absent\.json does not exist.*`bytes`"):
        load_tokenizer(tmp_path / "absent.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install tpformer\[hf\]"):
        JsonTokenizer(tmp_path / "a.json")


TEMPLATES = {
    "llama3": (
        "{% set loop_messages = messages %}{% if tools is not none %}{{ raise_exception('tools') }}{% endif %}\n"
        "{% for message in loop_messages %}"
        "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message.content | trim %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}\n"
        "    {% if message.role == 'assistant' %}\n    {% generation %}{{ content }}{% endgeneration %}\n"
        "    {% else %}{{ content }}{% endif %}{{ '<|eot_id|>' }}\n{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m['role'] == 'system' %}{% set ns.system = m['content'] + '\n\n' %}{% continue %}{% endif %}"
        "{% if m['role'] == 'user' %}{{ '[INST] ' + ns.system + m['content'] + ' [/INST]' }}{% set ns.system = '' %}"
        "{% elif m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
        "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
    ),
    "tools": "{{ messages | tojson }} {{ strftime_now('%Y') }} {{ documents is none }}{{ pad_token is defined }}",
}
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start_header_id|>", "[INST]", "[/INST]")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A byte-level tokenizer that puts <s> before a prompt, as Llama's does; a test adds the files beside it."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = byte_level(folder / "tokenizer.json", ["def a user says to the assistant\n\n"] * 9, "<s>", SPECIAL)
    tokenizer.enable_truncation(4)  # a published file may, and no text may be cut for it
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write(folder: Path, source: Path, **files: dict | str) -> Path:
    """Copy tokenizer.json to a new folder and put these files beside it; returns the copy."""
    folder.mkdir()
    (folder / "tokenizer.json").write_text((source / "tokenizer.json").read_text())
    for name, content in files.items():
        path = folder / (f"{name}.jinja" if isinstance(content, str) else f"{name}.json")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder / "tokenizer.json"


EOS = {"__type": "AddedToken", "content": "</s>"}
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": EOS}
TURNS = [("system", "Speak <b>plainly</b>."), ("user", " What is 2 + 2? "), ("assistant", "\n4 é🙂"), ("user", "Why?")]
MESSAGES = [{"role": role, "content": content} for role, content in TURNS]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_and_a_prompt_have_the_tokens_that_transformers_gives_them(folder, tmp_path, name):
    transformers = pytest.importorskip("transformers")
    in_config = name == "tools"  # an older folder has the template in its configuration, beside others
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": TEMPLATES[name]}]
    files = {} if in_config else {"chat_template": TEMPLATES[name]}
    config = CONFIG | ({"chat_template": named} if in_config else {})
    path = write(tmp_path / "model", folder, tokenizer_config=config, **files)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(path.parent), load_tokenizer(path)
    for messages in (MESSAGES, MESSAGES[1:]):
        for prompt in (True, False):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)
            assert chat_ids(ours, messages, add_generation_prompt=prompt).tolist() == expected
    if name in ("llama3", "mistral"):
        assert expected[:2] != [0, 0] and expected[0] == 0, "the template's <s> is the only one"
    text = "def a user, longer than four tokens <|im_end|>"
    expected = theirs(text)["input_ids"]
    assert ours.encode_prompt(text).tolist() == expected and expected[0] == 0
    assert ours.encode(text).tolist() == expected[1:], "a document has no beginning-of-text token"


@pytest.mark.parametrize(("files", "end", "stops"), [
    ({"tokenizer_config": {"eos_token": "<|eot_id|>"}}, "<|eot_id|>", ["<|eot_id|>"]),
    ({"generation_config": {"eos_token_id": 3}}, "</s>", ["<|im_end|>"]),
    ({"tokenizer_config": CONFIG, "generation_config": {"eos_token_id": [3, 4]}}, "</s>", ["<|im_end|>", "<|eot_id|>"]),
    ({"tokenizer_config": CONFIG, "special_tokens_map": {"eos_token": "<|im_end|>"}}, "<|im_end|>", ["<|im_end|>"]),
    ({"tokenizer_config": CONFIG | {"added_tokens_decoder": {}}, "special_tokens_map": {"eos_token": "<s>"}},
     "</s>", ["</s>"]),
    ({"tokenizer_config": {"eos_token": None}}, "</s>", ["</s>"]),
])  # fmt: skip
def test_where_documents_and_answers_end(folder, tmp_path, files, end, stops):
    path = write(tmp_path / "model", folder, **files)
    tokenizer = load_tokenizer(path)
    if files.get("tokenizer_config", {}).get("tokenizer_class"):
        theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path / "model")
        assert theirs.eos_token == end
    assert tokenizer.end_of_document == SPECIAL.index(end)
    assert [SPECIAL[each] for each in tokenizer.stop_tokens] == stops
    # a tokenizer of another name is not of the folder
    assert load_tokenizer(path.rename(path.with_name("mine.json"))).end_of_document == SPECIAL.index("</s>")


@pytest.mark.parametrize(("name", "content", "message"), [
    ("tokenizer_config", {"eos_token": "<nobody>"}, r"lacks <nobody>, the eos_token .* of another tokenizer\?"),
    ("tokenizer_config", {"eos_token": 3}, r"eos_token is 3, where a token's text is expected"),
    ("tokenizer_config", {"chat_template": [{"name": "rag", "template": ""}]}, r"are rag, and none .* default"),
    ("tokenizer_config", {"chat_template": {"default": ""}}, r"chat_template is \{'default': ''\}, where"),
    ("tokenizer_config", {"chat_template": ["rag"]}, r"chat_template is \['rag'\], where objects of a name and"),
    ("tokenizer_config", {"chat_template": [{"name": "default"}]}, r"chat_template is \[.*, where objects of a name"),
    ("tokenizer_config", [], r"tokenizer_config\.json holds a JSON list"),
    ("generation_config", {"eos_token_id": ["3"]}, r"eos_token_id is \['3'\]"),
    ("generation_config", {"eos_token_id": 10**6}, r"stops at \(1000000,\): the tokenizer's ids are below \d+"),
])  # fmt: skip
def test_files_that_cannot_be_understood(folder, tmp_path, name, content, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(write(tmp_path / "model", folder, **{name: content}))


def test_a_template_of_another_encoding_is_named(folder, tmp_path):
    path = write(tmp_path / "model", folder)
    path.with_name("chat_template.jinja").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8 .*: convert it first"):
        load_tokenizer(path)


def test_a_template_that_fails_or_reaches_further_is_refused():
    messages = [{"role": "user", "content": "hi"}]
    for template, message in (
        ("{{ raise_exception('no system role') }}", "TemplateError: no system role"),
        ("{{ messages.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "SecurityError: access to attribute 'append'"),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "SecurityError"),
        ("{% import 'os' as os %}", "TypeError: no loader"),
        ("{{ open('/etc/passwd') }}", "UndefinedError: 'open' is undefined"),
        ("{{ messages[7].content + 1 }}", "UndefinedError"),
        ("{{ range(1000000000) | list }}", "OverflowError"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ 'a' * 10**10 }}", "it takes more than 512 MiB of memory"),
        ("{% for i in range(9**5) %}{{ 'a' * 999 }}{% endfor %}", "it writes 58989951 characters, more than 16777216"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "it takes too much time"),
        ("{{ raise_exception('\x1b[2J' * 99999) }}", r"TemplateError: \\x1b\[2J.{,600}$"),
    ):
        with pytest.raises(ValueError, match=f"^the chat template refuses this conversation: {message}"):
            render_chat(template, messages, {})
        assert messages == [{"role": "user", "content": "hi"}]


def test_a_tokenizer_without_a_template_writes_a_plain_conversation():
    ids = chat_ids(ByteTokenizer(), MESSAGES)
    text = "System: Speak <b>plainly</b>.\nUser: What is 2 + 2?\nAssistant: 4 é🙂\nUser: Why?\nAssistant:"
    assert bytes(ids.tolist()).decode() == text
