// The instructions of AVX512-BF16 that few_rows_bfloat16.h uses, in plain C++: its functions can be tested
// on processors without them. Included before it, in place of the compiler's flags.

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

typedef float Floats __attribute__((vector_size(64)));
typedef long long Words __attribute__((vector_size(64)));
typedef short Pairs __attribute__((vector_size(64)));

template <class To, class From>
inline To bits(const From& from) {
  To to;
  static_assert(sizeof(to) <= sizeof(from), "");
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class To>
inline To read(const void* from) {
  To to;
  std::memcpy(&to, from, sizeof(to));
  return to;
}

// Numbers below the smallest normal one are zero, as for the instructions.
inline float wide(uint16_t number) {
  uint32_t word = uint32_t(number) << 16;
  return bits<float>(word & 0x7f800000u ? word : word & 0x80000000u);
}

inline uint16_t narrow(float number) {
  uint32_t word = bits<uint32_t>(number);
  if (std::isnan(number)) return (word >> 16) | 0x40;
  if (!(word & 0x7f800000u)) return (word >> 16) & 0x8000;
  return (word + 0x7fff + ((word >> 16) & 1)) >> 16;
}

inline Floats all(float x) {
  Floats y;
  for (int i = 0; i < 16; i++) y[i] = x;
  return y;
}

inline Words all32(int x) {
  int y[16];
  for (int& one : y) one = x;
  return read<Words>(y);
}

inline Words all8(char x) {
  char y[64];
  std::memset(y, x, 64);
  return read<Words>(y);
}

inline void write(void* to, Floats x) { std::memcpy(to, &x, 64); }

inline Words widened(__m256i x) {
  uint16_t from[16];
  uint32_t to[16];
  std::memcpy(from, &x, 32);
  for (int i = 0; i < 16; i++) to[i] = from[i];
  return read<Words>(to);
}

inline Words widened_bytes(__m128i x) {
  uint8_t from[16];
  uint32_t to[16];
  std::memcpy(from, &x, 16);
  for (int i = 0; i < 16; i++) to[i] = from[i];
  return read<Words>(to);
}

inline __m256i narrowed(Floats x) {
  uint16_t y[16];
  for (int i = 0; i < 16; i++) y[i] = narrow(x[i]);
  return read<__m256i>(y);
}

inline Floats dots(Floats sum, Pairs a, Pairs b) {
  uint16_t x[32], y[32];
  std::memcpy(x, &a, 64);
  std::memcpy(y, &b, 64);
  for (int i = 0; i < 16; i++) {
    float odd = std::fma(wide(x[2 * i + 1]), wide(y[2 * i + 1]), sum[i]);
    sum[i] = std::fma(wide(x[2 * i]), wide(y[2 * i]), odd);
  }
  return sum;
}

inline float sum_of(Floats x) {
  for (int n = 8; n; n /= 2)
    for (int i = 0; i < n; i++) x[i] += x[i + n];
  return x[0];
}

inline float largest_of(Floats x) {
  float most = x[0];
  for (int i = 1; i < 16; i++) most = most > x[i] ? most : x[i];
  return most;
}

// Numbers of a and then of b in the order of a control, two bits each: of every four (`within`), or all
// four at a time.
inline Floats shuffled(Floats a, Floats b, int control, bool within) {
  Floats y;
  for (int i = 0; i < 16; i++) {
    const int part = within ? i % 4 : i / 4, chosen = control >> 2 * part & 3;
    const int at = within ? i / 4 * 4 + chosen : chosen * 4 + i % 4;
    y[i] = part < 2 ? a[at] : b[at];
  }
  return y;
}

inline Floats in_order(Words order, Floats x) {
  int at[16];
  std::memcpy(at, &order, 64);
  Floats y;
  for (int i = 0; i < 16; i++) y[i] = x[at[i]];
  return y;
}

template <class... Numbers>
inline Words words(Numbers... numbers) {
  const int y[16] = {numbers...};
  return read<Words>(y);
}

inline Words left(Words x, int count) {
  uint32_t y[16];
  std::memcpy(y, &x, 64);
  for (uint32_t& one : y) one <<= count;
  return read<Words>(y);
}

// The bytes of a and b in turns, of one half of each lane of 16 bytes.
inline Words in_turns(Words a, Words b, int half) {
  uint8_t x[64], y[64], z[64];
  std::memcpy(x, &a, 64);
  std::memcpy(y, &b, 64);
  for (int lane = 0; lane < 64; lane += 16)
    for (int i = 0; i < 8; i++) {
      z[lane + 2 * i] = x[lane + half + i];
      z[lane + 2 * i + 1] = y[lane + half + i];
    }
  return read<Words>(z);
}

}  // namespace emulated

#define __m512 emulated::Floats
#define __m512i emulated::Words
#define __m512bh emulated::Pairs
#define _mm512_add_ps(a, b) ((a) + (b))
#define _mm512_castsi512_ps(x) emulated::bits<emulated::Floats>(x)
#define _mm512_cvtepu16_epi32 emulated::widened
#define _mm512_cvtepu8_epi32 emulated::widened_bytes
#define _mm512_cvtneps_pbh emulated::narrowed
#define _mm512_dpbf16_ps emulated::dots
#define _mm512_loadu_ps emulated::read<emulated::Floats>
#define _mm512_loadu_si512 emulated::read<emulated::Words>
#define _mm512_mul_ps(a, b) ((a) * (b))
#define _mm512_permutexvar_ps emulated::in_order
#define _mm512_reduce_add_ps emulated::sum_of
#define _mm512_reduce_max_ps emulated::largest_of
#define _mm512_set1_epi32 emulated::all32
#define _mm512_set1_epi8 emulated::all8
#define _mm512_set1_ps emulated::all
#define _mm512_setr_epi32 emulated::words
#define _mm512_setzero_ps() emulated::all(0)
#define _mm512_shuffle_f32x4(a, b, control) emulated::shuffled(a, b, control, false)
#define _mm512_shuffle_ps(a, b, control) emulated::shuffled(a, b, control, true)
#define _mm512_slli_epi32 emulated::left
#define _mm512_storeu_ps emulated::write
#define _mm512_sub_ps(a, b) ((a) - (b))
#define _mm512_unpackhi_epi8(a, b) emulated::in_turns(a, b, 8)
#define _mm512_unpacklo_epi8(a, b) emulated::in_turns(a, b, 0)
