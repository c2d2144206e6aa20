"""What is enumerated for a problem and a device: everything can run, the promising comes first, the rest is left out."""

from __future__ import annotations

import pytest
import torch
from cutlass_workloads import convolution, convolution_backward, product

from raftune.device import UnknownDevice, cuda_architecture, targeting
from raftune.dialects import registry
from raftune.dialects.base import BuildError
from raftune.dialects.cutlass import CutlassDialect
from raftune.dialects.cutlass.dialect import kernels
from raftune.dialects.cutlass.render import translation_unit
from raftune.workload import canonical_json

HALF = torch.float16


def configs(workload):
    return CutlassDialect().candidates(workload)


def test_every_candidate_is_one_kernel_that_fits(hopper: None) -> None:
    for workload in (product(4096, 4096, 1024), product(8, 1024, 1024, transposed=True), product(511, 65, 66)):
        found = configs(workload)
        assert len(found) == len({canonical_json(config) for config in found})
        symbols = {spec.symbol for config in found for spec in kernels(workload, config)}
        assert len(symbols) == len(found)
        for config in found:
            if config["kernel"] == "sm80_gemm":
                rows, columns, depth = config["tile"]
                assert config["stages"] * (rows + columns) * depth * 2 <= 227 * 1024


def test_counts_by_problem(hopper: None) -> None:
    def kinds(workload):
        found = configs(workload)
        return {kernel: sum(c["kernel"] == kernel for c in found) for kernel in ("sm80_gemm", "sm90_gemm")}

    large = kinds(product(4096, 4096, 1024))
    assert large["sm80_gemm"] >= 60
    assert large["sm90_gemm"] == 3 * 3 + 4 * 4  # pingpong and cooperative tiles in three clusters, the latter with stream-k
    # TMA reads rows of a multiple of 16 bytes.
    assert kinds(product(512, 512, 500))["sm90_gemm"] == 0
    # Of a small product large tiles would be empty.
    small = configs(product(32, 64, 256))
    assert {tuple(c["tile"][:2]) for c in small} == {(64, 64)}
    # Single elements cannot be copied asynchronously.
    assert {c["stages"] for c in configs(product(128, 128, 63))} == {2}


def test_ampere_has_no_wgmma(ampere: None) -> None:
    workload = product(512, 512, 512)
    assert {c["kernel"] for c in configs(workload)} == {"sm80_gemm"}
    hopper_only = {"kernel": "sm90_gemm", "tile": [64, 64, 64], "cluster": [1, 1], "schedule": "pingpong"}
    with pytest.raises(BuildError, match=r"needs compute capability 9\.0, not 8\.0"):
        CutlassDialect().build(workload, hopper_only | {"scheduler": "persistent", "math": "tensor"})


def test_float32_keeps_its_precision_unless_told_otherwise(hopper: None) -> None:
    workload = product(512, 512, 512, torch.float32)
    assert {c["math"] for c in configs(workload)} == {"3xtf32", "simt"}
    device = cuda_architecture("cuda:sm_90")
    with targeting(type(device)("cuda", "sm_90", 132, ("sm_90", "tf32"), 0)):
        found = configs(workload)
        assert {c["math"] for c in found} == {"tf32", "3xtf32", "simt"}
        assert any(c["kernel"] == "sm90_gemm" for c in found)
        # wgmma reads tf32 along the depth: the second matrix is transposed first.
        wgmma = next(c for c in found if c["kernel"] == "sm90_gemm")
        assert kernels(workload, wgmma)[0].layouts == ("row", "column")


def test_a_deep_small_product_is_split_first(hopper: None) -> None:
    first = configs(product(64, 64, 65536))[:10]
    assert all(c.get("slices", 1) > 1 or c.get("split") == "stream" or c.get("scheduler") == "stream_k" for c in first)
    # Where tiles fill the device, slices would only add work.
    assert not any(c.get("slices", 1) > 1 for c in configs(product(8192, 8192, 1024)))


def test_convolutions_have_a_schedule_for_each_gradient(ampere: None) -> None:
    forward = configs(convolution())
    assert {c["kernel"] for c in forward} == {"sm80_convolution"}
    assert any(c["slices"] > 1 for c in configs(convolution_backward(mask=(False, True))))
    both = configs(convolution_backward())
    assert all(set(c) == {"input", "weight"} for c in both)
    assert [len(kernels(convolution_backward(), c)) for c in both[:3]] == [2, 2, 2]
    strided = configs(convolution_backward(stride=2, mask=(True, False)))
    assert all(c["slices"] == 1 for c in strided)
    with pytest.raises(BuildError, match="expected one schedule each for input, weight"):
        kernels(convolution_backward(), {"input": both[0]["input"]})


def test_source_text_holds_nothing_but_names_and_numbers(hopper: None) -> None:
    workload = product(512, 512, 512)
    specs = [spec for config in configs(workload)[:20] for spec in kernels(workload, config)]
    text = translation_unit(specs)
    assert text.count("RAFTUNE_EXPORT(") == len(specs)
    assert text.count("#include") == len({type(spec.schedule) for spec in specs})
    assert translation_unit(specs) == text


def test_a_machine_without_the_device_says_so() -> None:
    row = next(row for row in registry.describe() if row.name == "cutlass")
    assert not row.available
    assert "cuda" in row.reason
    assert not any(c.dialect == "cutlass" for c in registry.candidates(product(64, 64, 64)))


def test_the_target_decides_which_dialects_there_are(hopper: None) -> None:
    names = [dialect.name for dialect in registry.enabled()]
    assert "cutlass" in names
    assert not {"onednn", "tvm"} & set(names)
    found = registry.candidates(product(64, 64, 64))
    assert found[0].dialect == "aten"
    assert any(c.dialect == "cutlass" for c in found)


def test_devices_are_named_by_architecture() -> None:
    device = cuda_architecture("cuda:sm_90")
    assert (device.kind, device.capability) == ("cuda", 90)
    for name in ("cuda", "cuda:90", "cuda:sm_x", "cuda:sm_90; rm", "cpu"):
        with pytest.raises(UnknownDevice, match="expected cuda:sm_NN"):
            cuda_architecture(name)
    old = cuda_architecture("cuda:sm_75")
    with targeting(old):
        assert CutlassDialect().unavailable() == "its kernels need compute capability 8.0, the device has 7.5"


def test_features_tell_schedules_apart(hopper: None) -> None:
    workload = product(4096, 4096, 1024)
    dialect = CutlassDialect()
    seen = {canonical_json(dict(dialect.features(workload, c))) for c in configs(workload)}
    assert len(seen) >= 8
    assert dialect.features(convolution_backward(), configs(convolution_backward())[0])
