// The lossy codecs e4m3, int8 and int4, written once for host and device. A page is [outer, tokens,
// channels]; up to 64 elements along one axis share a scale.
//
// body := scales[groups], codes, exceptions[]
// scale := bf16 step                (e4m3, int8)   | bf16 step, bf16 lowest   (int4)
// codes: 8 bits where the element is; 4 bits in pairs along the axis of the groups, the first one low
// exception := u32 group, 64 elements as they are, sorted by group; such a group's step is the NaN 0x7FC0.
// A group is an exception when it has a value that is not finite, or values too small or large to scale.
#pragma once
#include "codec_float.hpp"

namespace tiercache::codec {

constexpr int kQuantGroup = 64;
constexpr u32 kExact = 0x7FC0;

enum class Axis : int { channels = 0, tokens = 1 };

struct QuantShape {
  u64 outer;
  u64 tokens;
  u64 channels;
  Axis axis;

  TC_HD u64 along() const { return axis == Axis::tokens ? tokens : channels; }
  TC_HD u64 blocks() const { return (along() + kQuantGroup - 1) / kQuantGroup; }
  TC_HD u64 groups() const { return outer * blocks() * (axis == Axis::tokens ? channels : tokens); }
  TC_HD u64 elements() const { return outer * tokens * channels; }
};

// Where a group's elements are: start, start + stride, ... `position` is the first one's place on the axis.
struct QuantGroup {
  u64 start;
  u64 stride;
  u64 line;  // (outer, token) of groups along channels; outer * channels + channel of groups along tokens
  u64 position;
  int count;
};

TC_HD QuantGroup quant_group(QuantShape s, u64 group) {
  QuantGroup g;
  u64 block;
  if (s.axis == Axis::tokens) {
    const u64 channel = group % s.channels;
    block = group / s.channels % s.blocks();
    const u64 outer = group / s.channels / s.blocks();
    g.start = (outer * s.tokens + block * kQuantGroup) * s.channels + channel;
    g.stride = s.channels;
    g.line = outer * s.channels + channel;
  } else {
    block = group % s.blocks();
    g.line = group / s.blocks();
    g.start = g.line * s.channels + block * kQuantGroup;
    g.stride = 1;
  }
  g.position = block * kQuantGroup;
  const u64 left = s.along() - g.position;
  g.count = left < kQuantGroup ? static_cast<int>(left) : kQuantGroup;
  return g;
}

// Where the byte of two 4-bit codes is, counted in codes' bytes; `place` is even.
TC_HD u64 pair_index(QuantShape s, QuantGroup g, int place) {
  const u64 pair = (g.position + static_cast<u64>(place)) / 2;
  if (s.axis == Axis::channels) return g.line * ((s.channels + 1) / 2) + pair;
  return (g.line / s.channels * ((s.tokens + 1) / 2) + pair) * s.channels + g.line % s.channels;
}

// Counter-based random bits: no state, the same for a (seed, index) wherever they are asked for.
TC_HD u32 random_bits(u64 seed, u64 index) {
  u32 h = static_cast<u32>(index) * 0x9E3779B9u ^ static_cast<u32>(seed);
  h = (h ^ h >> 16) * 0x21F0AAADu;
  h = (h ^ h >> 15) * 0x735A2D97u;
  h = (h ^ h >> 15) + (static_cast<u32>(seed >> 32) ^ static_cast<u32>(index >> 32));
  h = (h ^ h >> 16) * 0x21F0AAADu;
  h = (h ^ h >> 15) * 0x735A2D97u;
  return h ^ h >> 15;
}

// What a group is made of: the largest magnitude's bits, and the ends as integers in the order of the floats.
struct QuantRange {
  u32 most;
  i32 low;
  i32 high;
};

TC_HD i32 ordered(u32 bits) {
  const i32 value = static_cast<i32>(bits);
  return value ^ static_cast<i32>(static_cast<u32>(value >> 31) & 0x7FFFFFFFu);
}

TC_HD float unordered(i32 value) {
  return bits_float(static_cast<u32>(value ^ static_cast<i32>(static_cast<u32>(value >> 31) & 0x7FFFFFFFu)));
}

// How a group is scaled. `step` and `lowest` are bf16.
struct QuantScale {
  u16 step;
  u16 lowest;
  float inverse;
};

// Between 2^-80 and 2^120 no scale is denormal and no decoded value overflows.
TC_HD bool is_scalable(u32 most) { return most == 0 || (most >= 0x17800000u && most < 0x7B800000u); }

// The smallest step of which `levels` reach `largest`.
TC_HD QuantScale finest_scale(float largest, float levels) {
  const u16 step = bf16_above(divide(largest, levels));
  return {step, 0, step == 0 ? 0.0f : divide(1.0f, bf16_to_float(step))};
}

// The smallest such power of two. Decoded values are then exact, and encoding them again gives them back.
TC_HD QuantScale power_scale(float largest, float levels) {
  const u32 step = (float_bits(divide(largest, levels)) + 0x7FFFFFu) & 0x7F800000u;
  return {static_cast<u16>(step >> 16), 0, step == 0 ? 0.0f : divide(1.0f, bits_float(step))};
}

struct E4m3 {
  static constexpr int kBits = 8;
  static constexpr int kScaleBytes = 2;
  TC_HD static QuantScale scale(QuantRange range) { return power_scale(bits_float(range.most), 448.0f); }
  TC_HD static u32 code(float value, QuantScale scale, u64, u64) {
    return float_to_e4m3(multiply(value, scale.inverse));
  }
  TC_HD static float value(u32 code, float step, float) {
    return multiply(e4m3_to_float(static_cast<u8>(code)), step);
  }
};

struct Int8 {
  static constexpr int kBits = 8;
  static constexpr int kScaleBytes = 2;
  TC_HD static QuantScale scale(QuantRange range) { return power_scale(bits_float(range.most), 127.0f); }
  TC_HD static u32 code(float value, QuantScale scale, u64, u64) {
    const i32 nearest = static_cast<i32>(round_even(multiply(value, scale.inverse)));
    return static_cast<u32>(nearest > 127 ? 127 : (nearest < -127 ? -127 : nearest)) & 255u;
  }
  TC_HD static float value(u32 code, float step, float) {
    const i32 number = static_cast<i32>(code) - (code > 127u ? 256 : 0);
    return multiply(static_cast<float>(number), step);
  }
};

struct Int4 {
  static constexpr int kBits = 4;
  static constexpr int kScaleBytes = 4;
  TC_HD static QuantScale scale(QuantRange range) {
    const float low = unordered(range.low);
    const u32 bits = float_bits(low);
    // Towards minus infinity: negative values grow in magnitude, positive ones shrink.
    const u16 lowest = static_cast<u16>(low < 0.0f ? (bits + 0xFFFFu) >> 16 : bits >> 16);
    QuantScale made = finest_scale(add(unordered(range.high), -bf16_to_float(lowest)), 15.0f);
    made.lowest = lowest;
    return made;
  }
  TC_HD static u32 code(float value, QuantScale scale, u64 seed, u64 index) {
    const float above = multiply(add(value, -bf16_to_float(scale.lowest)), scale.inverse);
    const float draw =
        multiply(static_cast<float>(static_cast<i32>(random_bits(seed, index) >> 8)), 5.9604644775390625e-8f);
    const i32 level = static_cast<i32>(add(above, draw));
    return static_cast<u32>(level > 15 ? 15 : (level < 0 ? 0 : level));
  }
  TC_HD static float value(u32 code, float step, float lowest) {
    return add(lowest, multiply(static_cast<float>(static_cast<i32>(code)), step));
  }
};

// Bytes of the parts of a body.
template <class Format>
TC_HD u64 quant_code_bytes(QuantShape s) {
  if (Format::kBits == 8) return s.elements();
  return s.axis == Axis::tokens ? s.outer * ((s.tokens + 1) / 2) * s.channels
                                : s.outer * s.tokens * ((s.channels + 1) / 2);
}
template <class Format>
TC_HD u64 quant_fixed_bytes(QuantShape s) {
  return s.groups() * Format::kScaleBytes + quant_code_bytes<Format>(s);
}
template <class Element>
TC_HD u64 quant_exception_bytes() {
  return 4 + kQuantGroup * sizeof(typename Element::Word);
}

TC_HD void write_scale(u8* scales, int scale_bytes, u64 group, QuantScale scale) {
  write_u16(scales + group * static_cast<u64>(scale_bytes), scale.step);
  if (scale_bytes == 4) write_u16(scales + group * 4 + 2, scale.lowest);
}

TC_HD bool is_exception(const u8* body, int scale_bytes, u64 group) {
  const u8* scale = body + group * static_cast<u64>(scale_bytes);
  return (scale[0] | scale[1] << 8) == static_cast<int>(kExact);
}

// Writes a group's scale and codes; true when it is an exception, which quant_write_exception writes.
template <class Format, class Element>
TC_HD bool quant_encode_group(const typename Element::Word* x, QuantShape s, u64 group, u64 seed, u8* body) {
  const QuantGroup g = quant_group(s, group);
  QuantRange range{0, 0x7FFFFFFF, -0x7FFFFFFF - 1};
  float values[kQuantGroup];
  for (int i = 0; i < g.count; ++i) {
    values[i] = Element::to_float(x[g.start + static_cast<u64>(i) * g.stride]);
    const u32 bits = float_bits(values[i]);
    const i32 place = ordered(bits);
    range.most = (bits & 0x7FFFFFFFu) > range.most ? bits & 0x7FFFFFFFu : range.most;
    range.low = place < range.low ? place : range.low;
    range.high = place > range.high ? place : range.high;
  }
  const bool exact = !is_scalable(range.most);
  const QuantScale scale = exact ? QuantScale{kExact, 0, 0.0f} : Format::scale(range);
  write_scale(body, Format::kScaleBytes, group, scale);
  u8* codes = body + s.groups() * Format::kScaleBytes;
  u32 waiting = 0;
  for (int i = 0; i < g.count; ++i) {
    const u64 index = g.start + static_cast<u64>(i) * g.stride;
    const u32 code = exact ? 0u : Format::code(values[i], scale, seed, index);
    if (Format::kBits == 8) {
      codes[index] = static_cast<u8>(code);
    } else if (i % 2 == 0 && i + 1 < g.count) {
      waiting = code;
    } else {
      const u32 pair = i % 2 == 0 ? code : waiting | code << 4;
      codes[pair_index(s, g, i & ~1)] = static_cast<u8>(pair);
    }
  }
  return exact;
}

// Writes exception number `rank`: the group's elements as they are, zeros behind a short group.
template <class Format, class Element>
TC_HD void quant_write_exception(const typename Element::Word* x, QuantShape s, u64 group, u64 rank,
                                 u8* body) {
  const QuantGroup g = quant_group(s, group);
  u8* to = body + quant_fixed_bytes<Format>(s) + rank * quant_exception_bytes<Element>();
  write_u32(to, static_cast<u32>(group));
  to += 4;
  for (int i = 0; i < kQuantGroup; ++i) {
    const u32 word = i < g.count ? x[g.start + static_cast<u64>(i) * g.stride] : 0u;
    for (u64 b = 0; b < sizeof(typename Element::Word); ++b) *to++ = static_cast<u8>(word >> (8 * b));
  }
}

// The elements of a group's exception; null when there is none.
template <class Format, class Element>
TC_HD const u8* quant_find_exception(const u8* body, QuantShape s, u64 num_exceptions, u64 group) {
  const u8* first = body + quant_fixed_bytes<Format>(s);
  u64 low = 0;
  u64 high = num_exceptions;
  while (low < high) {
    const u64 middle = (low + high) / 2;
    const u64 found = read_u32(first + middle * quant_exception_bytes<Element>());
    if (found == group) return first + middle * quant_exception_bytes<Element>() + 4;
    if (found < group)
      low = middle + 1;
    else
      high = middle;
  }
  return nullptr;
}

// Fills a group's elements; false when it is an exception that the body does not have.
template <class Format, class Element>
TC_HD bool quant_decode_group(const u8* body, QuantShape s, u64 num_exceptions, u64 group,
                              typename Element::Word* x) {
  using Word = typename Element::Word;
  const QuantGroup g = quant_group(s, group);
  const u8* scale = body + group * Format::kScaleBytes;
  const u8* codes = body + s.groups() * Format::kScaleBytes;
  if (is_exception(body, Format::kScaleBytes, group)) {
    const u8* from = quant_find_exception<Format, Element>(body, s, num_exceptions, group);
    for (int i = 0; i < g.count; ++i) {
      u32 word = 0;
      for (u64 b = 0; from != nullptr && b < sizeof(Word); ++b)
        word |= static_cast<u32>(from[static_cast<u64>(i) * sizeof(Word) + b]) << (8 * b);
      x[g.start + static_cast<u64>(i) * g.stride] = static_cast<Word>(word);
    }
    return from != nullptr;
  }
  const float step = bf16_to_float(static_cast<u16>(scale[0] | scale[1] << 8));
  const float lowest =
      Format::kScaleBytes == 4 ? bf16_to_float(static_cast<u16>(scale[2] | scale[3] << 8)) : 0.0f;
  for (int i = 0; i < g.count; ++i) {
    const u64 index = g.start + static_cast<u64>(i) * g.stride;
    const u32 code =
        Format::kBits == 8 ? codes[index] : codes[pair_index(s, g, i & ~1)] >> (4 * (i % 2)) & 15u;
    x[index] = Element::from_float(Format::value(code, step, lowest));
  }
  return true;
}

}  // namespace tiercache::codec
