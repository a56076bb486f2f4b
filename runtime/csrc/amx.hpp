// The products of tiles.hpp on AMX, where a processor has it: one instruction multiplies 16 rows by 16
// columns over 16 pairs, and reads operands in the very orders of tiles.hpp.
#pragma once
#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "attention.hpp"

#define TC_AMX [[gnu::target("amx-tile,amx-bf16")]]

namespace tiercache::attention {

constexpr std::size_t kAmxRows = 16;   // at a time
constexpr std::size_t kAmxPairs = 16;  // sums are over multiples of it

// A thread's tile registers, all of 16 rows of 64 bytes, from construction to destruction. Other libraries
// set them up anew before they use them.
class TileRegisters {
 public:
  TC_AMX explicit TileRegisters(bool wanted) : held_(wanted) {
    if (!held_) return;
    struct alignas(64) Config {
      std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};  // of eight registers; the rest must be 0
    };
    static constexpr Config config;  // not on the stack: GCC 12 takes only its first bytes to be read
    _tile_loadconfig(&config);
  }
  TC_AMX ~TileRegisters() {
    if (held_) _tile_release();
  }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;

 private:
  bool held_;
};

// GCC 12's tile loads don't say that they read memory: what was stored before must not come after them.
inline void barrier() { asm volatile("" ::: "memory"); }

// c (+)= a b for 16 rows and a panel of 64 columns: four tiles of sums, each with a tile of b.
template <bool Add>
TC_AMX inline void amx_rows(const std::uint32_t* a, std::size_t a_stride, const std::uint32_t* b,
                            std::size_t pairs, float* c, std::size_t c_stride) {
  constexpr std::size_t kBStride = 64 * sizeof *b;
  const std::size_t a_bytes = a_stride * sizeof *a, c_bytes = c_stride * sizeof *c;
  barrier();
  if constexpr (Add) {
    _tile_loadd(0, c, c_bytes);
    _tile_loadd(1, c + 16, c_bytes);
    _tile_loadd(2, c + 32, c_bytes);
    _tile_loadd(3, c + 48, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (std::size_t p = 0; p < pairs; p += kAmxPairs, a += kAmxPairs, b += kAmxPairs * 64) {
    _tile_loadd(4, a, a_bytes);
    _tile_loadd(5, b, kBStride);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, b + 16, kBStride);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, b + 32, kBStride);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, b + 48, kBStride);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, c, c_bytes);
  _tile_stored(1, c + 16, c_bytes);
  _tile_stored(2, c + 32, c_bytes);
  _tile_stored(3, c + 48, c_bytes);
  barrier();
}

}  // namespace tiercache::attention
