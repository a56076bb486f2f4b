// The lossy codecs' loops over tiles of 64 groups, in a shape that compilers widen, compiled once a path:
// TC_PATH names the namespace and TC_TARGET the instructions. The arithmetic is codec_quant.hpp's.

namespace tiercache::codec::TC_PATH {

constexpr std::size_t kTile = 64;

// Groups g .. g + w - 1 lie side by side (axis tokens): row i of the tile has element i of each.
template <class Format, class Element>
TC_TARGET [[gnu::always_inline]] inline std::size_t encode_tile(const typename Element::Word* x, QuantShape s,
                                                                std::uint64_t seed, std::size_t group,
                                                                std::size_t w, std::uint8_t* body) {
  const QuantGroup g = quant_group(s, group);
  const auto count = static_cast<std::size_t>(g.count);
  alignas(64) float tile[kQuantGroup * kTile];
  alignas(64) u32 most[kTile] = {};
  alignas(64) i32 low[kTile];
  alignas(64) i32 high[kTile];
  alignas(64) u16 steps[kTile];
  alignas(64) u16 lowests[kTile];
  alignas(64) float inverses[kTile];
  for (std::size_t c = 0; c < w; ++c) low[c] = 0x7FFFFFFF;
  for (std::size_t c = 0; c < w; ++c) high[c] = -0x7FFFFFFF - 1;
  for (std::size_t i = 0; i < count; ++i) {
    const typename Element::Word* from = x + g.start + i * g.stride;
    for (std::size_t c = 0; c < w; ++c) {
      const float value = Element::to_float(from[c]);
      tile[i * kTile + c] = value;
      const u32 bits = float_bits(value);
      const u32 magnitude = bits & 0x7FFFFFFFu;
      most[c] = magnitude > most[c] ? magnitude : most[c];
      if constexpr (Format::kScaleBytes == 4) {
        const i32 place = ordered(bits);
        low[c] = place < low[c] ? place : low[c];
        high[c] = place > high[c] ? place : high[c];
      }
    }
  }
  std::size_t exceptions = 0;
  for (std::size_t c = 0; c < w; ++c) {
    const bool exact = !is_scalable(most[c]);
    const QuantScale scale =
        exact ? QuantScale{kExact, 0, 0.0f} : Format::scale(QuantRange{most[c], low[c], high[c]});
    write_scale(body, Format::kScaleBytes, group + c, scale);
    steps[c] = scale.step;
    lowests[c] = scale.lowest;
    inverses[c] = scale.inverse;
    exceptions += exact;
  }
  std::uint8_t* codes = body + s.groups() * Format::kScaleBytes;
  alignas(64) std::uint8_t row[2][kTile] = {};
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t index = g.start + i * g.stride;
    std::uint8_t* to = row[i % 2];
    for (std::size_t c = 0; c < w; ++c)
      to[c] = static_cast<std::uint8_t>(
          Format::code(tile[i * kTile + c], QuantScale{steps[c], lowests[c], inverses[c]}, seed, index + c));
    if constexpr (Format::kBits == 8) {
      std::memcpy(codes + index, to, w);
    } else if (i % 2 == 1 || i + 1 == count) {
      std::uint8_t* pairs = codes + pair_index(s, g, static_cast<int>(i & ~std::size_t{1}));
      for (std::size_t c = 0; c < w; ++c)
        pairs[c] = static_cast<std::uint8_t>(i % 2 == 1 ? row[0][c] | row[1][c] << 4 : row[0][c]);
    }
  }
  // An exception's codes are 0 on every path: 0 times anything, but not of values that are not finite.
  if (exceptions != 0)
    for (std::size_t c = 0; c < w; ++c)
      if (steps[c] == kExact) quant_encode_group<Format, Element>(x, s, group + c, seed, body);
  return exceptions;
}

// One group whose elements follow each other (axis channels).
template <class Format, class Element>
TC_TARGET [[gnu::always_inline]] inline bool encode_line(const typename Element::Word* x, QuantShape s,
                                                         std::uint64_t seed, std::size_t group,
                                                         std::uint8_t* body) {
  const QuantGroup g = quant_group(s, group);
  if (g.count != kQuantGroup) return quant_encode_group<Format, Element>(x, s, group, seed, body);
  alignas(64) float values[kQuantGroup];
  alignas(64) std::uint8_t row[kQuantGroup];
  QuantRange range{0, 0x7FFFFFFF, -0x7FFFFFFF - 1};
  for (int i = 0; i < kQuantGroup; ++i)
    values[i] = Element::to_float(x[g.start + static_cast<std::size_t>(i)]);
  for (int i = 0; i < kQuantGroup; ++i) {
    const u32 magnitude = float_bits(values[i]) & 0x7FFFFFFFu;
    range.most = magnitude > range.most ? magnitude : range.most;
  }
  if constexpr (Format::kScaleBytes == 4) {
    for (int i = 0; i < kQuantGroup; ++i) {
      const i32 place = ordered(float_bits(values[i]));
      range.low = place < range.low ? place : range.low;
      range.high = place > range.high ? place : range.high;
    }
  }
  if (!is_scalable(range.most)) return quant_encode_group<Format, Element>(x, s, group, seed, body);
  const QuantScale scale = Format::scale(range);
  write_scale(body, Format::kScaleBytes, group, scale);
  std::uint8_t* codes = body + s.groups() * Format::kScaleBytes;
  for (int i = 0; i < kQuantGroup; ++i)
    row[i] = static_cast<std::uint8_t>(Format::code(values[i], scale, seed, g.start + static_cast<u64>(i)));
  if constexpr (Format::kBits == 8) {
    std::memcpy(codes + g.start, row, kQuantGroup);
  } else {
    std::uint8_t* pairs = codes + pair_index(s, g, 0);
    for (int i = 0; i < kQuantGroup / 2; ++i)
      pairs[i] = static_cast<std::uint8_t>(row[2 * i] | row[2 * i + 1] << 4);
  }
  return false;
}

template <class Format, class Element>
TC_TARGET std::size_t encode(const void* page, QuantShape s, std::uint64_t seed, std::size_t begin,
                             std::size_t end, std::uint8_t* body) {
  const auto* x = static_cast<const typename Element::Word*>(page);
  std::size_t exceptions = 0;
  if (s.axis == Axis::channels) {
    for (std::size_t g = begin; g < end; ++g) exceptions += encode_line<Format, Element>(x, s, seed, g, body);
    return exceptions;
  }
  for (std::size_t g = begin; g < end;) {
    const std::size_t in_slab = s.channels - g % s.channels;
    std::size_t w = in_slab < end - g ? in_slab : end - g;
    if (w >= kTile) {
      w = kTile;
      exceptions += encode_tile<Format, Element>(x, s, seed, g, kTile, body);
    } else {
      exceptions += encode_tile<Format, Element>(x, s, seed, g, w, body);
    }
    g += w;
  }
  return exceptions;
}

// The groups g .. g + w - 1 of a tile; exceptions are left for quant_decode_group.
template <class Format, class Element>
TC_TARGET [[gnu::always_inline]] inline bool decode_tile(const std::uint8_t* body, QuantShape s,
                                                         std::size_t group, std::size_t w,
                                                         typename Element::Word* x) {
  const QuantGroup g = quant_group(s, group);
  alignas(64) float steps[kTile];
  alignas(64) float lowests[kTile] = {};
  bool exact = false;
  for (std::size_t c = 0; c < w; ++c) {
    const std::uint8_t* scale = body + (group + c) * Format::kScaleBytes;
    steps[c] = bf16_to_float(load<u16>(scale));
    if constexpr (Format::kScaleBytes == 4) lowests[c] = bf16_to_float(load<u16>(scale + 2));
    exact = exact || load<u16>(scale) == kExact;
  }
  const std::uint8_t* codes = body + s.groups() * Format::kScaleBytes;
  for (std::size_t i = 0; i < static_cast<std::size_t>(g.count); ++i) {
    const std::size_t index = g.start + i * g.stride;
    const std::uint8_t* from =
        Format::kBits == 8 ? codes + index : codes + pair_index(s, g, static_cast<int>(i & ~std::size_t{1}));
    const unsigned shift = Format::kBits == 8 ? 0 : 4 * (i % 2);
    for (std::size_t c = 0; c < w; ++c) {
      const u32 code = Format::kBits == 8 ? u32{from[c]} : (u32{from[c]} >> shift & 15u);
      x[index + c] = Element::from_float(Format::value(code, steps[c], lowests[c]));
    }
  }
  return exact;
}

template <class Format, class Element>
TC_TARGET [[gnu::always_inline]] inline bool decode_line(const std::uint8_t* body, QuantShape s,
                                                         std::size_t num_exceptions, std::size_t group,
                                                         typename Element::Word* x) {
  const QuantGroup g = quant_group(s, group);
  const std::uint8_t* scale = body + group * Format::kScaleBytes;
  if (g.count != kQuantGroup || load<u16>(scale) == kExact)
    return quant_decode_group<Format, Element>(body, s, num_exceptions, group, x);
  const float step = bf16_to_float(load<u16>(scale));
  const float lowest = Format::kScaleBytes == 4 ? bf16_to_float(load<u16>(scale + 2)) : 0.0f;
  const std::uint8_t* codes = body + s.groups() * Format::kScaleBytes;
  typename Element::Word* to = x + g.start;
  if constexpr (Format::kBits == 8) {
    for (int i = 0; i < kQuantGroup; ++i)
      to[i] = Element::from_float(Format::value(codes[g.start + static_cast<u64>(i)], step, lowest));
  } else {
    const std::uint8_t* pairs = codes + pair_index(s, g, 0);
    for (int i = 0; i < kQuantGroup; ++i)
      to[i] = Element::from_float(Format::value(u32{pairs[i / 2]} >> (4 * (i % 2)) & 15u, step, lowest));
  }
  return true;
}

template <class Format, class Element>
TC_TARGET bool decode(const std::uint8_t* body, QuantShape s, std::size_t num_exceptions, std::size_t begin,
                      std::size_t end, void* page) {
  auto* x = static_cast<typename Element::Word*>(page);
  bool good = true;
  if (s.axis == Axis::channels) {
    for (std::size_t g = begin; g < end; ++g)
      good = decode_line<Format, Element>(body, s, num_exceptions, g, x) && good;
    return good;
  }
  for (std::size_t g = begin; g < end;) {
    const std::size_t in_slab = s.channels - g % s.channels;
    std::size_t w = in_slab < end - g ? in_slab : end - g;
    if (w > kTile) w = kTile;
    const bool exact = w == kTile ? decode_tile<Format, Element>(body, s, g, kTile, x)
                                  : decode_tile<Format, Element>(body, s, g, w, x);
    for (std::size_t c = 0; exact && c < w; ++c)
      if (is_exception(body, Format::kScaleBytes, g + c))
        good = quant_decode_group<Format, Element>(body, s, num_exceptions, g + c, x) && good;
    g += w;
  }
  return good;
}

}  // namespace tiercache::codec::TC_PATH

#define TC_QUANT_ROW(format)                                              \
  {                                                                       \
      {TC_PATH::encode<format, Bf16>, TC_PATH::decode<format, Bf16>},     \
      {TC_PATH::encode<format, Half>, TC_PATH::decode<format, Half>},     \
      {TC_PATH::encode<format, Single>, TC_PATH::decode<format, Single>}, \
  }
#define TC_QUANT_TABLE {TC_QUANT_ROW(E4m3), TC_QUANT_ROW(Int8), TC_QUANT_ROW(Int4)}
