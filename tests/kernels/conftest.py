"""What tests of several kernels may use. Belongs here: fixtures of this folder."""

from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def h100(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that torch takes for an H100."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return torch.device("cuda")
