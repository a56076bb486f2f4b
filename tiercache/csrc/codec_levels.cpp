#include "codec_levels.hpp"

#include <algorithm>

#include "codec_base.hpp"

namespace tiercache::codec {
namespace {

using SymbolCounts = std::array<std::uint64_t, kSymbols>;

// How many ranks of a level have codes of two bits; the others and the way on have three.
constexpr unsigned short_codes(unsigned ranks) { return ranks == 3 ? 3 : 7 - ranks; }

constexpr bool is_level(unsigned ranks) { return ranks == 1 || ranks == 3 || (ranks >= 5 && ranks <= 7); }

// Bits of the code of rank r in a level; r = ranks is the way on.
constexpr unsigned code_bits(unsigned ranks, unsigned r) {
  return ranks == 1 ? 1 : r < short_codes(ranks) || ranks == 3 ? 2 : 3;
}

// LevelCode of rank r in a level.
std::uint8_t level_code(unsigned ranks, unsigned r) {
  const unsigned on = r == ranks ? kGoesOn : 0u;
  if (ranks == 1) return static_cast<std::uint8_t>(on | (r != 0 ? kA : 0u));
  const unsigned two = short_codes(ranks);
  const unsigned past = r < two ? 0 : r - two;
  const bool third = ranks != 3 && r >= two;
  const unsigned ab = third ? two + past / 2 : r;
  return static_cast<std::uint8_t>(on | ab << 1 | (third ? unsigned{kThird} | past % 2 : 0u));
}

// Where the window of kDeltas deltas holds the most.
std::uint8_t best_base(const Counts& counts) {
  constexpr int kMargin = 5;
  const auto at = [&](int delta) { return counts[static_cast<std::size_t>(delta & 255)]; };
  std::uint64_t window = 0, middle = 0;  // of the window that starts at `start`
  for (int i = 0; i < kDeltas; ++i) window += at(i);
  for (int i = kMargin; i < kDeltas - kMargin; ++i) middle += at(i);
  std::uint64_t best = 0;
  int base = 0;
  for (int start = 0; start < 256; ++start) {
    // The middle weighs a little more, so that the mode is not left at an edge.
    if (const std::uint64_t inside = 64 * window + middle; inside > best) {
      best = inside;
      base = start;
    }
    window += at(start + kDeltas) - at(start);
    middle += at(start + kDeltas - kMargin) - at(start + kMargin);
  }
  return static_cast<std::uint8_t>(base);
}

SymbolCounts window_counts(const Counts& counts, std::uint8_t base) {
  SymbolCounts out{};
  for (int d = 0; d < 256; ++d) {
    const int symbol = (d - base) & 255;
    out[symbol < kDeltas ? symbol : kEscapeSymbol] += counts[static_cast<std::size_t>(d)];
  }
  out[kZeroSymbol] = counts[256];
  return out;
}

// Bits count by this, and an element counts one for each level that it comes to, for levels take time. At a
// hundredth of a bit a visit pages of a trained model don't grow by a thousandth, and those with the most
// levels are decoded in two thirds of the time.
constexpr std::uint64_t kBitCost = 100;

// What ranks from one on take at best, and in which levels.
struct Suffix {
  std::uint64_t cost;
  LevelRanks levels;
};

struct Code {
  LevelRanks levels;
  SymbolOrder order;
};

// The levels that code ranked symbols best: `from[r]` symbols have rank r or a higher one.
// Of equals those with fewer levels.
Suffix best_levels(const std::array<std::uint64_t, kSymbols>& from) {
  std::array<Suffix, kSymbols> best;  // of rank r and above, in at most as many levels as tried so far
  for (std::size_t r = 0; r < kSymbols; ++r) best[r] = {kBitCost * kEscapeBits * from[r], {}};
  for (int depth = 1; depth <= kMaxLevels; ++depth) {
    const std::array<Suffix, kSymbols> shallower = best;
    for (std::size_t r = 0; r < kSymbols; ++r) {
      for (unsigned ranks = 1; ranks <= 7 && r + ranks < kSymbols; ++ranks) {
        if (!is_level(ranks)) continue;
        std::uint64_t bits = from[r] * code_bits(ranks, 0);
        if (ranks == 5 || ranks == 6) bits += from[r + short_codes(ranks)];
        const std::uint64_t cost = kBitCost * bits + from[r] + shallower[r + ranks].cost;
        const bool forced = r == 0 && best[r].levels[0] == 0;  // there is a first level in any case
        if (cost >= best[r].cost && !forced) continue;
        best[r] = {cost, shallower[r + ranks].levels};
        std::copy_backward(best[r].levels.begin(), best[r].levels.end() - 1, best[r].levels.end());
        best[r].levels[0] = static_cast<std::uint8_t>(ranks);
      }
    }
  }
  return best[0];
}

// The levels and ranks that code these symbols best.
Code best_code(const SymbolCounts& counts) {
  SymbolOrder ranked{};
  for (int s = 0; s < kSymbols; ++s) ranked[s] = static_cast<std::uint8_t>(s);
  std::stable_sort(ranked.begin(), ranked.end() - 1, [&](auto a, auto b) { return counts[a] > counts[b]; });
  std::array<std::uint64_t, kSymbols> from{};
  from[kEscapeSymbol] = counts[kEscapeSymbol];
  for (std::size_t r = kEscapeSymbol; r-- > 0;) from[r] = from[r + 1] + counts[ranked[r]];
  const LevelRanks levels = best_levels(from).levels;
  std::size_t num_ranks = 0;
  for (const unsigned ranks : levels) num_ranks += ranks;
  std::fill(ranked.begin() + static_cast<std::ptrdiff_t>(num_ranks), ranked.end(), kEscapeSymbol);
  return {levels, ranked};
}

}  // namespace

ExponentTable::ExponentTable(Prediction prediction_, std::uint8_t base_, const LevelRanks& levels_,
                             const SymbolOrder& order_)
    : prediction(prediction_),
      base(base_),
      levels(levels_),
      order(order_),
      num_levels(0),
      escape_rank(0),
      zero_rank(0),
      delta_of{},
      code_of{},
      is_escape{} {
  if (static_cast<int>(prediction) > 3) throw Malformed("exponent table: unknown prediction");
  unsigned num_ranks = 0;
  while (num_levels < kMaxLevels && levels[num_levels] != 0) {
    if (!is_level(levels[num_levels])) throw Malformed("exponent table: no level has so many ranks");
    num_ranks += levels[num_levels++];
  }
  if (num_levels == 0) throw Malformed("exponent table: no level");
  for (int level = num_levels; level < kMaxLevels; ++level)
    if (levels[level] != 0) throw Malformed("exponent table: a level after the last");
  if (num_ranks >= kSymbols) throw Malformed("exponent table: more ranks than symbols");
  std::uint32_t seen = 0;
  for (std::size_t r = 0; r < kSymbols; ++r) {
    const bool ranked = r < num_ranks;
    if (ranked != (order[r] < kEscapeSymbol) || order[r] > kEscapeSymbol ||
        (ranked && (seen >> order[r] & 1u) != 0))
      throw Malformed("exponent table: the ranks don't name a symbol each");
    seen |= 1u << order[r];
  }
  escape_rank = zero_rank = static_cast<std::uint8_t>(num_ranks);
  fill();
}

void ExponentTable::fill() {
  unsigned first = 0;  // rank of a level
  for (int level = 0; level < num_levels; ++level) {
    const unsigned ranks = levels[level];
    code_of[level].fill(level_code(ranks, ranks));
    for (unsigned r = 0; r < ranks; ++r) code_of[level][order[first + r]] = level_code(ranks, r);
    first += ranks;
  }
  is_escape.fill(1);
  for (unsigned r = 0; r < first; ++r) {
    is_escape[order[r]] = 0;
    if (order[r] == kZeroSymbol)
      zero_rank = static_cast<std::uint8_t>(r);
    else
      delta_of[r] = static_cast<std::uint8_t>(base + order[r]);
  }
}

std::uint64_t ExponentTable::cost_bits(const Counts& counts) const {
  const SymbolCounts all = window_counts(counts, base);
  std::uint64_t left = 0;
  for (const std::uint64_t count : all) left += count;
  std::uint64_t bits = 0;
  std::size_t rank = 0;
  for (int level = 0; level < num_levels; ++level) {
    const unsigned ranks = levels[level];
    for (unsigned r = 0; r < ranks; ++r, ++rank) {
      const std::uint64_t count = all[order[rank]];
      bits += count * code_bits(ranks, r);
      left -= count;
    }
    bits += left * code_bits(ranks, ranks);
  }
  return bits + kEscapeBits * left;
}

std::uint64_t ExponentTable::fresh_bits(const Counts& counts) {
  return train(Prediction::none, counts).cost_bits(counts);
}

ExponentTable ExponentTable::train(Prediction prediction, const Counts& counts) {
  const std::uint8_t base = best_base(counts);
  const Code code = best_code(window_counts(counts, base));
  return {prediction, base, code.levels, code.order};
}

}  // namespace tiercache::codec
