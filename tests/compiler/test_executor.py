import gc
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from raftune.compiler.executor import BoundKernel, Program
from raftune.graph.workloads import region_of

aten = torch.ops.aten


def trace(function, *inputs):
    module = make_fx(function, tracing_mode="fake")(*inputs)
    module.graph.eliminate_dead_code()
    return module


def bind(module, op, kernel):
    return [BoundKernel(region_of(n), kernel) for n in module.graph.nodes if n.target is op]


def twice(program, *inputs):
    first, second = program(list(inputs)), program(list(inputs))
    return first, second


def test_first_and_later_calls_equal_the_graph():
    def step(x, w, b):
        y, mean, rstd = aten.native_layer_norm(x @ w + b, [3], None, None, 1e-5)
        parts = torch.split(y, 2)
        return torch.cat([parts[1], parts[0]]) * mean, rstd, x.sum()

    inputs = (torch.randn(4, 5), torch.randn(5, 3), torch.randn(3))
    expected = step(*inputs)
    for results in twice(Program(trace(step, *inputs), {}), *inputs):
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(result, reference)


def test_a_kernel_replaces_its_operator_on_every_call():
    calls = []

    def kernel(x, w):
        calls.append(1)
        return torch.mm(x, w) + 1

    inputs = (torch.randn(4, 5), torch.randn(5, 3))
    module = trace(lambda x, w: (x.mm(w).relu(),), *inputs)
    program = Program(module, bind(module, aten.mm.default, kernel))
    for (result,) in twice(program, *inputs):
        torch.testing.assert_close(result, (inputs[0] @ inputs[1] + 1).relu())
    assert len(calls) == 2
    assert program.kernels == 1


@pytest.mark.parametrize("used", [(0,), (1,), (0, 2), (0, 1, 2)])
def test_results_of_a_many_valued_operator_go_to_their_users(used):
    def step(x):
        results = aten.native_layer_norm(x, [6], None, None, 1e-5)
        return tuple(results[i] * 2 for i in used)

    def kernel(x):
        results = [r + 10 for r in aten.native_layer_norm(x, [6], None, None, 1e-5)]
        kept = tuple(results[i] for i in used)
        return kept[0] if len(kept) == 1 else kept

    x = torch.randn(4, 6)
    plain = aten.native_layer_norm(x, [6], None, None, 1e-5)
    module = trace(step, x)
    for results in twice(Program(module, bind(module, aten.native_layer_norm.default, kernel)), x):
        for result, i in zip(results, used, strict=True):
            torch.testing.assert_close(result, (plain[i] + 10) * 2)


def test_a_kernel_that_meets_other_strides_gives_its_place_back(caplog):
    x, w = torch.randn(4, 5), torch.randn(5, 3)
    module = trace(lambda x, w: (x.mm(w),), x, w)
    program = Program(module, bind(module, aten.mm.default, lambda x, w: torch.zeros(4, 3)))
    transposed = w.t().contiguous().t()
    for (result,) in twice(program, x, transposed):
        torch.testing.assert_close(result, x @ w)
    assert program.kernels == 0
    assert "stride" in caplog.text


def test_a_kernel_that_raises_on_its_first_call_gives_its_place_back(caplog):
    def kernel(x, w):
        raise RuntimeError("no such instruction")

    x, w = torch.randn(4, 5), torch.randn(5, 3)
    module = trace(lambda x, w: (x.mm(w),), x, w)
    program = Program(module, bind(module, aten.mm.default, kernel))
    for (result,) in twice(program, x, w):
        torch.testing.assert_close(result, x @ w)
    assert "no such instruction" in caplog.text


def test_values_are_freed_after_their_last_use():
    alive = []

    def kernel(x):
        gc.collect()
        alive.append(sum(r() is not None for r in refs))
        result = x + 1
        refs.append(weakref.ref(result))
        return result

    refs = []
    x = torch.randn(3)
    module = trace(lambda x: (x.relu().relu().relu().relu(),), x)
    program = Program(module, bind(module, aten.relu.default, kernel))
    program([x])
    alive.clear()
    refs.clear()
    arguments = [torch.randn(3)]
    program(arguments)
    assert arguments == []
    assert max(alive) <= 1


def test_text_in_a_graph_is_never_source(tmp_path):
    marker = tmp_path / "ran"
    module = trace(lambda x, y: (torch.div(x, y, rounding_mode="floor"),), torch.randn(3), torch.randn(3))
    node = next(n for n in module.graph.nodes if "rounding_mode" in n.kwargs)
    node.kwargs = {"rounding_mode": f"floor') or open('{marker}', 'w') or ('"}
    program = Program(module, {})
    with pytest.raises(RuntimeError, match="rounding_mode"):
        program([torch.randn(3), torch.randn(3)])
    assert not marker.exists()
