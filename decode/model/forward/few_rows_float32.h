// States in float32, with AVX2. Products also with AVX-512: half of the instructions, the same sums.
//
// Packed weights: [out / 16][in][16] in float32. Or, where every weight is a number of bfloat16,
// [out / 16][in][8][2] in bfloat16: output i beside output i + 8, so that a shift and a mask make
// two vectors of float32. That is half of the memory to read, and the same sums. On processors with
// AVX512-VBMI2 in 12 bits. In bytes: [out / 16][in][16] and after them 16 scales in float32. Or in the
// form of a quantised file.

using Number = float;     // of states, keys, values and norms
constexpr int WIDTH = 8;  // numbers of a vector
#ifdef __AVX512F__
constexpr int MOST = 12;  // rows of one turn: a tree of 8 nodes and its root, and some more
#else
constexpr int MOST = 6;  // rows whose sums fit into registers
#endif
typedef float Floats __attribute__((vector_size(32)));

constexpr int WHOLE = 0, HALF = 1, BYTES = 2, TWELVE = 10;

// How far ahead of a read its memory is asked for, in bytes: into L2, and from there into L1. For one or
// two rows several blocks are read at once, and the processor finds their way into L2 itself.
constexpr int FAR = 6144, NEAR = 1024;

// 16 numbers: the outputs of a block for one input.
#ifdef __AVX512F__
using Sixteen = __m512;
inline Sixteen of_floats(const float* p) { return _mm512_loadu_ps(p); }
inline Sixteen of_small_floats(const char* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline Sixteen of_bytes(__m128i x) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(x)); }
// Of outputs side by side with those 8 later.
inline Sixteen of_halves(__m256i x) {
  const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  return _mm512_castsi512_ps(_mm512_permutexvar_epi32(order, _mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)));
}
inline Sixteen times(Sixteen x, Sixteen y) { return _mm512_mul_ps(x, y); }
inline Sixteen times_and(Sixteen x, Sixteen y, Sixteen z) { return _mm512_fmadd_ps(x, y, z); }
inline void add_product(Sixteen& sum, Sixteen x, const float* y) { sum = _mm512_fmadd_ps(x, _mm512_set1_ps(*y), sum); }
inline void store_sixteen(float* y, Sixteen x) { _mm512_storeu_ps(y, x); }
#else
struct Sixteen {
  __m256 low, high;
};
inline Sixteen of_floats(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline Sixteen of_small_floats(const char* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
inline __m256 of_eight_bytes(__m128i x) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)); }
inline Sixteen of_bytes(__m128i x) { return {of_eight_bytes(x), of_eight_bytes(_mm_unpackhi_epi64(x, x))}; }
// Of outputs side by side with those 8 later.
inline Sixteen of_halves(__m256i x) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000))))};
}
inline Sixteen times(Sixteen x, Sixteen y) { return {_mm256_mul_ps(x.low, y.low), _mm256_mul_ps(x.high, y.high)}; }
inline Sixteen times_and(Sixteen x, Sixteen y, Sixteen z) {
  return {_mm256_fmadd_ps(x.low, y.low, z.low), _mm256_fmadd_ps(x.high, y.high, z.high)};
}
inline void add_product(Sixteen& sum, Sixteen x, const float* y) {
  const __m256 row = _mm256_broadcast_ss(y);
  sum = times_and(x, {row, row}, sum);
}
inline void store_sixteen(float* y, Sixteen x) { _mm256_storeu_ps(y, x.low), _mm256_storeu_ps(y + 8, x.high); }
#endif

#include "few_rows_own_forms.h"
#ifdef __AVX512VBMI2__
#include "few_rows_twelve_bits.h"
#endif

constexpr bool is_own(int form) { return form >= FIRST_OWN && form < TWELVE; }

// Blocks at once. Making numbers of codes keeps the units busy too.
constexpr int together(int64_t rows, int form) {
  if (is_own(form)) return rows <= 2 ? 2 : 1;
  return rows == 1 ? 4 : rows == 2 ? 2 : 1;
}

// Whether the numbers of a part of a block are made once for all rows, if there are so many. Those in 12 bits are
// made faster than they are read again.
constexpr bool makes_once(int64_t rows, int form) { return is_own(form) && rows > MOST; }

inline int64_t block_bytes(const char* block, int64_t in, int form) {
#ifdef __AVX512VBMI2__
  if (form == TWELVE) return ((const Head*)block)->bytes + in / 8 * GROUP_BYTES;
#endif
  if (is_own(form)) {
    const OwnForm own = OWN_FORMS[form - FIRST_OWN];
    return in / own.group * group_bytes(own);
  }
  return 2 * WIDTH * (form == BYTES ? in + 4 : form == HALF ? in * 2 : in * 4);
}

// Eight bytes as whole numbers.
inline __m256i widened(const __m128i* x) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64(x)); }

inline Floats load(const Number* x) { return (Floats)_mm256_loadu_ps(x); }
inline void store(Number* y, Floats x) { _mm256_storeu_ps(y, (__m256)x); }
inline float wide(Number x) { return x; }
inline Number narrow(float x) { return x; }

inline float sum_of(Floats x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

inline float largest_of(Floats x) {
  float most = x[0];
  for (int k = 1; k < WIDTH; k++) most = std::max(most, x[k]);
  return most;
}

// The sums of each of four vectors.
inline __m128 sums_of(const Floats* x) {
  const __m256 low = _mm256_hadd_ps((__m256)x[0], (__m256)x[1]);
  const __m256 high = _mm256_hadd_ps((__m256)x[2], (__m256)x[3]);
  const __m256 both = _mm256_hadd_ps(low, high);
  return _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
}

// The products of Q queries with 8 keys, of `size` numbers, a multiple of 8: y [Q].
template <int Q>
inline void dots(const Number* const* queries, const Number* const* keys, int64_t size, Floats* y) {
  __m128 found[2][Q];
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    Floats sums[Q][4] = {};
    for (int64_t k = 0; k < size; k += WIDTH) {
      Floats numbers[Q];
#pragma GCC unroll 3
      for (int j = 0; j < Q; j++) numbers[j] = load(queries[j] + k);
#pragma GCC unroll 4
      for (int s = 0; s < 4; s++) {
        const Floats key = load(keys[4 * half + s] + k);
#pragma GCC unroll 3
        for (int j = 0; j < Q; j++) sums[j][s] = numbers[j] * key + sums[j][s];
      }
    }
    for (int j = 0; j < Q; j++) found[half][j] = sums_of(sums[j]);
  }
  for (int j = 0; j < Q; j++) y[j] = (Floats)_mm256_set_m128(found[1][j], found[0][j]);
}

template <int N, int M, int FORM>
inline void sums_in(const char* const* weights, const Number* x, int64_t in, float* y) {
  Sixteen found[M][N] = {};
  for (int64_t k = 0; k < in; k++)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const char* p = weights[m] + k * (FORM == BYTES ? 16 : FORM == HALF ? 32 : 64);
      const Sixteen some = FORM == BYTES  ? of_bytes(_mm_loadu_si128((const __m128i*)p))
                           : FORM == HALF ? of_halves(_mm256_loadu_si256((const __m256i*)p))
                                          : of_floats((const float*)p);
      if (FORM == WHOLE || k % 2 == 0) {  // once a cache line
        if (N > 2) _mm_prefetch(p + FAR, _MM_HINT_T1);
        _mm_prefetch(p + NEAR, _MM_HINT_T0);
      }
#pragma GCC unroll 12
      for (int j = 0; j < N; j++) add_product(found[m][j], some, x + j * in + k);
    }
#pragma GCC unroll 12
  for (int j = 0; j < N; j++)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      if constexpr (FORM == BYTES) found[m][j] = times(found[m][j], of_floats((const float*)(weights[m] + in * 16)));
      store_sixteen(y + (j * M + m) * 16, found[m][j]);
    }
}

#ifdef __AVX512VBMI2__
template <int N, int M>
inline void sums_of_twelve_bits(const char* const* weights, const Number* x, int64_t in, float* y) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
  Sixteen found[M][N] = {};
  Words words[M];
#pragma GCC unroll 4
  for (int m = 0; m < M; m++) words[m].begin(weights[m]);
  for (int64_t group = 0; group < in / 8; group++)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++)
      words[m].next(group, true, [&](int n, __m512i first, __m512i second) __attribute__((always_inline)) {
        const __m512i some[] = {_mm512_slli_epi32(first, 16), _mm512_and_si512(first, upper),
                                _mm512_slli_epi32(second, 16), _mm512_and_si512(second, upper)};
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
          const int64_t k = group * 8 + n * 4 + i;
#pragma GCC unroll 12
          for (int j = 0; j < N; j++) add_product(found[m][j], _mm512_castsi512_ps(some[i]), x + j * in + k);
        }
      });
#pragma GCC unroll 12
  for (int j = 0; j < N; j++)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) store_sixteen(y + (j * M + m) * 16, found[m][j]);
}
#endif

// The sums of N rows x [·, in] with M blocks of weights: y [N][M · 16].
template <int N, int M>
inline void sums(const char* const* weights, int form, const Number* x, int64_t in, float* y) {
  switch (form) {
    case BYTES: return sums_in<N, M, BYTES>(weights, x, in, y);
    case HALF: return sums_in<N, M, HALF>(weights, x, in, y);
    case WHOLE: return sums_in<N, M, WHOLE>(weights, x, in, y);
#ifdef __AVX512VBMI2__
    case TWELVE: return sums_of_twelve_bits<N, M>(weights, x, in, y);
#endif
#define SUMS(FORM) \
  case FORM:       \
    if constexpr (M <= together(N, FORM)) return sums_of_codes<N, M, FORM>(weights, x, in, y);
    EVERY_OWN_FORM(SUMS)
#undef SUMS
  }
}

constexpr int PART = 192, SHORT_PART = PART;  // inputs whose numbers are made at once

// A block of codes, read in parts.
struct Parts {
  const char* p;
  int form;

  Parts(const char* block, int form, int groups) : p(block), form(form) {}

  // Adds the products of N rows x [·, in] with the numbers of the next inputs: y [N][16]. made: those numbers, which
  // the first rows make.
  template <int N, bool MAKES>
  void add(char* made, const Number* x, int64_t in, int64_t inputs, float* y) {
    if (!MAKES) return add_of<N, WHOLE>((float*)made, x, in, inputs, y);
    switch (form) {
#define ADD(FORM) \
  case FORM: return add_of<N, FORM>((float*)made, x, in, inputs, y);
      EVERY_OWN_FORM(ADD)
#undef ADD
    }
  }

  template <int N, int FORM>
  void add_of(float* made, const Number* x, int64_t in, int64_t inputs, float* y) {
    Sixteen found[N];
#pragma GCC unroll 12
    for (int j = 0; j < N; j++) found[j] = of_floats(y + j * 16);
    auto use = [&](int64_t k, Sixteen some) __attribute__((always_inline)) {
#pragma GCC unroll 12
      for (int j = 0; j < N; j++) add_product(found[j], some, x + j * in + k);
    };
    if constexpr (FORM == WHOLE) {
      for (int64_t k = 0; k < inputs; k++) use(k, of_floats(made + k * 16));
    } else {
      constexpr OwnForm own = OWN_FORMS[FORM - FIRST_OWN];
      for (int64_t begin = 0; begin < inputs; begin += own.group, p += group_bytes(own)) {
        ask_for(p, group_bytes(own));
        each_input<FORM>(p, [&](int k, Sixteen some) __attribute__((always_inline)) {
          store_sixteen(made + (begin + k) * 16, some);
          use(begin + k, some);
        });
      }
    }
#pragma GCC unroll 12
    for (int j = 0; j < N; j++) store_sixteen(y + j * 16, found[j]);
  }
};

// The operations of a turn of `multiplied`, whose numbers stay in registers.
constexpr int64_t OPERATIONS = 2 * MOST * 16;

inline float multiplied(int64_t turns, float start) {
  float numbers[16];
  Sixteen sums[MOST];
  // They differ, or a compiler would make one of them.
#pragma GCC unroll 12
  for (int j = 0; j < MOST; j++) std::fill(numbers, numbers + 16, start * j), sums[j] = of_floats(numbers);
  const Sixteen x = sums[1];
  for (int64_t turn = 0; turn < turns; turn++)
#pragma GCC unroll 12
    for (int j = 0; j < MOST; j++) sums[j] = times_and(x, x, sums[j]);
  float found = 0;
#pragma GCC unroll 12
  for (int j = 0; j < MOST; j++) {
    store_sixteen(numbers, sums[j]);
    for (float number : numbers) found += number;  // all, or a compiler leaves out what nobody reads
  }
  return found;
}
