#include "codec_huffman.hpp"

#include <algorithm>
#include <limits>
#include <vector>

#include "codec_base.hpp"

namespace tiercache::codec {
namespace {

using SymbolCounts = std::array<std::uint64_t, kSymbols>;
using Lengths = std::array<std::uint8_t, kSymbols>;

// A coin of package-merge: its weight and the set of symbols in it.
struct Coin {
  std::uint64_t weight;
  std::uint64_t symbols[2];  // bit pairs would overflow: how often each symbol is in, as 4-bit counters
};

Coin add(const Coin& a, const Coin& b) {
  return {a.weight + b.weight, {a.symbols[0] + b.symbols[0], a.symbols[1] + b.symbols[1]}};
}

std::uint64_t code_cost(const SymbolCounts& counts, const Lengths& lengths) {
  std::uint64_t bits = 0;
  for (int s = 0; s < kSymbols; ++s) bits += counts[s] * lengths[s];
  return bits + counts[kEscapeSymbol] * kEscapeBits;
}

// Where the window of kDeltas deltas holds the most.
std::uint8_t best_base(const Counts& counts) {
  std::uint64_t best = 0;
  int base = 0;
  for (int start = 0; start < 256; ++start) {
    std::uint64_t inside = 0;
    // The middle of the window weighs a little more, so that the mode is not left at an edge.
    for (int i = 0; i < kDeltas; ++i)
      inside += counts[static_cast<std::size_t>((start + i) & 255)] * (i >= 5 && i < kDeltas - 5 ? 65u : 64u);
    if (inside > best) {
      best = inside;
      base = start;
    }
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

// Keeps the `keep` most frequent symbols and lets the rest escape. The escape symbol is always coded.
SymbolCounts trimmed(const SymbolCounts& counts, int keep) {
  std::array<int, kSymbols - 1> order{};
  for (int s = 0; s < kSymbols - 1; ++s) order[s] = s;
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return counts[a] > counts[b]; });
  SymbolCounts out{};
  out[kEscapeSymbol] = counts[kEscapeSymbol];
  for (int i = 0; i < kSymbols - 1; ++i) {
    const int s = order[i];
    if (i < keep)
      out[s] = counts[s];
    else
      out[kEscapeSymbol] += counts[s];
  }
  out[order[0]] = std::max<std::uint64_t>(out[order[0]], 1);
  out[kEscapeSymbol] = std::max<std::uint64_t>(out[kEscapeSymbol], 1);
  return out;
}

}  // namespace

Lengths limited_lengths(const SymbolCounts& counts) {
  std::vector<Coin> coins;
  for (int s = 0; s < kSymbols; ++s) {
    if (counts[s] == 0) continue;
    Coin coin{counts[s], {0, 0}};
    coin.symbols[s / 16] = std::uint64_t{1} << (s % 16 * 4);
    coins.push_back(coin);
  }
  const auto lighter = [](const Coin& a, const Coin& b) { return a.weight < b.weight; };
  std::stable_sort(coins.begin(), coins.end(), lighter);
  std::vector<Coin> level = coins;
  std::vector<Coin> next;
  for (int depth = 1; depth < kMaxBits; ++depth) {
    next.clear();
    for (std::size_t i = 0; i + 1 < level.size(); i += 2) next.push_back(add(level[i], level[i + 1]));
    level.resize(coins.size() + next.size());
    std::merge(coins.begin(), coins.end(), next.begin(), next.end(), level.begin(), lighter);
  }
  Coin sum{0, {0, 0}};
  for (std::size_t i = 0; i < 2 * coins.size() - 2; ++i) sum = add(sum, level[i]);
  Lengths lengths{};
  for (int s = 0; s < kSymbols; ++s)
    lengths[s] = static_cast<std::uint8_t>(sum.symbols[s / 16] >> (s % 16 * 4) & 15);
  return lengths;
}

ExponentTable::ExponentTable(Prediction prediction_, std::uint8_t base_, const Lengths& lengths_)
    : prediction(prediction_), base(base_), lengths(lengths_), code{}, remap{}, by_delta{}, decode{} {
  std::uint32_t kraft = 0;
  for (const auto length : lengths) {
    if (length > kMaxBits) throw Malformed("exponent table: a code is longer than 11 bits");
    if (length != 0) kraft += 1u << (kMaxBits - length);
  }
  if (kraft != 1u << kMaxBits) throw Malformed("exponent table: the lengths make no complete prefix code");
  if (lengths[kEscapeSymbol] == 0) throw Malformed("exponent table: the escape symbol has no code");
  if (static_cast<int>(prediction) > 3) throw Malformed("exponent table: unknown prediction");
  fill_encode();
  fill_decode();
}

void ExponentTable::fill_encode() {
  std::uint32_t next = 0;
  for (unsigned length = 1; length <= kMaxBits; ++length) {
    next <<= 1;
    for (int s = 0; s < kSymbols; ++s) {
      if (lengths[s] != length) continue;
      std::uint32_t reversed = 0;
      for (unsigned bit = 0; bit < length; ++bit) reversed |= (next >> bit & 1u) << (length - 1 - bit);
      code[s] = static_cast<std::uint16_t>(reversed | length << 12);
      ++next;
    }
  }
  const auto escape = static_cast<std::uint16_t>(code[kEscapeSymbol] | 1u << 11);
  for (std::size_t s = 0; s < remap.size(); ++s)
    remap[s] = static_cast<std::uint8_t>(lengths[s % kSymbols] != 0 ? s % kSymbols : kEscapeSymbol);
  for (int d = 0; d < 256; ++d) {
    const int symbol = (d - base) & 255;
    const bool coded = symbol < kDeltas && lengths[symbol] != 0;
    by_delta[static_cast<std::size_t>(d)] = coded ? code[symbol] : escape;
  }
  by_delta[256] = lengths[kZeroSymbol] != 0 ? code[kZeroSymbol] : escape;
}

void ExponentTable::fill_decode() {
  std::array<std::uint8_t, 1u << kMaxBits> single{};
  for (int s = 0; s < kSymbols; ++s) {
    if (lengths[s] == 0) continue;
    for (std::uint32_t i = code[s] & 0x7FFu; i < single.size(); i += 1u << lengths[s])
      single[i] = static_cast<std::uint8_t>(s);
  }
  for (std::uint32_t bits = 0; bits < decode.size(); ++bits) {
    std::uint64_t entry = 0;
    unsigned used = 0;
    unsigned count = 0;
    while (count < 6) {
      const unsigned symbol = single[bits >> used];
      if (used + lengths[symbol] > kMaxBits) break;
      used += lengths[symbol];
      ++count;
      entry |= std::uint64_t{symbol} << (8 * count);
    }
    decode[bits] = entry | used | std::uint64_t{count} << 56;
  }
}

std::uint64_t ExponentTable::cost_bits(const Counts& counts) const {
  std::uint64_t bits = 0;
  for (std::size_t d = 0; d < counts.size(); ++d) {
    const std::uint16_t entry = by_delta[d];
    bits += counts[d] * ((entry >> 12) + (entry >> 11 & 1u) * kEscapeBits);
  }
  return bits;
}

std::uint64_t ExponentTable::fresh_bits(const Counts& counts) const {
  const SymbolCounts all = window_counts(counts, best_base(counts));
  std::uint64_t total = 0;
  for (const std::uint64_t count : all) total += count;
  const auto frequent = std::count_if(all.begin(), all.end() - 1, [&](auto c) { return c * 1024 > total; });
  const SymbolCounts kept = trimmed(all, std::max(1, static_cast<int>(frequent)));
  return code_cost(kept, limited_lengths(kept));
}

ExponentTable ExponentTable::train(Prediction prediction, const Counts& counts) {
  const std::uint8_t base = best_base(counts);
  const SymbolCounts all = window_counts(counts, base);
  Lengths best{};
  std::uint64_t best_bits = std::numeric_limits<std::uint64_t>::max();
  for (int keep = 1; keep < kSymbols; ++keep) {
    const SymbolCounts kept = trimmed(all, keep);
    const Lengths lengths = limited_lengths(kept);
    const std::uint64_t bits = code_cost(kept, lengths);
    if (bits < best_bits) {
      best_bits = bits;
      best = lengths;
    }
  }
  return {prediction, base, best};
}

}  // namespace tiercache::codec
