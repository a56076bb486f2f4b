// What a path of the exponent codec implements. The three paths agree bit for bit.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include "codec_exponent.hpp"

namespace tiercache::codec {

// A block's prediction: level + (avg(row, channel) >> 2), all bytes modulo 256, in steps of an eighth of an
// exponent with 128 in the middle. Without a row or channel part that part is 128 everywhere.
struct BlockShape {
  std::size_t rows;
  std::size_t cols;
  std::uint8_t level;                // grand mean - 32
  const std::uint8_t* row_mean;      // [rows]
  const std::uint8_t* channel_mean;  // [cols]
};

// The levels of a block: planes a and b of 64 elements a word, plane c of those elements that have it.
template <class Byte>
struct Levels {
  std::array<std::array<Byte*, kLevelBits>, kMaxLevels> planes;
  std::array<std::array<std::uint32_t, 2>, kMaxLevels> sizes;  // elements, and bits of plane c
};

constexpr std::size_t num_vectors(std::size_t elements) { return (elements + kVector - 1) / kVector; }

// The first elements of a vector that holds `left` of them or 64.
constexpr std::uint64_t first_elements(std::size_t left) {
  return left >= kVector ? ~std::uint64_t{0} : (std::uint64_t{1} << left) - 1;
}

// What a level of so many ranks has.
constexpr bool has_b(unsigned ranks) { return ranks > 1; }
constexpr bool has_c(unsigned ranks) { return ranks > 3; }

// Symbols or ranks of the level at work and of the one below it: room for a block and a vector each.
using Work = std::array<std::uint8_t*, 2>;

// Where the codes of one block go. A plane has room for kPlaneRoom bytes.
struct EncodeSink {
  Levels<std::uint8_t> levels;
  std::uint8_t* escapes;  // room for a block and a vector
  std::size_t num_escapes;
  Work work;
  // What the block after this one will read: a path may ask for it meanwhile. Never touched, so it may lie
  // anywhere.
  const std::uint16_t* next;
};

// Where they come from. Whatever the planes hold, at most a bit an element is taken from plane c and a byte
// an element from the escapes; beyond that a path may read kOverread bytes more.
struct DecodeSource {
  const std::uint8_t* rest;
  Levels<const std::uint8_t> levels;
  const std::uint8_t* escapes;
  std::size_t num_escapes;
  Work work;
  bool stream;  // write past the caches; the caller fences
};

struct ExponentKernels {
  // n (a multiple of 64) words -> exponents, and mantissa << 1 | sign.
  void (*split)(const std::uint16_t* x, std::size_t n, std::uint8_t* exponents, std::uint8_t* rest);
  // Sum of each row's bytes.
  void (*row_sums)(const std::uint8_t* exponents, std::size_t rows, std::size_t cols, std::uint32_t* sums);
  // Adds each column's bytes over all rows to `sums`.
  void (*channel_sums)(const std::uint8_t* exponents, std::size_t rows, std::size_t cols,
                       std::uint16_t* sums);
  void (*encode)(const std::uint8_t* exponents, const BlockShape& shape, const ExponentTable& table,
                 EncodeSink& sink);
  // Puts the block together. False unless levels and escapes have the sizes that the source says.
  bool (*decode)(const DecodeSource& source, const BlockShape& shape, const ExponentTable& table,
                 std::uint16_t* x);
};

extern const ExponentKernels kExponentPortable;
#if defined(__x86_64__)
extern const ExponentKernels kExponentAvx2;
extern const ExponentKernels kExponentAvx512;
#endif

constexpr std::size_t kPlaneRoom = kBlock / 8 + 16;
constexpr std::size_t kOverread = kVector;

// Bits at..at+n-1 of a plane, n at most 64; reads 9 bytes from the first of them.
[[gnu::always_inline]] inline std::uint64_t take_bits(const std::uint8_t* plane, std::uint64_t at,
                                                      unsigned n) {
  const std::uint8_t* from = plane + (at >> 3);
  const unsigned shift = at & 7;
  std::uint64_t bits = load<std::uint64_t>(from) >> shift;
  if (n + shift > 64) [[unlikely]]
    bits |= std::uint64_t{from[8]} << (64 - shift);
  return bits;
}

// Appends bits to a plane, at most 64 at a time, of which those above `n` are 0.
struct PlaneWriter {
  std::uint8_t* plane;
  std::uint64_t pending = 0;

  [[gnu::always_inline]] inline void put(std::uint64_t at, std::uint64_t bits, unsigned n) {
    std::uint8_t* to = plane + (at >> 3);
    const unsigned shift = at & 7;
    pending |= bits << shift;
    store(to, pending);
    const unsigned total = shift + n;
    if (total < 64) [[likely]] {
      pending >>= total & 56;
    } else {
      pending = shift != 0 ? bits >> (64 - shift) : 0;
      to[8] = static_cast<std::uint8_t>(pending);
    }
  }
};

}  // namespace tiercache::codec
