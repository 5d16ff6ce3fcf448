"""The updates of AdamW and SGD: the kernel equals separate torch operations to the bit, and both it and the reference
equal torch's optimizers in float64; a step that is skipped changes nothing, and the host never waits."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from row_checks import FLOATS, OF_KERNEL, draw, everywhere
from testing import assert_identical, assert_kernel_close, poisoned_memory
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from gemms import captured

from tpformer.kernels.update import kernel, reference


class Variant(NamedTuple):
    """An optimizer, how many tensors beside a master it keeps, and its options."""

    optimizer: str
    moments: int
    options: dict[str, Any]


def adamw(weight_decay: float, beta2: float = 0.95, eps: float = 1e-8) -> Variant:
    return Variant("adamw", 2, {"weight_decay": weight_decay, "beta1": 0.9, "beta2": beta2, "eps": eps})


def sgd(weight_decay: float, momentum: float = 0.0, nesterov: bool = False) -> Variant:
    options = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
    return Variant("sgd", int(momentum > 0), options)


VARIANTS = {
    "adamw": adamw(0.1),
    "adamw without decay": adamw(0.0, 0.999, 1e-3),
    "sgd": sgd(0.1),
    "sgd without decay": sgd(0.0),
    "momentum": sgd(0.1, 0.9),
    "nesterov": sgd(0.01, 0.8, True),
}


class Model(NamedTuple):
    """What an optimizer has of each parameter."""

    masters: list[Tensor]
    moments: list[list[Tensor]]
    steps: list[Tensor]
    copies: list[Tensor] | None


SIZES = ((1,), (kernel.BLOCK,), (3, 17), (0,), (kernel.BLOCK + 1,), (2 * kernel.BLOCK + 5,), (2,))
SKEWS = (0, 0, 1, 0, 0, 3, 1)  # elements by which each tensor lies behind a multiple of 16 bytes


def apart(x: Tensor, skew: int) -> Tensor:
    """x between NaNs, so many elements behind a multiple of 16 bytes."""
    room = x.new_full((x.numel() + 16,), float("nan"))
    return room[skew : skew + x.numel()].copy_(x.view(-1)).view(x.shape)


def model_of(variant: Variant, dtype: torch.dtype, copy: torch.dtype | None, device: str = "cpu", sizes=SIZES) -> Model:
    masters = [apart(x, skew) for x, skew in zip(draw(1, dtype, device, *sizes), (*SKEWS, *sizes), strict=False)]
    moments = [[apart(torch.zeros_like(x), 0) for x in masters] for _ in range(variant.moments)]
    steps = [torch.zeros((), device=device) for _ in masters]
    return Model(masters, moments, steps, None if copy is None else [apart(x.to(copy), 0) for x in masters])


def gradients_of(model: Model, step: int, *dtypes: torch.dtype) -> list[Tensor]:
    """The dtypes take turns. Magnitudes differ by tensor, so that squares are small and large."""
    shapes, device = [x.shape for x in model.masters], str(model.masters[0].device)
    drawn = draw(step + 10, torch.float64, device, *shapes)
    return [apart((x * 10.0 ** (i % 5 - 3)).to(dtypes[i % len(dtypes)]), i % 2) for i, x in enumerate(drawn)]


def update(module: Any, variant: Variant, model: Model, gradients: Sequence[Tensor], **numbers: Any) -> None:
    """A step of a module's optimizer. numbers: lr, scale and skipped."""
    if variant.optimizer == "adamw":
        module.adamw_(
            model.masters, gradients, *model.moments, model.steps, model.copies, **numbers, **variant.options
        )  # fmt: skip
    else:
        buffers = model.moments[0] if model.moments else []
        module.sgd_(model.masters, gradients, buffers, model.copies, **numbers, **variant.options)


def rounded(x: float | Tensor) -> Tensor:
    """A number in float32."""
    return torch.as_tensor(x, dtype=torch.float64).to(torch.float32)


def adamw_formula(model: Model, gradients, *, lr, scale, skipped, weight_decay, beta1, beta2, eps) -> None:
    """AdamW by separate torch operations, each of which rounds once to float32."""
    for p, gradient, m, v, step in zip(model.masters, gradients, *model.moments, model.steps, strict=True):
        if skipped == 1:
            continue
        step += 1
        count = step.double()
        g = gradient.to(torch.float32) * rounded(scale)
        p.copy_(p - rounded(lr * weight_decay) * p)
        m.copy_(m + rounded(1 - beta1) * (g - m))
        v.copy_(rounded(beta2) * v + rounded(1 - beta2) * g * g)
        # rounded from float64 it is the nearest float32; the one that torch takes from MKL is not always
        root = v.double().sqrt().to(torch.float32) / rounded((1 - beta2**count).sqrt()) + rounded(eps)
        p.copy_(p - rounded(lr / (1 - beta1**count)) * m / root)


def sgd_formula(model: Model, gradients, *, lr, scale, skipped, weight_decay, momentum, nesterov) -> None:
    """As adamw_formula."""
    for i, (p, gradient) in enumerate(zip(model.masters, gradients, strict=True)):
        if skipped == 1:
            continue
        g = gradient.to(torch.float32) * rounded(scale)
        g = g + rounded(weight_decay) * p if weight_decay else g
        if momentum:
            b = model.moments[0][i]
            b.copy_(rounded(momentum) * b + g)
            g = g + rounded(momentum) * b if nesterov else b
        p.copy_(p - rounded(lr) * g)


def numbers(device: str, lr: float = 0.1, scale: float = 1.0, skipped: bool = False) -> dict[str, Any]:
    return {"lr": lr, "scale": scale, "skipped": torch.tensor(float(skipped), device=device)}


def clone(model: Model, copy: Callable[[Tensor], Tensor] = Tensor.clone) -> Model:
    def cloned(x: Any) -> Any:
        return [cloned(each) for each in x] if isinstance(x, list) else None if x is None else copy(x)

    return Model(*map(cloned, model))


def tensors_of(model: Model) -> list[Tensor]:
    return [*model.masters, *sum(model.moments, []), *model.steps, *(model.copies or [])]


def ignore(tensors: Iterable[Tensor]) -> None:
    """In place of what lets a kernel that is executed or watched reach tensors that are no arguments of it."""


def check(
    variant: Variant, dtypes: Sequence[torch.dtype], copy: torch.dtype | None, device: str = "cpu", sizes=SIZES,
    reach: Callable[[Iterable[Tensor]], None] = ignore,
) -> None:  # fmt: skip
    """Take four steps by the kernel and by the formula, of which the third is skipped, and compare every bit."""
    found = model_of(variant, torch.float32, copy, device, sizes)
    for taken, count in enumerate(found.steps):  # steps taken before
        count.fill_(taken)
    expected = clone(found)
    for step in range(4):
        gradients = gradients_of(found, step, *dtypes)
        if step == 2:
            gradients[-1].fill_(float("nan"))
        before = [gradient.clone() for gradient in gradients]
        rates: dict[str, Any] = {"lr": 0.02 / (step + 1), "scale": 1.0 if step == 0 else 1 / 3}
        if step % 2:  # in the dtypes in which a step has them
            rates = {"lr": torch.tensor(rates["lr"], device=device, dtype=torch.float64),
                     "scale": torch.tensor(rates["scale"], device=device, dtype=torch.float64)}  # fmt: skip
        skipped = torch.tensor(float(step == 2), device=device)
        reach([*tensors_of(found), *gradients])
        with poisoned_memory():
            update(kernel, variant, found, gradients, **rates, skipped=skipped)
        formula = adamw_formula if variant.optimizer == "adamw" else sgd_formula
        formula(expected, gradients, **rates, skipped=skipped, **variant.options)
        if expected.copies is not None and step != 2:
            reference.round_to(expected.copies, expected.masters)
        assert_identical(gradients, before, "gradients")
        assert_identical(list(found), list(expected), f"{variant} step {step}")


@everywhere("update", {**FLOATS, "reference": ()})
def test_equals_separate_operations(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """Of one dtype, and of two in turns; with copies and without."""
    other = torch.float32 if dtype != torch.float32 else torch.float16
    copy = torch.bfloat16 if device == "cuda" and dtype != torch.float16 else torch.float16
    for variant in VARIANTS.values():
        check(variant, (dtype, dtype, other), copy, device)
        check(variant, (dtype,), None, device)


def optimizer_of(variant: Variant, masters: list[Tensor], dtype: torch.dtype, **how: bool) -> Any:
    """torch's optimizer of copies of these tensors."""
    options, leaves = dict(variant.options), [x.to(dtype, copy=True).requires_grad_() for x in masters]
    if variant.optimizer == "sgd":
        return torch.optim.SGD(leaves, lr=0.1, **options, **how)
    betas = options.pop("beta1"), options.pop("beta2")
    return torch.optim.AdamW(leaves, lr=0.1, betas=betas, **options, **how)


def by_torch(variant: Variant, masters: list[Tensor], dtype: torch.dtype, steps: Sequence[tuple]) -> list[Tensor]:
    """Masters and moments after steps (gradients, lr, scale, skipped) of torch's optimizer in a dtype."""
    optimizer = optimizer_of(variant, masters, dtype, foreach=False)
    leaves = optimizer.param_groups[0]["params"]
    for gradients, lr, scale, skipped in steps:
        if skipped:
            continue
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient.to(dtype) * scale
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    names = ("exp_avg", "exp_avg_sq") if variant.optimizer == "adamw" else ("momentum_buffer",)
    states = [[optimizer.state[leaf][name] for leaf in leaves] for name in names[: variant.moments]]
    return [torch.cat([x.detach().view(-1) for x in tensors]) for tensors in (leaves, *states)]


@everywhere("update", FLOATS)
def test_equals_torch_in_float64(module: ModuleType, dtype: torch.dtype, device: str) -> None:
    """All tensors together: alone, one of few elements may have a baseline without an error."""
    wide = torch.promote_types(dtype, torch.float32)
    for name, variant in VARIANTS.items():
        model = model_of(variant, wide, None if wide == torch.float64 else torch.float16, device)
        masters = [x.clone() for x in model.masters]
        steps = [(gradients_of(model, i, dtype), 0.03 / (i + 1), 0.5**i, i == 1) for i in range(5)]
        for gradients, lr, scale, skipped in steps:
            given = [gradient.clone() for gradient in gradients]  # the reference scales them in place
            update(module, variant, model, given, **numbers(device, lr, scale, skipped))
        oracle, baseline = (by_torch(variant, masters, kind, steps) for kind in (torch.float64, wide))
        for index, tensors in enumerate((model.masters, *model.moments)):
            x = torch.cat([tensor.view(-1) for tensor in tensors])
            assert_kernel_close(x, oracle[index], baseline[index], f"{name} {index} {dtype}")
        counts = {float(step) for step in model.steps}
        assert counts == ({4.0} if variant.optimizer == "adamw" else {0.0})
        if model.copies is not None:
            assert_identical(model.copies, [x.to(torch.float16) for x in model.masters])


@everywhere("update")
def test_a_skipped_step_changes_nothing(module: ModuleType, device: str) -> None:
    """Also where it is the first, of which there are no bias corrections, and every gradient is NaN."""
    for variant in VARIANTS.values():
        model = model_of(variant, torch.float32, torch.float16, device)
        before = clone(model)
        for nothing in (float("nan"), float("inf")):
            gradients = [torch.full_like(x, nothing) for x in model.masters]
            update(module, variant, model, gradients, **numbers(device, scale=nothing, skipped=True))
            assert_identical(list(model), list(before))


@everywhere("update", OF_KERNEL)
def test_a_skipped_step_writes_no_copy(module: ModuleType, device: str) -> None:
    """Copies that are not what masters round to stay as they are, and become it with the next step."""
    for variant in VARIANTS.values():
        model = model_of(variant, torch.float32, torch.float16, device)
        assert model.copies is not None
        for copy in model.copies:
            copy.fill_(7)
        gradients = gradients_of(model, 0, torch.float32)
        for skipped in (True, False):
            update(module, variant, model, gradients, **numbers(device, skipped=skipped))
            rounded = [x.half() for x in model.masters]
            assert_identical(model.copies, [torch.full_like(x, 7) for x in rounded] if skipped else rounded)


@everywhere("update")
def test_gradients_may_lie_in_any_layout(module: ModuleType, device: str) -> None:
    """And there may be no tensors at all."""
    for variant in VARIANTS.values():
        model = model_of(variant, torch.float32, None, device, ((4, 6), (5, 3)))
        expected, given = clone(model), numbers(device, scale=0.5)
        gradients = gradients_of(model, 0, torch.float32)
        columnwise = [x.t().contiguous().t() for x in gradients]
        update(module, variant, expected, gradients, **given)
        update(module, variant, model, columnwise, **given)
        assert_identical(list(model), list(expected))
        update(module, variant, Model([], [[]] * variant.moments, [], None), [], **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_reference_has_the_bits_of_separate_passes(dtype: torch.dtype) -> None:
    """Casts, scaling, torch's fused optimizer, rounding: as steps of training take them. dtype: the masters'."""
    for variant in [*VARIANTS.values()][: 2 if dtype == torch.bfloat16 else 6]:  # torch's SGD stands still
        copy = torch.bfloat16 if dtype == torch.float32 else None
        model, kinds = model_of(variant, dtype, copy), (dtype, torch.bfloat16)
        optimizer = optimizer_of(variant, model.masters, dtype, fused=True)
        leaves = optimizer.param_groups[0]["params"]
        for step, scale in enumerate((1.0, 0.3, torch.tensor(0.7, dtype=torch.float64), torch.tensor(1 / 3))):
            gradients = gradients_of(model, step, *kinds)
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient.to(dtype, copy=True)
            import_module("tpformer.parallel").scale_gradients(leaves, scale)  # needs einops, unlike a kernel
            given = numbers("cpu", 0.1 / (step + 1), scale, skipped=step == 2)
            optimizer.found_inf, optimizer.param_groups[0]["lr"] = given["skipped"], given["lr"]
            optimizer.step()
            update(reference, variant, model, gradients, **given)
            assert_identical(model.masters, [x.detach() for x in leaves])
            if model.copies is not None:
                assert_identical(model.copies, [x.detach().bfloat16() for x in leaves])


@pytest.mark.parametrize("message, change", [
    ("gradient: there are 1 tensors, but 2 masters", lambda model, gradients: gradients.pop()),
    ("step: there are 1 tensors, but 2 masters", lambda model, gradients: model.steps.pop()),
    (r"exp_avg of \(3, 4\) torch.float64 with .* tensors of \(3, 4\), torch.float32, on cpu",
     lambda model, gradients: model.moments[0].__setitem__(1, model.masters[1].double())),
    (r"master of \(4, 3\) torch.float32 with strides \(1, 4\)",
     lambda model, gradients: model.masters.__setitem__(1, model.masters[1].t())),
    (r"gradient of \(5,\) torch.float32 .* takes contiguous tensors of \(3, 4\)",
     lambda model, gradients: gradients.__setitem__(1, torch.zeros(5))),
    (r"copy of \(3, 4\) torch.float32 .* torch.bfloat16 or torch.float16, on cpu",
     lambda model, gradients: model.copies.__setitem__(1, model.masters[1])),
    ("gradient of .* on meta", lambda model, gradients: gradients.__setitem__(0, gradients[0].to("meta"))),
])  # fmt: skip
def test_what_the_kernel_cannot_take_is_refused(message: str, change: Callable) -> None:
    model = model_of(VARIANTS["adamw"], torch.float32, torch.float16, sizes=((5,), (3, 4)))
    gradients = gradients_of(model, 0, torch.float32)
    change(model, gradients)
    before = clone(model)
    with pytest.raises(ValueError, match=message):
        update(kernel, VARIANTS["adamw"], model, gradients, **numbers("cpu"))
    assert_identical(list(model), list(before))


class Reads(TorchDispatchMode):
    """Counts operations by which a host reads values of a device, or copies to it and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name, options = str(function), options or {}
        given = [x for x in arguments if isinstance(x, Tensor)]
        waits = name.startswith("aten._to_copy") and "device" in options and not options.get("non_blocking")
        moves = waits and any(x.device != options["device"] for x in given)
        if moves or name.startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.equal")):
            self.found.append(name)
        return function(*arguments, **options)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_host_waits_for_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors, which have no values to wait for, and by what torch is asked for."""
    launched = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: launched.append(grid)

    monkeypatch.setattr(kernel, f"{VARIANTS[name].optimizer}_kernel", Kernel())
    model = model_of(VARIANTS[name], torch.float32, torch.bfloat16)
    on_meta = clone(model, lambda x: x.to("meta"))
    gradients = [x.to("meta") for x in gradients_of(model, 0, torch.bfloat16, torch.float32)]
    scalar = torch.zeros((), device="meta")
    for given in ({"lr": 0.1, "scale": 1.0}, {"lr": scalar, "scale": scalar.double()}):
        with Reads() as reads:
            update(kernel, VARIANTS[name], on_meta, gradients, **given, skipped=scalar)
        assert not reads.found
    assert len(launched) >= 4


@pytest.mark.gpu
def test_the_host_does_not_wait_for_a_gpu() -> None:
    for variant in VARIANTS.values():
        model = model_of(variant, torch.float32, torch.bfloat16, "cuda")
        gradients = gradients_of(model, 0, torch.bfloat16, torch.float32)
        step = partial(update, kernel, variant, model, gradients, **numbers("cuda"))
        step()  # what compiles may wait
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_more_elements_than_int32_counts() -> None:
    """The elements around 2**31 and the last ones of SGD's masters are right."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("less than 40 GiB of GPU memory are free")
    master = torch.zeros(2**31 + 4099, device="cuda")
    gradient = torch.zeros(len(master), dtype=torch.bfloat16, device="cuda")
    places = torch.tensor([0, 2**31 - 1, 2**31, 2**31 + 4098], device="cuda")
    gradient[places] = 3.0
    model = Model([master], [], [], None)
    update(kernel, VARIANTS["sgd without decay"], model, [gradient], **numbers("cuda", lr=0.5))
    assert bool((master[places] == -1.5).all()) and int(master.count_nonzero()) == len(places)


@pytest.mark.gpu
def test_replays_of_a_capture() -> None:
    """A replay copies the table of the capture, from memory that is given to nobody else meanwhile."""
    step_of, dtypes = partial(update, kernel, VARIANTS["adamw"], **numbers("cuda")), (torch.bfloat16, torch.float32)
    found = model_of(VARIANTS["adamw"], torch.float32, torch.bfloat16, "cuda")
    expected, gradients = clone(found), gradients_of(found, 0, *dtypes)
    step_of(found, gradients), step_of(expected, gradients)  # compiles
    replay = captured(lambda: step_of(found, gradients))
    _held = [torch.full((len(SIZES) * 8,), -1, dtype=torch.int64, pin_memory=True) for _ in range(64)]
    for step in (1, 2, 3):
        reference.round_to(gradients, gradients_of(found, step, *dtypes))
        replay(), step_of(expected, gradients)
        assert_identical(list(found), list(expected), f"step {step}")
