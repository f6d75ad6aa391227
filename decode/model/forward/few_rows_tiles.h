// Products of states in bfloat16 in tiles, with AMX: up to 32 rows times 32 outputs, 32 inputs at once.
//
// An instruction adds the products of 32 inputs to a sum in the same order for any number of rows, so a
// row has the bits that it has alone. Words are read as `WHOLE` has them, [in / 2][32][2]; other forms
// are made into such words on the way. Products whose inputs are no multiple of 32 are made without tiles.

constexpr int TILE_ROWS = 16, TILE_ROWS_TOGETHER = 32, TILE_INPUTS = 32, TILE_BYTES = 64;
// The tiles, whose numbers stand in the text of instructions: sums of the first 16 rows and of the others, for the
// first and the last 16 outputs; the rows; the words.
#define FIRST_LOW 0
#define FIRST_HIGH 1
#define MORE_LOW 2
#define MORE_HIGH 3
#define FIRST 4
#define MORE 5
#define LOW 6
#define HIGH 7

// Linux gives a process the tiles when it asks for them.
const bool HAS_TILES = !syscall(SYS_arch_prctl, /* ARCH_REQ_XCOMP_PERM */ 0x1023, /* XFEATURE_XTILEDATA */ 18);

inline bool in_tiles(int64_t in) { return HAS_TILES && in % TILE_INPUTS == 0; }

// Gives this thread tiles with so many rows: two of each kind of sums, two that are multiplied first, two second.
inline void shape_tiles(int first, int more, int words) {
  struct {
    uint8_t palette, start, none[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } tiles = {1};
  for (int tile = 0; tile < 8; tile++) tiles.bytes[tile] = TILE_BYTES;
  for (int tile : {FIRST_LOW, FIRST_HIGH, FIRST}) tiles.rows[tile] = uint8_t(first);
  for (int tile : {MORE_LOW, MORE_HIGH, MORE}) tiles.rows[tile] = uint8_t(more);
  for (int tile : {LOW, HIGH}) tiles.rows[tile] = uint8_t(words);
  _tile_loadconfig(&tiles);
}

// The same for up to 32 rows of states.
inline void begin_tiles(int rows) {
  shape_tiles(std::min(rows, TILE_ROWS), std::max(rows - TILE_ROWS, 1), TILE_ROWS);
}

// Adds the products of the rows x [·, in], from an input on, with its words and those of the next 31.
template <bool TWO>
inline void add_in_tiles(const char* words, const Number* x, int64_t in) {
  _tile_loadd(LOW, words, 2 * TILE_BYTES);
  _tile_loadd(HIGH, words + TILE_BYTES, 2 * TILE_BYTES);
  _tile_loadd(FIRST, x, in * sizeof(Number));
  _tile_dpbf16ps(FIRST_LOW, FIRST, LOW);
  _tile_dpbf16ps(FIRST_HIGH, FIRST, HIGH);
  if constexpr (TWO) {
    _tile_loadd(MORE, x + TILE_ROWS * in, in * sizeof(Number));
    _tile_dpbf16ps(MORE_LOW, MORE, LOW);
    _tile_dpbf16ps(MORE_HIGH, MORE, HIGH);
  }
}

// y [rows][32].
template <bool TWO>
inline void load_tiles(const float* y) {
  constexpr int ROW = 2 * TILE_BYTES;
  _tile_loadd(FIRST_LOW, y, ROW);
  _tile_loadd(FIRST_HIGH, y + 16, ROW);
  if constexpr (TWO) {
    _tile_loadd(MORE_LOW, y + TILE_ROWS * 32, ROW);
    _tile_loadd(MORE_HIGH, y + TILE_ROWS * 32 + 16, ROW);
  }
}

template <bool TWO>
inline void store_tiles(float* y) {
  constexpr int ROW = 2 * TILE_BYTES;
  _tile_stored(FIRST_LOW, y, ROW);
  _tile_stored(FIRST_HIGH, y + 16, ROW);
  if constexpr (TWO) {
    _tile_stored(MORE_LOW, y + TILE_ROWS * 32, ROW);
    _tile_stored(MORE_HIGH, y + TILE_ROWS * 32 + 16, ROW);
  }
}

// Reads a block, 32 inputs at once.
template <int FORM>
struct TileWords {
  static constexpr int64_t READ = TILE_INPUTS * (FORM == BYTES ? 32 : FORM == WHOLE ? 64 : 48);  // bytes of 32 inputs
  const char* p;
#ifdef __AVX512VBMI2__
  Words words;
  int64_t group = 0;
#endif

  explicit TileWords(const char* block) : p(block) {
#ifdef __AVX512VBMI2__
    if constexpr (FORM == TWELVE) words.begin(block), p = words.p;
#endif
  }

  // The words of the next inputs. made: where they can be.
  const char* next(char* made) {
    const char* from = p;
    p += READ;
    if constexpr (FORM == WHOLE) return from;
    if constexpr (FORM == BYTES) {
      const __m512i upper = _mm512_set1_epi8(0x43);
      for (int64_t k = 0; k < READ; k += TILE_BYTES) {
        const __m512i both = _mm512_loadu_si512(from + k);
        _mm512_store_si512(made + 2 * k, _mm512_unpacklo_epi8(both, upper));
        _mm512_store_si512(made + 2 * k + TILE_BYTES, _mm512_unpackhi_epi8(both, upper));
      }
    }
#ifdef __AVX512VBMI2__
    if constexpr (FORM == TWELVE)
      for (int64_t k = 0; k < TILE_INPUTS; k += 4)
        words.next(group++, false, [&](int n, __m512i some, __m512i more) __attribute__((always_inline)) {
          _mm512_store_si512(made + (k + 2 * n) * TILE_BYTES, some);
          _mm512_store_si512(made + (k + 2 * n) * TILE_BYTES + TILE_BYTES, more);
        });
#endif
    return made;
  }
};

// Inputs whose words stay in L1 while several groups of rows are multiplied with them.
constexpr int64_t TILE_PART = 6 * TILE_INPUTS;

template <int FORM, bool TWO>
inline void part_in_tiles(TileWords<FORM>& source, bool first, char* made, const char* asked, int64_t step,
                          const Number* x, int64_t in, int64_t inputs) {
  for (int64_t k = 0; k < inputs; k += TILE_INPUTS) {
    char* place = made + k * TILE_BYTES;
    const char* words = first ? source.next(place) : FORM == WHOLE ? source.p + (k - inputs) * TILE_BYTES : place;
    for (int64_t c = 0; c < step; c += 64) _mm_prefetch(asked + c, _MM_HINT_T1);
    asked += step;
    add_in_tiles<TWO>(words, x + k, in);
  }
}

template <int FORM>
void sums_in_tiles_of(int64_t rows, const char* block, const Number* x, int64_t in, float* y) {
  alignas(64) char made[TILE_PART * TILE_BYTES];
  const int64_t groups = (rows + TILE_ROWS_TOGETHER - 1) / TILE_ROWS_TOGETHER;
  // The sums of one group of rows stay in tiles.
  const int64_t part = groups == 1 ? TILE_INPUTS : TILE_PART;
  TileWords<FORM> source(block);
  int have = 0;
  for (int64_t begin = 0; begin < in; begin += part) {
    const int64_t inputs = std::min(part, in - begin), step = (TileWords<FORM>::READ / groups + 63) / 64 * 64;
    const char* asked = source.p + FAR;
    for (int64_t group = 0; group < groups; group++) {
      const int64_t row = rows * group / groups;
      const int count = int(rows * (group + 1) / groups - row);
      const Number* from = x + row * in + begin;
      float* sums = y + row * 32;
      const bool loads = groups > 1 && begin, stores = groups > 1 || begin + part >= in;
      if (count != have || (groups > 1 && !begin)) begin_tiles(have = count);
      const char* ask = asked + group * step * (inputs / TILE_INPUTS);
      if (count > TILE_ROWS) {
        if (loads) load_tiles<true>(sums);
        part_in_tiles<FORM, true>(source, !group, made, ask, step, from, in, inputs);
        if (stores) store_tiles<true>(sums);
      } else {
        if (loads) load_tiles<false>(sums);
        part_in_tiles<FORM, false>(source, !group, made, ask, step, from, in, inputs);
        if (stores) store_tiles<false>(sums);
      }
    }
  }
  if constexpr (FORM == BYTES) {
    const float* scales = (const float*)(block + in * 32);
    for (int64_t row = 0; row < rows; row++, y += 32) {
      const __m512 over = _mm512_set1_ps(192 * total(x + row * in, in));
      for (int half = 0; half < 32; half += 16)
        _mm512_storeu_ps(y + half, _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(y + half), over),
                                                 _mm512_loadu_ps(scales + half)));
    }
  }
}

// The sums of some rows x [rows, in] with a block: y [rows][32].
void sums_in_tiles(int64_t rows, const char* block, int form, const Number* x, int64_t in, float* y) {
#ifdef __AVX512VBMI2__
  if (form == TWELVE) return sums_in_tiles_of<TWELVE>(rows, block, x, in, y);
#endif
  if (form == BYTES) sums_in_tiles_of<BYTES>(rows, block, x, in, y);
  else sums_in_tiles_of<WHOLE>(rows, block, x, in, y);
}

// The operations of a turn of `multiplied_in_tiles`, whose numbers stay in registers.
constexpr int64_t TILE_OPERATIONS = 4 * 2 * TILE_ROWS * TILE_ROWS * TILE_INPUTS;

inline float multiplied_in_tiles(int64_t turns, Number start) {
  Number numbers[TILE_ROWS * TILE_INPUTS];
  float sums[TILE_ROWS_TOGETHER * 32], sum = 0;
  std::fill(numbers, numbers + TILE_ROWS * TILE_INPUTS, start);
  begin_tiles(TILE_ROWS_TOGETHER);
  _tile_loadd(FIRST, numbers, TILE_BYTES);
  _tile_loadd(MORE, numbers, TILE_BYTES);
  _tile_loadd(LOW, numbers, TILE_BYTES);
  _tile_loadd(HIGH, numbers, TILE_BYTES);
  for (int64_t turn = 0; turn < turns; turn++) {
    _tile_dpbf16ps(FIRST_LOW, FIRST, LOW);
    _tile_dpbf16ps(FIRST_HIGH, FIRST, HIGH);
    _tile_dpbf16ps(MORE_LOW, MORE, LOW);
    _tile_dpbf16ps(MORE_HIGH, MORE, HIGH);
  }
  store_tiles<true>(sums);
  for (float some : sums) sum += some;
  return sum;
}
