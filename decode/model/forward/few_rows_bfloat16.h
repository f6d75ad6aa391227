// States in bfloat16, with AVX512-BF16.
//
// Packed weights: [out / 32][in / 2][32][2], pairs of inputs side by side, as `vdpbf16ps` reads them.
// In bytes: for each pair of inputs 64 bytes of weights from -63 to 63, stored as 64 more, and after
// them 32 scales in float32. A byte b beside 0x43 is the bfloat16 number 128 + b, so one instruction
// makes 32 numbers, and each weight is 192 too large: 192 times the sum of the states is taken off.
// On processors with AVX512-VBMI2 also in 12 bits.

using Number = uint16_t;  // of states, keys, values and norms
constexpr int WIDTH = 16;  // numbers of a vector
constexpr int MOST = 12;   // rows whose sums fit into registers
typedef float Floats __attribute__((vector_size(64)));

constexpr int WHOLE = 1, BYTES = 2, TWELVE = 10;

// How far ahead of a read its memory is asked for, in bytes: into L2, and from there into L1. Weights in 12 bits
// come from FAR into L1 alone.
constexpr int FAR = 8192, NEAR = 1024;

#ifdef __AVX512VBMI2__
#include "few_rows_twelve_bits.h"
#endif

// Blocks at once. Making words of codes keeps the units busy too.
constexpr int together(int64_t rows, int form) {
  return form == TWELVE ? 1 : rows == 1 ? 4 : rows <= 3 ? 2 : 1;
}

// Whether the numbers of a part of a block are made once for all rows, if there are so many.
constexpr bool makes_once(int64_t rows, int form) { return form == TWELVE && rows > MOST; }

inline int64_t block_bytes(const char* block, int64_t in, int form) {
#ifdef __AVX512VBMI2__
  if (form == TWELVE) return ((const Head*)block)->bytes + in * 48;
#endif
  return form == BYTES ? (in + 4) * 2 * WIDTH : in * 2 * 2 * WIDTH;
}

inline Floats load(const Number* x) {
  return (Floats)_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

// 16 bytes as whole numbers.
inline __m512i widened(const __m128i* x) { return _mm512_cvtepu8_epi32(_mm_loadu_si128(x)); }

inline void store(Number* y, Floats x) {
  _mm256_storeu_si256((__m256i*)y, (__m256i)_mm512_cvtneps_pbh((__m512)x));
}

inline float wide(Number x) {
  uint32_t bits = uint32_t(x) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}

inline Number narrow(float x) {
  Number y[16];
  store(y, (Floats)_mm512_set1_ps(x));
  return y[0];
}

inline float sum_of(Floats x) { return _mm512_reduce_add_ps((__m512)x); }
inline float largest_of(Floats x) { return _mm512_reduce_max_ps((__m512)x); }

// Two vectors whose sums, of these parts of each, are the parts' sums of a and b.
#define HALVES_OF_PAIRS(shuffle, a, b, low, high) \
  _mm512_add_ps(shuffle(a, b, low), shuffle(a, b, high))

// The products of Q queries with 16 keys, of `size` numbers, a multiple of 32: y [Q]. Each is summed in
// the order of `_mm512_reduce_add_ps`, 16 of them together.
template <int Q>
inline void dots(const Number* const* queries, const Number* const* keys, int64_t size, Floats* y) {
  __m512 quarter[Q][4];  // of each query and four keys: four numbers a key
#pragma GCC unroll 4
  for (int s = 0; s < 4; s++) {
    __m512 sums[Q][4] = {};
    for (int64_t k = 0; k < size; k += 32)
#pragma GCC unroll 4
      for (int n = 0; n < 4; n++) {
        const __m512bh key = (__m512bh)_mm512_loadu_si512(keys[4 * s + n] + k);
#pragma GCC unroll 3
        for (int j = 0; j < Q; j++)
          sums[j][n] = _mm512_dpbf16_ps(sums[j][n], (__m512bh)_mm512_loadu_si512(queries[j] + k), key);
      }
#pragma GCC unroll 3
    for (int j = 0; j < Q; j++) {
      const __m512 low = HALVES_OF_PAIRS(_mm512_shuffle_f32x4, sums[j][0], sums[j][1], 0x44, 0xee);
      const __m512 high = HALVES_OF_PAIRS(_mm512_shuffle_f32x4, sums[j][2], sums[j][3], 0x44, 0xee);
      quarter[j][s] = HALVES_OF_PAIRS(_mm512_shuffle_f32x4, low, high, 0x88, 0xdd);
    }
  }
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 3
  for (int j = 0; j < Q; j++) {
    const __m512 low = HALVES_OF_PAIRS(_mm512_shuffle_ps, quarter[j][0], quarter[j][1], 0x44, 0xee);
    const __m512 high = HALVES_OF_PAIRS(_mm512_shuffle_ps, quarter[j][2], quarter[j][3], 0x44, 0xee);
    const __m512 found = HALVES_OF_PAIRS(_mm512_shuffle_ps, low, high, 0x88, 0xdd);
    y[j] = (Floats)_mm512_permutexvar_ps(order, found);
  }
}

// The sum of the numbers of a row.
inline float total(const Number* x, int64_t in) {
  Floats sum = {};
  int64_t k = 0;
  for (; k + WIDTH <= in; k += WIDTH) sum += load(x + k);
  float rest = 0;
  for (; k < in; k++) rest += wide(x[k]);
  return sum_of(sum) + rest;
}

// Adds the products of N rows x [·, in] with the weights of two inputs.
template <int N>
inline __attribute__((always_inline)) void add_pair(__m512* low, __m512* high, const Number* x, int64_t in,
                                                    __m512i some, __m512i more) {
#pragma GCC unroll 12
  for (int j = 0; j < N; j++) {
    int pair;
    std::memcpy(&pair, x + j * in, 4);
    const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
    low[j] = _mm512_dpbf16_ps(low[j], (__m512bh)some, both);
    high[j] = _mm512_dpbf16_ps(high[j], (__m512bh)more, both);
  }
}

template <int N, int M, int FORM>
inline void sums_in(const char* const* weights, const Number* x, int64_t in, float* y) {
  constexpr bool BYTE = FORM == BYTES;
  const __m512i upper = _mm512_set1_epi8(0x43);
  __m512 low[M][N], high[M][N];
#pragma GCC unroll 4
  for (int m = 0; m < M; m++)
#pragma GCC unroll 12
    for (int j = 0; j < N; j++) low[m][j] = high[m][j] = _mm512_setzero_ps();
#ifdef __AVX512VBMI2__
  if constexpr (FORM == TWELVE) {
    Words words;
    words.begin(weights[0]);
    for (int64_t group = 0; group < in / 4; group++)
      words.next(group, true, [&](int n, auto some, auto more) __attribute__((always_inline)) {
        add_pair<N>(low[0], high[0], x + group * 4 + n * 2, in, some, more);
      });
  } else
#endif
  for (int64_t k = 0; k < in; k += 2)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const char* p = weights[m] + k * (BYTE ? 32 : 64);
      __m512i some = _mm512_loadu_si512(p), more;
      if constexpr (BYTE) {
        more = _mm512_unpackhi_epi8(some, upper);
        some = _mm512_unpacklo_epi8(some, upper);
      } else {
        more = _mm512_loadu_si512(p + 64);
        _mm_prefetch(p + FAR + 64, _MM_HINT_T1);
        _mm_prefetch(p + NEAR + 64, _MM_HINT_T0);
      }
      _mm_prefetch(p + FAR, _MM_HINT_T1);
      _mm_prefetch(p + NEAR, _MM_HINT_T0);
      add_pair<N>(low[m], high[m], x + k, in, some, more);
    }
#pragma GCC unroll 12
  for (int j = 0; j < N; j++) {
    const __m512 over = BYTE ? _mm512_set1_ps(192 * total(x + j * in, in)) : _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      if constexpr (BYTE) {
        const float* scales = (const float*)(weights[m] + in * 32);
        low[m][j] = _mm512_mul_ps(_mm512_sub_ps(low[m][j], over), _mm512_loadu_ps(scales));
        high[m][j] = _mm512_mul_ps(_mm512_sub_ps(high[m][j], over), _mm512_loadu_ps(scales + 16));
      }
      _mm512_storeu_ps(y + (j * M + m) * 32, low[m][j]);
      _mm512_storeu_ps(y + (j * M + m) * 32 + 16, high[m][j]);
    }
  }
}

// The sums of N rows x [·, in] with M blocks of weights: y [N][M · 32].
template <int N, int M>
inline void sums(const char* const* weights, int form, const Number* x, int64_t in, float* y) {
#ifdef __AVX512VBMI2__
  if constexpr (M == 1)
    if (form == TWELVE) return sums_in<N, M, TWELVE>(weights, x, in, y);
#endif
  if (form == BYTES) sums_in<N, M, BYTES>(weights, x, in, y);
  else sums_in<N, M, WHOLE>(weights, x, in, y);
}

constexpr int PART = 576, SHORT_PART = 192;  // inputs whose words are made at once

// A block in 12 bits, read in parts.
struct Parts {
#ifdef __AVX512VBMI2__
  Words words;
  const char* ahead;  // what memory is asked for next
  int64_t group = 0, step;

  // groups: of rows that a part is multiplied with, one after the other. Two ask for a half each of what comes, of more
  // the first one asks: so much would come in the time of the others that it pushes the words out of L1.
  Parts(const char* block, int form, int groups) : step(groups == 2 ? 48 : 0) {
    words.begin(block);
    ahead = words.p + FAR;
  }

  // Adds the products of N rows x [·, in] with the weights of the next inputs: y [N][32]. made: those weights as
  // `WHOLE` has them, which the first rows make.
  template <int N, bool MAKES>
  void add(char* made, const Number* x, int64_t in, int64_t inputs, float* y) {
    __m512 low[N], high[N];
    Words from = words;
    const char* ask = ahead;
#pragma GCC unroll 12
    for (int j = 0; j < N; j++) low[j] = _mm512_loadu_ps(y + j * 32), high[j] = _mm512_loadu_ps(y + j * 32 + 16);
    auto use = [&](int64_t k, __m512i some, __m512i more) __attribute__((always_inline)) {
      _mm_prefetch(ask, _MM_HINT_T0);
      ask += step;
      add_pair<N>(low, high, x + k, in, some, more);
    };
    if constexpr (MAKES) {
      for (int64_t k = 0; k < inputs; k += 4)
        from.next(group++, !step, [&](int n, __m512i some, __m512i more) __attribute__((always_inline)) {
          char* y = made + (k + 2 * n) * 64;
          _mm512_store_si512(y, some), _mm512_store_si512(y + 64, more);
          use(k + 2 * n, some, more);
        });
      words = from;
    } else {
      for (int64_t k = 0; k < inputs; k += 2)
        use(k, _mm512_load_si512(made + k * 64), _mm512_load_si512(made + k * 64 + 64));
    }
    ahead = ask;
#pragma GCC unroll 12
    for (int j = 0; j < N; j++) _mm512_storeu_ps(y + j * 32, low[j]), _mm512_storeu_ps(y + j * 32 + 16, high[j]);
  }
#else  // no block is in 12 bits, so none is read in parts
  Parts(const char* block, int form, int groups) {}
  template <int N, bool MAKES>
  void add(char* made, const Number* x, int64_t in, int64_t inputs, float* y) {}
#endif
};

#ifdef __AMX_BF16__
#include "few_rows_tiles.h"
#endif

// The operations of a turn of `multiplied`, whose numbers stay in registers.
constexpr int64_t VECTOR_OPERATIONS = 2 * 2 * MOST * 32;
#ifdef __AMX_BF16__
const int64_t OPERATIONS = HAS_TILES ? TILE_OPERATIONS : VECTOR_OPERATIONS;
#else
constexpr int64_t OPERATIONS = VECTOR_OPERATIONS;
#endif

inline float multiplied(int64_t turns, float start) {
#ifdef __AMX_BF16__
  if (HAS_TILES) return multiplied_in_tiles(turns, narrow(start));
#endif
  const __m512bh x = (__m512bh)_mm512_set1_epi32(narrow(start) * 0x10001);
  __m512 sums[2 * MOST];
  for (int j = 0; j < 2 * MOST; j++) sums[j] = _mm512_set1_ps(start * j);
  for (int64_t turn = 0; turn < turns; turn++)
#pragma GCC unroll 24
    for (int j = 0; j < 2 * MOST; j++) sums[j] = _mm512_dpbf16_ps(sums[j], x, x);
  for (int j = 1; j < 2 * MOST; j++) sums[0] += sums[j];
  return sum_of((Floats)sums[0]);
}
