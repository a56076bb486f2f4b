// What every codec shares: the instruction sets to choose from, and unaligned loads and stores.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace tiercache::codec {

// A payload that cannot be what an encoder wrote.
struct Malformed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Paths with bit-identical results. avx512 needs F, BW, DQ, VL, VBMI and VBMI2; avx2 needs AVX2 and BMI2.
enum class Isa : int { portable = 0, avx2 = 1, avx512 = 2 };

// Whether this processor can run that path.
bool isa_available(Isa isa) noexcept;

// The fastest path that this processor can run.
Isa isa_best() noexcept;

template <class T>
[[gnu::always_inline]] inline T load(const void* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
[[gnu::always_inline]] inline void store(void* to, T value) noexcept {
  std::memcpy(to, &value, sizeof value);
}

}  // namespace tiercache::codec
