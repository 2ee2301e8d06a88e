// Norms, rotary positions, Hadamard rotations, activations: everything between the matrix products that is not attention.
//
// Sums run over eight explicit lanes, which the compiler turns into vectors; the order of additions is the same in every
// variant. Activations of a 512-token chunk of SmolLM2 took 92 of 476 ms with scalar exponentials; hardly any in lanes.

#include "lanes.h"
#include "ops.h"

#include <cmath>
#include <cstring>

namespace heedful {
namespace HEEDFUL_VARIANT {
namespace {

constexpr float kLog2E = 1.44269504088896340736f;

float sum_lanes(const float* lanes) {
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

float sum_of(const float* x, int n) {
    float lanes[kLanes] = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int l = 0; l < kLanes; l++) lanes[l] += x[i + l];
    for (int l = 0; i + l < n; l++) lanes[l] += x[i + l];
    return sum_lanes(lanes);
}

float sum_of_squares(const float* x, float mean, int n) {
    float lanes[kLanes] = {};
    int i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (int l = 0; l < kLanes; l++) lanes[l] += (x[i + l] - mean) * (x[i + l] - mean);
    for (int l = 0; i + l < n; l++) lanes[l] += (x[i + l] - mean) * (x[i + l] - mean);
    return sum_lanes(lanes);
}

// 1 / (1 + e^-x). The exponential is taken of -|x|, so that it never overflows.
Floats sigmoid(Floats x) {
    const Floats one = splat(1.0f), power = exp2_of(mul(abs(x), splat(-kLog2E)));
    const Floats numerator = add(power, where_at_least(x, 0.0f, sub(one, power)));  // 1 for x >= 0, else e^x
    return div(numerator, add(one, power));
}

Floats silu(Floats x) { return mul(x, sigmoid(x)); }

// x (1 + tanh(u)) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
Floats gelu_tanh(Floats x) {
    const Floats cubic = mul_add(mul(mul(x, x), x), splat(0.044715f), x);
    return mul(x, sigmoid(mul(cubic, splat(2 * 0.7978845608f))));
}

Floats polynomial(Floats x, const float* coefficients, int degree) {
    Floats sum = splat(coefficients[degree]);
    for (int i = degree - 1; i >= 0; i--) sum = mul_add(sum, x, splat(coefficients[i]));
    return sum;
}

// erf(x) = x P(x²) / Q(x²) up to 3.925, where it is 1 but for 3e-8. Minimax, fitted by reweighted least squares; absolute
// error below 3.2e-7 in float32.
constexpr float kErfEnd = 3.925f;
constexpr float kErfAbove[] = {1.128378987312317f,     0.19296886026859283f,    0.05308374762535095f,
                               0.0038761263713240623f, 0.00028748030308634043f, 2.03080730898364e-06f};
constexpr float kErfBelow[] = {1.0f, 0.5043458342552185f, 0.1151658222079277f, 0.015187974087893963f,
                               0.0011896868236362934f, 3.8030171708669513e-05f};

// x (1 + erf(x / √2)) / 2: within 3.2e-7 · |x| / 2 and rounding; 0 below -5.55.
Floats gelu(Floats x) {
    const Floats z = max(min(mul(x, splat(0.70710678f)), splat(kErfEnd)), splat(-kErfEnd)), square = mul(z, z);
    const Floats erf = div(mul(z, polynomial(square, kErfAbove, 5)), polynomial(square, kErfBelow, 5));
    const Floats half = splat(0.5f);
    return where_at_least(x, -1.41421356f * kErfEnd, mul(x, mul_add(half, erf, half)));
}

Floats relu(Floats x) { return max(x, splat(0.0f)); }

template <Floats (*Act)(Floats)>
void apply(float* x, const float* up, int n) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) store(x + i, up ? mul(Act(load(x + i)), load(up + i)) : Act(load(x + i)));
    if (i == n) return;
    float rest[kLanes] = {}, partner[kLanes] = {};
    std::memcpy(rest, x + i, (n - i) * sizeof(float));
    if (up) std::memcpy(partner, up + i, (n - i) * sizeof(float));
    store(rest, up ? mul(Act(load(rest)), load(partner)) : Act(load(rest)));
    std::memcpy(x + i, rest, (n - i) * sizeof(float));
}

}  // namespace

void norm(NormKind kind, const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
    const float mean = kind == NormKind::layer ? sum_of(x, n) / n : 0.0f;
    const float inverse = 1.0f / std::sqrt(sum_of_squares(x, mean, n) / n + eps);
    if (bias)
        for (int i = 0; i < n; i++) out[i] = (x[i] - mean) * inverse * weight[i] + bias[i];
    else
        for (int i = 0; i < n; i++) out[i] = (x[i] - mean) * inverse * weight[i];
}

void rotate(float* head, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i++) {
        const float first = head[i], second = head[half + i];
        head[i] = first * cos[i] - second * sin[i];
        head[half + i] = second * cos[i] + first * sin[i];
    }
}

void hadamard(float* x, int n, int block) {
    for (int i = 0; i < n; i += kLanes) store(x + i, butterfly<4>(butterfly<2>(butterfly<1>(load(x + i)))));
    for (int distance = kLanes; distance < block; distance *= 2)
        for (int i = 0; i < n; i += kLanes) {
            if (i & distance) continue;
            const Floats first = load(x + i), second = load(x + i + distance);
            store(x + i, add(first, second));
            store(x + i + distance, sub(first, second));
        }
    const Floats factor = splat(1.0f / std::sqrt(static_cast<float>(block)));
    for (int i = 0; i < n; i += kLanes) store(x + i, mul(load(x + i), factor));
}

void activate(Activation kind, float* x, const float* up, int n) {
    switch (kind) {
        case Activation::silu: apply<silu>(x, up, n); return;
        case Activation::gelu_tanh: apply<gelu_tanh>(x, up, n); return;
        case Activation::gelu: apply<gelu>(x, up, n); return;
        case Activation::relu: apply<relu>(x, up, n); return;
    }
}

}  // namespace HEEDFUL_VARIANT
}  // namespace heedful
