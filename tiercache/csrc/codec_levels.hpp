// The static code of the exponent codec: symbols ranked by how frequent they are, and coded in levels. A
// level names the next few ranks in one to three bits; its last value says that the next level goes on, and
// after the last level the exponent is an escape. A level holds the elements that are left in whole vectors,
// each bit of 64 of them side by side, so that nothing is looked up or shifted element by element. A symbol
// takes at most two hundredths of a bit more than with Huffman's code where exponents have up to 2.8 bits of
// entropy.
//
// ranks of a level | their lengths    | bits
//                1 | 1                | a
//                3 | 2 2 2            | a b
//                5 | 2 2 3 3 3        | a b, and c where a b is 2 or 3
//                6 | 2 3 3 3 3 3      | a b, and c where a b is not 0
//                7 | 3 3 3 3 3 3 3    | a b c
#pragma once
#include <array>
#include <cstdint>

namespace tiercache::codec {

constexpr int kMaxLevels = 6;
constexpr int kLevelBits = 3;      // bits of a level: a, b, c
constexpr int kSymbols = 32;       // deltas 0..29, then the two below
constexpr int kDeltas = 30;        // width of the delta window
constexpr int kZeroSymbol = 30;    // the exponent itself is 0: zeros and denormals
constexpr int kEscapeSymbol = 31;  // the exponent follows as a byte of its own
constexpr int kEscapeBits = 8;

// How an exponent is predicted: not at all, by its row's mean, by its channel's, or by both.
enum class Prediction : std::uint8_t { none = 0, row = 1, channel = 2, both = 3 };

// Sampled counts of what a table codes: entry d for exponent - prediction = d (mod 256), 256 for exponent 0.
using Counts = std::array<std::uint64_t, 257>;

using LevelRanks = std::array<std::uint8_t, kMaxLevels>;  // ranks of each level, then zeros
using SymbolOrder = std::array<std::uint8_t, kSymbols>;   // symbol of each rank, then kEscapeSymbol

// A symbol in one level: its bits a, b, c, whether it has a third one, and whether the next level goes on.
enum LevelCode : std::uint8_t { kC = 1, kB = 2, kA = 4, kThird = 8, kGoesOn = 16 };

// One immutable table; safe to share between threads.
class ExponentTable {
 public:
  // `base` is the delta of symbol 0. Throws Malformed unless the levels are some and the order names each of
  // their ranks' symbols once.
  ExponentTable(Prediction prediction, std::uint8_t base, const LevelRanks& levels, const SymbolOrder& order);

  // The table that codes these counts best: in few bits, and where that costs next to none in few levels.
  static ExponentTable train(Prediction prediction, const Counts& counts);

  // Bits that the sampled exponents take with this table, escapes included.
  [[nodiscard]] std::uint64_t cost_bits(const Counts& counts) const;

  // Bits that they would take with a table made for them.
  [[nodiscard]] static std::uint64_t fresh_bits(const Counts& counts);

  Prediction prediction;
  std::uint8_t base;
  LevelRanks levels;
  SymbolOrder order;

  int num_levels;
  std::uint8_t escape_rank;  // the one after the last
  std::uint8_t zero_rank;    // of exponents of 0; that of escapes where they escape
  // Rank -> delta, and symbol -> LevelCode in each level: whole vectors for a byte permutation.
  alignas(64) std::array<std::uint8_t, 64> delta_of;
  alignas(64) std::array<std::array<std::uint8_t, 64>, kMaxLevels> code_of;
  std::array<std::uint8_t, kSymbols> is_escape;  // symbol -> 1 if no level names it

 private:
  void fill();
};

}  // namespace tiercache::codec
