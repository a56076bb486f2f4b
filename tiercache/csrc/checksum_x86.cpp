// CRC32C by the instructions of x86-64. Method of the folding: V. Gopal et al., "Fast CRC Computation for
// Generic Polynomials Using PCLMULQDQ Instruction", Intel 2009, in the reflected form.
#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // of gcc 12's own avx512fintrin.h
#include <immintrin.h>

#include <cstring>

#include "checksum_paths.hpp"

namespace tiercache {
namespace {

constexpr std::size_t kStream = 1024;  // bytes of each of the three interleaved streams

// Carrying a state over n bytes by one carry-less product: reflected x^(8n - 33), so that the crc32
// instruction can reduce the 64-bit result.
constexpr std::uint64_t carry(std::size_t bytes) { return crc_power(8 * bytes - 33); }

// Constants of folding a 128-bit block over `bits` bits: for its low and its high half.
constexpr std::uint64_t fold_low(std::size_t bits) {
  return static_cast<std::uint64_t>(crc_power(bits + 32)) << 1;
}
constexpr std::uint64_t fold_high(std::size_t bits) {
  return static_cast<std::uint64_t>(crc_power(bits - 32)) << 1;
}

std::uint64_t word(const std::uint8_t* at) {
  std::uint64_t value = 0;
  std::memcpy(&value, at, sizeof value);
  return value;
}

__attribute__((target("sse4.2,pclmul"))) std::uint64_t shift(std::uint64_t state, std::uint64_t constant) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(state)),
                                               _mm_cvtsi64_si128(static_cast<long long>(constant)), 0);
  return _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(product)));
}

}  // namespace

bool has_sse42() noexcept { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }

bool has_vpclmul() noexcept {
  return has_sse42() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("vpclmulqdq");
}

__attribute__((target("sse4.2,pclmul"))) std::uint32_t crc32c_sse42(std::uint32_t state,
                                                                    const std::uint8_t* data,
                                                                    std::size_t size) noexcept {
  std::uint64_t a = state;
  while (size >= 3 * kStream) {
    std::uint64_t b = 0, c = 0;
    for (std::size_t i = 0; i < kStream; i += 8) {
      a = _mm_crc32_u64(a, word(data + i));
      b = _mm_crc32_u64(b, word(data + kStream + i));
      c = _mm_crc32_u64(c, word(data + 2 * kStream + i));
    }
    constexpr std::uint64_t over_two = carry(2 * kStream), over_one = carry(kStream);
    a = shift(a, over_two) ^ shift(b, over_one) ^ c;
    data += 3 * kStream;
    size -= 3 * kStream;
  }
  for (; size >= 8; data += 8, size -= 8) a = _mm_crc32_u64(a, word(data));
  auto last = static_cast<std::uint32_t>(a);
  for (; size > 0; ++data, --size) last = _mm_crc32_u8(last, *data);
  return last;
}

#define TIERCACHE_VPCLMUL __attribute__((target("sse4.2,pclmul,avx512f,avx512vl,avx512dq,vpclmulqdq")))

namespace {

TIERCACHE_VPCLMUL inline __m512i load(const std::uint8_t* at) { return _mm512_loadu_si512(at); }

template <std::size_t kBits>
TIERCACHE_VPCLMUL inline __m512i constants() {
  constexpr auto low = static_cast<long long>(fold_low(kBits)),
                 high = static_cast<long long>(fold_high(kBits));
  return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}

// `block` carried over to where `next` lies, and added.
TIERCACHE_VPCLMUL inline __m512i fold(__m512i block, __m512i constant, __m512i next) {
  const __m512i low = _mm512_clmulepi64_epi128(block, constant, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(block, constant, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);
}

}  // namespace

TIERCACHE_VPCLMUL std::uint32_t crc32c_vpclmul(std::uint32_t state, const std::uint8_t* data,
                                               std::size_t size) noexcept {
  if (size < 1024) return crc32c_sse42(state, data, size);
  const __m512i over_four = constants<4 * 512>(), over_one = constants<512>();
  __m512i x0 = load(data), x1 = load(data + 64), x2 = load(data + 128), x3 = load(data + 192);
  x0 = _mm512_xor_si512(x0, _mm512_castsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  data += 256;
  size -= 256;
  for (; size >= 256; data += 256, size -= 256) {
    x0 = fold(x0, over_four, load(data));
    x1 = fold(x1, over_four, load(data + 64));
    x2 = fold(x2, over_four, load(data + 128));
    x3 = fold(x3, over_four, load(data + 192));
  }
  x1 = fold(x0, over_one, x1);
  x2 = fold(x1, over_one, x2);
  x3 = fold(x2, over_one, x3);
  // The last 64 bytes stand for all before them: the crc32 instruction reduces them.
  alignas(64) std::uint8_t rest[64];
  _mm512_store_si512(rest, x3);
  return crc32c_sse42(crc32c_sse42(0, rest, sizeof rest), data, size);
}

}  // namespace tiercache
#endif
