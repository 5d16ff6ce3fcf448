"""Tasks: log-likelihoods equal plain torch's in every tensor-parallel layout; texts are cut and scored as
lm-evaluation-harness does; a malformed line is named."""

import json
import math
from functools import partial

import pytest
import torch
from made import greedy
from testing import assert_same, on_every_rank

from tpformer.distributed import build_mesh
from tpformer.inference.evaluate import Prompt, answer_shared, greedy_texts
from tpformer.inference.likelihood import log_likelihoods
from tpformer.inference.tasks import Pair, Task, ask, best_choices, encode_pair, first_line, read_tasks, score
from tpformer.layers import TensorParallel
from tpformer.models import GPT, GPTConfig
from tpformer.training.data import ByteTokenizer, JsonTokenizer

CONFIG = GPTConfig(vocab_size=250, seq_length=12, n_layers=1, hidden_size=48, n_heads=12)
PAIRS = [Pair([1, 2, 3], [4]), Pair([1, 2, 3], [4, 249]), Pair([7], [8, 9, 10, 11, 12]), Pair([5], list(range(12)))]
PAIRS.append(Pair(list(range(20)), [30, 31]))  # its context is longer than the model's


def likelihoods(tp: int, dp: int):
    mesh = build_mesh("cpu", tensor_parallel=tp, data_parallel_replicate=dp)["tp"]
    model = GPT(CONFIG, tp=mesh, seed=3, dtype=torch.float64).eval()
    alone = GPT(CONFIG, seed=3, dtype=torch.float64).eval()
    pairs = [*PAIRS, *(Pair(context, greedy(alone, context, 3)) for context in ([1, 2, 3], [9]))]
    answers = [partial(log_likelihoods, model, longest=12, batch_size=size) for size in (1, 3)]
    lengths: list[int] = []
    with model.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1])):
        found = [answer_shared(model, pairs, answer) for answer in answers]
    each = len(pairs) // dp  # the first answer takes each pair alone
    assert lengths[:each] == sorted(lengths[:each], reverse=True), "what does not fit in memory fails at once"
    return pairs, found


# 4 ranks hold 64 of 256 rows each, the last one 58 entries
@pytest.mark.parametrize(("tp", "dp"), [(3, 1), (4, 1), (2, 2)])
def test_likelihoods_equal_plain_torch_in_every_layout(ranks, tp, dp):
    model = GPT(CONFIG, seed=3, dtype=torch.float64).eval()
    for pairs, found in ranks(tp * dp).run(likelihoods, tp, dp):
        for results in found:
            for (context, continuation), (value, most_likely) in zip(pairs, results, strict=True):
                ids = torch.tensor([*context, *continuation])[-13:]
                with torch.no_grad():
                    logs = model(ids[None, :-1])[0].log_softmax(-1)[-len(continuation) :]
                assert_same(value, logs.gather(1, ids[-len(continuation) :, None]).sum().item())
                assert most_likely == (logs.argmax(-1).tolist() == continuation)
            assert all(most_likely for _, most_likely in results[-2:])

    with pytest.raises(ValueError, match="13 tokens, more than the model's 12"):
        log_likelihoods(model, [Pair([1], [2] * 13)], longest=12, batch_size=1)


def test_a_pair_is_cut_behind_the_contexts_own_tokens():
    tokenizer = ByteTokenizer()
    assert encode_pair(tokenizer, "ab", " c") == Pair(list(b"ab"), list(b" c"))
    assert encode_pair(tokenizer, "ab \n", "c") == Pair(list(b"ab"), list(b" \nc")), "spaces move"
    assert encode_pair(tokenizer, "", "é") == Pair([256], list("é".encode()))
    assert encode_pair(tokenizer, "  ", "c") == Pair([256], list(b"  c"))


def test_tokens_that_reach_over_the_boundary(tmp_path):
    """`ab` is one token: after `a` the continuation `b` has none of its own, and `bc` only `c`."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs tpformer[hf]")
    words = {"a": 0, "b": 1, "c": 2, "ab": 3, "</s>": 4}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("a", "b")]))
    made.post_processor = tokenizers.processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 4)])
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = JsonTokenizer(tmp_path / "tokenizer.json")
    assert encode_pair(tokenizer, "a", "bc") == Pair([4, 0], [2])
    assert encode_pair(tokenizer, "", "c") == Pair([4], [2]), "the template begins a text"
    with pytest.raises(ValueError, match="f:1: choices.1.: 'b' adds no token to 'a'"):
        ask(tokenizer, Task("a", ("c", "b"), 0, "f:1"), 9)


def test_scores():
    task = Task("", ("bb", "b", "b"), 1, "f:1")
    assert best_choices(task, [-3.0, -2.0, -2.0]) == (True, False), "the first of equal ones; -1.5 a byte is best"
    assert best_choices(Task("", ("éé", "abc"), 0, "f:1"), [-4.1, -3.0]) == (False, False), "4 bytes, not 2 characters"
    assert first_line(" 42 \nmore") == "42" and first_line("\n42") == ""
    metric, number, accuracy, error = score("acc", [True, False, True, True])
    assert (metric, number, accuracy) == ("acc", 4, 0.75)
    assert_same(error, torch.tensor([1.0, 0, 1, 1], dtype=torch.float64).std().item() / math.sqrt(4))
    assert math.isnan(score("acc", [True]).error)


def test_a_file_of_both_kinds(tmp_path):
    lines = ['{"prompt": "é", "choices": ["a", "ab"], "answer": 1}\r\n', " \r\n", '{"answer": " b ", "prompt": ""}']
    (tmp_path / "t.jsonl").write_bytes("".join(lines).encode())
    one, other = read_tasks(tmp_path / "t.jsonl")
    assert one == Task("é", ("a", "ab"), 1, f"{tmp_path / 't.jsonl'}:1")
    assert other == Task("", (), " b ", f"{tmp_path / 't.jsonl'}:3")
    question, cut = ask(ByteTokenizer(), Task("x" * 30, (), "b", ""), 16)
    assert (question.prompt, question.limit, cut) == (list(b"x" * 7), 9, True)
    assert ask(ByteTokenizer(), other, 16)[0].prompt == [256]


BAD = {
    '{"prompt": "a", "choices": ["b", ""], "answer": 0}': "choices.1. is empty",
    '{"prompt": "a", "choices": ["b"], "answer": 0}': "at least 2",
    '{"prompt": "a", "choices": ["b", "c"], "answer": 2}': "2 is no index of the 2 choices: write 0 to 1",
    '{"prompt": "a", "choices": ["b", "c"], "answer": true}': "True is no index",
    '{"prompt": "a", "choices": ["b", 3], "answer": 0}': "choices.1. is 3: write a string",
    '{"prompt": 1, "answer": "b"}': "prompt is 1: write a string",
    '{"prompt": "a", "answer": 1}': "answer is 1: write a string",
    '{"prompt": "a", "answer": "x\\ny"}': "has several lines",
    '{"prompt": "\\ud800", "answer": "x"}': "surrogate",
    '{"prompt": "a", "answer": "x", "id": 3}': "keys .*id",
    '{"prompt": "a"}': "keys",
    "[1]": "a JSON list",
    '{"prompt": ': "not valid JSON",
    "[" * 100_000: "not valid JSON",
}


def test_a_malformed_line_is_named(tmp_path):
    for line, words in BAD.items():
        (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n\n" + line + "\n")
        with pytest.raises(ValueError, match=f"t.jsonl:3.* {words}"):
            read_tasks(tmp_path / "t.jsonl")


SPOKEN = GPTConfig(vocab_size=257, seq_length=32, n_layers=1, hidden_size=32, n_heads=4, init_std=0.5)
PROMPTS = [Prompt(list(text.encode()), limit, []) for text, limit in (("def f", 9), ("x", 20), ("é", 3))]
PROMPTS += [Prompt(PROMPTS[0].ids, 9, [">"]), Prompt(PROMPTS[1].ids, 20, ["j", "\n"])]


class Stopping(ByteTokenizer):
    stop_tokens = (ord("j"),)


@on_every_rank(4)
def test_greedy_texts_equal_a_plain_loop():
    """Each ends by its own limit, its own stops or a stop token, whatever is beside it."""
    model = GPT(SPOKEN, seed=1, dtype=torch.float64).eval()
    whole = [ByteTokenizer().decode(greedy(model, prompt.ids, prompt.limit)) for prompt in PROMPTS]
    assert ">" in whole[0][1:] and 0 < whole[1].index("\n") < whole[1].index("j"), "otherwise it would show little"
    expected = [whole[0], whole[1].partition("j")[0], whole[2], whole[0].partition(">")[0], whole[1].partition("\n")[0]]
    mesh = build_mesh("cpu", tensor_parallel=2, data_parallel_replicate=2)["tp"]
    model = GPT(SPOKEN, tp=TensorParallel(mesh), seed=1, dtype=torch.float64).eval()
    assert answer_shared(model, PROMPTS, lambda share: greedy_texts(model, Stopping(), share, 3)) == expected
