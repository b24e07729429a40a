"""Pinned host memory: what is asked of the driver, who holds it and when it is given back. The driver is a record of its calls."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_spmd.kernels import devices, pinned_memory
from rlhf_spmd.kernels.pinned_memory import ARENA_SLAB, PAGE, PinnedArena, copy_to_host, host_empty, host_like, host_zeros
from rlhf_spmd.models.activations import save_on_host
from rlhf_spmd.reshard import Storages
from rlhf_spmd.workers.optim_config import OptimConfig
from rlhf_spmd.workers.optimizer import Optimizer

CPU = torch.device("cpu")


@dataclass
class Driver:
    """Answers as CUDA's runtime; ``registered``: address -> bytes."""

    registered: dict[int, int] = field(default_factory=dict)
    refuses: bool = False
    most: int = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.refuses:
            return 2
        assert address % 4096 == 0 and nbytes % 4096 == 0 and address not in self.registered and flags == 0
        self.registered[address] = nbytes
        self.most = max(self.most, sum(self.registered.values()))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0

    def holds(self, tensor: Tensor) -> bool:
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(at <= first and last <= at + size for at, size in self.registered.items())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """CPU tensors as those of a device that wants pinned memory."""
    found = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    monkeypatch.setattr(devices, "_CPU", replace(devices._CPU, pinned=True))
    pinned_memory._arena.cache_clear()
    yield found
    pinned_memory._arena.cache_clear()
    gc.collect()
    assert not found.registered, "memory stays registered with nobody who holds it"


def test_tensors_lie_in_one_slab_that_is_not_rounded_to_a_power_of_two(driver: Driver) -> None:
    forms: list[Any] = [((3, 5), torch.float32), ((0, 7), torch.bfloat16), ((), torch.int64), ((5 * PAGE,), torch.uint8)]
    made = host_zeros(forms, CPU)
    assert [(tuple(x.shape), x.dtype) for x in made] == [(tuple(shape), dtype) for shape, dtype in forms]
    assert len(driver.registered) == 1 and sum(driver.registered.values()) == 6 * PAGE
    assert all(not x.any() for x in made)
    assert all(driver.holds(x) and x.data_ptr() % pinned_memory.ALIGNMENT == 0 for x in made if x.numel())
    assert len({x.untyped_storage().data_ptr() for x in made if x.numel()}) == 3, "each may be given up by itself"
    last = made[-1][100:]
    del made
    gc.collect()
    assert driver.holds(last), "a view of one of them holds the slab"
    last.fill_(7)
    del last


def test_copies_are_contiguous_and_their_memory_is_lent(driver: Driver) -> None:
    whole = torch.arange(12.0).view(3, 4)
    tensors = [whole[:, 1:3], torch.arange(3), torch.empty(0, 2)]
    expected = [x.clone() for x in tensors]
    copies, wait_for_copies = copy_to_host(tensors)
    whole.zero_()
    tensors[1].zero_()
    wait_for_copies()
    assert all(x.is_contiguous() and torch.equal(x, y) for x, y in zip(copies, expected, strict=True))
    assert driver.holds(copies[0]) and driver.holds(copies[1])
    first = copies[0].data_ptr()
    del copies
    again, _ = copy_to_host(tensors)
    assert again[0].data_ptr() == first and len(driver.registered) == 1


def test_what_the_driver_refuses_is_want_of_memory(driver: Driver) -> None:
    driver.refuses = True
    with pytest.raises(MemoryError, match=r"does not pin 0\.0 GiB of host memory \(error 2\)"):
        host_zeros([((3,), torch.float32)], CPU)


def test_ordinary_memory_without_a_device_that_wants_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("the driver was asked"))
    (zeros,) = host_zeros([((2, 3), torch.bfloat16)], CPU)
    assert torch.equal(zeros, torch.zeros(2, 3, dtype=torch.bfloat16))
    assert host_empty((4, 2), torch.int64, CPU).shape == (4, 2)
    turned = torch.zeros(3, 5, 7).permute(2, 0, 1)
    assert host_like(turned).stride() == turned.stride()


def test_an_arena_takes_back_and_joins_what_is_free(driver: Driver) -> None:
    arena = PinnedArena(CPU)
    third = ARENA_SLAB // 4
    first, second, last = (arena.empty((third,), torch.uint8) for _ in range(3))
    assert arena.nbytes == ARENA_SLAB == sum(driver.registered.values())
    for tensor, value in ((first, 1), (second, 2), (last, 3)):
        tensor[::4096] = value
    address = first.data_ptr()
    del first, second
    both = arena.empty((2 * third,), torch.uint8)  # where the two lay
    assert both.data_ptr() == address and arena.nbytes == ARENA_SLAB
    both[::4096] = 9
    assert (last[::4096] == 3).all()
    small = arena.empty((3,), torch.float64)
    assert driver.holds(small) and arena.nbytes == ARENA_SLAB
    holder: list[Tensor] = [both]
    del both
    thread = threading.Thread(target=holder.clear)  # as autograd's, which runs the backward pass of a GPU
    thread.start()
    thread.join()
    assert arena.empty((2 * third,), torch.uint8).data_ptr() == address


def test_an_arena_that_grows_gives_up_slabs_in_which_nothing_lies(driver: Driver) -> None:
    """Sizes that grow from call to call would otherwise add up."""
    arena = PinnedArena(CPU)
    for factor in (2, 3, 4):
        page = arena.empty((factor * ARENA_SLAB,), torch.uint8)
        assert driver.holds(page)
        del page
    assert arena.nbytes == 4 * ARENA_SLAB and driver.most <= 4 * ARENA_SLAB
    kept = arena.empty((5,), torch.float32).fill_(2.5)
    other = arena.empty((4 * ARENA_SLAB,), torch.uint8)
    assert arena.nbytes == 8 * ARENA_SLAB and (kept == 2.5).all() and driver.holds(other)


def test_random_lives_never_overlap(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_memory, "ARENA_SLAB", 4 * PAGE)
    arena, generator, live = PinnedArena(CPU), torch.Generator().manual_seed(3), dict[int, Tensor]()
    for number in range(600):
        if len(live) > 12:
            del live[list(live)[int(torch.randint(len(live), (1,), generator=generator))]]
        size = int(torch.randint(1, PAGE, (1,), generator=generator))
        live[number] = arena.empty((size,), torch.int16).fill_(number)
        if number % 40 == 0:
            assert all((tensor == n).all() for n, tensor in live.items())
    arena._collect()
    held, free = (
        sum(-(-x.nbytes // 512) * 512 for x in live.values()),
        sum(size for holes in arena._free for _, size in holes),
    )
    assert held + free == arena.nbytes < 3 * 13 * 2 * PAGE


def test_weights_that_rest_are_pinned_and_come_back(driver: Driver) -> None:
    tensors = [torch.randn(300, 7), torch.randn(5).bfloat16(), torch.randn(1000, 3)]
    wanted = [x.clone() for x in tensors]
    storages = Storages(tensors)
    storages.offload()
    assert storages.nbytes == 0 and len(driver.registered) == 1
    assert all(driver.holds(storages.on_host(x)) for x in tensors)
    storages.reload()
    assert all(map(torch.equal, tensors, wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_optimizer_states_on_the_host_are_pinned(driver: Driver, dtype: torch.dtype) -> None:
    """All of them in one slab of their own bytes: torch would take 2**k of each."""
    params = {name: torch.ones(shape, dtype=dtype) for name, shape in {"a": (1025, 513), "b": (0, 5), "c": (7,)}.items()}
    optimizer = Optimizer(OptimConfig(lr=1e-2, offload=True), params, 3)
    optimizer.step(params, {name: torch.ones(param.shape) for name, param in params.items()})
    states = [state for states in optimizer.state_tensors().values() for state in states.values()]
    assert len(driver.registered) == 1 and all(driver.holds(state) for state in states if state.numel())
    states_of_each = 3 if dtype == torch.bfloat16 else 2
    assert sum(driver.registered.values()) <= states_of_each * (4 * 1025 * 513 + 8 * 512) + PAGE


def test_saved_activations_come_from_the_arena_and_go_back(driver: Driver) -> None:
    weight = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(50, 64)

    def gradient(offload: bool) -> Tensor:
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(weight.detach().clone())
        if not offload:
            (x @ module.weight).sigmoid().t().square().sum().backward()
        else:
            with save_on_host(module, x):
                out = (x @ module.weight).sigmoid().t().square().sum()
            assert driver.registered, "nothing was saved there"
            out.backward()
        assert module.weight.grad is not None
        return module.weight.grad

    wanted = gradient(False)
    for _ in range(3):
        assert torch.equal(gradient(True), wanted)
    arena = pinned_memory._arena(CPU)
    gc.collect()
    arena._collect()
    assert arena.nbytes == ARENA_SLAB and arena._free == [[(0, ARENA_SLAB)]]
