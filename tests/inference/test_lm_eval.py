"""lm-evaluation-harness gives our adapter the scores that it gives transformers' own model, on several ranks."""

import json
import os

import pytest
import torch
import torch.distributed as dist
from made import byte_level
from testing import assert_same
from turns import EXTRAS

from bench.families.training import in_float64
from tpformer.distributed import build_mesh
from tpformer.layers import TensorParallel
from tpformer.models import GPT
from tpformer.training.data import JsonTokenizer
from tpformer.training.source import open_source

pytestmark = [pytest.mark.proof, pytest.mark.rotates(EXTRAS), pytest.mark.filterwarnings("ignore")]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
SIZES = {"vocab_size": 300, "max_position_embeddings": 24, "num_hidden_layers": 2, "hidden_size": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
# some tokens are far more probable than others
SIZES |= {"initializer_range": 0.4, "bos_token_id": 0, "eos_token_id": 1}
CHOICES = [
    {"prompt": "the thing ", "choices": ["they", "then", "thenthen", "é✓"], "answer": 1},
    {"prompt": "a prompt that is longer than the model's twenty-four tokens, q", "choices": ["x", " xy"], "answer": 0},
    {"prompt": "", "choices": ["th", "e"], "answer": 0},
    {"prompt": "so\n", "choices": ["other", "the"], "answer": 1},
]
TEXTS = [{"text": "the other thing that they then thought of, at length: 世界"}, {"text": "so"}]
COMMON = {"dataset_path": "json", "test_split": "test", "target_delimiter": ""}
TASKS = {
    "choices": {
        "output_type": "multiple_choice", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}", "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}, {"metric": "word_perplexity"}],
    },
    "generated": {
        "output_type": "generate_until", "doc_to_text": "{{text}}", "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """The folder of the tasks, their data and a tokenizer.json, whose template begins a text with <s>."""
    pytest.importorskip("lm_eval", reason="needs tpformer[eval]")
    folder = tmp_path_factory.mktemp("harness")
    for name, rows in (("choices", CHOICES), ("rolling", TEXTS), ("generated", TEXTS)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        content = {"task": f"own_{name}", **COMMON, **TASKS[name]}
        content["dataset_kwargs"] = {"data_files": {"test": str(data)}}
        (folder / f"{name}.yaml").write_text(json.dumps(content))  # JSON is YAML
    byte_level(folder / "tokenizer.json", [text["text"] for text in TEXTS] * 9, "<s>", ("<s>", "</s>"))
    return folder


def scores(model, folder):
    """The harness's results and the model's answers to each request, on the first rank alone."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = simple_evaluate(model, tasks=[f"own_{name}" for name in TASKS], task_manager=manager, bootstrap_iters=10)
    if found is None:
        return None
    answers = {name: [sample["resps"] for sample in rows] for name, rows in found["samples"].items()}
    return found["results"], answers


def own_scores(tp: int, folder):
    os.environ |= OFFLINE | {"LOCAL_RANK": str(dist.get_rank())}
    from tpformer.inference.lm_eval import HarnessModel

    mesh = build_mesh("cpu", tensor_parallel=tp)["tp"]
    source = open_source(folder / "weights")
    model = GPT(source.architecture, tp=TensorParallel(mesh), dtype=torch.float64).eval()
    source.load([model])
    tokenizer = JsonTokenizer(folder / "tokenizer.json")
    return scores(HarnessModel(model, tokenizer, longest=24, batch_size=3), folder)


@pytest.fixture(scope="module")
def theirs(tasks):
    """The harness's own scores of the same parameters in transformers."""
    transformers = pytest.importorskip("transformers", reason="needs tpformer[hf]")
    os.environ.update(OFFLINE)
    from lm_eval.models.huggingface import HFLM

    torch.manual_seed(0)
    with in_float64():  # its angles, too
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).double().eval()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tasks / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    model.save_pretrained(tasks / "weights")
    tokenizer.save_pretrained(tasks / "weights")
    with in_float64():
        return scores(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, max_length=24), tasks)


def test_the_harness_scores_our_model_as_transformers_own(ranks, tasks, theirs):
    wanted_results, wanted_answers = theirs
    results, answers = ranks(2).run(own_scores, 2, tasks)[0]
    assert results.keys() == wanted_results.keys() == {f"own_{name}" for name in TASKS}
    for name, values in wanted_results.items():
        assert results[name].keys() == values.keys()
        for key, value in values.items():
            if not (name == "own_rolling" and "_stderr" in key):
                assert_same(results[name][key], value, f"{name} {key}")
    assert answers["own_generated"] == wanted_answers["own_generated"]
    assert_same(answers["own_choices"], wanted_answers["own_choices"], "own_choices")


def test_the_command_reports_the_harness_scores(done, tasks, theirs, tmp_path):
    options = f"--lm-eval own_choices,own_generated --lm-eval-tasks {tasks} --json {tmp_path / 'found'} --seq-length 24"
    layout = "--parallel.data-parallel-shard 2 --train.dtype float64"
    weights = str(tasks / "weights")
    done("evaluate", weights, *options.split(), *layout.split(), **OFFLINE)
    rows = json.loads((tmp_path / "found").read_text())["tasks"]
    assert [(row["task"], row["metric"], row["number"]) for row in rows] == [
        *(("own_choices", metric, 4) for metric in ("acc", "acc_norm", "acc_bytes")),
        ("own_generated", "exact_match", 2),
    ]
    for row in rows:
        wanted = theirs[0][row["task"]]
        assert_same([row["value"], row["stderr"]], [wanted[f"{row['metric']}{end},none"] for end in ("", "_stderr")])


def test_an_unknown_task_is_refused(tasks):
    from tpformer.inference.lm_eval import load_tasks

    with pytest.raises(ValueError, match="has no task absent: "):
        load_tasks(["own_choices", "absent"], tasks)
