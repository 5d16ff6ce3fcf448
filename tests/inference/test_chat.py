"""`tpformer chat` says what the model says without a cache, on one rank and on two; a terminal's keys and a closed pipe
end what they should end, and no rank waits for ever."""

import json
import os
import pty
import select
import signal
import time
from contextlib import closing
from pathlib import Path

import commands as command_processes
import pytest
import torch
from made import greedy, save_run
from turns import in_turns

from tpformer.cli.models import _print_texts
from tpformer.config import build_config, to_toml
from tpformer.inference.chat import Speaker
from tpformer.inference.sampling import Sampling
from tpformer.models import GPT
from tpformer.training.data import PLAIN_STOP, ByteTokenizer, chat_ids

MODEL = {"vocab_size": 257, "n_layers": 2, "hidden_size": 48, "n_heads": 4, "position": "rope"}
GREEDY = Sampling(temperature=0)


def save_model(run: Path, seq_length: int = 256) -> GPT:
    """A run whose checkpoint is a random model of bytes, and the model."""
    config = build_config({"model": MODEL | {"seq_length": seq_length}, "data": {"tokenizer": "bytes"}})
    model = GPT(config.model.architecture, seed=4).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(4)  # so that the most likely token is not a matter of rounding
    save_run(run, config, model)
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("chat") / "run"


@pytest.fixture(scope="module", autouse=True)
def model(run) -> GPT:
    """The model of the run, which this writes."""
    return save_model(run)


def conversation(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def ids_of(messages) -> list[int]:
    return chat_ids(ByteTokenizer(), messages).tolist()


def uncached(model: GPT, messages, most: int) -> str:
    """The most likely answer, by the whole model for every token."""
    answer = [*greedy(model, ids_of(messages), most), 256]
    return ByteTokenizer().decode(answer[: answer.index(256)]).partition(PLAIN_STOP)[0]


def piped(text: bytes, *arguments: str) -> None:
    """Run a command whose standard input is this text."""
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    os.dup2(reader, 0)
    command_processes.main(*arguments)


def test_an_answer_is_what_the_whole_model_says_and_only_new_tokens_are_computed(model):
    widths: list[int] = []
    handle = model.register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    speaker = Speaker(model, stop=(256,), max_new_tokens=12, sampling=GREEDY)

    def answer(messages) -> str:
        said: list[int] = []
        speaker.answer(ids_of(messages), lambda token: not said.append(token))
        return ByteTokenizer().decode(said)

    said: list[str] = []
    for question in ("What is this?", "And then?", "Why?"):
        said += [question, answer(conversation(*said, question))]
        n_read, n_all = widths[0], len(ids_of(conversation(*said[:-1])))
        widths.clear()
    handle.remove()
    assert n_read <= 12 + len("Assistant:\nUser: Why?\nAssistant:") < n_all, "earlier turns are not computed again"
    for turn in (1, 3, 5):
        assert said[turn] == uncached(model, conversation(*said[:turn]), 12)
    # another conversation, of which nothing is in the cache, and then the beginning of that one
    for question in ("Something else", "Something"):
        assert answer(conversation(question)) == uncached(model, conversation(question), 12)


def test_an_answer_ends_where_it_should(model):
    speaker = Speaker(model, stop=(256,), max_new_tokens=12, sampling=GREEDY)
    ids = ids_of(conversation("hello"))
    said: list[int] = []
    assert speaker.answer(ids, lambda token: not said.append(token)) == "length" and len(said) == 12
    assert speaker.answer(ids, lambda token: False) == "stop"
    assert speaker.answer((ids * 20)[:250], lambda token: not said.append(token)) == "context"
    assert len(said) == 12 + 6, "that many have room in 256"
    silent = Speaker(model, stop=said[:1], max_new_tokens=12, sampling=GREEDY)
    assert silent.answer(ids, lambda token: said.clear() is None) == "stop" and said, "no token but the stop token"
    assert silent.answer(ids, lambda token: said.clear() is None) == "stop" and said, "and again"


SAID = (
    "the tokenizer has no chat template", "2 messages are in", "exists, and nothing is overwritten",
    "No such file or directory", "~nobody-here/talk begins with the home of nobody here: write the whole path",
    "/nonsense is no command. /reset", "the system message is set",
    "what was said is forgotten, the system message is not",
    "this message takes 5034 tokens by itself, and the context of 256 has room for 236",
    "a text has '\\udce9' at character 72: half of a surrogate pair, or a byte that is not UTF-8",
)  # fmt: skip


def test_a_piped_conversation(commands, run, model, tmp_path):
    talk = tmp_path / "talk.json"
    lines = [
        "hello é🙂",
        f"/save {talk}",
        f"/save {talk}",
        "/save no/such/folder",
        "/save ~nobody-here/talk",
        "/nonsense",
        "",
        "/system Be kind.",
    ]
    lines += ["again", "/reset", "x" * 5000, "last\x00 one"]
    arguments = ("chat", str(run), "--temperature", "0", "--max-new-tokens", "20", "--tensor-parallel", "2")
    text = "\n".join(lines).encode() + b"\ncaf\xe9"
    code, out, err = commands.call(piped, text, *arguments).finish()
    assert code == 0, err
    saved = json.loads(talk.read_text())["messages"]
    assert [message["role"] for message in saved] == ["user", "assistant"]
    system = {"role": "system", "content": "Be kind."}
    again, last = ({"role": "user", "content": content} for content in ("again", "last\x00 one"))
    asked = [saved[:1], [system, *saved, again], [system, last]]
    shown = "".join(uncached(model, messages, 20).lstrip() + "\n" for messages in asked)
    hidden = "".join("\ufffd" if ord(c) < 32 and c not in "\n\t" or 127 <= ord(c) < 160 else c for c in shown)
    assert out == hidden
    for sentence in SAID:
        assert sentence in err, sentence


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def answer_of(llama, tokenizer, messages, **options) -> list[int]:
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    new = llama.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, **options)
    return new[0, ids.shape[1] :].tolist()


def test_a_llama_with_a_template_says_what_it_says_in_transformers(commands, tmp_path, monkeypatch):
    """Its prompts begin with one <s>, though template and post-processor both add one; an answer has several ends."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    from continue_llama import tiny_llama

    folder = tmp_path / "llama"
    tiny_llama(folder)
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.post_processor = tokenizers.processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 0)])
    made.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    llama = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "Be kind."}]
    stop = answer_of(llama, tokenizer, [*messages, {"role": "user", "content": "one"}])[5]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, stop]}))
    prompt = tokenizer("def main", return_tensors="pt")
    new = llama.generate(**prompt, do_sample=False, max_new_tokens=20, eos_token_id=[0, stop], pad_token_id=0)
    expected = "def main" + tokenizer.decode([token for token in new[0, prompt.input_ids.shape[1] :] if token != stop])
    words = ("generate", str(folder), "--prompt", "def main", "--temperature", "0", "--max-new-tokens", "20")
    assert commands.run(*words)[1] == expected + "\n", "with <s> before it"
    options = ("--system", "Be kind.", "--temperature", "0", "--max-new-tokens", "20")
    text = f"one\ntwo é\nthree\n/save {tmp_path}/talk.json".encode()
    code, out, err = commands.call(piped, text, "chat", str(folder), *options).finish()
    assert code == 0, err
    for question in ("one", "two é", "three"):
        messages.append({"role": "user", "content": question})
        ids = answer_of(llama, tokenizer, messages, eos_token_id=[0, stop], pad_token_id=0)
        answer = tokenizer.decode([token for token in ids if token not in (0, stop)])
        messages.append({"role": "assistant", "content": answer})
    assert json.loads((tmp_path / "talk.json").read_text())["messages"] == messages
    assert "no chat template" not in err and len(out) > 10


def without_reader(text: bytes, *arguments: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    piped(text, *arguments)


# how it starts, what it reads, its options, its exit code, words of its message
ENDS = {
    "no question": (piped, b"\n\n  \n", "--tensor-parallel 2", 0, ""),
    "quit": (piped, b"/quit\nnot read", "--tensor-parallel 2", 0, ""),
    "a closed pipe": (without_reader, b"hello\nhello\n", "--tensor-parallel 2", 128 + signal.SIGPIPE, ""),
    "no room": (piped, b"hello\n", "--max-new-tokens 0", 2, "max_new_tokens=0"),
    "cold": (piped, b"hello\n", "--temperature -1", 2, "temperature=-1.0 must be at least 0"),
    "heads": (piped, b"hello\n", "--tensor-parallel 3", 2, "n_heads=4 cannot be split over tensor_parallel=3"),
}


@pytest.mark.parametrize("case", ["a closed pipe", "heads", *in_turns(["no question", "quit", "no room", "cold"])])
def test_the_end_of_input_or_output_or_a_refusal_ends_all_ranks(commands, run, case):
    start, text, options, expected, words = ENDS[case]
    code, out, err = commands.call(start, text, "chat", str(run), *options.split()).finish()
    assert (code, out) == (expected, "") and words in err and "Traceback" not in err, err


@pytest.mark.parametrize("tp", [1, 2])
def test_ctrl_c_ends_a_generation_without_a_traceback(commands, run, tp):
    arguments = ("generate", str(run), "--max-new-tokens", "100000", "--tensor-parallel", str(tp))
    command = commands.start(*arguments)
    command.wait_until(lambda: command.files[0].exists() and command.files[0].stat().st_size > 5, "text has come")
    os.kill(command.pid, signal.SIGINT)  # which passes it on to the ranks
    code, _, err = command.finish()
    assert code == (-signal.SIGINT if tp == 1 else 128 + signal.SIGINT), err
    assert "Traceback" not in err and "KeyboardInterrupt" not in err


def test_a_prompt_file_is_taken_as_it_is(commands, run, tmp_path):
    arguments = ("generate", str(run), "--prompt-file", str(tmp_path / "p.txt"), "--max-new-tokens", "0")
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfa\r\n\r\nb")
    command = commands.start(*arguments)
    command.process.join(90)
    written = command.files[0].read_bytes()
    assert command.finish()[0] == 0 and written == b"a\r\n\r\nb\n"
    (tmp_path / "p.txt").write_bytes(b"\xff")
    code, out, err = commands.run(*arguments)
    assert (code, out) == (2, "") and "p.txt is not UTF-8" in err
    code, _, err = commands.run("generate", str(tmp_path / "\x1b[31m"))
    assert code == 2 and "/\\x1b[31m is not a run" in err


def test_an_empty_stop_is_refused_before_the_weights_are_read(refused, tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(build_config({"model": MODEL, "data": {"tokenizer": "bytes"}})))
    assert "a stop string is empty" in refused("generate", str(tmp_path), "--stop", "a", "--stop", "")


def test_what_a_model_writes_is_obeyed_by_no_terminal(capsys):
    for samples, begins in ((1, "a\r"), (2, "--- prompt 1, sample 1\na\r")):
        _print_texts(["a\r"], samples, [(0, "\x1b[2J\tb"), (samples - 1, "\n\x9bm\x07")])
        shown = capsys.readouterr().out
        assert shown.startswith(begins + "\ufffd[2J\tb") and shown.endswith("\n\ufffdm\ufffd\n")


class Person:
    """Somebody at a terminal, who reads what it shows and presses keys."""

    def __init__(self) -> None:
        self.fd, self.theirs = pty.openpty()
        self.name, self.unread = os.ttyname(self.theirs), ""
        self.patience = time.monotonic() + 150

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def reads(self, wanted: str) -> None:
        """Return when the terminal has shown `wanted`."""
        while wanted not in self.unread:
            self.look()
        self.unread = self.unread.partition(wanted)[2]

    def look(self) -> None:
        assert time.monotonic() < self.patience, f"nothing more came: {self.unread!r}"
        if select.select([self.fd], [], [], 0.1)[0]:
            self.unread += os.read(self.fd, 4096).decode(errors="replace")

    def close(self) -> None:
        os.close(self.fd)
        os.close(self.theirs)


@pytest.mark.parametrize("tp", [1, 2])
def test_ctrl_c_stops_an_answer_and_ctrl_d_the_session(commands, tmp_path, tp):
    save_model(tmp_path / "run", 100_000)
    with closing(Person()) as person:
        arguments = ("--temperature", "0", "--max-new-tokens", "50000", "--tensor-parallel", str(tp))
        command = commands.call(command_processes.on_terminal, person.name, "chat", str(tmp_path / "run"), *arguments)
        for question in ("hello", "once more"):
            person.reads("> ")
            person.press(f"{question}\n")
            person.reads(f"{question}\r\n")
            while not person.unread:  # until the answer has begun
                person.look()
            person.press("\x03")
            person.reads("the answer was stopped")
        person.reads("> ")
        person.press("dropped")
        person.reads("dropped")
        # a key may be lost: Python's input() does not see a signal that comes while it takes in a character
        while "\r\n> " not in person.unread:
            person.press("\x03")
            person.look()
        while command.poll() is None:
            person.press("\x04")
            person.look()
        assert command.finish(5)[0] == 0
