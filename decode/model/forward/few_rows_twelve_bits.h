// Weights of bfloat16 in 12 bits, without a loss: the low byte as it is, and a code of 4 bits that names
// the high byte. Registers make the same words of them, so a product has the same bits.
//
// The high byte is the sign and seven bits of the exponent. In a block, 15 of them make nearly all
// weights. Those of the others stand in a list. A block: its head, then for each 128 weights twice the
// low bytes of 64 of them, and the codes of both. They have the order [in / 2][outputs][2].

struct Head {
  uint8_t common[16];  // the high bytes by their codes
  int32_t bytes;       // of the head, the same in all blocks of a weight
  int32_t others;      // where the bytes without a code begin
  int32_t places[];    // which groups of 128 weights have such bytes, and -1
};

constexpr int OTHER = 15;  // the code of a byte without one
constexpr int GROUP = 128, GROUP_BYTES = 192;

// Reads the words of a block, group after group.
struct Words {
  __m512i common;
  const int32_t* place;
  const char *others, *p;

  void begin(const char* block) {
    const Head& head = *(const Head*)block;
    common = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)head.common));
    place = head.places, others = block + head.others, p = block + head.bytes;
  }

  // Calls use(0, 32 words, the next 32) and use(1, 32 words, the last 32) with those of a group. asks: whether memory
  // is asked for what comes.
  template <typename Use>
  inline __attribute__((always_inline)) void next(int64_t group, bool asks, Use use) {
    const __m512i low_byte = _mm512_set1_epi16(255), other = _mm512_set1_epi8(OTHER);
    for (int c = 0; asks && c < GROUP_BYTES; c += 64) _mm_prefetch(p + FAR + c, ONCE);
    // A look-up reads six bits of an index, and the table is there four times.
    const __m512i codes = _mm512_loadu_si512(p + 128), more = _mm512_srli_epi16(codes, 4);
    __m512i high = _mm512_permutexvar_epi8(codes, common), more_high = _mm512_permutexvar_epi8(more, common);
    if (__builtin_expect(*place == group, 0)) {
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
      use(n, _mm512_ternarylogic_epi32(low_byte, low, upper, 0xCA), _mm512_shrdi_epi16(low, upper, 8));
    }
    p += GROUP_BYTES;
  }
};

// The 15 most frequent high bytes of `size` words. Returns how many of them have another one.
inline int64_t common_bytes(const uint16_t* words, int64_t size, uint8_t* common) {
  int64_t counts[256] = {}, others = 0;
  uint8_t order[256];
  for (int64_t i = 0; i < size; i++) counts[words[i] >> 8]++;
  for (int i = 0; i < 256; i++) order[i] = uint8_t(i);
  std::sort(order, order + 256, [&](int a, int b) { return counts[a] > counts[b] || (counts[a] == counts[b] && a < b); });
  for (int i = OTHER; i < 256; i++) others += counts[order[i]];
  std::memcpy(common, order, OTHER);
  return others;
}

// The bytes of a head that can hold a list of this many bytes without a code.
inline int64_t head_bytes(int64_t others) { return (sizeof(Head) + 4 + 5 * others + 63) / 64 * 64; }

// Packs the `size` words of a block. bytes: of the head.
inline void pack_block(const uint16_t* words, int64_t size, int64_t bytes, char* y) {
  Head& head = *(Head*)y;
  uint8_t codes[256], *p = (uint8_t*)y + bytes;
  std::memset(y, 0, bytes);
  std::memset(codes, OTHER, sizeof codes);
  const int64_t most = common_bytes(words, size, head.common);
  for (int i = 0; i < OTHER; i++) codes[head.common[i]] = uint8_t(i);
  head.bytes = int32_t(bytes), head.others = int32_t(bytes - most);
  uint8_t* others = (uint8_t*)y + head.others;
  int32_t* place = head.places;
  for (int64_t group = 0; group < size / GROUP; group++, p += GROUP_BYTES) {
    const uint8_t* before = others;
    for (int n = 0; n < GROUP; n++) {
      // Of 64 words, a word of the second 32 stands beside one of the first: low bytes after it, high
      // bytes before it.
      const int half = n / 64, at = n % 64, pair = at / 2;
      const uint16_t* two = words + group * GROUP + half * 64 + pair;
      p[n] = uint8_t(two[at % 2 ? 32 : 0]);
      const uint8_t high = two[at % 2 ? 0 : 32] >> 8, code = codes[high];
      if (code == OTHER) *others++ = high;
      p[128 + at] = uint8_t(half ? p[128 + at] | code << 4 : code);
    }
    if (others != before) *place++ = int32_t(group);
  }
  *place = -1;
}
