"""Checks on a stored XGBoost model before XGBoost sees it: it trusts indices, and a damaged file would crash the process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OBJECTIVES = frozenset({"reg:squarederror", "binary:logistic"})


class UnsoundModel(ValueError):
    """The text is not a model of the one kind that raftune stores."""


def check(model: Any, columns: int) -> None:
    """Raise :class:`UnsoundModel` unless ``model`` (XGBoost's JSON) is a sum of numeric trees over ``columns``."""
    try:
        learner = model["learner"]
        parameters, objective = learner["learner_model_param"], learner["objective"]["name"]
        booster = learner["gradient_booster"]
        forest = booster["model"]
        trees = forest["trees"]
        _require(booster["name"] == "gbtree" and objective in OBJECTIVES, f"it is {booster['name']!r} with {objective!r}")
        _require((parameters["num_class"], parameters["num_target"]) == ("0", "1"), "it has several outputs")
        _require(
            parameters["num_feature"] == str(columns), f"it has {parameters['num_feature']} features for {columns} columns"
        )
        expected = {"num_parallel_tree": "1", "num_trees": str(len(trees))}
        _require(forest["gbtree_model_param"] == expected, f"it has {len(trees)} trees, not {forest['gbtree_model_param']}")
        _require(forest["tree_info"] == [0] * len(trees), "its trees belong to several outputs")
        _require(forest["iteration_indptr"] == list(range(len(trees) + 1)), "its trees are not one a round")
        for number, tree in enumerate(trees):
            _check_tree(tree, number, columns)
    except (KeyError, TypeError, AttributeError) as error:
        raise UnsoundModel(f"it lacks {error}") from error


def _check_tree(tree: Mapping[str, Any], number: int, columns: int) -> None:
    left, right, split, kind = (tree[n] for n in ("left_children", "right_children", "split_indices", "split_type"))
    nodes = len(left)
    _require(tree["id"] == number and nodes > 0, f"tree {number} is out of place or empty")
    _require(tree["tree_param"]["num_nodes"] == str(nodes), f"tree {number} has a wrong number of nodes")
    _require(tree["tree_param"]["size_leaf_vector"] in ("0", "1"), f"tree {number} has several outputs")
    _require(not any(kind) and not tree["categories"] and not tree["categories_nodes"], f"tree {number} has categories")
    for node, (a, b, column) in enumerate(zip(left, right, split, strict=True)):
        _require(type(a) is int and type(b) is int and type(column) is int, f"tree {number} has an index that is no integer")
        # Children come after their parent, so that every walk ends.
        _require(a == b == -1 or (node < a < nodes and node < b < nodes), f"node {node} of tree {number} leads nowhere")
        _require(0 <= column < columns, f"node {node} of tree {number} splits on column {column}")


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UnsoundModel(otherwise)
