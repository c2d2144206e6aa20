"""exp, log, tanh and erf for float32 as polynomials: LLVM calls libm once per lane for its intrinsics, these stay in vectors.

Accurate to a few units in the last place. Other types go to the library's functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

Expr = Any

_SMALLEST_NORMAL = 1.17549435e-38
_LARGEST = 3.4028234e38
_SQRT_HALF = 0.707106781186547524
_LOG2E = 1.4426950408889634
# ln 2 in two parts, the first with trailing zero bits, so that n * _LN2_HIGH is exact (Cody and Waite's reduction).
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4
_EXP_LARGEST = 88.7228394
_EXP_SMALLEST = -87.3365448  # below, the result is no longer a normal number and is returned as zero
# Cephes expf: exp(r) = 1 + r + r^2 P(r) on |r| <= ln(2)/2.
_EXP_TERMS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# Cephes logf: log(1 + x) = x - x^2/2 + x^3 P(x) on sqrt(1/2) - 1 <= x <= sqrt(2) - 1.
_LOG_TERMS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
# Cephes tanhf: tanh(x) = x + x^3 P(x^2) for |x| < 0.625.
_TANH_TERMS = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
# erf(x) = x P(x^2) / Q(x^2) on |x| <= 3.8325, beyond which it is 1 in float32 (the minimax fit of Eigen and XLA).
_ERF_LARGEST = 3.832506856900711
_ERF_TERMS = (
    -2.72614225801306e-10,
    2.77068142495902e-8,
    -2.10102402082508e-6,
    -5.69250639462346e-5,
    -7.34990630326855e-4,
    -2.95459980854025e-3,
    -1.60960333262415e-2,
)
_ERF_DIVISOR = (-1.45660718464996e-5, -2.13374055278905e-4, -1.68282697438203e-3, -7.37332916720468e-3, -1.42647390514189e-2)


def exp(x: Expr) -> Expr:
    if _dtype(x) != "float32":
        return tirx.exp(x)

    def reduced(x: Expr, power: Expr) -> Expr:
        r = _within(x, _EXP_SMALLEST, _EXP_LARGEST) - power * _f(_LN2_HIGH) - power * _f(_LN2_LOW)
        return let(r, lambda r: _polynomial(r, _EXP_TERMS) * (r * r) + r + _f(1))

    def value(x: Expr) -> Expr:
        power = tirx.floor(_within(x, _EXP_SMALLEST, _EXP_LARGEST) * _f(_LOG2E) + _f(0.5))
        return let(power, lambda power: _scaled(reduced(x, power), power.astype("int32")))

    def guarded(x: Expr) -> Expr:
        result = tirx.Select(x > _f(_EXP_LARGEST), _f(float("inf")), value(x))
        return tirx.Select(x < _f(_EXP_SMALLEST), _f(0), result)

    return let(x, guarded)


def log(x: Expr) -> Expr:
    if _dtype(x) != "float32":
        return tirx.log(x)

    def series(r: Expr, exponent: Expr) -> Expr:
        cubic = r * (r * r) * _polynomial(r, _LOG_TERMS)
        return cubic + exponent * _f(_LN2_LOW) - _f(0.5) * (r * r) + r + exponent * _f(_LN2_HIGH)

    def positive(bits: Expr, shift: Expr) -> Expr:
        mantissa = tirx.reinterpret("float32", (bits & tirx.const(0x007FFFFF, "int32")) | tirx.const(0x3F000000, "int32"))
        exponent = ((bits >> tirx.const(23, "int32")) - tirx.const(126, "int32")).astype("float32") - shift

        def centred(m: Expr) -> Expr:
            small = m < _f(_SQRT_HALF)
            r = tirx.Select(small, m + m, m) - _f(1)
            power = tirx.Select(small, exponent - _f(1), exponent)
            return let(r, lambda r: let(power, lambda power: series(r, power)))

        return let(mantissa, centred)

    def guarded(x: Expr) -> Expr:
        tiny = x < _f(_SMALLEST_NORMAL)
        bits = tirx.reinterpret("int32", tirx.Select(tiny, x * _f(2.0**23), x))
        result = let(bits, lambda bits: positive(bits, tirx.Select(tiny, _f(23), _f(0))))
        outside = tirx.Select(x == _f(0), _f(float("-inf")), _f(float("nan")))
        return tirx.Select(x > _f(0), tirx.Select(x > _f(_LARGEST), x, result), outside)

    return let(x, guarded)


def tanh(x: Expr) -> Expr:
    if _dtype(x) != "float32":
        return tirx.tanh(x)

    def value(x: Expr) -> Expr:
        size = tirx.abs(x)
        near = let(x * x, lambda square: x + x * square * _polynomial(square, _TANH_TERMS))
        far = _f(1) - _f(2) / (exp(size + size) + _f(1))
        return tirx.Select(size < _f(0.625), near, _with_sign(far, x))

    return let(x, value)


def erf(x: Expr) -> Expr:
    if _dtype(x) != "float32":
        return tirx.erf(x)

    def value(x: Expr) -> Expr:
        return let(x * x, lambda square: x * _polynomial(square, _ERF_TERMS) / _polynomial(square, _ERF_DIVISOR))

    def saturated(x: Expr) -> Expr:
        # The fit ends a rounding short of one, which a factor 1 + erf(x) and an infinite x would make much of.
        inside = let(_within(x, -_ERF_LARGEST, _ERF_LARGEST), value)
        return tirx.Select(x > _f(_ERF_LARGEST), _f(1), tirx.Select(x < _f(-_ERF_LARGEST), _f(-1), inside))

    return let(x, saturated)


def let(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """``body`` of the value, computed once: TVM's passes copy shared subexpressions, and grow with every use."""
    name = tirx.Var("t", _dtype(value))
    return tirx.Let(name, value, body(name))


def _within(x: Expr, low: float, high: float) -> Expr:
    """``x`` clipped; NaN stays, which ``min`` and ``max`` would lose."""
    return tirx.Select(x > _f(high), _f(high), tirx.Select(x < _f(low), _f(low), x))


def _scaled(value: Expr, power: Expr) -> Expr:
    """``value`` times two to the ``power``, in two factors: the largest power is beyond what one exponent field holds."""
    half = power >> tirx.const(1, "int32")
    return value * _power_of_two(half) * _power_of_two(power - half)


def _with_sign(size: Expr, x: Expr) -> Expr:
    return let(size, lambda size: tirx.Select(x < _f(0), -size, size))


def _polynomial(x: Expr, terms: tuple[float, ...]) -> Expr:
    """Horner's rule; highest power first."""
    value = _f(terms[0])
    for term in terms[1:]:
        value = value * x + _f(term)
    return value


def _power_of_two(n: Expr) -> Expr:
    return tirx.reinterpret("float32", (n + tirx.const(127, "int32")) << tirx.const(23, "int32"))


def _f(value: float) -> Expr:
    return tirx.const(value, "float32")


def _dtype(x: Expr) -> str:
    return str(x.dtype) if hasattr(x, "dtype") else str(x.ty.dtype)
