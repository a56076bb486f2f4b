#if defined(__x86_64__)
#include "codec_avx512.hpp"
#include "codec_base.hpp"
#include "codec_stream.hpp"
#include "codec_window_kernels.hpp"

#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12 warns of its own undefined-vector helpers

namespace tiercache::codec {
namespace {

TC_INLINE std::uint8_t largest(__m512i bytes) {
  const __m256i a = _mm256_max_epu8(_mm512_castsi512_si256(bytes), _mm512_extracti64x4_epi64(bytes, 1));
  const __m128i b = _mm_max_epu8(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  // The minimum of 8 words is one instruction: of the complement, each pair of bytes joined into one.
  const __m128i c = _mm_max_epu8(b, _mm_srli_epi16(b, 8));
  const __m128i low = _mm_and_si128(c, _mm_set1_epi16(255));
  const __m128i least = _mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(255), low));
  return static_cast<std::uint8_t>(255 - _mm_cvtsi128_si32(least));
}

TC_TARGET std::size_t encode(const std::uint16_t* x, std::uint8_t* body, WindowLayout at, std::size_t begin,
                             std::size_t end, std::uint8_t* escapes, std::size_t room) {
  const __m512i widest = _mm512_set1_epi8(kWindow);
  std::size_t used = 0;
  for (std::size_t g = begin; g < end; ++g) {
    const Bytes64 bytes = split64(x + g * kGroup);
    _mm512_storeu_si512(body + at.rest() + g * kGroup, bytes.rest);
    const int first = largest(bytes.exponents) - (kWindow - 1);
    // Distance to the first candidate; each further candidate is one lower.
    __m512i distance = _mm512_sub_epi8(bytes.exponents, _mm512_set1_epi8(static_cast<char>(first)));
    __m512i best_distance = distance;
    long long best = -1;
    int base = first;
    for (int k = 0; k < kCandidates; ++k) {
      const long long inside = _mm_popcnt_u64(_mm512_cmplt_epu8_mask(distance, widest));
      if (inside > best) {
        best = inside;
        best_distance = distance;
        base = first - k;
      }
      if (best == kGroup) break;
      distance = _mm512_add_epi8(distance, _mm512_set1_epi8(1));
    }
    body[at.base() + g] = static_cast<std::uint8_t>(base);
    const __m512i code = _mm512_min_epu8(best_distance, widest);
    std::uint8_t* planes = body + at.planes() + g * 24;
    const std::uint64_t p0 = _mm512_test_epi8_mask(code, _mm512_set1_epi8(1));
    const std::uint64_t p1 = _mm512_test_epi8_mask(code, _mm512_set1_epi8(2));
    const std::uint64_t p2 = _mm512_test_epi8_mask(code, _mm512_set1_epi8(4));
    store(planes, p0);
    store(planes + 8, p1);
    store(planes + 16, p2);
    const std::uint64_t escaped = p0 & p1 & p2;
    if (escaped == 0) continue;
    const auto count = static_cast<std::size_t>(_mm_popcnt_u64(escaped));
    if (count > room - used) return room + 1;
    _mm512_storeu_si512(escapes + used, _mm512_maskz_compress_epi8(escaped, bytes.exponents));
    used += count;
  }
  return used;
}

TC_TARGET bool decode(const std::uint8_t* body, WindowLayout at, std::size_t begin, std::size_t end,
                      const std::uint8_t* escapes, std::size_t num_escapes, std::uint16_t* x) {
  constexpr std::size_t kAhead = 32;  // groups
  const bool stream = streams(x, at.groups * kGroup * sizeof *x);
  std::size_t used = 0;
  for (std::size_t g = begin; g < end; ++g) {
    const std::uint8_t* planes = body + at.planes() + g * 24;
    const auto p0 = load<std::uint64_t>(planes);
    const auto p1 = load<std::uint64_t>(planes + 8);
    const auto p2 = load<std::uint64_t>(planes + 16);
    __m512i e = _mm512_set1_epi8(static_cast<char>(body[at.base() + g]));
    e = _mm512_mask_add_epi8(e, p0, e, _mm512_set1_epi8(1));
    e = _mm512_mask_add_epi8(e, p1, e, _mm512_set1_epi8(2));
    e = _mm512_mask_add_epi8(e, p2, e, _mm512_set1_epi8(4));
    const std::uint64_t escaped = p0 & p1 & p2;
    if (escaped != 0) {
      const auto count = static_cast<std::size_t>(_mm_popcnt_u64(escaped));
      const std::size_t left = num_escapes - used;
      if (count > left) return false;
      __m512i some;
      if (left >= 64)
        some = _mm512_loadu_si512(escapes + used);
      else
        some = _mm512_maskz_loadu_epi8((__mmask64{1} << left) - 1, escapes + used);
      e = _mm512_mask_expand_epi8(e, escaped, some);
      used += count;
    }
    const std::uint8_t* rest = body + at.rest() + g * kGroup;
    __builtin_prefetch(rest + kAhead * kGroup);
    __builtin_prefetch(planes + kAhead * 24);
    merge64(e, _mm512_loadu_si512(rest), x + g * kGroup, stream);
  }
  stream_fence();
  return used == num_escapes;
}

}  // namespace

const WindowKernels kWindowAvx512 = {encode, decode};

}  // namespace tiercache::codec
#endif
