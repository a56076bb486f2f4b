// The static code of the exponent codec: 32 symbols, at most 11 bits, and its encode and decode tables.
#pragma once
#include <array>
#include <cstdint>

namespace tiercache::codec {

constexpr int kMaxBits = 11;
constexpr int kSymbols = 32;       // deltas 0..29, then the two below
constexpr int kDeltas = 30;        // width of the delta window
constexpr int kZeroSymbol = 30;    // the exponent itself is 0: zeros and denormals
constexpr int kEscapeSymbol = 31;  // the exponent follows as a byte of its own
constexpr int kEscapeBits = 8;

// How an exponent is predicted: not at all, by its row's mean, by its channel's, or by both.
enum class Prediction : std::uint8_t { none = 0, row = 1, channel = 2, both = 3 };

// Sampled counts of what a table codes: entry d for exponent - prediction = d (mod 256), 256 for exponent 0.
using Counts = std::array<std::uint64_t, 257>;

// Lengths of an optimal prefix code of at most kMaxBits (package-merge); 0 where the count is 0.
// At least two counts must be positive.
std::array<std::uint8_t, kSymbols> limited_lengths(const std::array<std::uint64_t, kSymbols>& counts);

// One immutable table; safe to share between threads.
class ExponentTable {
 public:
  // `base` is the delta of symbol 0. Throws Malformed unless the lengths make a complete prefix code that
  // has the escape symbol.
  ExponentTable(Prediction prediction, std::uint8_t base, const std::array<std::uint8_t, kSymbols>& lengths);

  // The table that codes these counts in the fewest bits.
  static ExponentTable train(Prediction prediction, const Counts& counts);

  // Bits that the sampled exponents take with this table, escapes included.
  [[nodiscard]] std::uint64_t cost_bits(const Counts& counts) const;

  // Bits that they would take with a table made for them, found quickly and not quite the best.
  [[nodiscard]] std::uint64_t fresh_bits(const Counts& counts) const;

  Prediction prediction;
  std::uint8_t base;
  std::array<std::uint8_t, kSymbols> lengths;

  // Symbol -> code | length << 12, codes least significant bit first; and symbol -> symbol or escape.
  alignas(64) std::array<std::uint16_t, kSymbols> code;
  alignas(64) std::array<std::uint8_t, 64> remap;
  // Delta -> code | escape flag << 11 | length << 12; entry 256 for exponent 0.
  std::array<std::uint16_t, 257> by_delta;
  // 11 bits -> bits used (byte 0), up to six symbols (bytes 1 to 6), number of symbols (byte 7).
  alignas(64) std::array<std::uint64_t, 1u << kMaxBits> decode;

 private:
  void fill_encode();
  void fill_decode();
};

}  // namespace tiercache::codec
