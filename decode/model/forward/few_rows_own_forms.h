// Weights in the form of a quantised file: codes of 4 or 8 bits, and for each group of inputs a scale
// and, in some forms, a least number. Registers turn them into the float32 numbers that a reader of
// the file makes: scale · code is exact in float32, so a fused sum with the least number rounds as the
// reader's does, and a product has the bits that it has with these numbers.
//
// A group of one block of outputs: 16 scales, 16 least numbers, then the codes of each input. In 4 bits,
// the codes of outputs i and i + 8 share a byte.

struct OwnForm {
  int bits, group;   // of a code; inputs that share a scale
  bool least, whole;  // with least numbers; scales in float32, else in float16
};

constexpr int FIRST_OWN = 3;
// In the order of `quantised_rows.FORMS`.
constexpr OwnForm OWN_FORMS[] = {
    {4, 32, false, false}, {4, 32, true, false},  {8, 32, false, false}, {4, 32, true, true},
    {8, 32, true, true},   {8, 16, false, true}, {8, 16, true, true},
};

constexpr int scale_bytes(OwnForm own) { return 2 * WIDTH * (own.whole ? 4 : 2); }
constexpr int codes_begin(OwnForm own) { return scale_bytes(own) * (own.least ? 2 : 1); }
constexpr int group_bytes(OwnForm own) { return codes_begin(own) + own.group * 2 * WIDTH * own.bits / 8; }

// 8 scales from number `first` on.
template <int FORM>
inline __m256 scales_of(const char* p, int first) {
  if constexpr (OWN_FORMS[FORM - FIRST_OWN].whole) return _mm256_loadu_ps((const float*)p + first);
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 2 * first)));
}

// 8 weights from the first 8 codes in bytes.
template <bool LEAST>
inline __m256 numbers_of_codes(__m128i codes, __m256 scale, __m256 least) {
  __m256 whole = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
  return LEAST ? _mm256_fmadd_ps(whole, scale, least) : _mm256_mul_ps(whole, scale);
}

// Calls use(input, first 8 weights, second 8 weights) for each input of a group.
template <int FORM, typename Use>
inline __attribute__((always_inline)) void each_input(const char* p, Use use) {
  constexpr OwnForm own = OWN_FORMS[FORM - FIRST_OWN];
  const __m256 scale = scales_of<FORM>(p, 0), more_scale = scales_of<FORM>(p, WIDTH);
  __m256 least = {}, more_least = {};
  if constexpr (own.least) {
    least = scales_of<FORM>(p + scale_bytes(own), 0);
    more_least = scales_of<FORM>(p + scale_bytes(own), WIDTH);
  }
  p += codes_begin(own);
  if constexpr (own.bits == 8) {
    for (int k = 0; k < own.group; k++) {
      __m128i codes = _mm_loadu_si128((const __m128i*)(p + 16 * k));
      use(k, numbers_of_codes<own.least>(codes, scale, least),
          numbers_of_codes<own.least>(_mm_unpackhi_epi64(codes, codes), more_scale, more_least));
    }
  } else {
    const __m128i nibble = _mm_set1_epi8(15), middle = _mm_set1_epi8(8);
    for (int k = 0; k < own.group; k += 2) {
      __m128i both = _mm_loadu_si128((const __m128i*)(p + 8 * k));
      __m128i low = _mm_and_si128(both, nibble), high = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
      // Without a least number, the middle code stands for 0.
      if constexpr (!own.least) low = _mm_sub_epi8(low, middle), high = _mm_sub_epi8(high, middle);
      use(k, numbers_of_codes<own.least>(low, scale, least),
          numbers_of_codes<own.least>(high, more_scale, more_least));
      use(k + 1, numbers_of_codes<own.least>(_mm_unpackhi_epi64(low, low), scale, least),
          numbers_of_codes<own.least>(_mm_unpackhi_epi64(high, high), more_scale, more_least));
    }
  }
}

template <int N, int M, int FORM>
inline void sums_of_codes(const char* const* weights, const Number* x, int64_t in, float* y, char* kept) {
  constexpr OwnForm own = OWN_FORMS[FORM - FIRST_OWN];
  __m256 low[M][N], high[M][N];
#pragma GCC unroll 4
  for (int m = 0; m < M; m++)
#pragma GCC unroll 6
    for (int j = 0; j < N; j++) low[m][j] = high[m][j] = _mm256_setzero_ps();
  for (int64_t group = 0; group < in / own.group; group++)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const char* p = weights[m] + group * group_bytes(own);
      for (int c = 0; c < group_bytes(own); c += 64) {
        _mm_prefetch(p + FAR + c, _MM_HINT_T1);
        _mm_prefetch(p + NEAR + c, _MM_HINT_T0);
      }
      each_input<FORM>(p, [&](int k, __m256 first, __m256 second) __attribute__((always_inline)) {
        if (M == 1 && kept) {
          float* numbers = (float*)kept + (group * own.group + k) * 16;
          _mm256_storeu_ps(numbers, first);
          _mm256_storeu_ps(numbers + 8, second);
        }
#pragma GCC unroll 6
        for (int j = 0; j < N; j++) {
          __m256 row = _mm256_broadcast_ss(x + j * in + group * own.group + k);
          low[m][j] = _mm256_fmadd_ps(first, row, low[m][j]);
          high[m][j] = _mm256_fmadd_ps(second, row, high[m][j]);
        }
      });
    }
#pragma GCC unroll 6
  for (int j = 0; j < N; j++)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      _mm256_storeu_ps(y + (j * M + m) * 16, low[m][j]);
      _mm256_storeu_ps(y + (j * M + m) * 16 + 8, high[m][j]);
    }
}

#define EVERY_OWN_FORM(DO) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9)
