// The implementations behind crc32c(). All work on the inverted state; only checksum.cpp includes this.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

namespace tiercache {

struct CrcPath {
  const char* name;
  std::uint32_t (*update)(std::uint32_t state, const std::uint8_t* data, std::size_t size) noexcept;
  bool (*available)() noexcept;
};

inline constexpr std::uint32_t kCastagnoli = 0x82F63B78u;  // reflected

// x^exponent modulo the polynomial, reflected: what carrying a state over exponent zero bits multiplies by.
constexpr std::uint32_t crc_power(std::uint64_t exponent) {
  std::uint32_t value = 0x80000000u;
  for (std::uint64_t i = 0; i < exponent; ++i) value = (value >> 1) ^ ((value & 1u) ? kCastagnoli : 0u);
  return value;
}

std::uint32_t crc32c_portable(std::uint32_t state, const std::uint8_t* data, std::size_t size) noexcept;
#if defined(__x86_64__)
std::uint32_t crc32c_sse42(std::uint32_t state, const std::uint8_t* data, std::size_t size) noexcept;
std::uint32_t crc32c_vpclmul(std::uint32_t state, const std::uint8_t* data, std::size_t size) noexcept;
bool has_sse42() noexcept;
bool has_vpclmul() noexcept;
#endif

}  // namespace tiercache
