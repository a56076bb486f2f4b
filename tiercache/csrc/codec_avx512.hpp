// Vector pieces that the AVX-512 paths share: 64 bf16 words to exponent and rest bytes, and back.
#pragma once
#if defined(__x86_64__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own undefined-vector helpers
#include <immintrin.h>

#include <cstdint>

#define TC_TARGET \
  [[gnu::target(  \
      "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512vbmi2,avx2,bmi,bmi2,lzcnt,popcnt,prfchw")]]
#define TC_INLINE TC_TARGET inline

namespace tiercache::codec {
namespace {

struct alignas(64) ByteIndex {
  std::uint8_t at[64];
};

constexpr ByteIndex odd_index() {
  ByteIndex index{};
  for (int i = 0; i < 64; ++i) index.at[i] = static_cast<std::uint8_t>(2 * i + 1);
  return index;
}

constexpr ByteIndex interleave_index(int start) {
  ByteIndex index{};
  for (int i = 0; i < 64; ++i) index.at[i] = static_cast<std::uint8_t>(start + i / 2 + (i % 2) * 64);
  return index;
}

constexpr ByteIndex kOdd = odd_index();
constexpr ByteIndex kInterleaveLow = interleave_index(0);
constexpr ByteIndex kInterleaveHigh = interleave_index(32);

struct Bytes64 {
  __m512i exponents;
  __m512i rest;  // mantissa << 1 | sign
};

// Turned left by one bit, a word's high byte is its exponent.
TC_INLINE Bytes64 split64(const std::uint16_t* x) {
  const __m512i odd = _mm512_load_si512(kOdd.at);
  const __m512i even = _mm512_sub_epi8(odd, _mm512_set1_epi8(1));
  const __m512i a = _mm512_loadu_si512(x);
  const __m512i b = _mm512_loadu_si512(x + 32);
  const __m512i low = _mm512_shldi_epi16(a, a, 1);
  const __m512i high = _mm512_shldi_epi16(b, b, 1);
  return {_mm512_permutex2var_epi8(low, odd, high), _mm512_permutex2var_epi8(low, even, high)};
}

// With `stream`, past the caches: x lies at a cache line then.
TC_INLINE void merge64(__m512i exponents, __m512i rest, std::uint16_t* x, bool stream) {
  const __m512i a = _mm512_permutex2var_epi8(rest, _mm512_load_si512(kInterleaveLow.at), exponents);
  const __m512i b = _mm512_permutex2var_epi8(rest, _mm512_load_si512(kInterleaveHigh.at), exponents);
  const __m512i low = _mm512_shldi_epi16(a, a, 15), high = _mm512_shldi_epi16(b, b, 15);
  if (stream) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(x), low);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(x + 32), high);
  } else {
    _mm512_storeu_si512(x, low);
    _mm512_storeu_si512(x + 32, high);
  }
}

}  // namespace
}  // namespace tiercache::codec
#pragma GCC diagnostic pop
#endif
