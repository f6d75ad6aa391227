// Products and whole decoder layers for few rows, in bfloat16 with AVX512-BF16.
//
// At few rows a product is bound by the speed at which weights are read. Here each block of 32
// outputs is multiplied with all rows while it is in the cache, and its sums stay in registers.
// Every sum has the same order for any number of rows, so a row has the bits that it has alone.
//
// Packed weights: [out / 32][in / 2][32][2], pairs of inputs side by side, as `vdpbf16ps` reads them.
// Shapes: B texts, n tokens of each, R = B·n rows, H hidden size, N query heads, K key heads,
// D head size, S slots that attention gets.

#include <immintrin.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

using bf16 = uint16_t;
constexpr int OUT = 32;   // outputs of a block
constexpr int MOST = 12;  // rows whose sums fit into registers

inline float wide(bf16 x) {
  uint32_t bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline __m512 wide16(const bf16* x) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

inline void narrow16(bf16* y, __m512 x) {
  _mm256_storeu_si256((__m256i*)y, (__m256i)_mm512_cvtneps_pbh(x));
}

inline bf16 narrow(float x) {
  bf16 y[16];
  narrow16(y, _mm512_set1_ps(x));
  return y[0];
}

// e^x: 2^k · e^r with |r| ≤ ln 2 / 2. The error is below 2 units of the last place.
inline __m512 exp16(__m512 x) {
  x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
  x = _mm512_min_ps(x, _mm512_set1_ps(88.7f));
  __m512 k = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
  __m512 r = _mm512_fnmadd_ps(k, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(k, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(p, k);
}

inline __m512 silu16(__m512 x) {
  __m512 down = exp16(_mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), down));
}

// The sums of N rows x [·, in] with M blocks of weights: y [N][M · 32].
template <int N, int M>
inline void sums(const char* const* weights, const bf16* x, int64_t in, float* y) {
  __m512 low[M][N], high[M][N];
#pragma GCC unroll 4
  for (int m = 0; m < M; m++)
#pragma GCC unroll 12
    for (int j = 0; j < N; j++) low[m][j] = high[m][j] = _mm512_setzero_ps();
  for (int64_t k = 0; k < in; k += 2)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const char* p = weights[m] + k * 64;
      __m512bh first = (__m512bh)_mm512_loadu_si512(p);
      __m512bh second = (__m512bh)_mm512_loadu_si512(p + 64);
      _mm_prefetch(p + 1024, _MM_HINT_T0);
      _mm_prefetch(p + 1088, _MM_HINT_T0);
#pragma GCC unroll 12
      for (int j = 0; j < N; j++) {
        int pair;
        std::memcpy(&pair, x + j * in + k, 4);
        __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
        low[m][j] = _mm512_dpbf16_ps(low[m][j], first, both);
        high[m][j] = _mm512_dpbf16_ps(high[m][j], second, both);
      }
    }
#pragma GCC unroll 12
  for (int j = 0; j < N; j++)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      _mm512_storeu_ps(y + (j * M + m) * OUT, low[m][j]);
      _mm512_storeu_ps(y + (j * M + m) * OUT + 16, high[m][j]);
    }
}

template <int M>
void sums_of(int rows, const char* const* weights, const bf16* x, int64_t in, float* y) {
  switch (rows) {
#define ROWS(N) \
  case N:       \
    return sums<N, M>(weights, x, in, y);
    ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#undef ROWS
  }
  if constexpr (M == 1) switch (rows) {
#define ROWS(N) \
  case N:       \
    return sums<N, 1>(weights, x, in, y);
      ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#undef ROWS
    }
}

// The share of `count` that a thread has.
struct Share {
  int64_t begin, end;
  explicit Share(int64_t count) {
    int64_t part = omp_get_thread_num(), parts = omp_get_num_threads();
    begin = count * part / parts;
    end = count * (part + 1) / parts;
  }
};

enum Mode { PLAIN, ADD, MULTIPLY, SWISH };

// Writes a thread's blocks of y = x · W + b, with another tensor added or multiplied, or the SiLU.
void product_share(const bf16* x, const char* weights, const bf16* bias, const bf16* other, bf16* y,
                   int64_t rows, int64_t in, int64_t out, int mode) {
  Share share(out / OUT);
  // Few rows have few sums: several blocks at once keep the units busy.
  const int together = rows == 1 ? 4 : rows <= 3 ? 2 : 1;
  alignas(64) float found[MOST * 4 * OUT];
  for (int64_t block = share.begin; block < share.end;) {
    int count = int(std::min<int64_t>(together, share.end - block));
    if (count == 3) count = 2;
    const char* from[4];
    for (int m = 0; m < count; m++) from[m] = weights + (block + m) * in * 2 * OUT;
    for (int64_t row = 0; row < rows; row += MOST) {
      int some = int(std::min<int64_t>(MOST, rows - row));
      if (count == 4) sums_of<4>(some, from, x + row * in, in, found);
      else if (count == 2) sums_of<2>(some, from, x + row * in, in, found);
      else sums_of<1>(some, from, x + row * in, in, found);
      for (int j = 0; j < some; j++)
        for (int m = 0; m < count; m++)
          for (int half = 0; half < OUT; half += 16) {
            int64_t column = (block + m) * OUT + half, place = (row + j) * out + column;
            __m512 sum = _mm512_load_ps(found + (j * count + m) * OUT + half);
            if (bias) sum = _mm512_add_ps(sum, wide16(bias + column));
            if (mode == ADD) sum = _mm512_add_ps(sum, wide16(other + place));
            if (mode == MULTIPLY) sum = _mm512_mul_ps(sum, wide16(other + place));
            if (mode == SWISH) sum = silu16(sum);
            narrow16(y + place, sum);
          }
    }
    block += count;
  }
}

// RMS norm times (weight + offset): y [rows, size].
void normed(const bf16* x, const bf16* weight, float offset, float eps, bf16* y, int64_t rows,
            int64_t size) {
  for (int64_t row = 0; row < rows; row++, x += size, y += size) {
    __m512 squares = _mm512_setzero_ps();
    int64_t k = 0;
    for (; k + 16 <= size; k += 16) {
      __m512 v = wide16(x + k);
      squares = _mm512_fmadd_ps(v, v, squares);
    }
    float sum = _mm512_reduce_add_ps(squares);
    for (; k < size; k++) sum += wide(x[k]) * wide(x[k]);
    float factor = 1.0f / std::sqrt(sum / size + eps);
    for (k = 0; k + 16 <= size; k += 16) {
      __m512 gain = _mm512_add_ps(wide16(weight + k), _mm512_set1_ps(offset));
      narrow16(y + k, _mm512_mul_ps(_mm512_mul_ps(wide16(x + k), _mm512_set1_ps(factor)), gain));
    }
    for (; k < size; k++) y[k] = narrow(wide(x[k]) * factor * (wide(weight[k]) + offset));
  }
}

}  // namespace

extern "C" {

// input: how many numbers attention reads of a row. They are the normed states, or where
// `attention_norm` is null what the caller gives.
struct Layer {
  const bf16 *attention_norm, *mlp_norm, *query_norm, *key_norm, *qkv_bias;
  const char *qkv, *out, *gate, *up, *down;
  float attention_eps, mlp_eps, head_eps, attention_offset, mlp_offset, head_offset, scale;
  int32_t rotates;
  int64_t hidden, inner, query_heads, key_heads, head, input;
};

// What all layers of a pass share. cos, sin: [B or 1, n, rotated], for that many numbers of a
// head, with the sign of sin's first half turned. mask: additive, [B or 1, n, S]. first: the slot of each text's first token, or null if
// all have `begin`. read: the slots that attention gets, [B, S], or null for those from `from` on.
struct Pass {
  int64_t texts, tokens, slots, from, begin;
  const bf16 *cos, *sin, *mask;
  const int64_t *first, *read;
  int64_t rotation_text, rotation_token, mask_text, mask_token, read_text;
  int64_t cache_text, cache_head, rotated;
  bf16 *normed, *qkv, *mixed, *gated, *between;  // scratch: rows of H, (N+2K)·D, N·D, I, H
};

static void turn(bf16* head, const bf16* cos, const bf16* sin, int64_t size) {
  int64_t half = size / 2, k = 0;
  for (; k + 16 <= half; k += 16) {
    bf16 products[32];
    __m512 a = wide16(head + k), b = wide16(head + k + half);
    // As the products of bfloat16 tensors are rounded.
    narrow16(products, _mm512_mul_ps(a, wide16(cos + k)));
    narrow16(products + 16, _mm512_mul_ps(b, wide16(cos + k + half)));
    narrow16(head + k, _mm512_fmadd_ps(b, wide16(sin + k), wide16(products)));
    narrow16(head + k + half, _mm512_fmadd_ps(a, wide16(sin + k + half), wide16(products + 16)));
  }
  for (; k < half; k++) {
    float a = wide(head[k]), b = wide(head[k + half]);
    head[k] = narrow(wide(narrow(a * wide(cos[k]))) + b * wide(sin[k]));
    head[k + half] = narrow(wide(narrow(b * wide(cos[k + half]))) + a * wide(sin[k + half]));
  }
}

// Of S slots, how many there are up to the last that a token sees. Texts of a batch end in different
// slots, and the rest of the longest is hidden from the others.
static int64_t seen_slots(const bf16* mask, int64_t slots) {
  const bf16 hidden = 0xFF7F;  // the lowest number
  const __m512i every = _mm512_set1_epi16(short(hidden));
  while (slots >= 32 && _mm512_cmpneq_epi16_mask(_mm512_loadu_si512(mask + slots - 32), every) == 0)
    slots -= 32;
  while (slots > 1 && mask[slots - 1] == hidden) slots--;
  return slots;
}

// One token's attention in one head. scores: room for S rounded up to 16.
static void attend(const bf16* query, const bf16* keys, const bf16* values, const bf16* mask,
                   const int64_t* read, int64_t slots, int64_t size, float scale, float* scores,
                   bf16* y) {
  __m512 most = _mm512_set1_ps(-INFINITY);
  slots = seen_slots(mask, slots);
  int64_t padded = (slots + 15) / 16 * 16;
  for (int64_t s = 0; s < slots; s++) {
    const bf16* key = keys + (read ? read[s] : s) * size;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < size; k += 32)
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(query + k),
                             (__m512bh)_mm512_loadu_si512(key + k));
    scores[s] = _mm512_reduce_add_ps(sum) * scale + wide(mask[s]);
  }
  for (int64_t s = slots; s < padded; s++) scores[s] = -INFINITY;
  for (int64_t s = 0; s < padded; s += 16) most = _mm512_max_ps(most, _mm512_loadu_ps(scores + s));
  __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most)), total = _mm512_setzero_ps();
  for (int64_t s = 0; s < padded; s += 16) {
    __m512 apart = _mm512_sub_ps(_mm512_loadu_ps(scores + s), top);
    // A masked slot has no weight at all.
    __mmask16 seen = _mm512_cmp_ps_mask(apart, _mm512_set1_ps(-104.0f), _CMP_GT_OQ);
    __m512 weight = _mm512_maskz_mov_ps(seen, exp16(apart));
    _mm512_storeu_ps(scores + s, weight);
    total = _mm512_add_ps(total, weight);
  }
  __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(total));
  for (int64_t k = 0; k < size; k += 32) {
    __m512 low = _mm512_setzero_ps(), high = _mm512_setzero_ps();
    for (int64_t s = 0; s < slots; s++) {
      if (scores[s] == 0.0f) continue;
      const bf16* value = values + (read ? read[s] : s) * size + k;
      __m512 weight = _mm512_set1_ps(scores[s]);
      low = _mm512_fmadd_ps(weight, wide16(value), low);
      high = _mm512_fmadd_ps(weight, wide16(value + 16), high);
    }
    narrow16(y + k, _mm512_mul_ps(low, share));
    narrow16(y + k + 16, _mm512_mul_ps(high, share));
  }
}

// x · Wᵀ + b: y [rows, out].
void product(const bf16* x, const char* weights, const bf16* bias, const bf16* other, bf16* y,
             int64_t rows, int64_t in, int64_t out, int32_t mode) {
#pragma omp parallel if (in * out > 1 << 14)
  product_share(x, weights, bias, other, y, rows, in, out, mode);
}

// The part of a layer before attention: queries in `pass->qkv`, keys and values in their slots.
// x: the states, or the input of attention.
void layer_begins(const Layer* layer, const Pass* pass, const bf16* x, bf16* keys, bf16* values) {
  const int64_t rows = pass->texts * pass->tokens, size = layer->head;
  const int64_t heads = layer->query_heads + 2 * layer->key_heads, width = heads * size;
  const bf16* input = layer->attention_norm ? pass->normed : x;
#pragma omp parallel
  {
    if (layer->attention_norm) {
#pragma omp for
      for (int64_t row = 0; row < rows; row++)
        normed(x + row * layer->hidden, layer->attention_norm, layer->attention_offset,
               layer->attention_eps, pass->normed + row * layer->hidden, 1, layer->hidden);
    }
    product_share(input, layer->qkv, layer->qkv_bias, nullptr, pass->qkv, rows, layer->input, width,
                  PLAIN);
#pragma omp barrier
#pragma omp for
    for (int64_t item = 0; item < rows * heads; item++) {
      int64_t row = item / heads, number = item % heads;
      int64_t text = row / pass->tokens, token = row % pass->tokens;
      bf16* head = pass->qkv + row * width + number * size;
      bool is_query = number < layer->query_heads;
      bool is_value = number >= layer->query_heads + layer->key_heads;
      const bf16* norm = is_query ? layer->query_norm : is_value ? nullptr : layer->key_norm;
      if (norm) normed(head, norm, layer->head_offset, layer->head_eps, head, 1, size);
      if (layer->rotates && !is_value) {
        int64_t place = text * pass->rotation_text + token * pass->rotation_token;
        turn(head, pass->cos + place, pass->sin + place, pass->rotated);
      }
      if (is_query) continue;
      int64_t key_head = number - layer->query_heads - (is_value ? layer->key_heads : 0);
      int64_t slot = (pass->first ? pass->first[text] : pass->begin) + token;
      bf16* cache = is_value ? values : keys;
      std::memcpy(cache + text * pass->cache_text + key_head * pass->cache_head + slot * size, head,
                  size * sizeof(bf16));
    }
  }
}

// Attention and the rest of a layer: y [rows, H].
void layer_ends(const Layer* layer, const Pass* pass, const bf16* states, const bf16* keys,
                const bf16* values, bf16* y, int32_t attention, int32_t mlp) {
  const int64_t rows = pass->texts * pass->tokens, size = layer->head, hidden = layer->hidden;
  const int64_t width = (layer->query_heads + 2 * layer->key_heads) * size;
  const int64_t mixed = layer->query_heads * size, group = layer->query_heads / layer->key_heads;
  bf16* attended = mlp ? pass->between : y;
  const bf16* between = attention ? attended : states;
#pragma omp parallel
  {
    if (attention) {
      std::vector<float> scores(pass->slots + 16);
#pragma omp for schedule(dynamic, 1)
      for (int64_t item = 0; item < rows * layer->query_heads; item++) {
        int64_t row = item / layer->query_heads, number = item % layer->query_heads;
        int64_t text = row / pass->tokens, token = row % pass->tokens;
        int64_t place = text * pass->cache_text + number / group * pass->cache_head;
        const int64_t* read = pass->read ? pass->read + text * pass->read_text : nullptr;
        if (!read) place += pass->from * size;
        attend(pass->qkv + row * width + number * size, keys + place, values + place,
               pass->mask + text * pass->mask_text + token * pass->mask_token, read, pass->slots,
               size, layer->scale, scores.data(), pass->mixed + row * mixed + number * size);
      }
      product_share(pass->mixed, layer->out, nullptr, states, attended, rows, mixed, hidden, ADD);
#pragma omp barrier
    }
    if (mlp) {
#pragma omp for
      for (int64_t row = 0; row < rows; row++)
        normed(between + row * hidden, layer->mlp_norm, layer->mlp_offset, layer->mlp_eps,
               pass->normed + row * hidden, 1, hidden);
      product_share(pass->normed, layer->gate, nullptr, nullptr, pass->gated, rows, hidden,
                    layer->inner, SWISH);
      // The same thread has the same blocks of gate and up.
      product_share(pass->normed, layer->up, nullptr, pass->gated, pass->gated, rows, hidden,
                    layer->inner, MULTIPLY);
#pragma omp barrier
      product_share(pass->gated, layer->down, nullptr, between, y, rows, layer->inner, hidden, ADD);
    }
  }
}

}  // extern "C"
