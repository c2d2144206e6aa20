"""exp, log, tanh and erf for float32 as polynomials: LLVM calls libm once per lane for its intrinsics, these stay in vectors.

Accurate to a few units in the last place. Other types go to the library's functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx

Expr = Any

_SMALLEST_NORMAL = 1.17549435e-38
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
# Taylor series of erf at 0 in x^2 (2/sqrt(pi) * (-1)^n / (n! (2n+1))), for |x| < 0.875.
_ERF_TERMS = (
    1.3447e-6,
    -1.4925650358406251e-5,
    1.2055332981789664e-4,
    -8.5483270234508541e-4,
    5.2239776254421879e-3,
    -2.6866170645131252e-2,
    1.1283791670955126e-1,
    -3.7612638903183754e-1,
    1.1283791670955126,
)
# Abramowitz and Stegun 7.1.26 is too coarse for float32; W. J. Cody's form erfc(x) = exp(-x^2) Q(t) with t = 1/(1 + x/2)
# as fitted in Numerical Recipes (erfcc, fractional error below 1.2e-7).
_ERFC_TERMS = (
    0.17087277,
    -0.82215223,
    1.48851587,
    -1.13520398,
    0.27886807,
    -0.18628806,
    0.09678418,
    0.37409196,
    1.00002368,
    -1.26551223,
)


def exp(x: Expr) -> Expr:
    if _dtype(x) != "float32":
        return tirx.exp(x)

    def reduced(x: Expr, power: Expr) -> Expr:
        r = _clip(x) - power * _f(_LN2_HIGH) - power * _f(_LN2_LOW)
        return let(r, lambda r: _polynomial(r, _EXP_TERMS) * (r * r) + r + _f(1))

    def value(x: Expr) -> Expr:
        power = tirx.floor(_clip(x) * _f(_LOG2E) + _f(0.5))
        return let(power, lambda power: _scaled(reduced(x, power), power.astype("int32")))

    def guarded(x: Expr) -> Expr:
        result = tirx.Select(x > _f(_EXP_LARGEST), _f(float("inf")), value(x))
        result = tirx.Select(x < _f(_EXP_SMALLEST), _f(0), result)
        return tirx.Select(x != x, x, result)  # noqa: PLR0124 (NaN test)

    return let(x, guarded)


def log(x: Expr) -> Expr:
    if _dtype(x) != "float32":
        return tirx.log(x)

    def series(r: Expr, exponent: Expr) -> Expr:
        cubic = r * (r * r) * _polynomial(r, _LOG_TERMS)
        return cubic + exponent * _f(_LN2_LOW) - _f(0.5) * (r * r) + r + exponent * _f(_LN2_HIGH)

    def parts(bits: Expr) -> Expr:
        mantissa = tirx.reinterpret("float32", (bits & tirx.const(0x007FFFFF, "int32")) | tirx.const(0x3F000000, "int32"))
        exponent = ((bits >> tirx.const(23, "int32")) - tirx.const(126, "int32")).astype("float32")

        def centred(m: Expr) -> Expr:
            small = m < _f(_SQRT_HALF)
            r = tirx.Select(small, m + m, m) - _f(1)
            power = tirx.Select(small, exponent - _f(1), exponent)
            return let(r, lambda r: let(power, lambda power: series(r, power)))

        return let(mantissa, centred)

    def guarded(x: Expr) -> Expr:
        result = let(tirx.reinterpret("int32", tirx.max(x, _f(_SMALLEST_NORMAL))), parts)
        result = tirx.Select(x == _f(float("inf")), x, result)
        result = tirx.Select(x < _f(_SMALLEST_NORMAL), tirx.Select(x < _f(0), _f(float("nan")), _f(float("-inf"))), result)
        return tirx.Select(x != x, x, result)  # noqa: PLR0124 (NaN test)

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
        size = tirx.abs(x)
        near = let(x * x, lambda square: x * _polynomial(square, _ERF_TERMS))
        t = _f(1) / (_f(1) + _f(0.5) * size)
        far = let(t, lambda t: _f(1) - t * exp(_polynomial(t, _ERFC_TERMS) - x * x))
        return tirx.Select(size < _f(0.875), near, _with_sign(far, x))

    return let(x, value)


def let(value: Expr, body: Callable[[Expr], Expr]) -> Expr:
    """``body`` of the value, computed once: TVM's passes copy shared subexpressions, and grow with every use."""
    name = tirx.Var("t", _dtype(value))
    return tirx.Let(name, value, body(name))


def _clip(x: Expr) -> Expr:
    return tirx.max(tirx.min(x, _f(_EXP_LARGEST)), _f(_EXP_SMALLEST))


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
