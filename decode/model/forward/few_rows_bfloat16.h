// States in bfloat16, with AVX512-BF16.
//
// Packed weights: [out / 32][in / 2][32][2], pairs of inputs side by side, as `vdpbf16ps` reads them.

using Number = uint16_t;  // of states, keys, values and norms
constexpr int WIDTH = 16;  // numbers of a vector
constexpr int MOST = 12;   // rows whose sums fit into registers
constexpr Number HIDDEN = 0xFF7F;  // of an additive mask: the lowest number
typedef float Floats __attribute__((vector_size(64)));

constexpr int together(int64_t rows) { return rows == 1 ? 4 : rows <= 3 ? 2 : 1; }

inline int64_t block_bytes(int64_t in, bool) { return in * 2 * 2 * WIDTH; }

inline Floats load(const Number* x) {
  return (Floats)_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

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

// a · b of `size` numbers, a multiple of 32.
inline float dot(const Number* a, const Number* b, int64_t size) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t k = 0; k < size; k += 32)
    sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(a + k),
                           (__m512bh)_mm512_loadu_si512(b + k));
  return _mm512_reduce_add_ps(sum);
}

// The sums of N rows x [·, in] with M blocks of weights: y [N][M · 32].
template <int N, int M>
inline void sums(const char* const* weights, bool, const Number* x, int64_t in, float* y) {
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
      _mm512_storeu_ps(y + (j * M + m) * 32, low[m][j]);
      _mm512_storeu_ps(y + (j * M + m) * 32 + 16, high[m][j]);
    }
}
