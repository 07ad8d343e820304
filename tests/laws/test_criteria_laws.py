"""Criteria are expressions: printing and parsing one gives the same scores."""

import math
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import secateur as sc
from secateur.criteria import NAMED, TRANSFORMS, Criterion
from secateur.evidence import TensorEvidence


def squash(scores):
    return scores / (1 + scores.abs())


def mine(weight, grad):
    return (weight * grad).abs()


OWN = {"squash": squash, "mine": mine}
numbers = st.one_of(st.integers(-50, 50), st.floats(-1e6, 1e6, allow_nan=False))
leaves = st.one_of(
    st.sampled_from(["weight", "grad", "grad_square", "input_norm", "linear_grad"]).map(lambda n: Criterion("leaf", (n,))),
    st.sampled_from(list(NAMED.values())),
    st.integers(0, 99).map(sc.random),
    st.just(sc.criterion(mine)),
)


def grow(inner):
    binary = st.sampled_from([lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b])
    with_number = st.sampled_from(
        [
            lambda a, n: a + n,
            lambda a, n: n + a,
            lambda a, n: a - n,
            lambda a, n: n - a,
            lambda a, n: a * n,
            lambda a, n: n * a,
            lambda a, n: a / n,
            lambda a, n: a**n,
        ]
    )
    return st.one_of(
        st.builds(lambda f, a, b: f(a, b), binary, inner, inner),
        st.builds(lambda f, a, n: f(a, n), with_number, inner, numbers),
        inner.map(lambda a: -a),
        inner.map(abs),
        st.builds(lambda a, f: a.map(f), inner, st.sampled_from([squash, *TRANSFORMS.values()])),
        st.builds(lambda a, s, b: a.after(s, b), inner, st.integers(0, 999), inner),
    )


expressions = st.recursive(leaves, grow, max_leaves=8)


@settings(max_examples=300)
@given(expressions)
def test_a_criterion_is_read_back_from_its_print(expression):
    again = Criterion.parse(str(expression), OWN)
    assert again == expression
    assert hash(again) == hash(expression)
    assert again.needs == expression.needs
    assert str(again) == str(expression)


@given(expressions, expressions)
def test_criteria_that_print_alike_are_equal(a, b):
    assert (str(a) == str(b)) == (a == b)


@given(st.integers())
def test_every_seed_of_random_is_read_back(seed):
    assert Criterion.parse(str(sc.random(seed))) == sc.random(seed)


@given(st.text(alphabet="weightgrad ()+-*/.,0123456789abs map", max_size=14))
def test_text_is_a_criterion_or_a_value_error(text):
    try:
        found = Criterion.parse(text)
    except ValueError:
        with pytest.raises(ValueError, match=re.escape(repr(text))):
            Criterion.parse(text)
    else:
        assert isinstance(found, Criterion)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "-5",
        "abs(-5)",
        "2 * 3",
        "(5).map(share_of_larger)",
        "weight.after(5, 3)",
        "weight.detach()",
        "__import__('os')",
        "weight if grad else weight",
        "weight @ grad",
        "weight * True",
        "weight.map(nowhere)",
        "unknown",
        "weight.__class__",
        "abs(weight, grad)",
        "random('a')",
        "random(True)",
        "weight.after(1.5, grad)",
        "weight[0]",
        "(lambda: weight)()",
        "weight +",
    ],
)
def test_what_no_criterion_prints_as_is_refused_with_the_text(text):
    with pytest.raises(ValueError, match="cannot read the criterion"):
        Criterion.parse(text)


# --- an expression scores what plain arithmetic in float64 scores -----------------------------------------------------


def evidence_of(seed: int, step: int = 0) -> TensorEvidence:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(5, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(3, 5, generator=generator))
    (target,), _ = sc.targets(layer)
    table = {
        "grad": torch.randn(3, 5, generator=generator),
        "grad_square": torch.rand(3, 5, generator=generator),
        "input_norm": torch.rand(1, 5, generator=generator),
        "linear_grad": torch.rand(3, 5, generator=generator),
    }
    return TensorEvidence(target, table, step)


def plainly(expression, evidence):
    """The same value by recursion, in float64."""
    if not isinstance(expression, Criterion):
        return expression
    args = expression.args
    match expression.op:
        case "leaf":
            found = evidence.target.weight if args[0] == "weight" else evidence.table[args[0]]
            return found.double().expand(3, 5)
        case "random":
            return evidence.random(args[0], 0, 3).double()
        case "function":
            return mine(plainly(sc.weight, evidence), plainly(sc.grad, evidence))
        case "map":
            return args[1](plainly(args[0], evidence))
        case "after":
            return plainly(args[0] if evidence.step >= args[1] else args[2], evidence)
        case "neg":
            return -plainly(args[0], evidence)
        case "abs":
            return abs(plainly(args[0], evidence))
    a, b = (plainly(arg, evidence) for arg in args)
    match expression.op:
        case "add":
            return a + b
        case "sub":
            return a - b
        case "mul":
            return a * b
        case "div":
            return a / b
        case "pow":
            return a**b
    raise AssertionError(expression.op)


gentle = st.recursive(
    leaves.filter(lambda c: "map" not in str(c)),
    lambda inner: st.one_of(
        st.builds(
            lambda f, a, b: f(a, b), st.sampled_from([lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b]), inner, inner
        ),
        st.builds(lambda a, n: n * a, inner, st.integers(-3, 3)),
        inner.map(lambda a: -a),
        inner.map(abs),
        inner.map(lambda a: a**2),
        inner.map(lambda a: a.map(squash)),
        st.builds(lambda a, s, b: a.after(s, b), inner, st.integers(0, 4), inner),
    ),
    max_leaves=6,
)


@settings(max_examples=150)
@given(gentle, st.integers(0, 99), st.integers(0, 5))
def test_an_expression_scores_what_plain_arithmetic_scores(expression, seed, step):
    evidence = evidence_of(seed, step)
    wanted = plainly(expression, evidence)
    assume(bool(wanted.isfinite().all()) and float(wanted.abs().max()) < 1e12)
    found = expression.scores(evidence)
    whole = found.rows(0, 3)
    scale = 1 + float(wanted.abs().max())
    assert whole.shape == (3, 5)
    assert torch.equal(torch.cat([found.rows(0, 1), found.rows(1, 3)]), whole)
    assert math.isclose(float((whole.double() - wanted).abs().max()) / scale, 0, abs_tol=1e-2)
