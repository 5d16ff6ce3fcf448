"""Files of devices: those that come with the package, users' own, and one sentence for each mistake."""

import dataclasses
import json
import re
import tomllib
from pathlib import Path

import pytest

from tpformer.config import build_config
from tpformer.kernels.cost import MACHINES, Machine
from tpformer.planner.calibration import calibrated
from tpformer.planner.candidates import Question
from tpformer.planner.devices import DIRECTORY, load_device, names, parse_device
from tpformer.planner.layouts import with_layout
from tpformer.planner.search import evaluate
from tpformer.planner.software import ON_CPU

H100 = DIRECTORY / "h100.toml"
RESULTS = Path(__file__).parents[2] / "bench" / "results"
ROW = {"case": "forward", "baseline": "torch.matmul", "shape": "x 8192x8192x8192", "unit": "TFLOP/s"}
ON_H100 = {"machine": {"gpu": "NVIDIA H100 80GB HBM3"}, "rows": [{**ROW, "baseline_value": 600.0}]}


def test_devices_have_the_machines_of_the_performance_model():
    assert names() == ["a100-40", "a100-80", "b200", "cpu", "h100", "h200"]
    found = {name: load_device(name) for name in names()}
    for name in ("a100-80", "b200", "h100", "h200"):
        assert found[name].machine in MACHINES, "a rate has one place"
    assert found["a100-40"].machine._replace(memory=0.0) == found["a100-80"].machine._replace(memory=0.0)
    assert found["h100"].memory == 80e9 and found["h100"].network == 42e9
    half = found["h100"].scaled(0.5)
    assert half.machine.flops == 350e12 and half.attention_forward == 225e12 and half.machine.link == 380e9


def test_a_users_file_is_read(tmp_path):
    rates, path = "peak_tflops = 1000\ngemm_tflops = 850\nlink_gb_s = 20\nmemory_tb_s = 1", tmp_path / "mine.toml"
    path.write_text(H100.read_text().replace('machine = "H100"', rates))
    device = load_device(path, gpus_per_node=4)
    assert device.name == "mine" and device.gpus_per_node == 4
    assert device.machine == Machine("mine", 1000e12, 850e12, 20e9, 1e12)
    assert dataclasses.replace(load_device(path), gpus_per_node=4) == device


@pytest.mark.parametrize("old, new, message", [
    ("memory_gb = 80.0", "memory_gbs = 80.0", "unknown key 'memory_gbs': did you mean 'memory_gb'"),
    ("memory_gb = 80.0", "", "lacks memory_gb: give it"),
    ("memory_gb = 80.0", "memory_gb = -1", "memory_gb = -1 must be a number above 0 and at most 10000"),
    ("memory_gb = 80.0", "memory_gb = nan", "memory_gb = nan must be a number above 0"),
    ("memory_gb = 80.0", "memory_gb = true", "memory_gb = True must be a number above 0"),
    ("processors = 132", "processors = 1.5", "processors = 1.5 must be a whole number"),
    ("capability = [9, 0]", "capability = 9", "capability = 9 must be two whole numbers"),
    ('machine = "H100"', 'machine = "H1"', "machine = 'H1' must be one of H200"),
    ('machine = "H100"', "peak_tflops = 1", "lacks gemm_tflops, link_gb_s, memory_tb_s: give either"),
    ('machine = "H100"', 'machine = ["H100"]', "machine = ['H100'] must be one of H200"),
    ("capability = [9, 0]", "capability = [-9, 0]", "capability = [-9, 0] must be two whole numbers"),
    ("memory_gb = 80.0", "memory_gb = 80\ngemm_tflops = 3000", "gemm_tflops = 3000 is above the 989 TFLOP/s"),
    ("_forward_tflops = 450.0", "_forward_tflops = 4500", "attention_forward_tflops = 4500 is above the 989"),
    ("host_gb_s = 50.0", "host_gb_s = 50000", "host_gb_s = 50000 exceeds the 3000 GB/s"),
    ("[cluster]", "[clusters]", "unknown section 'clusters': did you mean 'cluster'"),
    ("[cluster]", "", "has no section [cluster]"),
    ("network_gb_s = 42.0", "", "lacks network_gb_s"),
    ("host_gb_s = 50.0", "host_gb_s = 50.0\nnode_gb_s = 100",
     "[cluster] of x.toml lacks node_latency_us: give it, it goes with node_gb_s"),
    ("fitted_most = 0.83", "", "[gpu] of x.toml lacks fitted_most: give it, it goes with fitted_least"),
    ("fitted_most = 0.83", "fitted_most = 0.5", "fitted_least = 0.76 is above fitted_most = 0.5"),
    ("processors = 132", "processors = 132\nhost_gb_s = 5", "[gpu] of x.toml has host_gb_s, which belongs to the"),
    ("processors = 132", 'processors = 132\ndtype = "int8"', "dtype"),
])  # fmt: skip
def test_mistakes_have_one_sentence(old, new, message):
    text = H100.read_text()
    assert old in text
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        parse_device("x", tomllib.loads(text.replace(old, new)), "x.toml")
    assert "\n" not in str(error.value)


def test_unknown_names_and_files(tmp_path):
    (tmp_path / "bad.toml").write_text("[gpu")
    for name, options, message in (
        ("h1000", {}, "unknown device 'h1000': choose one of a100-40"),
        (tmp_path / "none.toml", {}, "cannot be read"),
        (tmp_path / "bad.toml", {}, "is not valid TOML"),
        ("h100", {"gpus_per_node": 0}, "gpus_per_node = 0 must be a whole number above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            load_device(name, **options)


@pytest.mark.parametrize("name, folder", [("h100", "nvidia-h100-80gb-hbm3"), ("cpu", "cpu")])
def test_results_of_the_bench_correct_a_device(name, folder):
    given, found = load_device(name), calibrated(load_device(name), RESULTS / folder)
    assert found.machine != given.machine and found.attention_forward != given.attention_forward
    for rate in ("flops", "memory", "link"):
        assert 0.3 < getattr(found.machine, rate) / getattr(given.machine, rate) < 3, rate


def test_steps_of_a_core_are_predicted_as_they_were_measured():
    """Launches are why one sample at a time takes longer: of two results their median leaves opposite errors."""
    core, errors = calibrated(load_device("cpu"), RESULTS / "cpu"), []
    rows = json.loads((RESULTS / "cpu" / "cpu.json").read_text())["rows"]
    steps = {(row["provider"], row["shape"]): row["value"] for row in rows}
    for layers, hidden, samples in ((4, 256, 8), (6, 512, 4)):
        model = {"n_layers": layers, "hidden_size": hidden, "n_heads": 4, "vocab_size": 257, "seq_length": 256}
        train = {"global_batch_size": samples, "device": "cpu", "dtype": "float32"}
        late = []
        for provider, microbatch in (("tpformer, 2 ranks", samples), ("2 ranks, 1 sample at a time", 1)):
            config = with_layout(build_config({"model": model, "train": train}), {"tp": 2, "microbatch": microbatch})
            found = evaluate(Question(config, 2, core, ON_CPU), config).tokens
            measured = steps[provider, f"{layers} layers of {hidden}, {samples} x 256"]
            assert found == pytest.approx(measured, rel=0.1)
            late.append(samples * 256 * (1 / measured - 1 / found))
        errors.append((late[1] - late[0]) / (layers * (samples - 1)))
    assert errors[0] == pytest.approx(-errors[1], rel=1e-6)


def test_calibration_with_other_files_or_of_other_gpus(tmp_path):
    given, path = load_device("a100-80"), tmp_path / "matmul.json"
    for device, bench in ((given, "matmul"), (load_device("cpu"), "cpu")):
        with pytest.raises(ValueError, match=f"has no results of `bench {bench}`"):
            calibrated(device, tmp_path)
    rows = ROW, {**ROW, "baseline_value": 0}, {**ROW, "baseline_value": 1, "shape": "8x8"}
    for text in ("{", "[]", *(json.dumps({**ON_H100, "rows": [row]}) for row in rows)):
        path.write_text(text)
        with pytest.raises(ValueError, match="is no result of `python -m bench`"):
            calibrated(given, tmp_path)
    path.write_text(json.dumps(ON_H100))
    with pytest.raises(ValueError, match="was measured on NVIDIA H100 80GB HBM3, which is no A100"):
        calibrated(given, tmp_path)
    assert calibrated(load_device("h100"), tmp_path).machine.flops == pytest.approx(650e12, rel=0.1)
    with pytest.raises(ValueError, match='set dtype = "float32" in the file of cpu'):
        calibrated(dataclasses.replace(load_device("cpu"), itemsize=2), RESULTS / "cpu")
