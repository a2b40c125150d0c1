// One pass of AdamW over a tensor and its split float32 master; `fused_step` in adamw_fused.py is the same in torch.
#include <math.h>
#include <stdint.h>
#include <string.h>

#define STEP(NAME, TYPE, READ_GRADIENT)                                                                       \
void NAME(int64_t n, int16_t *restrict high, const TYPE *restrict grad, float *restrict exp_avg,              \
          float *restrict exp_avg_sq, int16_t *restrict remainder, const float *k, int threads) {             \
    const float decay = k[0], weight1 = k[1], beta2 = k[2], weight2 = k[3], root = k[4], eps = k[5], size = k[6]; \
    _Pragma("omp parallel for simd schedule(static) num_threads(threads) if(n > 32768)")                      \
    for (int64_t i = 0; i < n; i++) {                                                                         \
        float master, g;                                                                                      \
        int32_t bits = (int32_t)((uint32_t)(int32_t)high[i] << 16) + remainder[i];                            \
        READ_GRADIENT;                                                                                        \
        memcpy(&master, &bits, 4);                                                                            \
        float first = exp_avg[i] + weight1 * (g - exp_avg[i]);                                                \
        float second = exp_avg_sq[i] * beta2 + weight2 * g * g;                                               \
        master = master * decay - size * first / (sqrtf(second) / root + eps);                                \
        memcpy(&bits, &master, 4);                                                                            \
        int32_t rounded = (bits + 0x8000) >> 16;                                                              \
        high[i] = (int16_t)rounded;                                                                           \
        remainder[i] = (int16_t)(bits - (int32_t)((uint32_t)rounded << 16));                                  \
        exp_avg[i] = first;                                                                                   \
        exp_avg_sq[i] = second;                                                                               \
    }                                                                                                         \
}

STEP(step_float32, float, g = grad[i])
STEP(step_bfloat16, uint16_t, uint32_t wide = (uint32_t)grad[i] << 16; memcpy(&g, &wide, 4))
