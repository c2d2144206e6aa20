"""A fitted model on disk: one JSON file that holds XGBoost's own JSON models and what is needed to use them."""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raftune.cost_model import trees
from raftune.cost_model.errors import CostModelWarning
from raftune.cost_model.features import FEATURE_SCHEMA
from raftune.device import Device

_FORMAT = "raftune cost model"


@dataclass(frozen=True, slots=True)
class Fitted:
    """What fitting found: feature columns, boosters, ``runs`` (the classifier, if anything failed), error by dialect."""

    columns: tuple[str, ...]
    members: tuple[Any, ...]
    runs: Any | None
    residuals: dict[str, float]
    samples: int
    seed: int
    device: Device | None


class _Unusable(ValueError):
    """Why a stored model cannot be used, when it is not damaged."""


def save(fitted: Fitted, path: Path) -> None:
    """Write atomically: readers see the old file or the new one."""
    import xgboost

    value = {
        "format": _FORMAT,
        "feature_schema": FEATURE_SCHEMA,
        "xgboost": xgboost.__version__,
        "samples": fitted.samples,
        "seed": fitted.seed,
        "device": fitted.device.to_json() if fitted.device is not None else None,
        "columns": list(fitted.columns),
        "residuals": fitted.residuals,
        "members": [_booster_to_json(booster) for booster in fitted.members],
        "runs": _booster_to_json(fitted.runs) if fitted.runs is not None else None,
    }
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(value, separators=(",", ":")), encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path) -> Fitted | None:
    """The model in ``path``; ``None`` if there is no file, or (with one warning) if it is damaged or of another version."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _ignore(path, str(error))
        return None
    try:
        return _parse(text)
    except _Unusable as error:
        _ignore(path, str(error))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        # XGBoost's own error is a ValueError.
        _ignore(path, f"damaged: {str(error).strip().splitlines()[0] if str(error) else type(error).__name__}")
    return None


def _parse(text: bytes) -> Fitted:
    value = json.loads(text)
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise _Unusable("not a cost model")
    if value["feature_schema"] != FEATURE_SCHEMA:
        raise _Unusable(f"it has feature schema {value['feature_schema']}, this raftune has {FEATURE_SCHEMA}")
    import xgboost

    if str(value["xgboost"]).split(".")[0] != xgboost.__version__.split(".")[0]:
        raise _Unusable(f"it was written by XGBoost {value['xgboost']}, this is {xgboost.__version__}")
    columns = tuple(str(name) for name in value["columns"])
    members = tuple(_booster_from_json(model, len(columns)) for model in value["members"])
    if not members:
        raise _Unusable("it has no members")
    residuals = {str(name): float(std) for name, std in value["residuals"].items()}
    if not all(0 < std < float("inf") for std in residuals.values()):
        raise _Unusable(f"its errors are not positive and finite: {residuals}")
    runs = _booster_from_json(value["runs"], len(columns)) if value["runs"] is not None else None
    device = None
    if value["device"] is not None:
        device = Device(**(value["device"] | {"vector": tuple(value["device"]["vector"])}))
    return Fitted(columns, members, runs, residuals, int(value["samples"]), int(value["seed"]), device)


def _booster_to_json(booster: Any) -> Any:
    return json.loads(bytes(booster.save_raw("json")))


def _booster_from_json(model: Any, columns: int) -> Any:
    import xgboost

    trees.check(model, columns)
    booster = xgboost.Booster({"nthread": 1})
    booster.load_model(bytearray(json.dumps(model).encode()))
    booster.set_param({"nthread": 1})
    return booster


def _ignore(path: Path, reason: str) -> None:
    warnings.warn(f"cost model {path} is ignored ({reason}); train it again", CostModelWarning, stacklevel=4)
