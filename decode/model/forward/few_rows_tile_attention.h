// Attention of up to 16 queries at once in tiles, with AMX: scores of 32 slots, and the sums of 32 values.
//
// A score is a sum over the numbers of a head, and a sum of values goes through the slots by 32, so both have the same
// order whatever is computed beside them. Weights are two numbers in bfloat16 each, the second what the first lacks.

constexpr int TILE_SLOTS = 32, LARGEST_HEAD = 4 * TILE_INPUTS;

inline bool attends_in_tiles(int64_t size) { return HAS_TILES && size % TILE_INPUTS == 0 && size <= LARGEST_HEAD; }

// columns[n]: the numbers n of 16 rows x.
inline void transpose(const __m512* x, __m512* columns) {
  __m512 pairs[16], fours[16];
  for (int i = 0; i < 16; i += 2)
    pairs[i] = _mm512_unpacklo_ps(x[i], x[i + 1]), pairs[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
  for (int i = 0; i < 16; i += 4)
    for (int n = 0; n < 2; n++) {
      const __m512d some = (__m512d)pairs[i + n], more = (__m512d)pairs[i + n + 2];
      fours[i + 2 * n] = (__m512)_mm512_unpacklo_pd(some, more);
      fours[i + 2 * n + 1] = (__m512)_mm512_unpackhi_pd(some, more);
    }
  for (int n = 0; n < 4; n++) {  // of a quarter: the numbers n, n + 4, n + 8, n + 12 of four rows
    const __m512 even = _mm512_shuffle_f32x4(fours[n], fours[4 + n], 0x88);
    const __m512 odd = _mm512_shuffle_f32x4(fours[n], fours[4 + n], 0xdd);
    const __m512 more_even = _mm512_shuffle_f32x4(fours[8 + n], fours[12 + n], 0x88);
    const __m512 more_odd = _mm512_shuffle_f32x4(fours[8 + n], fours[12 + n], 0xdd);
    columns[n] = _mm512_shuffle_f32x4(even, more_even, 0x88);
    columns[n + 4] = _mm512_shuffle_f32x4(odd, more_odd, 0x88);
    columns[n + 8] = _mm512_shuffle_f32x4(even, more_even, 0xdd);
    columns[n + 12] = _mm512_shuffle_f32x4(odd, more_odd, 0xdd);
  }
}

// Tiles 0 and 1: sums [16 slots][16 queries]. 2 and 3: keys of these slots. 4 to 7: the queries.
#define ADD_SCORES(NUMBER, QUERIES)                                              \
  if (size > NUMBER * TILE_INPUTS) {                                             \
    _tile_loadd(2, keys + NUMBER * TILE_INPUTS, size * sizeof(Number));          \
    _tile_loadd(3, keys + NUMBER * TILE_INPUTS + 16 * size, size * sizeof(Number)); \
    _tile_dpbf16ps(0, 2, QUERIES);                                               \
    _tile_dpbf16ps(1, 3, QUERIES);                                               \
  }

// As `score`, of all slots.
inline void score_in_tiles(Query* queries, int count, const Cache& cache, int64_t begin, int64_t end, float scale,
                           bool asks) {
  const int64_t size = cache.size;
  alignas(64) Number pairs[LARGEST_HEAD / 2][16][2] = {}, copied[TILE_SLOTS * LARGEST_HEAD];
  alignas(64) float found[TILE_SLOTS][16];
  for (int j = 0; j < count; j++)
    for (int64_t k = 0; k < size; k += 2) std::memcpy(pairs[k / 2][j], queries[j].numbers + k, sizeof pairs[0][0]);
  shape_tiles(16, 16, 16);
  _tile_loadd(4, pairs, TILE_BYTES);
  _tile_loadd(5, pairs + 16, TILE_BYTES);
  _tile_loadd(6, pairs + 32, TILE_BYTES);
  _tile_loadd(7, pairs + 48, TILE_BYTES);
  for (int64_t s = begin; s < end; s += TILE_SLOTS) {
    const Number* keys = cache.key(s);
    if (cache.read || s + TILE_SLOTS > end) {
      for (int k = 0; k < TILE_SLOTS; k++)
        std::memcpy(copied + k * size, cache.key(std::min(s + k, end - 1)), size * sizeof(Number));
      keys = copied;
    }
    // The first queries find neither keys nor values in the caches.
    for (int64_t place = s * size; asks && place < (s + TILE_SLOTS) * size; place += TILE_BYTES / sizeof(Number)) {
      _mm_prefetch((const char*)(cache.values + place), _MM_HINT_T1);
      _mm_prefetch((const char*)(cache.keys + place + 2 * TILE_SLOTS * size), _MM_HINT_T1);
    }
    _tile_zero(0);
    _tile_zero(1);
    ADD_SCORES(0, 4)
    ADD_SCORES(1, 5)
    ADD_SCORES(2, 6)
    ADD_SCORES(3, 7)
    _tile_stored(0, found, TILE_BYTES);
    _tile_stored(1, found + 16, TILE_BYTES);
    for (int64_t half = s; half < std::min(s + TILE_SLOTS, end); half += 16) {
      __m512 columns[16];
      transpose((const __m512*)found[half - s], columns);
      for (int j = 0; j < count; j++) {
        const bool* mask = queries[j].mask ? queries[j].mask + half : nullptr;
        const Floats scores = shown((Floats)columns[j] * scale, mask, std::min(queries[j].slots, end) - half);
        std::memcpy(queries[j].scores + (half - begin), &scores, sizeof scores);
      }
    }
  }
}

// The weighted values of all slots, once the scores are weights.
inline void add_values_in_tiles(Query* queries, int count, const Cache& cache, int64_t begin, int64_t end) {
  alignas(64) Number high[16][CHUNK], low[16][CHUNK];
  uint32_t used[CHUNK / TILE_SLOTS] = {};  // slots that have a weight
  const int64_t slots = end - begin;
  for (int64_t s = 0; s < slots; s += TILE_SLOTS)
    for (int64_t half = s; half < s + TILE_SLOTS; half += 16)
      for (int j = 0; j < count; j++) {
        const Floats weight = half < slots ? read(queries[j].scores + half) : Floats{};
        store(&high[j][half], weight);
        store(&low[j][half], weight - load(&high[j][half]));
        used[s / TILE_SLOTS] |= uint32_t(_mm512_cmpneq_ps_mask((__m512)weight, __m512{})) << (half - s);
      }
  bool finite = true;
  shape_tiles(count, count, 16);
  for (int64_t column = 0; column < cache.size; column += TILE_INPUTS) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t s = 0; s < slots; s += TILE_SLOTS) {
      alignas(64) Number words[16][2][TILE_INPUTS];  // those of two slots side by side
      for (int n = 0; n < TILE_SLOTS; n += 2) {
        auto of = [&](int k) {
          // What a slot without weight holds does not matter, not even if it is not finite.
          const __mmask32 all = used[s / TILE_SLOTS] >> k & 1 ? ~0u : 0;
          return _mm512_maskz_loadu_epi16(all, cache.value(std::min(begin + s + k, end - 1)) + column);
        };
        const __m512i some = of(n), more = of(n + 1);
        _mm512_store_si512(words[n / 2][0], _mm512_unpacklo_epi16(some, more));
        _mm512_store_si512(words[n / 2][1], _mm512_unpackhi_epi16(some, more));
      }
      _tile_loadd(4, &high[0][s], sizeof high[0]);
      _tile_loadd(5, &low[0][s], sizeof low[0]);
      _tile_loadd(6, words[0][0], sizeof words[0]);
      _tile_loadd(7, words[0][1], sizeof words[0]);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    alignas(64) float found[4][16][16];
    _tile_stored(0, found[0], TILE_BYTES);
    _tile_stored(1, found[1], TILE_BYTES);
    _tile_stored(2, found[2], TILE_BYTES);
    _tile_stored(3, found[3], TILE_BYTES);
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_or_si512(first, _mm512_set1_epi32(8));
    for (int j = 0; j < count; j++) {
      // Of each eight numbers the first four are in one tile and the others in the next.
      const __m512 some = _mm512_add_ps(_mm512_load_ps(found[0][j]), _mm512_load_ps(found[2][j]));
      const __m512 more = _mm512_add_ps(_mm512_load_ps(found[1][j]), _mm512_load_ps(found[3][j]));
      _mm512_storeu_ps(queries[j].sums + column, _mm512_permutex2var_ps(some, first, more));
      _mm512_storeu_ps(queries[j].sums + column + 16, _mm512_permutex2var_ps(some, second, more));
      finite &= !(_mm512_fpclass_ps_mask(some, 0x99) | _mm512_fpclass_ps_mask(more, 0x99));
    }
  }
  // A value that is not finite reaches the sums of those alone who give it a weight.
  for (int j = 0; j < count && count > 1 && !finite; j++) add_values_in_tiles(queries + j, 1, cache, begin, end);
}

inline void attend_in_tiles(std::vector<Query>& queries, const Cache& cache, int64_t begin, int64_t end, float scale) {
  const int64_t padded = (end - begin + WIDTH - 1) / WIDTH * WIDTH;
  for (size_t j = 0; j < queries.size(); j += 16) {
    const int count = int(std::min<size_t>(queries.size() - j, 16));
    score_in_tiles(&queries[j], count, cache, begin, end, scale, !cache.read && !j);
    for (int k = 0; k < count; k++) weigh(queries[j + k], padded);
    add_values_in_tiles(&queries[j], count, cache, begin, end);
  }
}
