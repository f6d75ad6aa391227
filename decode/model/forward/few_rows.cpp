// Products and whole decoder layers for few rows.
//
// At few rows a product is bound by the speed at which weights are read. Here each block of outputs
// is multiplied with all rows while it is in the cache, and its sums stay in registers. Every sum has
// the same order for any number of rows, so a row has the bits that it has alone.
//
// The file is compiled once for states in bfloat16 and once for states in float32: NUMBERS names the
// file with the vectors and the sums of that dtype, and with the layout of packed weights.
// A pass is a list of tokens, those of a text one after the other. Texts may have different numbers of
// them, and nothing is padded.
// Shapes: B texts, T tokens, H hidden size, N query heads, K key heads, D head size, S slots that
// attention gets.

#include <immintrin.h>
#include <omp.h>
#ifdef __AMX_BF16__
#include <sys/syscall.h>

extern "C" long syscall(long, ...) noexcept;  // <unistd.h> has a function `read` too
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

namespace {

// How memory is asked for that a pass reads once. AMD's processors read it past L2 and L3, where what Python and PyTorch
// use stays: a Zen 4 gained nothing by it, a Zen 5 an eighth of a plain step. Those of Intel read a third as fast so.
#ifdef PAST_CACHES
#define ONCE _MM_HINT_NTA
#else
#define ONCE _MM_HINT_T1
#endif

#include NUMBERS

constexpr int OUT = 2 * WIDTH;  // outputs of a block

inline Floats all(float x) { return Floats{} + x; }

inline Floats read(const float* x) {
  Floats y;
  std::memcpy(&y, x, sizeof y);
  return y;
}

inline Floats most_of(Floats x, Floats y) { return x > y ? x : y; }
inline Floats least_of(Floats x, Floats y) { return x < y ? x : y; }

constexpr float LOWEST = -87.0f;  // e^x is 0 below
constexpr float HIDDEN = std::numeric_limits<float>::lowest();  // the score of a slot that is not seen

// e^x: 2^k · e^r with |r| ≤ ln 2 / 2. The error is below 2 units of the last place.
inline Floats exp_of(Floats x) {
  typedef int32_t Whole __attribute__((vector_size(sizeof(Floats))));
  const Floats rounds = all(12582912.0f);  // 1.5 · 2^23: a sum with it has no fraction
  x = least_of(most_of(x, all(LOWEST)), all(88.0f));
  Floats k = (x * 1.44269504f + rounds) - rounds;
  Floats r = x - k * 0.693359375f;
  r = r - k * -2.12194440e-4f;
  Floats p = all(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  return p * (Floats)((__builtin_convertvector(k, Whole) + 127) << 23);
}

inline Floats silu(Floats x) { return x / (exp_of(-x) + 1.0f); }

#define EVERY_COUNT(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12)

template <int M>
void sums_of(int rows, const char* const* weights, int form, const Number* x, int64_t in, float* y) {
  switch (rows) {
#define ROWS(N)                                                                                      \
  case N:                                                                                            \
    if constexpr (N <= MOST && M <= together(N, WHOLE)) return sums<N, M>(weights, form, x, in, y);  \
    break;
    EVERY_COUNT(ROWS)
#undef ROWS
  }
}

constexpr int MANY = 8 * MOST;  // rows whose sums fit into L1

// The sums of up to `MANY` rows with a block: y [rows][OUT]. The first rows make numbers of a part of it, and all rows
// are multiplied with these before the next part is read. So memory works all the time, and the numbers stay in L1.
void sums_of_many(int rows, const char* block, int form, const Number* x, int64_t in, float* y) {
  alignas(64) char made[PART * OUT * sizeof(Number)];
  const int groups = (rows + MOST - 1) / MOST;  // rows are shared out evenly among them
  const int64_t part = groups == 2 ? SHORT_PART : PART;
  Parts parts(block, form, groups);
  std::fill(y, y + rows * OUT, 0.0f);
  for (int64_t begin = 0; begin < in; begin += part) {
    const int64_t count = std::min(part, in - begin);
    for (int group = 0; group < groups; group++) {
      const int row = rows * group / groups, some = rows * (group + 1) / groups - row;
      const Number* from = x + row * in + begin;
      switch (some) {
#define ROWS(N)                                                                                        \
  case N:                                                                                              \
    if constexpr (N <= MOST) {                                                                         \
      if (group) parts.add<N, false>(made, from, in, count, y + row * OUT);                            \
      else parts.add<N, true>(made, from, in, count, y + row * OUT);                                   \
    }                                                                                                  \
    break;
        EVERY_COUNT(ROWS)
#undef ROWS
      }
    }
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

#ifndef __AMX_BF16__  // as in states in float32
constexpr bool in_tiles(int64_t) { return false; }
inline void sums_in_tiles(int64_t, const char*, int, const Number*, int64_t, float*) {}
#endif

enum Mode { PLAIN, ADD, MULTIPLY, SWISH };

// Packed weights. form: how they are stored, one of `few_rows.FORMS`.
struct Weights {
  const char* blocks;
  int form;
};

// Writes a thread's blocks of y = x · W + b, with another tensor added or multiplied, or the SiLU.
void product_share(const Number* x, Weights weights, const Number* bias, const Number* other,
                   Number* y, int64_t rows, int64_t in, int64_t out, int mode) {
  Share share(out / OUT);
  // Few rows have few sums: several blocks at once keep the units busy.
  const bool tiles = in_tiles(in), many = tiles || makes_once(rows, weights.form);
  const int some_blocks = many ? 1 : together(rows, weights.form), most = many ? MANY : MOST;
  const int64_t groups = (rows + most - 1) / most;  // rows are shared out evenly among them
  const int64_t bytes = block_bytes(weights.blocks, in, weights.form);
  alignas(64) float found[MANY * OUT];
  for (int64_t block = share.begin; block < share.end;) {
    int count = int(std::min<int64_t>(some_blocks, share.end - block));
    if (count == 3) count = 2;
    const char* from[4];
    for (int m = 0; m < count; m++)
      from[m] = weights.blocks + (block + m) * bytes;
    for (int64_t group = 0; group < groups; group++) {
      const int64_t row = rows * group / groups;
      const int some = int(rows * (group + 1) / groups - row);
      if (tiles) sums_in_tiles(some, from[0], weights.form, x + row * in, in, found);
      else if (many) sums_of_many(some, from[0], weights.form, x + row * in, in, found);
      else if (count == 4) sums_of<4>(some, from, weights.form, x + row * in, in, found);
      else if (count == 2) sums_of<2>(some, from, weights.form, x + row * in, in, found);
      else sums_of<1>(some, from, weights.form, x + row * in, in, found);
      for (int j = 0; j < some; j++)
        for (int m = 0; m < count; m++)
          for (int half = 0; half < OUT; half += WIDTH) {
            int64_t column = (block + m) * OUT + half, place = (row + j) * out + column;
            Floats sum = read(found + (j * count + m) * OUT + half);
            if (bias) sum += load(bias + column);
            if (mode == ADD) sum += load(other + place);
            if (mode == MULTIPLY) sum *= load(other + place);
            if (mode == SWISH) sum = silu(sum);
            store(y + place, sum);
          }
    }
    block += count;
  }
}

#include "few_rows_attention.h"

// The bits of a number as an integer, in the order of the numbers. Both zeros are 0.
using Key = std::conditional_t<sizeof(Number) == 2, int16_t, int32_t>;
typedef Key Keys __attribute__((vector_size(sizeof(Floats))));
constexpr int KEYS = sizeof(Keys) / sizeof(Key);
constexpr Key LARGEST = std::numeric_limits<Key>::max(), INFINITE = sizeof(Number) == 2 ? 0x7f80 : 0x7f800000;

inline Keys keys_of(const Number* x) {
  Keys bits;
  std::memcpy(&bits, x, sizeof bits);
  const Keys sign = bits >> (8 * sizeof(Key) - 1);
  return (bits ^ (sign & LARGEST)) - sign;
}

// The first largest number of a row, and where it is. NaN if there is one.
void peak_of(const Number* x, int64_t size, int64_t* place, float* most) {
  constexpr int64_t SPAN = 32 * KEYS;
  // From place k on. Past the end, the last number comes again.
  auto keys_from = [&](int64_t k) {
    if (k + KEYS <= size) return keys_of(x + k);
    Number last[KEYS];
    for (int n = 0; n < KEYS; n++) last[n] = x[std::min(k + n, size - 1)];
    return keys_of(last);
  };
  Key best = -LARGEST, least = LARGEST;
  int64_t where = 0;
  for (int64_t begin = 0; begin < size; begin += SPAN) {
    Keys high = Keys{} - LARGEST, low = Keys{} + LARGEST;
    for (int64_t k = begin; k < std::min(begin + SPAN, size); k += KEYS) {
      const Keys some = keys_from(k);
      high = some > high ? some : high, low = some < low ? some : low;
    }
    Key highest = -LARGEST;
    for (int n = 0; n < KEYS; n++) highest = std::max<Key>(highest, high[n]), least = std::min<Key>(least, low[n]);
    if (highest > best || !begin) best = highest, where = begin;
  }
  for (;; where += KEYS) {
    const Keys some = keys_from(where);
    for (int n = 0; n < KEYS; n++)
      if (some[n] == best) {
        *place = where + n;
        *most = best > INFINITE || least < -INFINITE ? NAN : wide(x[where + n]);
        return;
      }
  }
}

// Where the `count` largest numbers of a row are, the largest first, of equal ones the first ones. A NaN without a
// sign is the largest.
void largest_of(const Number* x, int64_t size, int64_t count, int64_t* places) {
  constexpr int64_t SPAN = 32 * KEYS;
  std::vector<Key> found(count);  // in order
  int64_t have = 0;
  auto take = [&](Key key, int64_t place) {
    int64_t at = have < count ? have++ : count - 1;
    for (; at && found[at - 1] < key; at--) found[at] = found[at - 1], places[at] = places[at - 1];
    found[at] = key, places[at] = place;
  };
  // Most numbers are less than the least that was found, which the largest of many of them tells.
  for (int64_t begin = 0; begin < size; begin += SPAN) {
    const int64_t whole = std::min(begin + SPAN, begin + (size - begin) / KEYS * KEYS);
    Keys high = Keys{} - LARGEST;
    for (int64_t k = begin; k < whole; k += KEYS) {
      const Keys some = keys_of(x + k);
      high = some > high ? some : high;
    }
    Key highest = -LARGEST;
    for (int n = 0; n < KEYS; n++) highest = std::max<Key>(highest, high[n]);
    for (int64_t k = begin; k < whole && (have < count || highest > found[count - 1]); k += KEYS) {
      const Keys some = keys_of(x + k);
      if (have == count) {
        const Keys more = some > Keys{} + found[count - 1];
        int64_t words[sizeof(Keys) / sizeof(int64_t)], any = 0;
        std::memcpy(words, &more, sizeof words);
        for (int64_t word : words) any |= word;
        if (!any) continue;
      }
      for (int n = 0; n < KEYS; n++)
        if (have < count || some[n] > found[count - 1]) take(some[n], k + n);
    }
    for (int64_t k = whole; k < std::min(begin + SPAN, size); k++) {  // past the last whole vector
      Number last[KEYS] = {x[k]};
      const Key key = keys_of(last)[0];
      if (have < count || key > found[count - 1]) take(key, k);
    }
  }
}

// What share of a row's softmax the numbers at some places have. The first is the place of the largest.
void shares_of(const Number* x, int64_t size, int64_t count, const int64_t* places, float* shares) {
  const float top = wide(x[places[0]]);
  Floats sums = {};
  int64_t k = 0;
  for (; k + WIDTH <= size; k += WIDTH) {
    const Floats apart = load(x + k) - top;
    sums += apart > all(LOWEST) ? exp_of(apart) : all(0.0f);
  }
  float sum = sum_of(sums);
  for (; k < size; k++) sum += std::exp(wide(x[k]) - top);
  for (int64_t n = 0; n < count; n++) shares[n] = std::exp(wide(x[places[n]]) - top) / sum;
}

// RMS norm times (weight + offset): y [rows, size].
void normed(const Number* x, const Number* weight, float offset, float eps, Number* y, int64_t rows,
            int64_t size) {
  for (int64_t row = 0; row < rows; row++, x += size, y += size) {
    Floats squares = {};
    int64_t k = 0;
    for (; k + WIDTH <= size; k += WIDTH) {
      Floats v = load(x + k);
      squares = v * v + squares;
    }
    float sum = sum_of(squares);
    for (; k < size; k++) sum += wide(x[k]) * wide(x[k]);
    float factor = 1.0f / std::sqrt(sum / size + eps);
    for (k = 0; k + WIDTH <= size; k += WIDTH)
      store(y + k, load(x + k) * factor * (load(weight + k) + offset));
    for (; k < size; k++) y[k] = narrow(wide(x[k]) * factor * (wide(weight[k]) + offset));
  }
}

}  // namespace

extern "C" {

// input: how many numbers attention reads of a row. They are the normed states, or where
// `attention_norm` is null what the caller gives.
struct Layer {
  const Number *attention_norm, *mlp_norm, *query_norm, *key_norm, *qkv_bias;
  const char *qkv, *out, *gate, *up, *down;
  float attention_eps, mlp_eps, head_eps, attention_offset, mlp_offset, head_offset, scale;
  int32_t rotates, qkv_form, out_form, gate_form, up_form, down_form;  // form: of `Weights`
  int64_t hidden, inner, query_heads, key_heads, head, input;
};

// Of a token: its text, the slot of its keys, where its part of `mask` and of `cos` and `sin` begins. slots:
// how many slots there are up to the last that it sees. own: of a node of a tree that does not see other
// branches, the slots of its branch, which take the places from `first` on; else null.
struct Token {
  int64_t text, slot, seen, turned, slots, first;
  int64_t* own;
};

// What all layers of a pass share. texts: how many there are, from the text number `text` of the cache on.
// starts: [texts], the slot of the first token of each. counts: [texts], how many tokens of each are in the list
// of tokens, or null: each has `most`. No text has more than `most`.
// cos, sin: [positions, rotated], for that many numbers of a head. turns: the position of each token there. mask:
// the slots that a token sees, [..., S], or null if it sees all. How far apart texts and tokens are in `turns` and
// `mask`: those of a list are one text there.
// read: the slots that attention gets, [B, S], or null for those from `from` on.
// `look_up` makes the last three. where: [T]. bounds: [blocks + 1], the first token of each block: some tokens of
// one text, at most `TOKENS`, that attend together.
struct Pass {
  int64_t texts, text, most, tokens, slots, from;
  const int64_t *starts, *counts;
  const Number *cos, *sin;
  const int64_t* turns;
  const bool* mask;
  int64_t turn_row, turn_column, mask_row, mask_column;
  const int64_t* read;
  int64_t read_text, cache_text, cache_head, rotated;
  Number *normed, *qkv, *mixed, *gated, *between;  // scratch: T times H, (N+2K)·D, N·D, I, H
  float* parts;  // [T, N, chunks, D + 2]: of a text of several chunks, what `attend` made of each
  int64_t blocks;
  Token* where;
  int64_t* bounds;
};

static void turn(Number* head, const Number* cos, const Number* sin, int64_t size) {
  int64_t half = size / 2, k = 0;
  for (; k + WIDTH <= half; k += WIDTH) {
    Number products[2 * WIDTH];
    Floats a = load(head + k), b = load(head + k + half);
    // They are rounded as products of tensors are.
    store(products, a * load(cos + k));
    store(products + WIDTH, b * load(cos + k + half));
    store(head + k, load(products) - b * load(sin + k));
    store(head + k + half, a * load(sin + k + half) + load(products + WIDTH));
  }
  for (; k < half; k++) {
    float a = wide(head[k]), b = wide(head[k + half]);
    head[k] = narrow(wide(narrow(a * wide(cos[k]))) - b * wide(sin[k]));
    head[k + half] = narrow(wide(narrow(b * wide(cos[k + half]))) + a * wide(sin[k + half]));
  }
}

// x · Wᵀ + b: y [rows, out].
void product(const Number* x, const char* blocks, const Number* bias, const Number* other, Number* y,
             int64_t rows, int64_t in, int64_t out, int32_t mode, int32_t form) {
  const Weights weights = {blocks, form};
#pragma omp parallel if (in * out > 1 << 14)
  product_share(x, weights, bias, other, y, rows, in, out, mode);
}

// `normed`, with rows shared out among threads.
void norm(const Number* x, const Number* weight, float offset, float eps, Number* y, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows > 16)
  for (int64_t row = 0; row < rows; row++)
    normed(x + row * size, weight, offset, eps, y + row * size, 1, size);
}

// `peak_of` each row of x [rows, size].
void peaks(const Number* x, int64_t* places, float* most, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > 1 << 18)
  for (int64_t row = 0; row < rows; row++) peak_of(x + row * size, size, places + row, most + row);
}

// `largest_of` each row of x [rows, size]: places [rows, count], and `shares_of` them, unless shares is null.
void largest(const Number* x, int64_t* places, float* shares, int64_t rows, int64_t size, int64_t count) {
#pragma omp parallel for if (rows * size > 1 << 18)
  for (int64_t row = 0; row < rows; row++) {
    largest_of(x + row * size, size, count, places + row * count);
    if (shares) shares_of(x + row * size, size, count, places + row * count, shares + row * count);
  }
}

// The part of a layer before attention: queries in `pass->qkv`, keys and values in their slots.
// x: the states, or the input of attention. All threads call this.
static void begins(const Layer* layer, const Pass* pass, const Number* x, Number* keys, Number* values) {
  const int64_t rows = pass->tokens, size = layer->head;
  const int64_t heads = layer->query_heads + 2 * layer->key_heads, width = heads * size;
  const Number* input = layer->attention_norm ? pass->normed : x;
  if (layer->attention_norm) {
#pragma omp for
    for (int64_t row = 0; row < rows; row++)
      normed(x + row * layer->hidden, layer->attention_norm, layer->attention_offset,
             layer->attention_eps, pass->normed + row * layer->hidden, 1, layer->hidden);
  }
  product_share(input, {layer->qkv, layer->qkv_form}, layer->qkv_bias, nullptr, pass->qkv, rows, layer->input, width,
                PLAIN);
#pragma omp barrier
#pragma omp for
  for (int64_t item = 0; item < rows * heads; item++) {
    int64_t row = item / heads, number = item % heads;
    const Token& token = pass->where[row];
    Number* head = pass->qkv + row * width + number * size;
    bool is_query = number < layer->query_heads;
    bool is_value = number >= layer->query_heads + layer->key_heads;
    const Number* norm = is_query ? layer->query_norm : is_value ? nullptr : layer->key_norm;
    if (norm) normed(head, norm, layer->head_offset, layer->head_eps, head, 1, size);
    if (layer->rotates && !is_value)
      turn(head, pass->cos + token.turned, pass->sin + token.turned, pass->rotated);
    if (is_query) continue;
    int64_t key_head = number - layer->query_heads - (is_value ? layer->key_heads : 0);
    Number* cache = is_value ? values : keys;
    std::memcpy(cache + token.text * pass->cache_text + key_head * pass->cache_head + token.slot * size,
                head, size * sizeof(Number));
  }
}

// Which slots the tokens of a text see, for all layers of the pass. begin: the slot of its first one. own: [n,
// most], for the slots of branches.
static void look_up_text(const Pass* pass, Token* tokens, int64_t count, int64_t begin, int64_t* own) {
  const int64_t* listed = pass->read ? pass->read + tokens->text * pass->read_text : nullptr;
  for (int64_t column = 0; column < count; column++, own += pass->most) {
    Token& token = tokens[column];
    const bool* mask = pass->mask ? pass->mask + token.seen : nullptr;
    token.slots = seen_slots(mask, pass->slots), token.own = nullptr;
    if (!mask) continue;
    int64_t s = listed ? std::find(listed, listed + pass->slots, begin) - listed : begin - pass->from;
    int64_t number = 0;
    for (; s < token.slots && number < pass->most; s++)
      if (mask[s]) own[number++] = s;
    if (!number || own[0] + number == token.slots) continue;
    token.own = own, token.first = own[0], token.slots = own[0] + number;
  }
}

// Where the tokens of a pass are, and what each of them sees. memory: T · (a `Token` + 1 + most) + 1 numbers.
void look_up(Pass* pass, int64_t* memory) {
  pass->where = (Token*)memory;
  pass->bounds = memory + pass->tokens * (sizeof(Token) / sizeof(int64_t));
  int64_t *own = pass->bounds + pass->tokens + 1, token = 0;
  pass->blocks = 0;
  for (int64_t row = 0; row < pass->texts; row++) {
    const int64_t begin = pass->starts[row], count = pass->counts ? pass->counts[row] : pass->most;
    for (int64_t column = 0; column < count; column++) {
      if (column % TOKENS == 0) pass->bounds[pass->blocks++] = token + column;
      const int64_t text = pass->counts ? 0 : row, place = pass->counts ? token + column : column;
      pass->where[token + column] = {pass->text + row, begin + column,
                                     text * pass->mask_row + place * pass->mask_column,
                                     pass->turns[text * pass->turn_row + place * pass->turn_column] * pass->rotated,
                                     0, 0, nullptr};
    }
    if (count) look_up_text(pass, pass->where + token, count, begin, own);
    token += count, own += count * pass->most;
  }
  pass->bounds[pass->blocks] = token;
}

// Attention of all tokens in `pass->mixed`. All threads call this.
// A node of a tree gets the slots of its branch one after the other, as if the branch were a chain, so its sums
// have the order that they have in plain decoding.
static void mixes(const Layer* layer, const Pass* pass, const Number* keys, const Number* values) {
  const int64_t size = layer->head, heads = layer->query_heads, group = heads / layer->key_heads;
  const int64_t width = (heads + 2 * layer->key_heads) * size, part_size = size + 2;
  // Chunks begin at the same slots of a text, wherever the slots of this pass begin.
  const int64_t before = pass->read ? 0 : pass->from % CHUNK;
  const int64_t chunks = (before + pass->slots + CHUNK - 1) / CHUNK;
  const int64_t most = TOKENS * group;
  std::vector<float> scores(most * (CHUNK + WIDTH)), sums(most * size);
  std::vector<Query> queries;
  std::vector<int64_t> places(pass->slots);  // of a scattered token: its slots by their order
  std::vector<uint8_t> shown(pass->slots);
#pragma omp for schedule(dynamic, 1)
  for (int64_t item = 0; item < layer->key_heads * pass->blocks * chunks; item++) {
    const int64_t chunk = item % chunks, block = item / chunks % pass->blocks;
    const int64_t key_head = item / chunks / pass->blocks;
    const int64_t first = pass->bounds[block], last = pass->bounds[block + 1];
    const int64_t text = pass->where[first].text;
    const int64_t begin = std::max<int64_t>(chunk * CHUNK - before, 0), stop = (chunk + 1) * CHUNK - before;
    const int64_t place = text * pass->cache_text + key_head * pass->cache_head;
    const int64_t skipped = pass->read ? 0 : pass->from * size;
    Cache cache = {keys + place + skipped, values + place + skipped, nullptr, size};
    const int64_t* listed = pass->read ? pass->read + text * pass->read_text : nullptr;
    int64_t end = 0;
    std::fill(sums.begin(), sums.end(), 0.0f);
    // Attention of the queries of the tokens up to this one.
    auto finish = [&](int64_t token, const int64_t* read) {
      cache.read = read;
      end = std::min(end, stop);
      if (begin < end) attend(queries, cache, begin, end, layer->scale);
      const int64_t begun = token - int64_t(queries.size()) / group;
      for (int64_t j = 0; j < int64_t(queries.size()); j++) {
        const Query& query = queries[j];
        const int64_t row = begun + j / group, head = key_head * group + j % group;
        if (chunks == 1) {
          Number* y = pass->mixed + (row * heads + head) * size;
          const float share = 1.0f / query.total;
          for (int64_t k = 0; k < size; k += WIDTH) store(y + k, ::read(query.sums + k) * share);
        } else {
          float* part = pass->parts + ((row * heads + head) * chunks + chunk) * part_size;
          std::memcpy(part, query.sums, size * sizeof(float));
          part[size] = query.top, part[size + 1] = query.total;
        }
      }
      queries.clear(), end = 0;
    };
    for (int64_t row = first; row < last; row++) {
      const Token& token = pass->where[row];
      const bool* mask = pass->mask ? pass->mask + token.seen : nullptr;
      const bool apart = token.own && token.first < stop;
      if (apart) {
        finish(row, listed);
        for (int64_t s = begin; s < std::min(token.slots, stop); s++) {
          const int64_t slot = s < token.first ? s : token.own[s - token.first];
          places[s] = listed ? listed[slot] : slot, shown[s] = mask[slot];
        }
        mask = (const bool*)shown.data();
      }
      end = std::max(end, token.slots);
      for (int64_t k = 0; k < group; k++) {
        const int64_t head = key_head * group + k, number = (row - first) * group + k;
        queries.push_back({pass->qkv + row * width + head * size, mask, token.slots,
                           &scores[number * (CHUNK + WIDTH)], &sums[number * size], HIDDEN, 0.0f});
      }
      if (apart) finish(row + 1, places.data());
    }
    finish(last, listed);
  }
  if (chunks == 1) return;
#pragma omp for
  for (int64_t item = 0; item < pass->tokens * heads; item++) {
    const float* parts = pass->parts + item * chunks * part_size;
    float top = HIDDEN, total = 0.0f;
    std::fill(sums.begin(), sums.begin() + size, 0.0f);
    for (int64_t c = 0; c < chunks; c++) top = std::max(top, parts[c * part_size + size]);
    for (int64_t c = 0; c < chunks; c++) {
      const float* part = parts + c * part_size;
      if (part[size + 1] == 0.0f) continue;
      const float apart = part[size] - top, factor = apart > LOWEST ? exp_of(all(apart))[0] : 0.0f;
      if (factor == 0.0f) continue;
      total = part[size + 1] * factor + total;
      for (int64_t k = 0; k < size; k += WIDTH) {
        const Floats sum = read(part + k) * factor + read(&sums[k]);
        std::memcpy(&sums[k], &sum, sizeof sum);
      }
    }
    const float share = 1.0f / total;
    for (int64_t k = 0; k < size; k += WIDTH) store(pass->mixed + item * size + k, read(&sums[k]) * share);
  }
}

// Attention and the rest of a layer: y [rows, H]. All threads call this.
static void ends(const Layer* layer, const Pass* pass, const Number* states, const Number* keys,
                 const Number* values, Number* y, bool attention, bool mlp) {
  const int64_t rows = pass->tokens, hidden = layer->hidden;
  const int64_t mixed = layer->query_heads * layer->head;
  Number* attended = mlp ? pass->between : y;
  const Number* between = attention ? attended : states;
  if (attention) {
    mixes(layer, pass, keys, values);
    product_share(pass->mixed, {layer->out, layer->out_form}, nullptr, states, attended, rows, mixed, hidden, ADD);
#pragma omp barrier
  }
  if (mlp) {
#pragma omp for
    for (int64_t row = 0; row < rows; row++)
      normed(between + row * hidden, layer->mlp_norm, layer->mlp_offset, layer->mlp_eps,
             pass->normed + row * hidden, 1, hidden);
    product_share(pass->normed, {layer->gate, layer->gate_form}, nullptr, nullptr, pass->gated, rows, hidden,
                  layer->inner, SWISH);
    // The same thread has the same blocks of gate and up.
    product_share(pass->normed, {layer->up, layer->up_form}, nullptr, pass->gated, pass->gated, rows, hidden,
                  layer->inner, MULTIPLY);
#pragma omp barrier
    product_share(pass->gated, {layer->down, layer->down_form}, nullptr, between, y, rows, layer->inner, hidden, ADD);
  }
}

// One layer, or only one of its parts. x: the input of attention, which is `states` where that has a norm.
void layer(const Layer* layer, const Pass* pass, const Number* states, const Number* x, Number* keys,
           Number* values, Number* y, int32_t attention, int32_t mlp) {
#pragma omp parallel
  {
    if (attention) begins(layer, pass, x, keys, values);
    ends(layer, pass, states, keys, values, y, attention, mlp);
  }
}

// The norm after the last layer, and the output layer.
struct Output {
  const Number *norm, *bias;
  const char* blocks;
  float eps, offset;
  int64_t form, hidden, out;
  Number *normed, *logits;
};

// Layers with all their parts, one after the other. outputs: the states after each of them. output: what follows
// them, or null.
void layers(const Layer* const* every, const Pass* const* passes, const Number* states,
            Number* const* keys, Number* const* values, Number* const* outputs, int64_t count,
            const Output* output) {
#pragma omp parallel
  {
    const Number* x = states;
    for (int64_t i = 0; i < count; x = outputs[i++]) {
      begins(every[i], passes[i], x, keys[i], values[i]);
      ends(every[i], passes[i], x, keys[i], values[i], outputs[i], true, true);
#pragma omp barrier
    }
    if (output) {
      const int64_t rows = passes[0]->tokens, hidden = output->hidden;
#pragma omp for
      for (int64_t row = 0; row < rows; row++)
        normed(x + row * hidden, output->norm, output->offset, output->eps, output->normed + row * hidden, 1, hidden);
      product_share(output->normed, {output->blocks, int(output->form)}, output->bias, nullptr, output->logits, rows,
                    hidden, output->out, PLAIN);
    }
  }
}

#ifdef __AVX512VBMI2__
// Words of bfloat16 [count][in / 2][outputs][2] in 12 bits: y, with heads of this many bytes. Without y, how
// many these have to be.
int64_t pack_twelve_bits(const uint16_t* words, int64_t count, int64_t in, int64_t bytes, char* y) {
  const int64_t size = in * OUT;
  std::vector<int64_t> others(count);
#pragma omp parallel for
  for (int64_t i = 0; i < count; i++) {
    uint8_t common[16];
    if (y) pack_block(words + i * size, size, bytes, y + i * (bytes + size / GROUP * GROUP_BYTES));
    else others[i] = common_bytes(words + i * size, size, common);
  }
  return y ? bytes : head_bytes(*std::max_element(others.begin(), others.end()));
}

// The words that `pack_twelve_bits` packed in blocks of `stride` bytes each.
void unpack_twelve_bits(const char* blocks, int64_t count, int64_t stride, uint16_t* y) {
  const int64_t groups = (stride - ((const Head*)blocks)->bytes) / GROUP_BYTES;
  for (int64_t i = 0; i < count; i++) {
    Words words;
    words.begin(blocks + i * stride);
    for (int64_t group = 0; group < groups; group++, y += GROUP)
      words.next(group, true, [&](int n, __m512i some, __m512i more) {
        _mm512_storeu_si512(y + n * 64, some);
        _mm512_storeu_si512(y + n * 64 + 32, more);
      });
  }
}
#endif

// What the machine can do at most, for what a pass takes at least. Reads so many bytes once, past the caches;
// returns their sum, so that no compiler leaves it out. Four sums, so that none waits for the one before.
float read_once(const char* data, int64_t bytes) {
  constexpr int64_t PART = 4 * sizeof(Floats);
  Floats sum = {};
#pragma omp parallel
  {
    Share share(bytes / PART);
    Floats own[4] = {};
    for (int64_t part = share.begin; part < share.end; part++) {
      const char* p = data + PART * part;
      for (int64_t c = 0; c < PART; c += 64) _mm_prefetch(p + FAR + c, ONCE);
#pragma GCC unroll 4
      for (int n = 0; n < 4; n++) own[n] += read((const float*)(p + n * sizeof(Floats)));
    }
#pragma omp critical
    sum += (own[0] + own[1]) + (own[2] + own[3]);
  }
  return sum_of(sum);
}

// Multiplies `turns` times in all threads, with numbers that stay in registers, and adds what came out to `sum`.
// Returns how many operations that were: a product that is added is two.
int64_t multiply_only(int64_t turns, float* sum) {
  int64_t operations = 0;
#pragma omp parallel
  {
    const float found = multiplied(turns, 0.5f);
#pragma omp critical
    *sum += found, operations += turns * OPERATIONS;
  }
  return operations;
}

}  // extern "C"
