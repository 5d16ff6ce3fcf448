"""What executed kernels count is what the closed forms say: the gate of `python -m bench protocol`."""

import execution  # noqa: F401, it makes the repository importable
import pytest

pytest.importorskip("triton")

from checks import protocol


def test_the_closed_forms_are_exact() -> None:
    protocol.gate()


@pytest.mark.parametrize("field, wrong", [("waits", 1), ("releases", 1), ("sent", 2), ("tiles", 1)])
def test_a_wrong_closed_form_is_found(field: str, wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = protocol.tiled_exchange

    def off(*arguments):
        found = right(*arguments)
        return found._replace(**{field: getattr(found, field) + wrong})

    monkeypatch.setattr(protocol, "tiled_exchange", off)
    with pytest.raises(AssertionError, match="the closed form says"):
        protocol.gate()
