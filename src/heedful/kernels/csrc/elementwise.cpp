// Norms, rotary positions, activations: everything between the matrix products that is not attention.
//
// Loops over eight explicit lanes, which the compiler turns into vectors of the variant's width; the order of additions is
// the same in every variant. exp: Cephes-style range reduction and a degree-6 polynomial, relative error under 2e-7.

#include "ops.h"
#include "variant.h"

#include <cmath>
#include <cstring>

namespace heedful {
namespace HEEDFUL_VARIANT {
namespace {

constexpr int kLanes = 8;

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

// e^x without a branch, so that loops over it become vectors. x is clamped to where float32 has results.
inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float scaled = x * 1.44269504f;
    const int whole = static_cast<int>(scaled + (scaled < 0 ? -0.5f : 0.5f));
    const float n = static_cast<float>(whole);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const int32_t bits = (whole + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return p * power;
}

inline float silu(float x) { return x / (1.0f + exp_of(-x)); }

inline float gelu_tanh(float x) {
    const float inner = 0.7978845608f * (x + 0.044715f * x * x * x);
    return x - x / (1.0f + exp_of(2.0f * inner));  // x (1 + tanh(inner)) / 2
}

template <float (*Act)(float)>
void apply(float* x, const float* up, int n) {
    if (up)
        for (int i = 0; i < n; i++) x[i] = Act(x[i]) * up[i];
    else
        for (int i = 0; i < n; i++) x[i] = Act(x[i]);
}

float gelu_exact(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.70710678f)); }

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

void activate(Activation kind, float* x, const float* up, int n) {
    switch (kind) {
        case Activation::silu: apply<silu>(x, up, n); return;
        case Activation::gelu_tanh: apply<gelu_tanh>(x, up, n); return;
        case Activation::gelu: apply<gelu_exact>(x, up, n); return;
    }
}

}  // namespace HEEDFUL_VARIANT
}  // namespace heedful
