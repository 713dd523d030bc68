"""Names of modules, folded."""

import pytest

from recipes.report_tables import collapse


@pytest.mark.parametrize(
    ("fqns", "folded"),
    [
        (["layers.0.w1", "layers.1.w1", "layers.0.w3", "layers.1.w3"], ["layers.{0..1}.{w1,w3}"]),
        (["layers.0.w1", "layers.1.w1", "layers.0.w3"], ["layers.{0..1}.w1", "layers.0.w3"]),
        (["layers.1.w", "layers.3.w", "layers.4.w"], ["layers.{1,3..4}.w"]),
        (["layers.10.w", "layers.9.w"], ["layers.{9..10}.w"]),
        (["layers.7.experts.0.w", "layers.7.experts.1.w"], ["layers.7.experts.0.w", "layers.7.experts.1.w"]),
        (["norm", "output"], ["norm, output"]),
        (["layers.2"], ["layers.2"]),
    ],
)
def test_collapse(fqns, folded):
    assert collapse(fqns) == folded
