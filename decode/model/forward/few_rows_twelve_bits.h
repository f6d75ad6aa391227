// Weights of bfloat16 in 12 bits, without a loss: the low byte as it is, and a code of 4 bits that names
// the high byte. Registers make the same words of them, so a product has the same bits.
//
// The high byte is the sign and seven bits of the exponent. In a block, 15 of them make nearly all
// weights. Those of the others stand in a list. A block: its head, then for each four inputs twice the
// low bytes of 64 weights (two inputs), and the codes of both.

struct Head {
  uint8_t common[16];  // the high bytes by their codes
  int32_t bytes;       // of the head, the same in all blocks of a weight
  int32_t others;      // where the bytes without a code begin
  int32_t places[];    // the inputs, by four, that have such bytes, and -1
};

constexpr int OTHER = 15;  // the code of a byte without one

// Calls use(input, first words, second words) for each two inputs of a block. kept: null, or where these
// words are stored as a plain block has them.
template <typename Use>
inline __attribute__((always_inline)) void each_two_inputs(const char* block, int64_t in, char* kept, Use use) {
  const Head& head = *(const Head*)block;
  const __m512i common = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)head.common));
  const __m512i low_byte = _mm512_set1_epi16(255), other = _mm512_set1_epi8(OTHER);
  const int32_t* place = head.places;
  const char *others = block + head.others, *p = block + head.bytes;
  for (int64_t k = 0; k < in; k += 4, p += 192) {
    // Past L2 and L3: a pass reads each weight once, and what Python and PyTorch use stays there. A Zen 4 gained
    // nothing by it, a Zen 5 an eighth of a plain step.
    for (int c = 0; c < 192; c += 64) _mm_prefetch(p + FAR + c, _MM_HINT_NTA);
    // A look-up reads six bits of an index, and the table is there four times.
    const __m512i codes = _mm512_loadu_si512(p + 128), more = _mm512_srli_epi16(codes, 4);
    __m512i high = _mm512_permutexvar_epi8(codes, common), more_high = _mm512_permutexvar_epi8(more, common);
    if (__builtin_expect(*place == k, 0)) {
      place++;
      const __mmask64 some = _mm512_cmpeq_epi8_mask(_mm512_and_si512(codes, other), other);
      high = _mm512_mask_expand_epi8(high, some, _mm512_loadu_si512(others));
      others += __builtin_popcountll(some);
      const __mmask64 rest = _mm512_cmpeq_epi8_mask(_mm512_and_si512(more, other), other);
      more_high = _mm512_mask_expand_epi8(more_high, rest, _mm512_loadu_si512(others));
      others += __builtin_popcountll(rest);
    }
#pragma GCC unroll 2
    for (int n = 0; n < 2; n++) {
      const __m512i low = _mm512_loadu_si512(p + 64 * n), upper = n ? more_high : high;
      const __m512i first = _mm512_ternarylogic_epi32(low_byte, low, upper, 0xCA);
      const __m512i second = _mm512_shrdi_epi16(low, upper, 8);
      if (kept) {
        _mm512_storeu_si512(kept + (k + 2 * n) * 64, first);
        _mm512_storeu_si512(kept + (k + 2 * n) * 64 + 64, second);
      }
      use(k + 2 * n, first, second);
    }
  }
}

// The 15 most frequent high bytes of a plain block. Returns how many weights have another one.
inline int64_t common_bytes(const Number* words, int64_t in, uint8_t* common) {
  int64_t counts[256] = {}, others = 0;
  uint8_t order[256];
  for (int64_t i = 0; i < in * 32; i++) counts[words[i] >> 8]++;
  for (int i = 0; i < 256; i++) order[i] = uint8_t(i);
  std::sort(order, order + 256, [&](int a, int b) { return counts[a] > counts[b] || (counts[a] == counts[b] && a < b); });
  for (int i = OTHER; i < 256; i++) others += counts[order[i]];
  std::memcpy(common, order, OTHER);
  return others;
}

// The bytes of a head that can hold a list of this many bytes without a code.
inline int64_t head_bytes(int64_t others) { return (sizeof(Head) + 4 + 5 * others + 63) / 64 * 64; }

// Packs a plain block again. bytes: of the head.
inline void pack_block(const Number* words, int64_t in, int64_t bytes, char* y) {
  Head& head = *(Head*)y;
  uint8_t codes[256], *p = (uint8_t*)y + bytes;
  std::memset(y, 0, bytes);
  std::memset(codes, OTHER, sizeof codes);
  const int64_t most = common_bytes(words, in, head.common);
  for (int i = 0; i < OTHER; i++) codes[head.common[i]] = uint8_t(i);
  head.bytes = int32_t(bytes), head.others = int32_t(bytes - most);
  uint8_t* others = (uint8_t*)y + head.others;
  int32_t* place = head.places;
  for (int64_t k = 0; k < in; k += 4, p += 192) {
    const uint8_t* before = others;
    for (int n = 0; n < 128; n++) {
      // Of two inputs, the words of a plain block are 32 first ones and 32 second ones. Here a second one
      // stands beside a first one: low bytes after it, high bytes before it.
      const int half = n / 64, at = n % 64, pair = at / 2;
      const Number* two = words + k * 32 + half * 64 + pair;
      p[n] = uint8_t(two[at % 2 ? 32 : 0]);
      const uint8_t high = two[at % 2 ? 0 : 32] >> 8, code = codes[high];
      if (code == OTHER) *others++ = high;
      p[128 + at] = uint8_t(half ? p[128 + at] | code << 4 : code);
    }
    if (others != before) *place++ = int32_t(k);
  }
  *place = -1;
}
