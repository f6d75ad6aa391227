// Attention of few tokens over the slots of their texts, at the speed of memory.
//
// The query heads that share a key head, of some tokens of a text, go through the slots together. So
// keys and values are read once for all of them. Products with the keys of several slots are summed
// across registers together. A long text is cut into chunks, which are work for all threads and are
// merged at the end.
//
// All sums of a query have the same order whatever is computed beside it: chunks begin at multiples
// of `CHUNK`, and slots that it does not see add nothing.

constexpr int CHUNK = 512;  // slots
constexpr int TILE = 64;    // slots whose values stay in the cache while all queries read them
constexpr int TOGETHER = 3;  // queries whose sums fit into registers
#ifdef __AMX_BF16__
constexpr int TOKENS = 5;  // of a text, in one item of work: three heads of each fit into a tile
#else
constexpr int TOKENS = 4;
#endif

typedef int32_t Whole __attribute__((vector_size(sizeof(Floats))));

// `__builtin_convertvector` of bytes goes byte by byte.
inline Whole whole_of(const bool* seen) { return (Whole)widened((const __m128i*)seen); }

// Of S slots, how many there are up to the last that a token sees. Texts of a batch end in different
// slots, and the rest of the longest is hidden from the others.
inline int64_t seen_slots(const bool* mask, int64_t slots) {
  if (!mask) return slots;
  for (; slots >= 32; slots -= 32) {
    bool seen = false;
    for (int k = 1; k <= 32; k++) seen |= mask[slots - k];
    if (seen) break;
  }
  while (slots > 1 && !mask[slots - 1]) slots--;
  return slots;
}

// The slots of one key head of a text. read: which ones, or null for all from the first on.
struct Cache {
  const Number *keys, *values;
  const int64_t* read;
  int64_t size;
  const Number* key(int64_t s) const { return keys + (read ? read[s] : s) * size; }
  const Number* value(int64_t s) const { return values + (read ? read[s] : s) * size; }
};

// One query: its mask, the slots that it sees the last of, its scores and sums in a chunk.
struct Query {
  const Number* numbers;
  const bool* mask;
  int64_t slots;
  float *scores, *sums;  // [CHUNK], [size]
  float top, total;
};

// `scores` of WIDTH slots, hidden where a query does not see the slot, and from `count` on. mask: null if it sees all.
inline Floats shown(Floats scores, const bool* mask, int64_t count) {
  if (!mask && count >= WIDTH) return scores;
  if (count >= WIDTH) return whole_of(mask) != 0 ? scores : all(HIDDEN);
  bool seen[WIDTH] = {};
  if (count > 0 && mask) std::memcpy(seen, mask, count);
  else if (count > 0) std::memset(seen, 1, count);
  return whole_of(seen) != 0 ? scores : all(HIDDEN);
}

// Scores of the slots from `begin` to `end`, and hidden ones up to a multiple of WIDTH. first: whether no
// other queries did it before. Then values are asked for, and come while keys are multiplied.
template <int Q>
void score(Query* queries, const Cache& cache, int64_t begin, int64_t end, float scale, bool first) {
  const Number* numbers[Q];
  for (int j = 0; j < Q; j++) numbers[j] = queries[j].numbers;
  for (int64_t s = begin; s < end; s += WIDTH) {
    const Number* keys[WIDTH];
    for (int k = 0; k < WIDTH; k++) {
      const int64_t slot = std::min(s + k, end - 1);
      keys[k] = cache.key(slot);
      for (int64_t c = 0; first && c < cache.size; c += 64 / sizeof(Number))
        _mm_prefetch((const char*)(cache.value(slot) + c), _MM_HINT_T1);
    }
    Floats found[Q];
    dots<Q>(numbers, keys, cache.size, found);
    for (int j = 0; j < Q; j++) {
      const bool* mask = queries[j].mask ? queries[j].mask + s : nullptr;
      const Floats scores = shown(found[j] * scale, mask, std::min(queries[j].slots, end) - s);
      std::memcpy(queries[j].scores + (s - begin), &scores, sizeof scores);
    }
  }
}

// Turns the scores of `count` slots, a multiple of WIDTH, into weights that are not yet divided by
// their total.
inline void weigh(Query& query, int64_t count) {
  Floats most = all(HIDDEN), total = {};
  for (int64_t s = 0; s < count; s += WIDTH) most = most_of(most, read(query.scores + s));
  query.top = largest_of(most);
  for (int64_t s = 0; s < count; s += WIDTH) {
    const Floats score = read(query.scores + s), apart = score - query.top;
    // A hidden slot has no weight at all.
    Floats weight = apart > all(LOWEST) ? exp_of(apart) : all(0.0f);
    weight = score > all(HIDDEN) ? weight : all(0.0f);
    std::memcpy(query.scores + s, &weight, sizeof weight);
    total += weight;
  }
  query.total = sum_of(total);
}

// As `add_tile`, of V vectors of the sums from a column on. EVERY: whether each slot has a weight of each query.
template <int Q, int V, bool EVERY>
void add_values(Query* queries, const Cache& cache, int64_t begin, int64_t first, int64_t end,
                int64_t column) {
  Floats sums[Q][V];
  for (int j = 0; j < Q; j++)
    for (int v = 0; v < V; v++) sums[j][v] = read(queries[j].sums + column + v * WIDTH);
  for (int64_t s = first; s < end; s++) {
    const Number* value = cache.value(s) + column;
    if constexpr (!EVERY) {
      bool some = false;
      for (int j = 0; j < Q; j++) some |= queries[j].scores[s - begin] != 0.0f;
      if (!some) continue;
    }
    Floats numbers[V];
    for (int v = 0; v < V; v++) numbers[v] = load(value + v * WIDTH);
#pragma GCC unroll 3
    for (int j = 0; j < Q; j++) {
      const float weight = queries[j].scores[s - begin];
      // What a slot without weight holds does not matter, not even if it is not finite.
      if (!EVERY && weight == 0.0f) continue;
#pragma GCC unroll 4
      for (int v = 0; v < V; v++) sums[j][v] = numbers[v] * weight + sums[j][v];
    }
  }
  for (int j = 0; j < Q; j++)
    for (int v = 0; v < V; v++) std::memcpy(queries[j].sums + column + v * WIDTH, &sums[j][v], sizeof(Floats));
}

// Adds the weighted values of the slots of a tile, from `first` to `end`. begin: of the chunk.
template <int Q, bool EVERY>
void add_columns(Query* queries, const Cache& cache, int64_t begin, int64_t first, int64_t end) {
  int64_t column = 0;
  for (; column + 4 * WIDTH <= cache.size; column += 4 * WIDTH)
    add_values<Q, 4, EVERY>(queries, cache, begin, first, end, column);
  for (; column < cache.size; column += OUT)
    add_values<Q, 2, EVERY>(queries, cache, begin, first, end, column);
}

template <int Q>
void add_tile(Query* queries, const Cache& cache, int64_t begin, int64_t first, int64_t end) {
  int none = 0;
  for (int j = 0; j < Q; j++)
    for (int64_t s = first; s < end; s++) none += queries[j].scores[s - begin] == 0.0f;
  if (none) add_columns<Q, false>(queries, cache, begin, first, end);
  else add_columns<Q, true>(queries, cache, begin, first, end);
}

template <typename Use>
inline void in_groups(std::vector<Query>& queries, Use use) {
  for (size_t j = 0; j < queries.size(); j += TOGETHER) {
    switch (std::min<size_t>(queries.size() - j, TOGETHER)) {
      case 1: use(std::integral_constant<int, 1>(), &queries[j]); break;
      case 2: use(std::integral_constant<int, 2>(), &queries[j]); break;
      default: use(std::integral_constant<int, TOGETHER>(), &queries[j]);
    }
  }
}

#ifdef __AMX_BF16__
#include "few_rows_tile_attention.h"
#endif

// All queries of an item in the slots of a chunk. The sums of each are 0 before.
inline void attend(std::vector<Query>& queries, const Cache& cache, int64_t begin, int64_t end,
                   float scale) {
#ifdef __AMX_BF16__
  if (attends_in_tiles(cache.size)) return attend_in_tiles(queries, cache, begin, end, scale);
#endif
  for (int64_t s = begin; s < end; s += TILE) {
    const int64_t last = std::min(s + TILE, end);
    in_groups(queries, [&](auto count, Query* some) {
      for (int j = 0; j < count; j++) some[j].scores += s - begin;
      score<count>(some, cache, s, last, scale, some == queries.data());
      for (int j = 0; j < count; j++) some[j].scores -= s - begin;
    });
  }
  const int64_t padded = (end - begin + WIDTH - 1) / WIDTH * WIDTH;
  for (Query& query : queries) weigh(query, padded);
  for (int64_t s = begin; s < end; s += TILE)
    in_groups(queries, [&](auto count, Query* some) {
      add_tile<count>(some, cache, begin, s, std::min(s + TILE, end));
    });
}
