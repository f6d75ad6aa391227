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

template <int FORM>
inline Sixteen scales_of(const char* p) {
  return OWN_FORMS[FORM - FIRST_OWN].whole ? of_floats((const float*)p) : of_small_floats(p);
}

// Calls use(input, 16 weights) for each input of a group.
template <int FORM, typename Use>
inline __attribute__((always_inline)) void each_input(const char* p, Use use) {
  constexpr OwnForm own = OWN_FORMS[FORM - FIRST_OWN];
  const Sixteen scale = scales_of<FORM>(p), least = own.least ? scales_of<FORM>(p + scale_bytes(own)) : Sixteen{};
  auto use_codes = [&](int k, __m128i codes) __attribute__((always_inline)) {
    const Sixteen whole = of_bytes(codes);
    use(k, own.least ? times_and(whole, scale, least) : times(whole, scale));
  };
  p += codes_begin(own);
  if constexpr (own.bits == 8) {
    for (int k = 0; k < own.group; k++) use_codes(k, _mm_loadu_si128((const __m128i*)(p + 16 * k)));
  } else {
    const __m128i nibble = _mm_set1_epi8(15), middle = _mm_set1_epi8(8);
    for (int k = 0; k < own.group; k += 2) {
      __m128i both = _mm_loadu_si128((const __m128i*)(p + 8 * k));
      __m128i low = _mm_and_si128(both, nibble), high = _mm_and_si128(_mm_srli_epi16(both, 4), nibble);
      // Without a least number, the middle code stands for 0.
      if constexpr (!own.least) low = _mm_sub_epi8(low, middle), high = _mm_sub_epi8(high, middle);
      use_codes(k, _mm_unpacklo_epi64(low, high));
      use_codes(k + 1, _mm_unpackhi_epi64(low, high));
    }
  }
}

inline void ask_for(const char* p, int bytes) {
  for (int c = 0; c < bytes; c += 64) {
    _mm_prefetch(p + FAR + c, _MM_HINT_T1);
    _mm_prefetch(p + NEAR + c, _MM_HINT_T0);
  }
}

template <int N, int M, int FORM>
inline void sums_of_codes(const char* const* weights, const Number* x, int64_t in, float* y) {
  constexpr OwnForm own = OWN_FORMS[FORM - FIRST_OWN];
  Sixteen found[M][N] = {};
  for (int64_t group = 0; group < in / own.group; group++)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) {
      const char* p = weights[m] + group * group_bytes(own);
      ask_for(p, group_bytes(own));
      each_input<FORM>(p, [&](int k, Sixteen some) __attribute__((always_inline)) {
        const int64_t input = group * own.group + k;
#pragma GCC unroll 12
        for (int j = 0; j < N; j++) add_product(found[m][j], some, x + j * in + input);
      });
    }
#pragma GCC unroll 12
  for (int j = 0; j < N; j++)
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) store_sixteen(y + (j * M + m) * 16, found[m][j]);
}

#define EVERY_OWN_FORM(DO) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9)
