"""The schema of a config is closed: what it does not name is refused before a word of it could be rendered."""

from __future__ import annotations

from typing import Any

import pytest

from raftune.dialects.base import BuildError
from raftune.dialects.cutlass.schema import Sm80Convolution, Sm80Gemm, Sm90Gemm, parse, to_config

SM80 = Sm80Gemm((128, 128, 32), (64, 64), 4, 1, "none", 1, "tensor")
SM90 = Sm90Gemm((128, 256, 64), (2, 1), "cooperative", "persistent", "tensor")
CONVOLUTION = Sm80Convolution((128, 64, 32), (64, 32), 3, 4, 1, "tf32")


@pytest.mark.parametrize("schedule", [SM80, SM90, CONVOLUTION], ids=lambda schedule: schedule.kernel)
def test_a_config_is_what_it_was_made_from(schedule: Any) -> None:
    assert parse(to_config(schedule)) == schedule


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kernel": "sm80_gemm; system(0)"}, "kernel="),
        ({"kernel": None}, "kernel=None"),
        ({"kernel": ["sm80_gemm"]}, "kernel="),
        ({"tile": [128, 128, 32, 1]}, "expected 3 numbers"),
        ({"tile": "128,128,32"}, "tile="),
        ({"tile": [128, 128, "32> {}; int main() {"]}, "tile="),
        ({"tile": [128, 128, 1 << 40]}, "tile="),
        ({"tile": [128, 128, -32]}, "tile="),
        ({"tile": [128, 128, 32.0]}, "tile=32.0"),
        ({"stages": True}, "stages=True"),
        ({"stages": 3.0}, "stages=3.0"),
        ({"stages": 1000}, "stages=1000"),
        ({"stages": None}, "stages=None"),
        ({"swizzle": "1"}, "swizzle='1'"),
        ({"math": "tensor>{}"}, "math="),
        ({"split": "none", "slices": 4}, "slices=4"),
        ({"split": "serial", "slices": 1}, "slices=1"),
        ({"warp": [128, 16], "tile": [64, 64, 32]}, "warp="),
        ({"warp": [16, 16], "tile": [256, 256, 32]}, "1 to 16 warps"),
        ({"epilogue": "Relu"}, "unknown key 'epilogue'"),
    ],
)
def test_a_hostile_config_is_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BuildError, match=said.replace("(", r"\(").replace("[", r"\[")):
        parse(dict(to_config(SM80)) | change)


def test_a_missing_key_is_refused() -> None:
    for schedule in (SM80, SM90, CONVOLUTION):
        config = dict(to_config(schedule))
        for key in config:
            with pytest.raises(BuildError, match=key):
                parse({k: v for k, v in config.items() if k != key})
