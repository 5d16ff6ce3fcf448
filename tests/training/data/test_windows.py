"""Tokens that are found in parts are those of the whole: of a long text in windows, and of a prompt's completion."""

import itertools
import random
import re

import numpy as np
import pytest

from tpformer.training.data import ByteTokenizer, JsonTokenizer, build_dataset, windows
from tpformer.training.data.tokenizer import encode_pair

tokenizers = pytest.importorskip("tokenizers")
CORPUS = [open(windows.__file__).read(), "The model reads what it has read; playing, played.\n" * 20]


def saved(path, model, trainer, *, pre=None, normalizer=None, decoder=None, special=("<s>", "</s>", "<unk>")):
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.add_special_tokens(list(special))
    for name, part in (("pre_tokenizer", pre), ("normalizer", normalizer), ("decoder", decoder)):
        if part is not None:
            setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(CORPUS, trainer(vocab_size=500, special_tokens=list(special), show_progress=False))
    first = [("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=first)
    tokenizer.save(str(path))
    return JsonTokenizer(path)


KINDS = ("space before", "bytes", "pieces", "unigram", "words", "stripped")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory):
    """Tokenizers that begin a text in ways of their own."""
    folder = tmp_path_factory.mktemp("kinds")
    models, trainers, pre = tokenizers.models, tokenizers.trainers, tokenizers.pre_tokenizers
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    level, alphabet = pre.ByteLevel, pre.ByteLevel.alphabet()

    def bpe(**options):
        return trainers.BpeTrainer(initial_alphabet=alphabet, **options)

    parts = {
        "space before": (models.BPE(), bpe, {"pre": level(add_prefix_space=True), "decoder": decoders.ByteLevel()}),
        "bytes": (models.BPE(), bpe, {"pre": level(add_prefix_space=False), "decoder": decoders.ByteLevel()}),
        "pieces": (models.BPE(unk_token="<unk>"), trainers.BpeTrainer, {
            "normalizer": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
            "decoder": decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        }),
        "unigram": (models.Unigram(), lambda **options: trainers.UnigramTrainer(unk_token="<unk>", **options), {
            "pre": pre.Metaspace(), "decoder": decoders.Metaspace(), "normalizer": normalizers.NFKC(),
        }),
        "words": (models.WordPiece(unk_token="<unk>"), trainers.WordPieceTrainer, {
            "pre": pre.BertPreTokenizer(), "decoder": decoders.WordPiece(), "normalizer": normalizers.BertNormalizer(),
        }),
        "stripped": (models.BPE(), trainers.BpeTrainer, {"pre": pre.Whitespace(), "normalizer": normalizers.Strip()}),
    }  # fmt: skip
    return {
        name: saved(folder / f"{name}.json", model, trainer, **more) for name, (model, trainer, more) in parts.items()
    }


@pytest.mark.parametrize("kind", KINDS)
def test_windows_give_the_tokens_of_the_whole_text(kinds, monkeypatch, kind):
    monkeypatch.setattr(windows, "_OVERLAP", 256)
    draw, tokenizer = random.Random(0), kinds[kind]
    noise = "".join(draw.choice("a é🙂\n\t  =b\ufb01the") for _ in range(4000))
    for text in (CORPUS[0] * 3, noise, "x" * 700 + "=" * 900 + " \n" * 800 + CORPUS[1]):
        cuts = sorted(draw.sample(range(len(text)), 9))
        pieces = [text[begin:end] for begin, end in itertools.pairwise([0, *cuts, len(text)])]
        assert np.concatenate(list(tokenizer.encode_pieces(pieces))).tolist() == tokenizer.encode(text).tolist()
    assert list(tokenizer.encode_pieces([])) == []


def test_a_text_that_no_window_can_cut_is_refused(kinds, monkeypatch):
    monkeypatch.setattr(windows, "_LONGEST", 1000)
    with pytest.raises(ValueError, match="more than 1000 characters after 'aaaaa.* cannot be tokenized in parts"):
        list(kinds["stripped"].encode_pieces(["a" * 600] * 9))


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_and_its_completion_say_what_both_together_say(kinds, kind):
    tokenizer = kinds[kind]
    for prompt, completion in itertools.product(("The", "play ", "model:\n", ""), ("ing", " reads", "\nit", "", "  =")):
        before, after = encode_pair(tokenizer, prompt, completion)
        whole = prompt + completion
        assert before.tolist() == tokenizer.encode(prompt).tolist(), "generation encodes the prompt alike"
        said = tokenizer.decode(np.concatenate([before, after]))
        assert said == tokenizer.decode(tokenizer.encode(whole))
        if kind not in ("words", "stripped"):  # these keep neither spaces nor line breaks
            assert said.lstrip(" ") == whole.lstrip(" "), "no space that is in no text"
    ids = encode_pair(ByteTokenizer(), "é", "🙂")
    assert [bytes(each.tolist()).decode() for each in ids] == ["é", "🙂"]


def test_a_completion_that_no_tokens_say_is_refused(tmp_path, kinds):
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match="the completion 'b' cannot be tokenized as what follows 'b': begin it with"):
        encode_pair(JsonTokenizer(tmp_path / "t.json"), "b", "b")
    (tmp_path / "p.jsonl").write_text('{"p": "b", "c": " a"}\n{"p": "b", "c": "b"}\n')
    with pytest.raises(ValueError, match=r"p\.jsonl:2: the completion"):
        build_dataset([tmp_path / "p.jsonl"], tmp_path / "out", str(tmp_path / "t.json"), fields=["p", "c"])


def test_documents_and_prompts_begin_alike(tmp_path, kinds, capsys):
    """What the post-processor puts before a text; what it puts behind one neither ends a document nor a prompt."""
    (tmp_path / "a.jsonl").write_text(
        '{"text": "The model", "end": " reads"}\n{"text": "\\ufeffit\\uf123", "end": ""}\n'
    )
    for kind, said in (("pieces", "1 of .* tokens stand for text that the"), ("stripped", "1 characters .* left out")):
        tokenizer, out = kinds[kind], tmp_path / kind
        path = next(tmp_path.parent.glob(f"kinds*/{kind}.json"))
        build_dataset([tmp_path / "a.jsonl"], out, str(path))
        stream = np.fromfile(f"{out}.bin", "<u2").tolist()
        one, two = (tokenizer.encode_prompt(text).tolist() for text in ("The model", "it\uf123"))
        end = [tokenizer.end_of_document]
        assert one[0] == tokenizer.beginning[0] and end[0] not in one and stream == [*one, *end, *two, *end]
        printed = capsys.readouterr().out
        assert "1 byte order marks (U+FEFF) are left out" in printed
        assert re.search(said, printed), printed
        build_dataset([tmp_path / "a.jsonl"], tmp_path / f"{kind}-pairs", str(path), fields=["text", "end"], quiet=True)
        mask = np.fromfile(f"{tmp_path / kind}-pairs.mask", bool)
        assert mask.tolist() == [False] * len(one) + [True] * (mask.sum() - 1) + [False] * len(two) + [True]
