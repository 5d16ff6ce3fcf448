"""What the host does for a layer: it is counted, as seconds differ from machine to machine."""

import json

import pytest

from checks.driver.stub import VARIABLE, build, missing

MOST = (
    3200  # calls of a layer's forward, backward and update; FSDP2 and DTensors made 10,418, 2,160 of torch.distributed
)


@pytest.mark.proof
@pytest.mark.skipif(missing() is not None, reason=f"needs {missing()}")
def test_a_layer_takes_few_calls_and_none_of_distributed(commands, tmp_path):
    import layer_calls

    library = build(tmp_path, "-DQUIET")
    code, out, err = commands.call(layer_calls.count, library, **{VARIABLE: str(tmp_path)}).finish(900)
    assert code == 0, err
    calls, of_distributed = json.loads(out)
    assert calls <= MOST and of_distributed == 0, out
